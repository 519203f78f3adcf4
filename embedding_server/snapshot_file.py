"""The column file of a snapshot: named arrays of known shapes, in one checksummed safetensors file.

Layout. DO NOT CHANGE (format_version of ShardRecord). All numbers are little-endian.

    offset       bytes   what
    0            8       uint64 H: bytes of the header
    8            H       JSON header, ASCII, padded with spaces so that 8 + H is a multiple of 8
    8 + H        ...     the columns in their order, without holes
    E            4 K     block_crcs uint32[K]: CRC-32 of each 64 KiB of the first column, then of the second, ...; the
                         last block of a column may be shorter

The header follows from the columns alone, so a reader makes it anew and compares: nothing of it is parsed. Whoever
names the file keeps its size and the CRC-32 of block_crcs (snapshot_format.FileRecord), so that every byte is covered
and any range of rows can be read and checked without the rest of the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.segment_file import CRC_BLOCK_BYTES, PARTIAL_SUFFIX, sync_fd, write_all
from embedding_server.segment_reader import FileMap

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"), "F64": np.dtype("<f8"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
}  # fmt: skip
_READ_BYTES = 4 << 20  # checked a step of ColumnReader.verify


@dataclass(frozen=True, slots=True)
class Column:
    """An array [n] or [n, width]; n is its number of rows."""

    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * math.prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        return self.row_bytes * self.shape[0]

    @property
    def num_blocks(self) -> int:
        return -(-self.size_bytes // CRC_BLOCK_BYTES)


def header_bytes(columns: Sequence[Column]) -> bytes:
    """What the file starts with."""
    entries: dict[str, Any] = {"__metadata__": {"format": "frostline-columns", "format_version": "1"}}
    num_blocks = sum(column.num_blocks for column in columns)
    start = 0
    for column in [*columns, Column("block_crcs", "U32", (num_blocks,))]:
        end = start + column.size_bytes
        entries[column.name] = {"dtype": column.dtype, "shape": list(column.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_size(columns: Sequence[Column]) -> int:
    return len(header_bytes(columns)) + _data_bytes(columns)


def _data_bytes(columns: Sequence[Column]) -> int:
    """Of what follows the header."""
    return sum(column.size_bytes + 4 * column.num_blocks for column in columns)


def open_regular(path: Path) -> int:
    """A descriptor to read a file of a snapshot. SegmentCorrupt unless it is a regular file; OSError."""
    if path.is_symlink() or path.parent.is_symlink():
        raise corrupt(path, "is, or lies behind, a symbolic link")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise corrupt(path, "is no regular file")
    return fd


def corrupt(path: Path, what: str) -> SegmentCorrupt:
    return SegmentCorrupt(
        f"snapshot file {path}: {what}; it was damaged or is no file of a snapshot: restore another one", str(path)
    )


class _ColumnCursor:
    """Where the next bytes of a column go. Less than a block waits in memory."""

    def __init__(self, column: Column, offset: int) -> None:
        self.column = column
        self.offset = offset  # in the file, of the next block
        self.end = offset + column.size_bytes
        self.waiting = bytearray()
        self.crcs: list[int] = []

    def take(self, data: memoryview) -> list[bytes | memoryview]:
        """The whole blocks that are there now, in pieces of whole blocks."""
        pieces: list[bytes | memoryview] = []
        if self.waiting:
            missing = CRC_BLOCK_BYTES - len(self.waiting)
            self.waiting += data[:missing]
            data = data[missing:]
            if len(self.waiting) < CRC_BLOCK_BYTES:
                return []
            pieces.append(bytes(self.waiting))
        whole = len(data) - len(data) % CRC_BLOCK_BYTES
        self.waiting = bytearray(data[whole:])
        return [*pieces, data[:whole]] if whole else pieces

    def rest(self) -> bytes:
        data = bytes(self.waiting)
        self.waiting = bytearray()
        return data

    def note_crcs(self, data: bytes | memoryview) -> None:
        """Of the blocks behind those noted before."""
        for start in range(0, len(data), CRC_BLOCK_BYTES):
            self.crcs.append(crc32(data[start : start + CRC_BLOCK_BYTES]))


_Piece = tuple[_ColumnCursor, bytes | memoryview, int]  # of a column: whole blocks, and where in the file they go


class ColumnWriter:
    """Writes a column file, each column from its first row on, in any order between the columns.

    append ..., hand_over() now and then; complete(); sync(), in any thread; publish(). Or abandon(), at any time.
    Methods raise OSError.

    With an executor, of one thread, hand_over gives it what was appended: checksums and write() were two thirds of a
    slice of a cut, and a write() may wait for the disk, while calls wait for the shard's thread. Else append writes.
    """

    def __init__(self, path: Path, columns: Sequence[Column], executor: Executor | None = None) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._executor = executor
        self._appended: list[_Piece] = []
        self._writes: deque[tuple[Future[None], int]] = deque()  # handed over, oldest first, with their bytes
        header = header_bytes(columns)
        self._cursors: dict[str, _ColumnCursor] = {}
        offset = len(header)
        for column in columns:
            self._cursors[column.name] = _ColumnCursor(column, offset)
            offset += column.size_bytes
        self._crcs_at = offset
        self.size_bytes = file_size(columns)
        self.crc32 = 0  # of block_crcs, after complete()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(self._partial, flags, 0o644)
        try:
            self._write(header, 0)
        except OSError:
            self.abandon()
            raise

    def append(self, name: str, rows: np.ndarray) -> None:
        """The next rows of a column, in its dtype; they must not change afterwards."""
        cursor = self._cursors[name]
        assert rows.dtype == DTYPES[cursor.column.dtype], f"column {name} of {self.path} takes {cursor.column.dtype}"
        if not rows.size:
            return
        for data in cursor.take(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data):
            self._appended.append((cursor, data, cursor.offset))
            cursor.offset += len(data)
        assert cursor.offset + len(cursor.waiting) <= cursor.end, f"column {name} of {self.path} is full"
        if self._executor is None:
            pieces, self._appended = self._appended, []
            self._write_pieces(pieces)

    def hand_over(self) -> None:
        """Has what was appended written."""
        if self._executor is not None and self._appended:
            pieces, self._appended = self._appended, []
            size = sum(len(data) for _, data, _ in pieces)
            self._writes.append((self._executor.submit(self._write_pieces, pieces), size))

    @property
    def waiting_bytes(self) -> int:
        """Handed over and not yet written. OSError if some could not be."""
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()[0].result()
        return sum(size for _, size in self._writes)

    def wait(self) -> None:
        """Until the oldest that was handed over is written. OSError if it could not be."""
        if self._writes:
            self._writes.popleft()[0].result()

    def complete(self) -> None:
        """Every column has all its rows: writes what waits, and block_crcs."""
        self.hand_over()
        while self._writes:
            self.wait()
        crcs: list[int] = []
        for name, cursor in self._cursors.items():
            rest = cursor.rest()
            self._write_pieces([(cursor, rest, cursor.offset)])
            cursor.offset += len(rest)
            assert cursor.offset == cursor.end, f"column {name} of {self.path} lacks {cursor.end - cursor.offset} bytes"
            crcs += cursor.crcs
        data = np.array(crcs, "<u4").tobytes()
        self._write(data, self._crcs_at)
        self.crc32 = crc32(data)

    def _write_pieces(self, pieces: Sequence[_Piece]) -> None:
        for cursor, data, offset in pieces:
            cursor.note_crcs(data)
            self._write(data, offset)

    def sync(self) -> None:
        """Returns when what was written is on disk."""
        assert self._fd is not None
        failpoint("columns.before_sync")
        sync_fd(self._fd)

    def publish(self) -> None:
        """Gives the file its name; the caller syncs the folder."""
        self._close()
        failpoint("columns.before_rename")
        os.rename(self._partial, self.path)

    def finish(self) -> None:
        """All that is left to do, at once."""
        self.complete()
        self.sync()
        self.publish()

    def abandon(self) -> None:
        """Removes the file under its temporary name, if it is there."""
        while self._writes:  # they need the descriptor; what became of them does not matter any more
            write, _ = self._writes.popleft()
            if not write.cancel():
                write.exception()
        self._close()
        with contextlib.suppress(OSError):
            self._partial.unlink()

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        assert self._fd is not None
        if len(data):
            os.lseek(self._fd, offset, os.SEEK_SET)
            write_all(self._fd, memoryview(data))


class ColumnReader:
    """Reads ranges of rows of a column file. SegmentCorrupt names the file if a byte of them is not what it was."""

    def __init__(self, path: Path, columns: Sequence[Column], size_bytes: int, crc: int) -> None:
        """size_bytes, crc: what the writer said of the file. SegmentCorrupt or OSError if it is another."""
        self.path, self._size_bytes = path, size_bytes
        self._columns: dict[str, tuple[Column, int, int]] = {}  # with the offset of its first byte, and of its CRCs
        self._fd: int | None = open_regular(path)
        try:
            self._crcs = self._check(columns, size_bytes, crc)
        except BaseException:
            self.close()
            raise

    def _check(self, columns: Sequence[Column], size_bytes: int, crc: int) -> np.ndarray:
        assert self._fd is not None
        header = header_bytes(columns)
        expected, size = len(header) + _data_bytes(columns), os.fstat(self._fd).st_size
        if expected != size_bytes:
            raise corrupt(self.path, f"should have {size_bytes} bytes, but its columns take {expected}")
        if size != size_bytes:
            raise corrupt(self.path, f"has {size} bytes, not {size_bytes}")
        if self._read(0, len(header)) != header:
            raise corrupt(self.path, "its header is not that of its columns")
        offset, block = len(header), 0
        for column in columns:
            self._columns[column.name] = column, offset, block
            offset += column.size_bytes
            block += column.num_blocks
        data = self._read(offset, 4 * block)
        if crc32(data) != crc:
            raise corrupt(self.path, "its block_crcs do not match their CRC-32")
        return np.frombuffer(data, "<u4")

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def stat(self) -> os.stat_result:
        assert self._fd is not None
        return os.fstat(self._fd)

    def place(self, name: str) -> tuple[Column, int, np.ndarray]:
        """A column, where in the file it begins, and the CRC-32s uint32[K] of its blocks."""
        column, offset, first_crc = self._columns[name]
        return column, offset, self._crcs[first_crc : first_crc + column.num_blocks]

    def map(self) -> FileMap:
        """Of the whole file, which stays when this is closed. Nothing is checked of what is read there. OSError."""
        assert self._fd is not None
        return FileMap(self._fd, self._size_bytes, is_private=False)

    def num_rows(self, name: str) -> int:
        return self._columns[name][0].shape[0]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of a column, a copy; None: to its end."""
        column = self._columns[name][0]
        stop = column.shape[0] if stop is None else stop
        assert 0 <= start <= stop <= column.shape[0]
        data = self._read_checked(name, start * column.row_bytes, stop * column.row_bytes)
        return np.frombuffer(data, DTYPES[column.dtype]).reshape(stop - start, *column.shape[1:])

    def ranges(self, name: str, rows: int) -> Iterator[np.ndarray]:
        """A column, `rows` rows at a time."""
        n = self.num_rows(name)
        for start in range(0, n, rows):
            yield self.read(name, start, min(n, start + rows))

    def verify(self) -> Iterator[int]:
        """Reads and checks everything, yielding the bytes of each bounded step."""
        for name, (column, _, _) in self._columns.items():
            for start in range(0, column.size_bytes, _READ_BYTES):
                stop = min(column.size_bytes, start + _READ_BYTES)
                self._read_checked(name, start, stop)
                yield stop - start

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _read_checked(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a column, after every block of them was compared with its CRC-32."""
        column, offset, first_crc = self._columns[name]
        if start == stop:
            return memoryview(bytearray())
        first = start // CRC_BLOCK_BYTES
        begin, end = first * CRC_BLOCK_BYTES, min(column.size_bytes, -(-stop // CRC_BLOCK_BYTES) * CRC_BLOCK_BYTES)
        data = memoryview(self._read(offset + begin, end - begin))
        for block, at in enumerate(range(0, end - begin, CRC_BLOCK_BYTES), first):
            if crc32(data[at : at + CRC_BLOCK_BYTES]) != int(self._crcs[first_crc + block]):
                raise corrupt(self.path, f"block {block} of column {name} does not match its CRC-32")
        return data[start - begin : stop - begin]

    def _read(self, offset: int, size: int) -> bytearray:
        assert self._fd is not None
        data = bytearray(size)
        done = 0
        while done < size:
            got = os.preadv(self._fd, [memoryview(data)[done:]], offset + done)
            if got <= 0:
                raise corrupt(self.path, f"ends at byte {offset + done}, it was cut off while it was read")
            done += got
        return data
