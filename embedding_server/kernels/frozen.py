"""The kernels of frozen rows, in numba: which rows can freeze, quantise, read.

Formats: 8 bits: FBGEMM's fused row-wise format: D codes, then scale and bias as little-endian float32; value = code *
scale + bias. 32 bits: D little-endian float32. Shapes as in cpu.py; compared with reference.py and FBGEMM in tests.

numba's cache knows the time stamp of this file only: after a change to wire.py, touch this file too.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.wire import MODES, bits_to_f32, f32_to_bits, store

_F32, _I64 = types.float32, types.int64
_INDEX = view(types.int32)
_WIRE_OUT = (array(_F32, 2), array(types.uint16, 2))
_EXPONENT_32 = np.uint32(0x7F800000)

#: Iterations between asking for a row and reading it, and the part that is asked for: as in cpu.py.
_AHEAD, _PREFETCH_BYTES = 8, 512


@intrinsic
def _fused_multiply_add(typingctx, a, b, c):
    """a * b + c of float32, rounded once, as FBGEMM's dequantise does."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


# nnan and nsz let LLVM vectorise minima; callers pass finite rows, and the sign of a zero minimum has no effect on
# any dequantised value.
@njit(fastmath={"nnan", "nsz"})
def _minimum_and_maximum(row):
    low = high = row[0]
    for d in range(row.size):
        low = min(low, row[d])
        high = max(high, row[d])
    return low, high


@njit
def _put_float32(row, at, value):
    bits = f32_to_bits(value)
    for byte in range(4):
        row[at + byte] = np.uint8((bits >> np.uint32(8 * byte)) & np.uint32(0xFF))


@njit
def _get_float32(row, at):
    bits = np.uint32(0)
    for byte in range(4):
        bits |= np.uint32(row[at + byte]) << np.uint32(8 * byte)
    return bits_to_f32(bits)


_255 = np.float32(255.0)
_FBGEMM_EPSILON = np.float32(1e-8)
# Adding 2^23 to a float32 in [0, 2^22] rounds it to the nearest integer, ties to even, and leaves that in the low bits:
# the rounding of lrintf, in one addition that vectorises.
_ROUND = np.float32(8388608.0)


@kernel(types.void(view(_F32, 2), array(types.uint8, 2)))
def quantize_8bit(weights, out):
    """float32[n, D] finite -> uint8[n, D+8], byte for byte as FBGEMM's FloatToFused8BitRowwiseQuantized."""
    dim = weights.shape[1]
    for i in range(weights.shape[0]):
        row = weights[i]
        target = out[i]
        low, high = _minimum_and_maximum(row)
        inverse = _255 / ((high - low) + _FBGEMM_EPSILON)
        for d in range(dim):
            target[d] = np.uint8(f32_to_bits((row[d] - low) * inverse + _ROUND) & np.uint32(0xFF))
        _put_float32(target, dim, (high - low) / _255)
        _put_float32(target, dim + 4, low)


@kernel(*[types.void(view(_I64), _I64, _I64, wire, _INDEX, _I64) for wire in _WIRE_OUT])
def gather_frozen(addresses, bits, dim, out, positions, mode):
    """out[positions[i]] = the frozen row of `bits` (8 or 32) at addresses[i], in the wire dtype; address 0 skips."""
    row_bytes = dim + 8 if bits == 8 else 4 * dim
    for i in range(addresses.size):
        if i + _AHEAD < addresses.size:  # a prefetch of address 0 does nothing
            for offset in range(0, min(row_bytes, _PREFETCH_BYTES), 64):
                prefetch(addresses[i + _AHEAD] + offset)
        if addresses[i] == 0:
            continue
        target = out[positions[i]]
        if bits == 8:
            row = carray(pointer(addresses[i]), (dim + 8,), np.uint8)
            scale, bias = _get_float32(row, dim), _get_float32(row, dim + 4)
            for d in range(dim):
                store(target, d, _fused_multiply_add(np.float32(row[d]), scale, bias), mode)
        else:
            values = carray(pointer(addresses[i]), (dim,), np.float32)
            for d in range(dim):
                store(target, d, values[d], mode)


def read_frozen(addresses: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """int64[n] row addresses -> float32[n, dim]."""
    out = np.empty((len(addresses), dim), np.float32)
    gather_frozen(addresses, bits, dim, out, np.arange(len(addresses), dtype=np.int32), MODES["float32"])
    return out


@kernel(types.void(view(_F32, 2), array(types.boolean, 1)))
def _can_freeze(weights, out):
    exponent = _EXPONENT_32
    for i in range(weights.shape[0]):
        row = weights[i]
        bad = False
        for d in range(row.size):
            bad |= (f32_to_bits(row[d]) & exponent) == exponent
        if not bad:
            low, high = _minimum_and_maximum(row)
            bad = (f32_to_bits(high - low) & exponent) == exponent
        out[i] = not bad


def can_freeze(weights: np.ndarray) -> np.ndarray:
    """float32[n, D] -> bool[n]: every value and the row's range (max - min) are finite, so that 8 bits can hold it."""
    out = np.empty(len(weights), np.bool_)
    _can_freeze(weights, out)
    return out
