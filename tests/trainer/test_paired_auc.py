from __future__ import annotations

import math

import numpy as np
import pytest

from trainer.metrics import auc
from trainer.paired_auc import paired_auc


def scored(n: int, seed: int, shared: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels and two scores of them; `shared`: how much of the noise both have in common."""
    random = np.random.default_rng(seed)
    truth, common = random.standard_normal(n), random.standard_normal(n)
    labels = (random.random(n) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    a, b = (truth + shared * common + (1 - shared) * random.standard_normal(n) for _ in range(2))
    return labels, a.astype(np.float32), b.astype(np.float32)


def test_aucs_are_those_of_metrics_also_with_ties() -> None:
    labels, a, b = scored(500, 1, 0.5)
    a = np.round(a)  # many ties
    found = paired_auc(labels, a, b)
    assert found.auc_a == pytest.approx(auc(labels, a), abs=1e-12)
    assert found.auc_b == pytest.approx(auc(labels, b), abs=1e-12)
    assert found.difference == pytest.approx(found.auc_a - found.auc_b, abs=1e-12)


def test_components_are_the_counts_of_pairs() -> None:
    labels = np.array([1, 0, 1, 0, 0], np.float32)
    a, b = np.array([3, 1, 1, 1, 0], np.float32), np.array([1, 2, 3, 0, 0], np.float32)
    pairs = [(p, n) for p in np.flatnonzero(labels) for n in np.flatnonzero(labels == 0)]

    def wins(scores: np.ndarray) -> np.ndarray:
        return np.array([(scores[p] > scores[n]) + 0.5 * (scores[p] == scores[n]) for p, n in pairs]).reshape(2, 3)

    differences = wins(a) - wins(b)
    variance = differences.mean(axis=1).var(ddof=1) / 2 + differences.mean(axis=0).var(ddof=1) / 3
    found = paired_auc(labels, a, b)
    assert found.difference == pytest.approx(differences.mean())
    assert found.standard_error == pytest.approx(math.sqrt(variance))


def test_the_standard_error_is_that_of_many_samples() -> None:
    found = [paired_auc(*scored(400, seed, 0.7)) for seed in range(300)]
    spread = np.std([f.difference for f in found])
    assert np.mean([f.standard_error for f in found]) == pytest.approx(spread, rel=0.15)


def test_scores_that_agree_differ_by_nothing_for_sure() -> None:
    labels, a, _ = scored(200, 3, 0.0)
    found = paired_auc(labels, a, a)
    assert (found.difference, found.standard_error) == (0.0, 0.0)


def test_sets_that_cannot_say_give_nan_and_wrong_shapes_are_refused() -> None:
    ones, scores = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    assert math.isnan(paired_auc(ones, scores, scores).difference)
    mixed = np.array([0, 1, 0, 1], np.float32)
    assert math.isnan(paired_auc(mixed, scores, np.array([0, np.nan, 1, 2], np.float32)).difference)
    with pytest.raises(ValueError, match=r"must be \[n\]"):
        paired_auc(mixed, scores, scores[:3])
