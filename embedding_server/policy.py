"""Policies as pure decisions over arrays: which rows freeze or thaw, where the frostline lies. Nothing moves here.

    off       nothing freezes
    idle      a hot row without a visit in idle_steps freezes; any training visit thaws it (cold_path.py, at the Pull)
    compact   as idle, but an idle row with fewer than forget_below visits is forgotten
    topk      past probation, rows above the frostline are hot and the others frozen, decided at a re-selection; on
              probation a row lives as under idle

`select: random` ranks by a hash instead of by heat: the control that must do worse. `select: score` ranks by a function
of the row (scores.py). `compute_frostline` is arithmetic on the sum of all shards' histograms; every shard applies its
answer row by row (`is_above`, `may_move`), so what happens to a row does not depend on which shard has it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.heat import CODES_PER_BIN, CODES_PER_OCTAVE
from embedding_server.kernels.hashing import hash_row_ids
from embedding_server.schedule import of_spec
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS, Frostline, HeatHistogram

#: Rank bins an octave, of heat and of scores.
BINS_PER_OCTAVE = CODES_PER_OCTAVE // CODES_PER_BIN
_BIN_SHIFT = np.uint64(52)  # the top 12 bits of a hash: NUM_RANK_BINS = 4096
#: Rows drawn by hash where they are to be all that is hot: none is drawn once in e^8 = 3,000 tables.
_LEAST_DRAWN = 8
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


def tie_of(row_ids: np.ndarray, salt: int = 0) -> np.ndarray:
    """Tie-break in [0, 1), float64[n], the same on every shard; another salt gives independent ones."""
    with np.errstate(over="ignore"):
        mixed = hash_row_ids(row_ids ^ _spread(salt) if salt else row_ids) * _TIE_MULTIPLIER
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _spread(salt: int) -> np.int64:
    """Far from every other salt in all bits, as steps next to each other are not."""
    return hash_row_ids(np.array([salt], np.int64)).view(np.int64)[0]


def rank_bins(policy: PolicySpec, row_ids: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """The bin that a row is ranked by, int64[n] in [0, NUM_RANK_BINS); higher is kept. Other scores: scores.py."""
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


def may_move(frostline: Frostline, bins: np.ndarray, row_ids: np.ndarray, step: int) -> np.ndarray:
    """bool[n]: far enough from the frostline to move at the re-selection of `step`, if on the wrong side of it."""
    distance = np.abs(bins - frostline.bin)
    may = distance >= frostline.margin_bins
    if frostline.held_fraction > 0.0:
        at = distance == frostline.margin_bins
        # not the hash of is_above, which says already who is hot; anew at every step, so that all get their turn
        may[at] = tie_of(row_ids[at], salt=step) >= frostline.held_fraction
    return may


def idle_until(policy: PolicySpec, step: int) -> int:
    """Rows last visited at this step or earlier are idle at `step`: no visit in the last idle_steps steps."""
    return step - policy.idle_steps


def hot_fraction_at(policy: PolicySpec, step: int) -> float:
    """Share of the rows that the frostline of `step` keeps hot: 1 in the warm-up, hot_fraction in the end."""
    return of_spec(policy.schedule, 1.0, policy.hot_fraction)(step)


def frostline_at(policy: PolicySpec, histogram: HeatHistogram, step: int) -> Frostline:
    """The frostline of a table of policy `topk` at `step`; histogram: the sum over shards."""
    return compute_frostline(
        histogram,
        hot_fraction_at(policy, step),
        hysteresis=0.0 if policy.select == "random" else policy.hysteresis,  # hashes never come nearer or go away
        max_moves_fraction=policy.max_moves_fraction,
        resume=policy.resume,
    )


def compute_frostline(
    histogram: HeatHistogram,
    hot_fraction: float,
    *,
    hysteresis: float = 0.0,
    max_moves_fraction: float = 1.0,
    resume: bool = True,
) -> Frostline:
    """The frostline that keeps hot_fraction of all rows hot, counted from the hottest.

    The histogram holds rows past probation; rows on probation train besides and are not counted in the share, nor are
    those of control buckets. A share above 0 is one row at least, so that no table of two rows freezes whole: the
    hottest; where several are the hottest, all of them up to 8, and of more a draw by hash of 8 on average, which may
    leave none once in 3,000 tables: no shard knows which of equal rows another one draws.
    hysteresis: rows move only if their heat is beyond the frostline by this share, to 1.1%.
    max_moves_fraction: of the rows that should move only as many as this share of the table do, the farthest from the
    frostline first. resume False: no row thaws. A loop with a schedule of its own gives schedule.value_at(...).
    InvalidInput if hot_fraction is not in [0, 1].
    """
    if not 0.0 <= hot_fraction <= 1.0:
        raise InvalidInput(f"hot_fraction={hot_fraction} must be in [0, 1]; give the share of the rows that train")
    line = _split(histogram, hot_fraction)
    if line.bin >= 0 and hysteresis > 0.0:
        line = replace(line, margin_bins=math.ceil(BINS_PER_OCTAVE * math.log2(1.0 + hysteresis)))
    if max_moves_fraction < 1.0:
        most = int(max_moves_fraction * histogram.rows_total)
        line = _limit_moves(line, _moves_by_distance(histogram, line, resume), most)
    return line


def _split(histogram: HeatHistogram, hot_fraction: float) -> Frostline:
    keep = max(int(hot_fraction * histogram.rows_total), 1 if hot_fraction > 0.0 else 0)
    from_top = np.cumsum(histogram.counts[::-1])
    if keep >= int(from_top[-1]):
        return Frostline(bin=-1)
    reversed_bin = int(np.searchsorted(from_top, keep, side="right"))
    boundary = NUM_RANK_BINS - 1 - reversed_bin
    count = int(histogram.counts[boundary])
    above = int(from_top[reversed_bin]) - count
    wanted = keep if above or not keep else max(keep, min(count, _LEAST_DRAWN))
    return Frostline(bin=boundary, tie_fraction=(wanted - above) / count)


def _moves_by_distance(histogram: HeatHistogram, line: Frostline, resume: bool) -> np.ndarray:
    """float64[NUM_RANK_BINS + 1]: rows on the wrong side of the frostline, by their distance from it in bins."""
    hot = histogram.counts_hot.astype(np.float64)
    frozen = histogram.counts - hot if resume else np.zeros_like(hot)
    moves = np.zeros(NUM_RANK_BINS + 1)
    above = frozen[line.bin + 1 :]
    moves[1 : 1 + above.shape[0]] = above
    if line.bin >= 0:
        below = hot[: line.bin][::-1]
        moves[1 : 1 + below.shape[0]] += below
        moves[0] = hot[line.bin] * (1.0 - line.tie_fraction) + frozen[line.bin] * line.tie_fraction
    return moves


def _limit_moves(line: Frostline, moves: np.ndarray, most: int) -> Frostline:
    """The frostline with a margin that lets at most `most` rows move, and never a smaller one than it has."""
    from_far = np.append(np.cumsum(moves[::-1])[::-1], 0.0)  # [d]: rows at distance d and beyond
    margin = max(line.margin_bins, int(np.argmax(from_far <= most)))
    if margin == line.margin_bins:
        return line
    nearer = margin - 1
    share = _share_under(most - from_far[margin], moves[nearer])
    return replace(line, margin_bins=nearer, held_fraction=float(1.0 - share))


def _share_under(most: float, count: float) -> float:
    """The share of `count` rows, drawn by hash, that comes to at most `most` rows but for one pass in some 30,000.

    Four deviations less than `most`, by the root of a Poisson count, whose deviation is 1/2. That leaves nothing of a
    few rows: under 9 it is a ninth of them, which exceeds `most` once in 50 passes or less.
    """
    expected = (math.sqrt(most) - 2.0) ** 2 if most >= 9.0 else most / 9.0
    return expected / count
