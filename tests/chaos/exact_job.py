"""A job of `frostline train` whose tables are known beforehand, bit for bit, whatever was killed on the way.

Each sample adds +1 (label 1) or -1 (label 0) to every value of its rows: SGD with rate 1, rows that begin at 0, frozen
rows of 32 bits. The table `sample` has one row a sample, so its rows count how often each sample was trained on.
The dense layer is one number, and the gradient of the rows depends on the label alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.store import Identity, RoutedIds
from trainer.job import Job, make_job, table_specs
from trainer.snapshots import read_manifest

DIM, BATCH = 4, 20
#: samples of a data pass, and other rows that they share
SAMPLES, ITEMS = 2000, 300
DATA_PASSES = 6
STEPS = SAMPLES // BATCH * DATA_PASSES
FIRST_SAMPLE_ID = -(2**62)


class OneALabel(torch.autograd.Function):
    """Zeros forward. Backward: +1 or -1 for every value, by the sign of the logit's gradient; float32[B, n]."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor) -> torch.Tensor:
        context.shape = rows.shape
        return rows.new_zeros(rows.shape[0])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        workers = dist.get_world_size() if dist.is_initialized() else 1  # the shards divide by their number
        return (torch.sign(gradient) * workers).unsqueeze(1).expand(context.shape)


class ExactModel(nn.Module):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        zeros = OneALabel.apply(self.rows(sparse).values())
        return (zeros + self.bias).unsqueeze(1)


def exact_model(rows: Any, num_dense: int) -> nn.Module:
    return ExactModel(rows)


def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """labels float32[SAMPLES], sample int64[SAMPLES], item int64[SAMPLES]."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, SAMPLES).astype(np.float32)
    return labels, FIRST_SAMPLE_ID + rng.permutation(SAMPLES), rng.integers(0, ITEMS, SAMPLES)


def write_data(path: Path) -> None:
    labels, sample, item = samples()
    pq.write_table(pa.table({"label": labels, "sample": sample, "item": item}), path)


def raw_exact_job(folder: Path, **sections: Any) -> dict[str, Any]:
    """The job, whose data, runs and snapshots are in `folder`; sections are laid over it."""
    data = folder / "train.parquet"
    if not data.exists():
        write_data(data)
    raw: dict[str, Any] = {
        "name": "exact",
        "data": {"reader": "parquet", "train": [str(data)], "features": ["sample", "item"]},
        "model": {"kind": "tests.chaos.exact_job:exact_model"},
        "embedding": {
            "dim": DIM,
            "learning_rate": {"base": 1.0},
            "policy": "idle",
            "idle_samples": 10 * BATCH,
            "frozen_bits": 32,
            "optimizer": {"kind": "sgd"},
            "advanced": {
                "init_min": 0.0,
                "init_max": 0.0,
                "control_fraction": 0.0,
                "reselect_every_samples": 7 * BATCH,
            },
        },
        "trainer": {
            "threads": 1,
            "mode": "sync",
            "batch_size": BATCH,
            "data_passes": DATA_PASSES,
            "precision": "float32",
            "log_every_s": 0.2,
            "output_dir": str(folder / "runs"),
        },
        "servers": {"num_shards": 2, "memory_limit_bytes": "64MiB"},
        "snapshots": {"uri": str(folder / "snapshots"), "every_samples": 23 * BATCH},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values} if isinstance(values, dict) else values
    return raw


def exact_job(folder: Path, **sections: Any) -> Job:
    return make_job(raw_exact_job(folder, **sections))


def expected_rows(steps: int) -> dict[str, dict[int, float]]:
    """By table, what every value of a row is behind a step: the dictionary model."""
    labels, sample, item = samples()
    tables: dict[str, dict[int, float]] = {"sample": {}, "item": {}}
    for step in range(steps):
        for position in range(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH):
            for table, row_ids in (("sample", sample), ("item", item)):
                row_id = int(row_ids[position])
                tables[table][row_id] = tables[table].get(row_id, 0.0) + 2.0 * labels[position] - 1.0
    return tables


def assert_cut_is_exact(job: Job, cut: Path) -> int:
    """The rows of a cut equal the model bit for bit, and it has no others. Returns its step."""
    manifest = read_manifest(cut)
    store = InprocStore(memory_limit_bytes=64 << 20)
    try:
        store.create_tables(table_specs(job, ["sample", "item"]))
        epoch = store.begin_epoch(job.name, 1, "sync", will_restore=True).epoch
        store.restore(Identity(job.name, epoch, 0), str(cut))
        stats = store.stats().tables
        for table, rows in expected_rows(manifest.run_step).items():
            routing = dedup_route(np.array(list(rows), np.int64), store.shard_of_bucket, store.num_shards)
            ids = RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))
            got = store.lookup({table: ids})[table].values
            expected = np.array([[rows[int(row_id)]] * DIM for row_id in ids.row_ids], np.float32)
            # bit for bit up to the sign of zero
            assert (got + 0.0).tobytes() == (expected + 0.0).tobytes(), table
            assert stats[table].rows_hot + stats[table].rows_frozen == len(rows), table
    finally:
        store.close()
    return manifest.run_step
