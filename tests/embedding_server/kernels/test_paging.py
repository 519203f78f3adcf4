"""Blocks and pages under frozen rows, and locations, against plain Python."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.kernels import locations as kernels
from embedding_server.kernels import paging
from embedding_server.kernels.locations import FROZEN, MAX_SLOTS, SLOT_SHIFT
from embedding_server.segment_reader import ASKED_FOR, CHECKED, UNCHECKED

BLOCK, PAGE = 1 << 16, 4096


class Slots:
    """Tables of three slots: 0 in a buffer, 1 and 2 in maps of 4 and 3 blocks, whose items begin within a page."""

    def __init__(self) -> None:
        self.memory = [mmap.mmap(-1, blocks * BLOCK) for blocks in (4, 4, 3)]
        self.starts = [np.frombuffer(memory, np.uint8).ctypes.data for memory in self.memory]
        self.bases, self.item_bytes, self.maps, self.states, self.sizes = np.zeros((5, MAX_SLOTS), np.int64)
        self.blocks = {slot: np.zeros(4, np.uint8) for slot in (1, 2)}
        for slot, (offset, item_bytes) in enumerate(((0, 8), (104, 68), (40, 500))):
            self.bases[slot] = self.starts[slot] + offset
            self.item_bytes[slot] = item_bytes
        for slot, blocks in self.blocks.items():
            self.maps[slot], self.states[slot] = self.starts[slot], blocks.ctypes.data
            self.sizes[slot] = len(self.memory[slot])

    def blocks_of(self, slot: int, position: int) -> range:
        if slot == 0:
            return range(0)
        start = int(self.bases[slot] - self.maps[slot]) + position * int(self.item_bytes[slot])
        return range(start // BLOCK, (start + int(self.item_bytes[slot]) - 1) // BLOCK + 1)


LAST = {0: 30_000, 1: (4 * BLOCK - 104) // 68 - 1, 2: (3 * BLOCK - 40) // 500 - 1}
places = st.sampled_from(sorted(LAST)).flatmap(lambda slot: st.tuples(st.just(slot), st.integers(0, LAST[slot])))


def locations_of(chosen: list[tuple[int, int]]) -> np.ndarray:
    return np.array([FROZEN | slot << SLOT_SHIFT | position for slot, position in chosen], np.uint32)


@given(
    st.lists(places, max_size=40),
    st.lists(st.sampled_from([UNCHECKED, CHECKED, ASKED_FOR]), min_size=8, max_size=8),
    st.booleans(),
)
def test_unchecked_blocks_are_those_under_the_items_each_once_if_they_are_marked(chosen, states, marks) -> None:
    slots = Slots()
    slots.blocks[1][:], slots.blocks[2][:] = states[:4], states[4:]
    before = {slot: blocks.copy() for slot, blocks in slots.blocks.items()}
    under = {(slot, block) for slot, position in chosen for block in slots.blocks_of(slot, position)}
    expected = {(slot, block) for slot, block in under if before[slot][block] != CHECKED}
    out = np.empty((2 * len(chosen), 2), np.int64)
    tables = slots.bases, slots.item_bytes, slots.maps, slots.states
    n = paging.unchecked_blocks(locations_of(chosen), *tables, marks, out)
    assert set(map(tuple, out[:n].tolist())) == expected
    assert not marks or n == len(expected)
    for slot, blocks in slots.blocks.items():
        wanted = [CHECKED if marks and (slot, b) in under else before[slot][b] for b in range(4)]
        assert blocks.tolist() == wanted


def found(slots: Slots, locations: np.ndarray, around: int) -> list[set[int]]:
    """Pages of all reads and of all rows, by number."""
    reads, pages = np.empty((2 * locations.size, 2), np.int64), np.empty((locations.size, 2), np.int64)
    tables = slots.bases, slots.item_bytes, slots.maps, slots.states, slots.sizes
    num_reads, num_pages = paging.find_pages(locations, *tables, around, reads, pages)
    sets = [
        {page for start, size in ranges.tolist() for page in range(start // PAGE, (start + size) // PAGE)}
        for ranges in (reads[:num_reads], pages[:num_pages])
    ]
    assert (reads[:num_reads] % PAGE == 0).all()
    assert (pages[:num_pages] % PAGE == 0).all()
    return sets


@given(
    st.lists(places, max_size=40),
    st.lists(st.sampled_from([UNCHECKED, CHECKED, ASKED_FOR]), min_size=8, max_size=8),
    st.sampled_from([PAGE, 4 * PAGE, BLOCK]),
)
def test_pages_found_are_those_of_the_items_what_is_around_them_and_blocks_to_check(chosen, states, around) -> None:
    slots = Slots()
    slots.blocks[1][:], slots.blocks[2][:] = states[:4], states[4:]
    before = {slot: blocks.copy() for slot, blocks in slots.blocks.items()}
    reads, pages = set(), set()
    for slot, position in chosen:
        blocks = slots.blocks_of(slot, position)
        if not blocks:
            continue
        first = int(slots.bases[slot]) + position * int(slots.item_bytes[slot])
        last = first + int(slots.item_bytes[slot]) - 1
        pages |= set(range(first // PAGE, last // PAGE + 1))
        start = int(slots.maps[slot])
        if all(before[slot][block] == CHECKED for block in blocks):
            pieces = range((first - start) // around, (last - start) // around + 1)
            reads |= {start // PAGE + piece * around // PAGE + k for piece in pieces for k in range(around // PAGE)}
            continue
        for block in blocks:
            if before[slot][block] == UNCHECKED:
                reads |= {start // PAGE + block * 16 + k for k in range(16)}
    assert found(slots, locations_of(chosen), around) == [reads, pages]
    asked = {(slot, block) for slot, position in chosen for block in slots.blocks_of(slot, position)}
    for slot, blocks in slots.blocks.items():
        was = before[slot]
        wanted = [ASKED_FOR if (slot, b) in asked and was[b] == UNCHECKED else was[b] for b in range(4)]
        assert blocks.tolist() == wanted


@pytest.mark.parametrize("has_process_madvise", [True, False])
def test_pages_come_in_from_a_file(has_process_madvise, tmp_path: Path) -> None:
    """With process_madvise, and where a kernel or container refuses it."""
    path, pages = tmp_path / "file", 1500  # more ranges than one call takes
    path.write_bytes(os.urandom(pages * 4096))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    memory.madvise(mmap.MADV_RANDOM)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    bases, item_bytes, maps, states, sizes = np.zeros((5, MAX_SLOTS), np.int64)
    blocks = np.full(-(-pages * 4096 // BLOCK), CHECKED, np.uint8)
    bases[0], item_bytes[0], maps[0], states[0], sizes[0] = start, 4096, start, blocks.ctypes.data, pages * 4096
    locations = locations_of([(0, position) for position in range(pages)])
    if not paging.any_absent(locations, bases, item_bytes, maps, pages):
        pytest.skip("this file system keeps every page in memory")
    ranges = np.array([(start + 4096 * page, 4096) for page in range(pages)], np.int64)
    if has_process_madvise:
        paging.will_need(ranges)
    else:
        paging._advise(-1, ranges, 3)
    end_s = time.monotonic() + 10
    while paging.any_absent(locations, bases, item_bytes, maps, pages) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not paging.any_absent(locations, bases, item_bytes, maps, pages)
    os.close(fd)


def test_absent_pages_are_seen_in_a_sample() -> None:
    slots = Slots()
    tables = slots.bases, slots.item_bytes, slots.maps
    everywhere = locations_of([(1, position) for position in range(0, LAST[1], 7)])
    assert paging.any_absent(everywhere, *tables, 32)  # nothing was written to this map yet
    np.frombuffer(slots.memory[1], np.uint8)[:] = 1
    assert not paging.any_absent(everywhere, *tables, 32)
    assert not paging.any_absent(locations_of([(0, 5)]), *tables, 32)  # a buffer is in memory
    assert not paging.any_absent(everywhere[:0], *tables, 32)


@given(st.lists(places, max_size=20))
def test_locations_lead_to_their_items(chosen) -> None:
    slots = Slots()
    locations = locations_of(chosen)
    addresses = np.empty(len(chosen), np.int64)
    kernels.addresses_of(locations, slots.bases, slots.item_bytes, addresses)
    assert addresses.tolist() == [int(slots.bases[s] + p * slots.item_bytes[s]) for s, p in chosen]
    marks = np.zeros(MAX_SLOTS, np.uint8)
    marks[:3] = 4, 8, 16
    found = np.empty(len(chosen), np.uint8)
    kernels.gather_by_slot(locations, marks, found)
    assert found.tolist() == [int(marks[slot]) for slot, _ in chosen]
