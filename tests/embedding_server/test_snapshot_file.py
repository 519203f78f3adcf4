"""Column files and shard.json: what is written is read back, and a file with any byte changed or missing is refused."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32
from safetensors.numpy import load_file

from embedding_server import segment_file
from embedding_server.errors import SegmentCorrupt
from embedding_server.snapshot_file import DTYPES, Column, ColumnReader, ColumnWriter
from embedding_server.snapshot_format import (
    MAX_JSON_BYTES,
    ShardRecord,
    bucket_text,
    read_model,
    read_sealed_json,
    write_sealed_json,
)
from embedding_server.store import NUM_BUCKETS

COLUMNS = [
    Column("row_ids", "I64", (20_000,)),
    Column("weights", "F32", (20_000, 8)),
    Column("state", "F32", (20_000, 0)),
    Column("empty", "U16", (0,)),
    Column("visits", "U8", (20_000,)),
]


def arrays(columns: list[Column]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {c.name: rng.integers(0, 100, c.shape).astype(DTYPES[c.dtype]) for c in columns}


def written(
    path: Path, columns: list[Column], pieces: int = 3, executor: Executor | None = None
) -> tuple[dict[str, np.ndarray], int, int]:
    """The arrays, size and CRC of a file made in pieces."""
    values = arrays(columns)
    writer = ColumnWriter(path, columns, executor)
    for piece in range(pieces):
        for column in columns:
            n = column.shape[0]
            writer.append(column.name, values[column.name][piece * n // pieces : (piece + 1) * n // pieces])
        if piece != 1:
            writer.hand_over()
    writer.complete()
    writer.sync()
    writer.publish()
    return values, writer.size_bytes, writer.crc32


def read_all(path: Path, columns: list[Column], size: int, crc: int) -> dict[str, np.ndarray]:
    reader = ColumnReader(path, columns, size, crc)
    try:
        return {column.name: reader.read(column.name) for column in columns}
    finally:
        reader.close()


def test_file_is_safetensors_and_reads_back(tmp_path: Path) -> None:
    values, size, crc = written(tmp_path / "f", COLUMNS)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").stat().st_size == size
    found = load_file(tmp_path / "f")
    assert crc == crc32(found.pop("block_crcs").tobytes())
    for mine in (found, read_all(tmp_path / "f", COLUMNS, size, crc)):
        assert mine.keys() == values.keys()
        for name, array in values.items():
            assert mine[name].tobytes() == array.tobytes(), name
            assert mine[name].shape == array.shape


def test_a_file_that_a_thread_writes_is_the_same(tmp_path: Path) -> None:
    written(tmp_path / "f", COLUMNS, pieces=9)
    with ThreadPoolExecutor(1) as executor:
        written(tmp_path / "g", COLUMNS, pieces=9, executor=executor)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()


def test_what_a_thread_cannot_write_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = arrays(COLUMNS)["weights"]

    def fail(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for tell in (lambda writer: writer.waiting_bytes, ColumnWriter.wait, ColumnWriter.complete, ColumnWriter.abandon):
        with ThreadPoolExecutor(1) as executor, monkeypatch.context() as patch:
            writer = ColumnWriter(tmp_path / "f", COLUMNS, executor)
            patch.setattr(segment_file, "write_bytes", fail)
            writer.append("weights", rows[:10_000])
            writer.hand_over()
            executor.submit(int).result()  # behind it
            if tell is not ColumnWriter.abandon:
                with pytest.raises(OSError, match="No space left"):
                    tell(writer)
            writer.abandon()
        assert list(tmp_path.iterdir()) == []


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_any_range_of_rows_reads_alone(tmp_path_factory, a: int, b: int) -> None:
    path = tmp_path_factory.mktemp("f") / "f"
    values, size, crc = written(path, COLUMNS, pieces=7)
    reader = ColumnReader(path, COLUMNS, size, crc)
    start, stop = min(a, b), max(a, b)
    for name in ("row_ids", "weights", "state", "visits"):
        assert reader.read(name, start, stop).tobytes() == values[name][start:stop].tobytes()
    assert sum(reader.verify()) == sum(column.size_bytes for column in COLUMNS)
    reader.close()


def test_every_flipped_byte_and_every_truncation_is_refused_by_name(tmp_path: Path) -> None:
    columns = [Column("row_ids", "I64", (9,)), Column("weights", "F32", (9, 4))]
    _, size, crc = written(tmp_path / "f", columns)
    good = (tmp_path / "f").read_bytes()
    for at in range(size):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        for data in (damaged, good[:at]):
            (tmp_path / "f").write_bytes(data)
            with pytest.raises(SegmentCorrupt, match=str(tmp_path / "f")):
                read_all(tmp_path / "f", columns, size, crc)


def test_a_range_is_read_though_another_is_damaged(tmp_path: Path) -> None:
    values, size, crc = written(tmp_path / "f", COLUMNS)
    data = bytearray((tmp_path / "f").read_bytes())
    data[-len(data) // 2] ^= 1
    (tmp_path / "f").write_bytes(data)
    reader = ColumnReader(tmp_path / "f", COLUMNS, size, crc)
    assert reader.read("row_ids").tobytes() == values["row_ids"].tobytes()
    with pytest.raises(SegmentCorrupt, match="column weights"):
        reader.read("weights")
    with pytest.raises(SegmentCorrupt, match="column weights"):
        list(reader.verify())
    reader.close()


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    _, size, crc = written(tmp_path / "f", COLUMNS)
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in ("link", "pipe", "folder/f"):
        with pytest.raises(SegmentCorrupt, match=name):
            ColumnReader(tmp_path / name, COLUMNS, size, crc)


@pytest.mark.parametrize("nth", range(6))
def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    calls = 0

    def fail(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls > nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)

    monkeypatch.setattr(segment_file, "write_bytes", fail)
    writer = None
    with pytest.raises(OSError, match="No space"):  # noqa: PT012
        writer = ColumnWriter(tmp_path / "f", COLUMNS)
        for column in COLUMNS:
            writer.append(column.name, arrays(COLUMNS)[column.name])
        writer.complete()
    if writer is not None:
        writer.abandon()
    assert list(tmp_path.iterdir()) == []


def shard_record() -> dict:
    return {
        "format_version": 1,
        "part": 0,
        "num_parts": 2,
        "buckets": bucket_text(np.arange(NUM_BUCKETS) < 100),
        "job": "job",
        "step": 7,
        "epoch": 2,
        "tables": [],
        "parent": None,
        "sequence": 0,
    }


def test_record_reads_back_and_tells_its_buckets(tmp_path: Path) -> None:
    write_sealed_json(tmp_path / "shard.json", shard_record())
    assert json.loads((tmp_path / "shard.json").read_text())["content"] == shard_record()
    record = read_model(tmp_path / "shard.json", ShardRecord)
    assert record.model_dump(mode="json") == shard_record()
    assert record.owned_buckets().tolist() == [b < 100 for b in range(NUM_BUCKETS)]


def test_every_changed_byte_of_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.json"
    write_sealed_json(path, shard_record())
    good = path.read_bytes()
    for at in range(len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        for data in (damaged, good[:at]):
            path.write_bytes(data)
            with pytest.raises(SegmentCorrupt, match=str(path)):
                read_model(path, ShardRecord)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format_version": 2}, "format_version"),
        ({"buckets": "zz" * 128}, "buckets"),
        ({"part": -1}, "part"),
        ({"part": "0"}, "part"),
        ({"step": 2**63}, "step"),
        ({"path": "/etc/passwd"}, "path"),
        ({"parent": "../other"}, "parent"),
        ({"tables": [{"name": "../../x"}]}, "tables.0"),
    ],
)
def test_well_sealed_nonsense_is_refused(tmp_path: Path, change: dict, what: str) -> None:
    write_sealed_json(tmp_path / "shard.json", {**shard_record(), **change})
    with pytest.raises(SegmentCorrupt, match=what):
        read_model(tmp_path / "shard.json", ShardRecord)


def sealed(text: bytes) -> bytes:
    return b'{"crc32":"%08x",' % crc32(text) + text


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "does not start"),
        (b"\x80\x04\x95pickle", "does not start"),
        (sealed(b'"content":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "no JSON"),
        (sealed(b'"content":[' + b"0," * (1 << 20) + b"0]}"), "values"),
        (sealed(b'"content":[]}'), "no content"),
        (sealed(b'"content":{},"content":{}}'), "twice"),
        (sealed(b'"content":{}'), "no JSON"),
        (b" " * (MAX_JSON_BYTES + 1), "more than"),
    ],
)
def test_hostile_json_is_refused(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "shard.json").write_bytes(data)
    with pytest.raises(SegmentCorrupt, match=what):
        read_sealed_json(tmp_path / "shard.json")
