"""Which gradients were acknowledged, and what a table must therefore be: the sum over one line of epochs and steps.

Independent of the shards' models: it is kept by the workers and knows nothing but what was acknowledged to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embedding_server.gradients import ShardGradients

Pushed = Mapping[int, np.ndarray]  # gradient by row_id, of the plain table


class Ledger:
    def __init__(self) -> None:
        self._origin: dict[int, tuple[int, int]] = {}  # of each epoch: the epoch and step of the cut that it began from
        self._pushed: dict[tuple[int, int], dict[int, Pushed]] = {}  # by epoch and step, by worker
        self._workers: dict[int, int] = {}  # of each epoch
        self._deleted: dict[tuple[int, int], set[int]] = {}  # row_ids of the plain table, by the epoch and step behind

    def begin(self, epoch: int, num_workers: int, from_epoch: int, from_step: int) -> None:
        """from_epoch 0: from nothing."""
        self._origin[epoch] = from_epoch, from_step
        self._workers[epoch] = num_workers

    def note(self, epoch: int, step: int, worker: int, gradients: list[ShardGradients]) -> None:
        """All shards have acknowledged these, of the plain table."""
        of_rows: dict[int, np.ndarray] = {}
        for part in gradients:
            of_rows.update(zip(part.row_ids.tolist(), part.values, strict=True))
        by_worker = self._pushed.setdefault((epoch, step), {})
        assert worker not in by_worker, "a worker counts an acknowledgement once"
        by_worker[worker] = of_rows

    def note_deleted(self, epoch: int, step: int, row_ids: list[int]) -> None:
        """All shards have acknowledged that these of the plain table are deleted, behind the step."""
        self._deleted.setdefault((epoch, step), set()).update(row_ids)

    def values(self, epoch: int, step: int, dim: int) -> dict[int, np.ndarray]:
        """Row by row_id after `step` of `epoch`: what was trained since the beginning, or since it was deleted, in the
        line that leads there."""
        total: dict[int, np.ndarray] = {}
        for of_epoch, of_step in self._line(epoch, step):
            by_worker = self._pushed.get((of_epoch, of_step), {})
            assert len(by_worker) == self._workers[of_epoch], f"step {of_step} of epoch {of_epoch} is not complete"
            for of_rows in by_worker.values():
                for row_id, gradient in of_rows.items():
                    share = gradient / np.float32(self._workers[of_epoch])
                    total[row_id] = total.get(row_id, np.zeros(dim, np.float32)) - share
            for row_id in self._deleted.get((of_epoch, of_step), ()):
                total.pop(row_id, None)
        return total

    def _line(self, epoch: int, step: int) -> list[tuple[int, int]]:
        line: list[tuple[int, int]] = []
        while epoch:
            from_epoch, from_step = self._origin[epoch]
            line = [(epoch, s) for s in range(from_step + 1, step + 1)] + line
            epoch, step = from_epoch, from_step
        return line
