"""Contestants of `train_onehot` and `train_multihot`: whole training steps of DLRM, in milliseconds a step.

Ours: one worker, two shards as real processes, every row over gRPC, pipelined. Rivals: TorchRec with its tables in the
trainer's process, on one rank and on two gloo ranks, each with the same dense layers and settings as ours and as it
ships. Every contestant has processes of its own, which sleep while another one runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import dlrm
from benchmarks.train_process import Contestant, ProcessSpec
from embedding_server.spec import OptimizerSpec, PolicySpec
from services.local_shards import LocalShards, start_shards
from services.shard_client import RemoteStore
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.pipeline import Pipeline

JOB = "bench"


@dataclass
class State:
    config: dict[str, Any]
    shards: LocalShards
    contestants: dict[str, Contestant]


def setup(config: dict[str, Any]) -> State:
    """config["dense"] of ours: same, our default layers, and rivals with them too; as_shipped, torch's for all."""
    shards = start_shards(config["num_shards"])
    contestants = {"frostline": Contestant("frostline", config["dense"], config, addresses=shards.addresses)}
    for dense in dict.fromkeys([config["dense"], "as_shipped"]):
        for size in (1, 2):
            contestants[f"torchrec_{size}_{dense}"] = Contestant("torchrec", dense, config, size=size)
    state = State(config, shards, contestants)
    try:
        for contestant in contestants.values():
            contestant.wait_ready()
    except BaseException:
        teardown(state)
        raise
    return state


def teardown(state: State) -> None:
    for contestant in state.contestants.values():
        contestant.close()
    state.shards.stop()


def run(state: State, contestant: str, what: str = "train") -> float:
    return state.contestants[contestant].run_ms(what, state.config["steps"])


def runners(spec: ProcessSpec) -> dict[str, Callable[[int], None]]:
    """What a contestant's process can do, by name: each takes a number of steps."""
    samples = dlrm.make_samples(spec.config, share=(spec.rank, spec.size))
    contestant: Any = _Frostline(spec) if spec.side == "frostline" else _TorchRec(spec)
    alone = dlrm.DenseSide(
        dlrm.make_dlrm(dlrm.FixedCollection(samples[0].labels.numel(), spec.config["dim"])), spec.dense
    )
    return {
        "train": lambda steps: contestant.train(_take(samples, steps), steps),
        "dense_alone": lambda steps: alone.train(_take(samples, steps)),
    }


def _take(samples: list[dlrm.Samples], steps: int) -> Iterator[dlrm.Samples]:
    return itertools.islice(itertools.cycle(samples), steps)


class _TorchRec:
    def __init__(self, spec: ProcessSpec) -> None:
        model = dlrm.torchrec_model(spec.config, spec.rank, spec.size, spec.store_file)
        self._side = dlrm.DenseSide(model, spec.dense)

    def train(self, samples: Iterator[dlrm.Samples], steps: int) -> None:
        self._side.train(samples)


class _Frostline:
    """A worker as trainer/loop.py runs it, without reports."""

    def __init__(self, spec: ProcessSpec) -> None:
        config = spec.config
        self._rows = FrostlineEmbeddingBagCollection(
            dlrm.table_configs(config["dim"], config["rows_per_table"]),
            RemoteStore(spec.addresses, wire_dtype=config["wire_dtype"]),
            optimizer=OptimizerSpec(kind="rowwise_adagrad"),
            policy=PolicySpec(kind=config["policy"]),
            job=JOB,
            mode="pipelined",
        )
        self._side = dlrm.DenseSide(dlrm.make_dlrm(self._rows), spec.dense)

    def train(self, samples: Iterator[Any], steps: int) -> None:
        with Pipeline(samples, self._rows, "pipelined", lambda step: False, steps) as pipeline:
            for _, batch in pipeline:
                self._side.step(batch)  # type: ignore[arg-type]
                pipeline.push(dlrm.LEARNING_RATE)
            pipeline.drain()
