"""What a table holds, as values that can be compared with a model's or another table's, wherever the rows lie."""

from __future__ import annotations

import numpy as np

from embedding_server.admission import NUM_WAITING_BUCKETS
from embedding_server.index import FROZEN_BIT, INITIAL
from embedding_server.store import NUM_BUCKETS
from embedding_server.table import Table


def rows_of(table: Table) -> dict[int, tuple]:
    """By row_id: heat, then "hot" with weights, state, last_step, visits and decay owed; or "frozen" with the stored
    bytes, the accumulator's byte and visits; or "initial"."""
    entries = table.index.scan(0, NUM_BUCKETS)
    row_ids, heat = entries.row_ids.tolist(), entries.heat.tolist()
    is_frozen = (entries.locations & FROZEN_BIT) != 0
    is_initial = entries.locations == INITIAL
    found: dict[int, tuple] = {}
    for i in np.flatnonzero(is_initial).tolist():
        found[row_ids[i]] = heat[i], "initial"
    _add_hot(table, np.flatnonzero(~is_frozen), entries.locations, row_ids, heat, found)
    _add_frozen(table, np.flatnonzero(is_frozen & ~is_initial), entries.locations, row_ids, heat, found)
    return found


def _add_hot(
    table: Table, at: np.ndarray, locations: np.ndarray, row_ids: list[int], heat: list[int], found: dict[int, tuple]
) -> None:
    if not at.shape[0]:
        return
    slots = locations[at].astype(np.int32)
    weights, state = table.hot.read_stored(slots)
    owed = table.pending(slots)
    last_steps, visits = table.last_step.array[slots, 0].tolist(), table.visits.array[slots, 0].tolist()
    for k, i in enumerate(at.tolist()):
        decay = owed[k].tobytes() if owed.shape[0] else b""
        found[row_ids[i]] = heat[i], "hot", weights[k].tobytes(), state[k].tobytes(), last_steps[k], visits[k], decay


def _add_frozen(
    table: Table, at: np.ndarray, locations: np.ndarray, row_ids: list[int], heat: list[int], found: dict[int, tuple]
) -> None:
    segments = table.segments
    bits = segments.bits_of(locations[at])
    for wanted in np.unique(bits).tolist():
        of_bits = at[bits == wanted]
        its = locations[of_bits]
        encoded = segments._reader.encoded_rows(its, segments.formats[wanted].row_bytes)
        codes, visits = segments.accumulators_of(its).tolist(), segments.visits_of(its).tolist()
        for k, i in enumerate(of_bits.tolist()):
            found[row_ids[i]] = heat[i], "frozen", encoded[k].tobytes(), codes[k], visits[k]


def waiting_of(table: Table) -> dict[int, int]:
    """Visits by ID below min_count."""
    if table.waiting is None:
        return {}
    entries = table.waiting._index.scan(0, NUM_WAITING_BUCKETS)
    pairs = zip(entries.row_ids.tolist(), entries.locations.tolist(), strict=True)
    return {row_id: count for row_id, count in pairs if count}
