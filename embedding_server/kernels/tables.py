"""Kernels over all tables of a request at once: a request of 26 tables costs one call, not 26.

`directory` int64[T, COLUMNS] holds what they need of every table, as addresses and sizes; `tables` int64[K] says which
of them the request names. Request row i of table k is row starts[k] + i of the outputs; `addresses` int64[K] tells
where the row_ids of each table lie. Each call does the tables of the request whose numbers
`share` int64 holds, so that threads can share one: they meet in no table.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, carray, float32, float64, int32, int64, njit, uint8, uint16, void

from embedding_server.heat import bump
from embedding_server.index import ENTRY_BYTES, FROZEN_BIT, ask_for, entries_at, probe
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.wire import store
from embedding_server.store import FOUND, NUM_BUCKETS, TRAINABLE

BUCKETS, CAPACITIES, LAST_STEP, VISITS, WEIGHTS, DIM, COUNTS_VISITS, STATE, STATE_COLUMNS, KIND = range(10)
COLUMNS = 10
_AHEAD = 12
_ROW_AHEAD = 8
_LINE = 64
_BLOCK = 64  # rows
_HOT_FLAGS = np.uint8(TRAINABLE | FOUND)
_NUM_BUCKETS = np.uint64(NUM_BUCKETS)


@njit
def _find_block(buckets, capacities, row_ids, begin, end, out_slots, out_entries):
    """Slots of the hot rows of row_ids[begin:end], -1 for others, and their entries' addresses. Returns how many -1."""
    cold = 0
    for i in range(begin, end):
        if i + _AHEAD < row_ids.size:
            ask_for(buckets, capacities, row_ids[i + _AHEAD], _NUM_BUCKETS)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, _NUM_BUCKETS)
        slot = np.int64(-1)
        if capacities[b] > 0:
            position, found = probe(buckets[b], capacities[b], h, row_ids[i])
            if found:
                entry = buckets[b] + ENTRY_BYTES * position
                location = entries_at(entry, 1)[0].location
                if not location & FROZEN_BIT:
                    slot = np.int64(location)
                    out_entries[i - begin] = entry
        if slot < 0:
            cold += 1
        out_slots[i] = np.int32(slot)
    return cold


@njit
def _visit_block(table, slots, entries, row_ids, begin, step, now_code, log_table):
    """Marks the hot rows of a block as visited at `step`, unless they are already."""
    for i in range(entries.size):
        slot = np.int64(slots[begin + i])
        if slot < 0:
            continue
        last_step = carray(pointer(table[LAST_STEP] + 4 * slot), 1, np.int32)
        if last_step[0] < step:
            last_step[0] = step
            visits = carray(pointer(table[VISITS] + slot), 1, np.uint8)
            visits[0] = min(255, np.int64(visits[0]) + 1)
            entry = entries_at(entries[i], 1)
            entry[0].heat = bump(entry[0].heat, now_code, row_ids[begin + i], step, log_table)


@kernel(
    void(
        view(int64, 2), view(int64), view(int64), view(int64), view(int64),
        boolean, int64, view(float64), view(float32), array(int32), array(int64),
    )
)  # fmt: skip
def find_and_visit(
    directory, tables, addresses, starts, share, is_visit, step, now_codes, log_table, out_slots, out_cold
):
    """out_slots = slots of hot rows, -1 for every other; out_cold[k] = how many of table k are not hot.

    is_visit: marks hot rows as visited at `step`: last_step, visits and heat, once a step however often it is called.
    Rows are found in blocks, so that what a visit touches is on its way into the cache while the block is found.
    """
    entries = np.empty(_BLOCK, np.int64)
    for k in share:
        table = directory[tables[k]]
        visits = is_visit and table[COUNTS_VISITS] != 0
        row_ids = carray(pointer(addresses[k]), starts[k + 1] - starts[k], np.int64)
        buckets = carray(pointer(table[BUCKETS]), NUM_BUCKETS, np.int64)
        capacities = carray(pointer(table[CAPACITIES]), NUM_BUCKETS, np.int64)
        slots = out_slots[starts[k] : starts[k + 1]]
        cold = 0
        for begin in range(0, row_ids.size, _BLOCK):
            end = min(begin + _BLOCK, row_ids.size)
            cold += _find_block(buckets, capacities, row_ids, begin, end, slots, entries)
            if visits:
                for i in range(begin, end):
                    prefetch(table[LAST_STEP] + 4 * np.int64(max(0, slots[i])))
                    prefetch(table[VISITS] + np.int64(max(0, slots[i])))
                _visit_block(table, slots, entries[: end - begin], row_ids, begin, step, now_codes[k], log_table)
        out_cold[k] = cold


@kernel(void(view(int64, 2), view(int64), view(int64), view(int64), view(int32), array(int64), array(uint8)))
def place_hot(directory, tables, starts, share, slots, out_addresses, out_flags):
    """Addresses of hot rows and their flags; slot -1 is left out."""
    for k in share:
        table = directory[tables[k]]
        weights, row_bytes = table[WEIGHTS], 4 * table[DIM]
        for i in range(starts[k], starts[k + 1]):
            if slots[i] >= 0:
                out_addresses[i] = weights + np.int64(slots[i]) * row_bytes
                out_flags[i] = _HOT_FLAGS


@kernel(
    *(
        void(
            view(int64, 2), view(int64), view(int64), view(int64), view(int64),
            view(int32), array(wire), array(uint8), int64,
        )
        for wire in (float32, uint16)
    )
)  # fmt: skip
def gather_hot(directory, tables, starts, value_starts, share, slots, out, out_flags, mode):
    """Hot rows and their flags into `out`, flat wire values, table k from value_starts[k] on; slot -1 is left out."""
    for k in share:
        table = directory[tables[k]]
        dim = table[DIM]
        row_bytes = 4 * dim
        for i in range(starts[k], starts[k + 1]):
            if i + _ROW_AHEAD < starts[k + 1] and slots[i + _ROW_AHEAD] >= 0:
                ahead = table[WEIGHTS] + np.int64(slots[i + _ROW_AHEAD]) * row_bytes
                for offset in range(0, row_bytes, _LINE):
                    prefetch(ahead + offset)
            slot = np.int64(slots[i])
            if slot < 0:
                continue
            out_flags[i] = _HOT_FLAGS
            row = carray(pointer(table[WEIGHTS] + slot * row_bytes), dim, np.float32)
            begin = value_starts[k] + (i - starts[k]) * dim
            target = out[begin : begin + dim]
            for d in range(dim):
                store(target, d, row[d], mode)
