"""Numba kernels between frozen row locations and the pages of mapped files: blocks to check, pages to read in.

Tables by segment slot, int64[256] each: `bases` the address of item 0, `item_bytes`, `maps` the address where the
slot's file map starts (0: its rows lie in a buffer), `states` the address of its block states, uint8 each
(segment_reader.py). A block is 64 KiB of the file.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from embedding_server.kernels.kernel import array, kernel, pointer, view
from embedding_server.kernels.locations import position_of, slot_of

_I64, _U32, _RANGE = array(types.int64), view(types.uint32), array(types.int64, 2)
_PAGE, _BLOCK_SHIFT = 4096, 16
_WILLNEED, _POPULATE_READ = 3, 22  # MADV_ of Linux; the second from 5.14 on
_PIDFD_OPEN, _PROCESS_MADVISE = 434, 440  # of Linux 5.3 and 5.10, the same on all processors that it calls new
_RANGES = 512  # of one process_madvise; the kernel takes 1,024
_CHECKED, _ASKED_FOR = np.uint8(1), np.uint8(2)  # of segment_reader.py

_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.uintp, types.int32))
_syscall = types.ExternalFunction(
    "syscall", types.intp(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
)
_getpid, _close = (
    types.ExternalFunction("getpid", types.int32()),
    types.ExternalFunction("close", types.int32(types.int32)),
)
_mincore = types.ExternalFunction("mincore", types.int32(types.intp, types.uintp, types.intp))


@njit
def _state(states, slot, block):
    return carray(pointer(states[slot] + block), (1,), np.uint8)


@kernel(types.int64(_U32, _I64, _I64, _I64, _I64, types.boolean, array(types.int64, 2)))
def unchecked_blocks(locations, bases, item_bytes, maps, states, marks, out):
    """out int64[2n, 2] = (slot, block) of each block under these items that is not CHECKED. Returns how many.

    marks: they become CHECKED here, so that each is told once; the caller checks them, and undoes the state of what
    fails. Else one may be told for each of its items.
    """
    n = 0
    for i in range(locations.shape[0]):
        slot = slot_of(locations[i])
        if maps[slot] == 0:
            continue
        start = bases[slot] + position_of(locations[i]) * item_bytes[slot] - maps[slot]
        for block in range(start >> _BLOCK_SHIFT, ((start + item_bytes[slot] - 1) >> _BLOCK_SHIFT) + 1):
            state = _state(states, slot, block)
            if state[0] != _CHECKED:
                if marks:
                    state[0] = _CHECKED
                out[n, 0] = slot
                out[n, 1] = block
                n += 1
    return n


@njit
def put_range(ranges, n, start, end):
    """ranges int64[., 2] of (address, bytes): adds the pages of the bytes from start to end to the first n. New n."""
    first = start // _PAGE * _PAGE
    ranges[n, 0] = first
    ranges[n, 1] = (end + _PAGE - 1) // _PAGE * _PAGE - first
    return n + 1


@njit
def _advise(process, ranges, advice):
    """One process_madvise for _RANGES ranges int64[n, 2] each; madvise for each of those that it does not take.

    process: a pidfd of this process, or what pidfd_open said instead. MADV_WILLNEED this way costs 0.3 us for a page
    that is in memory already and 9 us for one that is not; madvise for each of them 0.6 us, and mincore, which only
    tells whether a page is there, 1.0 (Linux 6.18). An old Linux or a container forbids it, or takes MADV_POPULATE_READ
    by madvise only (5.14), or not at all; a map that is gone ends a call too. All of that costs time and nothing else.
    """
    for start in range(0, ranges.shape[0], _RANGES):
        part = ranges[start : start + _RANGES]
        wanted = np.int64(0)
        for i in range(part.shape[0]):
            wanted += part[i, 1]
        if process < 0 or _syscall(_PROCESS_MADVISE, process, part.ctypes.data, part.shape[0], advice, 0) != wanted:
            for i in range(part.shape[0]):
                _madvise(part[i, 0], part[i, 1], advice)


@njit
def _advise_here(ranges, advice):
    process = _syscall(_PIDFD_OPEN, _getpid(), 0, 0, 0, 0)
    _advise(process, ranges, advice)
    if process >= 0:
        _close(process)


@kernel(types.void(_RANGE))
def will_need(ranges):
    """Asks the kernel to read the pages of these ranges int64[n, 2] (address, bytes) in; it queues the reads and does
    not wait for them. Of a range that is not mapped any more nothing comes."""
    _advise_here(ranges, _WILLNEED)


@kernel(types.void(_RANGE))
def map_in(ranges):
    """Waits until the pages of these ranges int64[n, 2] are in memory, and maps them: no page fault is left."""
    _advise_here(ranges, _POPULATE_READ)


@njit
def is_in_memory(address, answer):
    """answer: uint8[1] to write to. What cannot be told counts as in memory: its page fault tells."""
    return _mincore(address // _PAGE * _PAGE, 1, answer.ctypes.data) != 0 or (answer[0] & 1) != 0


@kernel(types.UniTuple(types.int64, 2)(_U32, _I64, _I64, _I64, _I64, _I64, types.int64, _RANGE, _RANGE))
def find_pages(locations, bases, item_bytes, maps, states, sizes, around, out_reads, out_pages):
    """out_reads int64[2n, 2] = ranges (address, bytes) to read in for these items: the pieces of `around` bytes of the
    file that they lie in, and a whole block where it is unchecked, since its check will read it all: that one becomes
    ASKED_FOR. out_pages int64[n, 2] = the pages that they lie on.

    sizes: bytes of each slot's map. Returns how many of each.
    """
    reads, pages = 0, 0
    read_from, read_to, page_from, page_to = np.int64(0), np.int64(0), np.int64(0), np.int64(0)  # the last ones
    for i in range(locations.shape[0]):
        slot = slot_of(locations[i])
        if maps[slot] == 0:
            continue
        start = bases[slot] + position_of(locations[i]) * item_bytes[slot] - maps[slot]
        last_byte = start + item_bytes[slot] - 1
        all_checked = True
        for block in range(start >> _BLOCK_SHIFT, (last_byte >> _BLOCK_SHIFT) + 1):
            state = _state(states, slot, block)
            if state[0] != _CHECKED:
                all_checked = False
                if state[0] != _ASKED_FOR:
                    state[0] = _ASKED_FOR
                    end = min(sizes[slot], (block + 1) << _BLOCK_SHIFT)
                    reads = put_range(out_reads, reads, maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)
        first, end = maps[slot] + start, maps[slot] + last_byte + 1
        if all_checked and (first < read_from or end > read_to):
            read_from = maps[slot] + start // around * around
            read_to = maps[slot] + min(sizes[slot], (last_byte // around + 1) * around)
            reads = put_range(out_reads, reads, read_from, read_to)
        if first < page_from or end > page_to:
            pages = put_range(out_pages, pages, first, end)
            page_from = out_pages[pages - 1, 0]
            page_to = page_from + out_pages[pages - 1, 1]
    return reads, pages


@kernel(types.void(view(types.int64, 2), types.int64, _I64, _I64))
def page_in_blocks(blocks, n, maps, sizes):
    """Asks for the pages of the first n of blocks int64[., 2] (slot, block)."""
    ranges = np.empty((n, 2), np.int64)
    for i in range(n):
        slot, block = blocks[i, 0], blocks[i, 1]
        end = min(sizes[slot], (block + 1) << _BLOCK_SHIFT)
        put_range(ranges, i, maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)
    _advise(-1, ranges, _WILLNEED)


@kernel(types.boolean(_U32, _I64, _I64, _I64, types.int64))
def any_absent(locations, bases, item_bytes, maps, samples):
    """True if the first page of one of `samples` items, evenly spread over the locations, is not in memory."""
    answer = np.zeros(1, np.uint8)
    step = max(1, locations.shape[0] // samples)
    for i in range(0, locations.shape[0], step):
        slot = slot_of(locations[i])
        if maps[slot] == 0:
            continue
        if not is_in_memory(bases[slot] + position_of(locations[i]) * item_bytes[slot], answer):
            return True
    return False
