"""Policies as pure decisions over arrays: which rows freeze or thaw, where the frostline lies. Nothing moves here.

    off    nothing freezes
    idle   a hot row without a visit in idle_steps freezes; any training visit thaws it (table.py, at the Pull)
    topk   past probation, rows above the frostline are hot and the others frozen, decided at a re-selection

`select: random` ranks by a hash instead of by heat: the control that must do worse.
"""

from __future__ import annotations

import hashlib

import numpy as np

from embedding_server.heat import CODES_PER_BIN, NUM_BINS
from embedding_server.kernels.hashing import hash_row_ids
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, Frostline, HeatHistogram

_BIN_SHIFT = np.uint64(52)  # the top 12 bits of a hash: NUM_BINS = 4096
_TIE_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)  # Rand, rrmxmx: decorrelates ties from buckets and from random bins


def control_buckets(spec: TableSpec) -> np.ndarray:
    """bool[NUM_BUCKETS]: the control group, control_fraction of the buckets, drawn by the table's name and seed.

    Rows in them never freeze for idleness or rank and are never forgotten, so that they show what freezing costs the
    others. A limit of bytes may still freeze them, when no other row of the table can. Policy `off` has none.
    """
    chosen = np.zeros(NUM_BUCKETS, np.bool_)
    if spec.policy.kind != "off":
        name = spec.name.encode("utf-8")
        digest = hashlib.blake2b(spec.seed.to_bytes(8, "little") + name, digest_size=8, person=b"frostline-ctrl")
        own = np.int64(int.from_bytes(digest.digest(), "little", signed=True))
        order = np.argsort(hash_row_ids(np.arange(NUM_BUCKETS, dtype=np.int64) ^ own), kind="stable")
        chosen[order[: round(spec.policy.control_fraction * NUM_BUCKETS)]] = True
    return chosen


def tie_of(row_ids: np.ndarray) -> np.ndarray:
    """Tie-break in [0, 1), float64[n], the same on every shard."""
    with np.errstate(over="ignore"):
        mixed = hash_row_ids(row_ids) * _TIE_MULTIPLIER
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rank_bins(policy: PolicySpec, row_ids: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """The bin that a row is ranked by, int64[n] in [0, NUM_BINS); higher is kept."""
    if policy.select == "random":
        return (hash_row_ids(row_ids ^ np.int64(0x5DEECE66D)) >> _BIN_SHIFT).astype(np.int64)
    return (heat // CODES_PER_BIN).astype(np.int64)


def is_above(frostline: Frostline, bins: np.ndarray, row_ids: np.ndarray) -> np.ndarray:
    """bool[n]: the row is above the frostline."""
    above = bins > frostline.bin
    at = bins == frostline.bin
    if at.any():
        above[at] = tie_of(row_ids[at]) < frostline.tie_fraction
    return above


def is_idle(policy: PolicySpec, last_step: np.ndarray, step: int) -> np.ndarray:
    """bool[n]: a hot row that nobody visited in the last idle_steps steps up to `step`."""
    return last_step + policy.idle_steps <= step


def compute_frostline(histogram: HeatHistogram, hot_fraction: float) -> Frostline:
    """The frostline that keeps hot_fraction of all rows hot, counted from the hottest.

    The histogram holds rows past probation; rows on probation train besides and are not counted in the share.
    """
    keep = int(hot_fraction * histogram.rows_total)
    from_top = np.cumsum(histogram.counts[::-1])
    if keep >= int(from_top[-1]):
        return Frostline(bin=-1)
    reversed_bin = int(np.searchsorted(from_top, keep, side="right"))
    boundary = NUM_BINS - 1 - reversed_bin
    count = int(histogram.counts[boundary])
    above = int(from_top[reversed_bin]) - count
    return Frostline(bin=boundary, tie_fraction=(keep - above) / count)
