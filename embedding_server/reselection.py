"""Re-selection: the pass that decides which rows stay hot.

    idle      hot rows without a visit in idle_steps freeze
    compact   likewise, but those with fewer than forget_below visits are forgotten (forgetting.py)
    topk      rows below the frostline freeze, rows above it thaw, and idle rows on probation freeze (ranking.py)

Rows of the control group neither freeze nor are forgotten here. The segment that a pass fills is sorted by bucket
because the pass is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.forgetting import forget, idle_rare_frozen
from embedding_server.freezing import freeze, thaw
from embedding_server.index import Entries
from embedding_server.policy import idle_until
from embedding_server.ranking import entries_per_slice, split_at_frostline
from embedding_server.segments import SETTLED_IN_A_STEP_BYTES
from embedding_server.store import Frostline, Moves
from embedding_server.table_pass import TablePass

if TYPE_CHECKING:
    from embedding_server.table import Table

IDLE_POLICIES = ("idle", "compact")  # a row freezes when it is idle, and thaws at a visit


class Reselection(TablePass):
    """The pass over tables of policy idle and compact, and of policy topk with a frostline."""

    def __init__(self, tables: Mapping[str, Table], step: int, frostlines: Mapping[str, Frostline]) -> None:
        key = ("re-selection", step, tuple(sorted(frostlines.items(), key=lambda item: item[0])))
        chosen = [t for n, t in tables.items() if t.spec.policy.kind in IDLE_POLICIES or n in frostlines]
        super().__init__(key, chosen, step)
        self._frostlines = dict(frostlines)
        self._ranked = self._ranked_before = self._rare_left = 0

    def begin(self, table: Table) -> None:
        super().begin(table)
        table.rows_unfreezable = 0
        if table.spec.name in self._frostlines:
            table.frostline = self._frostlines[table.spec.name]
        self._ranked = self._ranked_before = self._rare_left = 0
        table.catch_up()
        table.settle_segments(SETTLED_IN_A_STEP_BYTES)
        table.segments.open_builder(self.step)

    def slice_entries(self, table: Table) -> int:
        return entries_per_slice(table)

    def handle(self, table: Table, first: int, last: int) -> Moves:
        if table.spec.policy.kind == "topk":
            moves = self._split(table, table.index.scan(first, last))
        else:
            moves = self._retire(table, first, last)
        table.rows_unfreezable += moves.unfreezable
        return moves

    def end(self, table: Table, *, finished: bool) -> None:
        table.segments.seal()
        if finished:
            table.has_rare_frozen = self._rare_left > 0
            table.rows_ranked, table.rows_ranked_before = self._ranked, self._ranked_before
        super().end(table, finished=finished)

    def _retire(self, table: Table, first: int, last: int) -> Moves:
        """Idle rows freeze, or are forgotten."""
        policy = table.spec.policy
        last_step = table.last_step.array.reshape(-1)
        idle = table.index.scan_hot(first, last, last_step, until=idle_until(policy, self.step))
        idle = idle.take(~table.is_control(idle.row_ids))
        if policy.kind == "idle":
            frozen, unfreezable = self._freeze(table, idle)
            table.moves_frozen_idle += frozen
            return Moves(frozen, 0, unfreezable)
        is_rare = table.visits.array[idle.locations, 0] < policy.forget_below
        frozen, unfreezable = self._freeze(table, idle.take(~is_rare))
        table.moves_frozen_idle += frozen
        forgotten = forget(table, idle.take(is_rare))
        if table.has_rare_frozen:
            entries = table.index.scan(first, last)
            at, left = idle_rare_frozen(table, entries, self.step)
            self._rare_left += left
            forgotten += forget(table, entries.take(at))
        return Moves(frozen, 0, unfreezable, forgotten)

    def _split(self, table: Table, entries: Entries) -> Moves:
        """Rows move to their side of the frostline; idle ones on probation freeze."""
        split = split_at_frostline(table, entries, self.step)
        # all at once, in bucket order: a segment takes buckets only as they rise
        frozen, unfreezable = self._freeze(table, entries.take(np.sort(np.concatenate([split.freezes, split.idle]))))
        idle = table.index.locate(entries.row_ids[split.idle])[3] if frozen else 0
        warm = entries.take(split.thaws)
        thawed = 0
        if split.thaws.shape[0]:
            thawed = thaw(table, warm.addresses, warm.locations, warm.row_ids, self.step).shape[0]
        table.moves_frozen_idle += idle
        table.moves_frozen_rank += frozen - idle
        table.moves_thawed_rank += thawed
        self._ranked += split.rows_kept + thawed
        self._ranked_before += split.rows_kept
        return Moves(frozen, thawed, unfreezable)

    def _freeze(self, table: Table, entries: Entries) -> tuple[int, int]:
        return freeze(table, entries, self.step) if entries.row_ids.shape[0] else (0, 0)
