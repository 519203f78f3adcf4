"""Admission: an ID gets a row of its own at its min_count-th visit; until then it reads the table's default row.

Visits of IDs without a row are counted exactly, in an index of their own: 18.8 bytes an ID. A count-min sketch of three
rows takes 15 bytes an ID at 1% early admissions just when it is full, and twice that after it was widened (a sketch
cannot be rehashed, and copying its cells keeps their noise): no gain for an answer that is only nearly right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server.hot_limit import note_limit, take_slots
from embedding_server.index import INITIAL, Index
from embedding_server.ranking import enters_hot

if TYPE_CHECKING:
    from embedding_server.table import Table

NUM_WAITING_BUCKETS = 64
_BYTES_PER_ID = 19
_MAX_HALVINGS = 32
_PURGE_ABOVE = 0.5  # share of admitted IDs from which the index is built anew without them
_WAITING_SHARE = 16  # IDs below min_count take at most 1/16 of the memory limit, then their counts are halved
_ENTRY_COST = 22  # bytes of index that a new row costs at the lowest load, 0.7


class VisitCounts:
    """Visits of IDs that have no row yet. The index's location field holds the count. Not thread safe."""

    def __init__(self) -> None:
        self._index = Index(NUM_WAITING_BUCKETS)
        self._admitted = 0

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    def __len__(self) -> int:
        return len(self._index) - self._admitted

    def visit(self, row_ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Counts one visit where counted[i], row_ids distinct, and returns the counts after it, uint32[n]."""
        entries, counts, missing, _ = self._index.locate(row_ids)
        self._admitted -= int(((entries != 0) & (counts == 0) & counted).sum())  # it lost its row and starts again
        if missing:
            absent = row_ids[(entries == 0) & counted]
            self._index.insert(absent, np.zeros(absent.shape[0], np.uint32))
            entries, counts, _, _ = self._index.locate(row_ids)
        counts = counts + counted
        known = entries != 0
        self._index.set_locations(entries[known], counts[known].astype(np.uint32))
        return counts

    def fit(self, limit_bytes: int, arriving: int) -> None:
        """Halves all counts, and forgets those that reach zero, until `arriving` more IDs fit limit_bytes.

        So a stream of IDs that come once cannot fill the memory, and IDs that come again are counted on.
        """
        for _ in range(_MAX_HALVINGS):
            if not self.must_halve(limit_bytes, arriving):
                return
            entries = self._index.scan(0, NUM_WAITING_BUCKETS)
            halved = entries.locations // 2
            self._index, self._admitted = Index(NUM_WAITING_BUCKETS), 0
            self._index.insert(entries.row_ids[halved > 0], halved[halved > 0])

    def must_halve(self, limit_bytes: int, arriving: int) -> bool:
        """`fit` would change counts."""
        return bool(len(self)) and (len(self._index) + arriving) * _BYTES_PER_ID > limit_bytes

    def counts_of(self, row_ids: np.ndarray) -> np.ndarray:
        """uint32[n]: visits so far, 0 for IDs that have a row."""
        return self._index.locate(row_ids)[1]

    def scan(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """row_ids int64[n] and counts uint32[n] of one of NUM_WAITING_BUCKETS buckets, without IDs that have a row."""
        entries = self._index.scan(bucket, bucket + 1)
        waiting = entries.locations != 0
        return entries.row_ids[waiting], entries.locations[waiting]

    def restore(self, row_ids: np.ndarray, counts: np.ndarray) -> bool:
        """Adds IDs of a cut; False if one of them is here already."""
        return self._index.insert(row_ids, counts)[2] == row_ids.shape[0]

    def forget(self, row_ids: np.ndarray) -> None:
        """These IDs have a row now."""
        entries, counts, _, _ = self._index.locate(row_ids)
        known = entries[(entries != 0) & (counts != 0)]
        self._index.set_locations(known, np.zeros(known.shape[0], np.uint32))
        self._admitted += known.shape[0]
        if self._admitted > len(self._index) * _PURGE_ABOVE:
            self._purge()

    def erase(self, row_ids: np.ndarray) -> int:
        """Drops every trace of these IDs, distinct; returns how many were waiting."""
        entries, counts, _, _ = self._index.locate(row_ids)
        waiting = int(np.count_nonzero(counts))
        self._admitted -= int(np.count_nonzero(entries)) - waiting
        self._index.take_out(row_ids)
        return waiting

    def _purge(self) -> None:
        entries = self._index.scan(0, NUM_WAITING_BUCKETS)
        waiting = entries.locations != 0
        self._index, self._admitted = Index(NUM_WAITING_BUCKETS), 0
        self._index.insert(entries.row_ids[waiting], entries.locations[waiting])


def admit(table: Table, row_ids: np.ndarray, first_visit: np.ndarray, step: int) -> None:
    """Gives a row to each ID that has earned one; the others go on reading the default row.

    row_ids int64[n] have none and are distinct; first_visit bool[n]: no earlier Pull of the step named it.
    """
    if table.waiting is not None:
        limit = table.budget.limit_bytes // _WAITING_SHARE
        if table.cut is not None:
            table.cut.preserve_waiting(row_ids, halves=table.waiting.must_halve(limit, row_ids.shape[0]))
        table.waiting.fit(limit, row_ids.shape[0])
        row_ids = row_ids[table.waiting.visit(row_ids, first_visit) >= table.spec.policy.min_count]
    above = enters_hot(table, row_ids, step)
    slots = take_slots(table, int(above.sum()), step, entry_bytes=_ENTRY_COST)
    if slots.shape[0] < above.sum():
        dropped = np.flatnonzero(above)[slots.shape[0] :]
        row_ids, above = np.delete(row_ids, dropped), np.delete(above, dropped)
    _insert_hot(table, row_ids[above], slots, step)
    below = _insert_initial(table, row_ids[~above], step)
    if table.waiting is not None:
        table.waiting.forget(np.concatenate([row_ids[above], below]))


def _insert_hot(table: Table, row_ids: np.ndarray, slots: np.ndarray, step: int) -> None:
    entries, _, _ = table.index.insert(row_ids, slots.astype(np.uint32))
    table.changes.note(slots)
    table.hot.initialise(slots, row_ids, table.spec)
    table.last_step.array[slots, 0] = step
    table.visits.array[slots, 0] = table.spec.policy.min_count
    table.bump_heat(entries, np.ones(entries.shape[0], np.bool_), step)


def _insert_initial(table: Table, row_ids: np.ndarray, step: int) -> np.ndarray:
    """Rows that start frozen, at their initial value, as far as the index may grow. Returns those that have one now."""
    room = max(0, table.budget.free_bytes) // _ENTRY_COST
    if room < row_ids.shape[0]:
        note_limit(table, row_ids.shape[0] - room)
        row_ids = row_ids[:room]
    if row_ids.shape[0]:
        entries, _, used = table.index.insert(row_ids, np.full(row_ids.shape[0], INITIAL))
        table.rows_frozen += used
        table.bump_heat(entries, np.ones(used, np.bool_), step)
    return row_ids
