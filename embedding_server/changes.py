"""Changes: which hot rows had their weights or state written since which cut, for deltas: a byte a slot.

last_step does not tell: policy `off` counts no visits, a Push may name rows that no Pull named, and a visit need not
change a row. So whoever writes weights or state of a slot says so (`note`; table.py, invariant 4). The byte is the
number of cuts that had begun by then, counted from the last full one; 0: not since that one began.

Before the first cut nothing is noted, and none of it is in memory.

Thread safety: none; it belongs to the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedding_server.kernels.visits import stamp_slots
from embedding_server.reserved import ReservedArray

_MOST = 254  # deltas in a row; beyond, a cut is a full one
_COUNTED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """When a cut of a table began. It means nothing to the Changes of another table."""

    owner: Changes
    generation: int
    number: int


class Changes:
    def __init__(self, max_slots: int) -> None:
        self._stamps = ReservedArray(max_slots, 1, np.uint8)
        self._generation = 0  # rises with each full cut
        self._now = 0  # what a slot that is written now gets; 0: nothing is noted

    def begin_cut(self, parent: Mark | None) -> tuple[Mark, int]:
        """A cut of the table begins: (its mark, the stamp that rows above it have if they changed since `parent`).

        -1, so that all rows count as changed, without a parent, or if nothing is known since it.
        """
        is_known = parent is not None and parent.owner is self and parent.generation == self._generation
        if parent is None or not is_known or self._now > _MOST:
            self._stamps.release(0)
            self._generation += 1
            self._now = 1
            return Mark(self, self._generation, 0), -1
        mark = Mark(self, self._generation, self._now)
        self._now += 1
        return mark, parent.number

    def note(self, slots: np.ndarray) -> None:
        """Weights or state of slots int32[n] are about to change; -1 is skipped."""
        if self._now:
            stamp_slots(self._stamps.array.reshape(-1), slots, self._now)

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Rows move from slots src[i] to dst[i], as HotRows.move."""
        if self._now:
            self._stamps.array[dst] = self._stamps.array[src]

    @property
    def stamps(self) -> np.ndarray:
        """uint8[max_slots, 1], read only."""
        return self._stamps.array

    def stamps_of(self, slots: np.ndarray) -> np.ndarray:
        """uint8[n] of slots int[n]."""
        return self._stamps.array[slots, 0]

    def count_above(self, stamp: int, high_water: int, free_slots: np.ndarray) -> int:
        """Rows in slots below high_water, none of them in free_slots, whose stamp is above this one, at least 0."""
        stamps, count = self._stamps.array.reshape(-1), 0
        for start in range(0, high_water, _COUNTED_AT_ONCE):
            count += int(np.count_nonzero(stamps[start : min(high_water, start + _COUNTED_AT_ONCE)] > stamp))
        return count - int(np.count_nonzero(stamps[free_slots] > stamp))

    def size_bytes(self, high_water: int) -> int:
        """Committed, once every slot below high_water was noted."""
        return self._stamps.committed_bytes(high_water) if self._now else 0

    def close(self) -> None:
        self._stamps.close()
        self._now = 0
