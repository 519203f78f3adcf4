"""The row kernels of the CPU, in numba: read, train, initialise and check hot rows.

Frozen rows: frozen.py. Each is compared with kernels/reference.py in tests. Shapes: n rows of one call, D columns, C
columns of optimizer state. `slots` int32[n] name hot rows, -1 skips; `positions` int32[n] name rows of the caller's
wire array. Wire arrays are float32, or uint16 holding float16 or bfloat16 as `mode` says (wire.py). No kernel checks a
bound: callers do.

How they are made fast. Figures: million rows of 64 float32 a second, one thread of an AMD EPYC that others kept busy
too; best run, rows in cache / rows spread over 256 MB.
- Inner loops run over row views from 0 to D, so that LLVM vectorises them without index checks. D is a run-time value:
  one compilation serves all tables.
- Rows are asked for 8 iterations before they are read: gather 129 / 27 (124 / 23 without), row-wise Adagrad, then still
  a kernel of its own (now update_row, which updates.py runs over all tables), 59 / 46 (69 / 15); with bfloat16 values
  124 / 22 (106 / 14) and 39 / 17 (40 / 7).
- All kernels of this module compile in 5 s on one idle core (kernel.py says when).

numba's cache knows the time stamp of this file only: after a change to wire.py, hashing.py, half_rows.py or
row_updates.py, touch this file too.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from embedding_server.kernels.half_rows import SETTLE, UPDATE, put_nearest, rounding_key, value_at
from embedding_server.kernels.hashing import hash_row_id, mix64
from embedding_server.kernels.kernel import array, kernel, prefetch, view
from embedding_server.kernels.row_updates import settle_row, update_row
from embedding_server.kernels.vectors import at, store1
from embedding_server.kernels.wire import MODES, load, store, wire_view

_F32, _I64, _U64 = types.float32, types.int64, types.uint64
_ONE = np.float32(1.0)

#: Iterations between asking for a row and reading it: 8 was best of 2, 4, 8, 16 for rows out of cache (see above).
_AHEAD = 8
#: The part of a row that is asked for; what follows comes by the hardware's own prefetch of consecutive lines.
_PREFETCH_BYTES = 512

_NO_KEY = np.uint32(0)  # of float32 rows, which are not rounded
_F32_ROWS, _HALF_ROWS = array(_F32, 2), array(types.int16, 2)
_WEIGHTS = (_F32_ROWS, _HALF_ROWS)  # hot_bits 32 and 16 (half_rows.py)
_INDEX = view(types.int32)
_WIRE_IN = (view(_F32, 2), view(types.uint16, 2))
_WIRE_OUT = (array(_F32, 2), array(types.uint16, 2))


@njit
def _prefetch_row(rows, slots, i):
    """Asks for the row that the loop over `slots` reads _AHEAD iterations after i."""
    if i + _AHEAD < slots.size and slots[i + _AHEAD] >= 0:
        row_bytes = np.int64(rows.shape[1] * rows.itemsize)
        start = np.int64(rows.ctypes.data) + np.int64(slots[i + _AHEAD]) * row_bytes
        asked = row_bytes if row_bytes < _PREFETCH_BYTES else _PREFETCH_BYTES
        for offset in range(0, asked, 64):
            prefetch(start + offset)


# ---- hot rows -------------------------------------------------------------------------------------------------------


@kernel(*[types.void(rows, _INDEX, wire, _INDEX, _I64) for rows in _WEIGHTS for wire in _WIRE_OUT])
def gather(weights, slots, out, positions, mode):
    """out[positions[i]] = weights[slots[i]] in the wire dtype."""
    dim = weights.shape[1]
    for i in range(slots.size):
        _prefetch_row(weights, slots, i)
        slot = slots[i]
        if slot < 0:
            continue
        row = weights[slot]
        target = out[positions[i]]
        for d in range(dim):
            store(target, d, value_at(row, d), mode)


@kernel(types.void(_HALF_ROWS, _INDEX, view(_F32, 2)))
def scatter_half(weights, slots, values):
    """weights[slots[i]] = values[i], rounded to the nearest and saturated."""
    for i in range(slots.size):
        row, source = weights[slots[i]], values[i]
        for d in range(source.size):
            put_nearest(row, d, source[d])


def as_float32(gradient, mode, buffer):
    """The wire values as float32[D]: themselves, or converted into `buffer`."""
    raise NotImplementedError("call from numba kernels only")


@overload(as_float32, inline="always")
def _as_float32(gradient, mode, buffer):
    if gradient.dtype == types.float32:
        return lambda gradient, mode, buffer: gradient

    def convert(gradient, mode, buffer):
        for d in range(buffer.size):
            buffer[d] = load(gradient, d, mode)
        return buffer

    return convert


@kernel(
    *(
        types.void(
            _I64, rows, _F32_ROWS, _INDEX, wire, _INDEX, _I64, _F32, _F32, view(_F32), view(_F32), _I64,
            view(_I64),
        )
        for rows in _WEIGHTS
        for wire in _WIRE_IN
    )
)  # fmt: skip
def apply(
    kind, weights, state, slots, gradients, positions, mode, scale, learning_rate, constants, pending, step, row_ids
):  # fmt: skip
    """One optimizer step on rows slots[i] with gradients[positions[i]] * scale; pending float32[n], or empty: all 1.

    row_ids int64[n]: of half rows, whose rounding they key; may be empty for others.
    """
    buffer, values = np.empty(weights.shape[1], np.float32), np.empty(weights.shape[1], np.float32)
    for i in range(slots.size):
        _prefetch_row(weights, slots, i)
        _prefetch_row(state, slots, i)
        slot = slots[i]
        if slot >= 0:
            gradient = as_float32(gradients[positions[i]], mode, buffer)
            its_pending = pending[i] if pending.size else _ONE
            key = rounding_key(row_ids[i], step, UPDATE) if row_ids.size else _NO_KEY
            update_row(
                kind, weights[slot], values, state[slot], gradient, scale, learning_rate, constants, its_pending,
                key,
            )  # fmt: skip


@kernel(*[types.void(rows, _INDEX, view(_F32), _I64, view(_I64)) for rows in _WEIGHTS])
def scale(weights, slots, factors, step, row_ids):
    """weights[slots[i]] *= factors[i]: weight decay. row_ids as in apply."""
    values = np.empty(weights.shape[1], np.float32)
    for i in range(slots.size):
        key = rounding_key(row_ids[i], step, SETTLE) if row_ids.size else _NO_KEY
        settle_row(weights[slots[i]], values, factors[i], key)


# ---- initial values -------------------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S40 = np.uint64(40)
_TO_UNIT = np.float32(2.0**-24)


@kernel(*[types.void(view(_I64), _U64, _F32, _F32, _F32, rows, _INDEX) for rows in _WEIGHTS])
def fill_initial(row_ids, seed, low, width, highest, out, positions):
    """out[positions[i], d] = min(low + width * u, highest), u = 24 bits of SplitMix64's d-th output, in [0, 1).

    Half rows: rounded to the nearest; the caller sees to it that float16 reaches as far.

    DO NOT CHANGE: a row that was never trained is recomputed from this.
    """
    dim = out.shape[1]
    for i in range(row_ids.size):
        if positions[i] < 0:
            continue
        base = hash_row_id(row_ids[i]) ^ seed
        row = out[positions[i]]
        for d in range(dim):
            unit = np.float32(np.int32(mix64(base + np.uint64(d + 1) * _GOLDEN) >> _S40)) * _TO_UNIT
            store1(row, at(d), min(low + width * unit, highest))


def initial_values(row_ids: np.ndarray, seed: int, dim: int, low: float, high: float) -> np.ndarray:
    """int64[n] -> float32[n, dim], uniform in [low, high)."""
    out = np.empty((len(row_ids), dim), np.float32)
    fill_initial(row_ids, np.uint64(seed), *initial_range(low, high), out, np.arange(len(row_ids), dtype=np.int32))
    return out


def initial_range(low: float, high: float) -> tuple[np.float32, np.float32, np.float32]:
    """(low, width, largest value allowed), so that rounding never reaches `high`; low == high gives a constant."""
    first = np.float32(low)
    highest = max(first, np.nextafter(np.float32(high), np.float32(-np.inf))) if high > low else first
    return first, np.float32(high) - first, highest


# ---- checks ---------------------------------------------------------------------------------------------------------

_EXPONENT_32 = np.uint32(0x7F800000)
_CHUNK = 4096


@njit
def _has_full_exponent(bits, start, stop, exponent):
    """True if an exponent in bits[start:stop] is all ones: infinity or NaN. Integers, so that it vectorises."""
    chunk = bits[start:stop]
    found = False
    for i in range(chunk.size):
        found |= (chunk[i] & exponent) == exponent
    return found


@kernel(
    types.int64(view(types.uint32), types.uint32),
    types.int64(view(types.uint16), types.uint16),
)
def _first_full_exponent(bits, exponent):
    for start in range(0, bits.size, _CHUNK):
        stop = min(start + _CHUNK, bits.size)
        if _has_full_exponent(bits, start, stop, exponent):
            for i in range(start, stop):
                if (bits[i] & exponent) == exponent:
                    return i
    return -1


def all_finite(values: np.ndarray, mode: int) -> int:
    """Flat index of the first infinity or NaN in an array of wire values, or -1."""
    flat = wire_view(values).reshape(-1)
    if mode == MODES["float32"]:
        return int(_first_full_exponent(flat.view(np.uint32), _EXPONENT_32))
    return int(_first_full_exponent(flat, np.uint16(0x7C00 if mode == MODES["float16"] else 0x7F80)))
