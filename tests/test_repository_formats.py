"""FORMATS.md says what the code writes: names, dtypes, fields, limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from embedding_server import segment_file, snapshot_file, snapshot_format
from embedding_server.epochs import EPOCHS
from embedding_server.kernels.frozen import row_bytes
from embedding_server.kernels.hashing import _GOLDEN
from embedding_server.kernels.locations import MAX_SEGMENT_ROWS
from embedding_server.segment_file import SegmentFormat
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS
from trainer import snapshots
from trainer.dense_state import STATE_KEYS
from trainer.snapshot_lock import LOCK_FILE, TRAINING_LOCK_FILE

TEXT = (Path(__file__).resolve().parent.parent / "FORMATS.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table behind a heading or bold words."""
    table = TEXT[TEXT.index(heading) :].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tensors_of_a_segment() -> None:
    listed = [re.match(r"`(\w+)` (\w+)\[", row[2]) for row in rows_of("## Segment file")]
    tensors = [match.groups() for match in listed if match]
    wanted = [(name, dtype) for name, dtype, _ in segment_file.layout(SegmentFormat("t", 8, 4, 1024), 3)]
    assert tensors == [*wanted, ("block_crcs", "U32")]
    metadata = re.search(r"exactly these keys, as text:\n(.*?)\. All rows", TEXT, re.DOTALL)
    assert metadata and set(names_in(metadata[1])) == segment_file.METADATA_KEYS
    assert f"`format_version` ({segment_file.FORMAT_VERSION})" in TEXT
    assert f"n rows (1 to {MAX_SEGMENT_ROWS:,}), B = {NUM_BUCKETS} buckets" in TEXT
    assert f"at most {segment_file.MAX_HEADER_BYTES:,} |" in TEXT
    assert f"ceil(E / {segment_file.CRC_BLOCK_BYTES:,})" in TEXT
    assert f"{int(_GOLDEN):X}" in TEXT


def test_the_bits_of_a_row() -> None:
    of_64 = {"D/2 + 4": 36, "D + 8": 72, "2 D": 128, "4 D": 256}
    listed = rows_of("All rows of a file have the same bits")
    assert [int(row[0]) for row in listed] == list(segment_file.BITS)
    assert [of_64[row[1]] for row in listed] == [row_bytes(bits, 64) for bits in segment_file.BITS]


SHAPES = {"n": (5,), "m, C": (3, 8), "m, D": (3, 4), "D": (4,), "C": (8,), "1025": (1025,)}


@pytest.mark.parametrize("hot_bits", [16, 32])
def test_the_columns_of_a_hot_file(hot_bits: int) -> None:
    policy = PolicySpec(hot_bits=hot_bits)
    spec = TableSpec(name="t", dim=4, optimizer=OptimizerSpec(kind="adam", weight_decay=0.1), policy=policy)
    columns = snapshot_format.hot_columns_of(spec, 5, 3, 7)
    listed = rows_of("**Hot file.**")
    assert [names_in(row[0]) for row in listed] == [[column.name] for column in columns]
    for row, column in zip(listed, columns, strict=True):
        assert column.dtype == (row[1].split()[-1] if hot_bits == 16 else row[1][:3].rstrip(","))
        assert column.shape == SHAPES.get(row[2], (8,))  # weight_decay of step 7


def test_the_columns_of_a_frozen_file() -> None:
    columns = snapshot_format.frozen_columns_of([9], 5, 6)
    listed = rows_of("**Frozen file.**")
    assert [(names_in(row[0])[0].replace("<k>", "0"), row[1]) for row in listed] == [(c.name, c.dtype) for c in columns]
    assert {row[2]: column.shape[0] for row, column in zip(listed, columns, strict=True)} == {
        "a": 5,
        "w": 6,
        "rows of segment k": 9,
    }
    assert str(snapshot_format.NOT_LIVE) in listed[-1][3]
    assert {"heat.0", "block_crcs"} <= set(re.findall(r'"([\w.]+)":', snapshot_file.header_bytes(columns)[8:].decode()))


@pytest.mark.parametrize("heading", ["**shard.json**", "**manifest.json**"])
def test_the_fields_of_records(heading: str) -> None:
    for model, fields in rows_of(heading):
        found = getattr(snapshot_format, model, None) or getattr(snapshots, model)
        assert issubclass(found, BaseModel)
        assert names_in(fields) == list(found.model_fields), model
    for model in (snapshot_format.ShardRecord, snapshots.Manifest):
        assert str(model.model_fields["format_version"].annotation) == "typing.Literal[1]"


def test_names_and_limits() -> None:
    names = [
        EPOCHS, snapshot_format.OBJECTS + "/", snapshot_format.RECORD, snapshot_format.MANIFEST, snapshots.DENSE_FILE,
        LOCK_FILE, TRAINING_LOCK_FILE, segment_file.PARTIAL_SUFFIX, snapshot_format.hot_file(7).replace("7", "<i>"),
        snapshot_format.frozen_file(7).replace("7", "<i>"), "shard-<k>-of-<n>/", "<64 hex>.segment",
        f"At most {snapshot_format.MAX_JSON_BYTES >> 20} MiB, {snapshot_format.MAX_JSON_VALUES:,} values and",
        f"{snapshot_format.MAX_JSON_KEYS:,} keys an object",
    ]  # fmt: skip
    for name in names:
        assert name in TEXT, name
    assert snapshot_format.cut_folder(7, 2) == "cut-000000000007-2"
    assert snapshot_format.part_folder(1, 3) == "shard-1-of-3"
    assert set(names_in(TEXT[TEXT.index("## dense.safetensors") :].split("##")[1])) >= snapshots.DENSE_METADATA
    assert "step" in STATE_KEYS["adam"]
