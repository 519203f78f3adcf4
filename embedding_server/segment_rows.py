"""SegmentRows: where the rows of each segment slot lie now, in a buffer or in a mapped file, and reading them.

A block of a file is checked against its CRC-32 before the first read of it, once: 1.2 us with isal (zlib: 16 to 25) and
a few in Python. A byte of state a block says so afterwards, 2 ns a row. So damage on a disk becomes SegmentCorrupt
and never a wrong row.

Cold pages. A page fault for each row of a big tail costs 60 to 100 us one after the other, so files are mapped with
MADV_RANDOM (a fault reads the page alone, not 128 KiB around it) and pages come in by MADV_WILLNEED, which queues reads
and does not wait: all of a batch are under way together. A hint does just that, ahead of time (hints.py), for rows
alone: accumulators and visits are a byte a row, so their pages, of 4,096 rows each, stay. A read of a batch does it too
if its rows seem to be out of memory: it asks mincore for the pages of SAMPLES rows spread over the batch, 1 us each,
and pages in all if one is absent. With a share p of absent pages it misses them with probability (1 - p)^SAMPLES: 19%
of the batches at p = 5%, where there is little to gain, 0.1% at p = 20%. Asking for every row would cost as much as
reading them. Figures, 6,000 cold rows of a 252 MiB file with checked blocks, 2 busy cores: 560 to 720 ms fault by
fault, 90 to 230 in one batch, 22 after a prefetch; with unchecked blocks, which is the whole file here, 320 to 440.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from embedding_server.kernels import frozen, paging
from embedding_server.kernels import locations as kernels
from embedding_server.kernels.locations import MAX_SLOTS, SLOT_SHIFT
from embedding_server.kernels.wire import FLOAT32
from embedding_server.page_reads import PAGE_BYTES, PageReads
from embedding_server.segment_builder import SegmentBuilder
from embedding_server.segment_reader import UNCHECKED, BlockCheck, MappedSegment

SAMPLES = 32  # rows of a batch whose pages are asked about
_LEAST_BATCH = 64  # rows; fewer are read one page fault after the other


class Part(IntEnum):
    """The arrays of a segment that locations lead into."""

    ROW_IDS, ROWS, ACCUMULATORS, VISITS = range(4)


READ_PARTS = (Part.ROWS, Part.ACCUMULATORS, Part.VISITS)


class SegmentRows:
    """Tables by segment slot, and reads through them.

    Thread safety: one thread at a time; files that another thread is writing are not in it yet.
    Invariant: a slot has no rows, those of one builder, or those of one mapped file, all in one format.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._bases = np.zeros((4, MAX_SLOTS), np.int64)  # by Part: address of item 0
        self._item_bytes = np.ones((4, MAX_SLOTS), np.int64)
        self._item_bytes[Part.ROW_IDS] = 8
        self._bits = np.zeros(MAX_SLOTS, np.uint8)
        self._maps, self._states, self._sizes = np.zeros((3, MAX_SLOTS), np.int64)
        self._files: dict[int, MappedSegment] = {}
        self._cold: set[int] = set()

    def set_buffer(self, builder: SegmentBuilder) -> None:
        """The slot's rows lie in this builder."""
        slot = builder.slot
        self._bases[:, slot] = builder.base_addresses()
        self._bits[slot] = builder.format.bits
        self._item_bytes[Part.ROWS, slot] = builder.format.row_bytes

    def set_file(self, slot: int, segment: MappedSegment) -> None:
        """The slot's rows lie in this file: those of its builder up to now, or of a cut."""
        arrays = segment.arrays
        self._bits[slot] = segment.format.bits
        self._item_bytes[Part.ROWS, slot] = segment.format.row_bytes
        parts = (arrays.row_ids, arrays.rows, arrays.accumulators, arrays.visits)
        self._bases[:, slot] = [part.ctypes.data for part in parts]
        self._maps[slot] = segment.address
        self._states[slot] = segment.block_states.ctypes.data
        self._sizes[slot] = segment.size_bytes
        self._files[slot] = segment

    def mark_cold(self, slot: int) -> None:
        """The slot's rows have accumulators of another optimizer, which nobody is to take: they read as 0."""
        self._cold.add(slot)

    def is_cold(self, slot: int) -> bool:
        return slot in self._cold

    def clear(self, slot: int) -> None:
        """The slot has no rows."""
        self._files.pop(slot, None)
        self._cold.discard(slot)
        self._bases[:, slot] = self._maps[slot] = self._states[slot] = self._sizes[slot] = self._bits[slot] = 0

    # Reading: locations uint32[n], each of a slot with rows. SegmentCorrupt if a block under them is damaged.

    def addresses(self, locations: np.ndarray) -> np.ndarray:
        """int64[n]: address of the first byte of each encoded row."""
        self._check(locations, Part.ROWS)
        out = np.empty(locations.shape[0], np.int64)
        kernels.addresses_of(locations, self._bases[Part.ROWS], self._item_bytes[Part.ROWS], out)
        return out

    def bits_of(self, locations: np.ndarray) -> np.ndarray:
        """uint8[n]: bits a value of each row."""
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_by_slot(locations, self._bits, out)
        return out

    def place(self, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """addresses and bits_of, of rows that are read next."""
        self.page_in_if_cold(locations, (Part.ROWS,))
        return self.addresses(locations), self.bits_of(locations)

    def gather(self, locations: np.ndarray, out: np.ndarray, positions: np.ndarray, mode: int) -> None:
        """out[positions[i]] = row i in the wire dtype `mode` (kernels/wire.py): rows of all formats in one call."""
        frozen.gather_frozen(*self.place(locations), self._dim, out, positions, mode)

    def read(self, locations: np.ndarray) -> np.ndarray:
        """float32[n, D]."""
        out = np.empty((locations.shape[0], self._dim), np.float32)
        self.gather(locations, out, np.arange(locations.shape[0], dtype=np.int32), FLOAT32)
        return out

    def read_all(self, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows float32[n, D], accumulators uint8[n] and visits uint8[n]: what a thaw needs."""
        self.page_in_if_cold(locations, READ_PARTS)
        return self.read(locations), self.accumulators_of(locations), self.visits_of(locations)

    def accumulators_of(self, locations: np.ndarray) -> np.ndarray:
        """uint8[n]: encoded accumulators."""
        out = self._bytes_of(locations, Part.ACCUMULATORS)
        if self._cold:
            slots = (locations >> np.uint32(SLOT_SHIFT)) & np.uint32(MAX_SLOTS - 1)
            out[np.isin(slots, list(self._cold))] = 0
        return out

    def visits_of(self, locations: np.ndarray) -> np.ndarray:
        """uint8[n]: visits when each row froze, up to 255."""
        return self._bytes_of(locations, Part.VISITS)

    def _bytes_of(self, locations: np.ndarray, part: Part) -> np.ndarray:
        self._check(locations, part)
        out = np.empty(locations.shape[0], np.uint8)
        kernels.gather_bytes(locations, self._bases[part], out)
        return out

    def row_ids_of(self, locations: np.ndarray) -> np.ndarray:
        """int64[n]."""
        self._check(locations, Part.ROW_IDS)
        out = np.empty(locations.shape[0], np.int64)
        kernels.gather_row_ids(locations, self._bases[Part.ROW_IDS], out)
        return out

    def encoded_rows(self, locations: np.ndarray, row_bytes: int) -> np.ndarray:
        """uint8[n, row_bytes] of rows that all have that many bytes."""
        self._check(locations, Part.ROWS)
        out = np.empty((locations.shape[0], row_bytes), np.uint8)
        kernels.gather_rows(locations, self._bases[Part.ROWS], out)
        return out

    # Checks and pages -----------------------------------------------------------------------------------------------

    def find_pages(self, locations: np.ndarray, part: Part, around: int) -> PageReads:
        """What to read from files for these rows, `around` bytes of the file (a power of two) about each."""
        if not self._files:
            return PageReads()
        reads, pages = np.empty((2 * locations.shape[0], 2), np.int64), np.empty((locations.shape[0], 2), np.int64)
        where = *self._items(part), self._maps, self._states, self._sizes
        num_reads, num_pages = paging.find_pages(locations, *where, around, reads, pages)
        return PageReads(reads[:num_reads], pages[:num_pages])

    def find_unchecked(self, locations: np.ndarray) -> list[BlockCheck]:
        """The blocks that a thaw of these rows would have to check."""
        if not self._files:
            return []
        found = [self._unchecked(locations, part, marks=False) for part in READ_PARTS]
        return [self._files[slot].check_later(blocks) for slot, blocks in _by_slot(np.concatenate(found))]

    def _unchecked(self, locations: np.ndarray, part: Part, *, marks: bool) -> np.ndarray:
        """int64[n, 2], (slot, block), as paging.unchecked_blocks."""
        blocks = np.empty((2 * locations.shape[0], 2), np.int64)
        n = paging.unchecked_blocks(locations, *self._items(part), self._maps, self._states, marks, blocks)
        return blocks[:n]

    def page_in_if_cold(self, locations: np.ndarray, parts: Sequence[Part]) -> None:
        if not self._files or locations.shape[0] < _LEAST_BATCH:
            return
        for part in parts:
            if paging.any_absent(locations, *self._items(part), self._maps, SAMPLES):
                self.find_pages(locations, part, PAGE_BYTES).start()

    def _items(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        return self._bases[part], self._item_bytes[part]

    def _check(self, locations: np.ndarray, part: Part) -> None:
        """Compares every block under these items that nobody has read yet with its CRC-32. Then looks at the end of
        every file, 0.1 us each: one that was cut off since must give no rows."""
        if not self._files:
            return
        blocks = self._unchecked(locations, part, marks=True)
        if blocks.shape[0]:
            self._check_blocks(blocks)
        for segment in self._files.values():
            segment.check_end()

    def _check_blocks(self, blocks: np.ndarray) -> None:
        """int64[n, 2], (slot, block)."""
        paging.page_in_blocks(blocks, blocks.shape[0], self._maps, self._sizes)
        by_slot = _by_slot(blocks)
        for slot, numbers in by_slot:
            self._files[slot].block_states[numbers] = UNCHECKED
        for slot, numbers in by_slot:
            self._files[slot].check_blocks(numbers)


def _by_slot(blocks: np.ndarray) -> list[tuple[int, list[int]]]:
    """int64[n, 2], (slot, block), in any order -> of each slot its blocks, each once."""
    slots, numbers = np.divmod(np.unique(blocks[:, 0] << 32 | blocks[:, 1]), 1 << 32)
    found, starts = np.unique(slots, return_index=True)
    parts = np.split(numbers, starts[1:]) if found.shape[0] else []
    return [(slot, part.tolist()) for slot, part in zip(found.tolist(), parts, strict=True)]
