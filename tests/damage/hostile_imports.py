"""Hostile files for `ckpt import`, made in a folder as <format>,<what>: what test_import_tables.py has, and bombs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedding_server.spec import OptimizerSpec
from tests.damage.tampering import tensor_file
from tests.trainer.test_import_tables import BAD_PARQUET, BAD_TENSORS, BAD_TORCHREC
from trainer.import_tables import ImportRequest, import_tables
from trainer.tensor_file import MAX_HEADER_VALUES

Make = Callable[[Path], object]
_BOMB_ROWS, _BOMB_WIDTH = 8 << 20, 48 << 20


def import_one(file: Path, uri: Path) -> None:
    kind = file.name.partition(",")[0]
    import_tables(ImportRequest([file], kind, ["t"], None, OptimizerSpec(), uri, "j"))  # type: ignore[arg-type]


def make_imports(folder: Path) -> None:
    folder.mkdir()
    for kind, what, make in _all():
        file = folder / f"{kind},{what.replace('/', ' ')}"
        make(file)


def _all() -> Iterator[tuple[str, str, Make]]:
    for kind, cases in (("safetensors", BAD_TENSORS), ("parquet", BAD_PARQUET), ("torchrec", BAD_TORCHREC)):
        for what, (make, _) in cases.items():
            yield kind, what, make
    for what, make in _MORE.items():
        yield "safetensors", what, make
        yield "torchrec", what, make
    for what, make in _MORE_PARQUET.items():
        yield "parquet", what, make


def _sparse(header: dict[str, dict[str, object]], size: int) -> Make:
    """A file whose tensors are zeros that take no room."""

    def make(path: Path) -> None:
        path.write_bytes(tensor_file(header))
        os.truncate(path, path.stat().st_size + size)

    return make


def _entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


_N, _D = 1 << 32, 1 << 20
_MANY = b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_HEADER_VALUES - 10)) + b"}"
_MORE: dict[str, Make] = {
    "NaN in the header": lambda p: p.write_bytes(tensor_file(b'{"__metadata__":{"a":NaN}}')),
    "as many keys as may be": lambda p: p.write_bytes(tensor_file(_MANY)),
    "no UTF-8": lambda p: p.write_bytes(tensor_file(b'{"\xff":1}')),
    "more rows than a part has": _sparse(
        {
            "row_ids": _entry("I64", [_N], 0, 8 * _N),
            "weights": _entry("F32", [_N, 4], 8 * _N, 24 * _N),
            "embedding_bags.t.weight": _entry("F32", [_N, 4], 24 * _N, 40 * _N),
        },
        40 * _N,
    ),
    "a table of zeros": _sparse(
        {"row_ids": _entry("I64", [_D], 0, 8 * _D), "weights": _entry("F32", [_D, 4], 8 * _D, 24 * _D)}, 24 * _D
    ),
    "rows of 4 MiB": _sparse(
        {
            "row_ids": _entry("I64", [64], 0, 512),
            "weights": _entry("F32", [64, _D], 512, 512 + 256 * _D),
        },
        512 + 256 * _D,
    ),
    "TorchRec rows of 4 MiB": _sparse({"embedding_bags.t.weight": _entry("F32", [64, _D], 0, 256 * _D)}, 256 * _D),
}


def _long_vector(path: Path) -> None:
    """A row of 192 MiB in some kB."""
    values = pa.array(np.zeros(_BOMB_WIDTH, np.float32))
    vector = pa.ListArray.from_arrays(pa.array([0, _BOMB_WIDTH], pa.int32()), values)
    pq.write_table(pa.table({"row_id": pa.array([1]), "vector": vector}), path, compression="zstd")


def _long_fixed_vector(path: Path) -> None:
    values = pa.array(np.zeros(_BOMB_WIDTH, np.float32))
    vector = pa.FixedSizeListArray.from_arrays(values, _BOMB_WIDTH)
    pq.write_table(pa.table({"row_id": pa.array([1]), "vector": vector}), path, compression="zstd")


def _one_row_again_and_again(path: Path) -> None:
    """Millions of rows in some kB."""
    at_once = 1 << 20
    values = pa.array(np.zeros(4 * at_once, np.float32))
    batch = pa.table(
        {"row_id": pa.array(np.zeros(at_once, np.int64)), "vector": pa.FixedSizeListArray.from_arrays(values, 4)}
    )
    with pq.ParquetWriter(path, batch.schema, compression="zstd") as writer:
        for _ in range(_BOMB_ROWS // at_once):
            writer.write_table(batch)


_MORE_PARQUET: dict[str, Make] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "a vector of 192 MiB": _long_vector,
    "a fixed vector of 192 MiB": _long_fixed_vector,
    "a row again and again": _one_row_again_and_again,
    "a footer of 2 GiB": lambda p: p.write_bytes(b"PAR1" + bytes(1000) + b"\xff\xff\xff\x7fPAR1"),
}
