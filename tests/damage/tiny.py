"""A snapshot of some 30 kB with a row of every kind, so that each of its bytes can be damaged in turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from embedding_server.snapshot_format import OBJECTS, ParentRecord, segment_object
from embedding_server.snapshot_parts import read_parts
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from tests.embedding_server.cut_shards import CutShards
from trainer.dense_state import capture
from trainer.job import Job, make_job
from trainer.snapshots import Manifest, job_folder, shard_entries, write_dense, write_manifest

NAME = "tiny"


def _table(name: str, optimizer: OptimizerSpec, **policy: object) -> TableSpec:
    common = {"idle_steps": 2, "control_fraction": 0.0}
    return TableSpec(name=name, dim=4, optimizer=optimizer, policy=PolicySpec.model_validate(common | policy))


SPECS = [
    _table("a", OptimizerSpec(kind="rowwise_adagrad", weight_decay=0.01), kind="idle", frozen_bits=8),
    _table(
        "b",
        OptimizerSpec(kind="adam"),
        kind="topk",
        probation_visits=0,
        hot_fraction=0.5,
        frozen_bits=32,
        hot_bits=16,
        min_count=2,
    ),
]


def train(shards: CutShards) -> None:
    """Seven steps, after which there are rows of every kind: hot and frozen, and in `b` frozen at their initial value
    and waiting for a second visit."""
    idle, busy, new = (np.arange(first, last, dtype=np.int64) for first, last in ((-4, 4), (100, 106), (200, 206)))
    for row_ids in (
        idle,
        idle,
        busy,
        busy,
        np.append(busy, [2**63 - 1, -(2**63), *range(300, 306)]),
        np.append(busy, new),
    ):
        shards.train(row_ids)
        shards.reselect()
    shards.train(new)


def make_tiny(uri: Path, num_parts: int = 1, *, is_delta: bool = False) -> Path:
    """The cut's folder. is_delta: it has weights of three rows of a table, and for the others a full cut beside it."""
    folder = job_folder(uri, NAME)
    with CutShards(SPECS, num_parts) as shards:
        train(shards)
        cut = shards.cut(folder)
        entry = finish(cut, shards.step, num_parts)
        if is_delta:
            for _ in range(2):
                shards.train(np.array([100, 101, 777], np.int64))
            cut = shards.cut(folder, cut)
            finish(cut, shards.step, num_parts, parent=entry, sequence=1)
    return cut


def finish(cut: Path, step: int, num_parts: int, **changes: object) -> ParentRecord:
    """The trainer's part of a cut: dense.safetensors and manifest.json. How a delta of it would name it."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dense = capture(model, optimizer, "adam", torch.get_rng_state()[None])
    manifest = {
        "frostline_version": "0",
        "created": "2026-01-01T00:00:00+00:00",
        "job": "job",
        "arm": "main",
        "run": "0123456789abcdef",
        "step": step,
        "run_step": step,
        "epoch": 1,
        "num_workers": 1,
        "mode": "sync",
        "shards": shard_entries(cut, num_parts),
        "dense": [write_dense(cut, dense.to_bytes())],
        "reader": {"data_pass": 0, "step_in_pass": step, "rows_skipped": 0, "batch_size": 8, "seed": 0},
        "resolved_job": {"name": "job"},
    }
    return write_manifest(cut, Manifest.model_validate(manifest | changes))


def job_of(uri: Path) -> Job:
    """One that would resume from it."""
    data = {"reader": "synthetic", "num_samples": 8, "num_features": 1, "num_dense": 1, "cardinalities": [4]}
    return make_job({"name": NAME, "data": data, "snapshots": {"uri": str(uri)}})


def files_of(cut: Path) -> list[Path]:
    """Every file that is needed: its own, of a parent what has rows of it or vouches for that, the segments that it
    names."""
    record = read_parts(cut)[0].record
    own = [path for path in cut.rglob("*") if path.is_file()]
    names = {segment_object(segment.digest) for table in record.tables for segment in table.segments}
    parents = [path for path in cut.parent.glob("cut-*") if path != cut]
    theirs = [path for parent in parents for path in (*parent.rglob("*.json"), *parent.rglob("*-hot.safetensors"))]
    return sorted([*own, *(cut.parent / OBJECTS / name for name in names), *theirs])
