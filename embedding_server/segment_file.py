"""The segment file: an immutable, checksummed safetensors file of frozen rows. Written once, then mapped for ever.

Layout, byte by byte. DO NOT CHANGE; a change needs a new FORMAT_VERSION and a reader for the old one.
All numbers are little-endian. n rows (1 to 2^23-1), B buckets, R row bytes.

    offset            bytes      what
    0                 8          uint64 H: bytes of the header
    8                 H          JSON header, ASCII, padded with spaces so that 8 + H is a multiple of 8
    D = 8 + H         8 n        row_ids         int64[n], sorted by bucket (hashing.py); any order inside a bucket
    D + 8n            4 (B+1)    bucket_offsets  uint32[B+1]; rows of bucket b are positions offsets[b] to offsets[b+1]
    ...               R n        rows            uint8[n, R], the encoded rows
    ...               n          accumulators    uint8[n], one log-scale byte of optimizer state (optimizers.py)
    ...               n          visits          uint8[n], visits up to 255
    E                 4 K        block_crcs      uint32[K], K = ceil(E / 65536): CRC-32 (zlib's) of each 64 KiB block
                                                 of the file from byte 0 to E, so that every byte is covered

The tensors lie in this order without holes and end with the file. All rows of a file have the same bits: 4 (R = dim/2 +
4), 8 (R = dim + 8), 16 (R = 2 dim) or 32 (R = 4 dim), in the formats of kernels/frozen.py.
`__metadata__` holds, as strings: format_version, table, bits, dim, num_buckets, frozen_step.

A file appears under its name only when it is whole: it is written beside it as NAME.partial, fsynced, renamed, and the
folder is fsynced. segment_reader.py opens and checks it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.failpoints import failpoint
from embedding_server.kernels import frozen

FORMAT_VERSION = 1
CRC_BLOCK_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_BUCKETS = 1 << 16
WRITE_BYTES = 4 << 20  # one write() call
PARTIAL_SUFFIX = ".partial"

DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1")}
BITS = (4, 8, 16, 32)
METADATA_KEYS = {"format_version", "table", "bits", "dim", "num_buckets", "frozen_step"}


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """What the segments of one table, shard and number of bits have in common."""

    table: str
    bits: int  # one of BITS
    dim: int
    num_buckets: int

    @property
    def row_bytes(self) -> int:
        return frozen.row_bytes(self.bits, self.dim)

    @property
    def unit_bytes(self) -> int:
        """File bytes of one more row: encoded row, row_id, accumulator, visits."""
        return self.row_bytes + 8 + 1 + 1


@dataclass(slots=True)
class SegmentArrays:
    """The tensors of one segment, in a buffer or in a map. Views: whoever owns the memory outlives them."""

    row_ids: np.ndarray  # int64[n]
    bucket_offsets: np.ndarray  # uint32[B+1]
    rows: np.ndarray  # uint8[n, row_bytes]
    accumulators: np.ndarray  # uint8[n]
    visits: np.ndarray  # uint8[n]


def header_bytes(fmt: SegmentFormat, num_rows: int, frozen_step: int) -> bytes:
    """The first D bytes of the file: length, JSON, padding."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format_version": str(FORMAT_VERSION),
            "table": fmt.table,
            "bits": str(fmt.bits),
            "dim": str(fmt.dim),
            "num_buckets": str(fmt.num_buckets),
            "frozen_step": str(frozen_step),
        }
    }
    start = 0
    for name, dtype, shape in layout(fmt, num_rows):
        end = start + size_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    # block_crcs covers the header, which names the number of blocks: more digits there can only ask for more blocks, so
    # this ends.
    num_blocks = -1
    while True:
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % 8)
        needed = -(-(8 + len(text) + start) // CRC_BLOCK_BYTES)
        if needed == num_blocks:
            return len(text).to_bytes(8, "little") + text
        num_blocks = needed
        entries["block_crcs"] = {"dtype": "U32", "shape": [num_blocks], "data_offsets": [start, start + 4 * num_blocks]}


def layout(fmt: SegmentFormat, num_rows: int) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor but block_crcs, in file order."""
    return [
        ("row_ids", "I64", [num_rows]),
        ("bucket_offsets", "U32", [fmt.num_buckets + 1]),
        ("rows", "U8", [num_rows, fmt.row_bytes]),
        ("accumulators", "U8", [num_rows]),
        ("visits", "U8", [num_rows]),
    ]


def size_of(dtype: str, shape: list[int]) -> int:
    size = DTYPES[dtype].itemsize
    for extent in shape:
        size *= extent
    return size


def write_bytes(fd: int, data: memoryview) -> int:
    """The one place that writes; tests replace it to play a full or failing disk."""
    return os.write(fd, data)


def sync_fd(fd: int) -> None:
    """The one place that syncs; tests replace it to play a failing disk."""
    os.fsync(fd)


class _BlockWriter:
    """Writes a stream and keeps the CRC-32 of each 64 KiB block of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.crcs: list[int] = []
        self._crc = 0
        self._filled = 0  # bytes in the open block

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), WRITE_BYTES):
            piece = data[start : start + WRITE_BYTES]
            self._count(piece)
            write_all(self.fd, piece)

    def _count(self, piece: memoryview) -> None:
        start = 0
        while start < len(piece):
            take = min(CRC_BLOCK_BYTES - self._filled, len(piece) - start)
            self._crc = crc32(piece[start : start + take], self._crc)
            self._filled += take
            start += take
            if self._filled == CRC_BLOCK_BYTES:
                self.crcs.append(self._crc)
                self._crc = self._filled = 0

    def finished_crcs(self) -> bytes:
        crcs = [*self.crcs, self._crc] if self._filled else self.crcs
        return np.array(crcs, "<u4").tobytes()


def write_all(fd: int, data: memoryview) -> None:
    """write() until everything is written: a nearly full disk takes a part first and fails on the next call."""
    while len(data):
        written = write_bytes(fd, data)
        if written <= 0:
            raise OSError(f"write() took {written} of {len(data)} bytes")
        data = data[written:]


def write_segment(path: Path, fmt: SegmentFormat, frozen_step: int, arrays: SegmentArrays) -> None:
    """Writes a whole segment file under `path`, or raises OSError and leaves no file behind.

    arrays: at least one row; all C-contiguous. Makes the folder if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        failpoint("segment.before_write")
        _write_partial(partial, fmt, frozen_step, arrays)
        failpoint("segment.before_rename")
        os.rename(partial, path)
        failpoint("segment.before_folder_sync")
        sync_folder(path.parent)
    except OSError:
        for leftover in (partial, path):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise


def _write_partial(partial: Path, fmt: SegmentFormat, frozen_step: int, arrays: SegmentArrays) -> None:
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        writer = _BlockWriter(fd)
        writer.write(memoryview(header_bytes(fmt, arrays.row_ids.shape[0], frozen_step)))
        for array in (arrays.row_ids, arrays.bucket_offsets, arrays.rows, arrays.accumulators, arrays.visits):
            writer.write(array.data.cast("B"))
        write_all(fd, memoryview(writer.finished_crcs()))
        failpoint("segment.before_sync")
        sync_fd(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """As mkdir -p; the names of those that it makes are on disk when it returns, or a power cut could take the folder
    though what lies in it was synced. OSError."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
