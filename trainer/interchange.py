"""Tables as files that other programs read and write: what the three formats hold, and reading them.

safetensors  one table: row_ids I64[n], weights F32[n, D], and state F32[n, C] if it is there: the optimizer's columns
             as embedding_server/optimizers.py orders them. Other tensors are refused.
parquet      one table: columns row_id int64, vector of D float32 (a list, or a list of fixed size), and state likewise
             if it is there. Other columns are left aside.
torchrec     the state dict of a torchrec EmbeddingBagCollection: `embedding_bags.T.weight` F32[N, D], whose row i is
             row_id i; prefixes of an enclosing model are taken, and its other tensors left aside. TorchRec keeps the
             optimizer's state in the optimizer, under these names, which are taken if the file has them:
                 rowwise_adagrad    T.momentum1 F32[N]
                 adagrad            T.momentum1 F32[N, D]
                 adam               T.momentum1 F32[N, D] (the first moment), T.exp_avg_sq F32[N, D]

A file is input from elsewhere: nothing in it is executed, and every number is checked before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels.visits import has_duplicates
from embedding_server.optimizers import num_state_columns
from embedding_server.snapshot_build import sort_by_bucket
from embedding_server.spec import TableSpec
from trainer.tensor_file import Tensor, TensorFile

FileFormat = Literal["safetensors", "parquet", "torchrec"]
_WEIGHT = re.compile(r"(?:.*\.)?embedding(?:_bag)?s\.([^.]+)\.weight", re.DOTALL)
_BYTES_AT_ONCE = 8 << 20
MAX_ROWS = 2**31  # of a hot file

Chunk = tuple[np.ndarray, np.ndarray, np.ndarray | None]


class TableFile(Protocol):
    """One table of a file. InvalidInput, naming the file, for what breaks a rule."""

    table: str
    dim: int
    num_state_columns: int | None  # None: the file has no state
    where: str  # for messages

    def chunks(self) -> Iterator[Chunk]:
        """row_ids int64[n], weights float32[n, D], state float32[n, C] or None; each call from the beginning."""
        ...


def torchrec_weight(table: str) -> str:
    return f"embedding_bags.{table}.weight"


def state_tensors(spec: TableSpec) -> list[tuple[str, slice, bool]]:
    """TorchRec's names for columns of our state, and whether the tensor is a vector. InvalidInput if it has none."""
    first, dim = f"{spec.name}.momentum1", spec.dim
    match spec.optimizer.kind:
        case "sgd":
            return []
        case "rowwise_adagrad":
            return [(first, slice(0, 1), True)]
        case "adagrad":
            return [(first, slice(0, dim), False)]
        case "adam":
            return [(first, slice(0, dim), False), (f"{spec.name}.exp_avg_sq", slice(dim, 2 * dim), False)]
    raise InvalidInput(
        f"table {spec.name!r}: TorchRec has no optimizer {spec.optimizer.kind}; leave --state out, or choose another"
        " format"
    )


def metadata_of(spec: TableSpec) -> dict[str, str]:
    """Of a safetensors or Parquet file; for people, nothing reads it."""
    return {"format": "frostline-table", "table": spec.name, "optimizer": spec.optimizer.model_dump_json()}


@contextmanager
def open_tables(
    files: Sequence[Path], kind: FileFormat, names: Sequence[str], kind_of: Callable[[str], str]
) -> Iterator[list[TableFile]]:
    """The tables of files. safetensors, parquet: names[i] is that of files[i]. torchrec: names chooses; none: all.

    kind_of(table): of its optimizer."""
    with ExitStack() as stack:
        if kind != "torchrec":
            if len(names) != len(files):
                raise InvalidInput(
                    f"{len(files)} files and {len(names)} --table: name the table of each file, in order"
                )
            if kind == "parquet":
                from trainer.parquet_tables import ParquetTable

                tables: list[TableFile] = [
                    stack.enter_context(closing(ParquetTable(file, name)))
                    for file, name in zip(files, names, strict=True)
                ]
            else:
                tables = [
                    _PlainTable(stack.enter_context(closing(TensorFile(file))), name)
                    for file, name in zip(files, names, strict=True)
                ]
        else:
            opened = [stack.enter_context(closing(TensorFile(file))) for file in files]
            tables = list(_torchrec_tables(opened, names, kind_of))
        found = [table.table for table in tables]
        if len(set(found)) != len(found):
            raise InvalidInput(f"tables {', '.join(map(repr, found))}: each must be there once")
        yield tables


class _PlainTable:
    """Format safetensors."""

    def __init__(self, file: TensorFile, table: str) -> None:
        self.table, self._file, self.where = table, file, str(file.path)
        tensors = file.tensors
        if not {"row_ids", "weights"} <= tensors.keys() <= {"row_ids", "weights", "state"}:
            raise file.bad(
                f"has tensors {_some(tensors)}; a table has row_ids I64[n], weights F32[n, D] and, if need be, state"
                " F32[n, C] (a TorchRec state dict is --format torchrec)"
            )
        self._n = expect(file, "row_ids", "I64", 1).shape[0]
        refuse_too_many(self.where, self._n)
        self.dim = self._width("weights")
        self.num_state_columns = self._width("state") if "state" in tensors else None

    def _width(self, name: str) -> int:
        shape = expect(self._file, name, "F32", 2).shape
        if shape[0] != self._n:
            raise self._file.bad(f"{name} has {shape[0]} rows, and row_ids {self._n}; they must have the same number")
        return shape[1]

    def chunks(self) -> Iterator[Chunk]:
        for start, stop in _ranges(self._n, self.dim + (self.num_state_columns or 0)):
            state = None if self.num_state_columns is None else self._file.read("state", start, stop)
            yield self._file.read("row_ids", start, stop), self._file.read("weights", start, stop), state


class _TorchrecTable:
    """Format torchrec."""

    def __init__(self, file: TensorFile, table: str, weight: str, optimizer_kind: str) -> None:
        self.table, self._file, self._weight = table, file, weight
        self.where = f"{file.path}, {weight}"
        self._n, self.dim = expect(file, weight, "F32", 2).shape
        refuse_too_many(self.where, self._n)
        self._optimizer_kind = optimizer_kind
        self._states = self._state_names(optimizer_kind)
        widths = [self._state_width(name, is_vector) for name, is_vector in self._states]
        self.num_state_columns = sum(widths) if self._states else None

    def _state_names(self, optimizer_kind: str) -> list[tuple[str, bool]]:
        names = [(f"{self.table}.momentum1", optimizer_kind == "rowwise_adagrad")]
        if optimizer_kind == "adam":
            names.append((f"{self.table}.exp_avg_sq", False))
        there = [name for name, _ in names if name in self._file.tensors]
        if not there:
            return []
        if len(there) != len(names):
            raise self._file.bad(
                f"has {there[0]} without {(set(dict(names)) - set(there)).pop()}; bring both, or neither"
            )
        return names

    def _state_width(self, name: str, is_vector: bool) -> int:
        shape = expect(self._file, name, "F32", None).shape
        wanted = [(self._n,), (self._n, 1)] if is_vector else [(self._n, self.dim)]
        if shape not in wanted:
            raise self._file.bad(
                f"{name} has shape {list(shape)}, and optimizer {self._optimizer_kind!r} has {list(wanted[0])} for"
                f" table {self.table!r}; name the optimizer whose state it is"
            )
        return 1 if is_vector else self.dim

    def chunks(self) -> Iterator[Chunk]:
        for start, stop in _ranges(self._n, self.dim + (self.num_state_columns or 0)):
            states = [self._file.read(name, start, stop).reshape(stop - start, -1) for name, _ in self._states]
            state = np.concatenate(states, axis=1) if states else None
            yield np.arange(start, stop), self._file.read(self._weight, start, stop), state


def _torchrec_tables(
    files: Sequence[TensorFile], names: Sequence[str], kind_of: Callable[[str], str]
) -> Iterator[_TorchrecTable]:
    found: dict[str, list[tuple[TensorFile, str]]] = {}
    for file in files:
        for key in file.tensors:
            if match := _WEIGHT.fullmatch(key):
                found.setdefault(match[1], []).append((file, key))
    if not found:
        raise files[0].bad(
            f"has no tensor `embedding_bags.TABLE.weight`, but {_some(files[0].tensors)}; name the state dict of an"
            " EmbeddingBagCollection, or another --format"
        )
    for name in names or found:
        if name not in found:
            where = ", ".join(str(file.path) for file in files)
            raise InvalidInput(f"{where}: no file has embedding_bags.{name}.weight; there are tables {_some(found)}")
        if len(found[name]) > 1:
            keys = ", ".join(f"{key} in {file.path}" for file, key in found[name])
            raise InvalidInput(f"table {name!r} is there {len(found[name])} times ({keys}); a table has one weight")
        (file, key), *_ = found[name]
        yield _TorchrecTable(file, name, key, kind_of(name))


def refuse_too_many(where: str, num_rows: int) -> None:
    """Before any of them is read."""
    if num_rows >= MAX_ROWS:
        raise InvalidInput(f"{where}: has {num_rows} rows; a snapshot's part has less than 2^31")


def expect(file: TensorFile, name: str, dtype: str, num_axes: int | None) -> Tensor:
    tensor = file.tensors[name]
    if tensor.dtype != dtype:
        to = "int64" if dtype == "I64" else "float32"
        raise file.bad(f"{name} is {tensor}; it must be {dtype}: convert it to {to} first")
    if num_axes is not None and len(tensor.shape) != num_axes:
        raise file.bad(f"{name} is {tensor}; it must have {num_axes} axes")
    return tensor


def check_table(table: TableFile, spec: TableSpec) -> np.ndarray:
    """Reads a table once and returns its row_ids int64[n]. InvalidInput for what may not become rows."""
    num_state = num_state_columns(spec.optimizer.kind, spec.dim)
    if table.num_state_columns not in (None, num_state):
        raise InvalidInput(
            f"{table.where}: {table.num_state_columns} columns of state, and optimizer {spec.optimizer.kind} keeps"
            f" {num_state}; name the --optimizer that the file is from, or leave the state out of it"
        )
    row_ids = [np.empty(0, np.int64)]
    for some, weights, state in table.chunks():
        if has_duplicates(some):  # now: a row that is there a billion times takes some kB of a Parquet file
            _name_duplicates(table, some)
        _check_finite(table, "a weight", some, weights)
        if state is not None:
            _check_finite(table, "an optimizer state", some, state)
            _check_sign(table, spec, some, state)
        row_ids.append(some)
    every = np.concatenate(row_ids)
    _name_duplicates(table, every)
    return every


def _name_duplicates(table: TableFile, row_ids: np.ndarray) -> None:
    try:
        sort_by_bucket(row_ids)
    except InvalidInput as error:
        raise InvalidInput(f"{table.where}: {error}") from None


def _check_finite(table: TableFile, what: str, row_ids: np.ndarray, values: np.ndarray) -> None:
    is_bad = ~np.isfinite(values).all(axis=1)
    if is_bad.any():
        raise InvalidInput(
            f"{table.where}: row_id {row_ids[is_bad][0]} has {what} that is not finite; such a row would never be"
            " right again: repair it or leave it out"
        )


def _check_sign(table: TableFile, spec: TableSpec, row_ids: np.ndarray, state: np.ndarray) -> None:
    dim = spec.dim
    squares = {"adam": state[:, dim:], "ftrl": state[:, :dim]}.get(spec.optimizer.kind, state)
    is_bad = (squares < 0).any(axis=1)
    if is_bad.any():
        raise InvalidInput(
            f"{table.where}: row_id {row_ids[is_bad][0]} has an accumulator below 0; it is a sum of squares: is this"
            f" the state of {spec.optimizer.kind}?"
        )


def _ranges(n: int, width: int) -> Iterator[tuple[int, int]]:
    at_once = max(1, min(1 << 16, _BYTES_AT_ONCE // (4 * max(1, width))))
    for start in range(0, n, at_once):
        yield start, min(n, start + at_once)


def _some(names: object) -> str:
    listed = [repr(str(name)[:100]) for name in names]  # type: ignore[attr-defined]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "none"
