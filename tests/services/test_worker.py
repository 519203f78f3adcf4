from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services import worker
from services.local_shards import start_shards
from trainer.job import make_job, resolved_json
from trainer.report import ArmSummary


@pytest.fixture(autouse=True)
def restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("threads", "local_workers", "expected"), [(3, 1, 3), (None, 1, 8), (None, 4, 2), (None, 16, 1)]
)
def test_threads_are_the_jobs_or_a_share_of_the_cores(threads, local_workers, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    worker.set_threads(threads, local_workers)
    assert torch.get_num_threads() == expected


def test_the_environment_leaves_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    worker.set_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    worker.set_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_worker_trains_over_grpc(tmp_path: Path):
    job = make_job(
        {
            "name": "one",
            "data": {"reader": "synthetic", "num_samples": 400, "num_test_samples": 200, "cardinalities": [50]},
            "model": {"kind": "dlrm", "dense_layers": [8], "over_layers": [8, 1]},
            "embedding": {"dim": 8, "wire_dtype": "bfloat16"},
            "trainer": {"batch_size": 100, "threads": 1},
        }
    )
    with start_shards(2, memory_limit_bytes=128 << 20, log_dir=tmp_path) as shards:
        config = {
            "job": resolved_json(job),
            "arm": "main",
            "addresses": shards.addresses,
            "folder": str(tmp_path / "tb"),
        }
        shown: list[object] = []
        summary = ArmSummary(**worker.run_as_worker(config, 0, 1, 1, shown.append))
    assert summary.rows_hot > 0
    assert summary.bytes_pulled > 0
    assert summary.test_auc is not None
    assert shown
