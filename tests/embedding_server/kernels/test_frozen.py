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
    """Ordinary, tiny, subnormal, huge, integer, constant, all-zero rows, and rows of small range far from zero."""
    rows = rng.standard_normal((400, dim)).astype(np.float32)
    rows[40:60] *= 1e-20
    rows[60:80] *= 1e-42
    rows[80:120] *= 1e30
    rows[120:160] = np.round(rows[120:160] * 3)
    rows[160:200] = rows[160:200, :1]
    rows[200:240] = 0.0
    rows[240:280] *= 20_000.0
    rows[280:320] *= 0.01
    rows[320:340] += 1000.0
    rows[340:360] = 50_000.0 + 0.1 * rows[340:360]
    rows[360:380] = 1.0 + 1e-3 * rows[360:380]
    rows[380:400] *= np.float32(2.0**-14)
    return rows


def rows_for(bits: int, weights: np.ndarray) -> np.ndarray:
    return weights[frozen.choose_bits(weights, bits) == bits]


def fbgemm_quantise(weights: np.ndarray, bits: int) -> np.ndarray:
    w = torch.from_numpy(weights)
    if bits == 8:
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(w).numpy()
    return torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(w, bits).numpy()


def fbgemm_read(rows: np.ndarray, bits: int) -> np.ndarray:
    stored = torch.from_numpy(rows)
    if bits == 8:
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(stored).numpy()
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, bits).numpy()


def bits_array(bits: int, rows: np.ndarray) -> np.ndarray:
    return np.full(len(rows), bits, np.uint8)


any_rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 10).map(lambda x: 4 * x)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-65504.0, 65504.0, width=32)
    | st.floats(-1.0, 1.0, width=32),
)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", DIMS)
def test_quantise_equals_fbgemm_byte_for_byte(dim: int, bits: int) -> None:
    weights = rows_for(bits, rows_of_all_kinds(np.random.default_rng(4), dim))
    out = frozen.quantise(weights, bits)
    assert out.shape == (len(weights), frozen.row_bytes(bits, dim))
    assert out.tobytes() == fbgemm_quantise(weights, bits).tobytes()
    np.testing.assert_array_equal(frozen_reference.quantise(weights, bits), out)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("dim", DIMS)
def test_quantise_to_floats(dim: int, bits: int) -> None:
    weights = rows_for(bits, rows_of_all_kinds(np.random.default_rng(4), dim))
    expected = weights.astype(np.float16) if bits == 16 else weights
    assert frozen.quantise(weights, bits).tobytes() == expected.tobytes()
    assert frozen_reference.quantise(weights, bits).tobytes() == expected.tobytes()


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_frozen_rows_read_as_fbgemm_reads_them(dim: int, wire_dtype: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    weights = rows_for(bits, rows_of_all_kinds(rng, dim))
    stored = frozen_reference.quantise(weights, bits)
    expected = fbgemm_read(stored, bits) if bits < 16 else frozen_reference.read_frozen(stored, bits, dim)
    picked = rng.permutation(len(weights))[:90]
    positions = rng.permutation(100)[:90].astype(np.int32)
    addresses = addresses_of(stored)[picked]
    addresses[::9] = 0
    out = np.full((100, dim), 7, WIRE_NUMPY[wire_dtype])
    formats = bits_array(bits, picked)
    frozen.gather_frozen(addresses, formats, dim, wire_view(out), positions, MODES[wire_dtype])
    is_read = addresses != 0
    wanted = np.full((100, dim), 7, WIRE_NUMPY[wire_dtype])
    wanted[positions[is_read]] = from_float32(expected[picked[is_read]], wire_dtype)
    assert out.tobytes() == wanted.tobytes()
    read = frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), dim)
    np.testing.assert_array_equal(read.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_allclose(frozen_reference.read_frozen(stored, bits, dim), expected, rtol=1e-6, atol=0)


def test_one_call_reads_rows_of_all_formats() -> None:
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((40, 12)).astype(np.float32)
    formats = np.array([4, 8, 16, 32] * 10, np.uint8)
    stored = [frozen.quantise(weights[i : i + 1], int(bits)) for i, bits in enumerate(formats)]
    addresses = np.array([row.ctypes.data for row in stored], np.int64)
    out = frozen.read_frozen(addresses, formats, 12)
    for i, (row, bits) in enumerate(zip(stored, formats.tolist(), strict=True)):
        np.testing.assert_array_equal(out[i], frozen.read_frozen(addresses_of(row), bits_array(bits, row), 12)[0])
        assert (np.abs(out[i] - weights[i]) <= frozen_reference.error_bound(weights[i : i + 1], bits)).all()


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_frozen_rows_may_be_unaligned(bits: int) -> None:
    weights = np.random.default_rng(3).standard_normal((9, 8)).astype(np.float32)
    stored = frozen.quantise(weights, bits)
    shifted = np.empty(stored.size + 1, np.uint8)[1:].reshape(stored.shape)
    shifted[:] = stored
    formats = bits_array(bits, stored)
    ours, theirs = (frozen.read_frozen(addresses_of(rows), formats, 8) for rows in (shifted, stored))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bits", [4, 8, 16])
@settings(max_examples=300, deadline=None)
@given(weights=any_rows)
def test_any_row_that_can_freeze_comes_back_within_its_bound(bits: int, weights: np.ndarray) -> None:
    chosen = frozen.choose_bits(weights, bits)
    np.testing.assert_array_equal(chosen, frozen_reference.choose_bits(weights, bits))
    for taken in np.unique(chosen[chosen > 0]).tolist():
        # FBGEMM keeps the sign of whichever zero it meets first as the minimum; no dequantised value depends on it.
        rows = weights[chosen == taken] + np.float32(0.0)
        out = frozen.quantise(rows, taken)
        read = frozen.read_frozen(addresses_of(out), bits_array(taken, out), rows.shape[1])
        if taken < 16:
            assert out.tobytes() == fbgemm_quantise(rows, taken).tobytes()
            assert read.tobytes() == fbgemm_read(out, taken).tobytes()
        assert np.isfinite(read).all()
        error = np.abs(read.astype(np.float64) - rows.astype(np.float64))
        assert (error <= frozen_reference.error_bound(rows, taken)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dim", DIMS)
def test_rows_of_all_kinds_come_back_within_their_bound(dim: int, bits: int) -> None:
    weights = rows_of_all_kinds(np.random.default_rng(8), dim)
    rows = rows_for(bits, weights)
    assert len(rows) > 0.5 * len(weights)
    stored = frozen.quantise(rows, bits)
    read = frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), dim)
    assert np.isfinite(read).all()
    error = np.abs(read.astype(np.float64) - rows.astype(np.float64))
    assert (error <= frozen_reference.error_bound(rows, bits)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_all_zero_and_small_constant_rows_come_back_exactly(bits: int) -> None:
    weights = np.array([[0.0] * 8, [0.5] * 8, [-3.0] * 8, [1024.0] * 8, [-(2.0**-14)] * 8], np.float32)
    stored = frozen.quantise(weights, bits)
    assert (frozen.choose_bits(weights, bits) == bits).all()
    np.testing.assert_array_equal(frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), 8), weights)


# ---- rounding at random ---------------------------------------------------------------------------------------------


def keys_of(weights: np.ndarray, step: int = 1) -> np.ndarray:
    return frozen.rounding_keys(np.arange(len(weights), dtype=np.int64) - 5, step)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("dim", DIMS)
def test_rounding_at_random_is_the_reference_bit_for_bit_and_within_its_bound(dim: int, bits: int) -> None:
    weights = rows_for(bits, rows_of_all_kinds(np.random.default_rng(8), dim))
    for step in (0, 1, 2**31 - 1):
        keys = keys_of(weights, step)
        np.testing.assert_array_equal(
            keys, frozen_reference.rounding_keys(np.arange(len(weights), dtype=np.int64) - 5, step)
        )
        stored = frozen.quantise(weights, bits, keys)
        np.testing.assert_array_equal(stored, frozen_reference.quantise(weights, bits, keys))
        read = frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), dim)
        error = np.abs(read.astype(np.float64) - weights.astype(np.float64))
        assert (error <= frozen_reference.error_bound(weights, bits, at_random=True)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
@settings(max_examples=300, deadline=None)
@given(weights=any_rows, step=st.integers(0, 2**31 - 1))
def test_any_row_rounded_at_random_comes_back_within_its_bound(bits: int, weights: np.ndarray, step: int) -> None:
    chosen = frozen.choose_bits(weights, bits)
    for taken in np.unique(chosen[chosen > 0]).tolist():
        rows = weights[chosen == taken] + np.float32(0.0)
        out = frozen.quantise(rows, taken, keys_of(rows, step))
        np.testing.assert_array_equal(out, frozen_reference.quantise(rows, taken, keys_of(rows, step)))
        read = frozen.read_frozen(addresses_of(out), bits_array(taken, out), rows.shape[1])
        assert np.isfinite(read).all()
        error = np.abs(read.astype(np.float64) - rows.astype(np.float64))
        assert (error <= frozen_reference.error_bound(rows, taken, at_random=True)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rounding_at_random_is_right_on_average(bits: int) -> None:
    draws, dim = 20_000, 64
    row = np.random.default_rng(6).uniform(-1.0, 1.0, dim).astype(np.float32)
    row[:2] = -1.0, 1.0 - 2.0**-11  # float16 holds the ends
    weights = np.tile(row, (draws, 1))
    keys = [frozen.rounding_keys(np.full(1, 77, np.int64), step)[0] for step in range(draws)]  # one row, many steps
    for some_keys in (keys_of(weights), np.array(keys)):
        stored = frozen.quantise(weights, bits, some_keys)
        read = frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), dim).astype(np.float64)
        assert len(np.unique(read[:, 5])) == 2
        noise = read.std(axis=0) / draws**0.5
        # 15 * 2^-11 of a scale: the scale of 4 bits is a float16
        allowed = 5.0 * noise + 15 * 2.0**-11 * 2 / (2**bits - 1) * (bits == 4) + 2.0**-16 * 2 / (2**bits - 1)
        assert (np.abs(read.mean(axis=0) - row) <= allowed).all()
        correlation = np.corrcoef(read[:, 2:].T) - np.eye(dim - 2)
        assert np.abs(correlation).max() < 6.0 / draws**0.5  # columns are rounded one by one


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_small_updates_between_freezes_count_with_rounding_at_random_alone(bits: int) -> None:
    start = np.tile(np.linspace(-1.0, 1.0, 64, dtype=np.float32), (500, 1))
    update = np.zeros_like(start)
    update[:, 20:40] = 0.1 * {4: 2.0 / 15, 8: 2.0 / 255, 16: 2.0**-12}[bits]  # a tenth of a step
    moved = []
    for at_random in (False, True):
        weights = start.copy()
        for step in range(30):
            stored = frozen.quantise(weights + update, bits, keys_of(weights, step) if at_random else frozen.NEAREST)
            weights = frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), 64)
        moved.append(float((weights - start)[:, 20:40].mean() / (30 * update[0, 20])))
    assert abs(moved[0]) < 0.4
    assert 0.9 < moved[1] < 1.1


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_rows_on_the_grid_stay_with_any_key(bits: int) -> None:
    weights = np.array([[0.0] * 8, [0.5] * 8, [-3.0] * 8, [1024.0] * 8, [-(2.0**-14)] * 8], np.float32)
    for step in range(50):
        stored = frozen.quantise(weights, bits, keys_of(weights, step))
        np.testing.assert_array_equal(frozen.read_frozen(addresses_of(stored), bits_array(bits, stored), 8), weights)


def test_choose_bits_takes_four_then_eight_then_none() -> None:
    big, fine = np.float32(3e38), np.float32(15 * 2.0**-14)
    rows = np.zeros((11, 8), np.float32)
    rows[1, 7], rows[2, 0], rows[3, 3] = np.nan, -np.inf, np.inf
    rows[4, :2] = big, -big  # the range overflows
    rows[5, 0] = 60_000.0
    rows[6, 0] = np.nextafter(np.float32(60_000.0), np.float32(np.inf))
    rows[7, 0] = -60_001.0
    rows[8, 0] = fine
    rows[9, 0] = np.nextafter(fine, np.float32(0.0))
    rows[10] = 1e-30  # constant
    assert frozen.choose_bits(rows, 4).tolist() == [4, 0, 0, 0, 0, 4, 8, 8, 4, 8, 4]
    assert frozen.choose_bits(rows, 8).tolist() == [8, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8]
    assert frozen.choose_bits(rows, 32).tolist() == [32, 0, 0, 0, 32, 32, 32, 32, 32, 32, 32]
    rows[5, 0], rows[6, 0] = 65_504.0, np.nextafter(np.float32(65_504.0), np.float32(np.inf))
    assert frozen.choose_bits(rows, 16).tolist() == [16, 0, 0, 0, 0, 16, 0, 16, 16, 16, 16]
    assert frozen.choose_bits(rows[:0], 4).shape == (0,)
