"""Frozen row locations, and numba kernels that follow them into segments.

A location is the uint32 that a table's index keeps for a row. DO NOT CHANGE:

    bit 31       1: frozen (the rest is as below); 0: hot (the rest is a slot of the hot rows)
    bits 30..23  segment slot, 0 to 255
    bits 22..0   position of the row in that segment, 0 to 2^23 - 2

Segments live at changing places (a buffer while they grow, a map of their file later), so kernels get int64[256] tables
of base addresses, one entry a segment slot. An address is the int64 value of a pointer; nothing here checks bounds.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import pointer

FROZEN = 1 << 31
SLOT_SHIFT = 23
MAX_SLOTS = 256
MAX_SEGMENT_ROWS = (1 << SLOT_SHIFT) - 1
#: No segment has this position; the index uses it for a frozen row that needs no storage (index.INITIAL)
NO_SEGMENT = np.uint32(0xFFFFFFFF)


@njit(inline="always")
def slot_of(location: np.uint32) -> np.int64:
    """The segment slot of a frozen location."""
    return (np.int64(location) >> 23) & 255


@njit(inline="always")
def position_of(location: np.uint32) -> np.int64:
    """The position of a frozen location in its segment."""
    return np.int64(location) & 0x7FFFFF


def locations_of(slot: int, start: int, count: int) -> np.ndarray:
    """uint32[count]: positions start to start+count of a segment slot."""
    first = FROZEN | slot << SLOT_SHIFT | start
    return np.arange(first, first + count, dtype=np.uint32)


@njit(nogil=True, cache=True)
def sorted_buckets(row_ids: np.ndarray, num_buckets: int, out: np.ndarray) -> bool:
    """out int32[n] = bucket of each of row_ids int64[n]; True if they never fall."""
    last = np.int64(0)
    for i in range(row_ids.shape[0]):
        bucket = bucket_of(hash_row_id(row_ids[i]), np.uint64(num_buckets))
        out[i] = bucket
        if bucket < last:
            return False
        last = bucket
    return True


@njit(nogil=True, cache=True)
def first_misplaced(row_ids: np.ndarray, bucket_offsets: np.ndarray, num_buckets: int) -> np.int64:
    """First position whose row_id is not in the bucket that bucket_offsets [num_buckets+1] says, or -1."""
    for bucket in range(num_buckets):
        for i in range(bucket_offsets[bucket], bucket_offsets[bucket + 1]):
            if bucket_of(hash_row_id(row_ids[i]), np.uint64(num_buckets)) != bucket:
                return np.int64(i)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def addresses_of(locations: np.ndarray, bases: np.ndarray, item_bytes: np.ndarray, out: np.ndarray) -> None:
    """out int64[n] = address of item `position`, each of item_bytes[slot], in the array at bases[slot]."""
    for i in range(locations.shape[0]):
        slot = slot_of(locations[i])
        out[i] = bases[slot] + position_of(locations[i]) * item_bytes[slot]


@njit(nogil=True, cache=True)
def gather_by_slot(locations: np.ndarray, of_slot: np.ndarray, out: np.ndarray) -> None:
    """out uint8[n] = of_slot[slot] of each location."""
    for i in range(locations.shape[0]):
        out[i] = of_slot[slot_of(locations[i])]


@njit(nogil=True, cache=True)
def gather_bytes(locations: np.ndarray, bases: np.ndarray, out: np.ndarray) -> None:
    """out uint8[n] = the byte of each location in the uint8 arrays at bases."""
    for i in range(locations.shape[0]):
        address = bases[slot_of(locations[i])] + position_of(locations[i])
        out[i] = carray(pointer(address), (1,), np.uint8)[0]


@njit(nogil=True, cache=True)
def gather_row_ids(locations: np.ndarray, bases: np.ndarray, out: np.ndarray) -> None:
    """out int64[n] = the row_id of each location in the int64 arrays at bases."""
    for i in range(locations.shape[0]):
        address = bases[slot_of(locations[i])] + position_of(locations[i]) * 8
        out[i] = carray(pointer(address), (1,), np.int64)[0]


@njit(nogil=True, cache=True)
def gather_rows(locations: np.ndarray, bases: np.ndarray, out: np.ndarray) -> None:
    """out uint8[n, row_bytes] = the encoded row of each location in the arrays at bases."""
    row_bytes = out.shape[1]
    for i in range(locations.shape[0]):
        address = bases[slot_of(locations[i])] + position_of(locations[i]) * row_bytes
        row = carray(pointer(address), (row_bytes,), np.uint8)
        for j in range(row_bytes):
            out[i, j] = row[j]


@njit(nogil=True, cache=True)
def count_slots(locations: np.ndarray, counts: np.ndarray) -> None:
    """counts int64[256] += locations in each segment slot; NO_SEGMENT is left out."""
    for i in range(locations.shape[0]):
        if locations[i] != NO_SEGMENT:
            counts[slot_of(locations[i])] += 1


@njit(nogil=True, cache=True)
def next_locations(slots: np.ndarray, offsets: np.ndarray, cursor: np.ndarray, out: np.ndarray) -> np.int64:
    """The next locations of several segments in order of bucket, then segment, then position.

    slots int64[V]; offsets int64[V, B+1] (bucket offsets of each); cursor int64[3] (bucket, index into slots, rows of
    that bucket already given), advanced here; out uint32[k]. Returns how many were written; below k only at the end.
    """
    num_segments, num_buckets = offsets.shape[0], offsets.shape[1] - 1
    bucket, v, given = cursor[0], cursor[1], cursor[2]
    n = np.int64(0)
    while bucket < num_buckets and n < out.shape[0]:
        position = offsets[v, bucket] + given
        take = min(offsets[v, bucket + 1] - position, out.shape[0] - n)
        first = (np.int64(1) << 31) | (slots[v] << 23) | position
        for i in range(take):
            out[n + i] = first + i
        n += take
        given += take
        if position + take == offsets[v, bucket + 1]:
            given = 0
            v += 1
            if v == num_segments:
                v = 0
                bucket += 1
    cursor[0], cursor[1], cursor[2] = bucket, v, given
    return n
