"""Takes erased rows out of segments, byte for byte: row_id, values, accumulator and visits.

A segment may hold a row_id where the row is, and where it was before it thawed or moved. So every segment that is there
when rows are erased is looked through, and each place of one of them is *blanked*: zeros, and in place of the row_id
another one of the same bucket that no row has. Positions stay, so whatever works on the segment (a merge, a cut, a
read) does not notice.

    in a buffer    it is blanked where it lies
    in a file      the executor writes the file again beside, without them; it takes the other one's place, which goes

Every block is compared with its CRC-32 before it gets a new one: damage stays damage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.index import Index
from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_builder import SegmentBuilder
from embedding_server.segment_file import SegmentArrays, write_segment
from embedding_server.segment_reader import MappedSegment, open_segment
from embedding_server.store import NUM_BUCKETS

#: Rows of a buffer that are looked through within a call, 10 ms or less; a larger one waits until it is a file.
MAX_BUFFER_ROWS = 1 << 19
RETRY_S = 5.0  # after the disk failed
_ROWS_AT_ONCE = 1 << 18
_MAX_RANGES = 256
#: Where the search for row_ids that stand in for erased ones begins: any will do, best one that nobody uses.
_FIRST_FILLER = -0x5EED_0F_0DD_B0D1E5


class ErasedIds:
    """A set of row_ids. Thread safety: once nothing is added any more, any thread may ask."""

    def __init__(self) -> None:
        self._index = Index(NUM_BUCKETS)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def counts(self) -> np.ndarray:
        """By bucket, int64[NUM_BUCKETS]."""
        return self._index.counts

    def add(self, row_ids: np.ndarray) -> None:
        """int64[n]; any may be there already."""
        self._index.insert(row_ids, np.zeros(row_ids.shape[0], np.uint32))

    def hold(self, row_ids: np.ndarray) -> np.ndarray:
        """int64[n] -> bool[n]."""
        return self._index.locate(np.ascontiguousarray(row_ids))[0] != 0


def places_of(
    arrays: SegmentArrays, sets: Sequence[ErasedIds], check: Callable[[np.ndarray], None] = lambda part: None
) -> np.ndarray:
    """int64[m], rising: positions whose row_id is in one of the sets. check(part of row_ids) is called before it is
    read; it covers the buckets that the sets have row_ids in."""
    found = [np.empty(0, np.int64)]
    for start, stop in _ranges(arrays.bucket_offsets.astype(np.int64), sets):
        check(arrays.row_ids[start:stop])
        for first in range(start, stop, _ROWS_AT_ONCE):
            row_ids = arrays.row_ids[first : min(stop, first + _ROWS_AT_ONCE)]
            held = np.zeros(row_ids.shape[0], np.bool_)
            for erased in sets:
                held |= erased.hold(row_ids)
            found.append(first + np.flatnonzero(held))
    return np.concatenate(found)


def _ranges(offsets: np.ndarray, sets: Sequence[ErasedIds]) -> Iterator[tuple[int, int]]:
    """Of positions that any of the sets' buckets have."""
    wanted = np.zeros(offsets.shape[0] - 1, np.bool_)
    for erased in sets:
        wanted |= erased.counts > 0
    buckets = np.flatnonzero(wanted & (offsets[1:] > offsets[:-1]))
    if buckets.shape[0] > _MAX_RANGES:
        yield int(offsets[buckets[0]]), int(offsets[buckets[-1] + 1])
        return
    for bucket in buckets.tolist():
        yield int(offsets[bucket]), int(offsets[bucket + 1])


def blank(arrays: SegmentArrays, places: np.ndarray, sets: Sequence[ErasedIds]) -> None:
    """Overwrites rows at places int64[m]."""
    buckets = np.searchsorted(arrays.bucket_offsets, places, side="right") - 1
    arrays.row_ids[places] = _fillers(sets, arrays.bucket_offsets.shape[0] - 1)[buckets]
    arrays.rows[places] = 0
    arrays.accumulators[places] = 0
    arrays.visits[places] = 0


def _fillers(sets: Sequence[ErasedIds], num_buckets: int) -> np.ndarray:
    """int64[num_buckets]: a row_id of each bucket that is in none of the sets."""
    fillers, is_missing = np.zeros(num_buckets, np.int64), np.ones(num_buckets, np.bool_)
    start = _FIRST_FILLER
    while is_missing.any():
        candidates = np.arange(start, start + 16 * num_buckets, dtype=np.int64)
        for erased in sets:
            candidates = candidates[~erased.hold(candidates)]
        buckets, first = np.unique(buckets_of(candidates, num_buckets), return_index=True)
        new = is_missing[buckets]
        fillers[buckets[new]] = candidates[first[new]]
        is_missing[buckets] = False
        start += 16 * num_buckets
    return fillers


def write_without(source: Path, target: Path, sets: Sequence[ErasedIds]) -> MappedSegment | None:
    """Writes a segment file again without rows of the sets, and maps it. None: there is none of them, and no new file.

    SegmentCorrupt if the file is damaged; OSError. Memory: the pages that change.
    """
    segment = open_segment(source, verify=False, is_private=True)
    try:
        segment.check_offsets()
        places = places_of(segment.arrays, sets, segment.check_part)
        if not places.shape[0]:
            return None
        for _ in segment.check_all():
            pass
        blank(segment.arrays, places, sets)
        write_segment(target, segment.format, segment.frozen_step, segment.arrays)
    finally:
        segment.close()
    return open_segment(target, verify=False)


@dataclass(slots=True)
class _Rewrite:
    """A file that is being written again, without the rows of the first `num_sets` sets of its slot."""

    slot: int
    source: MappedSegment
    num_sets: int
    done: Future[MappedSegment | None]


class SegmentErasure:
    """Which segments of a SegmentSet may still hold erased rows, and the work on them.

    Thread safety: as the set; the executor's work touches files alone, by their paths.
    """

    def __init__(
        self,
        table: str,
        builders: Mapping[int, SegmentBuilder],
        mapped: Mapping[int, MappedSegment],
        *,
        executor: Executor | None,
        new_path: Callable[[], Path],
        replace: Callable[[int, MappedSegment], None],
        discard: Callable[[Path], None],
        on_event: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """builders, mapped: the set's own, by slot. replace(slot, file) puts a file in the place of a slot's; discard
        deletes one that nobody uses."""
        self._table, self._builders, self._mapped, self._executor = table, builders, mapped, executor
        self._new_path, self._replace, self._discard = new_path, replace, discard
        self._on_event, self._clock = on_event, clock
        self._pending: dict[int, list[ErasedIds]] = {}  # by slot
        self._damaged: set[int] = set()
        self._rewrite: _Rewrite | None = None
        self._retry_at = 0.0
        self.is_failing = False  # the disk, at the last try

    def add(self, slots: Collection[int], erased: ErasedIds) -> None:
        for slot in slots:
            self._pending.setdefault(slot, []).append(erased)

    def forget(self, slot: int) -> None:
        """The slot's segment is gone."""
        self._pending.pop(slot, None)
        self._damaged.discard(slot)

    @property
    def slots(self) -> Collection[int]:
        """That may still hold erased rows."""
        return self._pending.keys()

    @property
    def is_waiting(self) -> bool:
        """The executor has work of it."""
        return self._rewrite is not None

    @property
    def is_executor_at_work(self) -> bool:
        return self._rewrite is not None and not self._rewrite.done.done()

    def wait(self) -> None:
        """Until the executor has done what it has of it."""
        if self._rewrite is not None:
            self._rewrite.done.exception()

    def is_stuck(self, slot: int) -> bool:
        """Its rows cannot be taken out: the file is damaged, or the disk fails."""
        return slot in self._damaged or (self.is_failing and slot in self._pending)

    def slice(self, busy: Collection[int], *, here: bool) -> bool:
        """A bounded part, of segments that are not busy. False: nothing can be done now. here: waits for the file."""
        if self._rewrite is not None:
            if not here and not self._rewrite.done.done():
                return False
            self._finish()
            return True
        slots = [slot for slot in self._pending if slot not in busy and slot not in self._damaged]
        for slot in slots:
            builder = self._builders.get(slot)
            if builder is not None and builder.num_rows <= MAX_BUFFER_ROWS:
                self._blank_buffer(builder)
                return True
        files = [slot for slot in slots if slot in self._mapped]
        if not files or (self.is_failing and self._clock() < self._retry_at):
            return False
        self._start(files[0])
        if here or self._executor is None:
            self._finish()
        return True

    def _blank_buffer(self, builder: SegmentBuilder) -> None:
        sets = self._pending.pop(builder.slot)
        arrays = builder.arrays()
        places = places_of(arrays, sets)
        if places.shape[0]:
            blank(arrays, places, sets)

    def _start(self, slot: int) -> None:
        source, sets = self._mapped[slot], list(self._pending[slot])
        arguments = source.path, self._new_path(), sets
        if self._executor is not None:
            done = self._executor.submit(write_without, *arguments)
        else:
            done = Future()
            try:
                done.set_result(write_without(*arguments))
            except (OSError, SegmentCorrupt) as error:
                done.set_exception(error)
        self._rewrite = _Rewrite(slot, source, len(sets), done)

    def _finish(self) -> None:
        """Waits for the file being written and puts it in its place."""
        assert self._rewrite is not None
        work, self._rewrite = self._rewrite, None
        is_gone = self._mapped.get(work.slot) is not work.source  # merged away meanwhile
        try:
            new = work.done.result()
        except SegmentCorrupt as error:
            if not is_gone:
                self._damaged.add(work.slot)
                self._on_event(f"table {self._table!r}: {error} Rows that were erased stay in it, dead, until then")
            return
        except OSError as error:
            if not is_gone:
                self._note_failure(error)
            return
        self.is_failing = False
        if is_gone:
            if new is not None:
                new.close()
                self._discard(new.path)
            return
        if new is not None:
            failpoint("erasure.before_replace")
            self._replace(work.slot, new)
        left = self._pending[work.slot][work.num_sets :]
        if left:
            self._pending[work.slot] = left
        else:
            del self._pending[work.slot]

    def _note_failure(self, error: OSError) -> None:
        if not self.is_failing:
            self._on_event(
                f"table {self._table!r}: a segment file cannot be written again without the rows that were erased:"
                f" {error}; they stay in it, dead, and the write is tried again; free or repair the disk"
            )
        self.is_failing, self._retry_at = True, self._clock() + RETRY_S

    def close(self) -> None:
        """Ends the work under way."""
        if self._rewrite is None:
            return
        done, self._rewrite = self._rewrite.done, None
        if not done.cancel() and done.exception() is None:
            new = done.result()
            if new is not None:
                new.close()
