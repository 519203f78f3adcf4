"""The rank half of a re-selection (policy topk): how a table's rows are ranked, and which of them move.

Two rounds. `heat_histogram` counts the rows past probation by rank bin; the caller adds the histograms of all shards
and computes one frostline per table (policy.compute_frostline). `split_at_frostline` then says, slice by slice, which
rows freeze and which thaw; freezing.py moves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server import heat
from embedding_server.index import FROZEN_BIT, Entries, count_bins
from embedding_server.index_walk import slices
from embedding_server.policy import is_above, rank_bins
from embedding_server.store import HeatHistogram

if TYPE_CHECKING:
    from embedding_server.table import Table


def heat_histogram(table: Table, step: int) -> HeatHistogram:
    """Rows past probation by rank bin, at `step`. Changes nothing but the origin of the heat codes."""
    table.move_origin_of_heat(step)
    counts = np.zeros(heat.NUM_BINS, np.int64)
    probation = 0
    policy = table.spec.policy
    for first, last in slices(table.index):
        entries = table.index.scan(first, last)
        on_probation = table.probation_mask(entries.locations)
        probation += int(on_probation.sum())
        if policy.select == "topk":
            count_bins(entries.heat, ~on_probation, counts)
        else:
            bins = rank_bins(policy, entries.row_ids[~on_probation], entries.heat[~on_probation])
            counts += np.bincount(bins, minlength=heat.NUM_BINS)
    return HeatHistogram(counts, rows_total=len(table.index), rows_probation=probation)


def split_at_frostline(table: Table, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Positions of hot rows past probation below the frostline, and of frozen rows above it."""
    assert table.frostline is not None
    is_hot = (entries.locations & FROZEN_BIT) == 0
    above = is_above(table.frostline, rank_bins(table.spec.policy, entries.row_ids, entries.heat), entries.row_ids)
    freezes = np.flatnonzero(is_hot & ~above & ~table.probation_mask(entries.locations))
    return freezes, np.flatnonzero(~is_hot & above)
