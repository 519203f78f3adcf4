"""The vector intrinsics against numpy, value by value, for each wire dtype."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from embedding_server.kernels.vectors import (
    add16,
    at,
    kernel_view,
    largest16,
    load1,
    load16,
    mul16,
    scale16,
    splat16,
    store1,
    store16,
    stream16,
    sum16,
    top_bits16,
    zero16,
)
from embedding_server.kernels.wire import from_float32, to_float32
from embedding_server.store import WIRE_NUMPY

DTYPES = ["float32", "float16", "bfloat16"]
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    6e-8,
    -6.1e-5,
    65504.0,
    65519.0,
    1e30,
    3.4e38,
    np.inf,
    -np.inf,
    np.nan,
    1.00390625,
    1.01171875,
]


@njit
def _load(source, out):
    for i in range(0, source.size, 16):
        store16(out, at(i), load16(source, at(i)))


@njit
def _load_one_by_one(source, out):
    for i in range(source.size):
        store1(out, at(i), load1(source, at(i)))


@njit
def _store(source, out):
    for i in range(0, source.size, 16):
        store16(out, at(i), load16(source, at(i)))


@njit
def _stream(source, out):
    for i in range(0, source.size, 16):
        stream16(out, at(i), load16(source, at(i)))


@njit
def _arithmetic(a, b, factor, out):
    total = zero16()
    for i in range(0, a.size, 16):
        total = add16(total, scale16(mul16(load16(a, at(i)), load16(b, at(i))), factor))
    store16(out, at(0), add16(total, splat16(np.float32(0.5))))
    return sum16(total)


@njit
def _largest(a):
    largest = zero16()
    for i in range(0, a.size, 16):
        largest = largest16(largest, load16(a, at(i)))
    return top_bits16(largest)


def samples(size: int = 1024) -> np.ndarray:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-12, 6, size)).astype(np.float32)
    values[: len(SPECIAL)] = SPECIAL
    return values


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    raw = np.zeros(size * dtype.itemsize + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size * dtype.itemsize].view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", [_load, _load_one_by_one])
def test_load_converts_as_the_reference(dtype: str, loop) -> None:
    wire = from_float32(samples(), dtype)
    out = np.empty(wire.size, np.float32)
    loop(kernel_view(wire, dtype), out)
    assert np.array_equal(out, to_float32(wire, dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", [_store, _stream, _load_one_by_one])
def test_store_rounds_as_the_reference(dtype: str, loop) -> None:
    values = samples()
    out = aligned(values.size, WIRE_NUMPY[dtype])
    loop(values, kernel_view(out, dtype))
    expected = to_float32(from_float32(values, dtype), dtype)
    assert np.array_equal(to_float32(out, dtype), expected, equal_nan=True)


def test_arithmetic() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.integers(-9, 9, (2, 64)).astype(np.float32)
    out = np.empty(16, np.float32)
    total = _arithmetic(a, b, np.float32(0.25), out)
    lanes = (a * b * 0.25).reshape(4, 16).sum(axis=0)
    assert np.array_equal(out, lanes + 0.5)
    assert total == lanes.sum()


@pytest.mark.parametrize(
    "worst",
    [-3.5, 3.4e38, np.inf, -np.inf, np.nan],
)
def test_largest_orders_by_magnitude_then_infinity_then_nan(worst: float) -> None:
    values = np.linspace(-1, 1, 64).astype(np.float32)
    values[37] = worst
    assert _largest(values) == np.abs(np.float32(worst)).view(np.uint32)
