"""Admission: an ID gets a row of its own at its min_count-th visit; until then it reads the table's default row.

Visits of IDs without a row are counted exactly, in an index of their own: 18.8 bytes an ID. A count-min sketch of three
rows takes 15 bytes an ID at 1% early admissions just when it is full, and twice that after it was widened (a sketch
cannot be rehashed, and copying its cells keeps their noise): no gain for an answer that is only nearly right.
"""

from __future__ import annotations

import numpy as np

from embedding_server.index import Index

_NUM_BUCKETS = 64
_BYTES_PER_ID = 19
_MAX_HALVINGS = 32
_PURGE_ABOVE = 0.5  # share of admitted IDs from which the index is built anew without them


class VisitCounts:
    """Visits of IDs that have no row yet. The index's location field holds the count. Not thread safe."""

    def __init__(self) -> None:
        self._index = Index(_NUM_BUCKETS)
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
            if not len(self) or (len(self._index) + arriving) * _BYTES_PER_ID <= limit_bytes:
                return
            entries = self._index.scan(0, _NUM_BUCKETS)
            halved = entries.locations // 2
            self._index, self._admitted = Index(_NUM_BUCKETS), 0
            self._index.insert(entries.row_ids[halved > 0], halved[halved > 0])

    def forget(self, row_ids: np.ndarray) -> None:
        """These IDs have a row now."""
        entries, counts, _, _ = self._index.locate(row_ids)
        known = entries[(entries != 0) & (counts != 0)]
        self._index.set_locations(known, np.zeros(known.shape[0], np.uint32))
        self._admitted += known.shape[0]
        if self._admitted > len(self._index) * _PURGE_ABOVE:
            self._purge()

    def _purge(self) -> None:
        entries = self._index.scan(0, _NUM_BUCKETS)
        waiting = entries.locations != 0
        self._index, self._admitted = Index(_NUM_BUCKETS), 0
        self._index.insert(entries.row_ids[waiting], entries.locations[waiting])
