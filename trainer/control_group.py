"""What freezing costs, measured while it runs: losses of rows that may freeze against those of a control group.

    group = ControlGroup(tables, is_control, merged)   at the first re-selection; before it nothing has frozen
    group.observe(lookups, losses, labels)             every step, with losses made before training on the samples
    group.differences(group.all_sums)                  by table: Difference with its 95% interval

control_fraction of a table's buckets, drawn by seed, never freeze (policy.control_buckets), so their rows are a random
sample of the table's, trained in full. A sample's loss before it was trained on is held-out loss: no split is spent.

Shapes: b of NUM_BANDS heat bands (Rows.flags, after the visit), k of NUM_BUCKETS buckets; g is the group, C control or
T treated, with G_g buckets. n_bk look-ups; N_bg, and means m_bg of loss and y_bg of label, over a group's look-ups.

    difference = sum over b of w_b [(m_bT - m_bC) - beta_b (y_bT - y_bC)],  sum of w_b = 1

Comparing within a band removes what matters most and has nothing to do with freezing: rare rows lose more than frequent
ones, and the groups need not hold equally many of each. What is left is that row_ids differ in how easily their samples
are predicted, above all because they differ in their share of positives. Labels are the data's and no policy changes
them, so the part of the loss that goes with them is taken out by regression (slope beta_b over the buckets).

A table that forgets rows loses their heat too. There, all row_ids that could have been forgotten count as one band:
those without a row of their own and those with no more heat than forget_below visits can give (merged_band). In other
tables look-ups without a row are left out, as they read the same default row in both groups.

A bucket's row_ids fall together into one group, so buckets are what was drawn at random, and the interval is clustered
by bucket: with r_bk the bucket's sum of loss less n_bk m_bg and less beta_b times the same of its labels, and V the
sample variance over the buckets of both groups,

    Var(difference) = G_C V(sum over b of w_b r_bk / N_bC) + G_T V(sum over b of w_b r_bk / N_bT)

(the linearised variance of a ratio and the regression estimator; Cochran, Sampling Techniques, 1977, chapters 6, 7).
The spread is taken over all buckets because a control group of 20 alone would tell it badly; the quantile is t's with
G_C - 1 degrees of freedom, fewer than that estimate has. One row_id with a thousand look-ups would be the mean of its
group, so a bucket far above its band's median counts for less; how many look-ups a row_id has is the data's, too. The
weights w_b are inverse variances of the bands' own differences: in the hottest bands a few row_ids make most look-ups
and their means say nothing, in the low ones thousands of row_ids do, and those freeze.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import carray, njit

from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.vectors import at, pointer_to
from embedding_server.spec import PolicySpec
from embedding_server.store import BAND_SHIFT, FOUND, NUM_BUCKETS
from trainer.kernels import FIRST_BAG, FIRST_LOOKUP, NUM_BAGS

if TYPE_CHECKING:
    from trainer.lookups import Lookups

NUM_BANDS = 32
#: a band counts only if so many look-ups of so many of the control group's buckets fell into it
MIN_CONTROL_LOOKUPS = 50
MIN_CONTROL_BUCKETS = 5
#: within a band, no bucket counts for more than so many times the median of those that have look-ups
MAX_OF_MEDIAN = 3.0
CONFIDENCE = 0.95
NOTHING_FORGOTTEN = -1  # in place of a merged_band
#: what is summed of the look-ups of a band and bucket: their loss, their label, one
LOSS, LABEL, LOOKUPS, NUM_SUMS = range(4)

_NO_FLAGS = np.empty(0, np.uint8)
_ANY = 1 << 48  # length given to carray: the kernel indexes without bounds checks


@dataclass(frozen=True, slots=True)
class Difference:
    """Logloss in nats of treated rows less that of control rows of the same heat; nan where too little was seen."""

    mean: float
    low: float  # ends of the 95% interval
    high: float
    lookups_control: int
    lookups_treated: int


UNKNOWN = Difference(math.nan, math.nan, math.nan, 0, 0)


class ControlGroup:
    """Losses by table, heat band and bucket. 0.8 MB a table that has a control group.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, tables: Sequence[str], is_control: Mapping[str, np.ndarray], merged: Mapping[str, int] | None = None
    ) -> None:
        """`tables`: all of the collection, in its order; by table is_control, bool[NUM_BUCKETS], and merged_band.

        A table without control buckets, or without others, has no control group; one that is not in `merged` forgets
        nothing.
        """
        self.is_control = {name: mask for name, mask in is_control.items() if mask.any() and not mask.all()}
        self._tables = list(tables)
        places = iter(range(len(self.is_control)))
        #: int64[T]: where a table's sums lie, -1 for a table without a control group
        self._places = np.array([next(places) if name in self.is_control else -1 for name in tables], np.int64)
        self._merged = np.array([(merged or {}).get(name, NOTHING_FORGOTTEN) for name in tables], np.int64)
        self._sums = np.zeros((len(self.is_control), NUM_BANDS * NUM_BUCKETS, NUM_SUMS))

    def observe(self, lookups: Lookups, losses: np.ndarray, labels: np.ndarray) -> None:
        """Adds one batch of a pooled collection; losses and labels float32[B], made before the batch was trained on.

        Every look-up counts, with its sample's loss.
        """
        if not self.is_control:
            return
        addresses = np.zeros(len(self._tables), np.int64)
        for t, name in enumerate(self._tables):
            if lookups.num_unique[t]:
                addresses[t] = lookups.rows[name].flags.__array_interface__["data"][0]
        cells = lookups.plan.arrays.take(int(lookups.num_unique.max(initial=0)), np.int32)
        add_losses(
            addresses, _NO_FLAGS, self._places, self._merged, lookups.plan.slots_of_table, lookups.slots,
            lookups.bag_offsets, lookups.inverse, lookups.unique, lookups.starts, lookups.num_unique, losses, labels,
            cells, self._sums,
        )  # fmt: skip

    @property
    def all_sums(self) -> np.ndarray:
        """float64[tables with a control group, NUM_BANDS, NUM_BUCKETS, NUM_SUMS], to be added up over workers."""
        return self._sums.reshape(-1, NUM_BANDS, NUM_BUCKETS, NUM_SUMS)

    def differences(self, all_sums: np.ndarray) -> dict[str, Difference]:
        """By table; all_sums as `all_sums` gives, of all workers."""
        return {name: judge(all_sums[i], mask) for i, (name, mask) in enumerate(self._in_place_order())}

    def _in_place_order(self) -> list[tuple[str, np.ndarray]]:
        return [(name, self.is_control[name]) for name in self._tables if name in self.is_control]


@njit(nogil=True, cache=True)
def add_losses(
    flag_addresses, like, places, merged, slots_of_table, slots, bag_offsets, inverse, unique, starts, num_unique,
    losses, labels, cells, sums,
):  # fmt: skip
    """Adds (loss, label, 1) of every look-up that counts to sums[places[t], band * NUM_BUCKETS + bucket].

    flag_addresses int64[T] of uint8[U_t]; merged int64[T], bands that count as 0 together with what is not FOUND, or
    NOTHING_FORGOTTEN: then only what is FOUND counts; losses, labels float32[B]; cells int32[max U_t] is scratch; sums
    float64[., ., NUM_SUMS]; the others as in trainer/kernels.py. Tables with places[t] < 0 are left out.
    """
    for t in range(places.size):
        if places[t] < 0 or num_unique[t] == 0:
            continue
        flags = carray(pointer_to(flag_addresses[t], like), (_ANY,))
        base, of_table = starts[t], sums[places[t]]
        for u in range(num_unique[t]):
            bits = np.int64(flags[at(u)])
            bucket = bucket_of(hash_row_id(unique[base + u]), np.uint64(NUM_BUCKETS))
            band = bits >> BAND_SHIFT if bits & FOUND else np.int64(-1)
            if merged[t] >= 0 and band <= merged[t]:
                band = np.int64(0)
            cells[u] = band * NUM_BUCKETS + bucket if band >= 0 else -1
        for k in range(slots_of_table[t], slots_of_table[t + 1]):
            bags = bag_offsets[slots[k, FIRST_BAG] :]
            rows = inverse[slots[k, FIRST_LOOKUP] :]
            for j in range(slots[k, NUM_BAGS]):
                for v in range(bags[j] - bags[0], bags[j + 1] - bags[0]):
                    cell = cells[rows[v]]
                    if cell >= 0:
                        of_table[cell, LOSS] += losses[j]
                        of_table[cell, LABEL] += labels[j]
                        of_table[cell, LOOKUPS] += 1.0


def merged_band(policy: PolicySpec) -> int:
    """The highest band of a row_id that has been forgotten and comes back, had it kept its heat; NOTHING_FORGOTTEN."""
    forgets = policy.kind == "compact" or (policy.kind != "off" and policy.epoch_end == "forget_rare")
    if not forgets or policy.forget_below == 0:
        return NOTHING_FORGOTTEN
    # up to forget_below - 1 visits before this one, none of which counts more than 1
    return min(NUM_BANDS - 1, math.floor(4.0 * math.log2(policy.forget_below)))


def judge(sums: np.ndarray, is_control: np.ndarray) -> Difference:
    """The difference of one table; sums float64[NUM_BANDS, NUM_BUCKETS, NUM_SUMS], is_control bool[NUM_BUCKETS]."""
    num_control, num_treated = int(is_control.sum()), int((~is_control).sum())
    if min(num_control, num_treated) < 2:
        return UNKNOWN
    sums = sums[_has_enough(sums[..., LOOKUPS], is_control)]
    if not len(sums):
        return UNKNOWN
    num_lookups = sums[..., LOOKUPS].sum(axis=0)
    sums = _evened(sums)
    lookups = sums[..., LOOKUPS]
    of_control, of_treated = lookups[:, is_control].sum(axis=1), lookups[:, ~is_control].sum(axis=1)
    losses, loss_steps = _residuals(sums[..., LOSS], lookups, is_control)
    labels, label_steps = _residuals(sums[..., LABEL], lookups, is_control)
    label_squares = (labels**2).sum(axis=1)
    slopes = (losses * labels).sum(axis=1) / np.where(label_squares > 0, label_squares, 1.0)
    residuals = losses - slopes[:, None] * labels
    taken_out = 3  # two means and a slope
    spread = residuals.var(axis=1, ddof=taken_out)
    weights = _inverse(spread * (num_control / of_control**2 + num_treated / of_treated**2))
    variance = num_control * ((weights / of_control) @ residuals).var(ddof=taken_out)
    variance += num_treated * ((weights / of_treated) @ residuals).var(ddof=taken_out)
    mean = float(weights @ (loss_steps - slopes * label_steps))
    reach = t_quantile((1.0 + CONFIDENCE) / 2.0, num_control - 1) * math.sqrt(float(variance))
    counts = int(num_lookups[is_control].sum()), int(num_lookups[~is_control].sum())
    return Difference(mean, mean - reach, mean + reach, *counts)


def _has_enough(lookups: np.ndarray, is_control: np.ndarray) -> np.ndarray:
    """bool[bands]; lookups float64[bands, buckets]."""
    control = lookups[:, is_control]
    many = (control.sum(axis=1) >= MIN_CONTROL_LOOKUPS) & ((control > 0).sum(axis=1) >= MIN_CONTROL_BUCKETS)
    return many & (lookups[:, ~is_control].sum(axis=1) > 0)


def _evened(sums: np.ndarray) -> np.ndarray:
    """sums with the cells of more than MAX_OF_MEDIAN times the band's median look-ups scaled down to that."""
    lookups = sums[..., LOOKUPS]
    medians = np.array([np.median(band[band > 0]) for band in lookups])
    factors = np.minimum(1.0, MAX_OF_MEDIAN * medians[:, None] / np.maximum(lookups, 1.0))
    return sums * factors[..., None]


def _residuals(values: np.ndarray, lookups: np.ndarray, is_control: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Sums less look-ups times the group's mean, float64[bands, buckets]; mean of treated less that of control)."""
    control = values[:, is_control].sum(axis=1) / lookups[:, is_control].sum(axis=1)
    treated = values[:, ~is_control].sum(axis=1) / lookups[:, ~is_control].sum(axis=1)
    return values - lookups * np.where(is_control, control[:, None], treated[:, None]), treated - control


def _inverse(variances: np.ndarray) -> np.ndarray:
    """Weights that sum to 1. A band whose losses do not vary at all is as good as the best of those that do."""
    positive = variances[variances > 0]
    if not positive.size:
        return np.full(variances.size, 1.0 / variances.size)
    inverse = 1.0 / np.maximum(variances, positive.min())
    return inverse / inverse.sum()


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t for probability in (1/2, 1) and whole degrees of freedom from 1 on, to 1e-9 of itself."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = 0.5 * (low + high)
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for k in range(3 if is_odd else 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    within = 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + 0.5 * within
