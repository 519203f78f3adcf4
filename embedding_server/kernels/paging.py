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

_I64, _U32 = array(types.int64), view(types.uint32)
_PAGE, _BLOCK_SHIFT = 4096, 16
_WILLNEED = 3  # MADV_WILLNEED of Linux
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


@kernel(types.int64(_U32, _I64, _I64, _I64, _I64, array(types.int64, 2)))
def unchecked_blocks(locations, bases, item_bytes, maps, states, out):
    """out int64[2n, 2] = (slot, block) of each block under these items that is not CHECKED, which it becomes here.

    Returns how many; the caller checks them, and undoes the state of what fails.
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
                state[0] = _CHECKED
                out[n, 0] = slot
                out[n, 1] = block
                n += 1
    return n


@njit
def _put(ranges, n, start, end):
    """ranges int64[., 2] of (address, bytes): adds the pages of the bytes from start to end to the first n. New n."""
    first = start // _PAGE * _PAGE
    ranges[n, 0] = first
    ranges[n, 1] = (end + _PAGE - 1) // _PAGE * _PAGE - first
    return n + 1


@njit
def _will_need(process, ranges, n):
    """Asks the kernel to read the first n ranges in; it queues the reads and does not wait for them.

    process: a pidfd of this process, or what pidfd_open said instead. One process_madvise for all costs 0.27 us for a
    page that is in memory already and 10 us for one that is not; madvise for each of them 0.6 us, and mincore, which
    only tells whether a page is there, 1.0 (Linux 6.18). Where the first is not to be had (an old Linux, a container
    that forbids it), madvise.
    """
    wanted = np.int64(0)
    for i in range(n):
        wanted += ranges[i, 1]
    if process >= 0 and _syscall(_PROCESS_MADVISE, process, ranges.ctypes.data, n, _WILLNEED, 0) == wanted:
        return
    for i in range(n):
        _madvise(ranges[i, 0], ranges[i, 1], _WILLNEED)


@njit
def _is_in_memory(address, answer):
    """answer: uint8[1] to write to. What cannot be told counts as in memory: its page fault tells."""
    return _mincore(address // _PAGE * _PAGE, 1, answer.ctypes.data) != 0 or (answer[0] & 1) != 0


@kernel(types.void(_U32, _I64, _I64, _I64, _I64, _I64))
def page_in(locations, bases, item_bytes, maps, states, sizes):
    """Asks for the pages of these items; for the whole block where it is unchecked, since its check will read it all.

    sizes: bytes of each slot's map. Not again for a page that the item before lay in, too.
    """
    ranges = np.empty((_RANGES, 2), np.int64)
    process = _syscall(_PIDFD_OPEN, _getpid(), 0, 0, 0, 0)
    n, last_page = 0, np.int64(-1)
    for i in range(locations.shape[0]):
        slot = slot_of(locations[i])
        if maps[slot] == 0:
            continue
        if n > _RANGES - 3:  # an item lies in two blocks at most, and beside them asks for its pages
            _will_need(process, ranges, n)
            n = 0
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
                    n = _put(ranges, n, maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)
        page = (maps[slot] + last_byte) // _PAGE
        if all_checked and page != last_page:
            n = _put(ranges, n, maps[slot] + start, maps[slot] + last_byte + 1)
            last_page = page
    _will_need(process, ranges, n)
    if process >= 0:
        _close(process)


@kernel(types.void(view(types.int64, 2), types.int64, _I64, _I64))
def page_in_blocks(blocks, n, maps, sizes):
    """Asks for the pages of the first n of blocks int64[., 2] (slot, block)."""
    ranges = np.empty((n, 2), np.int64)
    for i in range(n):
        slot, block = blocks[i, 0], blocks[i, 1]
        end = min(sizes[slot], (block + 1) << _BLOCK_SHIFT)
        _put(ranges, i, maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)
    _will_need(-1, ranges, n)


@kernel(types.boolean(_U32, _I64, _I64, _I64, types.int64))
def any_absent(locations, bases, item_bytes, maps, samples):
    """True if the first page of one of `samples` items, evenly spread over the locations, is not in memory."""
    answer = np.zeros(1, np.uint8)
    step = max(1, locations.shape[0] // samples)
    for i in range(0, locations.shape[0], step):
        slot = slot_of(locations[i])
        if maps[slot] == 0:
            continue
        if not _is_in_memory(bases[slot] + position_of(locations[i]) * item_bytes[slot], answer):
            return True
    return False
