"""What the `engine` workload measures: one step of the embeddings alone, in one process, with no dense part.

A step is dedup, gather, pooling, the backward from a given output gradient, and row-wise Adagrad on every row that was
named. Ours: FrostlineEmbeddingBagCollection on an InprocStore whose tables train every row (policy off). The rival:
TorchRec's DistributedModelParallel on one gloo rank, its optimizer fused into the backward. Both get the same IDs and
the same number of threads, and both run under the allocator settings of our workers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import dlrm
from benchmarks.harness import time_ms
from embedding_server.inproc import InprocStore
from embedding_server.spec import OptimizerSpec, PolicySpec
from services.allocator import set_allocator
from trainer.embedding import FrostlineEmbeddingBagCollection


@dataclass
class EngineState:
    config: dict[str, Any]
    batches: list[KeyedJaggedTensor]
    output_gradient: torch.Tensor  # float32[B, 26 * dim]
    store: InprocStore
    ours: FrostlineEmbeddingBagCollection
    theirs: torch.nn.Module
    folder: tempfile.TemporaryDirectory[str]


def setup(config: dict[str, Any]) -> EngineState:
    set_allocator()
    torch.set_num_threads(config["threads"])
    folder = tempfile.TemporaryDirectory(prefix="frostline-engine-")
    dist.init_process_group("gloo", init_method=f"file://{folder.name}/group", rank=0, world_size=1)
    store = InprocStore(data_dir=Path(folder.name) / "shard", threads=config["threads"])
    configs = dlrm.table_configs(config["dim"], config["rows_per_table"])
    ours = FrostlineEmbeddingBagCollection(
        configs,
        store,
        optimizer=OptimizerSpec(kind="rowwise_adagrad"),
        policy=PolicySpec(kind="off"),
        num_threads=config["threads"],
    )
    width = dlrm.NUM_TABLES * config["dim"]
    state = EngineState(
        config,
        [samples.sparse for samples in dlrm.make_samples(config)],
        torch.randn(config["batch_size"], width, generator=torch.Generator().manual_seed(0)) * 1e-3,
        store,
        ours,
        _torchrec(config),
        folder,
    )
    # every row of every batch exists before the clock starts, as TorchRec's do
    for features in state.batches:
        ours(features)
        ours.step(0.0)
    return state


def teardown(state: EngineState) -> None:
    dist.destroy_process_group()
    state.store.close()
    state.folder.cleanup()


def run_ours(state: EngineState) -> float:
    """Milliseconds a step."""
    numbers = count()

    def step() -> None:
        features = state.batches[next(numbers) % len(state.batches)]
        state.ours(features).values().backward(state.output_gradient)
        state.ours.step(dlrm.LEARNING_RATE)

    return time_ms(step, state.config["steps"])


def run_torchrec(state: EngineState) -> float:
    """Milliseconds a step."""
    numbers = count()

    def step() -> None:
        features = state.batches[next(numbers) % len(state.batches)]
        state.theirs(features).values().backward(state.output_gradient)

    return time_ms(step, state.config["steps"])


def _torchrec(config: dict[str, Any]) -> torch.nn.Module:
    """DistributedModelParallel over the collection alone, with the plan that TorchRec chooses for one CPU rank."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = dlrm.table_configs(config["dim"], config["rows_per_table"])
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": dlrm.LEARNING_RATE, "eps": 1e-8}
    return DistributedModelParallel(
        EmbeddingBagCollection(configs, device=torch.device("meta")),
        device=torch.device("cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
    )
