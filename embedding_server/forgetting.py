"""A row is forgotten: its index entry goes, and its slot or its place in a segment with it. It comes back as a new row.

Two occasions, never for rows of the control group:

    compact                 at a re-selection, idle rows with fewer than forget_below visits
    epoch_end forget_rare   at the end of a data pass, all rows with fewer than forget_below visits, hot or frozen

Under policy compact an idle row that does not freeze is forgotten, so frozen rows have enough visits, except those that
a limit of bytes froze before they were idle. They keep no last_step; they are forgotten once their heat shows that
they have been idle: it is less than that of one visit idle_steps ago.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import heat
from embedding_server.index import FROZEN_BIT, INITIAL, Entries
from embedding_server.store import Moves
from embedding_server.table_pass import TablePass

if TYPE_CHECKING:
    from embedding_server.table import Table


def forget(table: Table, entries: Entries) -> int:
    """Returns how many. Invalidates the entry addresses of their buckets."""
    n = entries.row_ids.shape[0]
    if not n:
        return 0
    is_frozen = (entries.locations & FROZEN_BIT) != 0
    let_go(table, entries.locations[~is_frozen].astype(np.int32), entries.locations[is_frozen])
    table.index.remove(entries.row_ids, entries.addresses)
    table.moves_forgotten += n
    return n


def let_go(table: Table, slots: np.ndarray, frozen: np.ndarray) -> None:
    """Gives up hot slots, int32[n], and places of frozen rows, uint32[m], whose index entries go."""
    if slots.shape[0]:
        table.slots.give_back(slots)
        table.generation += 1
    table.segments.mark_dead(frozen[frozen != INITIAL])
    table.rows_frozen -= frozen.shape[0]


def visits_of(table: Table, entries: Entries) -> np.ndarray:
    """uint8[n]: visits of rows, hot or frozen, while they were hot; 0 for a frozen row that never was."""
    visits = np.zeros(entries.row_ids.shape[0], np.uint8)
    is_hot = (entries.locations & FROZEN_BIT) == 0
    visits[is_hot] = table.visits.array[entries.locations[is_hot], 0]
    stored = ~is_hot & (entries.locations != INITIAL)
    visits[stored] = table.segments.visits_of(entries.locations[stored])
    return visits


def idle_rare_frozen(table: Table, entries: Entries, step: int) -> tuple[np.ndarray, int]:
    """Of the frozen rows of a table of policy compact: positions of those to forget, and how many rare ones stay."""
    policy = table.spec.policy
    frozen = np.flatnonzero((entries.locations & FROZEN_BIT) != 0)
    rare = frozen[table.segments.visits_of(entries.locations[frozen]) < policy.forget_below]
    rare = rare[~table.is_control(entries.row_ids[rare])]
    idle_code = heat.now_code(step, policy.half_life_steps)
    idle_code -= policy.idle_steps / policy.half_life_steps * heat.CODES_PER_OCTAVE
    is_idle = entries.heat[rare] < idle_code
    return rare[is_idle], int((~is_idle).sum())


class EndOfDataPass(TablePass):
    """The pass at the end of a data pass over tables of `epoch_end: forget_rare`."""

    def __init__(self, tables: Mapping[str, Table], step: int) -> None:
        policies = {name: table.spec.policy for name, table in tables.items()}
        forgets = [n for n, policy in policies.items() if policy.epoch_end == "forget_rare" and policy.kind != "off"]
        super().__init__(("end of data pass", step), [tables[name] for name in forgets], step)

    def handle(self, table: Table, first: int, last: int) -> Moves:
        entries = table.index.scan(first, last)
        rare = visits_of(table, entries) < table.spec.policy.forget_below
        rare &= ~table.is_control(entries.row_ids)
        return Moves(forgotten=forget(table, entries.take(rare)))
