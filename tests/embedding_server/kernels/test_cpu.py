"""Every numba kernel against the plain torch reference."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.kernels import cpu, reference
from embedding_server.kernels.kernel import Kernel, warm_up
from embedding_server.kernels.row_updates import NUM_CONSTANTS, SGD
from embedding_server.kernels.wire import MODES, from_float32, wire_view
from embedding_server.store import WIRE_NUMPY

WIRE_DTYPES = ("float32", "float16", "bfloat16")
DIMS = (4, 12, 64, 100, 128)


def rows_of_all_kinds(rng: np.random.Generator, dim: int) -> np.ndarray:
    rows = rng.standard_normal((240, dim)).astype(np.float32)
    rows[40:80] *= 1e-20
    rows[80:120] *= 1e30
    rows[120:160] = np.round(rows[120:160] * 3)
    rows[160:200] = rows[160:200, :1]
    rows[200:240] = 0.0
    return rows


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_gather_equals_the_reference_bit_for_bit(dim: int, wire_dtype: str) -> None:
    rng = np.random.default_rng(1)
    weights = rows_of_all_kinds(rng, dim)
    slots = rng.integers(0, len(weights), 150).astype(np.int32)
    slots[::7] = -1
    positions = rng.permutation(200)[:150].astype(np.int32)
    ours = np.full((200, dim), 7, WIRE_NUMPY[wire_dtype])
    theirs = ours.copy()
    cpu.gather(weights, slots, wire_view(ours), positions, MODES[wire_dtype])
    reference.gather(weights, slots, theirs, positions, wire_dtype)
    assert ours.tobytes() == theirs.tobytes()
    untouched = np.setdiff1d(np.arange(200), positions[slots >= 0])
    assert (ours[untouched] == 7).all()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_all_finite_finds_the_first_bad_value(wire_dtype: str) -> None:
    rng = np.random.default_rng(5)
    good = from_float32(rng.standard_normal((300, 64)).astype(np.float32), wire_dtype)
    mode = MODES[wire_dtype]
    assert cpu.all_finite(good, mode) == -1
    assert cpu.all_finite(good[:0], mode) == -1
    largest = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.3e38}[wire_dtype]
    assert cpu.all_finite(from_float32(np.full((1, 4), largest, np.float32), wire_dtype), mode) == -1
    for bad in (np.nan, np.inf, -np.inf):
        for first in (0, 5000, 300 * 64 - 1):
            values = good.copy()
            values.reshape(-1)[first:] = from_float32(np.array([bad], np.float32), wire_dtype)[0]
            assert cpu.all_finite(values, mode) == first
            assert reference.all_finite(values, wire_dtype) == first


def test_initial_values_equal_the_reference_and_stay_what_they_are() -> None:
    row_ids = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789], np.int64)
    ours = cpu.initial_values(row_ids, 2**64 - 3, 64, -0.01, 0.01)
    assert ours.tobytes() == reference.initial_values(row_ids, 2**64 - 3, 64, -0.01, 0.01).tobytes()
    assert len(np.unique(ours)) > 0.99 * ours.size
    # DO NOT CHANGE: tables in the field recompute rows that were never trained
    known = cpu.initial_values(np.array([42], np.int64), 7, 4, -1.0, 1.0)
    np.testing.assert_array_equal(known, np.array([KNOWN], np.float32))


KNOWN = [-0.8279365301132202, 0.208074688911438, -0.8150023221969604, 0.9235005378723145]


def test_initial_values_are_uniform_and_below_the_upper_end() -> None:
    values = cpu.initial_values(np.arange(20_000, dtype=np.int64), 11, 8, -0.5, 1.5)
    assert values.min() >= -0.5
    assert values.max() < 1.5
    counts, _ = np.histogram(values, bins=20, range=(-0.5, 1.5))
    expected = values.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi squared, 19 degrees: 1 in 10,000 is 50.8
    assert abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.04
    narrow = cpu.initial_values(
        np.arange(50_000, dtype=np.int64), 11, 8, 1.0, np.nextafter(np.float32(1), np.float32(2))
    )
    assert (narrow == 1.0).all()
    assert (cpu.initial_values(np.arange(9, dtype=np.int64), 1, 4, 0.25, 0.25) == 0.25).all()


def test_kernels_take_what_the_network_gives_and_never_compile_a_second_time() -> None:
    warm_up()
    payload = np.arange(8 * 4, dtype=np.float32).tobytes()
    gradients = np.frombuffer(b"x" + payload, np.float32, offset=1).reshape(8, 4)
    assert not gradients.flags.writeable
    assert not gradients.flags.aligned
    weights, slots = np.zeros((8, 4), np.float32), np.arange(8, dtype=np.int32)
    slots.flags.writeable = False
    constants, state = np.zeros(NUM_CONSTANTS, np.float32), np.zeros((8, 0), np.float32)
    scale, rate = np.float32(0.5), np.float32(2.0)
    cpu.apply(
        SGD,
        weights,
        state,
        slots,
        gradients,
        slots,
        0,
        scale,
        rate,
        constants,
        np.zeros(0, np.float32),
        1,
        np.zeros(0, np.int64),
    )
    np.testing.assert_array_equal(weights, -gradients)
    assert cpu.all_finite(gradients, 0) == -1
    for kernel in Kernel.registry:
        compiled = kernel.compile()
        assert len(compiled.signatures) == len(kernel._signatures)
