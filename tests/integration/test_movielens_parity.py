"""The main job's `full` arm against plain TorchRec: the same model on a local EmbeddingBagCollection.

Same data order, same initial weights (dense and rows), same optimizers and schedules. Ours runs as the main job ships
it: pipelined, 16-bit rows on the wire, the default precision of the dense layers. TorchRec's is float32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.kernels.cpu import initial_values
from embedding_server.optimizers import table_seed
from services.train_job import run_inproc
from trainer.data.batch import Batch, Reader
from trainer.data.registry import open_reader
from trainer.job import Job, load_job, table_specs
from trainer.lr_schedule import schedule_in_steps
from trainer.metrics import compute_metrics
from trainer.models import build_model, logits_of

JOB = Path(__file__).parents[2] / "examples" / "movielens.yaml"


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Vocabulary:
    """row_ids of each table, sorted; TorchRec's tables want positions instead."""

    readers: list[Reader]

    def __post_init__(self) -> None:
        schema = self.readers[0].schema
        self.tables = {feature: table for table, features in schema.tables.items() for feature in features}
        found: dict[str, list[np.ndarray]] = {table: [] for table in schema.tables}
        for reader in self.readers:
            for batch in reader:
                for feature, bag in batch.sparse.to_dict().items():
                    found[self.tables[feature]].append(np.unique(bag.values().numpy()))
        self.row_ids = {table: np.unique(np.concatenate(ids)) for table, ids in found.items()}

    def positions(self, batch: Batch) -> Batch:
        values = [
            np.searchsorted(self.row_ids[self.tables[feature]], bag.values().numpy())
            for feature, bag in batch.sparse.to_dict().items()
        ]
        sparse = KeyedJaggedTensor(
            keys=batch.sparse.keys(),
            values=torch.from_numpy(np.concatenate(values)),
            lengths=batch.sparse.lengths(),
        )
        return Batch(batch.dense, sparse, batch.labels, batch.num_global_samples)


def torchrec_test_auc(job: Job) -> float:
    vocabulary = Vocabulary([open_reader(job, split) for split in ("train", "test")])
    reader = open_reader(job, "train")
    specs = {spec.name: spec for spec in table_specs(job, reader.schema.tables)}
    pooling = PoolingType.MEAN if job.embedding.pooling == "mean" else PoolingType.SUM
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=job.embedding.dim,
                num_embeddings=len(vocabulary.row_ids[name]),
                feature_names=features,
                pooling=pooling,
            )
            for name, features in reader.schema.tables.items()
        ]
    )
    with torch.no_grad():
        for name, bag in collection.embedding_bags.items():
            spec = specs[name]
            rows = initial_values(vocabulary.row_ids[name], table_seed(spec), spec.dim, spec.init_min, spec.init_max)
            bag.weight.copy_(torch.from_numpy(rows))
    torch.manual_seed(job.seed)
    model = build_model(job.model, collection, reader.schema.num_dense)
    row_parameters = list(collection.parameters())
    of_rows = {id(parameter) for parameter in row_parameters}
    optimizer = job.embedding.optimizer
    rows = RowWiseAdagrad(row_parameters, initial_accumulator_value=optimizer.initial_accumulator, eps=optimizer.eps)
    dense = torch.optim.Adam(p for p in model.parameters() if id(p) not in of_rows)
    total, batch_size = reader.num_steps, job.trainer.batch_size
    row_rate = schedule_in_steps(job.embedding.learning_rate, batch_size, total)
    dense_rate = schedule_in_steps(job.trainer.dense_optimizer.learning_rate, batch_size, total)
    for step, batch in enumerate(reader, 1):
        for group in rows.param_groups:
            group["lr"] = row_rate.at(step)
        for group in dense.param_groups:
            group["lr"] = dense_rate.at(step)
        logits = logits_of(model, vocabulary.positions(batch))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        rows.step()
        dense.step()
        rows.zero_grad()
        dense.zero_grad()
    with torch.no_grad():
        scored = [(b.labels, logits_of(model, vocabulary.positions(b))) for b in open_reader(job, "test")]
    labels, logits = (torch.cat(parts).numpy() for parts in zip(*scored, strict=True))
    return compute_metrics(labels, logits).auc


def test_full_arm_reaches_the_auc_of_plain_torchrec_and_idle_that_of_full(tmp_path: Path) -> None:
    arms = load_job(JOB, []).arm_jobs()
    ours = {arm: run_inproc(arms[arm], arm, tmp_path, lambda progress: None).test_auc for arm in ("full", "idle")}
    theirs = torchrec_test_auc(arms["full"])
    assert ours["full"] == pytest.approx(theirs, abs=0.003)
    assert ours["full"] >= 0.77
    assert ours["idle"] == pytest.approx(ours["full"], abs=0.003)
