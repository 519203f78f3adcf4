"""The difference between two AUCs over the same samples, with its standard error.

    DeLong, DeLong, Clarke-Pearson: Comparing the areas under two or more correlated receiver operating characteristic
    curves (Biometrics 44, 1988), with mid-ranks as in Sun and Xu (IEEE Signal Processing Letters 21, 2014):

    V10_i = (rank of positive i among all - its rank among positives) / n        i of m positives
    V01_j = 1 - (rank of negative j among all - its rank among negatives) / m    j of n negatives
    AUC = mean V10 = mean V01,   variance of the difference = var(V10_a - V10_b) / m + var(V01_a - V01_b) / n

Both scores come from the same samples, so what makes a sample hard cancels, and differences of a hundredth of the AUCs'
own errors can be told from nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: half width of a 95% interval in standard errors
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class AucDifference:
    """AUC a - AUC b; nan without both labels, or with scores that are not finite."""

    auc_a: float
    auc_b: float
    difference: float
    standard_error: float


def paired_auc(labels: np.ndarray, scores_a: np.ndarray, scores_b: np.ndarray) -> AucDifference:
    """labels of 0 and 1, scores of any float dtype; n of each, in the same order of samples."""
    if not labels.shape == scores_a.shape == scores_b.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape}, scores {scores_a.shape} and {scores_b.shape}; all must be [n]")
    is_positive = labels > 0.5
    m, n = int(is_positive.sum()), int((~is_positive).sum())
    if not m or not n or not (np.isfinite(scores_a).all() and np.isfinite(scores_b).all()):
        return AucDifference(math.nan, math.nan, math.nan, math.nan)
    of_positives_a, of_negatives_a = _components(scores_a, is_positive)
    of_positives_b, of_negatives_b = _components(scores_b, is_positive)
    auc_a, auc_b = float(of_positives_a.mean()), float(of_positives_b.mean())
    variance = _variance(of_positives_a - of_positives_b) / m + _variance(of_negatives_a - of_negatives_b) / n
    return AucDifference(auc_a, auc_b, auc_a - auc_b, math.sqrt(variance))


def _components(scores: np.ndarray, is_positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(V10 float64[m], V01 float64[n])."""
    positives, negatives = scores[is_positive], scores[~is_positive]
    m, n = positives.shape[0], negatives.shape[0]
    ranks = _mid_ranks(np.concatenate([positives, negatives]))
    return (ranks[:m] - _mid_ranks(positives)) / n, 1.0 - (ranks[m:] - _mid_ranks(negatives)) / m


def _mid_ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal scores share the mean of theirs. float64[n]."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[inverse]


def _variance(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) if values.shape[0] > 1 else 0.0
