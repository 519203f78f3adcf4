"""FbgemmHotRows on FBGEMM's CPU path against the other backends, so that CI knows it without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embedding_server.errors import InvalidInput
from embedding_server.hot_rows import CpuHotRows, HotRows, ReferenceHotRows
from embedding_server.kernels import choose_backend
from embedding_server.kernels.fbgemm import MIN_CAPACITY, FbgemmHotRows
from embedding_server.kernels.wire import from_float32
from embedding_server.optimizers import initial_state
from embedding_server.spec import OptimizerKind, OptimizerSpec, TableSpec
from embedding_server.store import WIRE_NUMPY

KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad")
WIRE_DTYPES = ("float32", "float16", "bfloat16")
NUM_ROWS, DIM = 50, 16


def backends(kind: OptimizerKind, max_rows: int = 20_000, clip_norm: float = 0.0) -> list[HotRows]:
    optimizer = OptimizerSpec(kind=kind, eps=1e-6, initial_accumulator=0.1, clip_norm=clip_norm)
    return [
        FbgemmHotRows(DIM, optimizer, max_rows, device="cpu"),
        ReferenceHotRows(DIM, optimizer, max_rows),
        CpuHotRows(DIM, optimizer, max_rows),
    ]


def fill(rows: HotRows) -> np.ndarray:
    weights = np.random.default_rng(0).uniform(-1, 1, (NUM_ROWS, DIM)).astype(np.float32)
    state = np.tile(initial_state(rows.optimizer, rows.dim), (NUM_ROWS, 1))
    rows.write(np.arange(NUM_ROWS, dtype=np.int32), weights, state)
    return weights


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_k_steps_of_fbgemm_equal_ours(kind: OptimizerKind, wire_dtype: str) -> None:
    fbgemm, *others = backends(kind, clip_norm=1.5 if wire_dtype == "float32" else 0.0)
    for rows in (fbgemm, *others):
        fill(rows)
    rng = np.random.default_rng(1)
    for step in range(1, 21):
        slots = rng.permutation(NUM_ROWS)[:30].astype(np.int32)
        slots[::8] = -1
        gradients = from_float32(rng.standard_normal((40, DIM)).astype(np.float32), wire_dtype)
        gradients.flags.writeable = False
        positions = rng.permutation(40)[:30].astype(np.int32)
        for rows in (fbgemm, *others):
            rows.apply(slots, gradients, positions, wire_dtype, 0.5, 0.02 * step, step)
    every = np.arange(NUM_ROWS, dtype=np.int32)
    for other in others:
        for one, two in zip(fbgemm.read(every), other.read(every), strict=True):
            assert one.dtype == np.float32
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_gather_is_bit_equal(wire_dtype: str) -> None:
    slots, positions = np.array([5, -1, 7], np.int32), np.array([4, 0, 1], np.int32)
    results = []
    for rows in backends("adagrad"):
        fill(rows)
        out = np.full((6, DIM), 3, WIRE_NUMPY[wire_dtype])
        rows.gather(slots, out, positions, wire_dtype)
        results.append(out.tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", KINDS)
def test_initialise_move_and_read_equal_ours(kind: OptimizerKind) -> None:
    spec = TableSpec(name="item", dim=DIM, optimizer=OptimizerSpec(kind=kind, initial_accumulator=0.1))
    slots, row_ids = np.array([2, 9, 4], np.int32), np.array([-7, 0, 2**63 - 1], np.int64)
    results = []
    for rows in backends(kind):
        rows.initialise(slots, row_ids, spec)
        rows.move(np.array([2, 9], np.int32), np.array([9, 2], np.int32))
        weights, state = rows.read(slots)
        results.append((weights.tobytes(), state.tobytes()))
    assert results[0] == results[1] == results[2]


def test_it_grows_and_shrinks_without_losing_rows() -> None:
    rows = FbgemmHotRows(DIM, OptimizerSpec(kind="adagrad"), 100_000, device="cpu")
    weights = fill(rows)
    start = rows.bytes_weights(0)
    assert start == MIN_CAPACITY * DIM * 4
    far = np.array([50_000], np.int32)
    rows.write(far, np.full((1, DIM), 2.0), np.full((1, DIM), 3.0))
    assert rows.bytes_weights(0) == 50_001 * DIM * 4
    assert rows.bytes_state(60_000) == 60_000 * DIM * 4
    far_weights, far_state = rows.read(far)
    assert (far_weights == 2.0).all()
    assert (far_state == 3.0).all()
    rows.release(49_000)  # less than a quarter of the capacity: kept
    assert rows.bytes_weights(0) == 50_001 * DIM * 4
    rows.release(NUM_ROWS)
    assert rows.bytes_weights(0) == start
    kept, state = rows.read(np.arange(NUM_ROWS, dtype=np.int32))
    np.testing.assert_array_equal(kept, weights)
    assert (state == np.float32(0.1)).all()
    with pytest.raises(InvalidInput, match="slot 100000 must be below max_rows=100000"):
        rows.read(np.array([100_000], np.int32))
    rows.close()
    assert rows.bytes_weights(0) == 0


def test_empty_calls_do_nothing() -> None:
    rows = FbgemmHotRows(DIM, OptimizerSpec(kind="rowwise_adagrad"), 100, device="cpu")
    weights = fill(rows)
    none = np.zeros(0, np.int32)
    rows.apply(none, np.zeros((0, DIM), np.float32), none, "float32", 1.0, 0.1, 1)
    rows.apply(np.array([-1], np.int32), np.ones((1, DIM), np.float32), np.zeros(1, np.int32), "float32", 1.0, 0.1, 1)
    rows.gather(none, np.zeros((0, DIM), np.float32), none, "float32")
    np.testing.assert_array_equal(rows.read(np.arange(NUM_ROWS, dtype=np.int32))[0], weights)


def test_adam_on_the_cpu_path_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidInput, match="FBGEMM has no adam on CPUs; set backend='cpu'"):
        FbgemmHotRows(DIM, OptimizerSpec(kind="adam"), 100, device="cpu")


def test_ftrl_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidInput, match="FBGEMM has no FTRL; set backend='cpu'"):
        FbgemmHotRows(DIM, OptimizerSpec(kind="ftrl"), 100)


def test_half_rows_need_a_gpu_and_no_weight_decay() -> None:
    with pytest.raises(InvalidInput, match="hot_bits=16 with backend='fbgemm' needs a GPU"):
        FbgemmHotRows(DIM, OptimizerSpec(), 100, 16, device="cpu")


def test_the_backend_can_be_asked_for_by_name() -> None:
    rows = choose_backend("fbgemm").hot_rows(DIM, OptimizerSpec(), 100)
    assert isinstance(rows, FbgemmHotRows)
    assert rows.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
