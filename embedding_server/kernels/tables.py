"""Kernels over all tables of a request at once: a request of 26 tables costs one call, not 26.

`directory` int64[T, COLUMNS] holds what they need of every table, as addresses and sizes; `tables` int64[K] says which
of them the request names. Request row i of table k is row starts[k] + i of the outputs; `addresses` int64[K] tells
where the row_ids of each table lie. Each call does the tables [first, last) of the request, so that threads can share
one: they meet in no table.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, carray, float32, float64, int32, int64, uint8, uint16, void

from embedding_server.heat import bump
from embedding_server.index import ENTRY_BYTES, FROZEN_BIT, ask_for, entries_at, probe
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.wire import store
from embedding_server.store import FOUND, NUM_BUCKETS, TRAINABLE

BUCKETS, CAPACITIES, LAST_STEP, VISITS, WEIGHTS, DIM, HAS_HEAT = range(7)
COLUMNS = 7
_AHEAD = 12
_ROW_AHEAD = 8
_LINE = 64
_HOT_FLAGS = np.uint8(TRAINABLE | FOUND)
_NUM_BUCKETS = np.uint64(NUM_BUCKETS)


@kernel(
    void(
        view(int64, 2), view(int64), view(int64), view(int64), int64, int64,
        boolean, int64, view(float64), view(float32), array(int32), array(int64),
    )
)  # fmt: skip
def find_and_visit(
    directory, tables, addresses, starts, first, last, is_visit, step, now_codes, log_table, out_slots, out_cold
):
    """out_slots = slots of hot rows, -1 for every other; out_cold[k] = how many of table k are not hot.

    is_visit: marks hot rows as visited at `step`: last_step, visits and heat, once a step however often it is called.
    """
    for k in range(first, last):
        table = directory[tables[k]]
        n = starts[k + 1] - starts[k]
        row_ids = carray(pointer(addresses[k]), n, np.int64)
        buckets = carray(pointer(table[BUCKETS]), NUM_BUCKETS, np.int64)
        capacities = carray(pointer(table[CAPACITIES]), NUM_BUCKETS, np.int64)
        cold = 0
        for i in range(n):
            if i + _AHEAD < n:
                ask_for(buckets, capacities, row_ids[i + _AHEAD], _NUM_BUCKETS)
            row_id = row_ids[i]
            h = hash_row_id(row_id)
            b = bucket_of(h, _NUM_BUCKETS)
            slot = np.int64(-1)
            if capacities[b] > 0:
                position, found = probe(buckets[b], capacities[b], h, row_id)
                if found:
                    entry = entries_at(buckets[b] + ENTRY_BYTES * position, 1)
                    if not entry[0].location & FROZEN_BIT:
                        slot = np.int64(entry[0].location)
                        if is_visit:
                            last_step = carray(pointer(table[LAST_STEP] + 4 * slot), 1, np.int32)
                            if last_step[0] < step:
                                last_step[0] = step
                                visits = carray(pointer(table[VISITS] + slot), 1, np.uint8)
                                visits[0] = min(255, np.int64(visits[0]) + 1)
                                if table[HAS_HEAT]:
                                    entry[0].heat = bump(entry[0].heat, now_codes[k], row_id, step, log_table)
            if slot < 0:
                cold += 1
            out_slots[starts[k] + i] = np.int32(slot)
        out_cold[k] = cold


@kernel(
    *(
        void(
            view(int64, 2), view(int64), view(int64), view(int64), int64, int64,
            view(int32), array(wire), array(uint8), int64,
        )
        for wire in (float32, uint16)
    )
)  # fmt: skip
def gather_hot(directory, tables, starts, value_starts, first, last, slots, out, out_flags, mode):
    """Hot rows and their flags into `out`, flat wire values, table k from value_starts[k] on; slot -1 is left out."""
    for k in range(first, last):
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
