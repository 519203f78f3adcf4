"""The rank half of a re-selection (policy topk): how a table's rows are ranked, and which of them move.

Two rounds. `heat_histogram` counts the rows past probation by rank bin; the caller adds the histograms of all shards
and computes one frostline per table (policy.frostline_at). `split_at_frostline` then says, slice by slice, which rows
freeze and which thaw; freezing.py moves them.

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
from embedding_server.index import FROZEN_BIT, Entries
from embedding_server.index_walk import ENTRIES_PER_SLICE, slice_end
from embedding_server.policy import is_above, may_move, rank_bins
from embedding_server.scores import reads_rows, score_bins
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS, HeatHistogram

if TYPE_CHECKING:
    from embedding_server.table import Table

HISTOGRAM_ENTRIES = 1 << 19  # counted a call, at some 35 M a second: 15 ms
_SCORED_VALUES = 1 << 21  # weights read a slice by a score that reads them, at some 130 M a second: 16 ms


@dataclass(frozen=True, slots=True)
class Split:
    """What a re-selection does to a slice of entries: positions int64 of rows that freeze, and of rows that thaw."""

    freezes: np.ndarray
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
    on_probation = table.probation_mask(entries.locations)
    is_hot = (entries.locations & FROZEN_BIT) == 0
    bins = _bins(table, entries, step)
    counts_hot = np.bincount(bins[is_hot & ~on_probation], minlength=NUM_RANK_BINS)
    counts_frozen = np.bincount(bins[~is_hot], minlength=NUM_RANK_BINS)
    return HeatHistogram(
        counts_hot + counts_frozen,
        rows_total=entries.row_ids.shape[0],
        rows_probation=int(on_probation.sum()),
        counts_hot=counts_hot,
    )


def split_at_frostline(table: Table, entries: Entries, step: int) -> Split:
    """Hot rows past probation below the frostline freeze, frozen rows above it thaw, if far enough from it to move."""
    line, resume = table.frostline, table.spec.policy.resume
    assert line is not None
    is_hot = (entries.locations & FROZEN_BIT) == 0
    bins = _bins(table, entries, step)
    above = is_above(line, bins, entries.row_ids)
    may = may_move(line, bins, entries.row_ids, step)
    control = table.is_control(entries.row_ids)
    past_probation = is_hot & ~table.probation_mask(entries.locations)
    return Split(
        np.flatnonzero(past_probation & ~above & may & ~control),
        np.flatnonzero(~is_hot & ((above & may & resume) | control)),
        int((past_probation & above).sum()),
    )


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
