"""A Criteo-shaped stream made on the fly: Zipf row_ids, normal dense features, labels from a planted logistic model.

Truth. Every row_id carries a weight, uniform with mean 0 and standard deviation truth_scale, a pure function of
(feature, row_id, seed); a bag counts with the mean of its weights. The logit of a sample is

    bias + sum over features of the bag's weight + 0.1 * truth_scale * (sum of the dense features)

and the label is drawn from it. `planted_logits` gives the logits of a batch, and so the best AUC there is.

Row_ids are scattered over all 64 bits, as hashes are. Sample n of a split depends on (seed, split, n) alone, so every
data pass repeats the same samples, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from embedding_server.kernels.hashing import hash_row_ids
from trainer.data.batch import Batch, Feature, Reader, Schema, Share, make_batch, share_of
from trainer.data.spec import SPLITS, Split, SyntheticData

#: samples that one random generator makes; a worker that needs a part of them makes them all
CHUNK_SAMPLES = 512
_FEATURE_STRIDE = np.int64(1) << np.int64(41)  # above every rank, spec.py bounds cardinalities at 2^40


def schema_of(data: SyntheticData) -> Schema:
    return Schema(
        dense=tuple(f"dense_{i}" for i in range(data.num_dense)),
        features=tuple(Feature(f"cat_{i}", f"cat_{i}") for i in range(data.num_features)),
    )


class SyntheticReader(Reader):
    def __init__(self, data: SyntheticData, split: Split, share: Share) -> None:
        super().__init__(share)
        self.data = data
        self.schema = schema_of(data)
        self._split_number = SPLITS.index(split)
        self._num_samples = data.num_samples_of(split)
        self._hots = _repeated(data.hots, data.num_features)
        self._cardinalities = _repeated(data.cardinalities, data.num_features)
        self._bias = math.log(data.positive_rate / (1.0 - data.positive_rate))

    @property
    def steps_per_pass(self) -> int:
        return -(-self._num_samples // self.share.batch_size)

    def _batches(self, data_pass: int, first_step: int) -> Iterator[Batch]:
        size = self.share.batch_size
        for first in range(first_step * size, self._num_samples, size):
            num_global = min(size, self._num_samples - first)
            low, high = share_of(self.share.worker, self.share.num_workers, num_global)
            yield self._batch(first + low, first + high, num_global)

    def _batch(self, first: int, end: int, num_global: int) -> Batch:
        """Samples first..end of the split, cut out of whole chunks."""
        chunks = range(first // CHUNK_SAMPLES, -(-end // CHUNK_SAMPLES)) if first < end else range(0)
        made = [self._chunk(chunk) for chunk in chunks] or [self._chunk(0)]
        origin = chunks.start * CHUNK_SAMPLES
        window = slice(first - origin, end - origin) if first < end else slice(0, 0)
        dense = np.concatenate([m[0] for m in made])[window]
        values = [np.concatenate([m[1][f] for m in made])[window].reshape(-1) for f in range(self.data.num_features)]
        labels = np.concatenate([m[2] for m in made])[window]
        lengths = np.repeat(self._hots.astype(np.int32), len(labels))
        return make_batch(self.schema, dense, np.concatenate(values), lengths, labels, num_global)

    def _chunk(self, chunk: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """dense float32[k, d], row_ids int64[k, hots] of each feature, labels float32[k]; k = CHUNK_SAMPLES."""
        key = np.array([self.share.seed, chunk * len(SPLITS) + self._split_number], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        k = CHUNK_SAMPLES
        dense = random.standard_normal((k, self.data.num_dense), np.float32)
        ranks = [
            zipf_ranks(random.random((k, hots)), cardinality, self.data.zipf_exponent)
            for hots, cardinality in zip(self._hots, self._cardinalities, strict=True)
        ]
        row_ids = [hash_row_ids(rank + f * _FEATURE_STRIDE).view(np.int64) for f, rank in enumerate(ranks)]
        probability = 1.0 / (1.0 + np.exp(-self._logits(dense, row_ids)))
        labels = (random.random(k) < probability).astype(np.float32)
        return dense, row_ids, labels

    def _logits(self, dense: np.ndarray, row_ids: list[np.ndarray]) -> np.ndarray:
        logits = self._bias + 0.1 * self.data.truth_scale * dense.sum(axis=1, dtype=np.float64)
        for f, bag in enumerate(row_ids):
            if bag.shape[1]:
                logits += self.data.truth_scale * planted_weights(bag, f, self.share.seed).mean(axis=1)
        return logits

    def planted_logits(self, batch: Batch) -> np.ndarray:
        """The true logits of a batch of this reader, float64[B]."""
        b = batch.num_samples
        jagged = batch.sparse.values().numpy()
        ends = np.cumsum(self._hots * b)
        bags = [jagged[end - hots * b : end].reshape(b, hots) for end, hots in zip(ends, self._hots, strict=True)]
        return self._logits(batch.dense.numpy(), bags)


def zipf_ranks(uniform: np.ndarray, cardinality: int, exponent: float) -> np.ndarray:
    """int64 ranks in 0..cardinality-1 from numbers in [0, 1), with P(rank) about (rank + 1)^-exponent.

    Inverts the distribution of the continuous density x^-exponent on [1, cardinality + 1) and rounds down.
    """
    top = cardinality + 1.0
    if abs(exponent - 1.0) < 1e-9:
        x = np.exp(uniform * math.log(top))
    else:
        power = 1.0 - exponent
        x = (1.0 + uniform * (top**power - 1.0)) ** (1.0 / power)
    return np.minimum(x.astype(np.int64), cardinality) - 1


def planted_weights(row_ids: np.ndarray, feature: int, seed: int) -> np.ndarray:
    """Weight of each row_id, float64 of mean 0 and standard deviation 1, uniform."""
    salted = hash_row_ids(row_ids) ^ hash_row_ids(np.array([feature * (1 << 32) + seed], np.int64))[0]
    unit = (hash_row_ids(salted.view(np.int64)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return (unit - 0.5) * math.sqrt(12.0)


def _repeated(values: list[int], count: int) -> np.ndarray:
    return np.resize(np.array(values, np.int64), count)
