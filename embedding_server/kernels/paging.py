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
_CHECKED, _ASKED_FOR = np.uint8(1), np.uint8(2)  # of segment_reader.py

_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.uintp, types.int32))
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
def _will_need(start, end):
    """Asks the kernel to read these bytes in; it queues the reads and does not wait for them."""
    first = start // _PAGE * _PAGE
    _madvise(first, end - first, _WILLNEED)


@njit
def _is_in_memory(address, answer):
    """answer: uint8[1] to write to. What cannot be told counts as in memory: its page fault tells."""
    return _mincore(address // _PAGE * _PAGE, 1, answer.ctypes.data) != 0 or (answer[0] & 1) != 0


@kernel(types.void(_U32, _I64, _I64, _I64, _I64, _I64))
def page_in(locations, bases, item_bytes, maps, states, sizes):
    """Asks for the pages of these items; for the whole block where it is unchecked, since its check will read it all.

    sizes: bytes of each slot's map. Of an item in a checked block the kernel is asked first whether its first page is
    there: 0.3 us, where advice takes 1 to 4 us for nothing.
    """
    answer = np.zeros(1, np.uint8)
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
                    _will_need(maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)
        if all_checked and not _is_in_memory(maps[slot] + start, answer):
            _will_need(maps[slot] + start, maps[slot] + last_byte + 1)


@kernel(types.void(view(types.int64, 2), types.int64, _I64, _I64))
def page_in_blocks(blocks, n, maps, sizes):
    """Asks for the pages of the first n of blocks int64[., 2] (slot, block)."""
    for i in range(n):
        slot, block = blocks[i, 0], blocks[i, 1]
        end = min(sizes[slot], (block + 1) << _BLOCK_SHIFT)
        _will_need(maps[slot] + (block << _BLOCK_SHIFT), maps[slot] + end)


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
