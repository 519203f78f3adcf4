"""Pull, look-up and hints of the rows of one table that are not hot: frozen, at their initial value, or absent.

hot_path.py finds the hot rows of all tables of a call at once and comes here for the others, table by table.

    visit       a training Pull: counts the visit, thaws (policy idle), admits
    read        values and flags, without any effect
    find_pages  what a hint that they will be read has to bring into memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server.admission import admit
from embedding_server.freezing import thaw
from embedding_server.index import FROZEN_BIT, INITIAL
from embedding_server.kernels.cpu import initial_values
from embedding_server.kernels.visits import has_duplicates
from embedding_server.kernels.wire import MODES, from_float32, wire_view
from embedding_server.page_reads import PageReads
from embedding_server.ranking import thaws_at_visit
from embedding_server.store import BAND_SHIFT, DEFAULT, FOUND, WireDtype

if TYPE_CHECKING:
    from embedding_server.table import Table


class ColdVisits:
    """Which row_ids earlier Pulls of the step have named. A hot row's last_step tells; the others keep none."""

    def __init__(self) -> None:
        self._step, self._row_ids = -1, np.empty(0, np.int64)

    def first(self, row_ids: np.ndarray, step: int) -> np.ndarray:
        """bool[n]: no earlier Pull of this step named the row; from now on one has. row_ids are distinct."""
        if step != self._step:
            self._step, self._row_ids = step, row_ids
            return np.ones(row_ids.shape[0], np.bool_)
        first = ~np.isin(row_ids, self._row_ids)
        self._row_ids = np.concatenate([self._row_ids, row_ids[first]])
        return first


def visit(table: Table, row_ids: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A training visit of rows that are not hot: counts it, thaws, admits.

    int64[n] -> entry addresses and locations as they are afterwards.
    """
    if has_duplicates(row_ids):
        unique, inverse = np.unique(row_ids, return_inverse=True)
        entries, locations = visit(table, unique, step)
        return entries[inverse], locations[inverse]
    table.catch_up()  # here, for no location of a frozen row is held yet, and merges change them
    entries, locations, missing, frozen = table.index.locate(row_ids)
    first = table.cold_visits.first(row_ids, step)
    generation = table.generation
    thawed = 0
    if frozen:
        table.bump_heat(entries, first, step)
        thawed = _thaw_visited(table, row_ids, entries, locations, step)
    if missing:
        admit(table, row_ids[entries == 0], first[entries == 0], step)
    if thawed or missing:
        table.record_memory()
    if missing or table.generation != generation:  # entries moved, or rows froze to make room
        entries, locations, _, _ = table.index.locate(row_ids)
    return entries, locations


def read(
    table: Table,
    row_ids: np.ndarray,
    positions: np.ndarray,
    entries: np.ndarray,
    locations: np.ndarray,
    values: np.ndarray,
    flags: np.ndarray,
    wire_dtype: WireDtype,
    *,
    reads_default: bool,
) -> None:
    """Fills values[positions] and flags[positions] of rows that are not hot; row_ids, values, flags: all rows.

    reads_default: an absent row is the default row; else it is zeros.
    """
    dim, spec = table.spec.dim, table.spec
    absent = entries == 0
    initial = positions[~absent & (locations == INITIAL)]
    stored = ~absent & (locations != INITIAL)
    bands = table.bands(entries) << np.uint8(BAND_SHIFT)
    flags[positions] = np.where(absent, np.uint8(DEFAULT if reads_default else 0), np.uint8(FOUND) | bands)
    if stored.any():
        table.segments.gather(locations[stored], wire_view(values), positions[stored], MODES[wire_dtype])
    if initial.shape[0]:
        start = initial_values(row_ids[initial], table.seed, dim, spec.init_min, spec.init_max)
        values[initial] = from_float32(start, wire_dtype)
    if absent.any():
        default = table.default_row.read() if reads_default else np.zeros((1, dim), np.float32)
        values[positions[absent]] = from_float32(default, wire_dtype)


def find_pages(table: Table, row_ids: np.ndarray, around: int) -> PageReads:
    """int64[n]: what to read from files for the frozen rows among these, `around` bytes of the file about each."""
    if not table.segments.has_files:
        return PageReads()
    locations = table.index.locate(row_ids)[1]
    return table.segments.find_pages(locations[((locations & FROZEN_BIT) != 0) & (locations != INITIAL)], around)


def _thaw_visited(table: Table, row_ids: np.ndarray, entries: np.ndarray, locations: np.ndarray, step: int) -> int:
    """How many of these rows thawed; their locations become their slots."""
    at = np.flatnonzero((entries != 0) & ((locations & FROZEN_BIT) != 0))
    at = at[thaws_at_visit(table, locations[at])]
    if not at.shape[0]:
        return 0
    slots = thaw(table, entries[at], locations[at], row_ids[at], step)
    locations[at[: slots.shape[0]]] = slots.astype(np.uint32)
    table.visits.array[slots, 0] = np.minimum(254, table.visits.array[slots, 0]) + 1
    table.moves_thawed_visit += slots.shape[0]
    return int(slots.shape[0])
