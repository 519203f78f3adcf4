"""The hot rows of a table in a part of a snapshot, some thousand at a time, whichever cut of the chain has them.

    with closing(HotRowsFile(part, number)) as hot:
        for chunk in hot.chunks(rows): ...

A delta says which rows are hot, with all that is small; weights and state of rows that it did not write come from the
nearest parent that did. Every parent on the way must have the row too, or the chain is damaged: so what a parent has
of a row that was gone in between is never taken for it.

Memory: a chunk of `rows` rows; of a delta at least the rows of a bucket, and as many of one parent. Every block that is
read is checked against its CRC-32. Thread safety: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedding_server.index import Index
from embedding_server.kernels.hashing import buckets_of
from embedding_server.snapshot_file import Column, ColumnReader, corrupt
from embedding_server.snapshot_format import FileRecord, hot_columns, hot_file
from embedding_server.snapshot_parts import Part
from embedding_server.store import NUM_BUCKETS


@dataclass(frozen=True, slots=True)
class HotChunk:
    """Rows in the order of the file, none in two chunks."""

    row_ids: np.ndarray  # int64[n]
    weights: np.ndarray  # float32 or float16 [n, D] as they lay in memory; [0, D] of chunks without them
    state: np.ndarray  # float32[n, C]; likewise
    last_steps: np.ndarray  # int32[n]
    heat: np.ndarray  # uint16[n]
    visits: np.ndarray  # uint8[n]


class HotFile:
    """A hot file of one cut. SegmentCorrupt, OSError if it is not there or not sound."""

    def __init__(self, part: Part, number: int) -> None:
        self.record, self.step = part.record.tables[number], part.record.step
        self.file = open_columns(part.folder / hot_file(number), hot_columns(self.record), self.record.hot)
        try:
            self.rows = self._offsets("bucket_offsets", self.record.rows_hot)
            self.written = self._offsets("written_offsets", self.record.rows_written)
            if (np.diff(self.written) > np.diff(self.rows)).any():
                raise corrupt(self.file.path, "written_offsets give a bucket more rows than it has")
        except BaseException:
            self.file.close()
            raise

    def _offsets(self, column: str, last: int) -> np.ndarray:
        """int64[NUM_BUCKETS + 1]."""
        offsets = self.file.read(column).astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != last or (np.diff(offsets) < 0).any():
            raise corrupt(self.file.path, f"{column} do not rise from 0 to {last}")
        return offsets

    def row_ids(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(int64[n], bool[n]: written here) of rows [start, stop), each of them in its bucket."""
        row_ids, positions = self.file.read("row_ids", start, stop), np.arange(start, stop)
        buckets = buckets_of(row_ids, NUM_BUCKETS)
        first = self.rows[buckets]
        is_misplaced = (positions < first) | (positions >= self.rows[buckets + 1])
        if is_misplaced.any():
            at = int(np.argmax(is_misplaced))
            raise corrupt(self.file.path, f"row_id {row_ids[at]} at position {start + at} is not in its bucket")
        return row_ids, positions - first < self.written[buckets + 1] - self.written[buckets]

    def last_steps(self, start: int, stop: int) -> np.ndarray:
        last_steps = self.file.read("last_steps", start, stop)
        if ((last_steps < 0) | (last_steps > self.step)).any():
            raise corrupt(self.file.path, f"a last step of rows {start} to {stop} is not in 0 to {self.step}")
        return last_steps


class HotRowsFile:
    """The hot rows of table `number` of a part. own: its own file, for the columns that are no rows."""

    def __init__(self, part: Part, number: int) -> None:
        """SegmentCorrupt, OSError: a file that is needed is missing, or not what shard.json says."""
        name = part.record.tables[number].spec.name
        with ExitStack() as stack:
            self._files: list[HotFile] = []
            for each in part.chain:
                of_table = each.number_of(name)
                assert of_table is not None, "read_part has looked"
                self._files.append(HotFile(each, of_table))
                stack.enter_context(closing(self._files[-1].file))
                if self._files[-1].record.is_whole:
                    break
            self._stack = stack.pop_all()
        self._own = self._files[0]
        self.own: ColumnReader = self._own.file
        self.record = self._own.record

    @property
    def path(self) -> Path:
        return self.own.path

    def close(self) -> None:
        self._stack.close()

    def verify(self) -> Iterator[int]:
        """Reads and checks every byte, of the parents' files too, yielding the bytes of each bounded step."""
        for each in self._files:
            yield from each.file.verify()

    def offsets(self) -> np.ndarray:
        """int64[NUM_BUCKETS + 1]: where the rows of each bucket lie in the columns of all rows."""
        return self._own.rows

    def chunks(self, rows: int, buckets: np.ndarray | None = None, *, with_weights: bool = True) -> Iterator[HotChunk]:
        """All rows, by bucket; buckets bool[NUM_BUCKETS]: may leave out others. Without weights it is only looked where
        they are."""
        offsets = self._own.rows
        for first, last in bucket_ranges(offsets, rows):
            if buckets is not None and not buckets[first:last].any():
                continue
            if not self.record.is_whole:
                yield self._gather(first, last, with_weights)
                continue
            for start in range(int(offsets[first]), int(offsets[last]), rows):
                stop = min(int(offsets[last]), start + rows)
                row_ids, _ = self._own.row_ids(start, stop)
                end = stop if with_weights else start
                weights, state = (self.own.read(name, start, end) for name in ("weights", "state"))
                yield self._chunk(row_ids, weights, state, start, stop)

    def _chunk(self, row_ids: np.ndarray, weights: np.ndarray, state: np.ndarray, start: int, stop: int) -> HotChunk:
        last_steps = self._own.last_steps(start, stop)
        heat, visits = (self.own.read(name, start, stop) for name in ("heat", "visits"))
        return HotChunk(row_ids, weights, state, last_steps, heat, visits)

    def _gather(self, first: int, last: int, with_weights: bool) -> HotChunk:
        """Rows of buckets [first, last) through the chain."""
        start, stop = int(self._own.rows[first]), int(self._own.rows[last])
        row_ids, _ = self._own.row_ids(start, stop)
        n = row_ids.shape[0]
        places = Index(1)
        if places.insert(row_ids, np.arange(n, dtype=np.uint32))[2] < n:
            raise corrupt(self.path, f"a row_id occurs twice in rows {start} to {stop}")
        weights, state = self.own.read("weights", 0, 0), self.own.read("state", 0, 0)
        weights, state = (np.empty((n * with_weights, of.shape[1]), of.dtype) for of in (weights, state))
        is_missing = np.ones(n, np.bool_)
        for each in self._files:
            found, sources = self._find(each, places, row_ids, is_missing, first, last)
            if with_weights and found.shape[0]:
                begin, end = int(each.written[first]), int(each.written[last])
                weights[found] = each.file.read("weights", begin, end)[sources]
                state[found] = each.file.read("state", begin, end)[sources]
            is_missing[found] = False
            if not is_missing.any():
                break
        return self._chunk(row_ids, weights, state, start, stop)

    def _find(
        self, file: HotFile, places: Index, row_ids: np.ndarray, is_missing: np.ndarray, first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which of the missing rows this file has written, as positions in row_ids, and as the how-manieth written row
        of buckets [first, last). `places` has the position of each row_id. SegmentCorrupt if it lacks one of them."""
        its_ids, is_written = file.row_ids(int(file.rows[first]), int(file.rows[last]))
        entries, positions, _, _ = places.locate(its_ids)
        is_known = np.zeros(row_ids.shape[0], np.bool_)
        is_known[positions[entries != 0]] = True
        is_lost = is_missing & ~is_known
        if is_lost.any():
            lost = row_ids[np.argmax(is_lost)]
            raise corrupt(file.file.path, f"has no row_id {lost}, which {self.path} takes from it or from its parents")
        at = np.flatnonzero(is_written & (entries != 0))
        at = at[is_missing[positions[at]]]
        return positions[at], (np.cumsum(is_written) - 1)[at]


def open_columns(path: Path, columns: list[Column], record: FileRecord) -> ColumnReader:
    """SegmentCorrupt, also if it is not there."""
    try:
        return ColumnReader(path, columns, record.size_bytes, record.crc32)
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror})") from None


def bucket_ranges(offsets: np.ndarray, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of buckets [first, last) with about `rows` rows, at least one bucket, over all buckets with rows."""
    first = 0
    while first < NUM_BUCKETS:
        last = int(np.searchsorted(offsets, offsets[first] + rows, side="right")) - 1
        last = min(NUM_BUCKETS, max(first + 1, last))
        if offsets[last] > offsets[first]:
            yield first, last
        first = last
