"""TablePass: work over all rows of some tables, done in bounded slices between two steps (an Advance).

A pass goes table by table and bucket by bucket, so that a shard stays responsive; the caller repeats until it is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from embedding_server import compaction
from embedding_server.failpoints import failpoint
from embedding_server.index_walk import ENTRIES_PER_SLICE, slice_end
from embedding_server.store import Moves

if TYPE_CHECKING:
    from embedding_server.table import Table

_SCANNED_PER_MOVE = 8  # looking at an entry costs an eighth of moving a row, or less


class TablePass(ABC):
    """One pass at one step. `advance` does a slice.

    key: what makes a repeated call one of the same pass.
    """

    def __init__(self, key: tuple[object, ...], tables: Iterable[Table], step: int) -> None:
        self.key = key
        self.step = step
        self._waiting = list(tables)
        self._table: Table | None = None
        self._bucket = 0

    def begin(self, table: Table) -> None:
        """Called before the first slice of a table."""
        table.move_origin_of_heat(self.step)

    def slice_entries(self, table: Table) -> int:
        """Entries that a call may handle of this table; fewer than ENTRIES_PER_SLICE if each is more work."""
        return ENTRIES_PER_SLICE

    @abstractmethod
    def handle(self, table: Table, first: int, last: int) -> Moves:
        """Does buckets [first, last) of a table."""

    def end(self, table: Table, *, finished: bool) -> None:
        """Called after the last slice of a table, or when the pass ends early, before it."""
        compaction.begin(table)
        table.record_memory()

    def advance(self) -> tuple[dict[str, Moves], bool]:
        """Moves some ENTRIES_PER_SLICE rows, or looks at eight times as many. (moves of this slice, all is done)."""
        moves: dict[str, Moves] = {}
        budget = ENTRIES_PER_SLICE
        while budget > 0:
            if self._table is None and not self._next_table():
                return moves, True
            table = self._table
            assert table is not None
            share = self.slice_entries(table) / ENTRIES_PER_SLICE
            first, last = self._bucket, slice_end(table.index, self._bucket, int(budget * share))
            scanned = table.index.count_in(first, last) / share
            done = self.handle(table, first, last)
            moved = done.frozen + done.thawed + done.unfreezable + done.forgotten
            budget -= 1 + moved + int(scanned if share < 1.0 else scanned / _SCANNED_PER_MOVE)
            moves[table.spec.name] = moves.get(table.spec.name, Moves()) + done
            self._bucket = last
            failpoint("reselection.slice")
            if last == table.index.num_buckets:
                self._end_table(finished=True)
        return moves, self._table is None and not self._waiting

    def abandon(self) -> None:
        """Ends the pass where it stands, leaving every table whole: a new epoch has begun."""
        if self._table is not None:
            self._end_table(finished=False)
        self._waiting.clear()

    def _next_table(self) -> bool:
        if not self._waiting:
            return False
        failpoint("reselection.table")
        self._table, self._bucket = self._waiting.pop(0), 0
        self.begin(self._table)
        return True

    def _end_table(self, *, finished: bool) -> None:
        assert self._table is not None
        self.end(self._table, finished=finished)
        self._table = None
