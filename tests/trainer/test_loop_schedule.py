"""The share of rows that train follows the job's schedule, in steps of the shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedding_server.inproc import InprocStore
from trainer.group import Group
from trainer.job import make_job
from trainer.loop import run_worker


class HotShares(InprocStore):
    """Notes the share of hot rows after each re-selection, by step."""

    def __init__(self) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self.shares: dict[int, float] = {}

    def reselect(self, who, step, frostlines):
        moves = super().reselect(who, step, frostlines)
        stats = self.stats().total()
        self.shares[step] = stats.rows_hot / (stats.rows_hot + stats.rows_frozen)
        return moves


def _job(**advanced) -> dict:
    knobs = {"probation_visits": 0, "reselect_every_samples": 640, "control_fraction": 0.0, **advanced}
    return {
        "name": "scheduled",
        "data": {
            "reader": "synthetic",
            "num_samples": 3200,
            "num_test_samples": 64,
            "num_features": 1,
            "num_dense": 1,
            "cardinalities": [2000],
        },
        "model": {"kind": "dlrm", "dense_layers": [4], "over_layers": [4, 1]},
        "embedding": {"dim": 4, "policy": "topk", "hot_fraction": 0.2, "advanced": knobs},
        "trainer": {"batch_size": 64, "precision": "float32"},
        "servers": {"store": "inproc"},
    }


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [0.2, 0.2, 0.2, 0.2, 0.2]),
        ({"kind": "constant", "warmup_samples": 1280}, [1.0, 1.0, 0.2, 0.2, 0.2]),
        ({"kind": "linear", "warmup_samples": 640, "samples": 1280}, [1.0, 0.6, 0.2, 0.2, 0.2]),
        ({"kind": "linear", "samples": 2560, "every_samples": 1280}, [1.0, 0.6, 0.6, 0.2, 0.2]),
        ({"kind": "cubic", "warmup_samples": 640, "samples": 1280}, [1.0, 0.3, 0.2, 0.2, 0.2]),
    ],
    ids=lambda value: str(value.get("kind", "none")) if isinstance(value, dict) else "",
)
def test_the_hot_share_follows_the_schedule(schedule: dict, expected: list[float], tmp_path: Path) -> None:
    store = HotShares()
    run_worker(make_job(_job(schedule=schedule)), "main", store, Group(), tmp_path, lambda progress: None)
    assert list(store.shares) == [10, 20, 30, 40, 50]
    assert list(store.shares.values()) == pytest.approx(expected, abs=0.02)
    store.close()
