"""The segment file: what is written is what safetensors reads, and nothing damaged is ever mapped."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from embedding_server import segment_file
from embedding_server.errors import SegmentCorrupt
from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_file import CRC_BLOCK_BYTES, SegmentArrays, SegmentFormat, header_bytes, write_segment
from embedding_server.segment_reader import open_segment

FORMAT = SegmentFormat(table="user", bits=8, dim=4, num_buckets=16)


def arrays_of(num_rows: int, fmt: SegmentFormat = FORMAT, seed: int = 0) -> SegmentArrays:
    rng = np.random.default_rng(seed)
    row_ids = rng.integers(-(2**63), 2**63 - 1, num_rows, endpoint=True)
    row_ids = row_ids[np.argsort(buckets_of(row_ids, fmt.num_buckets), kind="stable")]
    counts = np.bincount(buckets_of(row_ids, fmt.num_buckets), minlength=fmt.num_buckets)
    return SegmentArrays(
        row_ids,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
        rng.integers(0, 256, (num_rows, fmt.row_bytes), dtype=np.uint8),
        rng.integers(0, 256, num_rows, dtype=np.uint8),
        rng.integers(0, 256, num_rows, dtype=np.uint8),
    )


def assert_same(actual: SegmentArrays, expected: SegmentArrays) -> None:
    for name in ("row_ids", "bucket_offsets", "rows", "accumulators", "visits"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)


def assert_corrupt(path: Path, *, verify: bool, match: str | None = None) -> None:
    with pytest.raises(SegmentCorrupt, match=match) as caught:
        open_segment(path, verify=verify)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("num_rows", [1, 20, 5000])
def test_round_trip_and_what_safetensors_reads(tmp_path, bits, num_rows):
    fmt = SegmentFormat(table='odd "name" \u00e9/..', bits=bits, dim=8, num_buckets=1024)
    expected = arrays_of(num_rows, fmt)
    path = tmp_path / "new folder" / "a.safetensors"
    write_segment(path, fmt, 77, expected)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]

    segment = open_segment(path)
    assert (segment.format, segment.frozen_step, segment.num_rows) == (fmt, 77, num_rows)
    assert segment.size_bytes == path.stat().st_size
    assert_same(segment.arrays, expected)
    assert not segment.arrays.rows.flags.writeable
    segment.close()
    segment.close()

    with safe_open(path, "numpy") as file:
        assert file.metadata() == {
            "format_version": "1",
            "table": fmt.table,
            "bits": str(bits),
            "dim": "8",
            "num_buckets": "1024",
            "frozen_step": "77",
        }
        names = ("row_ids", "bucket_offsets", "rows", "accumulators", "visits")
        assert_same(SegmentArrays(*[file.get_tensor(name) for name in names]), expected)
        assert set(file.keys()) == {*names, "block_crcs"}


def test_byte_layout_stays(tmp_path):
    """The offsets of the module's table, spelt out: a reader of another program may rely on them."""
    expected = arrays_of(3)
    write_segment(tmp_path / "a", FORMAT, 5, expected)
    data = (tmp_path / "a").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    assert data[8:9] == b"{"
    parts = [
        expected.row_ids.astype("<i8").tobytes(),
        expected.bucket_offsets.astype("<u4").tobytes(),
        expected.rows.tobytes(),
        expected.accumulators.tobytes(),
        expected.visits.tobytes(),
    ]
    body = b"".join(parts)
    assert data[start : start + len(body)] == body
    assert len(data) == start + len(body) + 4  # one block


def test_open_keeps_no_file_descriptor(tmp_path):
    write_segment(tmp_path / "a", FORMAT, 0, arrays_of(10))
    before = len(os.listdir("/proc/self/fd"))
    segments = [open_segment(tmp_path / "a") for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    for segment in segments:
        segment.close()
    assert str(tmp_path / "a") not in Path("/proc/self/maps").read_text()


def test_rows_outlive_the_file_name(tmp_path):
    """A map holds the file: unlinking under a reader (a merge beside a snapshot) is safe."""
    expected = arrays_of(10)
    write_segment(tmp_path / "a", FORMAT, 0, expected)
    segment = open_segment(tmp_path / "a")
    (tmp_path / "a").unlink()
    assert_same(segment.arrays, expected)
    segment.close()


@given(
    num_rows=st.integers(1, 2**23 - 1),
    dim=st.integers(1, 1024).map(lambda k: 4 * k),
    name=st.text(st.characters(codec="utf-8"), max_size=255),
)
def test_header_names_the_blocks_it_needs(num_rows, dim, name):
    fmt = SegmentFormat(table=name, bits=8, dim=dim, num_buckets=1024)
    data = header_bytes(fmt, num_rows, 2**40)
    assert len(data) % 8 == 0
    header = json.loads(data[8:])
    crcs = header["block_crcs"]
    assert crcs["shape"] == [-(-(len(data) + crcs["data_offsets"][0]) // CRC_BLOCK_BYTES)]


def test_crcs_are_those_of_zlib(tmp_path):
    """The format names zlib's polynomial, whatever library computes it."""
    path = tmp_path / "one.segment"
    write_segment(path, FORMAT, 0, arrays_of(20_000))
    data = path.read_bytes()
    segment = open_segment(path, verify=False)
    covered = data[: len(data) - segment.block_crcs.nbytes]
    blocks = [covered[i : i + CRC_BLOCK_BYTES] for i in range(0, len(covered), CRC_BLOCK_BYTES)]
    assert segment.block_crcs.tolist() == [zlib.crc32(block) for block in blocks]
    assert len(blocks) > 1
    segment.close()


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_every_truncation_is_named(tmp_path, verify):
    path = tmp_path / "whole"
    write_segment(path, FORMAT, 0, arrays_of(20))
    data = path.read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        assert_corrupt(cut, verify=verify)
    cut.write_bytes(data + b"\0")
    assert_corrupt(cut, verify=verify)


def test_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "whole"
    write_segment(path, FORMAT, 0, arrays_of(20))
    data = path.read_bytes()
    flipped = tmp_path / "flipped"
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        flipped.write_bytes(damaged)
        assert_corrupt(flipped, verify=True)


def test_damage_is_placed_within_64_kib(tmp_path):
    path = tmp_path / "a"
    write_segment(path, FORMAT, 0, arrays_of(20_000))
    data = bytearray(path.read_bytes())
    assert len(data) > 4 * CRC_BLOCK_BYTES
    data[2 * CRC_BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    assert_corrupt(path, verify=True, match=rf"block 2 \(bytes {2 * CRC_BLOCK_BYTES} and on\)")


def _edit(change) -> bytes:
    """A small segment whose header went through `change`, offsets and padding consistent otherwise."""
    data = header_bytes(FORMAT, 20, 0)
    header = json.loads(data[8:])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(data)
    body = start + 20 * FORMAT.unit_bytes + 4 * 17
    return len(text).to_bytes(8, "little") + text + bytes(body - start + 4)


def _set(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(header):
        inner = header
        for key in keys:
            inner = inner[key]
        inner[last] = value

    return change


def _remove(*keys):
    *outer, last = keys

    def change(header):
        inner = header
        for key in outer:
            inner = inner[key]
        del inner[last]

    return change


BAD_HEADERS = {
    "not_json": (lambda h: b"{'row_ids'", "no JSON"),
    "not_ascii": (lambda h: b'{"\xff":1}', "no JSON"),
    "a_list": (lambda h: b"[1,2]", "no JSON object"),
    "nested_too_deep": (lambda h: b"[" * 20_000, "no JSON"),
    "key_twice": (lambda h: b'{"rows":1,"rows":2}', "twice"),
    "no_metadata": (_remove("__metadata__"), "metadata must have"),
    "metadata_list": (_set("__metadata__", []), "metadata must have"),
    "metadata_short": (_remove("__metadata__", "bits"), "metadata must have"),
    "metadata_number": (_set("__metadata__", "bits", 8), "must be strings"),
    "metadata_word": (_set("__metadata__", "dim", "four"), "dim='four' is no number"),
    "metadata_negative": (_set("__metadata__", "dim", "-4"), "is no number"),
    "metadata_long": (_set("__metadata__", "frozen_step", "9" * 19), "is no number"),
    "version": (_set("__metadata__", "format_version", "2"), "format_version=2"),
    "bits": (_set("__metadata__", "bits", "7"), "bits=7"),
    "dim_zero": (_set("__metadata__", "dim", "0"), "dim=0"),
    "dim_large": (_set("__metadata__", "dim", "5000"), "dim=5000"),
    "dim_other": (_set("__metadata__", "dim", "8"), "tensor rows is"),
    "buckets": (_set("__metadata__", "num_buckets", "24"), "num_buckets=24"),
    "buckets_other": (_set("__metadata__", "num_buckets", "32"), "tensor bucket_offsets is"),
    "no_row_ids": (_remove("row_ids"), "row_ids is missing"),
    "row_ids_number": (_set("row_ids", 3), "row_ids is missing"),
    "row_ids_scalar": (_set("row_ids", "shape", []), "row_ids is missing"),
    "row_ids_bool": (_set("row_ids", "shape", [True]), "row_ids is missing"),
    "no_rows_at_all": (_set("row_ids", "shape", [0]), "0 rows"),
    "negative_rows": (_set("row_ids", "shape", [-1]), "-1 rows"),
    "too_many_rows": (_set("row_ids", "shape", [2**23]), "8388608 rows"),
    "one_row_more": (_set("row_ids", "shape", [21]), "tensor row_ids is"),
    "tensor_missing": (_remove("visits"), "tensors are"),
    "tensor_extra": (_set("more", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "tensors are"),
    "dtype": (_set("row_ids", "dtype", "U64"), "tensor row_ids is"),
    "shape": (_set("rows", "shape", [12, 20]), "tensor rows is"),
    "overlap": (_set("accumulators", "data_offsets", [0, 20]), "tensor accumulators is"),
    "reversed": (_set("visits", "data_offsets", [20, 0]), "tensor visits is"),
    "crc_blocks": (_set("block_crcs", "shape", [2]), "tensor block_crcs is"),
    "entry_extra_key": (_set("visits", "stride", 1), "tensor visits is"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused_before_anything_is_mapped(tmp_path, case):
    change, match = BAD_HEADERS[case]
    path = tmp_path / "bad"
    path.write_bytes(_edit(change))
    assert_corrupt(path, verify=False, match=match)


def test_the_edited_header_is_fine_unedited(tmp_path):
    """Guards the table above: without a change only the CRCs and zeroed offsets are wrong."""
    path = tmp_path / "a"
    path.write_bytes(_edit(lambda header: None))
    assert_corrupt(path, verify=False, match="bucket_offsets do not rise from 0 to 20")


@pytest.mark.parametrize(
    ("length", "match"),
    [(2**63, "header length"), (2**17, "header length"), (1, "header length"), (301, "multiple of 8")],
)
def test_header_length_is_bounded(tmp_path, length, match):
    path = tmp_path / "bad"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * 500)
    assert_corrupt(path, verify=False, match=match)


@pytest.mark.parametrize("offsets", ["fall", "late_start", "early_end"])
def test_bad_bucket_offsets(tmp_path, offsets):
    arrays = arrays_of(20)
    if offsets == "fall":
        arrays.bucket_offsets[3] = arrays.bucket_offsets[-1]
        arrays.bucket_offsets[4] = 0
    elif offsets == "late_start":
        arrays.bucket_offsets[0] = 1
    else:
        arrays.bucket_offsets[-1] = 19
    write_segment(tmp_path / "a", FORMAT, 0, arrays)
    assert_corrupt(tmp_path / "a", verify=False, match="bucket_offsets do not rise from 0 to 20")


def test_row_in_another_bucket(tmp_path):
    arrays = arrays_of(20)
    arrays.row_ids[[0, -1]] = arrays.row_ids[[-1, 0]]
    write_segment(tmp_path / "a", FORMAT, 0, arrays)
    assert_corrupt(tmp_path / "a", verify=True, match="at position 0 is not in its bucket")


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_segment(tmp_path / "none")


# A disk that fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fails_after", [0, 100, 1000, 5000])
def test_failed_write_leaves_nothing(tmp_path, monkeypatch, code, fails_after):
    arrays = arrays_of(1000)
    taken = 0

    def full_disk(fd, data):
        nonlocal taken
        if taken >= fails_after:
            raise OSError(code, os.strerror(code))
        written = os.write(fd, data[: fails_after - taken])
        taken += written
        return written

    monkeypatch.setattr(segment_file, "write_bytes", full_disk)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_segment(tmp_path / "a", FORMAT, 0, arrays)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("good_syncs", [0, 1])
def test_failed_sync_leaves_nothing(tmp_path, monkeypatch, good_syncs):
    """Of the file (first sync) or of its folder (second, after the rename)."""
    calls = []

    def failing(fd):
        calls.append(fd)
        if len(calls) > good_syncs:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(segment_file, "sync_fd", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_segment(tmp_path / "a", FORMAT, 0, arrays_of(10))
    assert list(tmp_path.iterdir()) == []


def test_write_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_file, "write_bytes", lambda fd, data: 0)
    with pytest.raises(OSError, match="write\\(\\) took 0 of"):
        write_segment(tmp_path / "a", FORMAT, 0, arrays_of(10))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_file, "write_bytes", lambda fd, data: os.write(fd, data[:37]))
    expected = arrays_of(300)
    write_segment(tmp_path / "a", FORMAT, 0, expected)
    segment = open_segment(tmp_path / "a")
    assert_same(segment.arrays, expected)
    segment.close()


def test_leftover_partial_is_replaced(tmp_path):
    (tmp_path / "a.partial").write_bytes(b"x" * 100_000)
    write_segment(tmp_path / "a", FORMAT, 0, arrays_of(10))
    open_segment(tmp_path / "a").close()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
