"""Tables as Parquet files, written and read by row groups (format in interchange.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedding_server.errors import InvalidInput
from embedding_server.optimizers import num_state_columns
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_fd
from embedding_server.snapshot_rows import RowChunk, TableRows
from embedding_server.spec import MAX_DIM
from trainer.interchange import Chunk, metadata_of, refuse_too_many
from trainer.tensor_file import open_input, publish, refuse_existing

GROUP_ROWS = 1 << 16  # of a row group that is written
_BATCH_ROWS, _BATCH_BYTES = 1 << 14, 8 << 20
_MAX_FOOTER_ITEMS = 1 << 20  # of each string and list in the footer
_BUFFER_BYTES = 1 << 20
_MAGIC = b"PAR1"


def write_parquet(out: Path, rows: TableRows, *, with_state: bool) -> None:
    """InvalidInput if there is a file of that name; OSError, and no file, if it cannot be written."""
    refuse_existing(out)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    spec = rows.spec
    fields = [pa.field("row_id", pa.int64(), False), _vector_field("vector", spec.dim)]
    if with_state:
        fields.append(_vector_field("state", num_state_columns(spec.optimizer.kind, spec.dim)))
    schema = pa.schema(fields, metadata_of(spec))
    try:
        with pq.ParquetWriter(partial, schema, write_page_checksum=True, use_dictionary=False) as writer:
            for group in _groups(rows.chunks()):
                columns = [pa.array(group.row_ids), _vectors(group.weights)]
                if with_state:
                    columns.append(_vectors(group.state))
                writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP_ROWS)
        _publish(partial, out)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _vector_field(name: str, width: int) -> pa.Field:
    return pa.field(name, pa.list_(pa.field("element", pa.float32(), False), width), False)


def _vectors(rows: np.ndarray) -> pa.Array:
    """float32[n, D] -> list of fixed size."""
    values = pa.array(np.ascontiguousarray(rows).reshape(-1), pa.float32())
    kind = pa.list_(pa.field("element", pa.float32(), False), rows.shape[1])
    return pa.FixedSizeListArray.from_arrays(values, type=kind)


def _groups(chunks: Iterator[RowChunk]) -> Iterator[RowChunk]:
    """Chunks put together, so that small ones, of small segments, do not make row groups of their own."""
    waiting: list[RowChunk] = []
    for chunk in chunks:
        waiting.append(chunk)
        if sum(part.row_ids.shape[0] for part in waiting) >= GROUP_ROWS:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _together(parts: list[RowChunk]) -> RowChunk:
    return RowChunk(
        np.concatenate([part.row_ids for part in parts]),
        np.concatenate([part.weights for part in parts]),
        np.concatenate([part.state for part in parts]),
    )


def _publish(partial: Path, out: Path) -> None:
    fd = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)
    publish(partial, out)


class ParquetTable:
    """A table in a Parquet file (interchange.TableFile)."""

    def __init__(self, path: Path, table: str) -> None:
        self.table, self.where = table, str(path)
        self._file = os.fdopen(open_input(path), "rb")
        try:
            self._check_magic()
            self._parquet = self._open()
            self.dim, self.num_state_columns = self._check_schema()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _bad(self, what: str) -> InvalidInput:
        return InvalidInput(f"{self.where}: {what}")

    def _check_magic(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        ends = [os.pread(self._file.fileno(), 4, 0), os.pread(self._file.fileno(), 4, max(0, size - 4))]
        if size < 12 or ends != [_MAGIC, _MAGIC]:
            raise self._bad("does not begin and end as a Parquet file does")

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                pa.PythonFile(self._file, "r"),
                buffer_size=_BUFFER_BYTES,
                pre_buffer=False,
                thrift_string_size_limit=_MAX_FOOTER_ITEMS,
                thrift_container_size_limit=_MAX_FOOTER_ITEMS,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError) as error:
            raise self._bad(f"is no sound Parquet file ({_one_line(error)})") from None

    def _check_schema(self) -> tuple[int, int | None]:
        """Width of the vectors, and of the state."""
        schema = self._parquet.schema_arrow
        for name in ("row_id", "vector"):
            if schema.get_field_index(name) < 0:
                raise self._bad(
                    f"has no column {name!r}, or more than one, but {', '.join(schema.names[:20])}; a table has row_id"
                    " int64 and vector, a list of float32"
                )
        if schema.field("row_id").type != pa.int64():
            raise self._bad(f"row_id is {schema.field('row_id').type}; it must be int64: cast it")
        has_state = schema.get_field_index("state") >= 0
        for name in ("vector", "state") if has_state else ("vector",):
            kind = schema.field(name).type
            is_list = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind)
            if not is_list or kind.value_type != pa.float32():
                raise self._bad(f"{name} is {kind}; it must be a list of float32: cast it")
        self._check_sizes()
        first = next(self._batches(has_state), None)
        return (self._width(first, "vector"), self._width(first, "state") if has_state else None)

    def _check_sizes(self) -> None:
        """Before a page is read: a list of a billion zeros takes some kB. Takes so many rows at a time that they are of
        bounded size."""
        metadata, width = self._parquet.metadata, 1
        refuse_too_many(self.where, metadata.num_rows)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.partition(".")[0]
                if name not in ("row_id", "vector", "state"):
                    continue
                width = max(width, -(-column.num_values // max(1, group.num_rows)))
                if width > 2 * MAX_DIM:
                    raise self._bad(f"{name} has {width} numbers a row; at most {MAX_DIM}, and twice as many of state")
        self._rows_at_once = max(1, min(_BATCH_ROWS, _BATCH_BYTES // (4 * width)))

    def chunks(self) -> Iterator[Chunk]:
        has_state = self.num_state_columns is not None
        for batch in self._batches(has_state):
            row_ids = batch.column("row_id")
            if row_ids.null_count:
                raise self._bad("a row_id is null; each row has one")
            weights = self._rows(batch, "vector", self.dim)
            state = self._rows(batch, "state", self.num_state_columns) if self.num_state_columns is not None else None
            yield row_ids.to_numpy(), weights, state

    def _batches(self, has_state: bool) -> Iterator[pa.RecordBatch]:
        columns = ["row_id", "vector", *(["state"] if has_state else [])]
        try:
            for batch in self._parquet.iter_batches(self._rows_at_once, columns=columns, use_threads=False):
                if batch.num_rows:
                    yield batch
        except (pa.ArrowException, OSError) as error:
            raise self._bad(f"cannot be read ({_one_line(error)}); it is damaged") from None

    def _width(self, first: pa.RecordBatch | None, name: str) -> int:
        """first: the first rows; None: there are none."""
        kind = self._parquet.schema_arrow.field(name).type
        if pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        if first is None:
            raise self._bad(f"has no rows, and {name} is {kind}: its width is unknown; write a list of fixed size")
        return first.column(name).value_lengths()[0].as_py() or 0

    def _rows(self, batch: pa.RecordBatch, name: str, width: int) -> np.ndarray:
        """float32[n, width] of a column of lists."""
        column = batch.column(name)
        values = column.flatten()
        if column.null_count or values.null_count:
            raise self._bad(f"a {name} is null, or a number in one")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != width).any():
            at = int(np.argmax(lengths != width))
            row_id = batch.column("row_id")[at].as_py()
            raise self._bad(f"row_id {row_id}: {name} has {lengths[at]} numbers, and {width} before; all have the same")
        return values.to_numpy(zero_copy_only=False).reshape(batch.num_rows, width)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
