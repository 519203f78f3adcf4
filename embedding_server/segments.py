"""SegmentSet: the frozen rows of one table on one shard, as a set of immutable segments.

The life of a segment:

    growing (append) -> sealed, in a buffer (seal, or the next bucket is lower, or 256 MiB are full)
        -> written: file on disk, mapped, buffer given back (write_pending)
        -> merged into another one or wholly dead: unmapped, file unlinked (merge_slice, write_pending)

Rows can be read in every stage. A thaw only marks the row dead; the bytes go when a merge leaves it out. With waste =
dead rows + the fixed bytes (header, bucket_offsets) of all segments but one, a merge is due when waste is above 20% of
the bytes or the segments are more than 32. It takes the most wasteful segments (or, for the number, the smallest) whose
live rows fit one new segment, so it holds at most 256 MiB beside them, and copies rows in slices of SLICE_ROWS.

A write that fails (disk full, EIO, read-only) loses nothing: the buffer goes on serving, an event says so, and the
write is tried again after 1 s, then 2, 4, up to 60. `write_failing` tells the table to freeze no more meanwhile.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedding_server.errors import Overloaded, SegmentCorrupt
from embedding_server.kernels import locations as kernels
from embedding_server.kernels.locations import MAX_SLOTS
from embedding_server.segment_builder import MAX_SEGMENT_BYTES, SegmentBuilder, capacity_rows, fixed_bytes
from embedding_server.segment_file import (
    MappedSegment,
    SegmentArrays,
    SegmentFormat,
    open_segment,
    write_segment,
)
from embedding_server.store import NUM_BUCKETS

MAX_SEGMENTS = 32
MAX_WASTE = 0.2
SLICE_ROWS = 16384
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
MAX_EVENTS = 100

#: is_live(row_ids int64[n], locations uint32[n]) -> bool[n]: does the index still point at that location?
IsLive = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: moved(row_ids int64[n], old uint32[n], new uint32[n]): point the index at the new locations
Moved = Callable[[np.ndarray, np.ndarray, np.ndarray], None]

_FILE_NAME = re.compile(r"segment-(\d{10})\.safetensors(\.partial)?")


@dataclass(slots=True)
class _Merge:
    """A merge under way."""

    victims: np.ndarray  # int64[V] segment slots
    offsets: np.ndarray  # int64[V, B+1]
    cursor: np.ndarray  # int64[3], see kernels.locations.next_locations
    output: SegmentBuilder


@dataclass(slots=True)
class _Write:
    """A segment file being written, in the writer's thread or done at once."""

    builder: SegmentBuilder
    done: Future[MappedSegment]


class SegmentSet:
    """Frozen rows of one table and shard.

    Thread safety: one thread at a time calls everything here; only the writing of a file runs in `writer`.
    Invariants:
    1. A location stays valid until its row is marked dead or `moved` names its new one, whatever is written meanwhile.
    2. Addresses stay valid until the next write_pending, merge_slice or close.
    3. Every slot is free, or has exactly one of a builder (growing or sealed) and a mapped file.
    4. One slot is kept free of appends, so that a merge can always start.
    """

    def __init__(
        self,
        directory: Path,
        table_name: str,
        *,
        dim: int,
        bits: int,
        num_buckets: int = NUM_BUCKETS,
        writer: Executor | None = None,
        segment_bytes: int = MAX_SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is this set's alone; segment files that an earlier process left there are deleted.

        writer: one-thread executor that writes files beside the caller; None: write_pending writes before it returns.
        """
        self.format = SegmentFormat(table_name, bits, dim, num_buckets)
        self.row_bytes = self.format.row_bytes
        self.directory = Path(directory)
        self._writer = writer
        self._clock = clock
        self._capacity = capacity_rows(self.format, segment_bytes)
        self._fixed_bytes = fixed_bytes(self.format)
        self._builders: dict[int, SegmentBuilder] = {}
        self._mapped: dict[int, MappedSegment] = {}
        self._rows = np.zeros(MAX_SLOTS, np.int64)
        self._dead = np.zeros(MAX_SLOTS, np.int64)
        self._row_id_bases = np.zeros(MAX_SLOTS, np.int64)
        self._row_bases = np.zeros(MAX_SLOTS, np.int64)
        self._accumulator_bases = np.zeros(MAX_SLOTS, np.int64)
        self._visit_bases = np.zeros(MAX_SLOTS, np.int64)
        self._growing: SegmentBuilder | None = None
        self._frozen_step = 0
        self._pending: deque[SegmentBuilder] = deque()
        self._write: _Write | None = None
        self._merge: _Merge | None = None
        self._retry_at = 0.0
        self._retry_s = 0.0  # 0: the last write went well
        self._next_file = 0
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._remove_leftovers()

    # ---- freezing

    def open_builder(self, frozen_step: int) -> None:
        """Starts a freeze pass: what is appended from here on carries this step in its file."""
        self.seal()
        self._frozen_step = frozen_step

    def append(self, row_ids: np.ndarray, rows: np.ndarray, accumulators: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Freezes rows: int64[n] sorted by bucket, uint8[n, row_bytes], uint8[n], uint8[n] -> locations uint32[n].

        Calls of one pass should go up in buckets too: a lower bucket than the last starts a new segment. Overloaded,
        with nothing changed, when no segment slot is left.
        """
        buckets = np.empty(row_ids.shape[0], np.int32)
        in_order = kernels.sorted_buckets(row_ids, self.format.num_buckets, buckets)
        assert in_order, "append needs row_ids sorted by bucket"
        locations = np.empty(row_ids.shape[0], np.uint32)
        self._check_slots(buckets)
        start = 0
        while start < row_ids.shape[0]:
            builder = self._builder_for(int(buckets[start]))
            part = slice(start, start + builder.room)
            added = builder.append(row_ids[part], buckets[part], rows[part], accumulators[part], visits[part])
            locations[start : start + added.shape[0]] = added
            self._rows[builder.slot] = builder.num_rows
            start += added.shape[0]
        return locations

    def seal(self) -> None:
        """Ends the segment that grows now; it waits for write_pending. Nothing happens if there is none."""
        if self._growing is not None:
            self._pending.append(self._growing)
            self._growing = None

    def _check_slots(self, buckets: np.ndarray) -> None:
        """Overloaded if appending rows of these buckets would take the last free slot, which is a merge's."""
        if not buckets.shape[0]:
            return
        growing = self._growing
        room = growing.room if growing is not None and buckets[0] >= growing.last_bucket else 0
        needed = -(-max(0, buckets.shape[0] - room) // self._capacity)
        if needed and self._slots_used() + needed > MAX_SLOTS - 1:
            raise Overloaded(
                f"table {self.format.table!r}: {self._slots_used()} of {MAX_SLOTS} segments are in use and one is kept "
                "for merges; rows stay hot until a merge frees some; give the table more shards if this lasts",
                retry_after_ms=1000,
            )

    def _builder_for(self, bucket: int) -> SegmentBuilder:
        growing = self._growing
        if growing is not None and (not growing.room or bucket < growing.last_bucket):
            self.seal()
        if self._growing is None:
            self._growing = self._new_builder(self._frozen_step)
        return self._growing

    def _new_builder(self, frozen_step: int) -> SegmentBuilder:
        slot = next(s for s in range(MAX_SLOTS) if s not in self._builders and s not in self._mapped)
        builder = SegmentBuilder(self.format, slot, self._capacity, frozen_step)
        self._builders[slot] = builder
        self._rows[slot] = self._dead[slot] = 0
        self._set_bases(slot, builder.base_addresses())
        return builder

    def _set_bases(self, slot: int, addresses: tuple[int, int, int, int]) -> None:
        bases = (self._row_id_bases, self._row_bases, self._accumulator_bases, self._visit_bases)
        for base, address in zip(bases, addresses, strict=True):
            base[slot] = address

    # ---- reading

    def addresses(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> int64[n]: address of the first byte of each encoded row."""
        out = np.empty(locations.shape[0], np.int64)
        kernels.addresses_of(locations, self._row_bases, self.row_bytes, out)
        return out

    def accumulators_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: encoded accumulators."""
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_bytes(locations, self._accumulator_bases, out)
        return out

    def visits_of(self, locations: np.ndarray) -> np.ndarray:
        """Locations uint32[n] -> uint8[n]: visits when the row froze, up to 255."""
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_bytes(locations, self._visit_bases, out)
        return out

    def mark_dead(self, locations: np.ndarray) -> None:
        """These rows are no longer read (thawed or forgotten). Once for each location, after reading them."""
        kernels.count_slots(locations, self._dead)

    # ---- figures

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

    def bytes_used(self) -> int:
        """File bytes of written segments plus bytes_buffered(); dead rows included."""
        return sum(segment.size_bytes for segment in self._mapped.values()) + self.bytes_buffered()

    def bytes_buffered(self) -> int:
        """Anonymous memory of segments that are not written yet."""
        return sum(builder.committed_bytes() for builder in self._builders.values())

    @property
    def write_failing(self) -> bool:
        """The last write failed: freezing more only moves rows from one place in memory to another."""
        return self._retry_s > 0

    @property
    def has_pending(self) -> bool:
        """A sealed segment waits to be written, or is being written."""
        return bool(self._pending) or self._write is not None

    def take_events(self) -> list[str]:
        """What an operator should know, oldest first; each is handed out once."""
        events = list(self._events)
        self._events.clear()
        return events

    def _slots_used(self) -> int:
        return len(self._builders) + len(self._mapped)

    # ---- writing

    def write_pending(self) -> bool:
        """Writes the next sealed segment (or starts, or finishes, its writing by `writer`); drops wholly dead segments.

        True: call again, more is pending. False also while a failed write waits for its next try.
        """
        self._drop_dead()
        if self._write is None:
            if not self._pending or self._clock() < self._retry_at:
                return False
            self._start_write(self._pending.popleft())
        write = self._write
        assert write is not None
        if write.done.done():
            self._write = None
            self._finish_write(write)
        return self.has_pending and not self.write_failing

    def _start_write(self, builder: SegmentBuilder) -> None:
        path = self.directory / f"segment-{self._next_file:010d}.safetensors"
        self._next_file += 1
        arguments = (path, self.format, builder.frozen_step, builder.arrays())
        if self._writer is not None:
            self._write = _Write(builder, self._writer.submit(_write_and_map, *arguments))
            return
        done: Future[MappedSegment] = Future()
        try:
            done.set_result(_write_and_map(*arguments))
        except (OSError, SegmentCorrupt) as error:
            done.set_exception(error)
        self._write = _Write(builder, done)

    def _finish_write(self, write: _Write) -> None:
        try:
            mapped = write.done.result()
        except (OSError, SegmentCorrupt) as error:
            self._write_failed(write.builder, error)
            return
        if self._retry_s:
            self._events.append(f"table {self.format.table!r}: segments are written again under {self.directory}")
        self._retry_s = self._retry_at = 0.0
        slot = write.builder.slot
        del self._builders[slot]
        self._mapped[slot] = mapped
        self._set_bases(slot, _mapped_addresses(mapped.arrays))
        write.builder.close()

    def _write_failed(self, builder: SegmentBuilder, error: Exception) -> None:
        self._pending.appendleft(builder)
        first = not self._retry_s
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s) if self._retry_s else FIRST_RETRY_S
        self._retry_at = self._clock() + self._retry_s
        if first:
            self._events.append(
                f"table {self.format.table!r}: cannot write a segment of {builder.num_rows} rows under "
                f"{self.directory}: {error}; {self.bytes_buffered()} bytes stay in memory and are tried again; free or "
                "repair the disk"
            )

    # ---- merging

    def needs_merge(self) -> bool:
        """merge_slice has something to do. Not while segments wait to be written: that bounds the memory of merges."""
        return self._merge is not None or self._plan_merge().shape[0] > 0

    def merge_slice(self, is_live: IsLive, moved: Moved) -> bool:
        """Copies up to SLICE_ROWS rows of the merge under way, starting one if it is due. True: nothing more to do.

        Calls is_live once, then moved once if any row was live. After the last slice the merged segments are gone.
        """
        if self._merge is None:
            victims = self._plan_merge()
            if not victims.shape[0]:
                return True
            self._merge = self._start_merge(victims)
        merge = self._merge
        old = np.empty(SLICE_ROWS, np.uint32)
        old = old[: kernels.next_locations(merge.victims, merge.offsets, merge.cursor, old)]
        self._move_live(merge.output, old, is_live, moved)
        if old.shape[0] == SLICE_ROWS:
            return False
        self._finish_merge(merge)
        return True

    def _plan_merge(self) -> np.ndarray:
        """Slots int64[V] of the segments to merge now; empty when none are due or none would gain."""
        none = np.empty(0, np.int64)
        if self._pending or self._write is not None or not self._mapped or self._slots_used() >= MAX_SLOTS:
            return none
        slots = np.fromiter(self._mapped, np.int64, len(self._mapped))
        rows, dead = self._rows[slots], self._dead[slots]
        total = rows * self.format.unit_bytes + self._fixed_bytes
        waste = dead * self.format.unit_bytes + self._fixed_bytes
        if waste.sum() - self._fixed_bytes > MAX_WASTE * total.sum():
            order = np.argsort(-waste / total, kind="stable")
            order = order[: max(2, int(np.count_nonzero(waste > MAX_WASTE * total)))]
        elif slots.shape[0] > MAX_SEGMENTS:
            order = np.argsort(rows - dead, kind="stable")
        else:
            return none
        order = order[np.cumsum((rows - dead)[order]) <= self._capacity]
        gains = order.shape[0] > 1 or bool(dead[order].any())
        return slots[order] if gains else none

    def _start_merge(self, victims: np.ndarray) -> _Merge:
        offsets = np.stack([self._mapped[int(slot)].arrays.bucket_offsets for slot in victims]).astype(np.int64)
        frozen_step = max(self._mapped[int(slot)].frozen_step for slot in victims)
        return _Merge(victims, offsets, np.zeros(3, np.int64), self._new_builder(frozen_step))

    def _move_live(self, output: SegmentBuilder, old: np.ndarray, is_live: IsLive, moved: Moved) -> None:
        row_ids = np.empty(old.shape[0], np.int64)
        kernels.gather_row_ids(old, self._row_id_bases, row_ids)
        live = is_live(row_ids, old)
        row_ids, old = row_ids[live], old[live]
        if not old.shape[0]:
            return
        rows = np.empty((old.shape[0], self.row_bytes), np.uint8)
        kernels.gather_rows(old, self._row_bases, rows)
        buckets = np.empty(old.shape[0], np.int32)
        kernels.sorted_buckets(row_ids, self.format.num_buckets, buckets)
        new = output.append(row_ids, buckets, rows, self.accumulators_of(old), self.visits_of(old))
        self._rows[output.slot] = output.num_rows
        moved(row_ids, old, new)
        self.mark_dead(old)

    def _finish_merge(self, merge: _Merge) -> None:
        self._merge = None
        for slot in merge.victims.tolist():
            self._drop(slot)
        if merge.output.num_rows:
            self._pending.append(merge.output)
        else:
            self._drop(merge.output.slot)

    # ---- removing

    def _drop_dead(self) -> None:
        """Drops segments without a live row, unless something still works on them."""
        busy = set() if self._merge is None else {self._merge.output.slot, *self._merge.victims.tolist()}
        busy |= set() if self._growing is None else {self._growing.slot}
        busy |= set() if self._write is None else {self._write.builder.slot}
        for slot in np.flatnonzero((self._rows > 0) & (self._dead >= self._rows)).tolist():
            if slot not in busy:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        """Frees the slot with its memory, map and file."""
        self._rows[slot] = self._dead[slot] = 0
        self._set_bases(slot, (0, 0, 0, 0))
        builder = self._builders.pop(slot, None)
        if builder is not None:
            if builder in self._pending:
                self._pending.remove(builder)
            builder.close()
        mapped = self._mapped.pop(slot, None)
        if mapped is not None:
            mapped.close()
            self._unlink(mapped.path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._events.append(
                f"table {self.format.table!r}: cannot delete {path}: {error}; nothing uses its rows any more: delete it"
            )

    def _remove_leftovers(self) -> None:
        """Segment files of an earlier process: nothing points at their rows once that process is gone."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if _FILE_NAME.fullmatch(path.name):
                self._unlink(path)

    def close(self) -> None:
        """Ends the write under way and gives all memory and maps back. Written files stay."""
        if self._write is not None:
            with contextlib.suppress(OSError, SegmentCorrupt):
                self._write.done.result().close()
            self._write.builder.close()
        for builder in self._builders.values():
            builder.close()
        for segment in self._mapped.values():
            segment.close()
        self._builders, self._mapped, self._pending = {}, {}, deque()
        self._growing = self._write = self._merge = None
        self._rows[:] = self._dead[:] = 0


def _write_and_map(path: Path, fmt: SegmentFormat, frozen_step: int, arrays: SegmentArrays) -> MappedSegment:
    """Runs in the writer's thread: the buffer is sealed, so nobody writes to `arrays`."""
    write_segment(path, fmt, frozen_step, arrays)
    return open_segment(path, verify=False)


def _mapped_addresses(arrays: SegmentArrays) -> tuple[int, int, int, int]:
    parts = (arrays.row_ids, arrays.rows, arrays.accumulators, arrays.visits)
    return tuple(int(part.ctypes.data) for part in parts)  # type: ignore[return-value]
