"""Admission: an ID gets a row of its own at its min_count-th visit; until then it reads the table's default row.

Visits of IDs without a row are counted in a count-min sketch (Cormode and Muthukrishnan 2005) with conservative update
(Estan and Varghese 2002): an estimate is never too low, so no ID waits longer than min_count visits; with at most one
counted ID per four cells it is too high for fewer than 1 in 100 IDs, which are then admitted early.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, int64, njit, uint8

from embedding_server.kernels.hashing import hash_row_id, mix64
from embedding_server.kernels.kernel import array, kernel, view

_ROWS = 3
_FIRST_WIDTH = 1 << 12
_MAX_WIDTH = 1 << 30
_IDS_PER_CELL = 0.25
_FULL = np.uint8(255)


@njit(inline="always")
def _cell(h, row, width):
    return np.int64(mix64(h + np.uint64(row + 1)) & np.uint64(width - 1))


@kernel(int64(array(uint8, 2), view(int64), view(boolean), array(uint8)))
def _add(cells, row_ids, counted, out_estimates):
    """One visit for each counted ID; the others are only estimated. Returns how many IDs were new to the sketch."""
    fresh = 0
    width = cells.shape[1]
    for i in range(row_ids.shape[0]):
        h = hash_row_id(row_ids[i])
        estimate = _FULL
        for r in range(_ROWS):
            estimate = min(estimate, cells[r, _cell(h, r, width)])
        if counted[i]:
            if estimate == 0:
                fresh += 1
            estimate = np.uint8(min(np.int64(255), np.int64(estimate) + 1))
            for r in range(_ROWS):
                c = _cell(h, r, width)
                cells[r, c] = max(cells[r, c], estimate)
        out_estimates[i] = estimate
    return fresh


class Sketch:
    """Approximate visit counts (saturating at 255) of IDs that have no row yet. Not thread safe."""

    def __init__(self) -> None:
        self._cells = np.zeros((_ROWS, _FIRST_WIDTH), np.uint8)
        self._ids = 0

    @property
    def size_bytes(self) -> int:
        return int(self._cells.nbytes)

    def visit(self, row_ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Counts one visit where counted[i] and returns the estimates after it, uint8[n]."""
        self._widen(row_ids.shape[0])
        estimates = np.empty(row_ids.shape[0], np.uint8)
        self._ids += _add(self._cells, row_ids, counted, estimates)
        return estimates

    def _widen(self, arriving: int) -> None:
        """Doubles the width while it is too small. Cells are copied to both halves: estimates stay upper bounds."""
        while self._ids + arriving > self._cells.shape[1] * _IDS_PER_CELL and self._cells.shape[1] < _MAX_WIDTH:
            self._cells = np.concatenate([self._cells, self._cells], axis=1)
