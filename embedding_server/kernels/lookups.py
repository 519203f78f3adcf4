"""Kernels of look-ups: find rows wherever they are, then copy, expand or pool them, all tables of a call at once.

Shapes: N row_ids of the K tables of a call, row i of table k at starts[k] + i. A row is an address and its bits, in a
format of frozen.py: hot rows are rows of 32 or 16 bits like any other. Bits 0: zeros, at no address.

numba's cache knows the time stamp of this file only: after a change to frozen.py, wire.py or index_entries.py, touch
this file too.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, carray, float32, int64, njit, uint8, uint16, uint32, void

from embedding_server.index_entries import ask_for, entries_at, probe
from embedding_server.kernels.frozen import read_4bit, read_8bit, read_16bit, read_32bit, stored_bytes
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.locations import FROZEN, NO_SEGMENT
from embedding_server.kernels.tables import BUCKETS, CAPACITIES, DIM, LOG_SUMS, WEIGHT_BYTES, WEIGHTS
from embedding_server.kernels.wire import store
from embedding_server.store import FOUND, NUM_BUCKETS, TRAINABLE

#: what find_rows leaves to others, by table: rows of segments; rows that have their initial value; hot rows that lie in
#: no memory of this process or owe weight decay; row_ids without a row
NUM_STORED, NUM_INITIAL, NUM_AWAY, NUM_ABSENT, COUNTS = range(5)
_HOT, _FOUND = np.uint8(TRAINABLE | FOUND), np.uint8(FOUND)
_FROZEN_BIT = np.uint32(FROZEN)
_NUM_BUCKETS = np.uint64(NUM_BUCKETS)
_AHEAD, _ROWS_AHEAD, _PREFETCH_BYTES = 12, 8, 512
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_WIRES = (float32, uint16)
_ROWS = (view(int64), view(uint8), view(int64), view(int64))  # addresses, bits, starts, dims


@kernel(
    void(
        view(int64, 2), view(int64), view(int64), view(int64), view(int64), array(int64), array(uint8), array(uint8),
        array(uint32), array(int64, 2),
    )
)  # fmt: skip
def find_rows(
    directory, tables, id_addresses, starts, share, out_addresses, out_bits, out_flags, out_locations, out_counts
):
    """The rows of the tables whose numbers `share` holds; directory, tables and id_addresses as in tables.py.

    Hot rows that lie in memory as they are worth get address and bits; all others address 0, bits 0 and a location.
    Flags: TRAINABLE | FOUND of hot rows, FOUND of others that have a row, else 0.
    """
    for k in share:
        table = directory[tables[k]]
        row_ids = carray(pointer(id_addresses[k]), starts[k + 1] - starts[k], np.int64)
        buckets = carray(pointer(table[BUCKETS]), NUM_BUCKETS, np.int64)
        capacities = carray(pointer(table[CAPACITIES]), NUM_BUCKETS, np.int64)
        weights, row_bytes = table[WEIGHTS], table[WEIGHT_BYTES] * table[DIM]
        hot_bits = np.uint8(8 * table[WEIGHT_BYTES])
        is_near = weights != 0 and table[LOG_SUMS] == 0
        counts = out_counts[k]
        counts[:] = 0
        for i in range(row_ids.size):
            if i + _AHEAD < row_ids.size:
                ask_for(buckets, capacities, row_ids[i + _AHEAD], _NUM_BUCKETS)
            at = starts[k] + i
            out_addresses[at], out_bits[at], out_flags[at], out_locations[at] = 0, np.uint8(0), np.uint8(0), 0
            h = hash_row_id(row_ids[i])
            b = bucket_of(h, _NUM_BUCKETS)
            found = False
            if capacities[b] > 0:
                position, found = probe(buckets[b], capacities[b], h, row_ids[i])
            if not found:
                counts[NUM_ABSENT] += 1
                continue
            location = entries_at(buckets[b], capacities[b])[position].location
            out_locations[at] = location
            if location & _FROZEN_BIT:
                out_flags[at] = _FOUND
                counts[NUM_INITIAL if location == NO_SEGMENT else NUM_STORED] += 1
            else:
                out_flags[at] = _HOT
                if is_near:
                    out_addresses[at], out_bits[at] = weights + np.int64(location) * row_bytes, hot_bits
                else:
                    counts[NUM_AWAY] += 1


@njit(inline="always")
def _ask_for_row(addresses, bits, i, end, dim):
    """Prefetches what row i + _ROWS_AHEAD begins with, if that is below `end`. At address 0 nothing happens."""
    if i + _ROWS_AHEAD < end:
        size = min(stored_bytes(bits[i + _ROWS_AHEAD], dim), _PREFETCH_BYTES)
        for offset in range(0, size, 64):
            prefetch(addresses[i + _ROWS_AHEAD] + offset)


@njit
def _read(address, bits, dim, target, mode):
    if bits == 32:
        read_32bit(address, dim, target, mode)
    elif bits == 4:
        read_4bit(address, dim, target, mode)
    elif bits == 8:
        read_8bit(address, dim, target, mode)
    elif bits == 16:
        read_16bit(address, dim, target, mode)
    else:
        for d in range(dim):
            store(target, d, _ZERO, mode)


@kernel(*(void(*_ROWS, view(int64), view(int64), array(wire), int64) for wire in _WIRES))
def copy_rows(addresses, bits, starts, dims, value_starts, share, out, mode):
    """out[value_starts[k] + i * D :][:D] = row i of table k in the wire dtype, for k in `share`."""
    for k in share:
        dim, at = dims[k], value_starts[k]
        for i in range(starts[k], starts[k + 1]):
            _ask_for_row(addresses, bits, i, starts[k + 1], dim)
            _read(addresses[i], bits[i], dim, out[at : at + dim], mode)
            at += dim


@kernel(*(void(*_ROWS, int64, view(int64), boolean, array(wire), int64) for wire in _WIRES))
def pool_rows(addresses, bits, starts, dims, k, lengths, is_mean, out, mode):
    """out[j * D :][:D] = the sum of the rows of bag j of table k, added in order in float32; or that by their number.

    lengths int64[B] add up to the table's rows.
    """
    dim, end = dims[k], starts[k + 1]
    total, row = np.empty(dim, np.float32), np.empty(dim, np.float32)
    i = starts[k]
    for j in range(lengths.size):
        total[:] = _ZERO
        for _ in range(lengths[j]):
            _ask_for_row(addresses, bits, i, end, dim)
            if bits[i] != 0:
                _read(addresses[i], bits[i], dim, row, 0)
                for d in range(dim):
                    total[d] += row[d]
            i += 1
        target = out[j * dim : (j + 1) * dim]
        count = np.float32(lengths[j]) if is_mean and lengths[j] > 0 else _ONE
        for d in range(dim):
            store(target, d, total[d] / count, mode)


@kernel(void(view(uint8), view(int64), view(int64), array(int64)))
def stored_offsets(bits, starts, dims, out):
    """out int64[N+1]: where each row begins if they lie one after another as stored, and the end of the last."""
    at = 0
    for k in range(dims.size):
        for i in range(starts[k], starts[k + 1]):
            out[i] = at
            at += stored_bytes(bits[i], dims[k])
    out[bits.size] = at


@kernel(void(view(int64), view(int64), array(uint8)))
def copy_stored(addresses, offsets, out):
    """out[offsets[i] : offsets[i+1]] = the bytes at addresses[i]."""
    for i in range(addresses.size):
        ahead = i + _ROWS_AHEAD
        if ahead < addresses.size:
            for offset in range(0, min(offsets[ahead + 1] - offsets[ahead], _PREFETCH_BYTES), 64):
                prefetch(addresses[ahead] + offset)
        size = offsets[i + 1] - offsets[i]
        row = carray(pointer(addresses[i]), size, np.uint8)
        target = out[offsets[i] : offsets[i + 1]]
        for byte in range(size):
            target[byte] = row[byte]
