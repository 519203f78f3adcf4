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
    E                 4 K        block_crcs      uint32[K], K = ceil(E / 65536): CRC-32 (zlib) of each 64 KiB block of
                                                 the file from byte 0 to E, so that every byte is covered

The tensors lie in this order without holes and end with the file. A row of 8 bits is FBGEMM's fused row-wise format:
dim bytes of codes, then float32 scale and float32 bias (R = dim + 8). A row of 32 bits is dim float32 (R = 4 dim).
`__metadata__` holds, as strings: format_version, table, bits, dim, num_buckets, frozen_step.

A file appears under its name only when it is whole: it is written beside it as NAME.partial, fsynced, renamed, and the
folder is fsynced. Reading checks everything that a map relies on before the map is used; `verify=True` also checks the
CRCs and that each row_id lies in its bucket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.errors import SegmentCorrupt
from embedding_server.kernels.locations import MAX_SEGMENT_ROWS, first_misplaced
from embedding_server.spec import MAX_DIM

FORMAT_VERSION = 1
CRC_BLOCK_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_BUCKETS = 1 << 16
WRITE_BYTES = 4 << 20  # one write() call
PARTIAL_SUFFIX = ".partial"

_DTYPES = {"I64": np.dtype("<i8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1")}
_METADATA_KEYS = {"format_version", "table", "bits", "dim", "num_buckets", "frozen_step"}


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """What all segments of one table and shard have in common."""

    table: str
    bits: int  # 8 or 32
    dim: int
    num_buckets: int

    @property
    def row_bytes(self) -> int:
        return self.dim + 8 if self.bits == 8 else 4 * self.dim

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


@dataclass(slots=True)
class MappedSegment:
    """An open segment file. After close() its arrays must not be touched: the addresses are gone."""

    path: Path
    format: SegmentFormat
    frozen_step: int
    size_bytes: int
    arrays: SegmentArrays
    _map: _FileMap

    @property
    def num_rows(self) -> int:
        return int(self.arrays.row_ids.shape[0])

    def close(self) -> None:
        self._map.close()


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
    for name, dtype, shape in _layout(fmt, num_rows):
        end = start + _size(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    # block_crcs covers the header, whose length depends on the digits of its own entry: settle both.
    num_blocks = -1
    while True:
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % 8)
        needed = -(-(8 + len(text) + start) // CRC_BLOCK_BYTES)
        if needed == num_blocks:
            return len(text).to_bytes(8, "little") + text
        num_blocks = max(needed, num_blocks)
        entries["block_crcs"] = {"dtype": "U32", "shape": [num_blocks], "data_offsets": [start, start + 4 * num_blocks]}


def _layout(fmt: SegmentFormat, num_rows: int) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor but block_crcs, in file order."""
    return [
        ("row_ids", "I64", [num_rows]),
        ("bucket_offsets", "U32", [fmt.num_buckets + 1]),
        ("rows", "U8", [num_rows, fmt.row_bytes]),
        ("accumulators", "U8", [num_rows]),
        ("visits", "U8", [num_rows]),
    ]


def _size(dtype: str, shape: list[int]) -> int:
    size = _DTYPES[dtype].itemsize
    for extent in shape:
        size *= extent
    return size


# ---------------------------------------------------------------------------------------------------------------- write


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
            self._crc = zlib.crc32(piece[start : start + take], self._crc)
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
        _write_partial(partial, fmt, frozen_step, arrays)
        os.rename(partial, path)
        _sync_folder(path.parent)
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
            writer.write(memoryview(array).cast("B"))
        write_all(fd, memoryview(writer.finished_crcs()))
        sync_fd(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------------------------- read


class _FileMap:
    """A read-only shared map of a file, without a file descriptor.

    mmap.mmap keeps a duplicate of the descriptor open, and 26 tables of 32 segments would pass the usual limit of 1024.
    """

    def __init__(self, fd: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
        self.address: int | None = address
        self.size = size
        self.bytes = np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
        self.bytes.flags.writeable = False

    def close(self) -> None:
        if self.address is not None:
            _libc.munmap(self.address, self.size)
            self.address = None


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def open_segment(path: Path, verify: bool = True) -> MappedSegment:
    """Maps a segment file after checking its header, layout and size; `verify` reads and checks every byte.

    Raises SegmentCorrupt, naming the file and what is wrong, or OSError if it cannot be read at all.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        fmt, num_rows, frozen_step, data_start = _read_header(path, fd, size)
        file_map = _FileMap(fd, size)
    finally:
        os.close(fd)
    try:
        arrays, crcs_start = _views(file_map.bytes, fmt, num_rows, data_start)
        _check_offsets(path, arrays.bucket_offsets, num_rows)
        if verify:
            _check_crcs(path, file_map.bytes, crcs_start)
            _check_buckets(path, arrays, fmt.num_buckets)
    except BaseException:
        file_map.close()
        raise
    return MappedSegment(path, fmt, frozen_step, size, arrays, file_map)


def _corrupt(path: Path, what: str) -> SegmentCorrupt:
    return SegmentCorrupt(
        f"segment file {path}: {what}; it was damaged or is no segment: restore it from a snapshot or delete it",
        str(path),
    )


def _read_header(path: Path, fd: int, size: int) -> tuple[SegmentFormat, int, int, int]:
    """Format, rows, frozen_step and offset of the data, all checked against the size of the file."""
    if size < 8:
        raise _corrupt(path, f"has {size} bytes, fewer than the 8 of a header length")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES or length < 2:
        raise _corrupt(path, f"header length {length} is not in 2 to {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise _corrupt(path, f"is truncated: header of {length} bytes in a file of {size}")
    if length % 8:
        raise _corrupt(path, f"header length {length} is not a multiple of 8")
    try:
        header = json.loads(os.pread(fd, length, 8).decode("ascii"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "header is no JSON object")
    fmt, frozen_step = _read_metadata(path, header.pop("__metadata__", None))
    num_rows = _check_tensors(path, header, fmt, 8 + length, size)
    return fmt, num_rows, frozen_step, 8 + length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _read_metadata(path: Path, metadata: Any) -> tuple[SegmentFormat, int]:
    if not isinstance(metadata, dict) or set(metadata) != _METADATA_KEYS:
        raise _corrupt(path, f"metadata must have exactly the keys {sorted(_METADATA_KEYS)}")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "metadata values must be strings")
    numbers = {}
    for key in _METADATA_KEYS - {"table"}:
        text = metadata[key]
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise _corrupt(path, f"metadata {key}={text[:40]!r} is no number")
        numbers[key] = int(text)
    if numbers["format_version"] != FORMAT_VERSION:
        raise _corrupt(path, f"format_version={numbers['format_version']}, this program reads {FORMAT_VERSION}")
    if numbers["bits"] not in (8, 32):
        raise _corrupt(path, f"bits={numbers['bits']} is not 8 or 32")
    if not 1 <= numbers["dim"] <= MAX_DIM:
        raise _corrupt(path, f"dim={numbers['dim']} is not in 1 to {MAX_DIM}")
    buckets = numbers["num_buckets"]
    if not 1 <= buckets <= MAX_BUCKETS or buckets & (buckets - 1):
        raise _corrupt(path, f"num_buckets={buckets} is no power of two up to {MAX_BUCKETS}")
    return SegmentFormat(metadata["table"], numbers["bits"], numbers["dim"], buckets), numbers["frozen_step"]


def _check_tensors(path: Path, header: dict[str, Any], fmt: SegmentFormat, data_start: int, size: int) -> int:
    """Checks that the tensors are exactly those of the layout, in order and without holes. Returns the rows."""
    row_ids = header.get("row_ids")
    shape = row_ids.get("shape") if isinstance(row_ids, dict) else None
    if not (isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int):
        raise _corrupt(path, "tensor row_ids is missing or has no shape [n]")
    num_rows = shape[0]
    if not 1 <= num_rows <= MAX_SEGMENT_ROWS:
        raise _corrupt(path, f"{num_rows} rows, not in 1 to {MAX_SEGMENT_ROWS}")
    layout = _layout(fmt, num_rows)
    crcs_start = data_start + sum(_size(dtype, extents) for _, dtype, extents in layout)
    layout.append(("block_crcs", "U32", [-(-crcs_start // CRC_BLOCK_BYTES)]))
    if set(header) != {name for name, _, _ in layout}:
        raise _corrupt(path, f"tensors are {sorted(header)[:20]}, expected {[name for name, _, _ in layout]}")
    start = 0
    for name, dtype, extents in layout:
        end = start + _size(dtype, extents)
        expected = {"dtype": dtype, "shape": extents, "data_offsets": [start, end]}
        if header[name] != expected:
            raise _corrupt(path, f"tensor {name} is {str(header[name])[:200]}, expected {expected}")
        start = end
    if data_start + start != size:
        raise _corrupt(path, f"has {size} bytes, its header asks for {data_start + start}")
    return num_rows


def _views(data: np.ndarray, fmt: SegmentFormat, num_rows: int, data_start: int) -> tuple[SegmentArrays, int]:
    """The tensors as views of the mapped bytes, and where block_crcs starts."""
    views, start = [], data_start
    for _, dtype, shape in _layout(fmt, num_rows):
        end = start + _size(dtype, shape)
        views.append(data[start:end].view(_DTYPES[dtype]).reshape(shape))
        start = end
    return SegmentArrays(*views), start


def _check_offsets(path: Path, offsets: np.ndarray, num_rows: int) -> None:
    if offsets[0] != 0 or offsets[-1] != num_rows or bool((offsets[1:] < offsets[:-1]).any()):
        raise _corrupt(path, f"bucket_offsets do not rise from 0 to {num_rows}")


def _check_crcs(path: Path, data: np.ndarray, crcs_start: int) -> None:
    """Reads the whole file once and compares every block with its CRC-32."""
    crcs = np.frombuffer(data[crcs_start:].tobytes(), "<u4")
    covered = memoryview(data)[:crcs_start]
    for block, crc in enumerate(crcs.tolist()):
        start = block * CRC_BLOCK_BYTES
        if zlib.crc32(covered[start : start + CRC_BLOCK_BYTES]) != crc:
            raise _corrupt(path, f"block {block} (bytes {start} and on) does not match its CRC-32")


def _check_buckets(path: Path, arrays: SegmentArrays, num_buckets: int) -> None:
    position = first_misplaced(arrays.row_ids, arrays.bucket_offsets, num_buckets)
    if position >= 0:
        raise _corrupt(path, f"row_id {arrays.row_ids[position]} at position {position} is not in its bucket")
