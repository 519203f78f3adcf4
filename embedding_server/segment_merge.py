"""Which segments to merge, and where a merge under way stands. What a merge does to the set is in segments.py.

Waste = dead rows + the fixed bytes (header, bucket_offsets) of every segment but one. A merge is due when waste is
above 20% of the bytes, or more than 32 segments are less than half full. It takes the most wasteful segments (or, for
the number, those with the fewest live rows) as long as their live rows fit one new segment: it never holds more than
one segment beside those it merges. Full segments with little waste are left alone: of a big table, which has more than
32 of them, every merge would otherwise copy another 256 MiB for a few dead rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from embedding_server.kernels.locations import next_locations
from embedding_server.segment_builder import SegmentBuilder

MAX_SEGMENTS = 32  # of less than half a segment
MAX_WASTE = 0.2
SLICE_ROWS = 16384  # about 1 ms with an index look-up and a copy of 72 bytes a row


def plan_merge(rows: np.ndarray, dead: np.ndarray, unit_bytes: int, fixed_bytes: int, capacity: int) -> np.ndarray:
    """Indices int64[V] of the segments to merge now; empty when no merge is due or none would gain anything.

    rows, dead: int64[S] of every written segment; unit_bytes of a row, fixed_bytes of a segment; capacity in rows.
    """
    none = np.empty(0, np.int64)
    total = rows * unit_bytes + fixed_bytes
    waste = dead * unit_bytes + fixed_bytes
    live = rows - dead
    if waste.sum() - fixed_bytes > MAX_WASTE * total.sum():
        order = np.argsort(-waste / total, kind="stable")
        order = order[: max(2, int(np.count_nonzero(waste > MAX_WASTE * total)))]
    elif np.count_nonzero(2 * live <= capacity) > MAX_SEGMENTS:
        order = np.argsort(live, kind="stable")
    else:
        return none
    chosen = order[np.cumsum(live[order]) <= capacity]
    gains = chosen.shape[0] > 1 or bool(dead[chosen].any())
    return chosen if gains else none


@dataclass(slots=True)
class Merge:
    """A merge under way: rows go over in order of bucket, so the output is sorted as its inputs are."""

    slots: np.ndarray  # int64[V], segment slots of the merged
    offsets: np.ndarray  # int64[V, B+1], their bucket_offsets
    output: SegmentBuilder
    left: list[int] = field(init=False)  # slots of the merged that were not dropped yet
    is_copied: bool = False
    _cursor: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))

    def __post_init__(self) -> None:
        self.left = self.slots.tolist()

    def next_slice(self) -> np.ndarray:
        """The next up to SLICE_ROWS locations uint32[n], dead rows included; is_copied once they are the last."""
        out = np.empty(SLICE_ROWS, np.uint32)
        n = next_locations(self.slots, self.offsets, self._cursor, out)
        self.is_copied = n < SLICE_ROWS
        return out[:n]
