"""SegmentBuilder: the growing, in-memory form of a segment. It serves reads until its file is written and mapped."""

from __future__ import annotations

import numpy as np

from embedding_server.kernels.locations import MAX_SEGMENT_ROWS, locations_of
from embedding_server.reserved import PackedArray, ReservedArray
from embedding_server.segment_file import CRC_BLOCK_BYTES, SegmentArrays, SegmentFormat, header_bytes

MAX_SEGMENT_BYTES = 256 << 20
MAX_STEP = 10**18 - 1  # 18 digits, as segment_reader.py accepts


def fixed_bytes(fmt: SegmentFormat) -> int:
    """File bytes that a segment takes whatever its number of rows, at most: header and bucket_offsets."""
    return len(header_bytes(fmt, MAX_SEGMENT_ROWS, MAX_STEP)) + 4 * (fmt.num_buckets + 1)


def capacity_rows(fmt: SegmentFormat, max_bytes: int = MAX_SEGMENT_BYTES) -> int:
    """Rows whose file stays within max_bytes (CRCs included); at least 1."""
    crc_bytes = 4 * (max_bytes // CRC_BLOCK_BYTES + 1)
    return max(1, min(MAX_SEGMENT_ROWS, (max_bytes - fixed_bytes(fmt) - crc_bytes) // fmt.unit_bytes))


#: of a builder: row_ids, rows, accumulators, visits
Parts = tuple[ReservedArray, ReservedArray, ReservedArray, ReservedArray]


def reserved_parts(fmt: SegmentFormat, capacity: int) -> Parts:
    """For a builder that grows: memory comes with the rows, in whole pages."""
    return _parts(ReservedArray, fmt, capacity)


def packed_parts(fmt: SegmentFormat, num_rows: int) -> Parts:
    """For a builder that will have just so many rows."""
    return _parts(PackedArray, fmt, num_rows)


def _parts(array: type[ReservedArray], fmt: SegmentFormat, rows: int) -> Parts:
    return (
        array(rows, 1, np.int64),
        array(rows, fmt.row_bytes, np.uint8),
        array(rows, 1, np.uint8),
        array(rows, 1, np.uint8),
    )


class SegmentBuilder:
    """Rows of one segment slot, appended in order of bucket. A row's location is final when append returns.

    Thread safety: appends by the owner only; once no more are made, any thread may read `arrays()`.
    Invariants:
    1. Buckets never fall from one row to the next.
    2. Addresses of rows stay the same until pack() or close().
    """

    def __init__(
        self, fmt: SegmentFormat, slot: int, capacity: int, frozen_step: int, parts: Parts | None = None
    ) -> None:
        """parts: arrays of `capacity` rows, which are the builder's from here on; None: new maps."""
        self.format = fmt
        self.slot = slot
        self.capacity = capacity
        self.frozen_step = frozen_step
        self.num_rows = 0
        self.last_bucket = 0
        self._counts = np.zeros(fmt.num_buckets, np.int32)
        self._parts = reserved_parts(fmt, capacity) if parts is None else parts

    @property
    def room(self) -> int:
        return self.capacity - self.num_rows

    def append(
        self, row_ids: np.ndarray, buckets: np.ndarray, rows: np.ndarray, accumulators: np.ndarray, visits: np.ndarray
    ) -> np.ndarray:
        """Copies rows in and returns their locations uint32[n]. n <= room; buckets int32[n] from last_bucket up."""
        start, end = self.num_rows, self.num_rows + row_ids.shape[0]
        assert end <= self.capacity, "append beyond the capacity of a segment"
        if end == start:
            return np.empty(0, np.uint32)
        assert buckets[0] >= self.last_bucket, "append below the last bucket of a segment"
        for part, values in zip(self._parts, (row_ids, rows, accumulators, visits), strict=True):
            part.array[start:end] = values.reshape(end - start, -1)
        # Buckets never fall, so the new ones all lie in the span from the first to the last.
        first, last = int(buckets[0]), int(buckets[-1])
        self._counts[first : last + 1] += np.bincount(buckets - first, minlength=last - first + 1)
        self.num_rows, self.last_bucket = end, last
        return locations_of(self.slot, start, end - start)

    def arrays(self) -> SegmentArrays:
        """The rows so far, as views of the buffer."""
        n = self.num_rows
        offsets = np.zeros(self._counts.shape[0] + 1, np.uint32)
        np.cumsum(self._counts, out=offsets[1:])
        row_ids, rows, accumulators, visits = (part.array[:n] for part in self._parts)
        return SegmentArrays(row_ids.reshape(n), offsets, rows, accumulators.reshape(n), visits.reshape(n))

    def base_addresses(self) -> tuple[int, int, int, int]:
        """Addresses of the first row_id, row, accumulator and visits byte."""
        row_ids, rows, accumulators, visits = (int(part.array.ctypes.data) for part in self._parts)
        return row_ids, rows, accumulators, visits

    def committed_bytes(self) -> int:
        return sum(part.committed_bytes(self.num_rows) for part in self._parts) + self._counts.nbytes

    def pack(self) -> Parts:
        """Ends the appending: the rows move into arrays of just their size, at new addresses. Returns the parts that
        they leave, without memory, for another builder of the same format and capacity."""
        left, n = self._parts, self.num_rows
        self._parts, self.capacity = packed_parts(self.format, n), n
        for old, new in zip(left, self._parts, strict=True):
            new.array[:] = old.array[:n]
            old.release(0)
        return left

    def wipe(self) -> None:
        """Overwrites the rows with zeros; then close()."""
        for part in self._parts:
            part.array[: self.num_rows] = 0

    def close(self) -> None:
        """Gives the memory back. Addresses must not be used any more."""
        for part in self._parts:
            part.close()
