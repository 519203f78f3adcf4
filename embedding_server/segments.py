"""SegmentSet: the frozen rows of one table on one shard, as a set of immutable segments.

The life of a segment:

    growing   append() fills a buffer; it ends with seal(), at 256 MiB or 2^23-1 rows, or when a bucket is lower
    small     of fewer than SMALL_BYTES: stays in memory; those of several passes become one (`unite_small`), until that
              one is large                                      (segment_builder.py)
    large     the buffer waits for its file                     (segment_writer.py)
    written   file on disk, mapped, buffer given back           (segment_file.py, segment_reader.py)
    gone      merged into another (segment_merge.py), or its last row died: unmapped, file deleted

Rows can be read in every stage, through segment_rows.py. A thaw only marks the row dead; its bytes go when a merge
leaves it out, or, of an erased row, in the background (segment_erasure.py).

Why small ones get no file. A file costs its two fsyncs, a rename, a map and, once merged, its deletion: some 10 ms, as
much as copying 100,000 rows. Where 13 tables on each of 2 shards freeze a few hundred rows at each of 31 re-selections
(examples/movielens.yaml), files of every pass took two thirds of the shards' time and the training a quarter longer.
Uniting copies a row once for each pass until its segment is large: at most SMALL_BYTES a pass, format and table.

A segment has rows of one format: the table's frozen_bits, or 8 bits beside 4 for rows that 4 would damage. So a freeze
may fill two growing segments at once, and merges stay within a format: of each, at most segment_merge.MAX_SEGMENTS are
less than half full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from embedding_server.errors import Overloaded, SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.kernels import locations as kernels
from embedding_server.kernels.locations import MAX_SLOTS, SLOT_SHIFT
from embedding_server.page_reads import PageReads
from embedding_server.segment_builder import (
    MAX_SEGMENT_BYTES,
    Parts,
    SegmentBuilder,
    capacity_rows,
    fixed_bytes,
    packed_parts,
)
from embedding_server.segment_erasure import ErasedIds, SegmentErasure
from embedding_server.segment_file import SegmentFormat
from embedding_server.segment_merge import Merge, plan_merge
from embedding_server.segment_reader import MappedSegment
from embedding_server.segment_rows import Part, SegmentRows
from embedding_server.segment_writer import SegmentWriter
from embedding_server.store import NUM_BUCKETS

#: is_live(row_ids int64[n], locations uint32[n]) -> bool[n]: does the index still point at that location?
IsLive = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: moved(row_ids int64[n], old uint32[n], new uint32[n]): point the index at the new locations
Moved = Callable[[np.ndarray, np.ndarray, np.ndarray], None]

#: Crowded: more segments than this wait for their file though they are not full, or fewer slots than this are free.
MAX_PARTLY_FULL_WAITING, LEAST_FREE_SLOTS = 16, MAX_SLOTS // 4
#: Rows of a segment of fewer bytes are copied in memory, in less than 1 ms, rather than get a file of their own.
SMALL_BYTES = 256 << 10
#: settle_slice's max_bytes, of one table: in a step or re-selection, which go on at once; and before figures are read.
SETTLED_IN_A_STEP_BYTES, SETTLED_IN_A_REPORT_BYTES = 1 << 20, 16 << 20
MAX_SCATTERED = 4  # at more small segments than this it is worth to make one of them also between two re-selections


class SegmentSet:
    """Frozen rows of one table and shard.

    Thread safety: one thread at a time calls everything here; only a file's writing may run in another (`executor`).
    Invariants:
    1. A location stays valid until its row is marked dead or `moved` names its new one, whatever is written meanwhile.
    2. Addresses stay valid until the next open_builder, append, seal, unite_small, write_pending, settle_slice,
       merge_slice, erase_slice, flush or close.
    3. A segment slot is free, or has exactly one of a builder (growing, small or large) and a mapped file.
    4. Appends leave one slot free, so that a merge can always start.
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
        self._table, self._bits, self._dim, self._num_buckets = table_name, bits, dim, num_buckets
        self._segment_bytes, self._small_bytes = segment_bytes, small_bytes
        self.formats: dict[int, SegmentFormat] = {}  #: by bits; the first is what most rows take
        self._capacity: dict[int, int] = {}
        self._small: dict[int, list[SegmentBuilder]] = {}  # sealed, packed, by bits
        self._small_rows: dict[int, int] = {}
        for wanted in (4, 8) if bits == 4 else (bits,):
            self._add_format(wanted)
        self._builders: dict[int, SegmentBuilder] = {}
        self._mapped: dict[int, MappedSegment] = {}
        self._rows = np.zeros(MAX_SLOTS, np.int64)
        self._dead = np.zeros(MAX_SLOTS, np.int64)
        self._bytes: tuple[int, int] | None = None  # in memory and in files; None: to be summed up
        self._damaged: set[int] = set()  # slots of files that a merge could not read
        self._cold: set[int] = set()  # slots of files with accumulators of another optimizer
        self._is_held = False
        self._reader = SegmentRows(dim)
        self._growing: dict[int, SegmentBuilder] = {}  # by bits
        self._spare: dict[int, Parts] = {}  # by bits: maps without memory for the next builder
        self._frozen_step = 0
        self._writer = SegmentWriter(Path(directory), table_name, executor=executor, on_event=on_event, clock=clock)
        self._merge: Merge | None = None
        self._erasure = SegmentErasure(
            table_name,
            self._builders,
            self._mapped,
            executor=executor,
            new_path=self.new_path,
            replace=self._replace,
            discard=self._writer.unlink,
            on_event=on_event,
            clock=clock,
        )
        self._on_event = on_event

    def _add_format(self, bits: int) -> None:
        fmt = self.formats[bits] = SegmentFormat(self._table, bits, self._dim, self._num_buckets)
        self._capacity[bits], self._small[bits] = capacity_rows(fmt, self._segment_bytes), []
        # Two small ones always fit one segment.
        self._small_rows[bits] = min(self._small_bytes // fmt.unit_bytes, self._capacity[bits] // 2)

    # Freezing -------------------------------------------------------------------------------------------------------

    def open_builder(self, frozen_step: int = 0) -> None:
        """Starts a freeze pass: what is appended from here on carries this step in its file."""
        self.seal()
        self._frozen_step = frozen_step

    def can_append(self, num_rows: int) -> bool:
        """Appending this many rows will find segment slots, whatever their buckets and formats."""
        if num_rows == 0:
            return True
        segments = -(-num_rows // min(self._capacity.values())) + len(self.formats) - 1
        return segments <= self._free_slots

    @property
    def _free_slots(self) -> int:
        return MAX_SLOTS - 1 - len(self._builders) - len(self._mapped)

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
        bits, n = bits or self._bits, row_ids.shape[0]
        buckets = np.empty(n, np.int32)
        in_order = kernels.sorted_buckets(row_ids, self._num_buckets, buckets)
        assert in_order, "append needs row_ids sorted by bucket"
        growing = self._growing.get(bits)
        fits = growing is not None and (not n or (n <= growing.room and buckets[0] >= growing.last_bucket))
        if not fits and -(-n // self._capacity[bits]) > self._free_slots:
            used = len(self._builders) + len(self._mapped)
            raise Overloaded(
                f"table {self._table!r}: {used} of {MAX_SLOTS} segments are in use and one is kept for merges; "
                "rows stay hot until a merge frees some; if it lasts, add shards",
                retry_after_ms=1000,
            )
        locations = np.empty(n, np.uint32)
        start, self._bytes = 0, None
        while start < n:
            builder = self._builder_for(bits, int(buckets[start]))
            part = slice(start, min(n, start + builder.room))
            locations[part] = builder.append(row_ids[part], buckets[part], rows[part], accumulators[part], visits[part])
            self._rows[builder.slot] = builder.num_rows
            start = part.stop
        return locations

    def seal(self) -> None:
        """Ends the segments that grow now. Nothing happens if there are none."""
        for bits in list(self._growing):
            self._keep(self._growing.pop(bits))

    def _keep(self, builder: SegmentBuilder) -> None:
        """A segment that grows no more: it waits for its file, or as a small one for others."""
        bits, self._bytes = builder.format.bits, None
        if builder.num_rows >= self._small_rows[bits]:
            self._writer.enqueue(builder)
            return
        self._small[bits].append(builder)
        if builder.room:  # making and dropping four maps a pass would take as long as all the rest of it
            left = builder.pack()
            self._reader.set_buffer(builder)
            for part in self._spare.pop(bits, ()):
                part.close()
            self._spare[bits] = left

    def _builder_for(self, bits: int, bucket: int) -> SegmentBuilder:
        growing = self._growing.get(bits)
        if growing is not None and growing.room and bucket >= growing.last_bucket:
            return growing
        if growing is not None:
            self._keep(growing)
        self._growing[bits] = self._new_builder(bits, self._frozen_step)
        return self._growing[bits]

    def _new_builder(self, bits: int, frozen_step: int, num_rows: int | None = None) -> SegmentBuilder:
        """num_rows: that it will have, if that is known."""
        slot = next(s for s in range(MAX_SLOTS) if s not in self._builders and s not in self._mapped)
        fmt = self.formats[bits]
        if num_rows is None:
            builder = SegmentBuilder(fmt, slot, self._capacity[bits], frozen_step, self._spare.pop(bits, None))
        else:
            builder = SegmentBuilder(fmt, slot, num_rows, frozen_step, packed_parts(fmt, num_rows))
        self._builders[slot] = builder
        self._bytes = None
        self._reader.set_buffer(builder)
        return builder

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
        rows, accumulators, visits = self._reader.read_all(locations)
        return rows, self._without_cold(locations, accumulators), visits

    def accumulators_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: encoded accumulators."""
        return self._without_cold(locations, self._reader.bytes_of(locations, Part.ACCUMULATORS))

    def _without_cold(self, locations: np.ndarray, accumulators: np.ndarray) -> np.ndarray:
        if self._cold:
            slots = (locations >> np.uint32(SLOT_SHIFT)) & np.uint32(MAX_SLOTS - 1)
            accumulators[np.isin(slots, list(self._cold))] = 0
        return accumulators

    def visits_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: visits when the row froze, up to 255."""
        return self._reader.bytes_of(locations, Part.VISITS)

    def find_pages(self, locations: np.ndarray, around: int) -> PageReads:
        """Locations uint32[n]: what to read from files for their rows, `around` bytes of the file about each."""
        return self._reader.find_pages(locations, Part.ROWS, around)

    def check_ahead(self, locations: np.ndarray) -> None:
        """Locations uint32[n]: checks the blocks under them, as their first read would; damage is left to that read."""
        self._reader.check_ahead(locations)

    def mark_dead(self, locations: np.ndarray) -> None:
        """These rows are no longer needed (thawed, or forgotten). Once for each location, after reading it."""
        kernels.count_slots(locations, self._dead)

    # Erasure --------------------------------------------------------------------------------------------------------

    def erase(self, erased: ErasedIds) -> None:
        """Rows that are dead by now, or were: every byte of them goes, wherever it lies, in calls of erase_slice."""
        self.seal()
        self._erasure.add(np.flatnonzero(self._rows).tolist(), erased)

    def erase_slice(self, *, here: bool = False, holds: bool = False) -> bool:
        """A bounded part of that. True: call again; False: nothing can be done now, or nothing is left.

        here: waits for files that the executor writes. holds: the caller is the one that holds the segments, and nobody
        reads them elsewhere now.
        """
        if not self._erasure.slots or (self._is_held and not holds):
            return False
        busy = set() if self._merge is None else set(self._merge.left)
        if self._writer.writing is not None:
            busy.add(self._writer.writing.slot)
        return self._erasure.slice(busy, here=here)

    @property
    def bytes_erasing(self) -> int:
        """Of segments that may still hold erased rows."""
        return sum(int(self._rows[slot]) * self._format_of(slot).unit_bytes for slot in self._erasure.slots)

    def is_erasing(self, slot: int) -> bool:
        """This one may hold some."""
        return slot in self._erasure.slots

    def is_erasure_stuck(self, slot: int) -> bool:
        """It does, and they cannot be taken out: its file is damaged, or the disk fails."""
        return self._erasure.is_stuck(slot)

    def _replace(self, slot: int, segment: MappedSegment) -> None:
        old, self._mapped[slot] = self._mapped[slot], segment
        self._reader.set_file(slot, segment)
        self._bytes = None
        old.close()
        self._writer.unlink(old.path)

    def _format_of(self, slot: int) -> SegmentFormat:
        return self._mapped[slot].format if slot in self._mapped else self._builders[slot].format

    # Cuts and restores (cut.py, restore.py) -------------------------------------------------------------------------

    def hold(self) -> list[int]:
        """Until `release`, every location stays what it is: no segment is united, merged or dropped.

        What grows is sealed, a merge under way ends with what it has copied. Returns the slots with live rows.
        """
        self.seal()
        if self._merge is not None:
            self._end_merge()
        self._is_held = True
        return np.flatnonzero(self._rows > self._dead).tolist()

    def release(self) -> None:
        self._is_held = False

    def stage_of(self, slot: int) -> MappedSegment | SegmentBuilder:
        """The file of a segment, or the buffer that it still is in."""
        return self._mapped[slot] if slot in self._mapped else self._builders[slot]

    def awaits_file(self, slot: int) -> bool:
        """write_pending will make a file of it: it is neither small nor written yet."""
        return slot in self._builders and not any(b.slot == slot for of_bits in self._small.values() for b in of_bits)

    def is_cold(self, slot: int) -> bool:
        """Its file has accumulators of another optimizer than the table's, which no thaw takes."""
        return slot in self._cold

    def new_path(self) -> Path:
        """For a file that `adopt` will get."""
        return self._writer.new_path()

    def adopt(self, segment: MappedSegment, *, is_cold: bool) -> int:
        """Takes a file of this table over, under a path of new_path; returns its slot. All its rows count as live.

        is_cold: as the property. Overloaded if the slots are used up; the file is the caller's then.
        """
        if not self._free_slots:
            raise Overloaded(f"table {self._table!r}: {MAX_SLOTS - 1} segments are in use; use more shards", 1000)
        slot = next(s for s in range(MAX_SLOTS) if s not in self._builders and s not in self._mapped)
        bits = segment.format.bits
        if bits not in self.formats:  # the table's frozen_bits were others
            self._add_format(bits)
        self._mapped[slot] = segment
        self._rows[slot], self._dead[slot], self._bytes = segment.num_rows, 0, None
        if is_cold:
            self._cold.add(slot)
        self._reader.set_file(slot, segment)
        return slot

    # Figures --------------------------------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Segments with rows, in every stage."""
        return int(np.count_nonzero(self._rows))

    @property
    def has_files(self) -> bool:
        """Some rows lie in mapped files, and not only in buffers."""
        return bool(self._mapped)

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
        return sum(self._bytes_by_place())

    @property
    def fixed_bytes(self) -> int:
        """Of bytes_used, at most what the segments take whatever their number of rows."""
        formats = [builder.format for builder in self._builders.values()] + [m.format for m in self._mapped.values()]
        return sum(fixed_bytes(fmt) for fmt in formats)

    @property
    def bytes_in_memory(self) -> int:
        """Anonymous memory: the buffers of segments that are not written yet."""
        return self._bytes_by_place()[0]

    def _bytes_by_place(self) -> tuple[int, int]:
        """In memory, in files. Kept until a segment changes, for every Pull that moves a cold row asks
        (Table.record_memory): to sum up each time was a tenth of a small job's shards."""
        if self._bytes is None:
            in_memory = sum(builder.committed_bytes() for builder in self._builders.values())
            self._bytes = in_memory, sum(segment.size_bytes for segment in self._mapped.values())
        return self._bytes

    @property
    def is_write_failing(self) -> bool:
        """The last write failed: freezing more would only move rows from one place in memory to another."""
        return self._writer.is_failing

    # Writing --------------------------------------------------------------------------------------------------------

    @property
    def is_being_written(self) -> bool:
        """The executor writes a segment of this set, or soon will: write_pending or erase_slice goes on after it."""
        return self._writer.writing is not None or self._erasure.is_waiting

    @property
    def is_scattered(self) -> bool:
        """So many small segments lie in memory that unite_small is worth it: each has bucket_offsets and a slot."""
        return sum(map(len, self._small.values())) > MAX_SCATTERED

    def unite_small(self, is_live: IsLive, moved: Moved) -> bool:
        """Makes one of the small segments of each format, without the dead rows. False if they are that already.

        All dead rows, not from a fifth on as with files, so that bytes of small tables depend on rows alone.
        """
        found = False
        if self._is_held:
            return found
        for bits, small in self._small.items():
            is_united = len(small) <= 1 and not any(self._dead[builder.slot] for builder in small)
            if not is_united and len(self._builders) + len(self._mapped) < MAX_SLOTS:
                num_rows = np.cumsum([builder.num_rows for builder in small], dtype=np.int64)
                fitting = int(np.searchsorted(num_rows, self._capacity[bits], side="right"))
                self._unite(small[:fitting], is_live, moved)
                found = True
        return found

    def _unite(self, small: list[SegmentBuilder], is_live: IsLive, moved: Moved) -> None:
        slots = np.array([builder.slot for builder in small], np.int64)
        offsets = np.stack([builder.arrays().bucket_offsets for builder in small]).astype(np.int64)
        old = np.empty(int(offsets[:, -1].sum()), np.uint32)
        kernels.next_locations(slots, offsets, np.zeros(3, np.int64), old)
        row_ids, old = self._live_of(old, is_live)
        if old.shape[0]:
            frozen_step = max(builder.frozen_step for builder in small)
            output = self._new_builder(small[0].format.bits, frozen_step, old.shape[0])
            self._copy(output, row_ids, old, moved)
            self._keep(output)
        for builder in small:
            self._drop(builder.slot)

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
            del self._builders[builder.slot]
            self._mapped[builder.slot] = mapped
            self._reader.set_file(builder.slot, mapped)
            builder.close()
            self._bytes = None
        return dropped or finished is not None or (could_step and not self._writer.is_failing)

    def wait_for_write(self) -> None:
        """Until the write under way, if any, is done."""
        self._writer.wait()

    @property
    def is_crowded(self) -> bool:
        """Background work has fallen behind: segments pile up, and without slots nothing can freeze."""
        partly_full = sum(b.num_rows < self._capacity[b.format.bits] for b in self._writer.waiting)
        return partly_full > MAX_PARTLY_FULL_WAITING or self._free_slots < LEAST_FREE_SLOTS

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
        if not self.needs_merge() or (max_bytes is not None and self._bytes_to_merge > max_bytes):
            return False
        self.merge_slice(is_live, moved)
        return True

    @property
    def _bytes_to_write(self) -> int:
        writing = [] if self._writer.writing is None else [self._writer.writing]
        return sum(builder.num_rows * builder.format.unit_bytes for builder in (*self._writer.waiting, *writing))

    @property
    def _bytes_to_merge(self) -> int:
        """Of the segments of the merge under way or due."""
        slots = self._plan_merge().tolist() if self._merge is None else [*self._merge.left, self._merge.output.slot]
        return int(self._rows[slots].sum()) * max(fmt.unit_bytes for fmt in self.formats.values())

    def flush(self) -> None:
        """Returns when every sealed segment is written, small ones too, or a write fails: for a caller who needs the
        memory now."""
        for small in self._small.values():
            while small and not self._is_held:  # a cut takes them as they are
                self._writer.enqueue(small.pop(0))
        while self.write_pending(here=True) or self._writer.wait():
            pass

    # Merging --------------------------------------------------------------------------------------------------------

    def needs_merge(self) -> bool:
        """merge_slice has something to do. No merge starts while segments wait to be written, which bounds memory."""
        return not self._is_held and (self._merge is not None or self._plan_merge().shape[0] > 0)

    def merge_slice(self, is_live: IsLive, moved: Moved) -> bool:
        """Copies the next rows (at most SLICE_ROWS) of the merge under way, or starts the merge that is due.

        Calls is_live at most once, then moved at most once. When all is copied, each slice drops one merged segment,
        because deleting a file of 256 MiB takes tens of ms. True: the merge is over, and the new segment waits for
        write_pending; or there was nothing to do. A damaged file ends the merge with an event: what was copied is kept,
        and no later merge touches that file.
        """
        if self._merge is None:
            slots = self._plan_merge()
            if not slots.shape[0]:
                return True
            failpoint("merge.begin")
            self._merge = self._start_merge(slots)
        merge = self._merge
        if merge is None:
            return True
        if not merge.is_copied:
            try:
                row_ids, old = self._live_of(merge.next_slice(), is_live)
                self._copy(merge.output, row_ids, old, moved)
            except SegmentCorrupt as error:
                self._note_damage(error)
                self._end_merge()
                return True
            return False
        failpoint("merge.before_drop")
        self._drop(merge.left.pop())
        if merge.left:
            return False
        self._end_merge()
        return True

    def _end_merge(self) -> None:
        assert self._merge is not None
        output, self._merge = self._merge.output, None
        if output.num_rows:
            self._keep(output)
        else:
            self._drop(output.slot)

    def _note_damage(self, error: SegmentCorrupt) -> None:
        self._damaged |= {slot for slot, segment in self._mapped.items() if str(segment.path) == error.path}
        self._on_event(f"table {self._table!r}: {error} Until then no merge touches it, and its other rows are served")

    def _plan_merge(self) -> np.ndarray:
        """Slots int64[V] of the segments to merge now, all of one format."""
        none = np.empty(0, np.int64)
        if self._writer.has_pending or not self._mapped or len(self._builders) + len(self._mapped) >= MAX_SLOTS:
            return none
        for bits, fmt in self.formats.items():
            of_format = [s for s, m in self._mapped.items() if m.format.bits == bits and s not in self._damaged]
            slots = np.array(of_format, np.int64)
            if slots.shape[0]:
                sizes = fmt.unit_bytes, fixed_bytes(fmt), self._capacity[bits]
                chosen = slots[plan_merge(self._rows[slots], self._dead[slots], *sizes)]
                if chosen.shape[0]:
                    return chosen
        return none

    def _start_merge(self, slots: np.ndarray) -> Merge | None:
        """None, with an event, if a file's bucket_offsets are damaged."""
        merged = [self._mapped[slot] for slot in slots.tolist()]
        try:
            for segment in merged:
                segment.check_offsets()
        except SegmentCorrupt as error:
            self._note_damage(error)
            return None
        offsets = np.stack([segment.arrays.bucket_offsets for segment in merged]).astype(np.int64)
        frozen_step = max(segment.frozen_step for segment in merged)
        return Merge(slots, offsets, self._new_builder(merged[0].format.bits, frozen_step))

    def _live_of(self, locations: np.ndarray, is_live: IsLive) -> tuple[np.ndarray, np.ndarray]:
        """row_ids int64[n] and locations uint32[n] of those that are live."""
        self._reader.page_in_if_cold(locations, tuple(Part))  # a page fault after the other takes 10 times as long
        row_ids = self._reader.row_ids_of(locations)
        live = is_live(row_ids, locations)
        return row_ids[live], locations[live]

    def _copy(self, output: SegmentBuilder, row_ids: np.ndarray, old: np.ndarray, moved: Moved) -> None:
        if not old.shape[0]:
            return
        rows = self._reader.encoded_rows(old, output.format.row_bytes)
        buckets = np.empty(old.shape[0], np.int32)
        kernels.sorted_buckets(row_ids, self._num_buckets, buckets)
        new = output.append(row_ids, buckets, rows, self.accumulators_of(old), self.visits_of(old))
        self._rows[output.slot], self._bytes = output.num_rows, None
        failpoint("merge.copied")
        moved(row_ids, old, new)
        self.mark_dead(old)

    # Removing -------------------------------------------------------------------------------------------------------

    def _drop_dead(self) -> bool:
        """Drops a segment without a live row, unless something still works on it. True if there was one."""
        dead = np.flatnonzero((self._rows > 0) & (self._dead >= self._rows)).tolist()
        if not dead or self._is_held:
            return False
        busy = {builder.slot for builder in (*self._growing.values(), self._writer.writing) if builder is not None}
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
        self._bytes = None
        self._damaged.discard(slot)
        self._cold.discard(slot)
        self._reader.clear(slot)
        builder = self._builders.pop(slot, None)
        if builder is not None:
            if self.is_erasing(slot):
                builder.wipe()
            small = self._small[builder.format.bits]
            if builder in small:
                small.remove(builder)
            self._writer.discard(builder)
            builder.close()
        mapped = self._mapped.pop(slot, None)
        if mapped is not None:
            mapped.close()
            self._writer.unlink(mapped.path)
        self._erasure.forget(slot)

    def drop_one(self) -> bool:
        """Drops some segment with its file: the whole set is to go. False if there is none."""
        slot = next(iter((*self._mapped, *self._builders)), None)
        if slot is not None:
            self._drop(slot)
        return slot is not None

    def remove_leftovers(self) -> None:
        """After close(): deletes what files of the table there are."""
        self._writer.remove_leftovers()

    def close(self) -> None:
        """Ends the write under way and gives all memory and maps back. Written files stay."""
        self._erasure.close()
        self._writer.close()
        for builder in self._builders.values():
            builder.close()
        for mapped in self._mapped.values():
            mapped.close()
        for slot in (*self._builders, *self._mapped):
            self._reader.clear(slot)
        self._builders, self._mapped, self._growing, self._merge = {}, {}, {}, None
        for part in (part for parts in self._spare.values() for part in parts):
            part.close()
        self._small, self._spare = {bits: [] for bits in self.formats}, {}
        self._rows[:] = self._dead[:] = 0
        self._bytes = None
