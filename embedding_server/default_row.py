"""The default row of a table: what row_ids below min_count read and train together, a replica of it on every shard.

Invariant: it changes only through `apply`, which every shard calls with the same numbers in the same order (pushes.py),
and `restore`, so the replicas stay equal bit for bit.
"""

from __future__ import annotations

import numpy as np

from embedding_server.hot_rows import CpuHotRows
from embedding_server.optimizers import initial_state
from embedding_server.spec import TableSpec
from embedding_server.weight_decay import WeightDecay

_SLOT = np.zeros(1, np.int32)


class DefaultRow:
    """It starts at zero. `decay`: the table's own; the row is no hot row, so it decays at the steps that train it."""

    def __init__(self, spec: TableSpec, decay: WeightDecay | None) -> None:
        self._decay = decay
        self._row = CpuHotRows(spec.dim, spec.optimizer, 1)
        self._row.write(_SLOT, np.zeros((1, spec.dim), np.float32), initial_state(spec.optimizer, spec.dim)[None])

    def read(self) -> np.ndarray:
        """float32[1, D], a copy."""
        return self._row.read(_SLOT)[0]

    def apply(self, gradient: np.ndarray, *, scale: float, learning_rate: float, step: int) -> None:
        """One optimizer step; gradient float32[D]."""
        if self._decay is not None:
            self._row.scale(_SLOT, np.full(1, self._decay.factor(learning_rate), np.float32), step)
        rows = np.ascontiguousarray(gradient[None, :], np.float32)
        self._row.apply(_SLOT, rows, _SLOT, "float32", scale, learning_rate, step)

    def read_state(self) -> np.ndarray:
        """float32[1, C], a copy."""
        return self._row.read(_SLOT)[1]

    def restore(self, weights: np.ndarray, state: np.ndarray) -> None:
        """float32[1, D] and float32[1, C], of a cut."""
        self._row.write(_SLOT, weights, state)

    def close(self) -> None:
        self._row.close()
