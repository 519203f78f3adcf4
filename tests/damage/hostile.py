"""Hostile snapshots by name: each changes a tiny one of two parts and returns the file that must be named."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_file import SegmentArrays
from embedding_server.snapshot_format import (
    MANIFEST,
    MAX_JSON_BYTES,
    MAX_JSON_VALUES,
    OBJECTS,
    RECORD,
    cut_folder,
    segment_object,
)
from embedding_server.snapshot_format import frozen_file as frozen_name
from embedding_server.snapshot_format import hot_file as hot_name
from embedding_server.snapshot_parts import read_parts
from embedding_server.store import NUM_BUCKETS
from tests.damage.tampering import (
    Arrays,
    columns,
    dense,
    folder_of,
    manifest,
    raw_manifest,
    record,
    seal,
    segment,
    segment_bytes,
    table,
    tensor_file,
    vouch,
)

Make = Callable[[Path], Path]


def _manifest(cut: Path) -> Path:
    return cut / MANIFEST


def _no_manifest(cut: Path) -> Path:
    """Of a cut that has none in the eyes of those who list cuts; they name the folder."""
    return cut / "manifest"


def _cut(cut: Path) -> Path:
    """No file alone is wrong."""
    return cut


def _job(cut: Path) -> Path:
    """As _cut, where one way in names a segment, and the other the cut."""
    return cut.parent


def _record(cut: Path, part: int = 0) -> Path:
    return folder_of(cut, part) / RECORD


def _hot(cut: Path) -> Path:
    return folder_of(cut) / hot_name(0)


def _frozen(cut: Path) -> Path:
    return folder_of(cut) / frozen_name(0)


def _dense(cut: Path) -> Path:
    return cut / "dense.safetensors"


def _segment(cut: Path) -> Path:
    """The first of the first table."""
    return cut.parent / OBJECTS / segment_object(read_parts(cut)[0].record.tables[0].segments[0].digest)


def _written(find: Make, data: bytes) -> Make:
    def make(cut: Path) -> Path:
        find(cut).write_bytes(data)
        return find(cut)

    return make


def _sealed(find: Make, content: bytes) -> Make:
    def make(cut: Path) -> Path:
        path = find(cut)
        seal(path, content)
        if path.name == RECORD:
            vouch(cut)
        return path

    return make


def _by(find: Make, change: Callable[[Path], object]) -> Make:
    """A change of the cut, after which this file must be named."""

    def make(cut: Path) -> Path:
        path = find(cut)
        change(cut)
        return path

    return make


def _link(find: Make) -> Make:
    def make(cut: Path) -> Path:
        path = find(cut)
        path.rename(path.with_name(path.name + ".real"))
        path.symlink_to(path.name + ".real")
        return path

    return make


def _replaced(find: Make, by: Callable[[Path], object]) -> Make:
    def make(cut: Path) -> Path:
        path = find(cut)
        path.unlink()
        by(path)
        return path

    return make


def _device(path: Path) -> None:
    """/dev/zero, which never ends; where that takes rights which we lack, a pipe, which never begins."""
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        os.mkfifo(path)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _of_manifest(old: bytes, new: bytes) -> Make:
    return _by(_manifest, lambda cut: raw_manifest(cut, old, new))


def _in_manifest(**changes: Any) -> Make:
    return _by(_manifest, lambda cut: manifest(cut, lambda content: content.update(changes)))


def _in_record(**changes: Any) -> Make:
    return _by(_record, lambda cut: record(cut, lambda content: content.update(changes)))


def _in_table(find: Make, **changes: Any) -> Make:
    return _by(find, lambda cut: table(cut, 0, **changes))


def _in_spec(find: Make, **changes: Any) -> Make:
    return _by(find, lambda cut: record(cut, lambda content: content["tables"][0]["spec"].update(changes)))


def _in_segment_record(find: Make, **changes: Any) -> Make:
    def change(content: dict[str, Any]) -> None:
        content["tables"][0]["segments"][0].update(changes)

    return _by(find, lambda cut: record(cut, change))


def _in_columns(kind: str, number: int, change: Callable[[Arrays], object]) -> Make:
    return lambda cut: columns(cut, kind, number, change)


def _in_segment(change: Callable[[SegmentArrays], object]) -> Make:
    return lambda cut: segment(cut, 0, change)


def _as_segment(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Make:
    return lambda cut: segment_bytes(cut, 0, tensor_file(header, data, length))


def _as_dense(data: bytes) -> Make:
    return lambda cut: dense(cut, data)


def _sparse_dense(cut: Path) -> None:
    _sparse(_dense(cut))
    manifest(cut, lambda content: content["dense"][0].update(size_bytes=1 << 40))


def _repeat_segment(content: dict[str, Any]) -> None:
    segments = content["tables"][0]["segments"]
    segments.append(segments[0])


def _repeat_table(content: dict[str, Any]) -> None:
    content["tables"].append(content["tables"][0])


# What rows say ------------------------------------------------------------------------------------------------------


def _swap_first_and_last(arrays: Arrays) -> None:
    arrays["row_ids"][[0, -1]] = arrays["row_ids"][[-1, 0]]


def _repeat_first(arrays: Arrays) -> None:
    """The first two rows have one row_id, and lie where it belongs."""
    ids, offsets = arrays["row_ids"], arrays["bucket_offsets"]
    ids[1] = ids[0]
    behind = int(buckets_of(ids[:1], NUM_BUCKETS)[0]) + 1
    offsets[:behind], offsets[behind:] = 0, np.maximum(offsets[behind:], 2)


def _fall(arrays: Arrays) -> None:
    arrays["bucket_offsets"][500] = arrays["row_ids"].shape[0] + 1


def _late(arrays: Arrays) -> None:
    arrays["last_steps"][0] = 2**31 - 1


def _wait_twice(arrays: Arrays) -> None:
    arrays["waiting_row_ids"][:] = arrays["waiting_row_ids"][0]


def _begin_twice(arrays: Arrays) -> None:
    arrays["initial_row_ids"][:] = arrays["initial_row_ids"][0]


def _foreign(arrays: Arrays) -> None:
    """IDs of every bucket, so of the other part's too."""
    arrays["waiting_row_ids"][:] = np.arange(1000, 1000 + arrays["waiting_row_ids"].shape[0])


def _unsorted_segment(arrays: SegmentArrays) -> None:
    arrays.row_ids[[0, -1]] = arrays.row_ids[[-1, 0]]


def _falling_segment(arrays: SegmentArrays) -> None:
    arrays.bucket_offsets[500] = arrays.row_ids.shape[0] + 1


def _hot_and_frozen(cut: Path) -> Path:
    """A row that is hot in one file is frozen at its initial value in the other."""
    hot: list[int] = []
    columns(cut, "hot", 1, lambda arrays: hot.append(arrays["row_ids"][0]))

    def begin(arrays: Arrays) -> None:
        arrays["initial_row_ids"][0] = hot[0]

    return columns(cut, "frozen", 1, begin)


def _row_of_another_bucket_owner(cut: Path) -> Path:
    """Part 0 gives a bucket away in which it has a row, and part 1 takes it."""
    ids = []
    columns(cut, "hot", 0, lambda arrays: ids.append(arrays["row_ids"][0]))
    bucket = int(buckets_of(np.array(ids), NUM_BUCKETS)[0])
    for part in (0, 1):

        def give(content: dict[str, Any], part: int = part) -> None:
            bits = int(content["buckets"], 16)
            bit = 1 << (NUM_BUCKETS - 1 - bucket)
            content["buckets"] = f"{bits | bit if part else bits & ~bit:0256x}"

        record(cut, give, part)
    return folder_of(cut) / hot_name(0)


def _linked_elsewhere(cut: Path) -> Path:
    """A hard link to a file that is none of the snapshot's."""
    path = _segment(cut)
    elsewhere = cut.parent / "elsewhere"
    elsewhere.write_bytes(os.urandom(path.stat().st_size))
    path.unlink()
    os.link(elsewhere, path)
    return path


def _parent(step: int, size_bytes: int = 500) -> dict[str, int]:
    return {"step": step, "epoch": 1, "size_bytes": size_bytes, "crc32": 0}


_IDS = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
_F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}
_META = {"format_version": "1", "table": "a", "bits": "8", "dim": "4", "num_buckets": "1024", "frozen_step": "1"}
_PICKLE = pickle.dumps({"state": list(range(500))})
_MANY = b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_JSON_VALUES - 10)) + b"}"

CASES: dict[str, Make] = {
    # manifest.json
    "manifest: a pickle": _written(_manifest, _PICKLE),
    "manifest: zeros": _written(_manifest, bytes(1 << 20)),
    "manifest: too long": _written(_manifest, b" " * (MAX_JSON_BYTES + 1)),
    "manifest: a long string": _sealed(_manifest, b'{"job":"' + b"x" * (MAX_JSON_BYTES - 100) + b'"}'),
    "manifest: too many values": _sealed(_manifest, b'{"shards":[' + b"1," * MAX_JSON_VALUES + b"1]}"),
    "manifest: as many values as may be": _sealed(_manifest, b'{"shards":[' + b"1," * (MAX_JSON_VALUES - 10) + b"1]}"),
    "manifest: as many keys as may be": _sealed(_manifest, _MANY),
    "manifest: deep": _sealed(_manifest, b"[" * 100_000 + b"]" * 100_000),
    "manifest: no UTF-8": _sealed(_manifest, b'{"job":"\xff\xfe"}'),
    "manifest: NaN": _of_manifest(b'"resolved_job": {"name": "job"}', b'"resolved_job": {"name": NaN}'),
    "manifest: Infinity": _of_manifest(b'"resolved_job": {"name": "job"}', b'"resolved_job": {"name": -Infinity}'),
    "manifest: 1e999": _of_manifest(b'"resolved_job": {"name": "job"}', b'"resolved_job": {"name": 1e999}'),
    "manifest: a key twice": _of_manifest(b'"num_workers": 1', b'"num_workers": 1, "num_workers": 2'),
    "manifest: a truth for a number": _of_manifest(b'"num_workers": 1', b'"num_workers": true'),
    "manifest: text for a number": _of_manifest(b'"num_workers": 1', b'"num_workers": "1"'),
    "manifest: a negative step": _in_manifest(step=-1),
    "manifest: an unknown key": _in_manifest(run_me="import os"),
    "manifest: another step": _in_manifest(step=6),
    "manifest: another name for the dense file": _in_manifest(
        dense=[{"name": "../../../etc/passwd", "size_bytes": 1, "crc32": 0}]
    ),
    "manifest: a shard.json of 2^62 bytes": _by(
        _manifest, lambda cut: manifest(cut, lambda content: content["shards"][0].update(size_bytes=2**62))
    ),
    "manifest: one part too few": _by(
        lambda cut: cut / "shard-0-of-1" / RECORD, lambda cut: manifest(cut, lambda content: content["shards"].pop())
    ),
    "manifest: a part twice": _by(
        _manifest, lambda cut: manifest(cut, lambda content: content["shards"][1].update(part=0))
    ),
    "manifest: its own parent": _in_manifest(parent=_parent(7), sequence=1),
    "manifest: a parent to come": _in_manifest(parent=_parent(8), sequence=1),
    "manifest: a parent without end": _in_manifest(parent=_parent(3, 2**62), sequence=1),
    "manifest: a parent that is not there": _by(
        lambda cut: cut.with_name(cut_folder(3, 1)) / MANIFEST, _in_manifest(parent=_parent(3), sequence=1)
    ),
    "manifest: a delta of nothing": _in_manifest(sequence=1),
    "manifest: a chain without end": _in_manifest(parent=_parent(3), sequence=2**40),
    "manifest: a link": _link(_manifest),
    "manifest: a pipe": _by(_no_manifest, _replaced(_manifest, os.mkfifo)),
    "manifest: a folder": _by(_no_manifest, _replaced(_manifest, Path.mkdir)),
    # dense.safetensors
    "dense: a pickle": _as_dense(_PICKLE),
    "dense: header of 2^63": _as_dense(tensor_file(b"{}", length=2**63)),
    "dense: overlapping tensors": _as_dense(tensor_file({"model.a": _IDS, "model.b": _F32}, bytes(24))),
    "dense: a tensor beyond the end": _as_dense(tensor_file({"model.a": _IDS}, bytes(8))),
    "dense: deep header": _as_dense(tensor_file(b"[" * 100_000)),
    "dense: no metadata": _as_dense(tensor_file({"model.a": _IDS}, bytes(16))),
    "dense: a tebibyte of nothing": _by(_dense, _sparse_dense),
    "dense: a link": _link(_dense),
    "dense: a device": _replaced(_dense, _device),
    # shard.json
    "record: a pickle": _by(_record, lambda cut: (_record(cut).write_bytes(_PICKLE), vouch(cut))),
    "record: other bytes of the same size": _by(
        _record, lambda cut: _record(cut).write_bytes(bytes(_record(cut).stat().st_size))
    ),
    "record: deep": _sealed(_record, b'{"tables":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "record: as many keys as may be": _sealed(_record, _MANY),
    "record: as many tables as may be": _sealed(_record, b'{"tables":[' + b"1," * (MAX_JSON_VALUES - 10) + b"1]}"),
    "record: of another job": _in_record(job="another"),
    "record: of another part": _in_record(part=1),
    "record: of more parts": _in_record(num_parts=3),
    "record: another step": _in_record(step=6),
    "record: buckets that others own": _by(_cut, _in_record(buckets="f" * 256)),
    "record: no bucket": _by(_cut, _in_record(buckets="0" * 256)),
    "record: an absolute path for a digest": _in_segment_record(_record, digest="/etc/passwd"),
    "record: dots for a digest": _in_segment_record(_record, digest="../" * 21 + "x"),
    "record: NUL and newline in a digest": _in_segment_record(_record, digest="\0\n" * 32),
    "record: a digest that is not there": _in_segment_record(
        lambda cut: cut.parent / OBJECTS / segment_object("0" * 64), digest="0" * 64
    ),
    "record: rows that multiply to 2^64": _in_table(_hot, rows_hot=2**31 - 1, rows_written=2**31 - 1),
    "record: waiting IDs that multiply to 2^64": _in_table(_frozen, rows_waiting=2**40 - 1),
    "record: more rows than 2^64": _in_table(_record, rows_hot=2**64),
    "record: negative rows": _in_table(_record, rows_hot=-1),
    "record: a dim of 2^40": _in_spec(_record, dim=2**40),
    "record: another dim": _in_spec(_cut, dim=8),
    "record: NUL and newline in a table's name": _in_spec(_job, name="\0\n"),
    "record: a counter of 2^200": _in_table(_record, counters={"moves_frozen": 2**200}),
    "record: a negative counter": _in_table(_record, counters={"moves_frozen": -1}),
    "record: a rate of 1e300": _in_table(_record, rate=1e300),
    "record: sums of decay of more steps": _in_table(_record, decay_steps=2**31 - 1),
    "record: a file of 2^62 bytes": _in_table(_hot, hot={"size_bytes": 2**62, "crc32": 0}),
    "record: a negative size": _in_table(_record, hot={"size_bytes": -1, "crc32": 0}),
    "record: a segment twice": _by(_frozen, lambda cut: record(cut, _repeat_segment)),
    "record: a table twice": _by(folder_of, lambda cut: record(cut, _repeat_table)),
    "record: its own parent": _in_record(parent=_parent(7), sequence=1),
    "record: another parent than the manifest's": _in_record(parent=_parent(3), sequence=1),
    "record: fewer rows written, and no parent": _in_table(_record, rows_written=0),
    "record: more rows written than there are": _in_table(_record, rows_written=2**31 - 1),
    "record: a link": _link(_record),
    "record: a pipe": _replaced(_record, os.mkfifo),
    "part: a link": _link(folder_of),
    # column files
    "hot: a pickle": _written(_hot, _PICKLE),
    "hot: header of 2^63": _written(_hot, tensor_file(b"{}" * 100, length=2**63)),
    "hot: a link": _link(_hot),
    "hot: a pipe": _replaced(_hot, os.mkfifo),
    "hot: a folder": _replaced(_hot, Path.mkdir),
    "hot: a device": _replaced(_hot, _device),
    "hot: a tebibyte of nothing": _replaced(_hot, _sparse),
    "hot: rows in each other's bucket": _in_columns("hot", 0, _swap_first_and_last),
    "hot: a row_id twice": _in_columns("hot", 0, _repeat_first),
    "hot: buckets that do not rise": _in_columns("hot", 0, _fall),
    "hot: a step to come": _in_columns("hot", 0, _late),
    "hot: a row of a bucket that the other part owns": _row_of_another_bucket_owner,
    "frozen: an ID that waits twice": _in_columns("frozen", 1, _wait_twice),
    "frozen: an initial row twice": _in_columns("frozen", 1, _begin_twice),
    "frozen: IDs of the other part": _in_columns("frozen", 1, _foreign),
    "frozen: a row that is hot as well": _hot_and_frozen,
    # segments
    "segment: a pickle": lambda cut: segment_bytes(cut, 0, _PICKLE),
    "segment: empty": lambda cut: segment_bytes(cut, 0, b""),
    "segment: header of 2^63": _as_segment(b"{}", length=2**63),
    "segment: header beyond the end": _as_segment(b"{}", length=64),
    "segment: deep header": _as_segment(b"[" * 30_000),
    "segment: NaN": _as_segment(b'{"__metadata__":NaN}'),
    "segment: a key twice": _as_segment(b'{"a":1,"a":1}'),
    "segment: overlapping tensors": _as_segment(
        {"__metadata__": _META, "row_ids": _IDS, "bucket_offsets": _F32}, bytes(24)
    ),
    "segment: a tensor beyond the end": _as_segment({"__metadata__": _META, "row_ids": _IDS}, bytes(8)),
    "segment: more rows than there are": _in_segment_record(_frozen, num_rows=2**23 - 1),
    "segment: other bits": _in_segment_record(_segment, bits=32),
    "segment: a link": _link(_segment),
    "segment: a pipe": _replaced(_segment, os.mkfifo),
    "segment: a folder": _replaced(_segment, Path.mkdir),
    "segment: a tebibyte of nothing": _replaced(_segment, _sparse),
    "segment: a hard link to another file": _linked_elsewhere,
    "segment: rows in each other's bucket": _in_segment(_unsorted_segment),
    "segment: buckets that do not rise": _in_segment(_falling_segment),
    "objects: a link": _link(lambda cut: cut.parent / OBJECTS),
}
