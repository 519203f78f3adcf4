"""Finite gradients keep a row finite, weights and state: every optimizer, hot_bits and decay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_server.hot_rows import CpuHotRows, HotRows, ReferenceHotRows
from embedding_server.optimizers import MAX_GRADIENT, ROWWISE_FACTOR, initial_state
from embedding_server.request_checks import MAX_LEARNING_RATE
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity

KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
DIM = 20  # a vector of 16 and a rest
LARGEST = float(np.finfo(np.float32).max)
EXTREMES = [LARGEST, -LARGEST, 1e38, -1e30, 2e19, -1.8e19, 2.0**50, 1.0, 1e-19, -1e-30, 1e-45, 0.0]
VALUES = st.one_of(st.sampled_from(EXTREMES), st.floats(width=32, allow_nan=False, allow_infinity=False))
RATES = st.sampled_from([0.0, 1e-45, 1e-38, 1e-3, 0.1, 1.0, MAX_LEARNING_RATE])
STARTS = st.sampled_from([0.0, 0.01, -1.0, 1e30, -LARGEST])
OPTIMIZERS = st.fixed_dictionaries(
    {
        "eps": st.sampled_from([1e-20, 1e-8]),
        "beta1": st.sampled_from([0.0, 0.9]),
        "beta2": st.sampled_from([0.0, 0.999]),
        "initial_accumulator": st.sampled_from([0.0, 0.1, 1e30]),
        "ftrl_l1": st.sampled_from([0.0, 0.3, 1e30]),
        "ftrl_l2": st.sampled_from([0.0, 0.2, 1e30]),
        "ftrl_beta": st.sampled_from([0.0, 1.0, 1e30]),
        "clip_norm": st.sampled_from([0.0, 0.0, 1.5, 1e30]),
    }
)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("hot_bits", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), more=OPTIMIZERS, start=STARTS, pending=st.sampled_from([1.0, 0.5, 1e-9]))
def test_no_row_becomes_infinite(
    kind: OptimizerKind, hot_bits: int, backend: type[HotRows], data: st.DataObject, more: dict, start: float,
    pending: float,
) -> None:  # fmt: skip
    rows = backend(DIM, OptimizerSpec(kind=kind, **more), 1, hot_bits)
    slot, row_id = np.zeros(1, np.int32), np.zeros(1, np.int64)
    rows.write(slot, np.full((1, DIM), start, np.float32), initial_state(rows.optimizer, DIM)[None])
    for step in range(1, 5):
        some = data.draw(st.lists(VALUES, min_size=1, max_size=4))
        gradient = np.resize(np.array(some, np.float32), (1, DIM))
        rate = data.draw(RATES)
        rows.apply(slot, gradient, slot, "float32", 1.0, rate, step, np.full(1, pending, np.float32), row_id)
        weights, state = rows.read(slot)
        assert np.isfinite(weights).all()
        assert np.isfinite(state).all()
    rows.scale(slot, np.full(1, 1e9, np.float32), 5, row_id)  # what decayed while it was frozen is not owed
    assert np.isfinite(rows.read(slot)[0]).all()
    rows.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_gradients_for_ever_fill_no_accumulator(kind: OptimizerKind) -> None:
    rows = CpuHotRows(DIM, OptimizerSpec(kind=kind), 1)
    slot = np.zeros(1, np.int32)
    state = initial_state(rows.optimizer, DIM)[None]
    squares = {"adam": slice(DIM, None), "ftrl": slice(0, DIM)}.get(kind, slice(None))
    state[:, squares] = 2.0**125  # where a sum of squares of at most 2^100 stays
    rows.write(slot, np.zeros((1, DIM), np.float32), state)
    for step in range(1, 100):
        rows.apply(slot, np.full((1, DIM), LARGEST, np.float32), slot, "float32", 1.0, 0.1, step)
    after = rows.read(slot)[1][:, squares]
    assert (after <= np.float32(2.0**125)).all()


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rowwise_adagrad"])
def test_a_value_beyond_the_largest_counts_as_the_largest(kind: OptimizerKind, backend: type[HotRows]) -> None:
    out = []
    for size in (MAX_GRADIENT, LARGEST):
        rows = backend(DIM, OptimizerSpec(kind=kind), 1)
        slot = np.zeros(1, np.int32)
        rows.write(slot, np.ones((1, DIM), np.float32), initial_state(rows.optimizer, DIM)[None])
        gradient = np.full((1, DIM), size, np.float32)
        gradient[0, 1::2] = -3.0
        rows.apply(slot, gradient, slot, "float32", 1.0, 0.1, 1)
        out.append(rows.read(slot))
    for one, other in zip(*out, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    change = 1.0 - out[1][0][0, 0]
    assert change == pytest.approx(0.1 * {"sgd": MAX_GRADIENT}.get(kind, 1.0), rel=1e-4)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_rowwise_adagrad_counts_a_gradient_too_large_to_square_as_next_to_nothing(backend: type[HotRows]) -> None:
    rows = backend(DIM, OptimizerSpec(kind="rowwise_adagrad"), 1)
    slot = np.zeros(1, np.int32)
    rows.write(slot, np.ones((1, DIM), np.float32), np.zeros((1, 1), np.float32))
    rows.apply(slot, np.full((1, DIM), LARGEST, np.float32), slot, "float32", 1.0, 0.1, 1)
    weights, state = rows.read(slot)
    assert state[0, 0] == pytest.approx(MAX_GRADIENT**2 / DIM, rel=1e-6)
    change = 0.1 * LARGEST * ROWWISE_FACTOR / float(state[0, 0]) ** 0.5
    np.testing.assert_allclose(weights, 1.0 - change, rtol=1e-5)


@pytest.mark.parametrize("hot_bits", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_extreme_gradients_keeps_its_rows_finite(kind: OptimizerKind, hot_bits: int) -> None:
    """Through the shard: kernels of all tables, weight decay, freezing and thawing, the default row."""
    optimizer = OptimizerSpec(kind=kind, weight_decay=0.5)
    policy = PolicySpec(kind="idle", idle_steps=1, hot_bits=hot_bits, min_count=2, control_fraction=0.0)
    shard, who = Shard(), Identity("job", 1, 0)
    shard.create_tables([TableSpec(name="t", dim=DIM, optimizer=optimizer, policy=policy)])
    shard.begin_epoch("job", 1, "sync", 1)
    row_ids, rng = np.arange(12, dtype=np.int64), np.random.default_rng(0)
    for step in range(1, 13):
        some = row_ids[step % 3 :: 2].copy()
        shard.pull(who, step, {"t": some}, "float32").result(0)
        gradients = rng.choice(np.array(EXTREMES, np.float32), (some.size, DIM))
        push = ShardGradients(some, gradients, [0.1, 1.9][step % 2], gradients[0].copy())
        shard.push(who, step, {"t": push}, "float32").result(0)
        while not shard.reselect(who, step, {})[1]:
            pass
        looked_up = np.append(row_ids, 10**9)  # the last one reads the default row
        rows = shard.lookup({"t": looked_up}, "float32")["t"].values
        assert np.isfinite(rows).all()
    assert np.abs(rows[:-1]).max() > 0.1
    assert np.abs(rows[-1]).max() > 0.1
    shard.close()
