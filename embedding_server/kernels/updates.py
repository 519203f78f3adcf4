"""Updates of the hot rows of all tables of a Push: one kernel call, with gradients as values or as sums yet to be made.

`directory` and `tables` are as in kernels/tables.py. Every call does part `part` of `parts` of each table's rows, so
that threads can share one, whatever the tables' sizes; a row is in one part only.

apply_sums makes a row's gradient in a few lines of L1 and applies it at once: gradients of 80,000 rows x 64 need not be
written and read back (20 MB each way). The sums are those of trainer/kernels.py, in the same order.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, float64, int32, int64, njit, uint16, void

from embedding_server.kernels.cpu import as_float32
from embedding_server.kernels.half_rows import UPDATE, rounding_key
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.row_sums import UNIT, sum_rows
from embedding_server.kernels.row_updates import NUM_CONSTANTS, is_plain, update_plain_row, update_row
from embedding_server.kernels.tables import (
    DIM,
    KIND,
    LAST_STEP,
    LOG_SUMS,
    STATE,
    STATE_COLUMNS,
    WEIGHT_BYTES,
    WEIGHTS,
    pending_factor,
)
from embedding_server.kernels.vectors import zero16
from embedding_server.store import RowSums

#: columns of `sums`: addresses of a table's store.RowSums arrays, and the sizes of two of them
SOURCE, POSITIONS, NUM_POSITIONS, SCALES, NUM_SCALES, STARTS, ROWS = range(7)
SUMS_COLUMNS = 7
_AHEAD = 8
_LINE = 64
_ONE = np.float32(1.0)
_NO_KEY = np.uint32(0)  # of float32 rows, which are not rounded
_PREFETCH_BYTES = 512  # what follows comes by the hardware's own prefetch
_ANY = 1 << 48  # length given to carray where the kernel never asks for it
_ROW_COST = 4  # of the update of a row, in look-ups; only balances the threads


@njit(forceinline=True)
def _rows_at(weights, dim, state, columns, slot):
    """(weights float32[D], state float32[C]) of a slot; weights and state are addresses."""
    row = carray(pointer(weights + 4 * dim * np.int64(slot)), dim, np.float32)
    return row, carray(pointer(state + 4 * columns * np.int64(slot)), columns, np.float32)


@njit(inline="always")
def _place_of(table, constants, buffer):
    """What a row's update needs of its table, once for all rows: stores into rows keep LLVM from hoisting loads.

    The arrays go as addresses: to pass an array on counts a reference, an atomic add. buffer float32[D].
    """
    weights = table[WEIGHTS], table[WEIGHT_BYTES], table[DIM]
    state = table[STATE], table[STATE_COLUMNS], table[LAST_STEP], table[LOG_SUMS]
    return weights, state, table[KIND], constants.ctypes.data, buffer.ctypes.data


@njit
def _update_slot(place, gradient_address, scale, rate, total, slot, key):
    """One step on the row of a slot of a table whose rows are not plain (row_updates.is_plain); key: of half rows."""
    (weights, weight_bytes, dim), (state, columns, last_steps, log_sums), kind, constant_address, buffer = place
    at_slot, pending = np.int64(slot), _ONE
    gradient, values = carray(pointer(gradient_address), dim, np.float32), carray(pointer(buffer), dim, np.float32)
    constants = carray(pointer(constant_address), NUM_CONSTANTS, np.float32)
    its_state = carray(pointer(state + 4 * columns * at_slot), columns, np.float32)
    if log_sums != 0:
        pending = pending_factor(log_sums, last_steps, slot, total)
    if weight_bytes == 2:
        half_row = carray(pointer(weights + 2 * dim * at_slot), dim, np.int16)
        update_row(kind, half_row, values, its_state, gradient, scale, rate, constants, pending, key)
    else:
        row = carray(pointer(weights + 4 * dim * at_slot), dim, np.float32)
        update_row(kind, row, values, its_state, gradient, scale, rate, constants, pending, key)


@njit(forceinline=True)
def _ask_for(place, slots, i):
    """Asks for the row that the loop over `slots` updates _AHEAD iterations after i."""
    if i + _AHEAD < slots.size and slots[i + _AHEAD] >= 0:
        (weights, weight_bytes, dim), (state, columns, last_steps, log_sums) = place[0], place[1]
        slot, row_bytes = np.int64(slots[i + _AHEAD]), weight_bytes * dim
        prefetch(state + 4 * columns * slot)
        for offset in range(0, min(row_bytes, _PREFETCH_BYTES), _LINE):
            prefetch(weights + row_bytes * slot + offset)
        if log_sums != 0:
            prefetch(last_steps + 4 * slot)


@njit
def _widest(directory, tables):
    widest = 0
    for k in range(tables.size):
        widest = max(widest, directory[tables[k], DIM])
    return widest


@kernel(
    *(
        void(
            view(int64, 2), view(float32, 2), view(int64), view(float32), view(float64), float32, int64, view(int64),
            view(int64), view(int64), view(int64), view(wire), int64, int64, int64,
        )
        for wire in (float32, uint16)
    )
)  # fmt: skip
def apply_values(
    directory, constants, tables, rates, totals, scale, step, counts, slot_addresses, id_addresses, value_addresses,
    like, mode, part, parts,
):  # fmt: skip
    """One optimizer step on the rows of each table, with gradients [counts[k], D] of like's dtype; slot -1 skips.

    slot_addresses, id_addresses: where slots int32[counts[k]] and row_ids int64[counts[k]] lie. constants
    float32[T, NUM_CONSTANTS] of the directory's tables; rates float32[K]; totals float64[K]: the log-sum of weight
    decay up to this step.
    """
    widest = _widest(directory, tables)
    buffer, half_buffer = np.empty(widest, np.float32), np.empty(widest, np.float32)
    for k in range(tables.size):
        table = directory[tables[k]]
        n, values, rate, of_table, total = counts[k], value_addresses[k], rates[k], constants[tables[k]], totals[k]
        dim, kind, weights, place = table[DIM], table[KIND], table[WEIGHTS], _place_of(table, of_table, half_buffer)
        state, columns = table[STATE], table[STATE_COLUMNS]
        plain = is_plain(kind, table[WEIGHT_BYTES], table[LOG_SUMS], of_table)
        is_half = table[WEIGHT_BYTES] == 2
        slots = carray(pointer(slot_addresses[k]), n, np.int32)
        row_ids = carray(pointer(id_addresses[k]), n, np.int64)
        its_buffer = buffer[:dim]
        for i in range(n * part // parts, n * (part + 1) // parts):
            _ask_for(place, slots, i)
            if slots[i] >= 0:
                wire_gradient = carray(pointer(values + i * dim * like.itemsize), dim, like.dtype)
                gradient = as_float32(wire_gradient, mode, its_buffer)
                if plain:
                    row, its_state = _rows_at(weights, dim, state, columns, slots[i])
                    update_plain_row(kind, row, its_state, gradient, scale, rate, of_table)
                else:
                    key = rounding_key(row_ids[i], step, UPDATE) if is_half else _NO_KEY
                    _update_slot(place, gradient.ctypes.data, scale, rate, total, slots[i], key)


@njit
def _first_of_part(starts, rows, n, part, parts):
    """The first of a part's n rows, so that every part has about as much to do: look-ups, and a share for each row."""
    if part == parts:
        return n
    if part == 0:
        return 0
    base = starts[rows[0]] if n else 0
    total = (starts[rows[n - 1] + 1] - base if n else 0) + _ROW_COST * n
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if (starts[rows[middle]] - base + _ROW_COST * middle) * parts < total * part:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(
    void(
        view(int64, 2), view(float32, 2), view(int64), view(float32), view(float64), float32, int64, view(int64),
        view(int64), view(int64), view(int64, 2), int64, int64,
    )
)  # fmt: skip
def apply_sums(
    directory, constants, tables, rates, totals, scale, step, counts, slot_addresses, id_addresses, sums, part, parts
):  # fmt: skip
    """As apply_values; the gradient of row i of table k is summed from what sums[k] describes (store.RowSums)."""
    widest = _widest(directory, tables)
    gradient, half_buffer = np.empty(widest, np.float32), np.empty(widest, np.float32)
    for k in range(tables.size):
        table, of_table = directory[tables[k]], sums[k]
        n, rate, its_constants, total = counts[k], rates[k], constants[tables[k]], totals[k]
        dim, kind, weights, place = (
            table[DIM],
            table[KIND],
            table[WEIGHTS],
            _place_of(table, its_constants, half_buffer),
        )
        state, columns = table[STATE], table[STATE_COLUMNS]
        plain = is_plain(kind, table[WEIGHT_BYTES], table[LOG_SUMS], its_constants)
        is_half = table[WEIGHT_BYTES] == 2
        slots = carray(pointer(slot_addresses[k]), n, np.int32)
        row_ids = carray(pointer(id_addresses[k]), n, np.int64)
        source = carray(pointer(of_table[SOURCE]), _ANY, np.float32)
        positions = carray(pointer(of_table[POSITIONS]), of_table[NUM_POSITIONS], np.int32)
        scales = carray(pointer(of_table[SCALES]), of_table[NUM_SCALES], np.float32)
        starts = carray(pointer(of_table[STARTS]), _ANY, np.int64)
        rows = carray(pointer(of_table[ROWS]), n, np.int32)
        # not in the loop over rows: a view counts a reference, which is an atomic add
        its_gradient = gradient[:dim]
        first, last = _first_of_part(starts, rows, n, part, parts), _first_of_part(starts, rows, n, part + 1, parts)
        for i in range(first, last):
            _ask_for(place, slots, i)
            if slots[i] >= 0:
                u = rows[i]
                sum_rows(
                    source, positions, None, UNIT, scales, starts[u], starts[u + 1], dim, np.float32(1),
                    its_gradient, 0, False, zero16(),
                )  # fmt: skip
                if plain:
                    row, its_state = _rows_at(weights, dim, state, columns, slots[i])
                    update_plain_row(kind, row, its_state, its_gradient, scale, rate, its_constants)
                else:
                    key = rounding_key(row_ids[i], step, UPDATE) if is_half else _NO_KEY
                    _update_slot(place, its_gradient.ctypes.data, scale, rate, total, slots[i], key)


@kernel(
    void(
        view(float32), view(int32), view(float32), view(int64), view(int32), array(float32, 2),
    )
)  # fmt: skip
def _make_sums(source, positions, scales, starts, rows, out):
    flat = out.reshape(out.size)
    for i in range(rows.size):
        u = rows[i]
        sum_rows(
            source, positions, None, UNIT, scales, starts[u], starts[u + 1], out.shape[1], np.float32(1),
            flat, i * out.shape[1], False, zero16(),
        )  # fmt: skip


def make_sums(sums: RowSums, dim: int) -> np.ndarray:
    """The sums as values, float32[n, dim]: for gradients that several workers add up."""
    out = np.empty((sums.rows.shape[0], dim), np.float32)
    _make_sums(sums.source, sums.positions, sums.scales, sums.starts, sums.rows, out)
    return out
