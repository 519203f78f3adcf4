"""FbgemmHotRows in GPU memory against the plain torch reference: `make gpu-check`."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.hot_rows import ReferenceHotRows
from embedding_server.kernels import fbgemm_available
from embedding_server.kernels.fbgemm import FbgemmHotRows
from embedding_server.kernels.wire import from_float32
from embedding_server.spec import OptimizerKind, OptimizerSpec, TableSpec
from embedding_server.store import WIRE_NUMPY

NUM_ROWS, DIM = 5000, 64


@pytest.mark.parametrize("wire_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_k_steps_in_gpu_memory_equal_the_reference(kind: OptimizerKind, wire_dtype: str) -> None:
    assert fbgemm_available()
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
