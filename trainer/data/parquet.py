"""Parquet files: columns chosen by the job, read row group by row group.

    label           number or boolean column, 0 or 1
    dense           number columns; null reads as 0
    features        integer column: the row_id is the number itself (uint64 by its bits); null: an empty bag
                    string column: the row_id is the word's 64-bit hash; null: an empty bag
                    list of integers or strings: a bag; null: an empty bag

Bad rows: a label that is null or neither 0 nor 1, a dense value that is nan or infinite, a null inside a list.
Faults of a whole file: no Parquet file, cut short, a column that is missing or of another type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from embedding_server.errors import InvalidInput
from trainer.data.bad_rows import BadRows, check_file
from trainer.data.batch import Feature, Schema, Share
from trainer.data.row_ids import word_ids
from trainer.data.spec import ParquetData, Split
from trainer.data.stream import Part, StreamReader
from trainer.section import did_you_mean

BLOCK_ROWS = 64 << 10


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Consecutive rows of one file, as Arrow holds them."""

    path: Path
    first_row: int  # number of row 0 in its file, from 1
    rows: pa.RecordBatch

    @property
    def num_rows(self) -> int:
        return int(self.rows.num_rows)


def schema_of(data: ParquetData) -> Schema:
    features = tuple(Feature(name, part.table or name) for name, part in data.features.items())
    return Schema(tuple(data.dense), features)


class ParquetReader(StreamReader[TableBlock]):
    def __init__(self, data: ParquetData, split: Split, share: Share) -> None:
        super().__init__(schema_of(data), share, BadRows(data.on_bad_row, data.max_bad_rows), data.files(split))
        self._label = data.label
        self._feature_columns = [part.column or name for name, part in data.features.items()]
        self._num_rows = [self._check(path) for path in self.files]
        if not sum(self._num_rows):
            raise InvalidInput(f"{self.files[0]} row 1: there is no row in any file of this split; check `data`")

    @property
    def steps_per_pass(self) -> int:
        return -(-sum(self._num_rows) // self.share.batch_size)

    def _check(self, path: Path) -> int:
        """Number of rows in a file whose columns are all there, with types that can be read."""
        with _open(path) as file:
            schema = file.schema_arrow
            _check_column(path, schema, self._label, "label", _is_number)
            for column in self.schema.dense:
                _check_column(path, schema, column, "dense feature", _is_number)
            for column in self._feature_columns:
                _check_column(path, schema, column, "feature", _is_bag)
            return int(file.metadata.num_rows)

    def _blocks(self, first_position: int) -> Iterator[tuple[TableBlock, int]]:
        columns = list(dict.fromkeys([self._label, *self.schema.dense, *self._feature_columns]))
        skip = first_position
        for path, num_rows in zip(self.files, self._num_rows, strict=True):
            if skip >= num_rows:
                skip -= num_rows
                continue
            for block in _blocks_of(path, columns, skip):
                first = max(0, skip - (block.first_row - 1))
                if first < block.num_rows:
                    yield block, first
            skip = 0

    def _parse(self, block: TableBlock, low: int, high: int) -> Part:
        rows = block.rows.slice(low, high - low)
        faults: dict[int, str] = {}
        labels = self._labels(rows, faults)
        dense = self._dense(rows, faults)
        bags = [_bag(rows.column(column), column, faults) for column in self._feature_columns]
        if faults:
            for position, reason in sorted(faults.items()):
                self._bad.reject(block.path, block.first_row + low + position, reason)
            good = np.ones(len(labels), bool)
            good[list(faults)] = False
            labels, dense = labels[good], dense[good]
            bags = [(values[np.repeat(good, lengths)], lengths[good]) for values, lengths in bags]
        values = np.concatenate([values for values, _ in bags])
        return Part(dense, values, np.stack([lengths for _, lengths in bags]).astype(np.int32), labels)

    def _labels(self, rows: pa.RecordBatch, faults: dict[int, str]) -> np.ndarray:
        labels = _numbers(rows.column(self._label), null=np.nan)
        for position in np.flatnonzero((labels != 0.0) & (labels != 1.0)).tolist():
            faults[position] = f"label {self._label!r} is {_shown(rows, self._label, position)}, must be 0 or 1"
        return labels.astype(np.float32)

    def _dense(self, rows: pa.RecordBatch, faults: dict[int, str]) -> np.ndarray:
        dense = np.zeros((rows.num_rows, self.schema.num_dense), np.float32)
        for i, column in enumerate(self.schema.dense):
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is rejected below
                dense[:, i] = _numbers(rows.column(column), null=0.0)
            for position in np.flatnonzero(~np.isfinite(dense[:, i])).tolist():
                shown = _shown(rows, column, position)
                faults.setdefault(position, f"dense {column!r} is {shown} and must be finite in float32")
        return dense


def _blocks_of(path: Path, columns: Sequence[str], skip: int) -> Iterator[TableBlock]:
    """Blocks of a file from the row group that holds row `skip` (from 0) on."""
    first_row = 1
    with _open(path) as file:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if skip >= first_row - 1 + num_rows:
                first_row += num_rows
                continue
            try:
                for rows in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=list(columns)):
                    yield TableBlock(path, first_row, rows)
                    first_row += rows.num_rows
            except (pa.ArrowException, OSError) as error:
                raise InvalidInput(
                    f"{path} row {first_row} or later: row group {group} cannot be read ({_one_line(error)}); "
                    "fetch the file again"
                ) from None


def _open(path: Path) -> pq.ParquetFile:
    check_file(path)
    try:
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(
            f"{path}: is no Parquet file, or was cut short ({_one_line(error)}); fetch the file again"
        ) from None


def _check_column(path: Path, schema: pa.Schema, column: str, role: str, is_readable: object) -> None:
    count = schema.names.count(column)
    if count == 0:
        raise InvalidInput(f"{path}: has no column {column!r} for the {role}{did_you_mean(column, schema.names)}")
    if count > 1:
        raise InvalidInput(f"{path}: has {count} columns {column!r}; give them different names")
    kind = schema.field(column).type
    if not is_readable(kind):  # type: ignore[operator]
        wanted = "a number" if is_readable is _is_number else "integer, string, or a list of one of them"
        raise InvalidInput(f"{path}: column {column!r} is {kind} and a {role} must be {wanted}; convert the column")


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _is_word(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_word(kind.value_type)
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _is_bag(kind: pa.DataType) -> bool:
    return _is_word(kind.value_type if _is_list(kind) else kind)


def _numbers(column: pa.Array, null: float) -> np.ndarray:
    """float64 of a number column, nulls replaced."""
    if types.is_boolean(column.type):
        column = column.cast(pa.int8())
    numbers = column.cast(pa.float64(), safe=False)
    return pc.fill_null(numbers, null).to_numpy(zero_copy_only=False)


def _bag(column: pa.Array, name: str, faults: dict[int, str]) -> tuple[np.ndarray, np.ndarray]:
    """row_ids int64[n] and lengths int64[k] of one feature."""
    if not _is_list(column.type):
        present = column.is_valid().to_numpy(zero_copy_only=False)
        return _row_ids(column.drop_null()), present.astype(np.int64)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    elements = pc.list_flatten(column)
    if elements.null_count:
        owners = np.repeat(np.arange(len(lengths)), lengths)
        for position in np.unique(owners[elements.is_null().to_numpy(zero_copy_only=False)]):
            faults.setdefault(int(position), f"feature {name!r} has a null inside its list; leave it out of the list")
        elements = pc.fill_null(elements, 0 if types.is_integer(elements.type) else "")
    return _row_ids(elements), lengths


def _row_ids(column: pa.Array) -> np.ndarray:
    """int64 row_ids of an array without nulls."""
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_integer(column.type):
        numbers = column.to_numpy(zero_copy_only=False)
        return numbers.view(np.int64) if numbers.dtype == np.uint64 else numbers.astype(np.int64)
    encoded = column.dictionary_encode()
    return word_ids(encoded.dictionary.to_pylist())[encoded.indices.to_numpy(zero_copy_only=False)]


def _shown(rows: pa.RecordBatch, column: str, position: int) -> str:
    return repr(rows.column(column)[position].as_py())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
