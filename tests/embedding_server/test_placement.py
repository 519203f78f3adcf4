"""What a job trains does not depend on which shard, and which slot, has a row: one shard and three, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.kernels.hashing import buckets_of
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS
from tests.embedding_server.ranked_shards import RankedShards

KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
ROW_IDS = np.concatenate([np.arange(-90, 90), np.arange(120) << 32])
DIM, STEPS = 20, 24


def spec_of(kind: OptimizerKind, weight_decay: float, hot_bits: int) -> TableSpec:
    policy = PolicySpec(
        kind="topk", hot_fraction=0.5, idle_steps=5, probation_visits=2, half_life_steps=8, hot_bits=hot_bits,
        frozen_bits=16, control_fraction=0.1,
    )  # fmt: skip
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=OptimizerSpec(kind=kind, eps=1e-6, weight_decay=weight_decay, ftrl_l1=0.01),
        policy=policy,
        init_min=-1.0,
        init_max=1.0,
    )


def trained(spec: TableSpec, num_shards: int, *, backend: str, backwards: bool = False) -> tuple[np.ndarray, int]:
    """(rows of ROW_IDS after a job with re-selections float32[n, D], rows that are hot). backwards: a shard gets its
    row_ids in the opposite order, so that they take other slots."""
    rng = np.random.default_rng(0)
    with RankedShards(spec, num_shards, backend=backend) as shards:
        for step in range(1, STEPS + 1):
            some = rng.permutation(len(ROW_IDS))[: 40 + 10 * (step % 7)]
            gradients = rng.standard_normal((len(some), DIM)).astype(np.float32)
            order = slice(None, None, -1) if backwards else slice(None)
            shards.train(ROW_IDS[some][order], gradients[order].copy(), lr=1e-3 * step)
            if step % 6 == 0:
                shards.reselect()
        return shards.values(ROW_IDS), len(shards.hot())


@pytest.mark.parametrize("hot_bits", [16, 32])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_one_shard_and_three_train_the_same_bits(kind: OptimizerKind, weight_decay: float, hot_bits: int) -> None:
    spec = spec_of(kind, weight_decay, hot_bits)
    assert len(np.unique(buckets_of(ROW_IDS, NUM_BUCKETS) % 3)) == 3
    rows, num_hot = trained(spec, 1, backend="cpu")
    assert 30 < num_hot < 270  # some froze
    for num_shards, backwards in ((3, False), (1, True), (3, True)):
        other, other_hot = trained(spec, num_shards, backend="cpu", backwards=backwards)
        assert other_hot == num_hot
        np.testing.assert_array_equal(rows.view(np.uint32), other.view(np.uint32))


def test_the_reference_backend_does_not_depend_on_placement_either() -> None:
    spec = spec_of("adagrad", 0.5, 16)
    one, three = (trained(spec, n, backend="reference", backwards=n == 3)[0] for n in (1, 3))
    np.testing.assert_array_equal(one.view(np.uint32), three.view(np.uint32))
