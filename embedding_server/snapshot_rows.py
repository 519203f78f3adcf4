"""The rows of a table in a snapshot, some thousand at a time, as a look-up gives them: without a shard, and offline.

    parts = read_parts(cut)                      snapshot_parts.py
    with TableRows(parts, "user") as rows:
        for chunk in rows.chunks(): ...

Frozen rows are dequantised by the kernel of look-ups, and weight decay is settled as look-ups settle it; a row that
froze at its initial value is made from (table, row_id, seed). Order: part by part; hot rows by bucket, then each
segment by bucket, then the rows at their initial value. Every block that is read is checked against its CRC-32.

Memory: a chunk, and the map of one segment. Thread safety: none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from embedding_server.errors import UnknownTable
from embedding_server.kernels.cpu import initial_values
from embedding_server.kernels.locations import locations_of
from embedding_server.optimizers import decode_accumulator, initial_state, table_seed
from embedding_server.segment_reader import MappedSegment, open_segment
from embedding_server.segment_rows import SegmentRows
from embedding_server.snapshot_file import ColumnReader, corrupt, open_regular
from embedding_server.snapshot_format import (
    NOT_LIVE,
    SegmentRecord,
    TableRecord,
    frozen_columns,
    frozen_file,
    segment_object,
)
from embedding_server.snapshot_hot import HotRowsFile, open_columns
from embedding_server.snapshot_objects import digest_of
from embedding_server.snapshot_parts import Part
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS
from embedding_server.weight_decay import WeightDecay

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 16, 8 << 20


@dataclass(frozen=True, slots=True)
class RowChunk:
    row_ids: np.ndarray  # int64[n]
    weights: np.ndarray  # float32[n, D]
    state: np.ndarray  # float32[n, C]: of frozen rows what a thaw would begin with


@dataclass(frozen=True, slots=True)
class RowCounts:
    hot: int
    frozen: int


class PartTable:
    """The column files of one table of one part. SegmentCorrupt, OSError if they are not there or not sound."""

    def __init__(self, part: Part, number: int) -> None:
        self.part = part
        self.record: TableRecord = part.record.tables[number]
        with ExitStack() as stack:
            self.hot = stack.enter_context(closing(HotRowsFile(part, number)))
            self.frozen = stack.enter_context(closing(open_frozen(part, number)))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def counts(self) -> RowCounts:
        """Exact; reads two bytes a frozen row."""
        live = sum(int(live.shape[0]) for k in range(len(self.record.segments)) for _, live in self.live(k))
        return RowCounts(self.record.rows_hot, live + self.record.rows_initial)

    def live(self, segment: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first position, int64[n] of the positions behind it that are rows), range by range."""
        num_rows = self.record.segments[segment].num_rows
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            heat = self.frozen.read(f"heat.{segment}", start, min(num_rows, start + _ROWS_AT_ONCE))
            yield start, np.flatnonzero(heat != NOT_LIVE)


class TableRows:
    """One table of a cut. UnknownTable if it has none of that name."""

    def __init__(self, parts: Sequence[Part], name: str) -> None:
        with ExitStack() as stack:
            self._parts = [stack.enter_context(closing(_part_table(part, name))) for part in parts]
            self._stack = stack.pop_all()
        self.spec: TableSpec = self._parts[0].record.spec
        self._rows_at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // (4 * self.spec.dim)))

    def __enter__(self) -> TableRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def row_ids(self) -> Iterator[np.ndarray]:
        """int64[n] of every row, without reading the rows; in the order of `chunks`."""
        for table in self._parts:
            yield from table.hot.own.ranges("row_ids", _ROWS_AT_ONCE)
            for k, segment in enumerate(table.record.segments):
                with closing(open_object(table.part.objects, segment, self.spec)) as mapped:
                    rows = _rows_of(mapped, self.spec)
                    for start, live in table.live(k):
                        yield rows.row_ids_of(_locations(start, live))
            yield from table.frozen.ranges("initial_row_ids", _ROWS_AT_ONCE)

    def chunks(self) -> Iterator[RowChunk]:
        for table in self._parts:
            yield from self._hot(table)
            for k, segment in enumerate(table.record.segments):
                yield from self._segment(table, k, segment)
            for row_ids in table.frozen.ranges("initial_row_ids", self._rows_at_once):
                yield RowChunk(row_ids, self.initial(row_ids), self.initial_state_of(row_ids.shape[0]))

    def initial(self, row_ids: np.ndarray) -> np.ndarray:
        """int64[n] -> float32[n, D]: what these rows are before they are trained."""
        spec = self.spec
        return initial_values(row_ids, table_seed(spec), spec.dim, spec.init_min, spec.init_max)

    def initial_state_of(self, n: int) -> np.ndarray:
        return np.tile(initial_state(self.spec.optimizer, self.spec.dim), (n, 1))

    def _hot(self, table: PartTable) -> Iterator[RowChunk]:
        sums = table.hot.own.read("weight_decay")
        decay = WeightDecay(self.spec.optimizer.weight_decay)
        try:
            if sums.shape[0]:
                decay.restore(sums)
            for chunk in table.hot.chunks(self._rows_at_once):
                weights = chunk.weights.astype(np.float32)
                if sums.shape[0]:
                    if (chunk.last_steps >= sums.shape[0]).any():
                        raise corrupt(table.hot.path, "a last step has no sum of weight decay")
                    weights *= decay.pending(chunk.last_steps)[:, None]
                yield RowChunk(chunk.row_ids, weights, chunk.state)
        finally:
            decay.close()

    def _segment(self, table: PartTable, k: int, segment: SegmentRecord) -> Iterator[RowChunk]:
        with closing(open_object(table.part.objects, segment, self.spec)) as mapped:
            rows = _rows_of(mapped, self.spec)
            for first, live in table.live(k):
                for start in range(0, live.shape[0], self._rows_at_once):
                    locations = _locations(first, live[start : start + self._rows_at_once])
                    weights, codes, _ = rows.read_all(locations)
                    if segment.has_state:
                        state = decode_accumulator(self.spec, codes, self.spec.dim)
                    else:
                        state = self.initial_state_of(locations.shape[0])
                    yield RowChunk(rows.row_ids_of(locations), weights, state)


def open_frozen(part: Part, number: int) -> ColumnReader:
    record = part.record.tables[number]
    return open_columns(part.folder / frozen_file(number), frozen_columns(record), record.frozen)


def open_object(objects: Path, segment: SegmentRecord, table: TableSpec) -> MappedSegment:
    """Maps a segment of a snapshot where it lies. SegmentCorrupt unless it is what shard.json says; its blocks are not
    checked yet."""
    path = objects / segment_object(segment.digest)
    try:
        os.close(open_regular(path))
        mapped = open_segment(path, verify=False)
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror})") from None
    found = digest_of(mapped), mapped.size_bytes, mapped.num_rows, mapped.format.bits
    belongs_to = mapped.format.table, mapped.format.dim, mapped.format.num_buckets
    if found != (segment.digest, segment.size_bytes, segment.num_rows, segment.bits):
        mapped.close()
        raise corrupt(path, f"digest, bytes, rows and bits are {found}, not those of shard.json")
    if belongs_to != (table.name, table.dim, NUM_BUCKETS):
        mapped.close()
        raise corrupt(path, f"table, dim and buckets are {belongs_to}, not {(table.name, table.dim, NUM_BUCKETS)}")
    return mapped


def check_object(objects: Path, segment: SegmentRecord, table: TableSpec) -> int:
    """Reads all of a segment of a snapshot; its bytes. SegmentCorrupt."""
    with closing(open_object(objects, segment, table)) as mapped:
        for _ in mapped.check_all():
            pass
        return mapped.size_bytes


def _part_table(part: Part, name: str) -> PartTable:
    number = part.number_of(name)
    if number is None:
        names = ", ".join(repr(table.spec.name) for table in part.record.tables)
        raise UnknownTable(f"{part.folder.parent}: no table {name!r}; it has {names or 'none'}")
    return PartTable(part, number)


def _rows_of(mapped: MappedSegment, spec: TableSpec) -> SegmentRows:
    rows = SegmentRows(spec.dim)
    rows.set_file(0, mapped)
    return rows


def _locations(first: int, positions: np.ndarray) -> np.ndarray:
    """uint32[n] of slot 0; positions int64[n] count from `first`."""
    return (
        locations_of(0, first, int(positions[-1]) + 1)[positions] if positions.shape[0] else locations_of(0, first, 0)
    )
