"""AUC on one set of test rows, and intervals of paired differences.

Two kinds of interval, both 95%:
delong   two models on the same test rows, one run each: DeLong, DeLong, Clarke-Pearson 1988, by ranks (Sun, Xu 2014).
         It knows how the test rows fell, not how another seed would have trained.
t        one difference per seed, each of two models on the same stream with the same initial values: Student's t over
         the seeds. It knows both, and needs at least two seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: 97.5% quantiles of Student's t by degrees of freedom, from 1; beyond them the normal's is used
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL_975 = 1.960


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval, in AUC points x 100."""

    mean: float
    low: float
    high: float
    standard_error: float
    kind: str  # delong | t
    num_seeds: int

    def is_inside(self, bound: float) -> bool:
        return -bound <= self.low and self.high <= bound


def auc_of(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve; tied scores share their mean rank. nan without both labels."""
    positive, negative = scores[labels > 0.5], scores[labels <= 0.5]
    if not positive.size or not negative.size:
        return math.nan
    return float(_shares_below(negative, positive).mean())


def delong(labels: np.ndarray, scores: np.ndarray, other: np.ndarray) -> Interval:
    """AUC(scores) - AUC(other), x 100, on the same rows. labels, scores, other: [n]."""
    is_positive = labels > 0.5
    a, b = _placements(scores, is_positive), _placements(other, is_positive)
    of_positives, of_negatives = a[0] - b[0], a[1] - b[1]
    mean = float(of_positives.mean())
    variance = float(of_positives.var(ddof=1) / of_positives.size + of_negatives.var(ddof=1) / of_negatives.size)
    return _interval(100.0 * mean, 100.0 * math.sqrt(variance), _NORMAL_975, "delong", 1)


def over_seeds(differences: Sequence[float]) -> Interval:
    """The mean of at least two differences, in points x 100, one per seed."""
    values = np.asarray(differences, np.float64)
    error = float(values.std(ddof=1) / math.sqrt(values.size))
    freedom = values.size - 1
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else _NORMAL_975
    return _interval(float(values.mean()), error, quantile, "t", values.size)


def _interval(mean: float, error: float, quantile: float, kind: str, num_seeds: int) -> Interval:
    return Interval(mean, mean - quantile * error, mean + quantile * error, error, kind, num_seeds)


def _placements(scores: np.ndarray, is_positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each positive the share of negatives below it, of each negative the share of positives above it."""
    positive, negative = scores[is_positive], scores[~is_positive]
    return _shares_below(negative, positive), 1.0 - _shares_below(positive, negative)


def _shares_below(reference: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Of each score the share of `reference` below it, ties counting a half; float64[len(scores)]."""
    ordered = np.sort(reference)
    # sorted look-ups walk the reference once instead of jumping about in it
    order = np.argsort(scores)
    ranked = scores[order]
    below = np.searchsorted(ordered, ranked, "left") + np.searchsorted(ordered, ranked, "right")
    shares = np.empty(scores.size)
    shares[order] = below / (2.0 * ordered.size)
    return shares
