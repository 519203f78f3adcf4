"""SegmentGrowth: where rows go that freeze. Segments grow, are sealed, and wait as large ones for a file, as small ones
for others.

Why small ones get no file. A file costs its two fsyncs, a rename, a map and, once merged, its deletion: some 10 ms, as
much as copying 100,000 rows. Where 13 tables on each of 2 shards freeze a few hundred rows at each of 31 re-selections
(examples/movielens.yaml), files of every pass took two thirds of the shards' time and the training a quarter longer.
Uniting (segment_merge.py) copies a row once for each pass until its segment is large: at most SMALL_BYTES a pass,
format and table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embedding_server.errors import Overloaded
from embedding_server.kernels.locations import MAX_SLOTS, sorted_buckets
from embedding_server.segment_builder import Parts, SegmentBuilder
from embedding_server.segment_slots import SegmentSlots

#: Rows of a segment of fewer bytes are copied in memory, in less than 1 ms, rather than get a file of their own.
SMALL_BYTES = 256 << 10
MAX_SCATTERED = 4  # at more small segments than this it is worth to make one of them also between two re-selections


class SegmentGrowth:
    """The growing and the small segments of a set: at most one of each format grows.

    Thread safety: one thread at a time.
    """

    def __init__(self, slots: SegmentSlots, small_bytes: int, enqueue: Callable[[SegmentBuilder], None]) -> None:
        """small_bytes: of the rows that stay in memory at most, by format; 0: none do. enqueue takes large segments,
        which get a file."""
        self._slots, self._enqueue = slots, enqueue
        self.small_bytes = small_bytes
        self.growing: dict[int, SegmentBuilder] = {}  # by bits
        self.small: dict[int, list[SegmentBuilder]] = {}  # sealed, packed, by bits
        self._spare: dict[int, Parts] = {}  # by bits: maps without memory for the next builder
        self._frozen_step = 0

    def open_builder(self, frozen_step: int) -> None:
        """Starts a freeze pass: what is appended from here on carries this step in its file."""
        self.seal()
        self._frozen_step = frozen_step

    def can_append(self, num_rows: int) -> bool:
        """Appending this many rows will find segment slots, whatever their buckets and formats."""
        if num_rows == 0:
            return True
        segments = -(-num_rows // min(self._slots.capacity.values())) + len(self._slots.formats) - 1
        return segments <= self._slots.num_free

    def append(
        self, row_ids: np.ndarray, rows: np.ndarray, accumulators: np.ndarray, visits: np.ndarray, bits: int
    ) -> np.ndarray:
        """As SegmentSet.append."""
        n = row_ids.shape[0]
        buckets = np.empty(n, np.int32)
        in_order = sorted_buckets(row_ids, self._slots.num_buckets, buckets)
        assert in_order, "append needs row_ids sorted by bucket"
        growing = self.growing.get(bits)
        fits = growing is not None and (not n or (n <= growing.room and buckets[0] >= growing.last_bucket))
        if not fits and -(-n // self._slots.capacity[bits]) > self._slots.num_free:
            raise Overloaded(
                f"table {self._slots.table!r}: {self._slots.num_used} of {MAX_SLOTS} segments are in use and one is "
                "kept for merges; rows stay hot until a merge frees some; if it lasts, add shards",
                retry_after_ms=1000,
            )
        locations = np.empty(n, np.uint32)
        start = 0
        while start < n:
            builder = self._builder_for(bits, int(buckets[start]))
            part = slice(start, min(n, start + builder.room))
            locations[part] = builder.append(row_ids[part], buckets[part], rows[part], accumulators[part], visits[part])
            self._slots.note_appended(builder)
            start = part.stop
        return locations

    def _builder_for(self, bits: int, bucket: int) -> SegmentBuilder:
        growing = self.growing.get(bits)
        if growing is not None and growing.room and bucket >= growing.last_bucket:
            return growing
        if growing is not None:
            self.keep(growing)
        self.growing[bits] = self.new_builder(bits, self._frozen_step)
        return self.growing[bits]

    def new_builder(self, bits: int, frozen_step: int) -> SegmentBuilder:
        """With room for a whole segment."""
        return self._slots.add_builder(bits, frozen_step, parts=self._spare.pop(bits, None))

    def seal(self) -> None:
        """Ends the segments that grow now. Nothing happens if there are none."""
        for bits in list(self.growing):
            self.keep(self.growing.pop(bits))

    def keep(self, builder: SegmentBuilder) -> None:
        """A segment that grows no more: it waits for its file, or as a small one for others."""
        bits = builder.format.bits
        if builder.num_rows >= self._small_rows(bits):
            self._enqueue(builder)
            return
        self.small.setdefault(bits, []).append(builder)
        if builder.room:  # making and dropping four maps a pass would take as long as all the rest of it
            left = builder.pack()
            self._slots.note_buffer(builder)
            for part in self._spare.pop(bits, ()):
                part.close()
            self._spare[bits] = left

    def _small_rows(self, bits: int) -> int:
        """Segments of fewer rows are small; two of them always fit one segment."""
        return min(self.small_bytes // self._slots.formats[bits].unit_bytes, self._slots.capacity[bits] // 2)

    @property
    def is_scattered(self) -> bool:
        """So many small segments lie in memory that uniting them is worth it: each has bucket_offsets and a slot."""
        return sum(map(len, self.small.values())) > MAX_SCATTERED

    def is_small(self, slot: int) -> bool:
        return any(builder.slot == slot for small in self.small.values() for builder in small)

    def enqueue_small(self) -> None:
        """Small segments get a file too."""
        for small in self.small.values():
            while small:
                self._enqueue(small.pop(0))

    def forget(self, builder: SegmentBuilder) -> None:
        """The builder's rows are gone."""
        small = self.small.get(builder.format.bits, [])
        if builder in small:
            small.remove(builder)

    def close(self) -> None:
        """Gives maps without rows back; builders are the slots' to close."""
        for part in (part for parts in self._spare.values() for part in parts):
            part.close()
        self.growing, self.small, self._spare = {}, {}, {}
