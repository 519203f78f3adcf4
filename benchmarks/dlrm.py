"""What the train workloads share: the model, the batches, and one TorchRec rank that trains them.

DLRM with layers 512-256-64 and 512-512-256-1, 26 tables x 64, SGD dense, row-wise Adagrad rows; batches are made before
the clock starts and repeated. TorchRec trains as its documentation says: optimizer fused into the backward,
DistributedModelParallel, table-wise sharding over the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from trainer.precision import Precision, choose_precision

NUM_TABLES = 26
NUM_DENSE = 13
DENSE_LAYERS = (512, 256, 64)
OVER_LAYERS = (512, 512, 256, 1)
LEARNING_RATE = 0.01
#: values in each feature's bag of MLPerf's multi-hot Criteo
MLPERF_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
FEATURES = [f"feature_{i}" for i in range(NUM_TABLES)]


@dataclass(frozen=True, slots=True)
class Samples:
    dense: torch.Tensor  # float32[B, 13]
    sparse: KeyedJaggedTensor
    labels: torch.Tensor  # float32[B]


def table_configs(dim: int, rows_per_table: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"table_{i}", embedding_dim=dim, num_embeddings=rows_per_table, feature_names=[name])
        for i, name in enumerate(FEATURES)
    ]


def make_samples(config: dict[str, Any], seed: int = 0, share: tuple[int, int] = (0, 1)) -> list[Samples]:
    """`num_batches` batches of rank share[0] of share[1]; IDs by a bounded Zipf law: heads repeat as in Criteo."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, config["rows_per_table"] + 1, dtype=np.float64) ** -config["zipf_exponent"]
    cumulative = np.cumsum(weights / weights.sum())
    hots = MLPERF_HOTS if config["is_multihot"] else (1,) * NUM_TABLES
    rank, size = share
    num = config["batch_size"]
    first, last = rank * num // size, (rank + 1) * num // size
    batches = []
    for _ in range(config["num_batches"]):
        values = []
        for hot in hots:
            draws = np.searchsorted(cumulative, rng.random((num, hot))).clip(max=config["rows_per_table"] - 1)
            # a fixed odd multiplier spreads the ranks over the table, so that hot rows are not neighbours
            values.append((draws * 40_503 % config["rows_per_table"])[first:last].ravel())
        lengths = np.repeat(np.asarray(hots, np.int32), last - first)
        sparse = KeyedJaggedTensor(
            FEATURES, torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(lengths)
        )
        dense = rng.standard_normal((num, NUM_DENSE), dtype=np.float32)[first:last]
        labels = (rng.random(num) < 0.25).astype(np.float32)[first:last]
        batches.append(Samples(torch.from_numpy(dense), sparse, torch.from_numpy(labels)))
    return batches


def make_dlrm(collection: Any) -> DLRM:
    torch.manual_seed(0)
    return DLRM(collection, NUM_DENSE, list(DENSE_LAYERS), list(OVER_LAYERS))


def dense_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if "embedding_bag_collection" not in name]


class FixedCollection(torch.nn.Module):
    """Stands in for the embeddings in `dense_alone`: gives the same pooled values for free, takes their gradient."""

    pooled: torch.Tensor

    def __init__(self, batch_size: int, dim: int) -> None:
        super().__init__()
        self._configs = table_configs(dim, 1)
        self.register_buffer("pooled", torch.randn(batch_size, NUM_TABLES * dim) * 0.1, persistent=False)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled: Any = self.pooled
        values = pooled.detach().requires_grad_()
        return KeyedTensor(FEATURES, [c.embedding_dim for c in self._configs], values)


def torchrec_model(config: dict[str, Any], rank: int, size: int, store_file: str) -> torch.nn.Module:
    """TorchRec's own way, on the gloo group that `store_file` joins."""
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=size)
    configs = table_configs(config["dim"], config["rows_per_table"])
    model = make_dlrm(EmbeddingBagCollection(configs, device=torch.device("meta")))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    constraints = {c.name: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for c in configs}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD) if size > 1 else planner.plan(model, [sharder])
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


class DenseSide:
    """A model with its precision and its dense optimizer. dense: same (our default) or as_shipped (torch's own)."""

    def __init__(self, model: torch.nn.Module, dense: str) -> None:
        self._precision = Precision("float32")
        if dense == "same":
            self._precision = choose_precision("auto")
            self._precision.prepare(model)
        self._precision.activate()
        self._model = model
        self._optimizer = torch.optim.SGD(dense_parameters(model), lr=LEARNING_RATE)

    def step(self, samples: Samples) -> torch.Tensor:
        """One forward, backward and dense update; the same code for every contestant. Returns the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.context():
            logits = self._model(samples.dense, samples.sparse)
        loss = binary_cross_entropy_with_logits(logits.float().reshape(-1), samples.labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def train(self, samples: Iterator[Samples]) -> None:
        for batch in samples:
            self.step(batch)
