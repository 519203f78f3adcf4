"""ReservedArray: a two-dimensional array whose address space is reserved at once and whose memory arrives as rows do.

The map is private, anonymous and MAP_NORESERVE: a page costs nothing until its first write, so a table grows without
ever copying its rows, and no step of the growth doubles memory. `release` gives the tail back.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from embedding_server.errors import InvalidInput

PAGE_BYTES = mmap.PAGESIZE

#: Up to here a map takes 4 KiB pages, so that a job with many small tables pays no rounding to 2 MiB; beyond it takes
#: huge pages where the kernel has them, which costs at most 2 MiB in 32 (6%) and spares random reads their TLB misses.
SMALL_PAGES_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23  # Linux ABI; the mmap module does not name it, and holds the GIL for its madvise
_LIBC = ctypes.CDLL(None)


class ReservedArray:
    """`array`: [max_rows, columns] of `dtype`, C-contiguous, page-aligned, zero where nothing was written.

    Thread safety: none needed by the map itself; its owner serialises writes.
    Invariants:
    1. The address of `array` never changes between the constructor and `close`.
    2. After `release(r)` every row from r on reads as zeros, and whole pages above row r are no longer committed.
    """

    def __init__(
        self, max_rows: int, columns: int, dtype: np.dtype | type | str, small_bytes: int = SMALL_PAGES_BYTES
    ) -> None:
        """Reserves address space. InvalidInput: negative sizes, or more address space than the kernel gives.

        small_bytes: in the beginning, without huge pages.
        """
        self._dtype = np.dtype(dtype)
        if max_rows < 0 or columns < 0:
            raise InvalidInput(f"max_rows={max_rows}, columns={columns}: both must be at least 0")
        self._row_bytes = columns * self._dtype.itemsize
        self._map: mmap.mmap | None = None
        if max_rows * self._row_bytes == 0:
            self.array = np.zeros((max_rows, columns), self._dtype)
            return
        self._map = _reserve(max_rows * self._row_bytes, small_bytes)
        flat = np.frombuffer(self._map, self._dtype, max_rows * columns)
        self.array = flat.reshape(max_rows, columns)

    @property
    def max_rows(self) -> int:
        return int(self.array.shape[0])

    def committed_bytes(self, rows: int) -> int:
        """Memory that the first `rows` rows take once all of them were written: bytes, rounded up to pages."""
        return _round_up(rows * self._row_bytes)

    def release(self, from_row: int) -> None:
        """Returns the memory of rows [from_row, max_rows) to the kernel; they read as zeros afterwards."""
        if not 0 <= from_row <= self.max_rows:
            raise InvalidInput(f"from_row={from_row} must be in [0, {self.max_rows}], the rows of the array")
        if self._map is None:
            return
        used = from_row * self._row_bytes
        first_page = min(_round_up(used), len(self._map))
        flat = self.array.reshape(-1).view(np.uint8)
        flat[used:first_page] = 0
        if first_page < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, first_page, len(self._map) - first_page)

    def close(self) -> None:
        """Drops the array. The map goes when the last view of it does, so a reader never faults."""
        self.array = np.zeros((0, self.array.shape[1]), self._dtype)
        self._map = None


class PackedArray(ReservedArray):
    """An array of rows that are all there from the start: on the heap, so neither a map nor whole pages of its own."""

    def __init__(self, rows: int, columns: int, dtype: np.dtype | type | str) -> None:
        super().__init__(0, columns, dtype)
        self.array = np.empty((rows, columns), dtype)

    def committed_bytes(self, rows: int) -> int:
        """Of all rows, whatever `rows`."""
        return self.array.nbytes


def populate(array: np.ndarray) -> None:
    """Has a contiguous array of zeros take its memory now, in any thread, so that no first write waits for a page.

    A matter of speed: a kernel before 5.14 does nothing.
    """
    start = array.ctypes.data // PAGE_BYTES * PAGE_BYTES
    size = array.ctypes.data + array.nbytes - start
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _reserve(size_bytes: int, small_bytes: int) -> mmap.mmap:
    # MAP_NORESERVE is in the mmap module from Python 3.12 on some platforms only; its value is Linux ABI.
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        area = mmap.mmap(-1, _round_up(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidInput(
            f"cannot reserve {size_bytes} bytes of address space ({error}); lower memory_limit_bytes, or raise the "
            "limits of the process (ulimit -v) or of the machine (vm.overcommit_memory must not be 2)"
        ) from error
    _advise(area, "MADV_NOHUGEPAGE", 0, min(len(area), small_bytes))
    if len(area) > small_bytes:
        _advise(area, "MADV_HUGEPAGE", small_bytes, len(area) - small_bytes)
    return area


def _advise(area: mmap.mmap, name: str, start: int, length: int) -> None:
    """Page-size advice is a matter of speed only: a kernel built without huge pages refuses it, which is fine."""
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    try:
        area.madvise(advice, start, length)
    except OSError:
        return
