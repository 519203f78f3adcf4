"""Opens segment files: checks everything that a map relies on, then maps the file for reading.

Header, layout, offsets and size are checked when a file is opened; each 64 KiB block against its CRC-32 before the
first read of it (`check_block`; segment_rows.py keeps readers behind it), or all of them at once with `verify=True`,
which also checks that each row_id lies in its bucket. What is wrong is told as SegmentCorrupt, with the file's name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.errors import SegmentCorrupt
from embedding_server.kernels.locations import MAX_SEGMENT_ROWS, first_misplaced
from embedding_server.segment_file import (
    BITS,
    CRC_BLOCK_BYTES,
    DTYPES,
    FORMAT_VERSION,
    MAX_BUCKETS,
    MAX_HEADER_BYTES,
    METADATA_KEYS,
    SegmentArrays,
    SegmentFormat,
    layout,
    size_of,
)
from embedding_server.spec import MAX_DIM
from embedding_server.strict_json import parse_strict

#: States of a block: nobody has read it; its CRC-32 was right; its pages were asked for, its CRC-32 is still to check.
UNCHECKED, CHECKED, ASKED_FOR = 0, 1, 2
_BLOCKS_AT_ONCE = 64  # 4 MiB
_CHECKED_AT_ONCE = 16  # between two looks whether a BlockCheck is still wanted: 0.2 ms


#: Which file it is, and when it was last written to: device, inode, bytes, ns.
Stamp = tuple[int, int, int, int]


def stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(slots=True)
class MappedSegment:
    """An open segment file. After close() its arrays must not be touched: the addresses are gone, unless a BlockCheck
    holds the map.

    Thread safety: any thread may read and check blocks; two that check one block at a time come to the same result.
    """

    path: Path
    format: SegmentFormat
    frozen_step: int
    size_bytes: int
    arrays: SegmentArrays
    block_crcs: np.ndarray  # uint32[K]
    block_states: np.ndarray  # uint8[K]: UNCHECKED, CHECKED or ASKED_FOR; not mapped
    _map: FileMap | None  # None: closed
    sound: set[Stamp]  # files that hold it byte for byte: its own as it was opened, and objects (snapshot_objects.py)
    _last_crc: int = field(init=False)

    def __post_init__(self) -> None:
        self._last_crc = int(self.block_crcs[-1])

    @property
    def num_rows(self) -> int:
        return int(self.arrays.row_ids.shape[0])

    @property
    def address(self) -> int:
        """Where the map starts: block b is the CRC_BLOCK_BYTES from address + b * CRC_BLOCK_BYTES on."""
        return self._mapped.address

    @property
    def _mapped(self) -> FileMap:
        assert self._map is not None, "the segment is closed"
        return self._map

    def check_block(self, block: int) -> None:
        """Reads a block and compares it with its CRC-32, once. SegmentCorrupt, every time, if they differ."""
        self.check_blocks([block])

    def check_blocks(self, blocks: Sequence[int]) -> None:
        """As check_block of each."""
        self._check_in(self._mapped, blocks)

    def check_later(self, blocks: Sequence[int]) -> BlockCheck:
        """What checks these, also after close()."""
        return BlockCheck(self, self._mapped, blocks)

    def _check_in(self, file_map: FileMap, blocks: Sequence[int]) -> None:
        covered, is_size_checked = memoryview(file_map.bytes)[: self.size_bytes - self.block_crcs.nbytes], False
        for block in blocks:
            if self.block_states[block] == CHECKED:
                continue
            if not is_size_checked:
                self._check_size()
                is_size_checked = True
            start = block * CRC_BLOCK_BYTES
            if crc32(covered[start : start + CRC_BLOCK_BYTES]) != int(self.block_crcs[block]):
                raise _corrupt(self.path, f"block {block} (bytes {start} and on) does not match its CRC-32")
            self.block_states[block] = CHECKED

    def check_all(self) -> Iterator[None]:
        """As check_block of every block, some MB at a time; read() because a read of the map takes a page at a time."""
        end = self.size_bytes - self.block_crcs.nbytes
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first in range(0, self.block_crcs.shape[0], _BLOCKS_AT_ONCE):
                start = first * CRC_BLOCK_BYTES
                data = os.pread(fd, min(end - start, _BLOCKS_AT_ONCE * CRC_BLOCK_BYTES), start)
                for block, at in enumerate(range(0, len(data), CRC_BLOCK_BYTES), first):
                    if crc32(data[at : at + CRC_BLOCK_BYTES]) == int(self.block_crcs[block]):
                        self.block_states[block] = CHECKED
                for block in range(first, min(self.block_crcs.shape[0], first + _BLOCKS_AT_ONCE)):
                    self.check_block(block)  # raises
                yield
        finally:
            os.close(fd)
        _check_buckets(self.path, self.arrays, self.format.num_buckets)

    @property
    def header(self) -> bytes:
        """All bytes before the data."""
        return self._mapped.bytes[: self.arrays.row_ids.ctypes.data - self.address].tobytes()

    def _check_size(self) -> None:
        """Reading a map beyond the end of its file would end the process (SIGBUS)."""
        try:
            size = os.stat(self.path).st_size
        except OSError:  # deleted: the map keeps the bytes
            return
        if size < self.size_bytes:
            raise _corrupt(self.path, f"has {size} bytes, {self.size_bytes - size} fewer than when it was opened")

    def check_end(self) -> None:
        """SegmentCorrupt if the file was cut off within its last page, of which the rest reads as zeros from then on,
        without a word. If more of it went, this ends the process (SIGBUS), as reading what was there would."""
        if self.block_crcs[-1] != self._last_crc:
            self._check_size()
            raise _corrupt(self.path, "its last bytes are not what they were when it was opened")

    def check_offsets(self) -> None:
        """Checks the blocks of bucket_offsets, which a merge goes by."""
        self.check_part(self.arrays.bucket_offsets)

    def check_part(self, part: np.ndarray) -> None:
        """Checks the blocks under a part of one of the arrays, of at least one byte."""
        first = part.ctypes.data - self.address
        for block in range(first // CRC_BLOCK_BYTES, (first + part.nbytes - 1) // CRC_BLOCK_BYTES + 1):
            self.check_block(block)

    def close(self) -> None:
        self._map = None


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """Blocks of a segment that are to be checked, by any thread. It holds the map, and so may outlive the segment."""

    segment: MappedSegment
    file_map: FileMap
    blocks: Sequence[int]

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """While it is wanted. A damaged block is left unchecked, and those behind it: the read of its rows says so."""
        with suppress(SegmentCorrupt):
            for start in range(0, len(self.blocks), _CHECKED_AT_ONCE):
                if not is_wanted():
                    return
                self.segment._check_in(self.file_map, self.blocks[start : start + _CHECKED_AT_ONCE])


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """A map of a file, without a file descriptor: shared and read-only, or a private copy that may be changed. It is
    unmapped when nobody holds it any more.

    mmap.mmap keeps a duplicate of the descriptor open, and 26 tables of 32 segments would pass the usual limit of 1024.
    """

    def __init__(self, fd: int, size: int, is_private: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_private else 0)
        address = _libc.mmap(None, size, access, mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
        self.address: int = address
        self._size = size
        _libc.madvise(address, size, mmap.MADV_RANDOM)  # advice only: refused, reads are slower
        self.bytes = np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
        self.bytes.flags.writeable = is_private

    def __del__(self, unmap: Callable[[int, int], Any] = _libc.munmap) -> None:
        if hasattr(self, "address"):  # else it was never mapped
            unmap(self.address, self._size)


def open_segment(path: Path, verify: bool = True, *, is_private: bool = False) -> MappedSegment:
    """Maps a segment file after checking its header, layout and size; `verify` reads and checks every byte.

    is_private: its arrays may be written to, which the file does not see; memory is taken by pages that are.

    Raises SegmentCorrupt, naming the file and what is wrong, or OSError if it cannot be read at all.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        size = stat.st_size
        fmt, num_rows, frozen_step, data_start = _read_header(path, fd, size)
        file_map = FileMap(fd, size, is_private)
    finally:
        os.close(fd)
    arrays, crcs_start = _views(file_map.bytes, fmt, num_rows, data_start)
    crcs = file_map.bytes[crcs_start:].view("<u4")
    states = np.full(crcs.shape[0], UNCHECKED, np.uint8)
    segment = MappedSegment(path, fmt, frozen_step, size, arrays, crcs, states, file_map, {stamp_of(stat)})
    _check_offsets(path, arrays.bucket_offsets, num_rows)
    if verify:
        segment.check_blocks(range(crcs.shape[0]))
        _check_buckets(path, arrays, fmt.num_buckets)
    return segment


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
        header = parse_strict(os.pread(fd, length, 8), MAX_HEADER_BYTES)
    except ValueError as error:
        raise _corrupt(path, f"header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "header is no JSON object")
    fmt, frozen_step = _read_metadata(path, header.pop("__metadata__", None))
    num_rows = _check_tensors(path, header, fmt, 8 + length, size)
    return fmt, num_rows, frozen_step, 8 + length


def _read_metadata(path: Path, metadata: Any) -> tuple[SegmentFormat, int]:
    if not isinstance(metadata, dict) or set(metadata) != METADATA_KEYS:
        raise _corrupt(path, f"metadata must have exactly the keys {sorted(METADATA_KEYS)}")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "metadata values must be strings")
    numbers = {}
    for key in METADATA_KEYS - {"table"}:
        text = metadata[key]
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise _corrupt(path, f"metadata {key}={text[:40]!r} is no number")
        numbers[key] = int(text)
    if numbers["format_version"] != FORMAT_VERSION:
        raise _corrupt(path, f"format_version={numbers['format_version']}, this program reads {FORMAT_VERSION}")
    if numbers["bits"] not in BITS:
        raise _corrupt(path, f"bits={numbers['bits']} is not one of {', '.join(map(str, BITS))}")
    if not 1 <= numbers["dim"] <= MAX_DIM or numbers["dim"] % 4:
        raise _corrupt(path, f"dim={numbers['dim']} is not a multiple of 4 in 4 to {MAX_DIM}")
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
    tensors = layout(fmt, num_rows)
    crcs_start = data_start + sum(size_of(dtype, extents) for _, dtype, extents in tensors)
    tensors.append(("block_crcs", "U32", [-(-crcs_start // CRC_BLOCK_BYTES)]))
    if set(header) != {name for name, _, _ in tensors}:
        raise _corrupt(path, f"tensors are {sorted(header)[:20]}, expected {[name for name, _, _ in tensors]}")
    start = 0
    for name, dtype, extents in tensors:
        end = start + size_of(dtype, extents)
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
    for _, dtype, shape in layout(fmt, num_rows):
        end = start + size_of(dtype, shape)
        views.append(data[start:end].view(DTYPES[dtype]).reshape(shape))
        start = end
    return SegmentArrays(*views), start


def _check_offsets(path: Path, offsets: np.ndarray, num_rows: int) -> None:
    if offsets[0] != 0 or offsets[-1] != num_rows or bool((offsets[1:] < offsets[:-1]).any()):
        raise _corrupt(path, f"bucket_offsets do not rise from 0 to {num_rows}")


def _check_buckets(path: Path, arrays: SegmentArrays, num_buckets: int) -> None:
    position = first_misplaced(arrays.row_ids, arrays.bucket_offsets, num_buckets)
    if position >= 0:
        raise _corrupt(path, f"row_id {arrays.row_ids[position]} at position {position} is not in its bucket")
