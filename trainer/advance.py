"""The Advance between two steps, seen from the trainer: heat of all shards, one frostline per table, then the moves."""

from __future__ import annotations

from collections.abc import Iterable

from embedding_server.policy import frostline_at
from embedding_server.spec import TableSpec
from embedding_server.store import EmbeddingStore, Identity, Moves


def reselect(store: EmbeddingStore, who: Identity, step: int) -> dict[str, Moves]:
    """Freezes, thaws and forgets rows of every table as its policy says; what moved, by table.

    One worker calls it, once every worker's push of `step` is acknowledged and before any pulls the next (NotReady).
    """
    specs = store.table_specs()
    frostlines = {
        table: frostline_at(specs[table].policy, histogram, step)
        for table, histogram in store.heat_histograms(who, step).items()
    }
    return store.reselect(who, step, frostlines)


def usual_steps_between(specs: Iterable[TableSpec]) -> int | None:
    """Steps between re-selections of a loop that names none: half the shortest idle_steps. None: nothing freezes."""
    idle_steps = [spec.policy.idle_steps for spec in specs if spec.policy.kind != "off"]
    return max(1, min(idle_steps) // 2) if idle_steps else None
