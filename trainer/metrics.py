"""AUC, logloss and normalised entropy of binary predictions, and the logistic regression to beat.

    logloss   mean of  log(1 + e^z) - y z          z the logit, y the label; natural logarithm
    NE        logloss / entropy of the labels' own mean     (He et al., Practical Lessons from Predicting Clicks, 2014)
    AUC       share of (positive, negative) pairs in the right order, a tie counts a half

torchrec.metrics gives the same NE and logloss, and the same AUC where no scores tie (tests compare them); it lets the
order of tied scores decide, which flatters or punishes a model that has learned nothing yet, so AUC is computed here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from embedding_server.kernels.hashing import hash_row_ids
from trainer.data.batch import Batch, Schema


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one set of predictions. nan where the set cannot say: AUC and NE need both labels, logloss one sample."""

    auc: float
    logloss: float
    ne: float
    num_samples: int


def compute_metrics(labels: np.ndarray, logits: np.ndarray) -> Metrics:
    """labels of 0 and 1, and logits; n of each, any float dtype."""
    if labels.shape != logits.shape or labels.ndim != 1:
        raise ValueError(f"labels have shape {labels.shape} and logits {logits.shape}; both must be [n]")
    loss = logloss(labels, logits)
    return Metrics(auc(labels, logits), loss, loss / _entropy(labels), len(labels))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve by ranks (Mann-Whitney); tied scores share their mean rank."""
    labels = labels.astype(np.float64)
    positives = labels.sum()
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0 or not np.isfinite(scores).all():
        return math.nan
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks = ends - (counts - 1) / 2.0
    rank_sum = float((mean_ranks[inverse] * labels).sum())
    return float((rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives))


def logloss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Mean cross entropy in nats, straight from logits, so that no probability is ever rounded to 0 or 1."""
    if not len(labels):
        return math.nan
    z, y = logits.astype(np.float64), labels.astype(np.float64)
    return float((np.logaddexp(0.0, z) - y * z).mean())


def _entropy(labels: np.ndarray) -> float:
    """Cross entropy of always predicting the labels' mean; nan if that is 0, so that dividing by it gives nan."""
    mean = float(labels.mean(dtype=np.float64)) if len(labels) else 0.0
    if mean <= 0.0 or mean >= 1.0:
        return math.nan
    return -(mean * math.log(mean) + (1.0 - mean) * math.log(1.0 - mean))


#: learning rates that bias_metrics tries
BIAS_LEARNING_RATES = (0.05, 0.2, 0.4)


class RecentMetrics:
    """Metrics over the newest samples, for a progress line."""

    def __init__(self, max_samples: int = 50_000) -> None:
        self.max_samples = max_samples
        self._parts: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._num_samples = 0

    def add(self, labels: np.ndarray, logits: np.ndarray) -> None:
        """Keeps both arrays; the caller must not change them."""
        self._parts.append((labels, logits))
        self._num_samples += len(labels)
        while len(self._parts) > 1 and self._num_samples - len(self._parts[0][0]) >= self.max_samples:
            self._num_samples -= len(self._parts.popleft()[0])

    def compute(self) -> Metrics:
        if not self._parts:
            return Metrics(math.nan, math.nan, math.nan, 0)
        return compute_metrics(
            np.concatenate([labels for labels, _ in self._parts]), np.concatenate([z for _, z in self._parts])
        )


class BiasModel:
    """Logistic regression with one weight per ID and no interaction: what a model must beat to be worth its rows.

        z = b + sum over the chosen features of w[feature, row_id];  all by Adagrad on the mean loss of a batch

    Weights live in 2^slot_bits slots by hash. With 45,000 IDs in 2^20 slots 4% share a slot, which AUC does not feel.
    """

    def __init__(
        self, schema: Schema, features: Sequence[str] = (), learning_rate: float = 0.1, slot_bits: int = 20
    ) -> None:
        """`features`: names, all of the schema's if empty."""
        names = schema.feature_names
        for name in features:
            if name not in names:
                raise ValueError(f"feature {name!r} is not in the data; known: {', '.join(names)}")
        self._columns = [names.index(name) for name in features or names]
        self._shift = np.uint64(64 - slot_bits)
        self._learning_rate = learning_rate
        self._weights = np.zeros(1 << slot_bits)
        self._squares = np.full(1 << slot_bits, 1e-6)
        self._sums = np.zeros(1 << slot_bits)  # all zero between steps
        self._salts = [hash_row_ids(np.array([column], np.int64)).view(np.int64)[0] for column in self._columns]
        self._bias, self._bias_square = 0.0, 1e-6

    def train(self, batch: Batch) -> float:
        """One step; gives the batch's mean loss before it."""
        if not batch.num_samples:
            return 0.0
        slots, owners = self._slots(batch)
        z = self._logits(slots, owners, batch.num_samples)
        labels = batch.labels.numpy()
        errors = 1.0 / (1.0 + np.exp(-z)) - labels
        _adagrad(slots, owners, errors / len(errors), self._weights, self._squares, self._sums, self._learning_rate)
        mean_error = float(errors.mean())
        self._bias_square += mean_error**2
        self._bias -= self._learning_rate * mean_error / math.sqrt(self._bias_square)
        return logloss(labels, z)

    def logits(self, batch: Batch) -> np.ndarray:
        """float64[B]."""
        if not batch.num_samples:
            return np.empty(0)
        return self._logits(*self._slots(batch), batch.num_samples)

    def _logits(self, slots: np.ndarray, owners: np.ndarray, num_samples: int) -> np.ndarray:
        return self._bias + np.bincount(owners, self._weights[slots], num_samples)

    def _slots(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Slot and sample of every value of the chosen features; int64[n] each."""
        b = batch.num_samples
        lengths = batch.sparse.lengths().numpy().reshape(-1, b)
        values = batch.sparse.values().numpy()
        ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        slots, owners = [], []
        for column, salt in zip(self._columns, self._salts, strict=True):
            own = values[ends[column] - lengths[column].sum(dtype=np.int64) : ends[column]]
            slots.append((hash_row_ids(own ^ salt) >> self._shift).astype(np.int64))
            owners.append(np.repeat(np.arange(b), lengths[column]))
        return np.concatenate(slots), np.concatenate(owners)


@njit(nogil=True, cache=True)
def _adagrad(
    slots: np.ndarray,
    owners: np.ndarray,
    errors: np.ndarray,
    weights: np.ndarray,
    squares: np.ndarray,
    sums: np.ndarray,
    learning_rate: float,
) -> None:
    """One Adagrad step: the gradient of a slot is the sum of the errors of its values' samples. `sums` is scratch."""
    for i in range(slots.size):
        sums[slots[i]] += errors[owners[i]]
    for i in range(slots.size):
        slot = slots[i]
        gradient = sums[slot]
        sums[slot] = 0.0  # a slot that comes again is done, and its second step is one of size zero
        squares[slot] += gradient * gradient
        weights[slot] -= learning_rate * gradient / np.sqrt(squares[slot])


def bias_metrics(
    train: Iterable[Batch], test: Iterable[Batch], schema: Schema, features: Sequence[str] = ()
) -> Metrics:
    """Test metrics of the best of a few BiasModels that saw the training batches once each, in order.

    They differ in learning rate. The best is the one that predicted each batch best before it was trained on it, which
    needs no validation samples. `features`: default the schema's bias_features.
    """
    chosen = features or schema.bias_features
    models = [BiasModel(schema, chosen, rate) for rate in BIAS_LEARNING_RATES]
    losses = [0.0] * len(models)
    for batch in train:
        for i, model in enumerate(models):
            losses[i] += model.train(batch) * batch.num_samples
    best = models[int(np.argmin(losses))]
    parts = [(batch.labels.numpy(), best.logits(batch)) for batch in test]
    if not parts:
        return Metrics(math.nan, math.nan, math.nan, 0)
    return compute_metrics(np.concatenate([labels for labels, _ in parts]), np.concatenate([z for _, z in parts]))
