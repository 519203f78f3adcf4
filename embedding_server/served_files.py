"""Arrays of rows in the files of a snapshot, mapped read-only, as kernels/served.py takes them.

    Slots        where the arrays of one table of one part lie, and who checks their blocks
    MappedFile   a column file (snapshot_file.py); segments are segment_reader.MappedSegment

Processes that serve the same snapshot share the pages of these maps. A file that is removed while it is mapped stays
readable; of one that is cut off a read is refused, or the process ends by SIGBUS, as in a shard.

Thread safety: any thread may check blocks; two that check one block at a time come to the same result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.kernels import paging
from embedding_server.kernels import served as kernels
from embedding_server.lookup import INITIAL
from embedding_server.segment_file import CRC_BLOCK_BYTES
from embedding_server.segment_reader import CHECKED, FileMap, MappedSegment, Stamp, stamp_of
from embedding_server.snapshot_file import ColumnReader, corrupt
from embedding_server.store import FOUND, TRAINABLE

_READ_AHEAD_BYTES = 4 << 20
HOT, FROZEN, AT_START = TRAINABLE | FOUND, FOUND, FOUND | INITIAL


class Blocks(Protocol):
    """Bytes in blocks of CRC_BLOCK_BYTES."""

    def check_block(self, block: int) -> None:
        """SegmentCorrupt, every time, if its bytes do not match their CRC-32."""


@dataclass(frozen=True, slots=True)
class Area:
    """Bytes of rows that a reader finds checked or checks."""

    key: tuple[Stamp, str]  # the same of the same bytes, in whichever snapshot
    blocks: Blocks
    states: np.ndarray  # uint8[K]
    address: int
    size_bytes: int

    def take_over(self, other: Area) -> None:
        """What was checked of the same bytes needs no check."""
        self.states[:] = other.states

    def check(self) -> None:
        """Reads what is not checked yet, some MB at a time. SegmentCorrupt."""
        per_piece = _READ_AHEAD_BYTES // CRC_BLOCK_BYTES
        for first in range(0, self.states.shape[0], per_piece):
            left = first + np.flatnonzero(self.states[first : first + per_piece] != CHECKED)
            start = first * CRC_BLOCK_BYTES
            if left.shape[0] and start < self.size_bytes:
                read_ahead(self.address + start, min(_READ_AHEAD_BYTES, self.size_bytes - start))
                for block in left.tolist():
                    self.blocks.check_block(block)


class MappedColumn:
    """One column of a mapped column file."""

    def __init__(self, path: Path, address: int, data: np.ndarray, crcs: np.ndarray, file_bytes: int) -> None:
        self.path, self.address, self.data = path, address, data
        self.states = np.zeros(crcs.shape[0], np.uint8)
        self._crcs, self._file_bytes = crcs, file_bytes

    def check_block(self, block: int) -> None:
        if self.states[block] == CHECKED:
            return
        check_size(self.path, self._file_bytes)
        start = block * CRC_BLOCK_BYTES
        if crc32(memoryview(self.data)[start : start + CRC_BLOCK_BYTES]) != int(self._crcs[block]):
            raise corrupt(self.path, f"a block of {CRC_BLOCK_BYTES} bytes does not match its CRC-32")
        self.states[block] = CHECKED

    def area(self, stamp: Stamp, name: str) -> Area:
        return Area((stamp, name), self, self.states, self.address, self.data.shape[0])


class MappedFile:
    """A column file that was opened, mapped. Its reader may be closed afterwards."""

    def __init__(self, reader: ColumnReader) -> None:
        self.path, self.size_bytes, self._reader = reader.path, reader.size_bytes, reader
        self._map: FileMap | None = reader.map()
        self.stamp = stamp_of(reader.stat())
        self.end = self._map.address + self.size_bytes - 4  # the last CRC: no column file is without one
        self.last_crc = int(self._map.bytes[-4:].view("<u4")[0])

    def column(self, name: str) -> MappedColumn:
        assert self._map is not None
        column, offset, crcs = self._reader.place(name)
        data = self._map.bytes[offset : offset + column.size_bytes]
        return MappedColumn(self.path, self._map.address + offset, data, crcs, self.size_bytes)

    def close(self) -> None:
        self._map = None  # it is unmapped when nobody holds it


class Slots:
    """The slots of one part of a table, in order, and the objects that their addresses point into."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []  # SLOT_COLUMNS each
        self.blocks: list[Blocks | None] = []  # of each
        self.areas: list[Area] = []  # that rows are read from
        self.paths: list[Path | None] = []
        self._kept: list[object] = []

    @property
    def next_place(self) -> int:
        return len(self.rows) << kernels.PLACE_SHIFT

    def add_segment(self, segment: MappedSegment) -> int:
        """Each of these adds an array of rows; the place of its first."""
        of_file = {
            kernels.BLOCKS: segment.address,
            kernels.STATES: segment.block_states.ctypes.data,
            kernels.END: segment.address + segment.size_bytes - 4,
            kernels.LAST_CRC: int(segment.block_crcs[-1]),
        }
        size = segment.size_bytes - segment.block_crcs.nbytes
        (stamp,) = segment.sound  # its own: it has just been opened
        self.areas.append(Area((stamp, "segment"), segment, segment.block_states, segment.address, size))
        ids, rows = (array.ctypes.data for array in (segment.arrays.row_ids, segment.arrays.rows))
        fmt = segment.format
        return self._add(segment.num_rows, ids, rows, fmt.row_bytes, fmt.bits, FROZEN, of_file, segment, segment.path)

    def add_hot_file(
        self, file: MappedFile, num_rows: int, ids: MappedColumn, weights: MappedColumn, width: int, shifts: np.ndarray
    ) -> int:
        """width: bytes of a value. shifts int64[B + 1]: kernels.SHIFTS."""
        row_bytes = 0 if not weights.data.shape[0] else weights.data.shape[0] // max(1, num_rows - int(shifts[-1]))
        of_file = {
            kernels.SHIFTS: shifts.ctypes.data if shifts.any() else 0,
            kernels.BLOCKS: weights.address,
            kernels.STATES: weights.states.ctypes.data,
            kernels.END: file.end,
            kernels.LAST_CRC: file.last_crc,
        }
        self._kept += [shifts, ids]
        self.areas.append(weights.area(file.stamp, "weights"))
        where = ids.address, weights.address, row_bytes, 8 * width
        return self._add(num_rows, *where, HOT, of_file, weights, file.path)

    def add_memory(self, row_ids: np.ndarray, rows: np.ndarray) -> int:
        """Hot rows int64[n], float32[n, D]."""
        self._kept += [row_ids, rows]
        where = row_ids.ctypes.data, rows.ctypes.data, rows.strides[0], 32
        return self._add(row_ids.shape[0], *where, HOT, {}, None, None)

    def add_initial(self, file: MappedFile, row_ids: MappedColumn) -> int:
        self._kept.append(row_ids)
        of_file = {kernels.END: file.end, kernels.LAST_CRC: file.last_crc}
        return self._add(row_ids.data.shape[0] // 8, row_ids.address, 0, 0, 0, AT_START, of_file, None, file.path)

    def _add(
        self,
        num_rows: int,
        ids: int,
        rows: int,
        row_bytes: int,
        bits: int,
        flags: int,
        of_file: dict[int, int],
        blocks: Blocks | None,
        path: Path | None,
    ) -> int:
        first_place = self.next_place
        for start in range(0, max(1, num_rows), kernels.MAX_PLACES):
            row = [0] * kernels.SLOT_COLUMNS
            for column, value in of_file.items():
                row[column] = value
            row[kernels.IDS], row[kernels.ROWS] = ids + 8 * start, rows + row_bytes * start
            row[kernels.ROW_BYTES], row[kernels.BITS], row[kernels.FLAGS] = row_bytes, bits, flags
            self.rows.append(row)
            self.blocks.append(blocks)
            self.paths.append(path)
        self._kept.append(blocks)
        return first_place


def check_size(path: Path, size_bytes: int) -> None:
    """SegmentCorrupt if a mapped file is shorter than it was: reading what is gone would end the process (SIGBUS)."""
    try:
        size = os.stat(path).st_size
    except OSError:  # removed: the map keeps the bytes
        return
    if size < size_bytes:
        raise corrupt(path, f"has {size} bytes, {size_bytes - size} fewer than when it was opened")


def check_row_ids(segment: MappedSegment) -> None:
    """Reads and checks what an index of a segment is made of."""
    for part in (segment.arrays.row_ids, segment.arrays.bucket_offsets):
        data = part.reshape(-1).view(np.uint8)
        for start in range(0, data.shape[0], _READ_AHEAD_BYTES):
            piece = data[start : start + _READ_AHEAD_BYTES]
            read_ahead(piece.ctypes.data, piece.shape[0])
            segment.check_part(piece)


def read_ahead(address: int, size: int) -> None:
    first = address & ~4095
    paging.will_need(np.array([[first, address + size - first]], np.int64))
