"""Contestants of `train_onehot` and `train_multihot`: whole training steps of DLRM.

Ours: one worker, two shards as real processes, every row over gRPC, pipelined. Rivals: TorchRec in process on one rank
and on two gloo ranks, each with the same dense layers as ours and as it ships. Figures are milliseconds a step.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import dlrm
from benchmarks.harness import time_ms
from benchmarks.torchrec_rank import RankGroup
from embedding_server.spec import OptimizerSpec, PolicySpec
from services.allocator import set_allocator
from services.local_shards import LocalShards, start_shards
from services.shard_client import RemoteStore
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.pipeline import Pipeline

JOB = "bench"


class Ours:
    """A worker as trainer/loop.py runs it, without reports."""

    def __init__(self, config: dict[str, Any], addresses: list[str]) -> None:
        self.store = RemoteStore(addresses, wire_dtype=config["wire_dtype"])
        self.rows = FrostlineEmbeddingBagCollection(
            dlrm.table_configs(config["dim"], config["rows_per_table"]),
            self.store,
            optimizer=OptimizerSpec(kind="rowwise_adagrad", initial_accumulator=0.0),
            policy=PolicySpec(kind=config["policy"]),
            job=JOB,
            mode="pipelined",
        )
        self._side = dlrm.DenseSide(dlrm.make_dlrm(self.rows), "same")

    def train(self, samples: list[dlrm.Samples], steps: int) -> None:
        self._side.precision.activate()
        batches: Iterator[Any] = itertools.islice(itertools.cycle(samples), steps)
        with Pipeline(batches, self.rows, "pipelined", lambda step: False, steps) as pipeline:
            for _, batch in pipeline:
                self._side.step(batch)  # type: ignore[arg-type]
                pipeline.push(dlrm.LEARNING_RATE)
            pipeline.drain()


@dataclass
class State:
    config: dict[str, Any]
    samples: list[dlrm.Samples]
    shards: LocalShards
    ours: Ours
    one_rank: dict[str, dlrm.TorchRecRival]
    two_ranks: RankGroup
    dense_alone: dict[str, dlrm.DenseSide]
    folder: tempfile.TemporaryDirectory[str]


def setup(config: dict[str, Any]) -> State:
    set_allocator()
    torch.set_num_threads(config["threads"])
    folder = tempfile.TemporaryDirectory(prefix="frostline-bench-")
    shards = start_shards(config["num_shards"], log_dir=Path(folder.name))
    store_file = str(Path(folder.name) / "store")
    return State(
        config=config,
        samples=dlrm.make_samples(config),
        shards=shards,
        ours=Ours(config, shards.addresses),
        one_rank={dense: dlrm.TorchRecRival(config, dense, 0, 1, store_file) for dense in dlrm.DENSE_KINDS},
        two_ranks=RankGroup(config, size=2, threads=max(1, config["threads"] // 2)),
        dense_alone={dense: _dense_alone(config, dense) for dense in dlrm.DENSE_KINDS},
        folder=folder,
    )


def _dense_alone(config: dict[str, Any], dense: str) -> dlrm.DenseSide:
    return dlrm.DenseSide(dlrm.make_dlrm(dlrm.FixedCollection(config["batch_size"], config["dim"])), dense)


def teardown(state: State) -> None:
    state.two_ranks.close()
    state.ours.store.close()
    state.shards.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    state.folder.cleanup()


def run_ours(state: State) -> float:
    steps = state.config["steps"]
    return time_ms(lambda: state.ours.train(state.samples, steps)) / steps


def run_one_rank(state: State, dense: str) -> float:
    steps = state.config["steps"]
    return time_ms(lambda: state.one_rank[dense].train(state.samples, steps)) / steps


def run_two_ranks(state: State, dense: str) -> float:
    return state.two_ranks.run_ms(dense, state.config["steps"])


def run_dense_alone(state: State, dense: str) -> float:
    side, steps = state.dense_alone[dense], state.config["steps"]
    side.precision.activate()

    def train() -> None:
        for i in range(steps):
            side.step(state.samples[i % len(state.samples)])

    return time_ms(train) / steps
