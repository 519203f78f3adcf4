"""TableCut: writes one table as it was when the cut began, in slices, while training goes on.

    rows        waiting IDs, then the rows bucket by bucket, into a hot and a frozen file (snapshot_format.py)
    segments    a link to the file of each segment, or a file of its own for one that is still small

Of a delta the hot file has weights and state of those rows alone that changed since the parent (changes.py); these come
first in each bucket.

A row that is about to change before it is written is copied first (`preserve`, preimages.py): its pre-image is what the
cut has of it. These and what waits for the disk take at most a tenth of the table's hot bytes; beyond, whoever changes
rows writes slices of the cut until there is room. Segments are held (segments.py) until all are linked, so locations
stay what they were.

Thread safety: none; it belongs to the table. Work given to `executor` touches nothing but files and sealed buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from embedding_server.admission import NUM_WAITING_BUCKETS
from embedding_server.changes import Mark
from embedding_server.failpoints import failpoint
from embedding_server.index import FROZEN_BIT, INITIAL, Index
from embedding_server.index_walk import slice_end
from embedding_server.kernels.cut_rows import ABSENT, copy_rows, order_rows
from embedding_server.kernels.locations import MAX_SEGMENT_ROWS, MAX_SLOTS, SLOT_SHIFT
from embedding_server.kernels.visits import has_duplicates
from embedding_server.preimages import PreImages
from embedding_server.segment_reader import MappedSegment
from embedding_server.snapshot_file import ColumnWriter
from embedding_server.snapshot_format import (
    NOT_LIVE,
    FileRecord,
    FrostlineRecord,
    SegmentRecord,
    TableRecord,
    frozen_columns_of,
    frozen_file,
    hot_columns_of,
    hot_file,
)
from embedding_server.snapshot_objects import put_object
from embedding_server.store import NUM_BUCKETS

if TYPE_CHECKING:
    from embedding_server.table import Table

T = TypeVar("T")

#: What a table counts for TableStats and MaskInfo, and a restored one goes on from.
COUNTERS = (
    "rows_ignored", "rows_unfreezable", "rows_default_reads", "moves_frozen", "moves_frozen_idle", "moves_frozen_rank",
    "moves_frozen_limit", "moves_thawed", "moves_thawed_visit", "moves_thawed_rank", "moves_forgotten", "rows_ranked",
    "rows_ranked_before", "rows_erased",
)  # fmt: skip
_SLICE_BYTES, _SLICE_ROWS = 1 << 19, 4096  # of hot rows: gathering 512 KiB takes 0.2 ms
#: Handed to the executor and not yet written, at most: a slice then waits, which also keeps a cut from taking more than
#: a quarter of the shard's thread. Of a large table it is a quarter of the pre-images' bytes, so that both are a tenth.
_LEAST_WAITING_BYTES, _MOST_WAITING_BYTES = 2 << 20, 8 << 20


class TableCut:
    """slice() until is_complete; then record(). The table's rows may be changed after `preserve` of them.

    on_error takes what ends the cut; it must call `abandon` before it returns.
    """

    def __init__(
        self,
        table: Table,
        number: int,
        step: int,
        parent: Mark | None,
        folder: Path,
        objects: Path,
        executor: Executor | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        """At a barrier of `step`. parent: of the table's cut that this one builds on; None: all rows are written.

        OSError, with nothing left behind, if its files cannot be made.
        """
        self._table, self._executor, self._on_error = table, executor, on_error
        self._objects = objects
        self._dtype = np.float32 if table.spec.policy.hot_bits == 32 else np.float16
        table.move_origin_of_heat(step)  # so that the heat of all shards has one origin
        self.mark, self._stamp = table.changes.begin_cut(parent)  # rows with a higher stamp are written
        table.record_memory()
        self._slots = table.segments.hold()
        self._log = PreImages(table, executor)
        self._most_waiting = min(_MOST_WAITING_BYTES, max(_LEAST_WAITING_BYTES, self._log.limit_bytes // 4))
        self._waiting_log = Index(NUM_WAITING_BUCKETS)
        self.bucket = 0  # rows of the buckets below are written
        self._waiting_bucket = 0 if table.waiting is not None else NUM_WAITING_BUCKETS
        self._hot_counts, self._written_counts = np.zeros((2, NUM_BUCKETS + 1), np.int64)
        self._segments: list[SegmentRecord] = []
        self._link: Future[tuple[SegmentRecord, int]] | None = None
        self._files: list[ColumnWriter] = []
        self.is_complete = False
        self.bytes_written = self.rows_written = 0
        try:
            self._offsets = [_bucket_offsets(table.segments.stage_of(slot)) for slot in self._slots]
            self._note_table(step)
            self._create_files(number, folder)
        except BaseException:
            self.abandon()
            raise
        self._rows_work = self._write_all()
        table.cut = self

    def _note_table(self, step: int) -> None:
        """What of the table is no row; copies, for training changes it."""
        table = self._table
        stored = table.segments.rows_total - table.segments.rows_dead
        self._noted: dict[str, Any] = {
            "spec": table.spec,
            "rows_hot": len(table.index) - table.rows_frozen,
            "rows_written": self._count_written(),
            "rows_initial": table.rows_frozen - stored,
            "rows_waiting": len(table.waiting) if table.waiting is not None else 0,
            "decay_steps": step if table.decay is not None else 0,
            "last_step_seen": table.last_step_seen,
            "rate": float(table.rate),
            "frostline": FrostlineRecord.of(table.frostline) if table.frostline is not None else None,
            "has_rare_frozen": table.has_rare_frozen,
            "counters": {name: int(getattr(table, name)) for name in COUNTERS},
        }
        self._decay = table.decay.sums(step) if table.decay is not None and step else np.empty(0)
        self._default = table.default_row.read(), table.default_row.read_state()

    def _count_written(self) -> int:
        table = self._table
        if self._stamp < 0:
            return len(table.index) - table.rows_frozen
        return table.changes.count_above(self._stamp, table.slots.high_water, table.slots.free_slots)

    def _create_files(self, number: int, folder: Path) -> None:
        rows = [int(offsets[-1]) for offsets in self._offsets]
        noted = self._noted
        hot = hot_columns_of(self._table.spec, noted["rows_hot"], noted["rows_written"], noted["decay_steps"])
        frozen = frozen_columns_of(rows, noted["rows_initial"], noted["rows_waiting"])
        self._files.append(ColumnWriter(folder / hot_file(number), hot, self._executor))
        self._files.append(ColumnWriter(folder / frozen_file(number), frozen, self._executor))

    # Before a change ------------------------------------------------------------------------------------------------

    def preserve(self, row_ids: np.ndarray) -> None:
        """Rows int64[n] are about to change, come or go."""
        while self.bucket < NUM_BUCKETS:
            found = self._log.survey(row_ids, self.bucket)
            if not found.row_ids.shape[0]:
                return
            if has_duplicates(found.row_ids):
                row_ids = np.unique(found.row_ids)
            elif self._log.has_room(found):
                self._log.add(found)
                return
            else:
                self._write_slice()

    def preserve_waiting(self, row_ids: np.ndarray, *, halves: bool) -> None:
        """Counts of IDs int64[n] below min_count are about to change; halves: those of all others, too."""
        while self._waiting_bucket < NUM_WAITING_BUCKETS and (
            halves or self._waiting_log.size_bytes > self._log.limit_bytes
        ):
            self._write_slice()
        if self._waiting_bucket < NUM_WAITING_BUCKETS:
            assert self._table.waiting is not None
            new = self._waiting_log.absent_from(row_ids, self._waiting_bucket)
            self._waiting_log.insert(new, self._table.waiting.counts_of(new))

    # Writing --------------------------------------------------------------------------------------------------------

    def slice(self) -> bool:
        """Does a bounded part of what is left. False: nothing can be done now; it is complete or waits for a thread."""
        if self.is_complete or self._waiting_bytes() > self._most_waiting:
            return False
        if self._advance():
            return True
        if self._waiting_bytes():
            return False
        if not self.bytes_written:
            self._complete_files()
            return True
        return self._link_segments()

    def _advance(self) -> bool:
        """A slice of the rows. False: there are no more."""
        is_more = next(self._rows_work, "end") != "end"
        for file in self._files:
            file.hand_over()
        return is_more

    def _waiting_bytes(self) -> int:
        return sum(file.waiting_bytes for file in self._files)

    def write_rows(self) -> None:
        """All rows, before they change all at once."""
        while self.bucket < NUM_BUCKETS:
            self._write_slice()

    def finish(self) -> None:
        """Whatever is left, at once: errors go to on_error."""
        try:
            while not self.is_complete:
                if not self.slice():
                    self._wait()
        except Exception as error:  # as in _write_slice
            self._on_error(error)

    def _write_slice(self) -> None:
        """For one who must not fail because the cut does."""
        try:
            self._advance()
            while self._waiting_bytes() > self._most_waiting:
                self._files[0].wait()
                self._files[1].wait()
        except Exception as error:  # whatever it is, training goes on without this cut
            self._on_error(error)

    def _wait(self) -> None:
        segments = self._table.segments
        if self._link is not None:
            self._link.exception()
        elif self._waiting_bytes():
            for file in self._files:
                file.wait()
        elif not segments.write_pending(here=True) and not segments.erase_slice(here=True, holds=True):
            segments.wait_for_write()

    @property
    def name(self) -> str:
        return self._table.spec.name

    @property
    def is_waiting(self) -> bool:
        """For work of the executor."""
        return self._link is not None or self._waiting_bytes() > 0

    def _write_all(self) -> Iterator[None]:
        """Each step is a slice."""
        while self._waiting_bucket < NUM_WAITING_BUCKETS:
            self._write_waiting()
            yield
        self._waiting_log = Index(NUM_WAITING_BUCKETS)  # its memory goes
        hot = self._files[0]
        rows_at_once = max(1, min(_SLICE_ROWS, _SLICE_BYTES // self._table.hot_row_bytes))
        while self.bucket < NUM_BUCKETS:
            failpoint("cut.rows")
            last = slice_end(self._table.index, self.bucket, rows_at_once)
            hot_ids, is_written = self._begin_buckets(last)
            for start in range(0, hot_ids.shape[0], rows_at_once):
                part = slice(start, start + rows_at_once)
                self._write_hot(hot_ids[part], np.flatnonzero(is_written[part]))
                yield
            self._log.drop(self.bucket, last)
            self.bucket = last
            if not hot_ids.shape[0]:
                yield
        self._log.close()
        hot.append("weight_decay", self._decay)
        hot.append("bucket_offsets", np.cumsum(self._hot_counts).astype(np.uint32))
        hot.append("written_offsets", np.cumsum(self._written_counts).astype(np.uint32))
        for name, row in zip(("default_weights", "default_state"), self._default, strict=True):
            hot.append(name, row[0])

    def _complete_files(self) -> None:
        for file in self._files:
            file.complete()
            self.bytes_written += file.size_bytes

    def _write_waiting(self) -> None:
        assert self._table.waiting is not None
        frozen, bucket = self._files[1], self._waiting_bucket
        row_ids, counts = self._table.waiting.scan(bucket)
        before = self._waiting_log.scan(bucket, bucket + 1)
        kept = self._waiting_log.locate(row_ids)[0] == 0
        waited = before.locations != 0
        frozen.append("waiting_row_ids", np.concatenate([row_ids[kept], before.row_ids[waited]]))
        frozen.append("waiting_counts", np.concatenate([counts[kept], before.locations[waited]]))
        self._waiting_bucket += 1

    def _begin_buckets(self, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Writes what is frozen in the buckets up to `last`; returns the row_ids of what is hot, int64[n], in order,
        and of which of them weights and state are to be written, bool[n]."""
        now, before = self._table.index.scan(self.bucket, last), self._log.scan(self.bucket, last)
        if before.row_ids.shape[0]:
            now = now.take(self._log.locate(now.row_ids)[0] == 0)
            before = before.take(before.locations != ABSENT)
        row_ids = np.concatenate([now.row_ids, before.row_ids])
        locations = np.concatenate([now.locations, before.locations])
        heat = np.concatenate([now.heat, before.heat])
        is_frozen = (locations & FROZEN_BIT) != 0
        is_written, num_now = np.ones(row_ids.shape[0], np.bool_), now.row_ids.shape[0]
        if self._stamp >= 0:
            slots = np.where(is_frozen, 0, locations).astype(np.int32)
            is_written[:num_now] = self._table.changes.stamps_of(slots[:num_now]) > self._stamp
            is_written[num_now:] = self._log.stamps_at(slots[num_now:]) > self._stamp
        order, buckets = np.empty((2, row_ids.shape[0]), np.int64)
        order_rows(row_ids, is_written, self.bucket, last, order, buckets)
        row_ids, locations, heat = row_ids[order], locations[order], heat[order]
        is_frozen, is_written = is_frozen[order], is_written[order]
        self._write_frozen(last, row_ids[is_frozen], locations[is_frozen], heat[is_frozen])
        is_hot = ~is_frozen
        self._hot_counts[1:] += np.bincount(buckets[is_hot], minlength=NUM_BUCKETS)
        self._written_counts[1:] += np.bincount(buckets[is_hot & is_written], minlength=NUM_BUCKETS)
        self.rows_written += row_ids.shape[0]
        return row_ids[is_hot], is_written[is_hot]

    def _write_frozen(self, last: int, row_ids: np.ndarray, locations: np.ndarray, heat: np.ndarray) -> None:
        file, initial = self._files[1], locations == INITIAL
        file.append("initial_row_ids", row_ids[initial])
        file.append("initial_heat", heat[initial])
        locations, heat = locations[~initial], np.minimum(heat[~initial], NOT_LIVE - 1)
        slots, positions = (locations >> SLOT_SHIFT) & (MAX_SLOTS - 1), (locations & MAX_SEGMENT_ROWS).astype(np.int64)
        for k, (slot, offsets) in enumerate(zip(self._slots, self._offsets, strict=True)):
            start, stop = int(offsets[self.bucket]), int(offsets[last])
            if stop > start:
                of_segment = np.full(stop - start, NOT_LIVE, np.uint16)
                at = slots == slot
                of_segment[positions[at] - start] = heat[at]
                file.append(f"heat.{k}", of_segment)

    def _write_hot(self, row_ids: np.ndarray, written: np.ndarray) -> None:
        """Rows that were hot, each from its pre-image if it has one by now; weights and state of those at `written`."""
        table, file = self._table, self._files[0]
        entries, slots, _, _ = table.index.locate(row_ids)
        logged, log_slots = self._log.locate(row_ids)
        at = np.flatnonzero(logged)
        slots[at] = 0  # it may be gone, or frozen: what is read here for it is replaced
        slots, log_slots = slots.astype(np.int32), log_slots.astype(np.int32)
        last_steps, visits = table.last_step.array[slots, 0], table.visits.array[slots, 0]
        heat = table.index.heat_of(entries)
        weights, state = self._rows_at(slots[written])
        if at.shape[0]:
            last_steps[at], visits[at] = self._log.visits_at(log_slots[at])
            heat[at] = self._log.heat_of(logged[at])
            is_logged = np.flatnonzero(logged[written])
            self._log.copy_rows(log_slots[written[is_logged]], weights, state, is_logged.astype(np.int32))
        file.append("row_ids", row_ids)
        file.append("weights", weights)
        file.append("state", state)
        file.append("last_steps", last_steps)
        file.append("heat", heat)
        file.append("visits", visits)

    def _rows_at(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """HotRows.read_stored, faster."""
        hot, n = self._table.hot, slots.shape[0]
        weights, state = np.empty((n, hot.dim), self._dtype), np.empty((n, hot.num_state_columns), np.float32)
        columns = hot.stored_columns(weights, state)
        if columns is None:
            return hot.read_stored(slots)
        copy_rows(columns, slots, np.arange(n, dtype=np.int32))
        return weights, state

    # Segments -------------------------------------------------------------------------------------------------------

    def _link_segments(self) -> bool:
        """Begins or ends the linking of one segment. True: call again; False: it waits for a thread, or is complete."""
        if self._link is not None:
            if not self._link.done():
                return False
            record, written = self._link.result()
            self._link = None
            self._segments.append(record)
            self.bytes_written += written
            return True
        if len(self._segments) == len(self._slots):
            self._let_go()
            self.is_complete = True
            return False
        segments, slot = self._table.segments, self._slots[len(self._segments)]
        if segments.awaits_file(slot):
            if segments.is_write_failing:
                raise OSError("the table's segments cannot be written, see its earlier event")
            return segments.write_pending()
        if segments.is_erasing(slot):
            if segments.is_erasure_stuck(slot):
                raise OSError(
                    "rows that were erased cannot be taken out of the table's segments, see its earlier event"
                )
            return segments.erase_slice(holds=True)
        self._link = self._run(put_object, self._objects, segments.stage_of(slot), not segments.is_cold(slot))
        return True

    def _run(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(work, *arguments)
        done: Future[T] = Future()
        done.set_result(work(*arguments))
        return done

    def _let_go(self) -> None:
        self._table.segments.release()
        if self._table.cut is self:
            self._table.cut = None

    # Afterwards -----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Brings the column files to disk under their names; in any thread, once it is complete."""
        for file in self._files:
            file.sync()
            file.publish()

    def record(self) -> TableRecord:
        hot, frozen = map(FileRecord.of, self._files)
        return TableRecord(**self._noted, segments=self._segments, hot=hot, frozen=frozen)

    def abandon(self) -> None:
        """Ends it wherever it stands and removes its files. No slice does anything any more."""
        if self._link is not None:
            if not self._link.cancel():
                self._link.exception()  # it reads a buffer that release lets go
            self._link = None
        self._rows_work = iter(())
        self.bucket, self._waiting_bucket, self.is_complete = NUM_BUCKETS, NUM_WAITING_BUCKETS, True
        for file in self._files:
            file.abandon()
        self._log.close()
        self._let_go()


def _bucket_offsets(stage: Any) -> np.ndarray:
    """int64[NUM_BUCKETS + 1] of a segment. SegmentCorrupt if its file is damaged there."""
    if isinstance(stage, MappedSegment):
        stage.check_offsets()
        return stage.arrays.bucket_offsets.astype(np.int64)
    return stage.arrays().bucket_offsets.astype(np.int64)
