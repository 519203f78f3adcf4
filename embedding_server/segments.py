"""SegmentSet: the frozen rows of one table on one shard, as a set of immutable segments.

The life of a segment:

    growing   append() fills a buffer; it ends with seal(), at 256 MiB or 2^23-1 rows, or when a bucket is lower
    small     of fewer than SMALL_BYTES: stays in memory; those of several passes become one (`unite_small`), until that
              one is large
    large     the buffer waits for its file                     (segment_writer.py)
    written   file on disk, mapped, buffer given back           (segment_file.py, segment_reader.py)
    gone      merged into another, or its last row died: unmapped, file deleted

Who does what:

    segment_slots.py    which segment has which slot; how many rows and bytes
    segment_growth.py   a freeze appends rows: growing and small segments            (segment_builder.py: one of them)
    segment_writer.py   files of large ones
    segment_merge.py    live rows move to another segment, and dead ones go
    segment_rows.py     reading, in every stage
    segment_erasure.py  erased rows go, byte for byte
    this module         what a table calls, and the order of background work

A thaw only marks the row dead; its bytes go when a merge leaves it out, or, of an erased row, in the background.

A segment has rows of one format: the table's frozen_bits, or 8 bits beside 4 for rows that 4 would damage. So a freeze
may fill two growing segments at once, and merges stay within a format: of each, at most segment_merge.MAX_SEGMENTS are
less than half full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import numpy as np

from embedding_server.kernels.locations import MAX_SLOTS
from embedding_server.page_reads import PageReads
from embedding_server.segment_builder import MAX_SEGMENT_BYTES, SegmentBuilder
from embedding_server.segment_erasure import ErasedIds, SegmentErasure
from embedding_server.segment_file import SegmentFormat
from embedding_server.segment_growth import SMALL_BYTES, SegmentGrowth
from embedding_server.segment_merge import IsLive, Moved, SegmentMerges
from embedding_server.segment_reader import MappedSegment
from embedding_server.segment_rows import Part
from embedding_server.segment_slots import SegmentSlots
from embedding_server.segment_writer import SegmentWriter
from embedding_server.store import NUM_BUCKETS

#: Crowded: more segments than this wait for their file though they are not full, or fewer slots than this are free.
MAX_PARTLY_FULL_WAITING, LEAST_FREE_SLOTS = 16, MAX_SLOTS // 4
#: settle_slice's max_bytes, of one table: in a step or re-selection, which go on at once; and before figures are read.
SETTLED_IN_A_STEP_BYTES, SETTLED_IN_A_REPORT_BYTES = 1 << 20, 16 << 20


class SegmentSet:
    """Frozen rows of one table and shard.

    Thread safety: one thread at a time calls everything here; only a file's writing may run in another (`executor`).
    Invariants:
    1. A location stays valid until its row is marked dead or `moved` names its new one, whatever is written meanwhile.
    2. Addresses stay valid until the next open_builder, append, seal, unite_small, write_pending, settle_slice,
       merge_slice, erase_slice, flush or close.
    3. Appends leave one slot free, so that a merge can always start.
    """

    def __init__(
        self,
        directory: Path,
        table_name: str,
        num_buckets: int = NUM_BUCKETS,
        *,
        bits: int,
        dim: int,
        executor: Executor | None = None,
        on_event: Callable[[str], None] = lambda text: None,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        small_bytes: int = SMALL_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` belongs to one shard and may hold several tables; leftovers of this table there are deleted.

        bits: the table's frozen_bits; with 4, rows of 8 bits may be appended too.
        executor: writes files beside the caller, one thread is enough for a shard; None: write_pending writes before it
        returns. small_bytes: of the rows that stay in memory at most, by format; 0: every sealed segment gets a file.
        on_event takes lines for people, from the calling thread.
        """
        self._bits = bits
        self._slots = SegmentSlots(table_name, dim, num_buckets, segment_bytes)
        for wanted in (4, 8) if bits == 4 else (bits,):
            self._slots.add_format(wanted)
        self._reader = self._slots.reader
        self._writer = SegmentWriter(Path(directory), table_name, executor=executor, on_event=on_event, clock=clock)
        self._growth = SegmentGrowth(self._slots, small_bytes, self._writer.enqueue)
        self._merges = SegmentMerges(self._slots, self._growth, self._writer, self._drop, on_event)
        self._erasure = SegmentErasure(
            table_name,
            self._slots.builders,
            self._slots.mapped,
            executor=executor,
            new_path=self.new_path,
            replace=self._replace,
            discard=self._writer.unlink,
            on_event=on_event,
            clock=clock,
        )

    @property
    def formats(self) -> dict[int, SegmentFormat]:
        """By bits; the first is what most rows take."""
        return self._slots.formats

    # Freezing -------------------------------------------------------------------------------------------------------

    def open_builder(self, frozen_step: int = 0) -> None:
        """Starts a freeze pass: what is appended from here on carries this step in its file."""
        self._growth.open_builder(frozen_step)

    def can_append(self, num_rows: int) -> bool:
        """Appending this many rows will find segment slots, whatever their buckets and formats."""
        return self._growth.can_append(num_rows)

    def append(
        self,
        row_ids: np.ndarray,
        rows: np.ndarray,
        accumulators: np.ndarray,
        visits: np.ndarray,
        bits: int | None = None,
    ) -> np.ndarray:
        """Freezes rows: int64[n] sorted by bucket, uint8[n, row_bytes], uint8[n], uint8[n] -> locations uint32[n].

        bits: the format of all of them, one of `formats`; None: the table's own. Calls of one pass and format should go
        up in buckets too: a lower bucket than the last starts a new segment. Overloaded, with nothing changed, when the
        segment slots are used up.
        """
        return self._growth.append(row_ids, rows, accumulators, visits, bits or self._bits)

    def seal(self) -> None:
        """Ends the segments that grow now. Nothing happens if there are none."""
        self._growth.seal()

    # Reading: SegmentCorrupt names the file and block if one is damaged ---------------------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row of the table's frozen_bits."""
        return self.formats[self._bits].row_bytes

    def addresses(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> int64[n]: address of the first byte of each encoded row."""
        return self._reader.addresses(locations)

    def bits_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: bits a value, which say how many bytes an encoded row has."""
        return self._reader.bits_of(locations)

    def place(self, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Locations uint32[n] -> addresses and bits_of, of rows that are read next."""
        return self._reader.place(locations)

    def gather(self, locations: np.ndarray, out: np.ndarray, positions: np.ndarray, mode: int) -> None:
        """out[positions[i]] = the row of locations[i], in the wire dtype `mode` (kernels/wire.py)."""
        self._reader.gather(locations, out, positions, mode)

    def read(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> float32[n, D]."""
        return self._reader.read(locations)

    def read_all(self, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locations uint32[n] -> float32[n, D], encoded accumulators uint8[n], visits uint8[n]: what a thaw needs."""
        return self._reader.read_all(locations)

    def accumulators_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: encoded accumulators; 0 where they are of another optimizer (is_cold)."""
        return self._reader.accumulators_of(locations)

    def visits_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: visits when the row froze, up to 255."""
        return self._reader.visits_of(locations)

    def find_pages(self, locations: np.ndarray, around: int) -> PageReads:
        """Locations uint32[n]: what to read from files for their rows, `around` bytes of the file about each."""
        checks = self._reader.find_unchecked(locations)  # before its blocks are marked as asked for
        return replace(self._reader.find_pages(locations, Part.ROWS, around), checks=checks)

    def mark_dead(self, locations: np.ndarray) -> None:
        """These rows are no longer needed (thawed, or forgotten). Once for each location, after reading it."""
        self._slots.mark_dead(locations)

    # Erasure --------------------------------------------------------------------------------------------------------

    def erase(self, erased: ErasedIds) -> None:
        """Rows that are dead by now, or were: every byte of them goes, wherever it lies, in calls of erase_slice."""
        self.seal()
        self._erasure.add(np.flatnonzero(self._slots.rows).tolist(), erased)

    def erase_slice(self, *, here: bool = False, holds: bool = False) -> bool:
        """A bounded part of that. True: call again; False: nothing can be done now, or nothing is left.

        here: waits for files that the executor writes. holds: the caller is the one that holds the segments, and nobody
        reads them elsewhere now.
        """
        if not self._erasure.slots or (self._slots.is_held and not holds):
            return False
        busy = self._merges.inputs
        if self._writer.writing is not None:
            busy.add(self._writer.writing.slot)
        return self._erasure.slice(busy, here=here)

    @property
    def bytes_erasing(self) -> int:
        """Of segments that may still hold erased rows."""
        return sum(int(self._slots.rows[slot]) * self._slots.format_of(slot).unit_bytes for slot in self._erasure.slots)

    def is_erasing(self, slot: int) -> bool:
        """This one may hold some."""
        return slot in self._erasure.slots

    def is_erasure_stuck(self, slot: int) -> bool:
        """It does, and they cannot be taken out: its file is damaged, or the disk fails."""
        return self._erasure.is_stuck(slot)

    def _replace(self, slot: int, segment: MappedSegment) -> None:
        old = self._slots.mapped[slot]
        self._slots.replace(slot, segment)
        self._writer.unlink(old.path)

    # Cuts and restores (cut.py, restore.py) -------------------------------------------------------------------------

    def hold(self) -> list[int]:
        """Until `release`, every location stays what it is: no segment is united, merged or dropped.

        What grows is sealed, a merge under way ends with what it has copied. Returns the slots with live rows.
        """
        self.seal()
        self._merges.end()
        self._slots.is_held = True
        return self._slots.with_live_rows()

    def release(self) -> None:
        self._slots.is_held = False

    def stage_of(self, slot: int) -> MappedSegment | SegmentBuilder:
        """The file of a segment, or the buffer that it still is in."""
        return self._slots.stage_of(slot)

    def awaits_file(self, slot: int) -> bool:
        """write_pending will make a file of it: it is neither small nor written yet."""
        return slot in self._slots.builders and not self._growth.is_small(slot)

    def is_cold(self, slot: int) -> bool:
        """Its file has accumulators of another optimizer than the table's, which no thaw takes."""
        return self._reader.is_cold(slot)

    def new_path(self) -> Path:
        """For a file that `adopt` will get."""
        return self._writer.new_path()

    def adopt(self, segment: MappedSegment, *, is_cold: bool) -> int:
        """Takes a file of this table over, under a path of new_path; returns its slot. All its rows count as live.

        is_cold: as the property. Overloaded if the slots are used up; the file is the caller's then.
        """
        return self._slots.add_file(segment, is_cold=is_cold)

    # Figures --------------------------------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Segments with rows, in every stage."""
        return int(np.count_nonzero(self._slots.rows))

    @property
    def has_files(self) -> bool:
        """Some rows lie in mapped files, and not only in buffers."""
        return bool(self._slots.mapped)

    @property
    def rows_total(self) -> int:
        return int(self._slots.rows.sum())

    @property
    def rows_dead(self) -> int:
        return int(self._slots.dead.sum())

    @property
    def dead_fraction(self) -> float:
        return self.rows_dead / max(1, self.rows_total)

    @property
    def bytes_used(self) -> int:
        """Bytes of written files plus bytes_in_memory; dead rows included."""
        return sum(self._slots.bytes_by_place())

    @property
    def fixed_bytes(self) -> int:
        """Of bytes_used, at most what the segments take whatever their number of rows."""
        return self._slots.fixed_bytes

    @property
    def bytes_in_memory(self) -> int:
        """Anonymous memory: the buffers of segments that are not written yet."""
        return self._slots.bytes_by_place()[0]

    @property
    def is_write_failing(self) -> bool:
        """The last write failed: freezing more would only move rows from one place in memory to another."""
        return self._writer.is_failing

    # Background work: uniting, writing, merging ---------------------------------------------------------------------

    @property
    def is_being_written(self) -> bool:
        """The executor writes a segment of this set, or soon will: write_pending or erase_slice goes on after it."""
        return self._writer.writing is not None or self._erasure.is_waiting

    @property
    def is_scattered(self) -> bool:
        """So many small segments lie in memory that unite_small is worth it: each has bucket_offsets and a slot."""
        return self._growth.is_scattered

    def unite_small(self, is_live: IsLive, moved: Moved) -> bool:
        """Makes one of the small segments of each format, without the dead rows. False if they are that already."""
        return self._merges.unite_small(is_live, moved)

    def write_pending(self, *, here: bool = False) -> bool:
        """Writes a sealed segment (or starts, or finishes, its writing by the executor); drops a wholly dead segment.

        here: writes before it returns, executor or not. True: something was done, call again. False: nothing can be
        done now, though the executor may be writing or a failed write may wait for its next try.
        """
        dropped = self._drop_dead()
        could_step = self._writer.can_step
        finished = self._writer.step(here=here)
        if finished is not None:
            builder, mapped = finished
            self._slots.replace(builder.slot, mapped)
        return dropped or finished is not None or (could_step and not self._writer.is_failing)

    def wait_for_write(self) -> None:
        """Until what the executor writes, if anything, is done."""
        self._writer.wait()
        self._erasure.wait()

    @property
    def is_crowded(self) -> bool:
        """Background work has fallen behind: segments pile up, and without slots nothing can freeze."""
        partly_full = sum(b.num_rows < self._slots.capacity[b.format.bits] for b in self._writer.waiting)
        return partly_full > MAX_PARTLY_FULL_WAITING or self._slots.num_free < LEAST_FREE_SLOTS

    def settle_slice(self, is_live: IsLive, moved: Moved, max_bytes: int | None = None) -> bool:
        """Does a part of all that is due before it returns: unites, writes, merges. True: call again.

        max_bytes: of rows to write, or to merge, at a time; False also if more of them wait, or if the disk fails.
        """
        if (max_bytes is None or self.bytes_erasing <= max_bytes) and self.erase_slice(here=True):
            return True
        if self.unite_small(is_live, moved):
            return True
        if max_bytes is not None and self._bytes_to_write > max_bytes:
            return False
        if self.write_pending(here=True) or self._writer.wait():
            return True
        if not self.needs_merge() or (max_bytes is not None and self._merges.bytes_to_merge > max_bytes):
            return False
        self.merge_slice(is_live, moved)
        return True

    @property
    def _bytes_to_write(self) -> int:
        writing = [] if self._writer.writing is None else [self._writer.writing]
        return sum(builder.num_rows * builder.format.unit_bytes for builder in (*self._writer.waiting, *writing))

    def flush(self) -> None:
        """Returns when every sealed segment is written, small ones too, or a write fails: for a caller who needs the
        memory now."""
        if not self._slots.is_held:  # a cut takes small ones as they are
            self._growth.enqueue_small()
        while self.write_pending(here=True) or self._writer.wait():
            pass

    def needs_merge(self) -> bool:
        """merge_slice has something to do."""
        return self._merges.is_due

    def merge_slice(self, is_live: IsLive, moved: Moved) -> bool:
        """A bounded part of a merge of files. True: it is over, or there was nothing to do."""
        return self._merges.merge_slice(is_live, moved)

    # Removing -------------------------------------------------------------------------------------------------------

    def _drop_dead(self) -> bool:
        """Drops a segment without a live row, unless something still works on it. True if there was one."""
        dead = self._slots.wholly_dead()
        if not dead or self._slots.is_held:
            return False
        at_work = *self._growth.growing.values(), self._writer.writing, self._merges.output
        busy = {builder.slot for builder in at_work if builder is not None} | self._merges.inputs
        for slot in dead:
            if slot not in busy:
                self._drop(slot)
                return True
        return False

    def _drop(self, slot: int) -> None:
        """Frees the slot with its memory, map and file."""
        segment = self._slots.take_out(slot)
        if isinstance(segment, SegmentBuilder):
            if self.is_erasing(slot):
                segment.wipe()
            self._growth.forget(segment)
            self._writer.discard(segment)
            segment.close()
        elif segment is not None:
            segment.close()
            self._writer.unlink(segment.path)
        self._merges.forget(slot)
        self._erasure.forget(slot)

    @property
    def is_executor_at_work(self) -> bool:
        """It has not done yet what it was given."""
        return self._writer.is_executor_at_work or self._erasure.is_executor_at_work

    def end_writes(self) -> None:
        """The whole set is to go: nothing more is written, and what the executor has written is a leftover."""
        self._erasure.close()
        self._writer.close()

    def drop_one(self) -> bool:
        """Drops some segment with its file: the whole set is to go, and nothing of it is being written. False if there
        is none."""
        slot = next(iter((*self._slots.mapped, *self._slots.builders)), None)
        if slot is not None:
            self._drop(slot)
        return slot is not None

    def remove_leftovers(self) -> None:
        """After close(): deletes what files of the table there are."""
        self._writer.remove_leftovers()

    def close(self) -> None:
        """Ends the write under way and gives all memory and maps back. Written files stay."""
        self.end_writes()
        self._merges.close()
        self._growth.close()
        self._slots.close()
