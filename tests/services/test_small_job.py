"""A job of a few thousand rows: its bytes are those that the estimate promised, in process and over a shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedding_server.inproc import InprocStore
from embedding_server.store import EmbeddingStore
from services.shard_client import RemoteStore
from trainer.estimate import Estimate, estimate_jobs
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker
from trainer.report import ArmSummary

Serve = Callable[..., list[str]]

POLICIES: dict[str, dict[str, Any]] = {
    "idle": {"policy": "idle"},
    "compact": {"policy": "compact"},
    "topk": {"policy": "topk", "hot_fraction": 0.2},
    "idle under hot_bytes": {"policy": "idle", "hot_bytes": 90_000},
    "topk under hot_bytes": {"policy": "topk", "hot_fraction": 0.2, "hot_bytes": 90_000},
}


def _job(policy: str) -> Job:
    return make_job(
        {
            "name": "small",
            "seed": 3,
            "data": {
                "reader": "synthetic",
                "num_samples": 30_000,
                "num_test_samples": 0,
                "num_dense": 1,
                "num_features": 3,
                "cardinalities": [3000, 2000, 20],
            },
            "model": {"kind": "deepfm", "hidden_width": 8, "fm_dim": 4},
            "embedding": {
                "dim": 16,
                "idle_samples": 4_000,
                "advanced": {"reselect_every_samples": 2_000},
                **POLICIES[policy],
            },
            "trainer": {"batch_size": 256, "threads": 1},
            "servers": {"store": "inproc"},
        }
    )


def _run(job: Job, store: EmbeddingStore, folder: Path) -> ArmSummary:
    try:
        return run_worker(job, "main", store, Group(), folder, lambda progress: None)
    finally:
        store.close()


def _agree(summary: ArmSummary, estimate: Estimate, share: float) -> None:
    total = estimate.total()
    assert summary.rows_frozen == pytest.approx(total.rows_frozen, rel=share)
    assert summary.bytes_frozen == pytest.approx(total.bytes_frozen, rel=share)
    assert summary.bytes_total == pytest.approx(total.bytes_total, rel=share)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_job_takes_the_bytes_that_its_estimate_promised(policy: str, serve: Serve, tmp_path: Path) -> None:
    job = _job(policy)
    estimate = estimate_jobs({"main": job})["main"]
    assert estimate.total().rows_frozen > 300
    limit = job.servers.memory_limit_bytes
    first, second = (_run(job, InprocStore(memory_limit_bytes=limit), tmp_path / str(n)) for n in range(2))
    _agree(first, estimate, 0.15)
    assert first.bytes_peak == pytest.approx(estimate.bytes_peak, rel=0.15)
    assert second.bytes_frozen == pytest.approx(first.bytes_frozen, rel=0.03)
    assert second.bytes_peak == pytest.approx(first.bytes_peak, rel=0.03)
    remote = _run(job, RemoteStore(serve()), tmp_path / "shard")
    _agree(remote, estimate, 0.15)
    # a shard writes and unites segments when no request waits, so its peak, some tens of KB of buffers, is a matter of
    # time: 16% under the estimate has been seen, and under load it may be over
    assert remote.bytes_total <= remote.bytes_peak <= 1.4 * estimate.bytes_peak
