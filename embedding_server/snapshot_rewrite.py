"""Writes a part of a snapshot anew, offline, as a part of a full cut: `frostline ckpt compact`.

Hot rows are read through the chain (snapshot_hot.py) and written, so the new part needs no parent. Segments stay where
they are. Some rows may be left out: hot ones, those at their initial value and IDs below min_count are gone then, and
what is frozen in a segment is marked as no row.

Memory: a chunk, as HotRowsFile says. Thread safety: none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_file import sync_folder
from embedding_server.snapshot_file import ColumnReader, ColumnWriter
from embedding_server.snapshot_format import (
    NOT_LIVE,
    RECORD,
    FileRecord,
    SegmentRecord,
    TableRecord,
    frozen_columns,
    frozen_file,
    hot_columns,
    hot_file,
    write_sealed_json,
)
from embedding_server.snapshot_hot import HotRowsFile
from embedding_server.snapshot_objects import link_or_copy
from embedding_server.snapshot_parts import Part
from embedding_server.snapshot_rows import check_object, open_frozen, open_object
from embedding_server.store import NUM_BUCKETS

#: (table, row_ids int64[n]) -> bool[n]: which rows stay
Keeps = Callable[[str, np.ndarray], np.ndarray]
#: (part, table, segment) -> what the new part says in its place, of as many rows; called after the segment was read
Replace = Callable[[Part, str, SegmentRecord], SegmentRecord]

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 16, 8 << 20
_HOT_COLUMNS = ("row_ids", "weights", "state", "last_steps", "heat", "visits")  # of a HotChunk


def rewrite_part(part: Part, cut: Path, epoch: int, keeps: Keeps | None = None, replace: Replace | None = None) -> None:
    """Writes the part into its folder of `cut`, in the same folder of a job, as of `epoch`, shard.json last.

    keeps None: all rows stay. SegmentCorrupt, OSError; the caller removes what is there then.
    """
    folder = cut / part.folder.name
    folder.mkdir(parents=True)
    tables = [_TableRewrite(part, number, folder, keeps, replace).run() for number in range(len(part.record.tables))]
    sync_folder(folder)
    record = part.record.model_copy(update={"epoch": epoch, "tables": tables, "parent": None, "sequence": 0})
    write_sealed_json(folder / RECORD, record.model_dump(mode="json"))


class _TableRewrite:
    def __init__(self, part: Part, number: int, folder: Path, keeps: Keeps | None, replace: Replace | None) -> None:
        self._part, self._number, self._folder, self._keeps, self._replace = part, number, folder, keeps, replace
        self._old = part.record.tables[number]
        spec = self._old.spec
        self._rows_at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // (4 * spec.dim)))

    def run(self) -> TableRecord:
        with closing(HotRowsFile(self._part, self._number)) as hot:
            counts = self._count_hot(hot)
            rows = int(counts.sum())
            record = self._old.model_copy(update={"rows_hot": rows, "rows_written": rows})
            writer = ColumnWriter(self._folder / hot_file(self._number), hot_columns(record))
            hot_record = _finished(writer, lambda: self._write_hot(writer, hot, counts))
        return self._with_frozen(record.model_copy(update={"hot": hot_record}))

    def _kept(self, row_ids: np.ndarray) -> np.ndarray:
        """bool[n]."""
        if self._keeps is None:
            return np.ones(row_ids.shape[0], np.bool_)
        return self._keeps(self._old.spec.name, row_ids)

    def _count_hot(self, hot: HotRowsFile) -> np.ndarray:
        """int64[NUM_BUCKETS]: hot rows that stay."""
        if self._keeps is None:
            return np.diff(hot.offsets())
        counts = np.zeros(NUM_BUCKETS, np.int64)
        for row_ids in hot.own.ranges("row_ids", _ROWS_AT_ONCE):
            counts += np.bincount(buckets_of(row_ids[self._kept(row_ids)], NUM_BUCKETS), minlength=NUM_BUCKETS)
        return counts

    def _write_hot(self, writer: ColumnWriter, hot: HotRowsFile, counts: np.ndarray) -> None:
        for column in ("bucket_offsets", "written_offsets"):
            writer.append(column, np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32))
        for column in ("default_weights", "default_state", "weight_decay"):
            writer.append(column, hot.own.read(column))
        for chunk in hot.chunks(self._rows_at_once):
            kept = self._kept(chunk.row_ids)
            for column in _HOT_COLUMNS:
                writer.append(column, getattr(chunk, column)[kept])

    # Frozen rows, and IDs below min_count -------------------------------------------------------------------------

    def _with_frozen(self, record: TableRecord) -> TableRecord:
        name = frozen_file(self._number)
        if self._keeps is None and self._replace is None:
            with closing(open_frozen(self._part, self._number)) as frozen:
                for _ in frozen.verify():  # what is linked is as sound as what is written
                    pass
            for segment in record.segments:
                check_object(self._part.objects, segment, record.spec)
            link_or_copy(self._part.folder / name, self._folder / name, record.frozen.size_bytes)
            return record
        with closing(open_frozen(self._part, self._number)) as frozen:
            initial, waiting = (self._count(frozen, of) for of in ("initial_row_ids", "waiting_row_ids"))
            record = record.model_copy(update={"rows_initial": initial, "rows_waiting": waiting})
            writer = ColumnWriter(self._folder / name, frozen_columns(record))
            file = _finished(writer, lambda: self._write_frozen(writer, frozen))
        segments = record.segments
        if self._replace is not None:
            segments = [self._replace(self._part, record.spec.name, segment) for segment in segments]
        return record.model_copy(update={"frozen": file, "segments": segments})

    def _count(self, frozen: ColumnReader, column: str) -> int:
        return sum(int(np.count_nonzero(self._kept(row_ids))) for row_ids in frozen.ranges(column, _ROWS_AT_ONCE))

    def _write_frozen(self, writer: ColumnWriter, frozen: ColumnReader) -> None:
        for ids, values in (("initial_row_ids", "initial_heat"), ("waiting_row_ids", "waiting_counts")):
            both = (frozen.ranges(column, _ROWS_AT_ONCE) for column in (ids, values))
            for row_ids, of_rows in zip(*both, strict=True):
                kept = self._kept(row_ids)
                writer.append(ids, row_ids[kept])
                writer.append(values, of_rows[kept])
        for k, segment in enumerate(self._old.segments):
            with closing(open_object(self._part.objects, segment, self._old.spec)) as mapped:
                for _ in mapped.check_all():
                    pass
                start = 0
                for codes in frozen.ranges(f"heat.{k}", _ROWS_AT_ONCE):
                    stop = start + codes.shape[0]
                    codes[~self._kept(np.array(mapped.arrays.row_ids[start:stop]))] = NOT_LIVE
                    writer.append(f"heat.{k}", codes)
                    start = stop


def _finished(writer: ColumnWriter, write: Callable[[], None]) -> FileRecord:
    """The file under its name, on disk; it goes if that fails."""
    try:
        write()
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return FileRecord.of(writer)
