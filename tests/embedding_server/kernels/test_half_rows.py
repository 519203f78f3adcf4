"""Rounding to float16 at random: bit for bit the reference, right on average, never infinite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from embedding_server.kernels import half_rows, reference
from embedding_server.kernels.half_rows import SETTLE, UPDATE

DRAWS = 1 << 15


@njit
def _round_rows(values, rows, row_ids, step, purpose):
    for i in range(values.shape[0]):
        half_rows.round_row(values[i], rows[i], half_rows.rounding_key(row_ids[i], step, purpose))


@njit
def _expand_rows(rows, values):
    for i in range(values.shape[0]):
        half_rows.expand_row(rows[i], values[i])


def rounded(values: np.ndarray, row_ids: np.ndarray, step: int, purpose: int = UPDATE) -> np.ndarray:
    rows = np.empty(values.shape, np.int16)
    _round_rows(values, rows, row_ids, step, purpose)
    return rows.view(np.float16)


def spread_values(dim: int) -> np.ndarray:
    """float32[2000, dim] of every size, beyond what float16 holds at both ends."""
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((2000, dim)) * np.exp2(rng.integers(-45, 18, (2000, dim)))
    return values.astype(np.float32)


@pytest.mark.parametrize("dim", [4, 16, 28, 64])
@pytest.mark.parametrize("purpose", [UPDATE, SETTLE])
def test_it_is_the_reference_bit_for_bit(dim: int, purpose: int) -> None:
    values = spread_values(dim)
    row_ids = np.random.default_rng(1).integers(-(2**63), 2**63, len(values))
    for step in (1, 77, 2**31 - 1):
        wanted = reference.round_rows(values, reference.rounding_keys(row_ids, step, purpose))
        np.testing.assert_array_equal(rounded(values, row_ids, step, purpose).view(np.uint16), wanted.view(np.uint16))


def test_the_result_is_one_of_the_two_neighbours_and_what_float16_holds_stays() -> None:
    values = spread_values(64).clip(-65504, 65504)
    result = rounded(values, np.arange(len(values), dtype=np.int64), 3)
    _, exponent = np.frexp(np.maximum(np.abs(values), np.float32(2.0**-14)))
    assert (np.abs(result.astype(np.float64) - values) < np.exp2(exponent - 11.0)).all()
    nearest = values.astype(np.float16)
    held = nearest.astype(np.float32)
    for step in range(1, 6):
        np.testing.assert_array_equal(rounded(held, np.arange(len(held), dtype=np.int64), step), nearest)


@settings(max_examples=40, deadline=None)
@given(value=st.floats(-60000, 60000, width=32), scale=st.sampled_from([1.0, 1e-3, 1e-6, 1e-8]))
def test_the_mean_is_the_value(value: float, scale: float) -> None:
    value = float(np.float32(value * scale))
    values = np.full((DRAWS // 16, 16), value, np.float32)
    result = rounded(values, np.arange(len(values), dtype=np.int64), 5).astype(np.float64)
    low, high = result.min(), result.max()
    share = (value - low) / (high - low) if high > low else 0.0
    five_sigma = 5 * (high - low) * np.sqrt(share * (1 - share) / DRAWS) + 2.0**-38
    assert low <= value <= high or abs(value) < 2.0**-36  # beyond: |w| + 2^-14 has no place for them
    assert abs(result.mean() - value) <= five_sigma


def test_small_updates_count_on_average() -> None:
    """A thousand steps of a tenth of the distance to the next value: nearest would stay at 1."""
    weights = np.ones((4096, 16), np.float32)
    row_ids, step_size = np.arange(4096, dtype=np.int64), np.float32(2.0**-10 / 10)
    for step in range(1, 201):
        weights = rounded(weights + step_size, row_ids, step).astype(np.float32)
    moved = float(weights.astype(np.float64).mean()) - 1.0
    assert moved == pytest.approx(200 * float(step_size), rel=0.01)


@pytest.mark.parametrize("apart", [1, 1 << 32])  # row_ids may differ in their upper halves alone, as steps do in keys
def test_rows_columns_and_steps_are_rounded_independently(apart: int) -> None:
    values = np.full((4096, 32), 1.0 + 2.0**-11, np.float32)  # halfway
    row_ids = np.arange(4096, dtype=np.int64) * apart
    ups = [rounded(values, row_ids, step, purpose) > 1 for step, purpose in ((1, 0), (1, 1), (2, 0), (3, 0))]
    for up in ups:
        assert up.mean() == pytest.approx(0.5, abs=0.01)
        columns = np.corrcoef(up.T.astype(np.float64)) - np.eye(32)
        assert np.abs(columns).max() < 0.09  # 5.7 sigma of 496 pairs of 4096 draws
        assert np.abs(up.mean(axis=1) - 0.5).std() < 1.2 * np.sqrt(0.25 / 32)
    for i in range(len(ups)):
        for j in range(i):
            assert (ups[i] == ups[j]).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("row_id", [0, 77, -1, 2**62])
def test_one_row_is_rounded_independently_at_each_of_its_steps(row_id: int) -> None:
    values, one = np.full((1, 16), 1.0 + 2.0**-10 / 4, np.float32), np.full(1, row_id, np.int64)
    steps = 1 << 14
    ups = np.concatenate([rounded(values, one, step) > 1 for step in range(1, steps + 1)]).astype(np.float64)
    five_sigma = 5 * np.sqrt(0.25 * 0.75 / ups.size)
    assert ups.mean() == pytest.approx(0.25, abs=five_sigma)
    centred = ups - 0.25
    for lag in (1, 2, 3, 64):  # in one column, from a step to a later one
        assert abs((centred[lag:] * centred[:-lag]).mean()) < five_sigma


def test_it_saturates_and_keeps_nan() -> None:
    values = np.array([[65504, 65519.99, 65520, 1e30, np.inf, -1e38, -np.inf, np.nan]], np.float32).repeat(64, 0)
    result = rounded(values, np.arange(64, dtype=np.int64), 1)
    assert (result[:, :5] == 65504).all()
    assert (result[:, 5:7] == -65504).all()
    assert np.isnan(result[:, 7]).all()


def test_zero_keeps_its_sign_and_expansion_is_exact() -> None:
    zeros = np.array([[0.0, -0.0, 1e-45, -1e-45]], np.float32)
    result = rounded(zeros, np.zeros(1, np.int64), 1)
    assert np.signbit(result).tolist() == [[False, True, False, True]]
    assert not result.any()
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 32)
    values = np.empty(every.shape, np.float32)
    _expand_rows(every.view(np.int16), values)
    np.testing.assert_array_equal(values, every.view(np.float16).astype(np.float32))
