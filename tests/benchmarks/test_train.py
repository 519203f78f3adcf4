"""The contestants of the train workloads, small: they start, train, and see the same samples."""

from __future__ import annotations

import pytest
import torch

from benchmarks import dlrm, train
from benchmarks.train_process import Contestant
from benchmarks.workloads.train import WORKLOADS

CONFIG = {
    **WORKLOADS[0].cases[0].config,
    "batch_size": 32,
    "rows_per_table": 50,
    "num_batches": 2,
    "steps": 2,
    "num_shards": 1,
}


def test_two_ranks_see_together_what_one_sees():
    whole = dlrm.make_samples(CONFIG)
    halves = [dlrm.make_samples(CONFIG, share=(rank, 2)) for rank in range(2)]
    for batch, (first, second) in zip(whole, zip(*halves, strict=True), strict=True):
        torch.testing.assert_close(batch.dense, torch.cat([first.dense, second.dense]))
        torch.testing.assert_close(batch.labels, torch.cat([first.labels, second.labels]))
        for feature in dlrm.FEATURES:
            parts = [part.sparse[feature].values() for part in (first, second)]
            assert torch.equal(batch.sparse[feature].values(), torch.cat(parts))


@pytest.mark.parametrize("is_multihot", [False, True])
def test_samples_have_the_shape_that_the_workload_names(is_multihot):
    batch = dlrm.make_samples({**CONFIG, "is_multihot": is_multihot})[0]
    assert batch.sparse.values().numel() == 32 * (214 if is_multihot else 26)
    assert int(batch.sparse.values().max()) < 50
    assert batch.dense.shape == (32, 13)


@pytest.mark.parametrize("dense", ["same", "as_shipped"])
def test_dense_alone_trains_the_dense_layers(dense):
    side = dlrm.DenseSide(dlrm.make_dlrm(dlrm.FixedCollection(32, 64)), dense)
    (samples,) = dlrm.make_samples({**CONFIG, "num_batches": 1})
    losses = [side.step(samples).item() for _ in range(30)]
    assert losses[-1] < losses[0]


def test_ours_and_two_ranks_of_torchrec_run_as_processes():
    shards = train.start_shards(1)
    contestants = [
        Contestant("frostline", "same", CONFIG, addresses=shards.addresses),
        Contestant("torchrec", "as_shipped", CONFIG, size=2),
    ]
    try:
        for contestant in contestants:
            contestant.wait_ready()
            assert contestant.run_ms("train", 2) > 0
            assert contestant.run_ms("train", 1) > 0
            assert contestant.run_ms("dense_alone", 1) > 0
    finally:
        for contestant in contestants:
            contestant.close()
        shards.stop()


def test_a_contestant_that_cannot_start_says_why():
    contestant = Contestant("frostline", "same", CONFIG, addresses=[])
    with pytest.raises(RuntimeError, match=r"frostline, 1 rank\(s\)[\s\S]*no addresses of shards"):
        contestant.wait_ready()
    contestant.close()
