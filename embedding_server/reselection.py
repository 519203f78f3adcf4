"""Re-selection: the pass that freezes idle rows (policy idle) or splits rows at the frostline (policy topk).

Which rows rank above the frostline is ranking.py. The pass runs in bounded slices, bucket by bucket, so that a shard
stays responsive; the caller repeats until it is done. The segment that a pass fills is sorted by bucket because the
pass is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.freezing import freeze, thaw
from embedding_server.index import FROZEN_BIT, Entries
from embedding_server.index_walk import ENTRIES_PER_SLICE, slice_end
from embedding_server.policy import is_idle
from embedding_server.ranking import entries_per_slice, split_at_frostline
from embedding_server.store import Frostline, Moves

if TYPE_CHECKING:
    from embedding_server.table import Table


class Reselection:
    """One pass over the tables of a shard at one step. `advance` does a slice."""

    def __init__(self, tables: Mapping[str, Table], step: int, frostlines: Mapping[str, Frostline]) -> None:
        self.step = step
        self.frostlines = dict(frostlines)
        self._waiting = [t for t in tables.values() if t.spec.policy.kind == "idle" or t.spec.name in frostlines]
        self._table: Table | None = None
        self._bucket = 0

    def advance(self) -> tuple[dict[str, Moves], bool]:
        """Handles at most about ENTRIES_PER_SLICE entries. Returns what moved in this slice and whether all is done."""
        moves: dict[str, Moves] = {}
        budget = ENTRIES_PER_SLICE
        while budget > 0:
            if self._table is None and not self._next_table():
                return moves, True
            table = self._table
            assert table is not None
            share = entries_per_slice(table) / ENTRIES_PER_SLICE  # less than 1 if each entry is more work
            last = slice_end(table.index, self._bucket, int(budget * share))
            budget -= max(1, int(table.index.count_in(self._bucket, last) / share))
            done = _reselect_buckets(table, self._bucket, last, self.step)
            moves[table.spec.name] = moves.get(table.spec.name, Moves()) + done
            self._bucket = last
            if last == table.index.num_buckets:
                self._end_table()
        return moves, self._table is None and not self._waiting

    def abandon(self) -> None:
        """Ends the pass where it stands, leaving every table whole: a new epoch has begun."""
        if self._table is not None:
            self._end_table()
        self._waiting.clear()

    def _next_table(self) -> bool:
        if not self._waiting:
            return False
        table = self._table = self._waiting.pop(0)
        self._bucket = 0
        table.move_origin_of_heat(self.step)
        table.rows_unfreezable = 0
        if table.spec.name in self.frostlines:
            table.frostline = self.frostlines[table.spec.name]
        table.segments.open_builder(self.step)
        return True

    def _end_table(self) -> None:
        assert self._table is not None
        self._table.segments.seal()
        self._table.begin_compaction()
        self._table = None


def _reselect_buckets(table: Table, first: int, last: int, step: int) -> Moves:
    entries = table.index.scan(first, last)
    if table.spec.policy.kind == "idle":
        hot = np.flatnonzero((entries.locations & FROZEN_BIT) == 0)
        last_step = table.last_step.array[entries.locations[hot], 0]
        freezes, thaws = hot[is_idle(table.spec.policy, last_step, step)], np.empty(0, np.int64)
    else:
        split = split_at_frostline(table, entries, step)
        freezes, thaws = split.freezes, split.thaws
    frozen, unfreezable = freeze(table, _take(entries, freezes)) if freezes.shape[0] else (0, 0)
    table.rows_unfreezable += unfreezable
    thawed = 0
    if thaws.shape[0]:
        warm = _take(entries, thaws)
        thawed = thaw(table, warm.addresses, warm.locations, warm.row_ids, step)
    return Moves(frozen, thawed, unfreezable)


def _take(entries: Entries, at: np.ndarray) -> Entries:
    return Entries(entries.row_ids[at], entries.addresses[at], entries.locations[at], entries.heat[at])
