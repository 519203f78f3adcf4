"""Restore: fills the tables of a job with what they were at a cut, in slices, on any number of shards.

Each shard reads, of every shard's part, the rows of the buckets that it owns now, of a delta through its chain
(snapshot_hot.py), and checks each byte that it reads against its CRC-32; segment files are linked and checked whole. A
failure leaves the tables empty and the job at step 0.

What may differ from the cut: the policy, the optimizer and its parameters, the number of shards and workers. State of
another kind of optimizer starts anew; heat is carried over to another half-life as it is at the cut's step; rows for
which there is no room freeze (hot_limit.py).

Thread safety: none; the thread that owns the shard calls.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import heat
from embedding_server.errors import FrostlineError, InvalidInput, Overloaded, SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.hot_limit import take_slots
from embedding_server.index import INITIAL
from embedding_server.kernels.locations import locations_of
from embedding_server.kernels.visits import in_buckets
from embedding_server.optimizers import initial_state
from embedding_server.segment_reader import MappedSegment
from embedding_server.snapshot_file import ColumnReader, corrupt
from embedding_server.snapshot_format import (
    NOT_LIVE,
    FileRecord,
    SegmentRecord,
    TableRecord,
    frozen_columns,
    frozen_file,
    segment_object,
)
from embedding_server.snapshot_hot import HotChunk, HotRowsFile, bucket_ranges
from embedding_server.snapshot_objects import take_object
from embedding_server.snapshot_parts import Part, read_parts, tables_in
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS
from embedding_server.table_cut import COUNTERS

if TYPE_CHECKING:
    from embedding_server.jobs import Job
    from embedding_server.table import Table

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 16, 8 << 20
_ENTRY_COST = 22  # bytes of index that a row costs at the lowest load, as in admission.py


class Restore:
    """advance() until it is True.

    Errors: InvalidInput, SegmentCorrupt, Overloaded; all are final and leave the tables of the cut empty.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        tables: Mapping[str, Table],
        buckets: np.ndarray,
        renew: Callable[[str], Table],
        on_event: Callable[[str], None],
        anew: Collection[str] = (),
    ) -> None:
        """tables: all of the shard, which owns `buckets` (bool[NUM_BUCKETS]); renew(name) makes one anew, empty.
        anew: tables of the job that begin empty if the snapshot has none of their name."""
        self.folder, self.anew = folder, frozenset(anew)
        self._job, self._tables, self._buckets, self._renew, self._on_event = job, tables, buckets, renew, on_event
        self.names: frozenset[str] = frozenset()  # tables that it has begun to fill: nobody should read them
        self._unclean: list[str] = []  # tables that may be half made, or hold some rows
        self._work = self._run()

    def advance(self) -> bool:
        """Does a bounded part; True: the job is at the cut."""
        try:
            return next(self._work, "end") == "end"
        except FrostlineError:
            self.abandon()
            raise
        except OSError as error:
            self.abandon()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = "the shard's data_dir has no room for the snapshot's frozen rows: free some, or name another"
            else:
                what = "name a snapshot that is whole"
            raise InvalidInput(f"restore from {self.folder}: {error}; {what}") from error
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Ends it where it stands: the tables are empty afterwards."""
        self._work.close()
        for name in self._unclean:
            self._renew(name)
        self._unclean = []

    def _run(self) -> Generator[None, None, None]:
        failpoint("restore.parts")
        parts = read_parts(self.folder)
        step = parts[0].record.step
        self._check(parts)
        self.names = frozenset(_names(parts))
        self._job.steps.begin_restore()
        for name in self.anew - set(_names(parts)):
            self._renew(name)
        for name in _names(parts):  # all at once: a failure must not leave some with rows of before
            self._unclean = [name]
            self._renew(name)
            self._unclean = []
            yield
        for name in _names(parts):
            self._unclean.append(name)
            table = self._tables[name]
            table.job = self._job.steps.job
            table.move_origin_of_heat(step)
            yield from _TableRestore(table, parts, self._buckets, step, self._on_event).run()
        failpoint("restore.end")
        self._job.steps.end_restore(step)
        self._unclean = []

    def _check(self, parts: list[Part]) -> None:
        """InvalidInput lists everything that differs and must not."""
        wrong = [line for name in _names(parts) for line in self._differences(name, parts)]
        own, others = self._job.steps.job, set(self._tables) - set(_names(parts))
        added = sorted(name for name in others - self.anew if self._tables[name].job == own)
        wrong += [
            f"table {name!r} is not in the snapshot: name it among those that begin anew, or drop it" for name in added
        ]
        for name in sorted(self.anew - set(_names(parts))):
            if name not in self._tables:
                wrong.append(f"table {name!r}, which is to begin anew, does not exist here")
            elif self._tables[name].job not in (None, own):
                wrong.append(f"table {name!r}, which is to begin anew, is trained by job {self._tables[name].job!r}")
        if wrong:
            raise InvalidInput(f"restore from {self.folder}: {'; '.join(wrong)}. Give the job the snapshot's tables")

    def _differences(self, name: str, parts: list[Part]) -> Iterator[str]:
        table = self._tables.get(name)
        if table is None:
            yield f"table {name!r} of the snapshot does not exist here"
            return
        if table.job not in (None, self._job.steps.job):
            yield f"table {name!r} is trained by job {table.job!r}"
        spec = table.spec
        for part in parts:
            record = part.table(name)
            if record is None:
                yield f"table {name!r} is missing in {part.folder.name}"
                continue
            first = parts[0].table(name)
            if first is not None and record.spec != first.spec:
                yield f"table {name!r} has another spec in {part.folder.name} than in {parts[0].folder.name}"
            if record.spec.dim != spec.dim:
                yield f"table {name!r}: dim={spec.dim}, in the snapshot {record.spec.dim}"
                return
            mine, theirs = ((s.seed, s.init_min, s.init_max) for s in (spec, record.spec))
            if record.rows_initial and mine != theirs:
                yield (
                    f"table {name!r}: seed, init_min, init_max={mine}, in the snapshot {theirs}, which make its"
                    " untrained rows"
                )
                return


def _names(parts: list[Part]) -> list[str]:
    return tables_in([part.record for part in parts])


class _TableRestore:
    """Fills one empty table. Each step of run() is a slice."""

    def __init__(
        self, table: Table, parts: list[Part], buckets: np.ndarray, step: int, on_event: Callable[[str], None]
    ) -> None:
        self._table, self._parts, self._buckets, self._step, self._on_event = table, parts, buckets, step, on_event
        spec = table.spec
        theirs = self._record(parts[0]).spec
        self._keeps_state = spec.optimizer.kind == theirs.optimizer.kind
        mine, old = spec.policy.half_life_steps, theirs.policy.half_life_steps
        self._heat_shift = round(heat.now_code(step, mine) - heat.now_code(step, old))

    def _number(self, part: Part) -> int:
        number = part.number_of(self._table.spec.name)
        assert number is not None, "Restore._check has looked"
        return number

    def _record(self, part: Part) -> TableRecord:
        return part.record.tables[self._number(part)]

    def run(self) -> Iterator[None]:
        table = self._table
        if not self._keeps_state:
            self._on_event(f"table {table.spec.name!r}: another optimizer than in the snapshot: its state starts anew")
        self._make_room()
        yield
        table.segments.hold()  # a merge would take what has no index entry yet for dead
        for k, part in enumerate(self._parts):
            number, record = self._number(part), self._record(part)
            with closing(HotRowsFile(part, number)) as hot:
                if k == 0:
                    self._restore_common(record, hot.own)
                self._add_counters(part, record)
                if not (part.owned & self._buckets).any():
                    continue
                yield from self._restore_hot(part, hot)
            yield from self._restore_frozen(part, number, record)
        table.segments.release()
        table.record_memory()

    def _make_room(self) -> None:
        """Of the index for all rows, which would move six times as they come: half of the work of restoring frozen
        rows. Segments have up to a fifth of dead rows; who has fewer is moved once."""
        mine = np.flatnonzero(self._buckets)
        rows = 0.0
        for part in self._parts:
            record, owned = self._record(part), int(part.owned.sum())
            frozen = 0.9 * sum(segment.num_rows for segment in record.segments)
            share = int((part.owned & self._buckets).sum()) / max(1, owned)
            rows += share * (record.rows_hot + record.rows_initial + frozen)
        self._table.index.grow_to(round(rows / max(1, mine.shape[0])), mine)

    # What is no row -----------------------------------------------------------------------------------------------

    def _restore_common(self, record: TableRecord, hot: ColumnReader) -> None:
        """What is the same on all shards."""
        table = self._table
        weights, state = hot.read("default_weights")[None], hot.read("default_state")[None]
        if not self._keeps_state:
            state = initial_state(table.spec.optimizer, table.spec.dim)[None]
        table.default_row.restore(weights.copy(), state.copy())
        sums = hot.read("weight_decay")
        if table.decay is not None and sums.shape[0]:
            table.decay.restore(sums)
        elif table.decay is not None:
            table.decay.begin_step(self._step)
        table.last_step_seen = max(self._step, record.last_step_seen)
        records = [self._record(part) for part in self._parts if (part.owned & self._buckets).any()]
        rates = [of_part.rate for of_part in records if of_part.rate] if self._keeps_state else []  # 0: had no gradient
        table.rate = np.float32(rates[0] if rates else 0.0)
        if table.spec.policy.kind == "topk" and record.frostline is not None:
            table.frostline = record.frostline.frostline()

    def _add_counters(self, part: Part, record: TableRecord) -> None:
        """Each part's go to one shard, so that sums over shards stay."""
        table = self._table
        table.has_rare_frozen |= record.has_rare_frozen and table.spec.policy.kind == "compact"
        if part.owned.any() and self._buckets[np.argmax(part.owned)]:
            for name, value in record.counters.items():
                if name in COUNTERS:
                    setattr(table, name, getattr(table, name) + value)

    # Hot rows -------------------------------------------------------------------------------------------------------

    def _restore_hot(self, part: Part, hot: HotRowsFile) -> Iterator[None]:
        sums = hot.own.read("weight_decay")
        rows = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // self._table.hot_row_bytes))
        for chunk in hot.chunks(rows, self._buckets):
            self._add_hot(part, hot, chunk, sums)
            yield

    def _add_hot(self, part: Part, hot: HotRowsFile, chunk: HotChunk, sums: np.ndarray) -> None:
        table = self._table
        failpoint("restore.hot_rows")
        mine = self._mine(part, hot.path, chunk.row_ids)
        if not mine.shape[0]:
            return
        last_steps = chunk.last_steps[mine]
        weights, state = chunk.weights[mine].astype(np.float32), chunk.state[mine]
        if not self._keeps_state:
            state = np.tile(initial_state(table.spec.optimizer, table.spec.dim), (mine.shape[0], 1))
        weights = self._with_decay(weights, last_steps, sums)
        slots = take_slots(table, mine.shape[0], self._step, entry_bytes=_ENTRY_COST)
        if slots.shape[0] < mine.shape[0]:
            raise Overloaded(
                f"table {table.spec.name!r}: {hot.record.rows_hot} hot rows of the snapshot do not fit hot_bytes or"
                " memory_limit_bytes, and nothing can freeze; raise the limit or add shards",
                1000,
            )
        table.hot.write(slots, weights, state)
        table.last_step.array[slots, 0] = last_steps
        table.visits.array[slots, 0] = chunk.visits[mine]
        self._insert(hot.path, chunk.row_ids[mine], slots.astype(np.uint32), chunk.heat[mine])

    def _mine(self, part: Part, path: Path, row_ids: np.ndarray) -> np.ndarray:
        """Positions int64[m] of those in this shard's buckets. SegmentCorrupt unless all are in those of the part, or
        what is restored would depend on which parts a shard reads."""
        found = np.empty(row_ids.shape[0], np.bool_)
        in_buckets(row_ids, part.owned, found)
        if not found.all():
            row_id = row_ids[np.argmin(found)]
            raise corrupt(path, f"row_id {row_id} is in a bucket which its shard did not own")
        in_buckets(row_ids, self._buckets, found)
        return np.flatnonzero(found)

    def _with_decay(self, weights: np.ndarray, last_steps: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Weights such that the table's own sums take off them what those of the cut, float64[s + 1], would have."""
        owed = np.zeros(last_steps.shape[0])
        if sums.shape[0]:
            settled = np.concatenate([[0.0], sums[:-1]])
            owed += sums[-1] - settled[np.minimum(last_steps, settled.shape[0] - 1)]
        if self._table.decay is not None:
            owed -= self._table.decay.owed(last_steps)
        if not owed.any():
            return weights
        return (weights * np.exp(owed)[:, None]).astype(np.float32)

    def _insert(self, path: Path, row_ids: np.ndarray, locations: np.ndarray, codes: np.ndarray) -> None:
        if not row_ids.shape[0]:
            return
        index = self._table.index
        entries, _, used = index.insert(row_ids, locations)
        if used < row_ids.shape[0]:
            raise corrupt(path, "a row_id occurs twice in the snapshot")
        if self._heat_shift:
            shifted = np.clip(codes.astype(np.int64) + self._heat_shift, 1, 65535).astype(np.uint16)
            codes = np.where(codes == 0, codes, shifted)
        index.set_heat(entries, codes)

    # Frozen rows ------------------------------------------------------------------------------------------------------

    def _restore_frozen(self, part: Part, number: int, record: TableRecord) -> Iterator[None]:
        path = part.folder / frozen_file(number)
        frozen = ColumnReader(path, frozen_columns(record), *_said(record.frozen))
        try:
            for k, segment in enumerate(record.segments):
                yield from self._restore_segment(part, segment, frozen, f"heat.{k}")
            for start in range(0, record.rows_initial, _ROWS_AT_ONCE):
                self._add_initial(part, frozen, start, min(record.rows_initial, start + _ROWS_AT_ONCE))
                yield
            waiting = self._table.waiting
            for start in range(0, record.rows_waiting if waiting is not None else 0, _ROWS_AT_ONCE):
                self._add_waiting(part, frozen, start, min(record.rows_waiting, start + _ROWS_AT_ONCE))
                yield
        finally:
            frozen.close()

    def _restore_segment(self, part: Part, segment: SegmentRecord, frozen: ColumnReader, column: str) -> Iterator[None]:
        """Links a segment, unless no row of it is in this shard's buckets, and enters its live rows into the index."""
        path = self._table.segments.new_path()
        try:
            yield from self._restore_file(part, path, segment, frozen, column)
        except SegmentCorrupt as error:  # path is a link to it, that is gone when people look
            if error.path != str(path):
                raise
            raise corrupt(part.objects / segment_object(segment.digest), str(error)) from error

    def _restore_file(
        self, part: Part, path: Path, segment: SegmentRecord, frozen: ColumnReader, column: str
    ) -> Iterator[None]:
        table = self._table
        failpoint("restore.segment")
        mapped = take_object(part.objects, segment, path)
        try:
            _check_segment(mapped, table.spec)
            yield
            for _ in mapped.check_all():
                yield
            offsets = mapped.arrays.bucket_offsets.astype(np.int64)
            counts = np.diff(offsets)
            is_wanted = bool(counts[self._buckets].any())
            is_cold = not (self._keeps_state and segment.has_state)
            slot = self._adopt(mapped, is_cold=is_cold) if is_wanted else None
        except BaseException:
            mapped.close()
            path.unlink(missing_ok=True)
            raise
        if slot is None:
            mapped.close()
            path.unlink(missing_ok=True)
            return
        dead = mapped.num_rows
        for first, last in bucket_ranges(offsets, _ROWS_AT_ONCE):
            dead -= self._add_frozen(part, mapped, slot, frozen, column, int(offsets[first]), int(offsets[last]))
            yield
        table.segments.mark_dead(locations_of(slot, 0, dead))  # which ones they are, the index knows
        table.record_memory()

    def _adopt(self, mapped: MappedSegment, *, is_cold: bool) -> int:
        segments = self._table.segments
        if segments.is_crowded:  # many parts, each with its segments, all of them in the index by now
            segments.release()
            self._table.settle_segments(None)
            segments.hold()
        return segments.adopt(mapped, is_cold=is_cold)

    def _add_frozen(
        self, part: Part, mapped: MappedSegment, slot: int, frozen: ColumnReader, column: str, start: int, stop: int
    ) -> int:
        codes = frozen.read(column, start, stop)
        row_ids = mapped.arrays.row_ids[start:stop]
        live = np.flatnonzero(codes != NOT_LIVE)
        live = live[self._mine(part, frozen.path, row_ids[live])]
        locations = locations_of(slot, start, stop - start)
        self._insert(frozen.path, row_ids[live], locations[live], codes[live])
        self._table.rows_frozen += live.shape[0]
        return live.shape[0]

    def _add_initial(self, part: Part, frozen: ColumnReader, start: int, stop: int) -> None:
        row_ids = frozen.read("initial_row_ids", start, stop)
        mine = self._mine(part, frozen.path, row_ids)
        codes = frozen.read("initial_heat", start, stop)[mine]
        self._insert(frozen.path, row_ids[mine], np.full(mine.shape[0], INITIAL), codes)
        self._table.rows_frozen += mine.shape[0]

    def _add_waiting(self, part: Part, frozen: ColumnReader, start: int, stop: int) -> None:
        assert self._table.waiting is not None
        row_ids = frozen.read("waiting_row_ids", start, stop)
        mine = self._mine(part, frozen.path, row_ids)
        counts = frozen.read("waiting_counts", start, stop)[mine]
        if not self._table.waiting.restore(row_ids[mine], counts):
            raise corrupt(frozen.path, "an ID occurs twice among those that wait for admission")


def _check_segment(mapped: MappedSegment, spec: TableSpec) -> None:
    found = (mapped.format.table, mapped.format.dim, mapped.format.num_buckets)
    if found != (spec.name, spec.dim, NUM_BUCKETS):
        raise corrupt(mapped.path, f"table, dim and buckets are {found}, not {(spec.name, spec.dim, NUM_BUCKETS)}")


def _said(file: FileRecord) -> tuple[int, int]:
    return file.size_bytes, file.crc32
