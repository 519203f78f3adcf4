"""Snapshots that lie: changed in one place, with every checksum made right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.segment_file import SegmentArrays, write_segment
from embedding_server.segment_reader import open_segment
from embedding_server.snapshot_file import ColumnReader, ColumnWriter
from embedding_server.snapshot_format import (
    MANIFEST,
    OBJECTS,
    RECORD,
    frozen_columns,
    frozen_file,
    hot_columns,
    hot_file,
    read_sealed_json,
    segment_digest,
    segment_object,
    write_sealed_json,
)
from embedding_server.snapshot_parts import read_parts

Arrays = dict[str, np.ndarray]
Content = dict[str, Any]


def seal(path: Path, content: bytes) -> None:
    """Any bytes at all in the place of the content of sealed JSON."""
    rest = b'"content":' + content + b"}"
    path.write_bytes(b'{"crc32":"%08x",' % crc32(rest) + rest)


def raw_manifest(cut: Path, old: bytes, new: bytes) -> None:
    """Replaces a piece of the manifest's text."""
    text = json.dumps(read_sealed_json(cut / MANIFEST)).encode()
    assert text.count(old) == 1, (old, text)
    seal(cut / MANIFEST, text.replace(old, new))


def manifest(cut: Path, change: Callable[[Content], object]) -> None:
    content = read_sealed_json(cut / MANIFEST)
    change(content)
    write_sealed_json(cut / MANIFEST, content)


def folder_of(cut: Path, part: int = 0) -> Path:
    (folder,) = cut.glob(f"shard-{part}-of-*")
    return folder


def record(cut: Path, change: Callable[[Content], object], part: int = 0) -> None:
    """Changes a shard.json, and the manifest that vouches for it."""
    path = folder_of(cut, part) / RECORD
    content = read_sealed_json(path)
    change(content)
    write_sealed_json(path, content)
    vouch(cut, part)


def vouch(cut: Path, part: int = 0) -> None:
    """Makes the manifest name a shard.json as it is now."""
    data = (folder_of(cut, part) / RECORD).read_bytes()
    entry = {"part": part, "size_bytes": len(data), "crc32": crc32(data)}
    manifest(cut, lambda content: content["shards"].__setitem__(part, entry))


def table(cut: Path, number: int, part: int = 0, **changes: Any) -> None:
    record(cut, lambda content: content["tables"][number].update(changes), part)


def columns(cut: Path, kind: str, number: int, change: Callable[[Arrays], object], part: int = 0) -> Path:
    """Changes the arrays of a hot or frozen file; as many rows as before."""
    of_table = read_parts(cut)[part].record.tables[number]
    layout = hot_columns(of_table) if kind == "hot" else frozen_columns(of_table)
    path = folder_of(cut, part) / (hot_file(number) if kind == "hot" else frozen_file(number))
    said = of_table.hot if kind == "hot" else of_table.frozen
    with closing(ColumnReader(path, layout, said.size_bytes, said.crc32)) as reader:
        arrays = {column.name: reader.read(column.name).copy() for column in layout}
    change(arrays)
    writer = ColumnWriter(path, layout)
    for column in layout:
        writer.append(column.name, arrays[column.name])
    writer.complete()
    writer.publish()
    table(cut, number, part, **{kind: {"size_bytes": writer.size_bytes, "crc32": writer.crc32}})
    return path


def segment(cut: Path, number: int, change: Callable[[SegmentArrays], object]) -> Path:
    """Changes the arrays of a table's first segment and names it by what it is now."""
    of_table = read_parts(cut)[0].record.tables[number].segments[0]
    objects = cut.parent / OBJECTS
    path = objects / segment_object(of_table.digest)
    with closing(open_segment(path)) as mapped:
        names = ("row_ids", "bucket_offsets", "rows", "accumulators", "visits")
        arrays = SegmentArrays(*(getattr(mapped.arrays, name).copy() for name in names))
        fmt, frozen_step = mapped.format, mapped.frozen_step
    change(arrays)
    write_segment(path, fmt, frozen_step, arrays)
    return name_by_content(cut, number, path)


def segment_bytes(cut: Path, number: int, data: bytes) -> Path:
    """Other bytes for a table's first segment, of whatever size; shard.json keeps its digest."""
    path = cut.parent / OBJECTS / segment_object(read_parts(cut)[0].record.tables[number].segments[0].digest)
    path.write_bytes(data)
    record(cut, lambda content: content["tables"][number]["segments"][0].update(size_bytes=len(data)))
    return path


def name_by_content(cut: Path, number: int, path: Path) -> Path:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    num_blocks = json.loads(data[8:start])["block_crcs"]["shape"][0]
    digest = segment_digest(data[:start], np.frombuffer(data[-4 * num_blocks :], "<u4"))
    target = path.with_name(segment_object(digest))
    path.rename(target)
    record(cut, lambda content: content["tables"][number]["segments"][0].update(digest=digest))
    return target


def dense(cut: Path, data: bytes) -> Path:
    """Other bytes for the dense part."""
    path = cut / "dense.safetensors"
    path.write_bytes(data)
    entry = {"name": path.name, "size_bytes": len(data), "crc32": crc32(data)}
    manifest(cut, lambda content: content.update(dense=[entry]))
    return path


def tensor_file(header: Content | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data
