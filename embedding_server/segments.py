"""SegmentSet: the frozen rows of one table on one shard, as a set of immutable segments.

The life of a segment:

    growing   append() fills a buffer; it ends with seal(), at 256 MiB or 2^23-1 rows, or when a bucket is lower
    sealed    the buffer waits for its file                     (segment_builder.py, segment_writer.py)
    written   file on disk, mapped, buffer given back           (segment_file.py, segment_reader.py)
    gone      merged into another (segment_merge.py), or its last row died: unmapped, file deleted

Rows can be read in every stage. A thaw only marks the row dead; its bytes go when a merge leaves it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from embedding_server.errors import Overloaded
from embedding_server.kernels import locations as kernels
from embedding_server.kernels.locations import MAX_SLOTS
from embedding_server.segment_builder import MAX_SEGMENT_BYTES, SegmentBuilder, capacity_rows, fixed_bytes
from embedding_server.segment_file import SegmentFormat
from embedding_server.segment_merge import Merge, plan_merge
from embedding_server.segment_reader import MappedSegment
from embedding_server.segment_writer import SegmentWriter
from embedding_server.store import NUM_BUCKETS

#: is_live(row_ids int64[n], locations uint32[n]) -> bool[n]: does the index still point at that location?
IsLive = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: moved(row_ids int64[n], old uint32[n], new uint32[n]): point the index at the new locations
Moved = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class SegmentSet:
    """Frozen rows of one table and shard.

    Thread safety: one thread at a time calls everything here; only a file's writing may run in another (`executor`).
    Invariants:
    1. A location stays valid until its row is marked dead or `moved` names its new one, whatever is written meanwhile.
    2. Addresses stay valid until the next write_pending, merge_slice or close.
    3. A segment slot is free, or has exactly one of a builder (growing or sealed) and a mapped file.
    4. Appends leave one slot free, so that a merge can always start.
    """

    def __init__(
        self,
        directory: Path,
        table_name: str,
        row_bytes: int,
        num_buckets: int = NUM_BUCKETS,
        *,
        bits: int,
        dim: int,
        executor: Executor | None = None,
        on_event: Callable[[str], None] = lambda text: None,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` belongs to one shard and may hold several tables; leftovers of this table there are deleted.

        executor: writes files beside the caller, one thread is enough for a shard; None: write_pending writes before it
        returns. on_event takes lines for people, from the calling thread.
        """
        self.format = SegmentFormat(table_name, bits, dim, num_buckets)
        assert row_bytes == self.format.row_bytes, f"row_bytes={row_bytes} does not fit dim={dim}, bits={bits}"
        self.row_bytes = row_bytes
        self._capacity = capacity_rows(self.format, segment_bytes)
        self._fixed_bytes = fixed_bytes(self.format)
        self._builders: dict[int, SegmentBuilder] = {}
        self._mapped: dict[int, MappedSegment] = {}
        self._rows = np.zeros(MAX_SLOTS, np.int64)
        self._dead = np.zeros(MAX_SLOTS, np.int64)
        # Base addresses by slot of row_ids, rows, accumulators and visits; kernels follow locations through them.
        self._bases = np.zeros((4, MAX_SLOTS), np.int64)
        self._growing: SegmentBuilder | None = None
        self._frozen_step = 0
        self._writer = SegmentWriter(Path(directory), self.format, executor=executor, on_event=on_event, clock=clock)
        self._merge: Merge | None = None

    # Freezing -------------------------------------------------------------------------------------------------------

    def open_builder(self, frozen_step: int = 0) -> None:
        """Starts a freeze pass: what is appended from here on carries this step in its file."""
        self.seal()
        self._frozen_step = frozen_step

    def can_append(self, num_rows: int) -> bool:
        """Appending this many rows will find a segment slot, whatever their buckets."""
        segments = -(-num_rows // self._capacity)
        return num_rows == 0 or len(self._builders) + len(self._mapped) + segments <= MAX_SLOTS - 1

    def append(self, row_ids: np.ndarray, rows: np.ndarray, accumulators: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Freezes rows: int64[n] sorted by bucket, uint8[n, row_bytes], uint8[n], uint8[n] -> locations uint32[n].

        Calls of one pass should go up in buckets too: a lower bucket than the last starts a new segment. Overloaded,
        with nothing changed, when the segment slots are used up.
        """
        n = row_ids.shape[0]
        buckets = np.empty(n, np.int32)
        in_order = kernels.sorted_buckets(row_ids, self.format.num_buckets, buckets)
        assert in_order, "append needs row_ids sorted by bucket"
        growing = self._growing
        fits = growing is not None and (not n or (n <= growing.room and buckets[0] >= growing.last_bucket))
        if not fits and not self.can_append(n):
            used = len(self._builders) + len(self._mapped)
            raise Overloaded(
                f"table {self.format.table!r}: {used} of {MAX_SLOTS} segments are in use and one is kept for merges; "
                "rows stay hot until a merge frees some; if it lasts, add shards",
                retry_after_ms=1000,
            )
        locations = np.empty(n, np.uint32)
        start = 0
        while start < n:
            builder = self._builder_for(int(buckets[start]))
            part = slice(start, min(n, start + builder.room))
            locations[part] = builder.append(row_ids[part], buckets[part], rows[part], accumulators[part], visits[part])
            self._rows[builder.slot] = builder.num_rows
            start = part.stop
        return locations

    def seal(self) -> None:
        """Ends the segment that grows now; it waits for write_pending. Nothing happens if there is none."""
        if self._growing is not None:
            self._writer.enqueue(self._growing)
            self._growing = None

    def _builder_for(self, bucket: int) -> SegmentBuilder:
        growing = self._growing
        if growing is not None and growing.room and bucket >= growing.last_bucket:
            return growing
        self.seal()
        self._growing = self._new_builder(self._frozen_step)
        return self._growing

    def _new_builder(self, frozen_step: int) -> SegmentBuilder:
        slot = next(s for s in range(MAX_SLOTS) if s not in self._builders and s not in self._mapped)
        builder = SegmentBuilder(self.format, slot, self._capacity, frozen_step)
        self._builders[slot] = builder
        self._bases[:, slot] = builder.base_addresses()
        return builder

    # Reading --------------------------------------------------------------------------------------------------------

    def addresses(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> int64[n]: address of the first byte of each encoded row."""
        out = np.empty(locations.shape[0], np.int64)
        kernels.addresses_of(locations, self._bases[1], self.row_bytes, out)
        return out

    def accumulators_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: encoded accumulators."""
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_bytes(locations, self._bases[2], out)
        return out

    def visits_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: visits when the row froze, up to 255."""
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_bytes(locations, self._bases[3], out)
        return out

    def mark_dead(self, locations: np.ndarray) -> None:
        """These rows are no longer needed (thawed, or forgotten). Once for each location, after reading it."""
        kernels.count_slots(locations, self._dead)

    # Figures --------------------------------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Segments with rows, in every stage."""
        return int(np.count_nonzero(self._rows))

    @property
    def rows_total(self) -> int:
        return int(self._rows.sum())

    @property
    def rows_dead(self) -> int:
        return int(self._dead.sum())

    @property
    def dead_fraction(self) -> float:
        return self.rows_dead / max(1, self.rows_total)

    @property
    def bytes_used(self) -> int:
        """Bytes of written files plus bytes_in_memory; dead rows included."""
        return sum(segment.size_bytes for segment in self._mapped.values()) + self.bytes_in_memory

    @property
    def bytes_in_memory(self) -> int:
        """Anonymous memory: the buffers of segments that are not written yet."""
        return sum(builder.committed_bytes() for builder in self._builders.values())

    @property
    def is_write_failing(self) -> bool:
        """The last write failed: freezing more would only move rows from one place in memory to another."""
        return self._writer.is_failing

    # Writing --------------------------------------------------------------------------------------------------------

    def write_pending(self) -> bool:
        """Writes a sealed segment (or starts, or finishes, its writing by the executor); drops a wholly dead segment.

        True: something was done, call again. False: nothing can be done now, though the executor may be writing or a
        failed write may wait for its next try.
        """
        dropped = self._drop_dead()
        could_step = self._writer.can_step
        finished = self._writer.step()
        if finished is not None:
            builder, mapped = finished
            del self._builders[builder.slot]
            self._mapped[builder.slot] = mapped
            parts = mapped.arrays
            self._bases[:, builder.slot] = [
                part.ctypes.data for part in (parts.row_ids, parts.rows, parts.accumulators, parts.visits)
            ]
            builder.close()
        return dropped or (could_step and not self._writer.is_failing)

    def flush(self) -> None:
        """Returns when every sealed segment is written, or a write fails: for a caller who needs the memory now."""
        while self.write_pending() or self._writer.wait():
            pass

    # Merging --------------------------------------------------------------------------------------------------------

    def needs_merge(self) -> bool:
        """merge_slice has something to do. No merge starts while segments wait to be written, which bounds memory."""
        return self._merge is not None or self._plan_merge().shape[0] > 0

    def merge_slice(self, is_live: IsLive, moved: Moved) -> bool:
        """Copies the next rows (at most SLICE_ROWS) of the merge under way, or starts the merge that is due.

        Calls is_live at most once, then moved at most once. When all is copied, each slice drops one merged segment,
        because deleting a file of 256 MiB takes tens of ms. True: the merge is over, and the new segment waits for
        write_pending; or there was nothing to do.
        """
        if self._merge is None:
            slots = self._plan_merge()
            if not slots.shape[0]:
                return True
            self._merge = self._start_merge(slots)
        merge = self._merge
        if not merge.is_copied:
            self._copy_live(merge.output, merge.next_slice(), is_live, moved)
            return False
        self._drop(merge.left.pop())
        if merge.left:
            return False
        self._merge = None
        if merge.output.num_rows:
            self._writer.enqueue(merge.output)
        else:
            self._drop(merge.output.slot)
        return True

    def _plan_merge(self) -> np.ndarray:
        """Slots int64[V] of the segments to merge now."""
        slots = np.fromiter(self._mapped, np.int64, len(self._mapped))
        if self._writer.has_pending or not slots.shape[0] or len(self._builders) + slots.shape[0] >= MAX_SLOTS:
            return slots[:0]
        unit_bytes = self.format.unit_bytes
        return slots[plan_merge(self._rows[slots], self._dead[slots], unit_bytes, self._fixed_bytes, self._capacity)]

    def _start_merge(self, slots: np.ndarray) -> Merge:
        merged = [self._mapped[slot] for slot in slots.tolist()]
        offsets = np.stack([segment.arrays.bucket_offsets for segment in merged]).astype(np.int64)
        return Merge(slots, offsets, self._new_builder(max(segment.frozen_step for segment in merged)))

    def _copy_live(self, output: SegmentBuilder, old: np.ndarray, is_live: IsLive, moved: Moved) -> None:
        row_ids = np.empty(old.shape[0], np.int64)
        kernels.gather_row_ids(old, self._bases[0], row_ids)
        live = is_live(row_ids, old)
        row_ids, old = row_ids[live], old[live]
        if not old.shape[0]:
            return
        rows = np.empty((old.shape[0], self.row_bytes), np.uint8)
        kernels.gather_rows(old, self._bases[1], rows)
        buckets = np.empty(old.shape[0], np.int32)
        kernels.sorted_buckets(row_ids, self.format.num_buckets, buckets)
        new = output.append(row_ids, buckets, rows, self.accumulators_of(old), self.visits_of(old))
        self._rows[output.slot] = output.num_rows
        moved(row_ids, old, new)
        self.mark_dead(old)

    # Removing -------------------------------------------------------------------------------------------------------

    def _drop_dead(self) -> bool:
        """Drops a segment without a live row, unless something still works on it. True if there was one."""
        dead = np.flatnonzero((self._rows > 0) & (self._dead >= self._rows)).tolist()
        if not dead:
            return False
        busy = {builder.slot for builder in (self._growing, self._writer.writing) if builder is not None}
        if self._merge is not None:
            busy |= {self._merge.output.slot, *self._merge.left}
        for slot in dead:
            if slot not in busy:
                self._drop(slot)
                return True
        return False

    def _drop(self, slot: int) -> None:
        """Frees the slot with its memory, map and file."""
        self._rows[slot] = self._dead[slot] = 0
        self._bases[:, slot] = 0
        builder = self._builders.pop(slot, None)
        if builder is not None:
            self._writer.discard(builder)
            builder.close()
        mapped = self._mapped.pop(slot, None)
        if mapped is not None:
            mapped.close()
            self._writer.unlink(mapped.path)

    def close(self) -> None:
        """Ends the write under way and gives all memory and maps back. Written files stay."""
        self._writer.close()
        for builder in self._builders.values():
            builder.close()
        for mapped in self._mapped.values():
            mapped.close()
        self._builders, self._mapped = {}, {}
        self._growing = self._merge = None
        self._rows[:] = self._dead[:] = 0
        self._bases[:] = 0
