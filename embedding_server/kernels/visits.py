"""Kernels between index and rows: count visits, split a request by where its rows are, and sum workers' gradients.

Locations are as index.py says: uint32, bit 31 set when frozen, all ones for a row still at its initial value.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int32, int64, uint8, uint16, uint32, void

from embedding_server.index_entries import FROZEN_BIT
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, view
from embedding_server.kernels.wire import load

_ENTRIES, _LOCATIONS, _IDS = view(int64), view(uint32), view(int64)


@kernel(int64(_ENTRIES, _LOCATIONS, array(int32)))
def hot_slots(entries, locations, out_slots):
    """Slots of hot rows, -1 for every other; returns how many are not hot."""
    others = 0
    for i in range(entries.shape[0]):
        if entries[i] != 0 and not locations[i] & FROZEN_BIT:
            out_slots[i] = np.int32(locations[i])
        else:
            out_slots[i] = -1
            others += 1
    return others


@kernel(void(array(uint8), view(int32), int64))
def stamp_slots(stamps, slots, stamp):
    """stamps[slot] = stamp; slot -1 is skipped."""
    for i in range(slots.shape[0]):
        if slots[i] >= 0:
            stamps[slots[i]] = np.uint8(stamp)


@kernel(boolean(_IDS))
def has_duplicates(row_ids):
    """True if a row_id occurs twice: a set by open addressing that holds position + 1, at most half full."""
    size = 64
    while size < 2 * row_ids.shape[0]:
        size *= 2
    mask = np.uint64(size - 1)
    seen = np.zeros(size, np.int32)
    for i in range(row_ids.shape[0]):
        at = hash_row_id(row_ids[i]) >> np.uint64(16) & mask
        while seen[at] != 0:
            if row_ids[seen[at] - 1] == row_ids[i]:
                return True
            at = (at + np.uint64(1)) & mask
        seen[at] = np.int32(i + 1)
    return False


@kernel(*(void(view(t, 2), int64, view(int64), array(float32, 2)) for t in (float32, uint16)))
def add_by_inverse(values, mode, inverse, out):
    """out[inverse[i]] += values[i], in order; values [n, D] wire, out float32 [u, D]."""
    for i in range(values.shape[0]):
        source = values[i]
        target = out[inverse[i]]
        for d in range(out.shape[1]):
            target[d] += load(source, d, mode)


@kernel(int64(_IDS, view(boolean)))
def first_foreign(row_ids, owned):
    """First position whose bucket is not owned (bool[NUM_BUCKETS]), or -1."""
    for i in range(row_ids.shape[0]):
        if not owned[bucket_of(hash_row_id(row_ids[i]), np.uint64(owned.shape[0]))]:
            return i
    return -1


@kernel(void(_IDS, view(boolean), array(boolean)))
def in_buckets(row_ids, chosen, out):
    """out[i] = the bucket of row_ids[i] is chosen (bool[NUM_BUCKETS])."""
    for i in range(row_ids.shape[0]):
        out[i] = chosen[bucket_of(hash_row_id(row_ids[i]), np.uint64(chosen.shape[0]))]
