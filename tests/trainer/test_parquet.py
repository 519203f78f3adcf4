from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.batch import Reader
from trainer.data.registry import open_reader
from trainer.data.row_ids import word_id
from trainer.job import make_job


def reader_of(tmp_path: Path, table: pa.Table, features: Any, dense: tuple[str, ...] = (), **options: Any) -> Reader:
    pq.write_table(table, tmp_path / "a.parquet")
    data = {"reader": "parquet", "train": [tmp_path / "a.parquet"], "features": features, "dense": list(dense)}
    return open_reader(make_job({"name": "a", "data": data | options, "model": {"kind": "deepfm"}}))


@pytest.mark.parametrize(
    ("column", "values", "lengths"),
    [
        (pa.array([1, None, -1], pa.int64()), [1, -1], [1, 0, 1]),
        (pa.array([1, None, 3], pa.uint8()), [1, 3], [1, 0, 1]),
        (pa.array([2**63, 0, 2**64 - 1], pa.uint64()), [-(2**63), 0, -1], [1, 1, 1]),
        (pa.array([-(2**63), 0, 2**63 - 1], pa.int64()), [-(2**63), 0, 2**63 - 1], [1, 1, 1]),
        (pa.array(["a", None, ""]), [word_id("a"), word_id("")], [1, 0, 1]),
        (pa.array(["a", "b", "a"], pa.large_string()), [word_id("a"), word_id("b"), word_id("a")], [1, 1, 1]),
        (pa.array(["a", None, "b"]).dictionary_encode(), [word_id("a"), word_id("b")], [1, 0, 1]),
        (pa.array([[1, 1], None, []], pa.list_(pa.int32())), [1, 1], [2, 0, 0]),
        (pa.array([[], ["x"], ["y", "x"]], pa.large_list(pa.string())), [word_id(w) for w in "xyx"], [0, 1, 2]),
    ],
)
def test_column_types_of_features(column: pa.Array, values: list[int], lengths: list[int], tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1, 0], "f": column})
    (batch,) = reader_of(tmp_path, table, ["f"])
    assert batch.sparse.values().tolist() == values
    assert batch.sparse.lengths().tolist() == lengths


@pytest.mark.parametrize(
    "label", [pa.array([True, False]), pa.array([1, 0], pa.uint8()), pa.array([1.0, 0.0], pa.float32())]
)
def test_column_types_of_labels(label: pa.Array, tmp_path: Path) -> None:
    (batch,) = reader_of(tmp_path, pa.table({"clicked": label, "f": [1, 2]}), ["f"], label="clicked")
    assert batch.labels.tolist() == [1.0, 0.0]


def test_columns_may_have_other_names_and_share_a_table(tmp_path: Path) -> None:
    table = pa.table({"label": [1], "c": [7], "d": [[8, 9]], "x": [1.5], "n": pa.array([True])})
    features = {"item": {"column": "c"}, "history": {"column": "d", "table": "item"}}
    reader = reader_of(tmp_path, table, features, dense=("x", "n"))
    (batch,) = reader
    assert reader.schema.tables == {"item": ["item", "history"]}
    assert batch.sparse.keys() == ["item", "history"]
    assert batch.sparse.values().tolist() == [7, 8, 9]
    assert batch.dense.tolist() == [[1.5, 1.0]]
