"""Kernels of a cut: which rows need a pre-image, copies of rows, and the order in which a cut has them.

A training Pull during a cut first copies the hot rows that it names, so its time counts. A Pull of 22,000 rows x 64, of
a table of 1 million, none of which has a pre-image yet, on a core that others kept busy: 7 to 10 ms with indices of
numpy and the table's own kernels, 5 to 6 ms with these, 2.2 ms without a cut. What is left are cache misses.
numba's cache knows the time stamp of this file only: after a change to index_entries.py, touch this file too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import boolean, carray, int32, int64, njit, types, uint16, uint32, void

from embedding_server.index_entries import FROZEN_BIT, ask_for, entries_at, probe
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.store import NUM_BUCKETS

#: Location of a row_id that was no row, in a log of pre-images; no slot is that high.
ABSENT = np.uint32(0x7FFFFFFF)
_AHEAD = 12  # as in index.py
_ROW_AHEAD = 8
_LINE = 64
_MOST = 1 << 40  # rows of an array: of no effect, for no bound is checked
_MOST_ASKED = 512  # bytes of a row; what follows comes by the hardware's own prefetch
_NUM_BUCKETS = np.uint64(NUM_BUCKETS)
_I64, _I64_IN = array(int64), view(int64)


@kernel(
    types.UniTuple(int64, 2)(
        _I64, _I64, _I64, _I64, _I64_IN, int64, _I64, array(uint32), array(uint16), array(int32)
    )
)  # fmt: skip
def survey(
    addresses, capacities, log_addresses, log_capacities, row_ids, first,
    out_row_ids, out_locations, out_heat, out_slots,
):  # fmt: skip
    """Those of row_ids in buckets from `first` on without an entry in the log, with what the table's index says.

    Returns (how many, how many of them are hot); out_slots has the slots of the hot ones, in order.
    """
    n = 0
    hot = 0
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        if i + _AHEAD < row_ids.shape[0]:
            ask_for(log_addresses, log_capacities, row_ids[i + _AHEAD], num_buckets)
            ask_for(addresses, capacities, row_ids[i + _AHEAD], num_buckets)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, num_buckets)
        if b < first:
            continue
        if log_capacities[b] > 0:
            _, is_logged = probe(log_addresses[b], log_capacities[b], h, row_ids[i])
            if is_logged:
                continue
        out_row_ids[n], out_locations[n], out_heat[n] = row_ids[i], ABSENT, 0
        if capacities[b] > 0:
            position, is_there = probe(addresses[b], capacities[b], h, row_ids[i])
            if is_there:
                entry = entries_at(addresses[b], capacities[b])[position]
                out_locations[n], out_heat[n] = entry.location, entry.heat
                if not entry.location & FROZEN_BIT:
                    out_slots[hot] = np.int32(entry.location)
                    hot += 1
        n += 1
    return n, hot


@njit
def _copy_wide(source, target, size, slots, positions):
    words = size // 4
    for i in range(slots.shape[0]):
        if i + _ROW_AHEAD < slots.shape[0]:
            ahead = source + size * np.int64(slots[i + _ROW_AHEAD])
            for offset in range(0, min(size, _MOST_ASKED), _LINE):
                prefetch(ahead + offset)
        row = carray(pointer(source + size * np.int64(slots[i])), words, np.uint32)
        out = carray(pointer(target + size * np.int64(positions[i])), words, np.uint32)
        for j in range(words):
            out[j] = row[j]


@njit
def _copy_values(source, target, slots, positions):
    """Of arrays with one value a row."""
    for i in range(slots.shape[0]):
        target[positions[i]] = source[slots[i]]


@kernel(void(view(int64, 2), view(int32), view(int32)))
def copy_rows(columns, slots, positions):
    """Row slots[i] of every array to row positions[i] of another.

    columns int64[K, 3]: of each the addresses of source and target, and the bytes of a row: 1, or a multiple of 4.
    """
    for k in range(columns.shape[0]):
        source, target, size = columns[k, 0], columns[k, 1], columns[k, 2]
        if size == 1:
            bytes_in, bytes_out = carray(pointer(source), _MOST, np.uint8), carray(pointer(target), _MOST, np.uint8)
            _copy_values(bytes_in, bytes_out, slots, positions)
        elif size == 4:
            words_in, words_out = carray(pointer(source), _MOST, np.uint32), carray(pointer(target), _MOST, np.uint32)
            _copy_values(words_in, words_out, slots, positions)
        else:
            _copy_wide(source, target, size, slots, positions)


@kernel(void(_I64_IN, view(boolean), int64, int64, _I64, _I64))
def order_rows(row_ids, is_written, first, last, out_order, out_buckets):
    """out_order: positions of row_ids, all in buckets [first, last), by bucket, in each those that are written first,
    and else as they came; out_buckets: the buckets of row_ids[out_order]. A sort takes 10 times as long."""
    ends = np.zeros(2 * (last - first) + 1, np.int64)
    keys = np.empty(row_ids.shape[0], np.int32)
    for i in range(row_ids.shape[0]):
        bucket = bucket_of(hash_row_id(row_ids[i]), _NUM_BUCKETS) - first
        keys[i] = np.int32(2 * bucket if is_written[i] else 2 * bucket + 1)
        ends[keys[i] + 1] += 1
    for key in range(ends.shape[0] - 1):
        ends[key + 1] += ends[key]
    for i in range(row_ids.shape[0]):
        at = ends[keys[i]]
        ends[keys[i]] += 1
        out_order[at], out_buckets[at] = i, first + keys[i] // 2


def columns_of(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> np.ndarray:
    """int64[K, 3] for copy_rows: contiguous arrays [n, ...] and [m, ...], pair by pair with as many bytes a row."""
    columns = np.zeros((len(sources), 3), np.int64)
    for k, (source, target) in enumerate(zip(sources, targets, strict=True)):
        columns[k] = source.ctypes.data, target.ctypes.data, source.itemsize * math.prod(source.shape[1:])
    return columns
