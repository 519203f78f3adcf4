"""FbgemmHotRows in GPU memory against the plain torch reference: `make gpu-check`."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.hot_rows import ReferenceHotRows
from embedding_server.kernels import why_not_fbgemm
from embedding_server.kernels.fbgemm import FbgemmHotRows
from embedding_server.kernels.wire import from_float32
from embedding_server.optimizers import initial_state
from embedding_server.spec import OptimizerKind, OptimizerSpec, TableSpec
from embedding_server.store import WIRE_NUMPY

NUM_ROWS, DIM = 5000, 64


@pytest.mark.parametrize("wire_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_k_steps_in_gpu_memory_equal_the_reference(kind: OptimizerKind, wire_dtype: str) -> None:
    assert why_not_fbgemm() == ""
    spec = TableSpec(name="item", dim=DIM, optimizer=OptimizerSpec(kind=kind, eps=1e-6), init_min=-1.0, init_max=1.0)
    ours = FbgemmHotRows(DIM, spec.optimizer, NUM_ROWS, device="cuda")
    theirs = ReferenceHotRows(DIM, spec.optimizer, NUM_ROWS)
    every = np.arange(NUM_ROWS, dtype=np.int32)
    rng = np.random.default_rng(1)
    for rows in (ours, theirs):
        rows.initialise(every, every.astype(np.int64), spec)
    for step in range(1, 21):
        slots = rng.permutation(NUM_ROWS)[:3000].astype(np.int32)
        slots[::8] = -1
        positions = rng.permutation(4000)[:3000].astype(np.int32)
        gradients = from_float32(rng.standard_normal((4000, DIM)).astype(np.float32), wire_dtype)
        for rows in (ours, theirs):
            rows.apply(slots, gradients, positions, wire_dtype, 0.5, 0.05, step)
    for one, two in zip(ours.read(every), theirs.read(every), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=2e-6)
    out = np.zeros((NUM_ROWS, DIM), WIRE_NUMPY[wire_dtype])
    ours.gather(every, out, every, wire_dtype)
    assert out.tobytes() == from_float32(ours.read(every)[0], wire_dtype).tobytes()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_half_rows_in_gpu_memory_train_as_float32_rows_do_on_average(kind: OptimizerKind) -> None:
    """Every row gets the same gradients, each a step below what float16 resolves, so that nearest would lose them."""
    optimizer = OptimizerSpec(kind=kind, eps=1e-6)
    rows = FbgemmHotRows(DIM, optimizer, NUM_ROWS, 16, device="cuda")
    exact = ReferenceHotRows(DIM, optimizer, 1)
    every, none = np.arange(NUM_ROWS, dtype=np.int32), np.zeros(NUM_ROWS, np.int32)
    state = np.tile(initial_state(optimizer, DIM), (NUM_ROWS, 1))
    rows.write(every, np.full((NUM_ROWS, DIM), 0.9, np.float32), state)
    exact.write(every[:1], *(part[:1] for part in rows.read(every)))
    start, rng = rows.read(every[:1])[0][0], np.random.default_rng(0)
    for step in range(1, 31):
        gradient = rng.uniform(0.02, 0.05, (1, DIM)).astype(np.float32)
        rows.apply(every, gradient, none, "float32", 1.0, 1e-4, step)
        exact.apply(every[:1], gradient, none[:1], "float32", 1.0, 1e-4, step)
    moved = rows.read(every)[0].astype(np.float64).mean(axis=0) - start
    np.testing.assert_allclose(moved, exact.read(every[:1])[0][0] - start, rtol=0.15, atol=3e-5)
    rows.apply(every, np.full((1, DIM), -1e30, np.float32), none, "float32", 1.0, 1.0, 31)
    assert np.isfinite(rows.read(every)[0]).all()
