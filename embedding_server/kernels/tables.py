"""Kernels over all tables of a request at once: a request of 26 tables costs one call, not 26.

`directory` int64[T, COLUMNS] holds what they need of every table, as addresses and sizes; `tables` int64[K] says which
of them the request names. Request row i of table k is row starts[k] + i of the outputs; `addresses` int64[K] tells
where the row_ids of each table lie. Each call does the tables of the request whose numbers
`share` int64 holds, so that threads can share one: they meet in no table.
numba's cache knows the time stamp of this file only: after a change to index_entries.py, touch this file too.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, carray, float32, float64, int32, int64, njit, uint8, uint16, void

from embedding_server.heat import band, bump, whole_code
from embedding_server.index_entries import ENTRY_BYTES, FROZEN_BIT, ask_for, entries_at, probe
from embedding_server.kernels.half_rows import SETTLE, rounding_key, value_at
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.row_updates import settle_row
from embedding_server.kernels.wire import store
from embedding_server.store import BAND_SHIFT, FOUND, NUM_BUCKETS, TRAINABLE

BUCKETS, CAPACITIES, LAST_STEP, VISITS, WEIGHTS, DIM, COUNTS_VISITS, STATE, STATE_COLUMNS, KIND = range(10)
#: bytes of a weight, 4 or 2 (half_rows.py); address of weight_decay.py's log-sums by step, 0 without decay
WEIGHT_BYTES, LOG_SUMS = 10, 11
COLUMNS = 12
#: COUNTS_VISITS: a visit leaves nothing; last_step only (weight decay under policy off); last_step, visits and heat
NO_VISITS, STEPS_ONLY, ALL_VISITS = range(3)
_AHEAD = 12
_ROW_AHEAD = 8
_LINE = 64
_MOST_ASKED = 512  # bytes of a row; what follows comes by the hardware's own prefetch
_BLOCK = 64  # rows
_HOT_FLAGS = np.uint8(TRAINABLE | FOUND)
_BAND_SHIFT = np.uint8(BAND_SHIFT)
_ONE = np.float32(1.0)
_NUM_BUCKETS = np.uint64(NUM_BUCKETS)


@njit
def _find_block(buckets, capacities, row_ids, begin, end, now, out_slots, out_entries, out_bands):
    """Slots of the hot rows of row_ids[begin:end], -1 for others, their entries' addresses and heat bands.

    Returns how many are -1. now: heat.whole_code.
    """
    cold = 0
    for i in range(begin, end):
        if i + _AHEAD < row_ids.size:
            ask_for(buckets, capacities, row_ids[i + _AHEAD], _NUM_BUCKETS)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, _NUM_BUCKETS)
        slot, its_band = np.int64(-1), np.uint8(0)
        if capacities[b] > 0:
            position, found = probe(buckets[b], capacities[b], h, row_ids[i])
            if found:
                entry = buckets[b] + ENTRY_BYTES * position
                location = entries_at(entry, 1)[0].location
                if not location & FROZEN_BIT:
                    slot, its_band = np.int64(location), band(entries_at(entry, 1)[0].heat, now)
                    out_entries[i - begin] = entry
        if slot < 0:
            cold += 1
        out_slots[i], out_bands[i] = np.int32(slot), its_band
    return cold


@njit(error_model="numpy", forceinline=True)
def pending_factor(log_sums, last_steps, slot, total):
    """What the weights of a slot are times what lies there: decay up to the log-sum `total`. Addresses, float64."""
    last_step = carray(pointer(last_steps + 4 * np.int64(slot)), 1, np.int32)[0]
    settled = carray(pointer(log_sums + 8 * np.int64(last_step)), 1, np.float64)[0]
    return np.float32(np.exp(total - settled))


@njit
def _settle(weights, weight_bytes, dim, factor, slot, key, buffer):
    """Applies weight decay to the row of a slot; addresses, buffer float32[D] (updates._place_of says why)."""
    values = carray(pointer(buffer), dim, np.float32)
    if weight_bytes == 2:
        settle_row(carray(pointer(weights + 2 * dim * slot), dim, np.int16), values, factor, key)
    else:
        settle_row(carray(pointer(weights + 4 * dim * slot), dim, np.float32), values, factor, key)


@njit
def _ask_for_rows(table, slots, begin, end):
    row_bytes = table[WEIGHT_BYTES] * table[DIM]
    for i in range(begin, end):
        row = table[WEIGHTS] + row_bytes * np.int64(max(0, slots[i]))
        for offset in range(0, min(row_bytes, _MOST_ASKED), _LINE):
            prefetch(row + offset)


@njit(inline="always")
def _count_visit(table, slot, entry_address, row_id, step, now_code, log_table):
    """One more visit of a hot row; returns its heat code."""
    visits = carray(pointer(table[VISITS] + slot), 1, np.uint8)
    visits[0] = min(255, np.int64(visits[0]) + 1)
    entry = entries_at(entry_address, 1)
    code = bump(entry[0].heat, now_code, row_id, step, log_table)
    entry[0].heat = code
    return code


@njit
def _visit_block(table, slots, entries, row_ids, begin, step, now_code, log_table, out_bands):
    """Marks the hot rows of a block as visited at `step`, unless they are already."""
    now = whole_code(now_code)
    for i in range(entries.size):
        slot = np.int64(slots[begin + i])
        if slot < 0:
            continue
        last_step = carray(pointer(table[LAST_STEP] + 4 * slot), 1, np.int32)
        if last_step[0] < step:
            last_step[0] = step
            code = _count_visit(table, slot, entries[i], row_ids[begin + i], step, now_code, log_table)
            out_bands[begin + i] = band(code, now)


@njit
def _visit_decaying_block(table, slots, entries, row_ids, begin, step, now_code, log_table, out_bands, values):
    """As _visit_block for tables with weight decay, which is settled; policy off counts no visits."""
    weights, weight_bytes, dim = table[WEIGHTS], table[WEIGHT_BYTES], table[DIM]
    log_sums, last_steps, buffer = table[LOG_SUMS], table[LAST_STEP], values.ctypes.data
    total = carray(pointer(log_sums + 8 * step), 1, np.float64)[0]
    for i in range(entries.size):
        slot = np.int64(slots[begin + i])
        if slot < 0:
            continue
        last_step = carray(pointer(table[LAST_STEP] + 4 * slot), 1, np.int32)
        if last_step[0] < step:
            factor = pending_factor(log_sums, last_steps, slot, total)
            key = rounding_key(row_ids[begin + i], step, SETTLE)
            _settle(weights, weight_bytes, dim, factor, slot, key, buffer)
            last_step[0] = step
            if table[COUNTS_VISITS] == ALL_VISITS:
                code = _count_visit(table, slot, entries[i], row_ids[begin + i], step, now_code, log_table)
                out_bands[begin + i] = band(code, whole_code(now_code))


@njit
def _widest_decaying(directory, tables, share):
    widest = 0
    for k in share:
        if directory[tables[k], LOG_SUMS] != 0:
            widest = max(widest, directory[tables[k], DIM])
    return widest


@kernel(
    void(
        view(int64, 2), view(int64), view(int64), view(int64), view(int64), boolean, int64, view(float64),
        view(float32), array(int32), array(uint8), array(int64),
    )
)  # fmt: skip
def find_and_visit(
    directory, tables, addresses, starts, share, is_visit, step, now_codes, log_table, out_slots, out_bands, out_cold
):
    """out_slots = slots of hot rows, -1 for every other; out_cold[k] = how many of table k are not hot.

    is_visit: marks hot rows as visited at `step`: last_step, visits and heat, once a step however often it is called;
    weight decay is settled. out_bands: heat bands of hot rows, after that (heat.band); 0 for all others.
    Rows are found in blocks, so that what a visit touches is on its way into the cache while the block is found.
    """
    entries, values = np.empty(_BLOCK, np.int64), np.empty(_widest_decaying(directory, tables, share), np.float32)
    for k in share:
        table = directory[tables[k]]
        visits = is_visit and table[COUNTS_VISITS] != NO_VISITS
        row_ids = carray(pointer(addresses[k]), starts[k + 1] - starts[k], np.int64)
        buckets = carray(pointer(table[BUCKETS]), NUM_BUCKETS, np.int64)
        capacities = carray(pointer(table[CAPACITIES]), NUM_BUCKETS, np.int64)
        slots, bands = out_slots[starts[k] : starts[k + 1]], out_bands[starts[k] : starts[k + 1]]
        cold, now = 0, whole_code(now_codes[k])
        for begin in range(0, row_ids.size, _BLOCK):
            end = min(begin + _BLOCK, row_ids.size)
            cold += _find_block(buckets, capacities, row_ids, begin, end, now, slots, entries, bands)
            if visits:
                for i in range(begin, end):
                    prefetch(table[LAST_STEP] + 4 * np.int64(max(0, slots[i])))
                    prefetch(table[VISITS] + np.int64(max(0, slots[i])))
                if table[LOG_SUMS] != 0:
                    _ask_for_rows(table, slots, begin, end)
                block = table, slots, entries[: end - begin], row_ids, begin, step, now_codes[k], log_table, bands
                if table[LOG_SUMS] != 0:
                    _visit_decaying_block(*block, values)
                else:
                    _visit_block(*block)
        out_cold[k] = cold


@kernel(
    void(
        view(int64, 2), view(int64), view(int64), view(int64), view(int32), view(uint8), array(int64), array(uint8),
    )
)  # fmt: skip
def place_hot(directory, tables, starts, share, slots, bands, out_addresses, out_flags):
    """Addresses of hot rows, float32[D] or float16[D] as the table has them, and their flags; slot -1 is left out."""
    for k in share:
        table = directory[tables[k]]
        weights, row_bytes = table[WEIGHTS], table[WEIGHT_BYTES] * table[DIM]
        for i in range(starts[k], starts[k + 1]):
            if slots[i] >= 0:
                out_addresses[i] = weights + np.int64(slots[i]) * row_bytes
                out_flags[i] = _HOT_FLAGS | bands[i] << _BAND_SHIFT


@njit(forceinline=True)
def _copy_row(row, target, factor, mode):
    """target = row in the wire dtype; factor: see pending_factor."""
    if factor == _ONE:
        for d in range(row.size):
            store(target, d, value_at(row, d), mode)
    else:
        for d in range(row.size):
            store(target, d, value_at(row, d) * factor, mode)


@kernel(
    *(
        void(
            view(int64, 2), view(int64), view(int64), view(int64), view(int64), view(int32), view(uint8),
            view(float64), array(wire), array(uint8), int64,
        )
        for wire in (float32, uint16)
    )
)  # fmt: skip
def gather_hot(directory, tables, starts, value_starts, share, slots, bands, totals, out, out_flags, mode):
    """Hot rows and their flags into `out`, flat wire values, table k from value_starts[k] on; slot -1 is left out.

    totals float64[K]: the log-sums of weight decay up to now, which rows are given with; empty: rows as they lie.
    """
    for k in share:
        table = directory[tables[k]]
        dim, is_half = table[DIM], table[WEIGHT_BYTES] == 2
        row_bytes, decays = table[WEIGHT_BYTES] * dim, totals.size != 0 and table[LOG_SUMS] != 0
        for i in range(starts[k], starts[k + 1]):
            if i + _ROW_AHEAD < starts[k + 1] and slots[i + _ROW_AHEAD] >= 0:
                ahead = table[WEIGHTS] + np.int64(slots[i + _ROW_AHEAD]) * row_bytes
                for offset in range(0, row_bytes, _LINE):
                    prefetch(ahead + offset)
            slot = np.int64(slots[i])
            if slot < 0:
                continue
            out_flags[i] = _HOT_FLAGS | bands[i] << _BAND_SHIFT
            factor = pending_factor(table[LOG_SUMS], table[LAST_STEP], slot, totals[k]) if decays else _ONE
            begin, row = value_starts[k] + (i - starts[k]) * dim, table[WEIGHTS] + slot * row_bytes
            target = out[begin : begin + dim]
            if is_half:
                _copy_row(carray(pointer(row), dim, np.int16), target, factor, mode)
            else:
                _copy_row(carray(pointer(row), dim, np.float32), target, factor, mode)


@kernel(void(view(int64), float64, array(uint8)))
def bands_of_entries(entries, now_code, out_bands):
    """Heat bands of the rows of index entries, 0 where the address is 0: rows that have none."""
    now = whole_code(now_code)
    for i in range(entries.size):
        out_bands[i] = band(entries_at(entries[i], 1)[0].heat, now) if entries[i] != 0 else np.uint8(0)
