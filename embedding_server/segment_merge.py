"""SegmentMerges: live rows move to another segment and the dead ones go. Small segments unite in memory, files merge.

Waste = dead rows + the fixed bytes (header, bucket_offsets) of every segment but one. A merge is due when waste is
above 20% of the bytes, or more than 32 segments are less than half full. It takes the most wasteful segments (or, for
the number, those with the fewest live rows) as long as their live rows fit one new segment: it never holds more than
one segment beside those it merges. Full segments with little waste are left alone: of a big table, which has more than
32 of them, every merge would otherwise copy another 256 MiB for a few dead rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.kernels.locations import MAX_SLOTS, next_locations, sorted_buckets
from embedding_server.segment_builder import SegmentBuilder, fixed_bytes
from embedding_server.segment_growth import SegmentGrowth
from embedding_server.segment_rows import Part
from embedding_server.segment_slots import SegmentSlots
from embedding_server.segment_writer import SegmentWriter

#: is_live(row_ids int64[n], locations uint32[n]) -> bool[n]: does the index still point at that location?
IsLive = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: moved(row_ids int64[n], old uint32[n], new uint32[n]): point the index at the new locations
Moved = Callable[[np.ndarray, np.ndarray, np.ndarray], None]

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


class SegmentMerges:
    """The merge under way in a set, if any, and the uniting of its small segments.

    Thread safety: one thread at a time. While the set is held, nothing moves.
    """

    def __init__(
        self,
        slots: SegmentSlots,
        growth: SegmentGrowth,
        writer: SegmentWriter,
        drop: Callable[[int], None],
        on_event: Callable[[str], None],
    ) -> None:
        """drop(slot) frees the slot of a segment with its memory, map and file."""
        self._slots, self._growth, self._writer = slots, growth, writer
        self._drop, self._on_event = drop, on_event
        self._merge: Merge | None = None
        self._damaged: set[int] = set()  # slots of files that a merge could not read

    # Small segments, in memory --------------------------------------------------------------------------------------

    def unite_small(self, is_live: IsLive, moved: Moved) -> bool:
        """Makes one of the small segments of each format, without the dead rows. False if they are that already.

        All dead rows, not from a fifth on as with files, so that bytes of small tables depend on rows alone.
        """
        found = False
        if self._slots.is_held:
            return found
        for bits, small in self._growth.small.items():
            is_united = len(small) <= 1 and not any(self._slots.dead[builder.slot] for builder in small)
            if not is_united and self._slots.num_used < MAX_SLOTS:
                num_rows = np.cumsum([builder.num_rows for builder in small], dtype=np.int64)
                fitting = int(np.searchsorted(num_rows, self._slots.capacity[bits], side="right"))
                self._unite(small[:fitting], is_live, moved)
                found = True
        return found

    def _unite(self, small: list[SegmentBuilder], is_live: IsLive, moved: Moved) -> None:
        slots = np.array([builder.slot for builder in small], np.int64)
        offsets = np.stack([builder.arrays().bucket_offsets for builder in small]).astype(np.int64)
        old = np.empty(int(offsets[:, -1].sum()), np.uint32)
        next_locations(slots, offsets, np.zeros(3, np.int64), old)
        row_ids, old = self._live_of(old, is_live)
        if old.shape[0]:
            frozen_step = max(builder.frozen_step for builder in small)
            output = self._slots.add_builder(small[0].format.bits, frozen_step, old.shape[0])
            self._copy(output, row_ids, old, moved)
            self._growth.keep(output)
        for builder in small:
            self._drop(builder.slot)

    # Files ----------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """merge_slice has something to do. No merge starts while segments wait to be written, which bounds memory."""
        return not self._slots.is_held and (self._merge is not None or self._plan().shape[0] > 0)

    @property
    def bytes_to_merge(self) -> int:
        """Of the segments of the merge under way or due."""
        slots = self._plan().tolist() if self._merge is None else [*self._merge.left, self._merge.output.slot]
        return int(self._slots.rows[slots].sum()) * max(fmt.unit_bytes for fmt in self._slots.formats.values())

    @property
    def inputs(self) -> set[int]:
        """Slots that the merge under way still reads."""
        return set() if self._merge is None else set(self._merge.left)

    @property
    def output(self) -> SegmentBuilder | None:
        """Of the merge under way."""
        return None if self._merge is None else self._merge.output

    def merge_slice(self, is_live: IsLive, moved: Moved) -> bool:
        """Copies the next rows (at most SLICE_ROWS) of the merge under way, or starts the merge that is due.

        Calls is_live at most once, then moved at most once. When all is copied, each slice drops one merged segment,
        because deleting a file of 256 MiB takes tens of ms. True: the merge is over, and the new segment waits for its
        file; or there was nothing to do. A damaged file ends the merge with an event: what was copied is kept, and no
        later merge touches that file.
        """
        if self._merge is None:
            slots = self._plan()
            if not slots.shape[0]:
                return True
            failpoint("merge.begin")
            self._merge = self._start(slots)
        merge = self._merge
        if merge is None:
            return True
        if not merge.is_copied:
            try:
                row_ids, old = self._live_of(merge.next_slice(), is_live)
                self._copy(merge.output, row_ids, old, moved)
            except SegmentCorrupt as error:
                self._note_damage(error)
                self.end()
                return True
            return False
        failpoint("merge.before_drop")
        self._drop(merge.left.pop())
        if merge.left:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Ends the merge under way, if any, with what it has copied."""
        if self._merge is None:
            return
        output, self._merge = self._merge.output, None
        if output.num_rows:
            self._growth.keep(output)
        else:
            self._drop(output.slot)

    def forget(self, slot: int) -> None:
        """The slot's segment is gone."""
        self._damaged.discard(slot)

    def close(self) -> None:
        self._merge = None

    def _plan(self) -> np.ndarray:
        """Slots int64[V] of the segments to merge now, all of one format."""
        none, mapped = np.empty(0, np.int64), self._slots.mapped
        if self._writer.has_pending or not mapped or self._slots.num_used >= MAX_SLOTS:
            return none
        for bits, fmt in self._slots.formats.items():
            of_format = [slot for slot, m in mapped.items() if m.format.bits == bits and slot not in self._damaged]
            slots = np.array(of_format, np.int64)
            if slots.shape[0]:
                sizes = fmt.unit_bytes, fixed_bytes(fmt), self._slots.capacity[bits]
                chosen = slots[plan_merge(self._slots.rows[slots], self._slots.dead[slots], *sizes)]
                if chosen.shape[0]:
                    return chosen
        return none

    def _start(self, slots: np.ndarray) -> Merge | None:
        """None, with an event, if a file's bucket_offsets are damaged."""
        merged = [self._slots.mapped[slot] for slot in slots.tolist()]
        try:
            for segment in merged:
                segment.check_offsets()
        except SegmentCorrupt as error:
            self._note_damage(error)
            return None
        offsets = np.stack([segment.arrays.bucket_offsets for segment in merged]).astype(np.int64)
        frozen_step = max(segment.frozen_step for segment in merged)
        return Merge(slots, offsets, self._growth.new_builder(merged[0].format.bits, frozen_step))

    def _note_damage(self, error: SegmentCorrupt) -> None:
        self._damaged |= {slot for slot, segment in self._slots.mapped.items() if str(segment.path) == error.path}
        self._on_event(
            f"table {self._slots.table!r}: {error} Until then no merge touches it, and its other rows are served"
        )

    # Rows -----------------------------------------------------------------------------------------------------------

    def _live_of(self, locations: np.ndarray, is_live: IsLive) -> tuple[np.ndarray, np.ndarray]:
        """row_ids int64[n] and locations uint32[n] of those that are live."""
        reader = self._slots.reader
        reader.page_in_if_cold(locations, tuple(Part))  # a page fault after the other takes 10 times as long
        row_ids = reader.row_ids_of(locations)
        live = is_live(row_ids, locations)
        return row_ids[live], locations[live]

    def _copy(self, output: SegmentBuilder, row_ids: np.ndarray, old: np.ndarray, moved: Moved) -> None:
        if not old.shape[0]:
            return
        reader = self._slots.reader
        rows = reader.encoded_rows(old, output.format.row_bytes)
        buckets = np.empty(old.shape[0], np.int32)
        sorted_buckets(row_ids, self._slots.num_buckets, buckets)
        new = output.append(row_ids, buckets, rows, reader.accumulators_of(old), reader.visits_of(old))
        self._slots.note_appended(output)
        failpoint("merge.copied")
        moved(row_ids, old, new)
        self._slots.mark_dead(old)
