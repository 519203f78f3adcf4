"""SegmentSlots: which segment of a table has which slot, in which stage; how many rows and bytes that makes."""

from __future__ import annotations

import numpy as np

from embedding_server.errors import Overloaded
from embedding_server.kernels import locations as kernels
from embedding_server.kernels.locations import MAX_SLOTS
from embedding_server.segment_builder import Parts, SegmentBuilder, capacity_rows, fixed_bytes, packed_parts
from embedding_server.segment_file import SegmentFormat
from embedding_server.segment_reader import MappedSegment
from embedding_server.segment_rows import SegmentRows


class SegmentSlots:
    """The segments of one table and shard, by slot (kernels/locations.py).

    Thread safety: one thread at a time.
    Invariants:
    1. A slot is free, or has exactly one of a builder (growing, small or large) and a mapped file; `reader` reads that.
    2. Of the rows[slot] rows of a segment, dead[slot] are needed no more. Both are 0 for a free slot.
    """

    def __init__(self, table: str, dim: int, num_buckets: int, segment_bytes: int) -> None:
        """segment_bytes: of a segment's file, at most."""
        self.table, self.num_buckets = table, num_buckets
        self._dim, self._segment_bytes = dim, segment_bytes
        self.formats: dict[int, SegmentFormat] = {}  # by bits; the first is what most rows take
        self.capacity: dict[int, int] = {}  # rows of a segment, by bits
        self.builders: dict[int, SegmentBuilder] = {}
        self.mapped: dict[int, MappedSegment] = {}
        self.rows, self.dead = np.zeros((2, MAX_SLOTS), np.int64)
        self.reader = SegmentRows(dim)
        self.is_held = False  # by a cut or a restore: every location stays what it is
        self._bytes: tuple[int, int] | None = None  # in memory and in files; None: to be summed up

    def add_format(self, bits: int) -> None:
        fmt = self.formats[bits] = SegmentFormat(self.table, bits, self._dim, self.num_buckets)
        self.capacity[bits] = capacity_rows(fmt, self._segment_bytes)

    # Slots ----------------------------------------------------------------------------------------------------------

    @property
    def num_used(self) -> int:
        return len(self.builders) + len(self.mapped)

    @property
    def num_free(self) -> int:
        """Of those that freezing and restores may take; one more is kept, so that a merge can always start."""
        return MAX_SLOTS - 1 - self.num_used

    def stage_of(self, slot: int) -> MappedSegment | SegmentBuilder:
        """The file of a segment, or the buffer that it still is in."""
        return self.mapped[slot] if slot in self.mapped else self.builders[slot]

    def format_of(self, slot: int) -> SegmentFormat:
        return self.stage_of(slot).format

    def with_live_rows(self) -> list[int]:
        return np.flatnonzero(self.rows > self.dead).tolist()

    def wholly_dead(self) -> list[int]:
        """With rows, none of which is live."""
        return np.flatnonzero((self.rows > 0) & (self.dead >= self.rows)).tolist()

    def add_builder(
        self, bits: int, frozen_step: int, num_rows: int | None = None, parts: Parts | None = None
    ) -> SegmentBuilder:
        """num_rows: that it will have, if that is known; else `parts` may be maps for a whole segment of the format."""
        fmt, capacity = self.formats[bits], self.capacity[bits]
        if num_rows is not None:
            capacity, parts = num_rows, packed_parts(fmt, num_rows)
        builder = SegmentBuilder(fmt, self._first_free(), capacity, frozen_step, parts)
        self.builders[builder.slot] = builder
        self.note_buffer(builder)
        return builder

    def add_file(self, segment: MappedSegment, *, is_cold: bool) -> int:
        """A file of a cut, all of whose rows count as live. Returns its slot. Overloaded if none is free.

        is_cold: it has accumulators of another optimizer than the table's.
        """
        if not self.num_free:
            raise Overloaded(f"table {self.table!r}: {MAX_SLOTS - 1} segments are in use; use more shards", 1000)
        slot, bits = self._first_free(), segment.format.bits
        if bits not in self.formats:  # the table's frozen_bits were others
            self.add_format(bits)
        self.mapped[slot] = segment
        self.rows[slot], self.dead[slot], self._bytes = segment.num_rows, 0, None
        self.reader.set_file(slot, segment)
        if is_cold:
            self.reader.mark_cold(slot)
        return slot

    def _first_free(self) -> int:
        return next(slot for slot in range(MAX_SLOTS) if slot not in self.builders and slot not in self.mapped)

    def replace(self, slot: int, segment: MappedSegment) -> MappedSegment | SegmentBuilder:
        """This file, which has the same rows, takes the place of the slot's buffer or file, which is closed."""
        before = self.stage_of(slot)
        self.builders.pop(slot, None)
        self.mapped[slot] = segment
        self.reader.set_file(slot, segment)
        self._bytes = None
        before.close()
        return before

    def note_buffer(self, builder: SegmentBuilder) -> None:
        """The builder has rows, or has them at other addresses, since."""
        self.rows[builder.slot], self._bytes = builder.num_rows, None
        self.reader.set_buffer(builder)

    def note_appended(self, builder: SegmentBuilder) -> None:
        """The builder has more rows since; the others have not moved."""
        self.rows[builder.slot], self._bytes = builder.num_rows, None

    def mark_dead(self, locations: np.ndarray) -> None:
        """Locations uint32[n]: rows that are no longer needed. Once for each."""
        kernels.count_slots(locations, self.dead)

    def take_out(self, slot: int) -> MappedSegment | SegmentBuilder | None:
        """Frees the slot; its segment is the caller's to close. None: it is free already."""
        self.rows[slot] = self.dead[slot] = 0
        self._bytes = None
        self.reader.clear(slot)
        builder, mapped = self.builders.pop(slot, None), self.mapped.pop(slot, None)
        return mapped if builder is None else builder

    def close(self) -> None:
        """Gives the memory and maps of all segments back. Files stay."""
        for slot in (*self.builders, *self.mapped):
            segment = self.take_out(slot)
            assert segment is not None
            segment.close()

    # Figures --------------------------------------------------------------------------------------------------------

    @property
    def fixed_bytes(self) -> int:
        """At most what the segments take whatever their number of rows."""
        return sum(fixed_bytes(self.format_of(slot)) for slot in (*self.builders, *self.mapped))

    def bytes_by_place(self) -> tuple[int, int]:
        """In memory, in files. Kept until a segment changes, for every Pull that moves a cold row asks
        (Table.record_memory): to sum up each time was a tenth of a small job's shards."""
        if self._bytes is None:
            in_memory = sum(builder.committed_bytes() for builder in self.builders.values())
            self._bytes = in_memory, sum(segment.size_bytes for segment in self.mapped.values())
        return self._bytes
