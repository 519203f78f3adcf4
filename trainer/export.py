"""A table of a snapshot as a file that others read: `frostline ckpt export`. Formats are described in interchange.py.

Rows come as a look-up gives them (snapshot_rows.py), in chunks, so memory is bounded whatever the table's size. A file
appears under its name when it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.optimizers import num_state_columns
from embedding_server.snapshot_parts import Part
from embedding_server.snapshot_rows import RowChunk, TableRows
from embedding_server.spec import TableSpec
from trainer.interchange import metadata_of, state_tensors, torchrec_weight
from trainer.tensor_file import Tensor, TensorFileWriter

_FILL_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    path: str
    rows: dict[str, int]  # written, by table
    dropped: dict[str, int]  # torchrec: row_ids outside, by table
    initial: dict[str, int]  # torchrec: IDs that are no rows, by table
    bytes: int


def export_table(parts: Sequence[Part], table: str, out: Path, *, is_parquet: bool, with_state: bool) -> Exported:
    """Parquet, or safetensors; with_state: if the optimizer keeps any.

    InvalidInput, UnknownTable, SegmentCorrupt, OSError; then there is no file.
    """
    with TableRows(parts, table) as rows:
        n = sum(row_ids.shape[0] for row_ids in rows.row_ids())
        with_state &= num_state_columns(rows.spec.optimizer.kind, rows.spec.dim) > 0
        if is_parquet:
            from trainer.parquet_tables import write_parquet

            write_parquet(out, rows, with_state=with_state)
        else:
            _write_safetensors(out, rows, n, with_state=with_state)
    return Exported(str(out), {table: n}, {}, {}, out.stat().st_size)


def _write_safetensors(out: Path, rows: TableRows, n: int, *, with_state: bool) -> None:
    spec = rows.spec
    tensors = {"row_ids": Tensor("I64", (n,)), "weights": Tensor("F32", (n, spec.dim))}
    if with_state:
        tensors["state"] = Tensor("F32", (n, num_state_columns(spec.optimizer.kind, spec.dim)))
    writer = TensorFileWriter(out, tensors, metadata_of(spec))
    try:
        for chunk in rows.chunks():
            writer.append("row_ids", chunk.row_ids)
            writer.append("weights", chunk.weights)
            if with_state:
                writer.append("state", chunk.state)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def export_torchrec(
    parts: Sequence[Part],
    num_embeddings: dict[str, int],
    out: Path,
    *,
    with_state: bool = False,
    drop_outside: bool = False,
) -> Exported:
    """The state dict of an EmbeddingBagCollection with these tables; IDs that are no rows get their initial value.

    InvalidInput, with their number, if a table has row_ids outside 0 to num_embeddings - 1 and drop_outside is False.
    """
    with ExitStack() as stack:
        tables = [stack.enter_context(TableRows(parts, name)) for name in num_embeddings]
        outside = {rows.spec.name: _count_outside(rows, num_embeddings[rows.spec.name]) for rows in tables}
        if any(number for number, _, _ in outside.values()) and not drop_outside:
            raise InvalidInput(_outside_text(outside, num_embeddings))
        tensors: dict[str, Tensor] = {}
        for rows in tables:
            tensors |= _torchrec_tensors(rows.spec, num_embeddings[rows.spec.name], with_state)
        writer = TensorFileWriter(out, tensors, {"format": "pt"})
        try:
            for rows in tables:
                _fill(writer, rows, num_embeddings[rows.spec.name], with_state)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
    inside = {name: total - number for name, (number, total, _) in outside.items()}
    return Exported(
        str(out),
        inside,
        {name: number for name, (number, _, _) in outside.items()},
        {name: n - inside[name] for name, n in num_embeddings.items()},
        out.stat().st_size,
    )


def _count_outside(rows: TableRows, n: int) -> tuple[int, int, list[int]]:
    """(row_ids outside 0 to n - 1, all row_ids, some of those outside)."""
    number, total, some = 0, 0, list[int]()
    for row_ids in rows.row_ids():
        outside = row_ids[(row_ids < 0) | (row_ids >= n)]
        number, total = number + outside.shape[0], total + row_ids.shape[0]
        some = (some + outside[:3].tolist())[:3]
    return number, total, some


def _outside_text(outside: dict[str, tuple[int, int, list[int]]], num_embeddings: dict[str, int]) -> str:
    parts = [
        f"table {name!r}: {number} of {total} row_ids are not in 0 to {num_embeddings[name] - 1}"
        f" ({', '.join(map(str, some))}{', ...' if number > len(some) else ''})"
        for name, (number, total, some) in outside.items()
        if number
    ]
    return (
        f"{'; '.join(parts)}; a TorchRec table has dense ids: set --num-embeddings above the largest, leave the rows"
        " out with --drop-outside, or export as safetensors or parquet"
    )


def _torchrec_tensors(spec: TableSpec, n: int, with_state: bool) -> dict[str, Tensor]:
    tensors = {torchrec_weight(spec.name): Tensor("F32", (n, spec.dim))}
    if with_state:
        for name, columns, is_vector in state_tensors(spec):
            tensors[name] = Tensor("F32", (n,) if is_vector else (n, columns.stop - columns.start))
    return tensors


def _fill(writer: TensorFileWriter, rows: TableRows, n: int, with_state: bool) -> None:
    spec = rows.spec
    weights = writer.map(torchrec_weight(spec.name))
    states = [
        (writer.map(name).reshape(n, columns.stop - columns.start), columns)
        for name, columns, _ in (state_tensors(spec) if with_state else [])
    ]

    def put(chunk: RowChunk) -> None:
        is_inside = (chunk.row_ids >= 0) & (chunk.row_ids < n)
        at = chunk.row_ids[is_inside]
        weights[at] = chunk.weights[is_inside]
        for array, columns in states:
            array[at] = chunk.state[is_inside, columns]

    for chunk in _initial_chunks(rows, n):
        put(chunk)
    for chunk in rows.chunks():
        put(chunk)


def _initial_chunks(rows: TableRows, n: int) -> Iterator[RowChunk]:
    at_once = max(1, _FILL_BYTES // (4 * rows.spec.dim))
    for start in range(0, n, at_once):
        row_ids = np.arange(start, min(n, start + at_once))
        yield RowChunk(row_ids, rows.initial(row_ids), rows.initial_state_of(row_ids.shape[0]))
