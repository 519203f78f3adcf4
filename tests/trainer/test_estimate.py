"""The estimate against the run: the same job trained in this process, its shards' own figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from embedding_server.inproc import InprocStore
from embedding_server.store import TableStats
from trainer import estimate
from trainer.estimate import Estimate, estimate_jobs, memory_of, num_shards_of
from trainer.group import Group
from trainer.job import Job, load_job, make_job
from trainer.loop import run_worker
from trainer.report import ArmSummary

MOVIELENS = Path(__file__).parents[2] / "examples" / "movielens.yaml"
POLICIES: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "idle": {"policy": "idle", "frozen_bits": 4},
    "compact": {"policy": "compact", "frozen_bits": 4},
    "topk": {"policy": "topk", "hot_fraction": 0.1, "frozen_bits": 8},
}


def synthetic(policy: str, **embedding: Any) -> Job:
    return make_job(
        {
            "name": "estimated",
            "seed": 3,
            "data": {
                "reader": "synthetic",
                "num_samples": 60_000,
                "num_test_samples": 0,
                "num_dense": 1,
                "num_features": 3,
                "cardinalities": [60_000, 20_000, 20],
            },
            "model": {"kind": "deepfm", "hidden_width": 8, "fm_dim": 4},
            "embedding": {
                "dim": 16,
                "idle_samples": 8_000,
                "advanced": {"reselect_every_samples": 4_000},
                **POLICIES[policy],
                **embedding,
            },
            "trainer": {"batch_size": 512, "threads": 1},
            "servers": {"store": "inproc"},
        }
    )


def run(job: Job, folder: Path) -> ArmSummary:
    store = InprocStore(memory_limit_bytes=job.servers.memory_limit_bytes)
    try:
        return run_worker(job, "main", store, Group(), folder, lambda progress: None)
    finally:
        store.close()


def assert_close(estimate: Estimate, summary: ArmSummary, share: float) -> None:
    total = estimate.total()
    assert total.bytes_total == pytest.approx(summary.bytes_total, rel=share)
    assert memory_of(total) == pytest.approx(summary.bytes_total - summary.bytes_frozen, rel=share)
    assert total.bytes_frozen == pytest.approx(summary.bytes_frozen, rel=share, abs=share * summary.bytes_total)
    assert estimate.bytes_peak >= total.bytes_total


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rehearsal_of_all_ids_and_a_sample_of_them_agree_with_the_run(policy: str, tmp_path: Path) -> None:
    job = synthetic(policy)
    summary = run(job, tmp_path)
    whole = estimate_jobs({"main": job})["main"]
    assert set(whole.sampled.values()) == {1.0}
    assert_close(whole, summary, 0.02)
    sampled = estimate_jobs({"main": job}, sample_bytes=500_000)["main"]
    assert sampled.sampled["cat_0"] < 0.2
    assert sampled.sampled["cat_2"] == 1.0  # twenty rows are never thinned
    assert_close(sampled, summary, 0.15)
    assert (whole.num_samples, whole.num_steps) == (60_000, 118)


def test_a_cap_of_hot_bytes_holds_in_a_sample_however_small(tmp_path: Path) -> None:
    job = synthetic("idle", hot_bytes=200_000)
    summary = run(job, tmp_path)
    sampled = estimate_jobs({"main": job}, sample_bytes=100_000)["main"]
    assert sampled.sampled["cat_0"] < 0.02
    assert sampled.total().rows_hot == pytest.approx(summary.rows_hot, rel=0.15)


def test_a_memory_folder_that_is_too_small_for_the_sample_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(estimate, "_MEMORY_FOLDER", str(tmp_path))
    free = shutil.disk_usage(tmp_path).free
    assert estimate._memory_folder(free // 2) == str(tmp_path)
    assert estimate._memory_folder(2 * free) is None
    monkeypatch.setattr(estimate, "_MEMORY_FOLDER", str(tmp_path / "absent"))
    assert estimate._memory_folder(1) is None


def test_jobs_estimated_together_are_as_they_are_alone() -> None:
    jobs = {"idle": synthetic("idle"), "dim 8": synthetic("idle", dim=8), "off": synthetic("off")}
    together = estimate_jobs(jobs)
    assert list(together) == list(jobs)
    for name in ("idle", "off"):
        assert together[name] == estimate_jobs({name: jobs[name]})[name]
    assert together["dim 8"].total().bytes_hot < together["idle"].total().bytes_hot


def test_movielens_is_within_15_percent(tmp_path: Path) -> None:
    settings = ["servers.store=inproc", "embedding.dim=32", "trainer.max_steps=100", "embedding.idle_samples=6000"]
    settings += ["model.dense_layers=[32]", "trainer.threads=1", "embedding.frozen_bits=4"]
    arms = load_job(MOVIELENS, settings).arm_jobs()
    estimates = estimate_jobs(arms)
    assert_close(estimates["idle"], run(arms["idle"], tmp_path), 0.15)
    assert estimates["full"].total().rows_frozen == 0
    assert estimates["topk"].total().rows_frozen > 0
    assert estimates["idle"].total().bytes_total < estimates["full"].total().bytes_total


def test_two_data_passes_forget_rare_rows_at_their_end() -> None:
    kept = synthetic("idle").model_dump(mode="json", exclude_unset=True)
    kept["trainer"]["data_passes"] = 2
    forgetful = {**kept, "embedding": {**kept["embedding"], "forget_below": 3}}
    forgetful["embedding"]["advanced"] = {**kept["embedding"]["advanced"], "epoch_end": "forget_rare"}
    estimates = estimate_jobs({"kept": make_job(kept), "forgetful": make_job(forgetful)})
    rows = {name: e.total().rows_hot + e.total().rows_frozen for name, e in estimates.items()}
    assert rows["forgetful"] < 0.6 * rows["kept"]
    assert estimates["kept"].num_samples == 120_000


def test_a_limit_that_binds_is_noted() -> None:
    raw = synthetic("off").model_dump(mode="json", exclude_unset=True)
    raw["servers"] = {"store": "inproc", "num_shards": 1, "memory_limit_bytes": 2 << 20}
    notes = estimate_jobs({"main": make_job(raw)})["main"].notes
    assert any("memory_limit_bytes" in note for note in notes)
    assert len(notes) == len(set(notes))


def test_scores_are_ranked_by_heat_here() -> None:
    by_score = synthetic("topk", advanced={"select": "score", "score": "abs_weight", "reselect_every_samples": 4_000})
    total = estimate_jobs({"main": by_score})["main"].total()
    assert total.rows_frozen > 0
    assert total == estimate_jobs({"main": synthetic("topk")})["main"].total()


def test_shards_are_those_that_the_job_would_start() -> None:
    raw = synthetic("idle").model_dump(mode="json", exclude_unset=True)
    assert num_shards_of(make_job({**raw, "servers": {"num_shards": 3}})) == 3
    external = {"launch": "external", "addresses": ["a:1", "b:2"]}
    assert num_shards_of(make_job({**raw, "servers": external})) == 2
    assert num_shards_of(make_job({**raw, "servers": {"num_shards": 1000}})) == 1
    assert num_shards_of(synthetic("idle")) == 1


def test_memory_is_all_but_segments() -> None:
    assert memory_of(TableStats(bytes_hot=5, bytes_state=4, bytes_frozen=30, bytes_index=2, bytes_heat=1)) == 12
