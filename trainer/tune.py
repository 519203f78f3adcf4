"""Finds the policy and knobs that save most within a loss of AUC that the user accepts, by short runs.

    tune(job, max_auc_drop=0.05, budget_bytes=8 << 30, say=print) -> TuneResult

1. The bytes of every candidate of the grid (tune_grid.py) are estimated over the whole job, all in one reading and
   without training (estimate.py).
2. The job with every row training (policy off) runs over a prefix of the data: the AUC to compare with.
3. Candidates within the budget run over the same prefix, the fewest bytes first, until one surely loses no more than
   max_auc_drop: all that come after it take more bytes, so an exhaustive search would pick the same. A run that is
   hopeless after a quarter or half of the prefix ends there.
4. The cheapest candidate of each policy that was not measured yet runs too, so that the frontier shows every policy.

AUC is that of the second half of the prefix, each sample scored before it is trained on; a drop is in points (x100),
positive where the candidate is worse, with a 95% interval over samples (paired_auc.py). Surely means that the whole
interval lies at or below max_auc_drop: of many candidates some would pass by luck. It says nothing of other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from embedding_server.errors import InvalidInput
from trainer.data.registry import open_reader
from trainer.estimate import Estimate, estimate_jobs
from trainer.job import Job, steps_of
from trainer.paired_auc import Z_95, paired_auc
from trainer.trial import IsHopeless, Scores, in_process, run_trial
from trainer.tune_grid import Candidate, baseline, grid

#: samples of a run where the user names none: a quarter of a data pass within these bounds
LEAST_PREFIX, MOST_PREFIX, UNKNOWN_PREFIX = 200_000, 1_000_000, 500_000
_PREFIX_SHARE = 4
SAMPLE_BYTES = 256 << 20  # of the estimates of all candidates together
_LEAST_STEPS = 16
#: a run is hopeless if its drop at this part of the prefix is, with three standard errors to spare, above this many
#: times max_auc_drop. Early figures are worse than late ones where rows must be admitted first, hence the room.
_HOPELESS = ((4, 4.0), (2, 2.0))
_SURE = 3.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate with what it takes and what it loses. Drops are points of AUC (x100), lower is better."""

    candidate: Candidate
    estimate: Estimate  # of the whole job
    num_samples: int  # trained on
    auc: float
    auc_drop: float
    low: float  # 95% interval of auc_drop
    high: float
    is_complete: bool  # False: stopped early, as hopeless

    @property
    def bytes_peak(self) -> int:
        return self.estimate.bytes_peak


@dataclass(frozen=True, slots=True)
class TuneResult:
    max_auc_drop: float
    budget_bytes: int | None
    num_samples: int  # of the prefix
    points: list[Point]  # measured, the fewest bytes first; the baseline is among them
    num_candidates: int
    pick: Point
    meets_drop: bool  # surely
    meets_budget: bool

    @property
    def keeps_both(self) -> bool:
        """The pick surely loses no more than max_auc_drop, within the budget; if not, it comes nearest to that."""
        return self.meets_drop and self.meets_budget

    def may_do(self) -> list[Point]:
        """Points with fewer bytes than the pick that may lose little enough, but not surely."""
        return [p for p in self.points if p.is_complete and p.bytes_peak < self.pick.bytes_peak and self._may_do(p)]

    def _may_do(self, point: Point) -> bool:
        return point.auc_drop <= self.max_auc_drop < point.high

    def frontier(self) -> list[Point]:
        """Points that no other beats in bytes and AUC at once, the fewest bytes first."""
        result: list[Point] = []
        for point in self.points:
            if point.is_complete and (not result or point.auc_drop < result[-1].auc_drop):
                result.append(point)
        return result


def tune(
    job: Job,
    *,
    max_auc_drop: float,
    budget_bytes: int | None = None,
    samples: int | None = None,
    exhaustive: bool = False,
    say: Say = lambda text: None,
    candidates: Sequence[Candidate] | None = None,
) -> TuneResult:
    """budget_bytes bounds the peak of bytes of all tables over all shards. exhaustive: every candidate runs to the end.

    candidates: in place of the grid. InvalidInput if the data say nothing about AUC.
    """
    num_steps = prefix_steps(job, samples)
    every = list(candidates) if candidates is not None else grid(job, num_steps * job.trainer.batch_size)
    say(f"estimating the bytes of {len(every) + 1} settings over the whole job")
    jobs = {candidate.name: in_process(candidate.job(job)) for candidate in [baseline(), *every]}
    estimates = estimate_jobs(jobs, say, SAMPLE_BYTES)
    search = _Search(job, num_steps, max_auc_drop, budget_bytes, estimates, exhaustive, say)
    search.run(sorted(every, key=lambda c: estimates[c.name].bytes_peak))
    return search.result(len(every) + 1)


def prefix_steps(job: Job, samples: int | None) -> int:
    """Steps of a run, at most those of the job."""
    reader, batch_size = open_reader(job, "train"), job.trainer.batch_size
    limits = [n for n in (reader.num_steps, job.trainer.max_steps) if n is not None]
    if samples is None:
        known = [n for n in (reader.steps_per_pass, job.trainer.max_steps) if n is not None]
        in_pass = min(known) * batch_size if known else None
        samples = UNKNOWN_PREFIX
        if in_pass is not None:
            samples = min(in_pass, max(LEAST_PREFIX, min(MOST_PREFIX, in_pass // _PREFIX_SHARE)))
    steps = min([steps_of(samples, batch_size), *limits])
    if steps < _LEAST_STEPS:
        raise InvalidInput(
            f"a run of {steps} steps of trainer.batch_size={batch_size} samples says nothing about AUC; it needs "
            f"{_LEAST_STEPS} steps or more: raise --samples, or lower trainer.batch_size"
        )
    return steps


class _Search:
    def __init__(
        self,
        job: Job,
        num_steps: int,
        max_auc_drop: float,
        budget_bytes: int | None,
        estimates: dict[str, Estimate],
        exhaustive: bool,
        say: Say,
    ) -> None:
        self._job, self._num_steps = job, num_steps
        self._max_auc_drop, self._budget_bytes = max_auc_drop, budget_bytes
        self._estimates, self._exhaustive, self._say = estimates, exhaustive, say
        self._points: list[Point] = []
        self._full: Scores

    def run(self, ordered: Sequence[Candidate]) -> None:
        """`ordered`: the fewest bytes first."""
        self._run_baseline()
        off = self._points[0]
        for candidate in ordered:
            estimate = self._estimates[candidate.name]
            if not self._exhaustive and (estimate.bytes_peak >= off.bytes_peak or not self._fits(estimate)):
                continue
            point = self._measure(candidate)
            if self._is_good(point) and not self._exhaustive:
                break
        for candidate in ordered:
            if all(point.candidate.policy != candidate.policy for point in self._points):
                self._measure(candidate)

    def _run_baseline(self) -> None:
        off = baseline()
        self._say(f"{off.name}: training over {self._num_steps * self._job.trainer.batch_size:,} samples")
        self._full = run_trial(off.job(self._job), self._num_steps)
        point = self._point(off, self._full)
        if math.isnan(point.auc):
            raise InvalidInput(
                f"the second half of the first {len(self._full)} samples has no AUC: labels of one kind only, or "
                "scores that are not finite; raise --samples, or look at the learning rates"
            )
        self._points.append(point)

    def _measure(self, candidate: Candidate) -> Point:
        checks = {} if self._exhaustive else self._checks()
        scores = run_trial(candidate.job(self._job), self._num_steps, checks)
        point = self._point(candidate, scores)
        self._points.append(point)
        text = f"AUC drop {point.auc_drop:+.3f} [{point.low:+.3f}, {point.high:+.3f}]"
        ended = "" if point.is_complete else f", stopped after {point.num_samples:,} samples"
        self._say(f"{candidate.name}: {point.bytes_peak / 1e6:,.1f} MB, {text}{ended}")
        return point

    def _checks(self) -> dict[int, IsHopeless]:
        return {self._num_steps // part: partial(self._is_hopeless, times) for part, times in _HOPELESS}

    def _is_hopeless(self, times: float, scores: Scores) -> bool:
        _, drop, error = self._drop(scores)
        return drop - _SURE * error > times * self._max_auc_drop

    def _drop(self, scores: Scores) -> tuple[float, float, float]:
        """(AUC, drop, its standard error) over the second half of what was trained on; drop and error x100."""
        window = slice(len(scores) // 2, len(scores))
        compared = paired_auc(self._full.labels[window], self._full.logits[window], scores.logits[window])
        return compared.auc_b, 100.0 * compared.difference, 100.0 * compared.standard_error

    def _point(self, candidate: Candidate, scores: Scores) -> Point:
        auc, drop, error = self._drop(scores)
        return Point(
            candidate=candidate,
            estimate=self._estimates[candidate.name],
            num_samples=len(scores),
            auc=auc,
            auc_drop=drop,
            low=drop - Z_95 * error,
            high=drop + Z_95 * error,
            is_complete=scores.is_complete,
        )

    def _fits(self, estimate: Estimate) -> bool:
        return self._budget_bytes is None or estimate.bytes_peak <= self._budget_bytes

    def _is_good(self, point: Point) -> bool:
        return point.is_complete and point.high <= self._max_auc_drop and self._fits(point.estimate)

    def result(self, num_candidates: int) -> TuneResult:
        points = sorted(self._points, key=lambda point: point.bytes_peak)
        pick = self._pick(points)
        return TuneResult(
            max_auc_drop=self._max_auc_drop,
            budget_bytes=self._budget_bytes,
            num_samples=len(self._full),
            points=points,
            num_candidates=num_candidates,
            pick=pick,
            meets_drop=pick.is_complete and pick.high <= self._max_auc_drop,
            meets_budget=self._fits(pick.estimate),
        )

    def _pick(self, points: Sequence[Point]) -> Point:
        """The fewest bytes that keep both promises; else the budget with the smallest drop; else the fewest bytes."""
        within = [point for point in points if self._fits(point.estimate)]
        good = [point for point in within if self._is_good(point)]
        if good:
            return good[0]
        if within:
            return min(within, key=lambda point: (not point.is_complete, point.auc_drop))
        return points[0]
