"""The rank half of a re-selection (policy topk): how a table's rows are ranked, and which of them move.

Two rounds. `heat_histogram` counts the rows past probation by rank bin; the caller adds the histograms of all shards
and computes one frostline per table (policy.frostline_at). `split_at_frostline` then says, slice by slice, which rows
freeze and which thaw; freezing.py moves them.

A row on probation is not ranked: it trains at every visit. But it need not be in memory between visits, so it lives by
policy idle: if nobody visits it for idle_steps, it freezes, and the next visit thaws it (not while the schedule keeps
all rows hot). Most rows of a long tail never get past their probation; without that, policy topk would keep them hot.

Rows of control buckets are outside of it: they are not counted, and a frozen one (a limit of bytes froze it) thaws.
Ranking by heat or by hash reads the index alone. Other scores read the rows themselves, frozen ones from their
segments too, so their slices are smaller and a re-selection of a table on disk reads all of it, twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import heat
from embedding_server.index import FROZEN_BIT, INITIAL, Entries
from embedding_server.index_entries import count_bins
from embedding_server.index_walk import ENTRIES_PER_SLICE, slice_end
from embedding_server.policy import hot_fraction_at, is_above, may_move, rank_bins
from embedding_server.scores import ranks_by_heat, reads_rows, score_bins
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS, HeatHistogram

if TYPE_CHECKING:
    from embedding_server.table import Table

HISTOGRAM_ENTRIES = 1 << 18  # counted a call, at 25 to 60 M a second on one core: 4 to 10 ms
_SCORED_VALUES = 1 << 21  # weights read a slice by a score that reads them, at some 270 M a second: 8 ms


@dataclass(frozen=True, slots=True)
class Split:
    """What a re-selection does to a slice of entries: positions int64 of rows that freeze, and of rows that thaw."""

    freezes: np.ndarray
    idle: np.ndarray  # positions of rows on probation that freeze because nobody visits them; a visit thaws them
    thaws: np.ndarray
    rows_kept: int  # past probation, above the frostline, and hot before


def histogram_end(tables: Collection[Table], first: int) -> int:
    """The first bucket that one bounded call of heat_histogram over these tables leaves for the next, from `first` on.

    NUM_BUCKETS if there is no table.
    """
    ends = [slice_end(t.index, first, entries_per_slice(t, HISTOGRAM_ENTRIES) // len(tables)) for t in tables]
    return min([NUM_BUCKETS, *ends])


def entries_per_slice(table: Table, most: int = ENTRIES_PER_SLICE) -> int:
    """Entries that a bounded slice ranks: `most`, or fewer if the score reads rows."""
    return min(most, _SCORED_VALUES // table.spec.dim) if reads_rows(table.spec.policy) else most


def heat_histogram(table: Table, step: int, first: int, last: int) -> HeatHistogram:
    """Rows of buckets [first, last) past probation by rank bin, at `step`. Changes nothing but the origin of heat."""
    table.move_origin_of_heat(step)
    entries = table.index.scan(first, last)
    if table.control.any():
        entries = entries.take(~table.is_control(entries.row_ids))
    on_probation = _on_probation(table, entries.locations)
    is_hot = (entries.locations & FROZEN_BIT) == 0
    counts_hot, counts_frozen = np.zeros((2, NUM_RANK_BINS), np.int64)
    if ranks_by_heat(table.spec.policy):  # a kernel of its own: this is what tables of many rows do
        count_bins(entries.heat, is_hot & ~on_probation, counts_hot)
        count_bins(entries.heat, ~is_hot & ~on_probation, counts_frozen)
    else:
        bins = _bins(table, entries, step)
        counts_hot += np.bincount(bins[is_hot & ~on_probation], minlength=NUM_RANK_BINS)
        counts_frozen += np.bincount(bins[~is_hot & ~on_probation], minlength=NUM_RANK_BINS)
    return HeatHistogram(counts_hot + counts_frozen, entries.row_ids.shape[0], int(on_probation.sum()), counts_hot)


def split_at_frostline(table: Table, entries: Entries, step: int) -> Split:
    """Hot rows past probation below the frostline freeze, frozen rows above it thaw, if far enough from it to move."""
    line, resume = table.frostline, table.spec.policy.resume
    assert line is not None
    is_hot = (entries.locations & FROZEN_BIT) == 0
    bins = _bins(table, entries, step)
    above = is_above(line, bins, entries.row_ids)
    may = may_move(line, bins, entries.row_ids, step)
    control = table.is_control(entries.row_ids)
    on_probation = _on_probation(table, entries.locations)
    ranked = ~on_probation & ~control
    idle = np.empty(0, np.int64)
    if hot_fraction_at(table.spec.policy, step) < 1.0:
        idle = _idle(table, entries, np.flatnonzero(is_hot & on_probation & ~control), step)
    return Split(
        np.flatnonzero(is_hot & ranked & ~above & may),
        idle,
        np.flatnonzero(~is_hot & ((ranked & above & may & resume) | control)),
        int((is_hot & above & ~on_probation).sum()),
    )


def thaws_at_visit(table: Table, locations: np.ndarray) -> np.ndarray:
    """bool[n]: the frozen rows at uint32[n] that a training visit thaws: all, or under topk those on probation."""
    if table.spec.policy.kind == "topk":
        return _on_probation(table, locations)
    return np.ones(locations.shape[0], np.bool_)


def _on_probation(table: Table, locations: np.ndarray) -> np.ndarray:
    """bool[n]: rows, hot or frozen, that have not yet had probation_visits visits."""
    on = table.probation_mask(locations)
    probation_visits = table.spec.policy.probation_visits
    stored = np.flatnonzero(((locations & FROZEN_BIT) != 0) & (locations != INITIAL)) if probation_visits else ()
    if len(stored):
        on[stored] = table.segments.visits_of(locations[stored]) < probation_visits
    return on


def _idle(table: Table, entries: Entries, hot: np.ndarray, step: int) -> np.ndarray:
    """Of these positions of hot rows, those without a visit in the last idle_steps steps."""
    last_step = table.last_step.array[entries.locations[hot], 0]
    return hot[last_step <= step - table.spec.policy.idle_steps]


def enters_hot(table: Table, row_ids: np.ndarray, step: int) -> np.ndarray:
    """bool[n]: a new row trains: always, unless a frostline stands, there is no probation, and it lies below.

    A score that reads rows ranks a new one at the next re-selection; until then it trains. So do rows under control.
    """
    policy = table.spec.policy
    if table.frostline is None or policy.kind != "topk" or policy.probation_visits or reads_rows(policy):
        return np.ones(row_ids.shape[0], np.bool_)
    code = np.full(row_ids.shape[0], heat.now_code(step, policy.half_life_steps), np.uint16)
    return is_above(table.frostline, rank_bins(policy, row_ids, code), row_ids) | table.is_control(row_ids)


def _bins(table: Table, entries: Entries, step: int) -> np.ndarray:
    if reads_rows(table.spec.policy):
        return score_bins(table, entries, step)
    return rank_bins(table.spec.policy, entries.row_ids, entries.heat)
