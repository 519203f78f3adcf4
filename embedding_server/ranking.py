"""The rank half of a re-selection (policy topk): how a table's rows are ranked, and which of them move.

Two rounds. `heat_histogram` counts the rows past probation by rank bin; the caller adds the histograms of all shards
and computes one frostline per table (policy.compute_frostline). `split_at_frostline` then says, slice by slice, which
rows freeze and which thaw; freezing.py moves them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.index import FROZEN_BIT, Entries
from embedding_server.index_walk import slice_end
from embedding_server.policy import is_above, rank_bins
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS, HeatHistogram

if TYPE_CHECKING:
    from embedding_server.table import Table

HISTOGRAM_ENTRIES = 1 << 20  # counted a call: about 20 ms


def histogram_end(tables: Collection[Table], first: int) -> int:
    """The first bucket that one bounded call of heat_histogram over these tables leaves for the next, from `first` on.

    NUM_BUCKETS if there is no table.
    """
    ends = [slice_end(table.index, first, HISTOGRAM_ENTRIES // len(tables)) for table in tables]
    return min([NUM_BUCKETS, *ends])


def heat_histogram(table: Table, step: int, first: int, last: int) -> HeatHistogram:
    """Rows of buckets [first, last) past probation by rank bin, at `step`. Changes nothing but the origin of heat."""
    table.move_origin_of_heat(step)
    entries = table.index.scan(first, last)
    on_probation = table.probation_mask(entries.locations)
    is_hot = (entries.locations & FROZEN_BIT) == 0
    bins = rank_bins(table.spec.policy, entries.row_ids, entries.heat)
    counts_hot = np.bincount(bins[is_hot & ~on_probation], minlength=NUM_RANK_BINS)
    counts_frozen = np.bincount(bins[~is_hot], minlength=NUM_RANK_BINS)
    return HeatHistogram(
        counts_hot + counts_frozen,
        rows_total=entries.row_ids.shape[0],
        rows_probation=int(on_probation.sum()),
        counts_hot=counts_hot,
    )


def split_at_frostline(table: Table, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Positions of hot rows past probation below the frostline, and of frozen rows above it."""
    assert table.frostline is not None
    is_hot = (entries.locations & FROZEN_BIT) == 0
    above = is_above(table.frostline, rank_bins(table.spec.policy, entries.row_ids, entries.heat), entries.row_ids)
    freezes = np.flatnonzero(is_hot & ~above & ~table.probation_mask(entries.locations))
    return freezes, np.flatnonzero(~is_hot & above)
