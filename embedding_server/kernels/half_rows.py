"""Hot rows of float16 weights (`hot_bits: 16`): reading them, and rounding to them so that nothing is lost on average.

An update is often smaller than half the distance between two float16 values. Rounded to the nearest, it would be lost
every time; rounded up or down at random, with the probability that makes the mean right, it counts (stochastic
rounding, Gupta et al. 2015). Optimizer state stays float32, and so does the arithmetic of an update: it reads the row,
updates float32[D], and rounds once.

    keep the low 13 bits of |w|, what float16 has no place for, as a share u of the distance to the next value up;
    go up with probability u: add 13 random bits to them and drop the sum's low 13 bits

so E[result] = w exactly for |w| in [2^-14, 65504]. Below, float16 values are 2^-24 apart: |w| + 2^-14 has that
distance, is rounded so, and loses the 2^-14 again; that addition rounds |w| to a multiple of 2^-37 first. Beyond 65504,
and at infinity, the result is 65504: a row never becomes infinite. NaN stays NaN.

The random bits are a function of (row_id, step, purpose, column), no generator's state: a run repeats itself however
threads share the rows, on any number of shards, and in whatever slots a restore puts them. Rows that freeze to 16 bits
are rounded so too, by keys of their own (frozen.py).

A row is an int16 array, as float16 is in vectors.py.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from embedding_server.kernels.hashing import mix64
from embedding_server.kernels.vectors import (
    LANES,
    at,
    element_pointer,
    float32x16,
    load1,
    load16,
    splat_constant,
    store1,
    store16,
    vector_type,
)

_F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
MAX_HALF = 65504.0
_LARGEST = np.float32(MAX_HALF)
#: purposes of a rounding: one step may round a row twice
UPDATE, SETTLE = 0, 1
_GOLDEN = 0x9E3779B9
_STREAM_STEP = np.uint64(0x9E3779B97F4A7C15)
_MAX_HALF_BITS, _LEAST_NORMAL_BITS, _INFINITY_BITS, _NAN = 0x477FE000, 0x38800000, 0x7F800000, 0x7E00
_LEAST_NORMAL = 2.0**-14


def _random_13(builder, key, column, lanes):
    """13 random bits for each lane: a 32-bit mixer (Wellons' lowbias32) over key + column * golden ratio."""
    first = builder.add(key, builder.mul(builder.trunc(column, _I32), _I32(_GOLDEN)))
    if lanes > 1:
        undefined = ir.Constant(vector_type(_I32, lanes), ir.Undefined)
        first = builder.insert_element(undefined, first, _I32(0))
        first = builder.shuffle_vector(first, undefined, ir.Constant(vector_type(_I32, lanes), [0] * lanes))
        steps = [_GOLDEN * lane & 0xFFFFFFFF for lane in range(lanes)]
        first = builder.add(first, ir.Constant(vector_type(_I32, lanes), steps))
    x = first
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = builder.xor(x, builder.lshr(x, splat_constant(_I32, shift, lanes)))
        x = builder.mul(x, splat_constant(_I32, factor, lanes))
    x = builder.xor(x, builder.lshr(x, splat_constant(_I32, 16, lanes)))
    return builder.lshr(x, splat_constant(_I32, 19, lanes))


def _to_half(builder, value, random, lanes):
    """float32 lanes -> int16 lanes that hold float16, rounded up or down by the 13 random bits."""
    ints, floats = vector_type(_I32, lanes), vector_type(_F32, lanes)
    bits = builder.bitcast(value, ints)
    size = builder.and_(bits, splat_constant(_I32, 0x7FFFFFFF, lanes))
    is_small = builder.icmp_unsigned("<", size, splat_constant(_I32, _LEAST_NORMAL_BITS, lanes))
    base = builder.select(is_small, splat_constant(_F32, _LEAST_NORMAL, lanes), splat_constant(_F32, 0.0, lanes))
    lifted = builder.bitcast(builder.fadd(builder.bitcast(size, floats), base), ints)
    largest = splat_constant(_I32, _MAX_HALF_BITS, lanes)
    lifted = builder.select(builder.icmp_unsigned("<", lifted, largest), lifted, largest)
    rounded = builder.and_(builder.add(lifted, random), splat_constant(_I32, 0xFFFFE000, lanes))
    exact = builder.fsub(builder.bitcast(rounded, floats), base)
    half = builder.bitcast(builder.fptrunc(exact, vector_type(ir.HalfType(), lanes)), vector_type(_I16, lanes))
    sign = builder.lshr(builder.and_(bits, splat_constant(_I32, 0x80000000, lanes)), splat_constant(_I32, 16, lanes))
    half = builder.or_(half, builder.trunc(sign, vector_type(_I16, lanes)))
    is_nan = builder.icmp_unsigned(">", size, splat_constant(_I32, _INFINITY_BITS, lanes))
    return builder.select(is_nan, splat_constant(_I16, _NAN, lanes), half)


def _rounding_storer(lanes, operand):
    def typed(typingctx, row, column, value, key):
        def codegen(context, builder, signature, args):
            pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
            half = _to_half(builder, args[2], _random_13(builder, args[3], args[1], lanes), lanes)
            builder.store(half, builder.bitcast(pointer, half.type.as_pointer()), align=2)
            return context.get_dummy_value()

        return types.none(row, types.uint64, operand, types.uint32), codegen

    return typed


_round16 = intrinsic(_rounding_storer(LANES, float32x16))
_round1 = intrinsic(_rounding_storer(1, types.float32))


@njit(inline="always")
def rounding_key(row_id, step, purpose):
    """uint32 from which the random bits of a row's rounding come: of output 2 step + purpose of the SplitMix64 that
    starts from the row_id."""
    count = np.uint64(2 * step + purpose) * _STREAM_STEP
    return np.uint32(mix64(np.uint64(row_id) + count) >> np.uint64(32))


@njit(forceinline=True)
def round_row(values, row, key):
    """row int16[D] = values float32[D], rounded up or down at random."""
    d = 0
    while d + LANES <= values.size:
        _round16(row, at(d), load16(values, at(d)), key)
        d += LANES
    while d < values.size:
        _round1(row, at(d), load1(values, at(d)), key)
        d += 1


@njit(forceinline=True)
def expand_row(row, values):
    """values float32[D] = row int16[D]."""
    d = 0
    while d + LANES <= values.size:
        store16(values, at(d), load16(row, at(d)))
        d += LANES
    while d < values.size:
        store1(values, at(d), load1(row, at(d)))
        d += 1


def value_at(row, d):
    """row[d] as float32; row float32[D], or int16[D] that holds float16."""
    raise NotImplementedError("call from numba kernels only")


@overload(value_at, inline="always")
def _value_at(row, d):
    if row.dtype == types.float32:
        return lambda row, d: row[d]
    return lambda row, d: load1(row, at(d))


@njit(forceinline=True)
def put_nearest(row, d, value):
    """row[d] = value, rounded to the nearest, at most 65504 in size: for what is no update. row int16[D]."""
    limited = _LARGEST if value > _LARGEST else -_LARGEST if value < -_LARGEST else value
    store1(row, at(d), limited)
