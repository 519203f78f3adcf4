"""Contestants against `off`: bytes saved, gradient rows saved, and the paired AUC difference with its interval.

Pairs have the same stream, optimizer, seed, initial values and data pass. With two seeds or more the interval is
Student's t over the seeds, and DeLong's of the first seed stands beside it; with one seed it is DeLong's (auc.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.quality.auc import Interval, delong, over_seeds
from benchmarks.quality.results import Results
from benchmarks.quality.training import Case

BASELINE = "off"


@dataclass(frozen=True, slots=True)
class Compared:
    """One contestant on one stream with one optimizer, over its seeds, after one data pass (from 1)."""

    stream: str
    contestant: str
    optimizer: str
    data_pass: int
    auc: float  # mean over seeds
    oracle_auc: float | None
    difference: Interval  # to the baseline, points x 100
    by_seed: list[float] = field(default_factory=list)
    within_first_seed: Interval | None = None
    bytes_end: float = 0.0  # mean over seeds
    bytes_peak: float = 0.0
    saved_end: float = 0.0  # share of the baseline's bytes
    saved_peak: float = 0.0
    gradient_rows_saved: float = 0.0
    rows_frozen: float = 0.0
    train_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            key: [round(v, 5) for v in value] if isinstance(value, list) else _rounded(value)
            for key, value in asdict(self).items()
        }


def compare(results: Results, cases: Sequence[Case]) -> list[Compared]:
    """Every contestant whose cases and baselines are there; a contestant without all its seeds uses those it has."""
    compared = []
    for (stream, contestant, optimizer), of_seeds in _groups(cases):
        done = [case for case in of_seeds if results.of(case) and _baseline(results, cases, case)]
        for data_pass in range(max((case.data_passes for case in done), default=0)):
            pairs = [(case, _baseline(results, cases, case)) for case in done]
            ready = [(c, b) for c, b in pairs if b is not None and data_pass < min(c.data_passes, b.data_passes)]
            if ready:
                compared.append(_compare(results, stream, contestant, optimizer, data_pass, ready))
    return compared


def _groups(cases: Sequence[Case]) -> Iterator[tuple[tuple[str, str, str], list[Case]]]:
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.stream, case.contestant, case.optimizer), []).append(case)
    yield from groups.items()


def _baseline(results: Results, cases: Sequence[Case], case: Case) -> Case | None:
    for other in cases:
        is_pair = (other.stream, other.optimizer, other.seed) == (case.stream, case.optimizer, case.seed)
        if is_pair and other.contestant == BASELINE and results.of(other):
            return other
    return None


def _compare(
    results: Results, stream: str, contestant: str, optimizer: str, data_pass: int, pairs: list[tuple[Case, Case]]
) -> Compared:
    figures = [_figures(results, case, data_pass) for case, _ in pairs]
    baseline = [_figures(results, case, data_pass) for _, case in pairs]
    by_seed = [100.0 * (a["auc"] - b["auc"]) for a, b in zip(figures, baseline, strict=True)]
    within = _within_seed(results, *pairs[0], data_pass)
    line = results.of(pairs[0][0])
    assert line is not None
    saved = {
        name: 1.0 - _mean(figures, name) / _mean(baseline, name) for name in ("bytes_end", "bytes_peak", "rows_pushed")
    }
    return Compared(
        stream=stream,
        contestant=contestant,
        optimizer=optimizer,
        data_pass=data_pass + 1,
        auc=_mean(figures, "auc"),
        oracle_auc=line["oracle_auc"],
        difference=over_seeds(by_seed) if len(by_seed) > 1 else within,
        by_seed=by_seed,
        within_first_seed=within,
        bytes_end=_mean(figures, "bytes_end"),
        bytes_peak=_mean(figures, "bytes_peak"),
        saved_end=saved["bytes_end"],
        saved_peak=saved["bytes_peak"],
        gradient_rows_saved=saved["rows_pushed"],
        rows_frozen=_mean(figures, "rows_frozen"),
        train_s=_mean(figures, "train_s"),
    )


def _within_seed(results: Results, case: Case, baseline: Case, data_pass: int) -> Interval:
    labels = results.labels(case)
    return delong(labels, results.scores(case, data_pass), results.scores(baseline, data_pass))


def _figures(results: Results, case: Case, data_pass: int) -> dict[str, Any]:
    line = results.of(case)
    assert line is not None
    of_pass: dict[str, Any] = line["passes"][data_pass]
    return of_pass


def _mean(figures: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([f[name] for f in figures]))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value
