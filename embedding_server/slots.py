"""Which hot slots are taken, under a hard budget, and how their tail is given back after many rows froze."""

from __future__ import annotations

import numpy as np


class MemoryBudget:
    """Bytes a shard may hold in memory, and what each of its tables holds now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[str, int] = {}
        self.used_bytes = 0

    def record(self, table: str, held_bytes: int) -> None:
        self.used_bytes += held_bytes - self._held.get(table, 0)
        self._held[table] = held_bytes

    def forget(self, table: str) -> None:
        """The table is gone."""
        self.used_bytes -= self._held.pop(table, 0)

    @property
    def free_bytes(self) -> int:
        """Negative when a buffer or the index grew past the limit for a moment; the next rows pay that back."""
        return self.limit_bytes - self.used_bytes


class Slots:
    """Hands out hot slots: freed ones first (lowest first after a compaction begins), then above the high water mark.

    Invariant: taken + free + retired == high_water. Slots are int32.
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.high_water = 0
        self._free = np.empty(64, np.int32)
        self._num_free = 0
        self._retired = np.empty(0, np.int32)  # free slots above the target of a running compaction
        self.target: int | None = None

    @property
    def num_taken(self) -> int:
        return self.high_water - self._num_free - self._retired.shape[0]

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free_slots(self) -> np.ndarray:
        """int32: all slots below the high water mark that no row holds."""
        return np.concatenate([self._free[: self._num_free], self._retired])

    def take_free(self, n: int) -> np.ndarray:
        """At most n freed slots."""
        n = min(n, self._num_free)
        self._num_free -= n
        return self._free[self._num_free : self._num_free + n].copy()

    def grow(self, n: int) -> np.ndarray:
        """n slots above the high water mark; the caller has checked its budget. Ends a running compaction."""
        self.end_compaction(finished=False)
        n = min(n, self.max_slots - self.high_water)
        slots = np.arange(self.high_water, self.high_water + n, dtype=np.int32)
        self.high_water += n
        return slots

    def give_back(self, slots: np.ndarray) -> None:
        if self.target is not None:
            above = slots >= self.target
            if above.any():
                self._retired = np.concatenate([self._retired, slots[above]])
                slots = slots[~above]
        needed = self._num_free + slots.shape[0]
        if needed > self._free.shape[0]:
            self._free = np.concatenate([self._free[: self._num_free], np.empty(needed, np.int32)])
        self._free[self._num_free : needed] = slots
        self._num_free = needed

    def begin_compaction(self) -> int:
        """Aims at high_water == taken: rows in slots at or above the returned target must move to `take_free` slots."""
        self.target = self.num_taken
        free = self._free[: self._num_free]
        self._retired = free[free >= self.target].copy()
        low = np.sort(free[free < self.target])[::-1]
        self._free = low.copy() if low.shape[0] else np.empty(64, np.int32)
        self._num_free = low.shape[0]
        return self.target

    def end_compaction(self, *, finished: bool) -> None:
        """finished: nothing is left at or above the target, so the mark falls to it. Otherwise all stays as it was."""
        if self.target is None:
            return
        target, retired = self.target, self._retired
        self.target, self._retired = None, np.empty(0, np.int32)
        if finished:
            self.high_water = target
        else:
            self.give_back(retired)
