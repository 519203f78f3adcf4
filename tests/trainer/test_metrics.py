from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_ne, get_ne_states

from trainer.data.batch import Feature, Schema, make_batch
from trainer.metrics import BiasModel, RecentMetrics, auc, bias_metrics, compute_metrics, logloss

pairs = st.lists(st.tuples(st.integers(0, 1), st.integers(-5, 5)), min_size=1, max_size=40)


@given(pairs)
def test_auc_is_the_share_of_ordered_pairs(samples: list[tuple[int, int]]) -> None:
    labels, scores = np.array([s[0] for s in samples]), np.array([s[1] for s in samples], np.float64)
    positives, negatives = scores[labels == 1], scores[labels == 0]
    value = auc(labels, scores)
    if not len(positives) or not len(negatives):
        assert math.isnan(value)
    else:
        difference = positives[:, None] - negatives[None, :]
        assert value == pytest.approx(((difference > 0) + 0.5 * (difference == 0)).mean())


def test_metrics_equal_torchrec_where_no_scores_tie() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal(2000)
    labels = (random.random(2000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    ours = compute_metrics(labels, logits)
    predictions, ones = torch.from_numpy(1 / (1 + np.exp(-logits))), torch.ones(2000, dtype=torch.float64)
    y = torch.from_numpy(labels).double()
    theirs = compute_auc(1, [predictions[None]], [y[None]], [ones[None]])
    assert ours.auc == pytest.approx(float(theirs[0]), abs=1e-6)
    state = get_ne_states(y[None], predictions[None], ones[None], 1e-12)
    ne = compute_ne(
        state["cross_entropy_sum"], state["weighted_num_samples"], state["pos_labels"], state["neg_labels"], 1e-12
    )
    assert ours.ne == pytest.approx(float(ne[0]), abs=1e-9)
    assert ours.num_samples == 2000


def test_logloss_of_certain_and_wrong_predictions_is_finite() -> None:
    assert logloss(np.array([1.0, 0.0]), np.array([-1000.0, 0.0])) == pytest.approx((1000 + math.log(2)) / 2)
    assert logloss(np.array([1.0]), np.array([800.0])) == 0.0


def test_predicting_the_mean_has_an_ne_of_one() -> None:
    labels = np.array([1, 0, 0, 0])
    assert compute_metrics(labels, np.full(4, math.log(0.25 / 0.75))).ne == pytest.approx(1.0)


@pytest.mark.parametrize("labels", [[], [1, 1], [0]])
def test_what_cannot_be_said_is_nan(labels: list[int]) -> None:
    metrics = compute_metrics(np.array(labels, np.float32), np.zeros(len(labels)))
    assert math.isnan(metrics.auc)
    assert math.isnan(metrics.ne)
    assert math.isnan(metrics.logloss) == (not labels)


def test_scores_that_are_not_finite_have_no_auc() -> None:
    assert math.isnan(auc(np.array([0, 1]), np.array([0.0, math.nan])))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        compute_metrics(np.zeros(2), np.zeros(3))


def test_recent_metrics_forget_the_oldest() -> None:
    recent = RecentMetrics(max_samples=4)
    assert math.isnan(recent.compute().auc)
    recent.add(np.array([1.0, 0.0]), np.array([-9.0, 9.0]))
    for _ in range(2):
        recent.add(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert recent.compute() == compute_metrics(np.array([1, 0, 1, 0]), np.array([1.0, 0, 1, 0]))


def batches_of_biases(num_batches: int, seed: int) -> tuple[Schema, list]:
    """Labels that depend on a bias per user and per item, and a third feature that is noise."""
    schema = Schema(("x",), tuple(Feature(n, n) for n in ("user", "item", "noise")), bias_features=("user", "item"))
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(num_batches):
        ids = random.integers(0, 20, (3, 256))
        logits = (ids[0] - 9.5) / 5 + (ids[1] - 9.5) / 5
        labels = (random.random(256) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        lengths = np.ones(3 * 256, np.int32)
        batches.append(make_batch(schema, np.ones((256, 1), np.float32), ids.reshape(-1), lengths, labels, 256))
    return schema, batches


def test_the_bias_model_finds_planted_biases() -> None:
    schema, train = batches_of_biases(100, 1)
    _, test = batches_of_biases(40, 2)
    metrics = bias_metrics(train, test, schema)
    labels = np.concatenate([b.labels.numpy() for b in test])
    ids = [b.sparse.values().numpy().reshape(3, -1) for b in test]
    truth = np.concatenate([(i[0] + i[1] - 19) / 5 for i in ids])
    best = compute_metrics(labels, truth)
    assert best.auc - 0.005 < metrics.auc <= best.auc + 0.002
    assert metrics.logloss < best.logloss + 0.01


def test_one_step_of_the_bias_model_is_adagrad_on_the_mean_loss() -> None:
    schema = Schema((), (Feature("a", "a"),))
    values = np.array([7, 7, -1, 7], np.int64)  # bags: [7, 7], [-1, 7]
    batch = make_batch(
        schema, np.empty((2, 0), np.float32), values, np.array([2, 2], np.int32), np.array([1, 0], np.float32), 2
    )
    model = BiasModel(schema, learning_rate=0.5)
    assert model.train(batch) == pytest.approx(math.log(2))
    # errors are -0.5 and 0.5; gradient of 7 is (-0.5 - 0.5 + 0.5)/2 = -0.25, of -1 it is 0.25; of the bias 0
    w7, w1 = 0.5 * 0.25 / math.sqrt(1e-6 + 0.0625), -0.5 * 0.25 / math.sqrt(1e-6 + 0.0625)
    assert model.logits(batch) == pytest.approx([2 * w7, w1 + w7])


def test_the_bias_model_takes_empty_batches_and_names_unknown_features() -> None:
    schema, _ = batches_of_biases(0, 0)
    empty = make_batch(
        schema, np.empty((0, 1), np.float32), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), 0
    )
    model = BiasModel(schema)
    assert model.train(empty) == 0.0
    assert model.logits(empty).shape == (0,)
    assert math.isnan(bias_metrics([], [], schema).auc)
    with pytest.raises(ValueError, match="'usr' is not in the data; known: user, item, noise"):
        BiasModel(schema, ["usr"])
