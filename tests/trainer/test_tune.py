"""The search with made-up figures, then a small one with real runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.store import TableStats
from trainer import tune as module
from trainer.estimate import Estimate
from trainer.job import Job, load_job, make_job
from trainer.trial import Scores, run_trial
from trainer.tune import Point, TuneResult, prefix_steps, tune
from trainer.tune_grid import Candidate, baseline, grid

BATCH = 100


def job_of(num_samples: int = 40_000, **embedding: Any) -> Job:
    return make_job(
        {
            "name": "tuned",
            "data": {
                "reader": "synthetic",
                "num_samples": num_samples,
                "num_test_samples": 0,
                "num_dense": 1,
                "num_features": 2,
                "cardinalities": [20_000],
                "truth_scale": 1.0,
            },
            "model": {"kind": "deepfm", "hidden_width": 8, "fm_dim": 4},
            "embedding": {"dim": 8} | embedding,
            "trainer": {"batch_size": BATCH, "threads": 1},
            "servers": {"store": "inproc"},
        }
    )


# The search, with runs and estimates replaced -------------------------------------------------------------------------


class Figures:
    """Made-up candidates: bytes, and by how much their scores are spoilt. Counts the runs and the steps they took."""

    def __init__(self, sizes: list[int], harms: list[float]) -> None:
        self.candidates = [Candidate(f"c{i}", f"policy {i % 3}", {}) for i in range(len(sizes))]
        self.sizes = {"off": 1000} | {c.name: size for c, size in zip(self.candidates, sizes, strict=True)}
        self.harms = {"off": 0.0} | {c.name: harm for c, harm in zip(self.candidates, harms, strict=True)}
        random = np.random.default_rng(0)
        self.labels = (random.random(64 * BATCH) < 0.5).astype(np.float32)
        self.truth = (self.labels + random.standard_normal(64 * BATCH)).astype(np.float32)
        self.noise = random.standard_normal(64 * BATCH).astype(np.float32)
        self.ran: list[str] = []

    def estimate(self, jobs: Any, say: Any, sample_bytes: int) -> dict[str, Estimate]:
        return {
            name: Estimate(10, 10, {"t": TableStats(bytes_hot=self.sizes[name])}, self.sizes[name], 0, 0, {"t": 1.0})
            for name in jobs
        }

    def run(self, name: str, num_steps: int, checks: Any = None) -> Scores:
        self.ran.append(name)
        logits = self.truth + self.harms[name] * self.noise
        for step, is_hopeless in sorted((checks or {}).items()):
            at = step * BATCH
            if is_hopeless(Scores(self.labels[:at], logits[:at], False)):
                return Scores(self.labels[:at], logits[:at], False)
        n = num_steps * BATCH
        return Scores(self.labels[:n], logits[:n], True)

    def tune(self, monkeypatch_context: pytest.MonkeyPatch, **options: Any) -> TuneResult:
        patch = monkeypatch_context.setattr
        patch(module, "estimate_jobs", self.estimate)
        patch(module, "in_process", lambda job: job)
        patch(Candidate, "job", lambda candidate, base: candidate.name)
        patch(module, "run_trial", self.run)
        return tune(job_of(), candidates=self.candidates, samples=64 * BATCH, **options)


@given(
    st.lists(st.tuples(st.integers(1, 1200), st.sampled_from([0.0, 0.001, 0.02, 0.3, 3.0])), min_size=1, max_size=12),
    st.sampled_from([0.05, 1.0]),
    st.none() | st.integers(1, 1200),
)
def test_the_search_picks_what_an_exhaustive_one_does(
    figures: list[tuple[int, float]], max_auc_drop: float, budget: int | None
) -> None:
    results = []
    for exhaustive in (False, True):
        made = Figures([size for size, _ in figures], [harm for _, harm in figures])
        with pytest.MonkeyPatch.context() as patched:
            result = made.tune(patched, max_auc_drop=max_auc_drop, budget_bytes=budget, exhaustive=exhaustive)
        results.append(result)
        assert len(made.ran) == len(set(made.ran)) == len(result.points)
    quick, full = results
    assert len(full.points) == len(figures) + 1
    assert (quick.meets_drop, quick.meets_budget) == (full.meets_drop, full.meets_budget)
    if full.meets_drop and full.meets_budget:
        assert quick.pick.bytes_peak == full.pick.bytes_peak
    good = [p for p in full.points if p.high <= max_auc_drop and (budget is None or p.bytes_peak <= budget)]
    if good:
        assert full.pick.bytes_peak == min(p.bytes_peak for p in good)


def test_nothing_runs_that_cannot_be_picked_but_one_of_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Figures([10, 20, 30, 40, 50, 1500], [3.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    result = made.tune(monkeypatch, max_auc_drop=0.05)
    assert made.ran == ["off", "c0", "c1", "c2"]
    assert result.pick.candidate.name == "c2"
    assert [p.is_complete for p in result.points] == [False, False, True, True]
    assert [p.candidate.name for p in result.frontier()] == ["c2"]
    assert result.num_candidates == 7


def test_a_setting_that_passes_by_luck_is_not_picked_but_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Figures([10, 20, 30], [0.2, 0.0, 0.0])
    lucky = made.tune(monkeypatch, max_auc_drop=100.0).points[0]
    result = Figures([10, 20, 30], [0.2, 0.0, 0.0]).tune(monkeypatch, max_auc_drop=(lucky.auc_drop + lucky.high) / 2)
    assert result.pick.candidate.name == "c1"
    assert [p.candidate.name for p in result.may_do()] == ["c0"]


def test_a_budget_that_nothing_keeps_without_loss_gives_the_smallest_loss_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = Figures([10, 20, 500], [3.0, 0.5, 0.0]).tune(monkeypatch, max_auc_drop=0.05, budget_bytes=100)
    assert result.pick.candidate.name == "c1"
    assert (result.meets_drop, result.meets_budget) == (False, True)


def test_a_budget_below_every_setting_gives_the_fewest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Figures([10, 20, 500], [3.0, 0.5, 0.0]).tune(monkeypatch, max_auc_drop=0.05, budget_bytes=5)
    assert result.pick.candidate.name == "c0"
    assert not result.meets_budget


def test_without_a_gain_the_pick_is_that_every_row_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Figures([1000, 1100], [0.0, 0.0]).tune(monkeypatch, max_auc_drop=0.05)
    assert result.pick.candidate.policy == "off"
    assert result.meets_drop and result.meets_budget


def test_drops_come_with_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Figures([10], [0.5]).tune(monkeypatch, max_auc_drop=10.0)
    point, off = result.points
    assert point.low < point.auc_drop < point.high
    assert point.auc_drop == pytest.approx(100 * (off.auc - point.auc), abs=1e-9)
    assert (off.auc_drop, off.low, off.high) == (0.0, 0.0, 0.0)
    assert [p.candidate.name for p in result.frontier()] == ["c0", "off"]


def test_labels_of_one_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Figures([10], [0.0])
    made.labels = np.ones_like(made.labels)
    with pytest.raises(InvalidInput, match="labels of one kind"):
        made.tune(monkeypatch, max_auc_drop=0.05)


# The prefix and the grid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "asked", "expected"),
    [(40_000, None, 40_000), (1_000_000, None, 250_000), (10_000_000, None, 1_000_000), (40_000, 5_000, 5_000)],
)
def test_the_prefix_is_a_quarter_of_a_pass_within_bounds(num_samples: int, asked: int | None, expected: int) -> None:
    assert prefix_steps(job_of(num_samples), asked) * BATCH == expected


def test_a_prefix_of_a_few_steps_is_refused() -> None:
    with pytest.raises(InvalidInput, match="raise --samples"):
        prefix_steps(job_of(), 500)


def test_every_candidate_is_a_job_that_its_set_lines_make(tmp_path) -> None:
    base = job_of(policy="topk", advanced={"reselect_every_samples": 30_000})
    path = tmp_path / "job.yaml"
    path.write_text(base.model_dump_json(exclude_unset=True))
    candidates = [baseline(), *grid(base, 200_000)]
    assert len({c.name for c in candidates}) == len(candidates)
    for candidate in candidates:
        made = candidate.job(base)
        assert made == load_job(path, candidate.set_lines())
        assert made.embedding.policy == candidate.policy
        if candidate.policy in ("idle", "compact"):
            assert made.embedding.advanced.reselect_every_samples <= made.embedding.idle_samples
            assert made.embedding.idle_samples <= 200_000 / 2
    assert {c.policy for c in candidates} == {"off", "idle", "compact", "topk"}


def test_the_grid_leaves_arms_out_and_shrinks_for_short_prefixes() -> None:
    raw = job_of().model_dump(mode="json", exclude_unset=True)
    base = make_job({**raw, "arms": {"a": {"embedding": {"policy": "off"}}}})
    assert all(not candidate.job(base).arms for candidate in grid(base, 200_000))
    assert len(grid(base, 2_000)) < len(grid(base, 200_000))


# Real runs ------------------------------------------------------------------------------------------------------------


def test_a_trial_scores_every_sample_once_and_stops_when_told() -> None:
    job = job_of(20_000)
    full = run_trial(job, 40)
    assert (len(full), full.is_complete) == (40 * BATCH, True)
    seen: list[int] = []

    def look(scores: Scores) -> bool:
        seen.append(len(scores))
        return len(seen) == 2

    stopped = run_trial(job, 40, {10: look, 20: look, 30: look})
    assert (len(stopped), stopped.is_complete, seen) == (20 * BATCH, False, [10 * BATCH, 20 * BATCH])
    np.testing.assert_array_equal(stopped.labels, full.labels[: len(stopped)])
    np.testing.assert_allclose(stopped.logits, full.logits[: len(stopped)], atol=1e-5)


def test_a_search_over_a_stream_with_a_tail_finds_a_setting_that_saves() -> None:
    times: dict[str, Any] = {"embedding.idle_samples": 2_000, "embedding.advanced.reselect_every_samples": 1_000}
    candidates = [
        Candidate("idle", "idle", {"embedding.policy": "idle", "embedding.frozen_bits": 8, **times}),
        Candidate("random", "topk", {"embedding.policy": "topk", "embedding.hot_fraction": 0.01,
                                     "embedding.advanced.select": "random", "embedding.frozen_bits": 8, **times}),
    ]  # fmt: skip
    said: list[str] = []
    job = job_of(20_000, dim=64, learning_rate={"base": 0.2})
    result = tune(job, max_auc_drop=1.5, samples=16_000, candidates=candidates, say=said.append)
    by_name: dict[str, Point] = {point.candidate.name: point for point in result.points}
    assert result.pick.candidate.name == "idle"
    assert result.pick.bytes_peak < by_name["off"].bytes_peak
    assert result.meets_drop
    assert by_name["off"].auc > 0.51
    assert all(math.isfinite(point.auc) for point in result.points)
    assert any(line.startswith("idle: ") for line in said)
