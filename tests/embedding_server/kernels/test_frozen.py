"""Frozen rows: every kernel against the plain torch reference, and the stored bytes against FBGEMM itself."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embedding_server.kernels import frozen, frozen_reference
from embedding_server.kernels.wire import MODES, from_float32, wire_view
from embedding_server.store import WIRE_NUMPY

WIRE_DTYPES = ("float32", "float16", "bfloat16")
DIMS = (4, 12, 64, 100, 128)


def addresses_of(rows: np.ndarray) -> np.ndarray:
    return rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.shape[1]


def rows_of_all_kinds(rng: np.random.Generator, dim: int) -> np.ndarray:
    rows = rng.standard_normal((240, dim)).astype(np.float32)
    rows[40:80] *= 1e-20
    rows[80:120] *= 1e30
    rows[120:160] = np.round(rows[120:160] * 3)
    rows[160:200] = rows[160:200, :1]
    rows[200:240] = 0.0
    return rows


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_frozen_rows_read_as_fbgemm_reads_them(dim: int, wire_dtype: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    weights = rows_of_all_kinds(rng, dim)
    if bits == 8:
        stored = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(weights)).numpy()
        expected = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(stored)).numpy()
    else:
        stored, expected = weights.view(np.uint8), weights
    picked = rng.permutation(len(weights))[:90]
    positions = rng.permutation(100)[:90].astype(np.int32)
    addresses = addresses_of(stored)[picked]
    addresses[::9] = 0
    out = np.full((100, dim), 7, WIRE_NUMPY[wire_dtype])
    frozen.gather_frozen(addresses, bits, dim, wire_view(out), positions, MODES[wire_dtype])
    is_read = addresses != 0
    wanted = np.full((100, dim), 7, WIRE_NUMPY[wire_dtype])
    wanted[positions[is_read]] = from_float32(expected[picked[is_read]], wire_dtype)
    assert out.tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(
        frozen.read_frozen(addresses_of(stored), bits, dim).view(np.uint32), expected.view(np.uint32)
    )
    np.testing.assert_allclose(frozen_reference.read_frozen(stored, bits, dim), expected, rtol=1e-6, atol=0)


def test_frozen_rows_may_be_unaligned() -> None:
    weights = np.random.default_rng(3).standard_normal((9, 8)).astype(np.float32)
    shifted = np.empty(9 * 32 + 1, np.uint8)[1:].reshape(9, 32)
    shifted[:] = weights.view(np.uint8)
    np.testing.assert_array_equal(frozen.read_frozen(addresses_of(shifted), 32, 8), weights)


@pytest.mark.parametrize("dim", DIMS)
def test_quantize_8bit_equals_fbgemm_byte_for_byte(dim: int) -> None:
    weights = rows_of_all_kinds(np.random.default_rng(4), dim)
    out = np.empty((len(weights), dim + 8), np.uint8)
    frozen.quantize_8bit(weights, out)
    expected = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(weights)).numpy()
    assert out.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(frozen_reference.quantize_8bit(weights), expected)


@settings(max_examples=300, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 10).map(lambda x: 4 * x)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_any_row_that_can_freeze_is_stored_as_fbgemm_stores_it(weights: np.ndarray) -> None:
    np.testing.assert_array_equal(frozen.can_freeze(weights), frozen_reference.can_freeze(weights))
    # FBGEMM keeps the sign of whichever zero it meets first as the minimum; no dequantised value depends on it.
    weights = weights[frozen.can_freeze(weights)] + np.float32(0.0)
    out = np.empty((len(weights), weights.shape[1] + 8), np.uint8)
    frozen.quantize_8bit(weights, out)
    if len(weights):
        expected = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(weights))
        assert out.tobytes() == expected.numpy().tobytes()
        restored = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(expected).numpy()
        dim = weights.shape[1]
        assert frozen.read_frozen(addresses_of(out), 8, dim).tobytes() == restored.tobytes()


def test_can_freeze_names_rows_that_8_bits_cannot_hold() -> None:
    big = np.float32(3e38)
    rows = np.zeros((5, 8), np.float32)
    rows[1, 7], rows[2, 0], rows[3, 3] = np.nan, -np.inf, np.inf
    rows[4, :2] = big, -big
    assert frozen.can_freeze(rows).tolist() == [True, False, False, False, False]
    assert frozen.can_freeze(rows[:0]).shape == (0,)
