"""Figures of a table: rows and bytes by state, moves by reason, rows by heat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server import heat
from embedding_server.index import BYTES_PER_SLOT, FROZEN_BIT, HEAT_BYTES
from embedding_server.store import HEAT_BAND_OF_ONE, NUM_HEAT_BANDS, MaskInfo, TableStats

if TYPE_CHECKING:
    from embedding_server.table import Table


def bytes_of(table: Table) -> dict[str, int]:
    """The bytes_ fields of TableStats but the peak. Costs microseconds."""
    high_water = table.slots.high_water
    heat_bytes = table.index.num_slots * HEAT_BYTES
    return {
        "bytes_hot": table.hot.bytes_weights(high_water),
        "bytes_state": table.hot.bytes_state(high_water)
        + table.last_step.committed_bytes(high_water)
        + table.visits.committed_bytes(high_water)
        + table.changes.size_bytes(high_water)
        + (table.decay.size_bytes if table.decay else 0),
        "bytes_frozen": table.segments.bytes_used,
        "bytes_index": table.index.num_slots * BYTES_PER_SLOT - heat_bytes,
        "bytes_heat": heat_bytes + (table.waiting.size_bytes if table.waiting else 0),
    }


def stats_of(table: Table) -> TableStats:
    return TableStats(
        rows_hot=len(table.index) - table.rows_frozen,
        rows_frozen=table.rows_frozen,
        rows_probation=_rows_on_probation(table),
        rows_unfreezable=table.rows_unfreezable,
        rows_default_reads=table.rows_default_reads,
        rows_ignored=table.rows_ignored,
        **bytes_of(table),
        bytes_peak=table.bytes_peak,
        moves_frozen=table.moves_frozen,
        moves_frozen_idle=table.moves_frozen_idle,
        moves_frozen_rank=table.moves_frozen_rank,
        moves_frozen_limit=table.moves_frozen_limit,
        moves_thawed=table.moves_thawed,
        moves_thawed_visit=table.moves_thawed_visit,
        moves_thawed_rank=table.moves_thawed_rank,
        moves_forgotten=table.moves_forgotten,
        rows_erased=table.rows_erased,
        bytes_erasure_pending=table.segments.bytes_erasing,
    )


def mask_info_of(table: Table, first: int, last: int) -> MaskInfo:
    """Rows by heat of buckets [first, last); all else is in the part of bucket 0, so that parts add up."""
    entries = table.index.scan(first, last)
    bands = heat_bands(entries.heat, table.last_step_seen, table.spec.policy.half_life_steps)
    is_hot = (entries.locations & FROZEN_BIT) == 0
    hot, frozen = (np.bincount(bands[rows], minlength=NUM_HEAT_BANDS) for rows in (is_hot, ~is_hot))
    if first:
        return MaskInfo(TableStats(), None, hot, frozen)
    return MaskInfo(stats_of(table), table.frostline, hot, frozen, table.rows_ranked, table.rows_ranked_before)


def heat_bands(codes: np.ndarray, step: int, half_life_steps: float) -> np.ndarray:
    """Heat codes uint16[n] -> int64[n]: the half-octave band (store.NUM_HEAT_BANDS) of the heat at `step`."""
    # a code may lie one below what it stands for, and one visit now, the commonest heat, is the edge of a band
    relative = (codes.astype(np.float64) + 1.0 - heat.now_code(step, half_life_steps)) / heat.CODES_PER_OCTAVE
    bands = np.floor(2.0 * relative).astype(np.int64) + HEAT_BAND_OF_ONE
    return np.where(codes == 0, 0, np.clip(bands, 0, NUM_HEAT_BANDS - 1))


def _rows_on_probation(table: Table) -> int:
    """Counted over slots, a byte each: a scan of the index would cost twenty times as much."""
    policy, slots = table.spec.policy, table.slots
    if policy.kind != "topk":
        return 0
    on_probation = table.visits.array[: slots.high_water, 0] < policy.probation_visits
    return int(np.count_nonzero(on_probation) - np.count_nonzero(on_probation[slots.free_slots]))
