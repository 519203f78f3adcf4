"""Writes a shard's part of a snapshot from rows that come from elsewhere, all of them hot: `frostline ckpt import`.

The rows may come in any order. They are spread by bucket in a scratch file beside the part, which is mapped, and go
from there into the hot file; so memory is some 40 bytes a row, whatever the dim, and a chunk. The one part owns all
buckets.

A row that is imported stands as if its last visit were at step 0 and as if it had had many: it is neither on probation
nor rare.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from embedding_server import heat
from embedding_server.errors import InvalidInput
from embedding_server.kernels.hashing import buckets_of
from embedding_server.optimizers import initial_state, num_state_columns
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_folder
from embedding_server.snapshot_file import ColumnWriter
from embedding_server.snapshot_format import (
    RECORD,
    FileRecord,
    ShardRecord,
    TableRecord,
    bucket_text,
    frozen_columns_of,
    frozen_file,
    hot_columns_of,
    hot_file,
    part_folder,
    write_sealed_json,
)
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS

_VISITS = 255  # "many": the most that a row counts
_BYTES_AT_ONCE = 8 << 20


class RowSource(Protocol):
    """Rows of one table. `chunks` may be called more than once, and gives the same."""

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """row_ids int64[n], weights float32[n, D], state float32[n, C]; None: that of a new row."""
        ...


@dataclass(frozen=True, slots=True)
class NewTable:
    """row_ids int64[n]: all that `rows` has, in its order; none twice (`sort_by_bucket` tells)."""

    spec: TableSpec
    row_ids: np.ndarray
    rows: RowSource


def sort_by_bucket(row_ids: np.ndarray) -> np.ndarray:
    """int64[n]: the order of a hot file. InvalidInput if a row_id occurs twice."""
    order = np.lexsort((row_ids, buckets_of(row_ids, NUM_BUCKETS)))
    ordered = row_ids[order]
    is_twice = ordered[1:] == ordered[:-1]
    if is_twice.any():
        raise InvalidInput(
            f"row_id {ordered[1:][is_twice][0]} occurs more than once ({int(is_twice.sum())} repeats in all); a row has"
            " one row_id: remove the others"
        )
    return order


def write_part(cut: Path, job: str, epoch: int, tables: Sequence[NewTable]) -> None:
    """Writes the only part of a cut at step 0. OSError, and the caller removes what is there."""
    folder = cut / part_folder(0, 1)
    folder.mkdir(parents=True)
    record = ShardRecord(
        format_version=1,
        part=0,
        num_parts=1,
        buckets=bucket_text(np.ones(NUM_BUCKETS, np.bool_)),
        job=job,
        step=0,
        epoch=epoch,
        tables=[_write_table(folder, number, table) for number, table in enumerate(tables)],
        parent=None,
        sequence=0,
    )
    sync_folder(folder)
    write_sealed_json(folder / RECORD, record.model_dump(mode="json"))


def _write_table(folder: Path, number: int, table: NewTable) -> TableRecord:
    spec, num_rows = table.spec, table.row_ids.shape[0]
    hot = ColumnWriter(folder / hot_file(number), hot_columns_of(spec, num_rows, num_rows, 0))
    try:
        frozen = ColumnWriter(folder / frozen_file(number), frozen_columns_of([], 0, 0))
        try:
            _append_rows(hot, table, folder / f"table-{number}{PARTIAL_SUFFIX}")
            for file in (hot, frozen):
                file.finish()
        except BaseException:
            frozen.abandon()
            raise
    except BaseException:
        hot.abandon()
        raise
    return TableRecord(
        spec=spec,
        rows_hot=num_rows,
        rows_written=num_rows,
        rows_initial=0,
        rows_waiting=0,
        segments=[],
        decay_steps=0,
        last_step_seen=0,
        rate=0.0,
        frostline=None,
        has_rare_frozen=False,
        counters={},
        hot=FileRecord.of(hot),
        frozen=FileRecord.of(frozen),
    )


def _append_rows(hot: ColumnWriter, table: NewTable, scratch: Path) -> None:
    spec, num_rows = table.spec, table.row_ids.shape[0]
    order = sort_by_bucket(table.row_ids)
    row_ids = table.row_ids[order]
    counts = np.bincount(buckets_of(row_ids, NUM_BUCKETS), minlength=NUM_BUCKETS)
    num_state = num_state_columns(spec.optimizer.kind, spec.dim)
    hot.append("row_ids", row_ids)
    for column in ("bucket_offsets", "written_offsets"):
        hot.append(column, np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32))
    hot.append("default_weights", np.zeros(spec.dim, np.float32))
    hot.append("default_state", initial_state(spec.optimizer, spec.dim))
    del row_ids
    places = np.empty(num_rows, np.int64)
    places[order] = np.arange(num_rows)
    del order
    rows = _scratch(scratch, num_rows, spec.dim + num_state)
    _spread(table, places, rows)
    for start in range(0, num_rows, _rows_at_once(rows)):
        some = rows[start : start + _rows_at_once(rows)]
        n = some.shape[0]
        hot.append("weights", some[:, : spec.dim])
        hot.append("state", some[:, spec.dim :])
        hot.append("last_steps", np.zeros(n, np.int32))
        hot.append("heat", np.full(n, round(heat.now_code(0, spec.policy.half_life_steps)), np.uint16))
        hot.append("visits", np.full(n, _VISITS, np.uint8))


def _rows_at_once(rows: np.ndarray) -> int:
    return max(1, _BYTES_AT_ONCE // (4 * rows.shape[1]))


def _spread(table: NewTable, places: np.ndarray, rows: np.ndarray) -> None:
    """Brings every row to its place in rows float32[n, D + C]."""
    dim, done = table.spec.dim, 0
    new_state = initial_state(table.spec.optimizer, dim)
    for row_ids, weights, state in table.rows.chunks():
        at = places[done : done + row_ids.shape[0]]
        if not np.array_equal(table.row_ids[done : done + row_ids.shape[0]], row_ids):
            raise InvalidInput(f"table {table.spec.name!r}: its file was changed while it was read; import it again")
        rows[at, :dim] = weights
        rows[at, dim:] = new_state if state is None else state
        done += row_ids.shape[0]
    if done != places.shape[0]:
        raise InvalidInput(f"table {table.spec.name!r}: its file was changed while it was read; import it again")


def _scratch(path: Path, num_rows: int, width: int) -> np.ndarray:
    """float32[num_rows, width] in a file that goes with the array. Its room is taken first, so that a full disk is an
    OSError and not a signal."""
    size = max(1, 4 * num_rows * width)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, size)
        mapped = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.float32, num_rows * width).reshape(num_rows, width)
