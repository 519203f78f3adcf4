"""Walking a table's index in bounded slices of whole buckets, so that a shard stays responsive between them."""

from __future__ import annotations

import numpy as np

from embedding_server.index import Index

ENTRIES_PER_SLICE = 65_536  # scanned a call; at 2 M freezes a second a slice stays under the 50 ms of an Advance


def slice_end(index: Index, first: int, budget: int) -> int:
    """The first bucket not to scan: as many whole buckets as hold about `budget` entries, at least one."""
    ends = np.cumsum(index.counts[first:])
    return min(index.num_buckets, first + max(1, int(np.searchsorted(ends, budget, side="right"))))
