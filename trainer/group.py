"""The workers of a job, as the loop sees them: barriers, sums and gathers over torch.distributed, or nothing for one.

Wraps no process group of its own: Ray Train has initialised the default one (gloo) before the loop begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Group:
    """Worker `rank` of `size`. Every method must be called by all workers at the same point of their loops."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def from_first(self, value: int) -> int:
        """Worker 0's value, on every worker."""
        if self.size == 1:
            return value
        cell = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(cell, src=0)
        return int(cell.item())

    def sums(self, values: list[int]) -> list[int]:
        """Element by element over all workers."""
        if self.size == 1:
            return values
        cells = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(cells)
        return [int(v) for v in cells.tolist()]

    def add(self, values: np.ndarray) -> np.ndarray:
        """Sum over all workers of a float64 array of the same shape on each."""
        if self.size == 1:
            return values
        total = torch.from_numpy(np.array(values, np.float64))
        dist.all_reduce(total)
        return total.numpy()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """float32[n_w] of each worker -> float32[sum of n_w], in worker order, on every worker."""
        if self.size == 1:
            return values
        counts = self.sums([len(values) if w == self.rank else 0 for w in range(self.size)])
        padded = torch.zeros(max(1, *counts), dtype=torch.float32)
        padded[: len(values)] = torch.from_numpy(values)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return np.concatenate([part[:count].numpy() for part, count in zip(parts, counts, strict=True)])
