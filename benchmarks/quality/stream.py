"""Streams of samples with a planted truth: Zipf IDs, new IDs, drift, and a known best AUC.

A sample has F fields and one ID in each. Time t runs from 0 to 1 over the training samples; the test samples come
after them, packed into [1, 1 + TEST_DURATION], so that they ask what a model serving right after training is asked.

IDs.   A field has `cardinality` ranks, drawn with P(rank) about rank^-exponent. Who holds a rank changes: generation
       floor(t * turnover + phase of the rank), for all ranks but a lasting share. A new holder is a new ID, the old one
       never comes back.
Truth. logit = bias + sum over fields of effect_std * R cos(angle + drift * t) + pair_std * (sum over pairs of
       neighbouring fields of z * z'), with (R cos, R sin) and z standard normal, pure functions of (ID, seed). An ID's
       effect is as large however rare it is; with `rare_visits` > 0, IDs that expect fewer visits have none at all.
       Drift turns effects: after t, an effect correlates with what it was by cos(drift * t).

Sample n of a split is a pure function of (spec, seed, split, n): every data pass repeats the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from embedding_server.kernels.hashing import mix64

TEST_DURATION = 0.01
_TRAIN, _TEST = 0, 1
_TO_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What a stream is made of; counts are samples."""

    name: str
    num_train: int
    num_test: int
    exponent: float = 1.05
    cardinalities: tuple[int, ...] = (1_000_000, 1_000_000, 300_000, 300_000, 100_000, 30_000, 300, 30)
    turnover: float = 1.0  # holders of a rank per training pass, beside the first
    lasting_share: float = 0.5  # of the ranks, whose holder never changes
    effect_std: float = 0.27
    pair_std: float = 0.1
    drift: float = 0.4  # radians per training pass
    bias: float = -1.0
    rare_visits: float = 0.0  # IDs that expect fewer visits in the training pass have no effect

    @property
    def num_fields(self) -> int:
        return len(self.cardinalities)

    def scaled(self, share: float) -> StreamSpec:
        """The stream with that share of the samples and of the ranks, so that an ID has about as many visits."""
        return replace(
            self,
            num_train=max(1, round(self.num_train * share)),
            num_test=max(1, round(self.num_test * share)),
            cardinalities=tuple(max(2, round(c * share)) for c in self.cardinalities),
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """n samples of F fields."""

    row_ids: np.ndarray  # int64[F, n]
    labels: np.ndarray  # float32[n] of 0 and 1
    logits: np.ndarray  # float64[n], the truth


class PlantedStream:
    """The samples of a spec and a seed."""

    def __init__(self, spec: StreamSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._parameters = np.array(
            [
                spec.exponent,
                spec.turnover,
                spec.lasting_share,
                spec.effect_std,
                spec.pair_std,
                spec.drift,
                spec.bias,
                spec.rare_visits,
            ]
        )
        self._cardinalities = np.array(spec.cardinalities, np.int64)

    def train(self, first: int, end: int) -> Samples:
        """Training samples first to end-1."""
        return self._make(_TRAIN, first, min(end, self.spec.num_train))

    def test(self, first: int, end: int) -> Samples:
        return self._make(_TEST, first, min(end, self.spec.num_test))

    def train_batches(self, batch_size: int) -> Iterator[Samples]:
        for first in range(0, self.spec.num_train, batch_size):
            yield self.train(first, first + batch_size)

    def _make(self, split: int, first: int, end: int) -> Samples:
        n = end - first
        row_ids = np.empty((self.spec.num_fields, n), np.int64)
        labels, logits = np.empty(n, np.float32), np.empty(n)
        _fill(
            np.uint64(self.seed), split, first, self.spec.num_train, self.spec.num_test, self._cardinalities,
            self._parameters, row_ids, labels, logits,
        )  # fmt: skip
        return Samples(row_ids, labels, logits)


@njit(nogil=True, inline="always")
def _mixed(a, b):
    """A hash of two 64-bit words."""
    return mix64(mix64(a) ^ (b * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)))


@njit(nogil=True, inline="always")
def _unit(bits):
    """64 bits -> float64 in [0, 1)."""
    return np.float64(bits >> np.uint64(11)) * _TO_UNIT


@njit(nogil=True, inline="always")
def _rank(u, cardinality, exponent):
    """Inverts the density x^-exponent on [1, cardinality + 1): rank 0 to cardinality-1 from u in [0, 1)."""
    top = cardinality + 1.0
    if abs(exponent - 1.0) < 1e-9:
        x = math.exp(u * math.log(top))
    else:
        power = 1.0 - exponent
        x = (1.0 + u * (top**power - 1.0)) ** (1.0 / power)
    return min(np.int64(x), cardinality) - 1


@njit(nogil=True, inline="always")
def _share_of_rank(rank, cardinality, exponent):
    """P(rank) of _rank."""
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        return math.log((rank + 2.0) / (rank + 1.0)) / math.log(cardinality + 1.0)
    return ((rank + 2.0) ** power - (rank + 1.0) ** power) / ((cardinality + 1.0) ** power - 1.0)


@njit(nogil=True, cache=True)
def _fill(seed, split, first, num_train, num_test, cardinalities, parameters, row_ids, labels, logits):
    exponent, turnover, lasting_share, effect_std, pair_std, drift, bias, rare_visits = parameters
    one = np.uint64(1)
    key = _mixed(seed, np.uint64(split) + one)
    world = _mixed(seed, np.uint64(77))
    for i in range(labels.size):
        n = first + i
        t = n / num_train if split == 0 else 1.0 + TEST_DURATION * n / num_test
        of_sample = _mixed(key, np.uint64(n))
        logit, pairs, z_before = bias, 0.0, 0.0
        for f in range(cardinalities.size):
            rank = _rank(_unit(_mixed(of_sample, np.uint64(f))), cardinalities[f], exponent)
            holder = _mixed(_mixed(world, np.uint64(f)), np.uint64(rank))
            generation = np.int64(0)
            if _unit(_mixed(holder, np.uint64(1))) >= lasting_share:
                generation = np.int64(t * turnover + _unit(_mixed(holder, np.uint64(2))))
            row_id = _mixed(holder, np.uint64(generation + 3))
            row_ids[f, i] = np.int64(row_id)
            visits = rare_visits
            if rare_visits > 0.0:
                visits = num_train * _share_of_rank(rank, cardinalities[f], exponent) / (1.0 + turnover)
            z = 0.0
            if visits >= rare_visits:
                radius = math.sqrt(-2.0 * math.log(1.0 - _unit(_mixed(row_id, np.uint64(1)))))
                angle = 2.0 * math.pi * _unit(_mixed(row_id, np.uint64(2)))
                logit += effect_std * radius * math.cos(angle + drift * t)
                other = math.sqrt(-2.0 * math.log(1.0 - _unit(_mixed(row_id, np.uint64(3)))))
                z = other * math.cos(2.0 * math.pi * _unit(_mixed(row_id, np.uint64(4))))
            if f % 2 == 1:
                pairs += z * z_before
            z_before = z
        logits[i] = logit + pair_std * pairs
        labels[i] = 1.0 if _unit(_mixed(of_sample, np.uint64(1000))) * (1.0 + math.exp(-logits[i])) < 1.0 else 0.0
