"""The kernels of frozen rows, in numba: in how many bits a row can freeze, quantise, read.

Formats of a row of D values, little-endian. DO NOT CHANGE: segments hold them.

    bits  bytes      what
    4     D/2 + 4    FBGEMM's fused row-wise format: codes, the even column in the low half of a byte, then scale and
                     bias as float16; value = code * scale + bias
    8     D + 8      FBGEMM's fused row-wise format: codes, then scale and bias as float32; value = code * scale + bias
    16    2 D        float16
    32    4 D        float32

A row takes 4 bits only if they hold it (`choose_bits`): scale and bias are float16, so |w| <= 60,000, and a scale of
less than 2^-14 would be subnormal there and collapse the codes. Otherwise it takes 8 bits. What no format holds stays
hot.

How far a value may be off after reading, r = max - min of the row (tests compare each value with these):
    4     the bias m is min rounded to float16, |m - min| <= 2^-11 |min| (2^-25 where that is less), so the codes span
          R = max - m, |R| <= r + |m - min|; the scale is R / 15 rounded to float16, 2^-11 of it off. Codes are the
          nearest integer, clipped to 0..15: half a scale, or |m - min| for values below m. Together
              |scale| / 2 + 15 * 2^-11 |scale| + |m - min| + 2^-20
          (2^-20: scales below 2^-14, which only rows with |min| >> r can have, are off by up to 2^-25, times 15)
    8     scale r / 255; FBGEMM adds 1e-8 to r when it makes codes, which counts in rows of tiny range only:
              r / 510 + min(r, 1e-8) + 2^-22 max|w|
    16    2^-11 |w|, or 2^-25 where that is less
    32    0
Rounded at random (`rounding_keys`), a code is floor((w - bias) / scale + u), clipped before u is added, u uniform in
[0, 1): one of the two neighbours, so a whole scale off where the nearest is half of one:
    4     |scale| + 15 * 2^-11 |scale| + |m - min| + 2^-20
    8     r / 255 + min(r, 1e-8) + 2^-22 max|w|
    16    2^-10 |w|, or 2^-24 where that is less
and right on average, so that updates of less than half a scale are not lost at every freeze. The bias that is left: u
has 16 bits, which gives 2^-16 |scale|; clipping 4 bits gives 15 * 2^-11 |scale| + |m - min|, to the row's ends alone;
and the 1e-8 of 8 bits. A value on the grid stays: a constant row comes back exactly if the bias holds its value.

Reading never gives infinity or NaN: |code * scale + bias| <= 15 * 8001 + 60,016 for 4 bits, and at most the row's own
largest value plus one rounding for 8 bits, whose range is finite.

`bits` uint8[n] is a row's format; other shapes as in cpu.py. Compared with frozen_reference.py and FBGEMM in tests.
numba's cache knows the time stamp of this file only: after a change to wire.py, half_rows.py or hashing.py, touch this
file too.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from embedding_server.kernels.half_rows import round_row
from embedding_server.kernels.hashing import hash_row_id, mix64
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.wire import MODES, bits_to_f32, f16_to_f32, f32_to_bits, f32_to_f16, store

_F32, _I64, _U8 = types.float32, types.int64, types.uint8
_INDEX = view(types.int32)
_WIRE_OUT = (array(_F32, 2), array(types.uint16, 2))
_EXPONENT_32 = np.uint32(0x7F800000)

#: Iterations between asking for a row and reading it, and the part that is asked for: as in cpu.py.
_AHEAD, _PREFETCH_BYTES = 8, 512

#: What 4 bits hold: largest |w|, least scale (the least normal float16); 16 bits: largest |w|.
MAX_4BIT, LEAST_4BIT_SCALE, MAX_16BIT = np.float32(60_000.0), np.float32(2.0**-14), np.float32(65_504.0)
_ONE, _15, _255 = np.float32(1.0), np.float32(15.0), np.float32(255.0)
_FBGEMM_EPSILON = np.float32(1e-8)
# Adding 2^23 to a float32 in [0, 2^22] rounds it to the nearest integer, ties to even, and leaves that in the low bits:
# the rounding of lrintf, in one addition that vectorises.
_ROUND = np.float32(8388608.0)
_GOLDEN, _M1, _M2 = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S15, _S16, _LOW_HALF = np.uint32(15), np.uint32(16), np.uint32(0xFFFF)
_TO_UNIT = np.float32(2.0**-16)
#: no keys: rounds to the nearest
NEAREST = np.empty(0, np.uint32)


def row_bytes(bits: int, dim: int) -> int:
    """Bytes of a frozen row's values; dim is a multiple of 4."""
    return {4: dim // 2 + 4, 8: dim + 8, 16: 2 * dim, 32: 4 * dim}[bits]


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


# ---- which rows can freeze ------------------------------------------------------------------------------------------


@njit
def _bits_of_row(row, wanted):
    bad = False
    for d in range(row.size):
        bad |= (f32_to_bits(row[d]) & _EXPONENT_32) == _EXPONENT_32
    if bad:
        return 0
    if wanted == 32:
        return 32
    low, high = _minimum_and_maximum(row)
    size = max(-low, high)
    if wanted == 16:
        return 16 if size <= MAX_16BIT else 0
    if (f32_to_bits(high - low) & _EXPONENT_32) == _EXPONENT_32:
        return 0
    if wanted == 4 and size <= MAX_4BIT and (low == high or (high - low) / _15 >= LEAST_4BIT_SCALE):
        return 4
    return 8


@kernel(types.void(view(_F32, 2), _I64, array(_U8)))
def _choose_bits(weights, wanted, out):
    for i in range(weights.shape[0]):
        out[i] = _bits_of_row(weights[i], wanted)


def choose_bits(weights: np.ndarray, wanted: int) -> np.ndarray:
    """float32[n, D] -> uint8[n]: the bits in which each row can freeze, 0 if in none.

    wanted 4: 4 or 8; else `wanted` itself. Every value must be finite, and for 8 bits the row's range (max - min).
    """
    out = np.empty(len(weights), np.uint8)
    _choose_bits(weights, wanted, out)
    return out


# ---- quantise -------------------------------------------------------------------------------------------------------


@kernel(types.void(view(_I64), _I64, array(types.uint32)))
def _fill_keys(row_ids, step, out):
    for i in range(row_ids.size):
        out[i] = np.uint32(mix64(hash_row_id(row_ids[i]) + np.uint64(step)) >> np.uint64(32))


def rounding_keys(row_ids: np.ndarray, step: int) -> np.ndarray:
    """int64[n] -> uint32[n]: what the random bits come from with which rows that freeze at a step are rounded."""
    keys = np.empty(len(row_ids), np.uint32)
    _fill_keys(row_ids, step, keys)
    return keys


@njit(inline="always")
def _random_pair(key, pair):
    """u of columns 2 pair and 2 pair + 1: the halves of Wellons' lowbias32 over key + pair * golden ratio."""
    x = np.uint32(key + np.uint32(np.uint32(pair) * _GOLDEN))
    x = np.uint32(np.uint32(x ^ (x >> _S16)) * _M1)
    x = np.uint32(np.uint32(x ^ (x >> _S15)) * _M2)
    x = np.uint32(x ^ (x >> _S16))
    return np.float32(np.int32(x & _LOW_HALF)) * _TO_UNIT, np.float32(np.int32(x >> _S16)) * _TO_UNIT


@njit(fastmath={"nnan", "nsz"})
def _code_at_random(value, low, inverse, last, u):
    """0 to last; last + u is exact in float32, so that it never reaches last + 1."""
    return np.uint8(np.int32(min(max((value - low) * inverse, np.float32(0.0)), last) + u))


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


@njit
def _put_float16(row, at, value):
    bits = f32_to_f16(value)
    row[at] = np.uint8(bits & np.uint16(0xFF))
    row[at + 1] = np.uint8(bits >> np.uint16(8))


@njit
def _get_float16(row, at):
    return f16_to_f32(np.uint16(np.uint16(row[at]) | (np.uint16(row[at + 1]) << np.uint16(8))))


@njit
def _scale_4bit(low, high):
    """Scale and its inverse as FBGEMM makes them; low is a float16 value by now, so high - low may be below 0."""
    span = high - low
    scale = _ONE if span == np.float32(0.0) else f16_to_f32(f32_to_f16(span / _15))
    if scale == np.float32(0.0):
        scale = _ONE
    inverse = _ONE / scale
    if (f32_to_bits(inverse) & _EXPONENT_32) == _EXPONENT_32:
        return _ONE, _ONE
    return scale, inverse


@njit(fastmath={"nnan", "nsz"})
def _code_4bit(value, low, inverse):
    """0 to 15; clipping before rounding gives the same as FBGEMM's clipping after it."""
    clipped = min(max((value - low) * inverse, np.float32(0.0)), _15)
    return np.uint8(f32_to_bits(clipped + _ROUND) & np.uint32(0xFF))


@kernel(types.void(view(_F32, 2), view(types.uint32), array(_U8, 2)))
def quantize_4bit(weights, keys, out):
    """float32[n, D] that 4 bits hold -> uint8[n, D/2+4]; without keys as FloatToFusedNBitRowwiseQuantizedSBHalf."""
    half = weights.shape[1] // 2
    for i in range(weights.shape[0]):
        row = weights[i]
        target = out[i]
        low, high = _minimum_and_maximum(row)
        low = f16_to_f32(f32_to_f16(low))
        scale, inverse = _scale_4bit(low, high)
        if keys.size:
            for d in range(half):
                u, v = _random_pair(keys[i], d)
                even = _code_at_random(row[2 * d], low, inverse, _15, u)
                odd = _code_at_random(row[2 * d + 1], low, inverse, _15, v)
                target[d] = even | np.uint8(odd << np.uint8(4))
        else:
            for d in range(half):
                even, odd = _code_4bit(row[2 * d], low, inverse), _code_4bit(row[2 * d + 1], low, inverse)
                target[d] = even | np.uint8(odd << np.uint8(4))
        _put_float16(target, half, scale)
        _put_float16(target, half + 2, low)


@kernel(types.void(view(_F32, 2), view(types.uint32), array(_U8, 2)))
def quantize_8bit(weights, keys, out):
    """float32[n, D] finite -> uint8[n, D+8]; without keys as FBGEMM's FloatToFused8BitRowwiseQuantized."""
    dim = weights.shape[1]
    for i in range(weights.shape[0]):
        row = weights[i]
        target = out[i]
        low, high = _minimum_and_maximum(row)
        inverse = _255 / ((high - low) + _FBGEMM_EPSILON)
        if keys.size:
            for d in range(dim // 2):
                u, v = _random_pair(keys[i], d)
                target[2 * d] = _code_at_random(row[2 * d], low, inverse, _255, u)
                target[2 * d + 1] = _code_at_random(row[2 * d + 1], low, inverse, _255, v)
        else:
            for d in range(dim):
                target[d] = np.uint8(f32_to_bits((row[d] - low) * inverse + _ROUND) & np.uint32(0xFF))
        _put_float32(target, dim, (high - low) / _255)
        _put_float32(target, dim + 4, low)


@kernel(types.void(view(_F32, 2), view(types.uint32), array(types.int16, 2)))
def _to_float16(weights, keys, out):
    for i in range(weights.shape[0]):
        row = weights[i]
        target = out[i]
        if keys.size:
            round_row(row, target, keys[i])
        else:
            for d in range(row.size):
                target[d] = np.int16(f32_to_f16(row[d]))


def quantise(weights: np.ndarray, bits: int, keys: np.ndarray = NEAREST) -> np.ndarray:
    """float32[n, D] -> uint8[n, row_bytes(bits, D)]; every row is one that `bits` hold.

    keys: of rounding_keys, to round up or down at random; none rounds to the nearest.
    """
    n, dim = weights.shape
    if bits == 32:
        return np.ascontiguousarray(weights).view(np.uint8)
    if bits == 16:
        halves = np.empty((n, dim), np.int16)
        _to_float16(weights, keys, halves)
        return halves.view(np.uint8)
    out = np.empty((n, row_bytes(bits, dim)), np.uint8)
    (quantize_4bit if bits == 4 else quantize_8bit)(weights, keys, out)
    return out


# ---- read -----------------------------------------------------------------------------------------------------------


@njit
def stored_bytes(bits, dim):
    """row_bytes in a kernel; 0 of 0 bits."""
    if bits == 4:
        return dim // 2 + 4
    return dim + 8 if bits == 8 else dim * (np.int64(bits) // 8)


@njit
def read_4bit(address, dim, target, mode):
    half = dim // 2
    row = carray(pointer(address), (half + 4,), np.uint8)
    scale, bias = _get_float16(row, half), _get_float16(row, half + 2)
    for d in range(half):
        store(target, 2 * d, _fused_multiply_add(np.float32(row[d] & np.uint8(15)), scale, bias), mode)
        store(target, 2 * d + 1, _fused_multiply_add(np.float32(row[d] >> np.uint8(4)), scale, bias), mode)


@njit
def read_8bit(address, dim, target, mode):
    row = carray(pointer(address), (dim + 8,), np.uint8)
    scale, bias = _get_float32(row, dim), _get_float32(row, dim + 4)
    for d in range(dim):
        store(target, d, _fused_multiply_add(np.float32(row[d]), scale, bias), mode)


@njit
def read_16bit(address, dim, target, mode):
    row = carray(pointer(address), (dim,), np.uint16)
    for d in range(dim):
        store(target, d, f16_to_f32(row[d]), mode)


@njit
def read_32bit(address, dim, target, mode):
    row = carray(pointer(address), (dim,), np.float32)
    for d in range(dim):
        store(target, d, row[d], mode)


@kernel(*[types.void(view(_I64), view(_U8), _I64, wire, _INDEX, _I64) for wire in _WIRE_OUT])
def gather_frozen(addresses, bits, dim, out, positions, mode):
    """out[positions[i]] = the frozen row of bits[i] at addresses[i], in the wire dtype; address 0 skips."""
    for i in range(addresses.size):
        if i + _AHEAD < addresses.size:  # a prefetch of address 0 does nothing
            for offset in range(0, min(stored_bytes(bits[i + _AHEAD], dim), _PREFETCH_BYTES), 64):
                prefetch(addresses[i + _AHEAD] + offset)
        if addresses[i] == 0:
            continue
        target = out[positions[i]]
        if bits[i] == 4:
            read_4bit(addresses[i], dim, target, mode)
        elif bits[i] == 8:
            read_8bit(addresses[i], dim, target, mode)
        elif bits[i] == 16:
            read_16bit(addresses[i], dim, target, mode)
        else:
            read_32bit(addresses[i], dim, target, mode)


def read_frozen(addresses: np.ndarray, bits: np.ndarray, dim: int) -> np.ndarray:
    """int64[n] row addresses, uint8[n] -> float32[n, dim]."""
    out = np.empty((len(addresses), dim), np.float32)
    gather_frozen(addresses, bits, dim, out, np.arange(len(addresses), dtype=np.int32), MODES["float32"])
    return out
