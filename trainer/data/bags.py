"""Bags: a bag of row_ids per sample, as ranges of one flat array. Ranges of different samples may overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Bags:
    """Bag i holds values[starts[i] : starts[i] + lengths[i]]."""

    values: np.ndarray  # int64[m]
    starts: np.ndarray  # int64[n]
    lengths: np.ndarray  # int64[n]

    @classmethod
    def of_one(cls, row_ids: np.ndarray) -> Bags:
        """One row_id per sample."""
        n = len(row_ids)
        return cls(np.ascontiguousarray(row_ids, np.int64), np.arange(n), np.ones(n, np.int64))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]]) -> Bags:
        lengths = np.fromiter((len(one) for one in lists), np.int64, len(lists))
        values = np.fromiter((value for one in lists for value in one), np.int64, int(lengths.sum()))
        return cls(values, np.cumsum(lengths) - lengths, lengths)

    def at(self, positions: np.ndarray) -> Bags:
        """The bags at these positions; shares the values."""
        return Bags(self.values, self.starts[positions], self.lengths[positions])

    def flat(self) -> np.ndarray:
        """All bags one after the other, int64[sum of lengths]; a copy."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        return self.values[np.repeat(self.starts - (ends - self.lengths), self.lengths) + np.arange(total)]

    def owners(self) -> np.ndarray:
        """For each value of flat(), the position of its bag; int64[sum of lengths]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def join(bags: Sequence[Bags]) -> tuple[np.ndarray, np.ndarray]:
    """Values int64 and lengths int32 of several features in the feature-major order of KeyedJaggedTensor."""
    values = np.concatenate([bag.flat() for bag in bags]) if bags else np.empty(0, np.int64)
    lengths = np.concatenate([bag.lengths for bag in bags]) if bags else np.empty(0, np.int64)
    return values, lengths.astype(np.int32)
