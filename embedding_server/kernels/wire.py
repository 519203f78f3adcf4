"""Wire dtypes inside numba kernels: load and store of float32, float16 and bfloat16 values as vectorising LLVM code.

numba has no float16 arithmetic on CPUs and no bfloat16 at all, so both travel as uint16 arrays and are converted with
two intrinsics each. bfloat16 rounds to nearest even, keeps NaN; float16 uses the CPU's own conversion (vcvtps2ph),
which matters because numpy's astype(float16) takes 65 ns for each subnormal result.

Use: decide once per kernel call, `mode = wire_mode(array)`, view the array with `wire_view`, and call
load(values, i, mode) / store(values, i, x, mode) with a *literal* specialisation by dtype (float32 arrays take the
float32 path at compile time; uint16 arrays branch on mode, hoisted by LLVM's loop unswitching).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
MODES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


@intrinsic
def f16_to_f32(typingctx, x):
    def codegen(context, builder, signature, args):
        half = builder.bitcast(args[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx, x):
    def codegen(context, builder, signature, args):
        half = builder.fptrunc(args[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def bits_to_f32(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def f32_to_bits(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@njit(inline="always")
def bf16_to_f32(x):
    return bits_to_f32(np.uint32(np.uint32(x) << np.uint32(16)))


@njit(inline="always")
def f32_to_bf16(x):
    bits = f32_to_bits(np.float32(x))
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # A mask in place of a branch: inlined twice in one kernel, a branch makes numba warn (NumbaIRAssumptionWarning).
    is_nan = np.uint32((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000))
    nan_mask = np.uint32(np.uint32(0) - is_nan)
    return np.uint16(((rounded >> np.uint32(16)) & ~nan_mask) | (np.uint32(0x7FC0) & nan_mask))


def load(values, i, mode):
    """values[i] as float32; values is a 1-D float32 or uint16 array."""
    raise NotImplementedError("call from numba kernels only")


def store(values, i, x, mode):
    """values[i] = x, converted to the wire dtype."""
    raise NotImplementedError("call from numba kernels only")


@overload(load, inline="always")
def _load(values, i, mode):
    if values.dtype == types.float32:
        return lambda values, i, mode: values[i]
    return lambda values, i, mode: f16_to_f32(values[i]) if mode == 1 else bf16_to_f32(values[i])


@overload(store, inline="always")
def _store(values, i, x, mode):
    if values.dtype == types.float32:

        def store_f32(values, i, x, mode):
            values[i] = x

        return store_f32

    def store_16(values, i, x, mode):
        if mode == 1:
            values[i] = f32_to_f16(np.float32(x))
        else:
            values[i] = f32_to_bf16(np.float32(x))

    return store_16


def wire_view(values: np.ndarray) -> np.ndarray:
    """The array as kernels take it: float32 as it is, float16 and bfloat16 as uint16 (no copy)."""
    return values if values.dtype == np.float32 else values.view(np.uint16)


def to_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Wire values -> float32 array of the same shape (a copy unless float32).

    The plain reference of the kernels' load().
    """
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.view(np.float16).astype(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 array -> wire values of the same shape. The plain reference of the kernels' store()."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
