"""Kernels of a served snapshot: an index of row_ids to places in its files, and what look-ups find through it.

An entry is a tag and a place, ENTRY_BYTES; tag 0 is an empty position. The row_id itself is compared where it lies in
the file. Bucket b of a table has the entries from starts[b] to starts[b + 1], int64[B + 1], with linear probing; at
least one of them is empty, or there are none.

A place is the number of a slot within the part that owns the bucket, times MAX_PLACES, plus a position. A slot is an
array of rows in a file (or in memory) with the row_ids beside it: SLOT_COLUMNS int64 each. first_slots int64[B]: the
number of the first slot of the part that owns each bucket.

numba's cache knows the time stamp of this file only: after a change to index_entries.py or paging.py, touch this file
too.
"""

from __future__ import annotations

import numpy as np
from numba import carray, int64, njit, uint8, void

from embedding_server.index_entries import home_of
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.paging import is_in_memory, put_range
from embedding_server.store import NUM_BUCKETS

PLACE_SHIFT = 23
MAX_PLACES = 1 << PLACE_SHIFT  # of a slot; an array of more rows takes several slots, one behind the other
MAX_SLOTS = 512  # of a part
#: of a slot: addresses of row_id 0 and of row 0; bytes of a row; address of int64[B + 1], how many places row_ids of a
#: bucket have more than rows before it, or 0; address where blocks count from, or 0 if none is to be checked; address
#: of their states; address of the last CRC of the file, or 0, and its value; bits of a value, 0: at no address; flags
IDS, ROWS, ROW_BYTES, SHIFTS, BLOCKS, STATES, END, LAST_CRC, BITS, FLAGS, SLOT_COLUMNS = range(11)
#: of a table: addresses of its entries, starts, first_slots and slots; how many slots
ENTRIES, STARTS, FIRST_SLOTS, SLOTS, NUM_SLOTS, TABLE_COLUMNS = range(6)
#: what find_rows counts, by table: rows at no address; row_ids without a row; 1 + a slot of a file that was cut off
NUM_INITIAL, NUM_ABSENT, CUT_OFF, COUNTS = range(4)
#: what insert_rows says: all is well, or the row_id at a position is not in its bucket, or is there already
SOUND, MISPLACED, REPEATED = range(3)

ENTRY_BYTES = 5
_ENTRY = np.dtype({"names": ["tag", "place"], "formats": ["u1", "<u4"], "offsets": [0, 1], "itemsize": ENTRY_BYTES})
_BUCKETS = np.uint64(NUM_BUCKETS)
_ONE = np.uint64(1)
_CHECKED = np.uint8(1)  # of segment_reader.py
_BLOCK_SHIFT = 16
_AHEAD, _IDS_AHEAD = 16, 8
_I64, _I64_IN = array(int64), view(int64)
_SLOTS = array(int64, 2)


@njit(inline="always")
def _tag_of(h):
    return np.uint8(max(_ONE, (h >> np.uint64(12)) & np.uint64(255)))


@njit(inline="always")
def _entries_at(address, capacity):
    return carray(pointer(address), capacity, _ENTRY)


@njit(inline="always")
def _int64_at(address):
    return carray(pointer(address), (1,), np.int64)[0]


@njit(inline="always")
def _row_id_at(slots, first_slot, place):
    slot = first_slot + (place >> PLACE_SHIFT)
    return _int64_at(slots[slot, IDS] + 8 * (place & (MAX_PLACES - 1)))


@njit
def _probe(entries, capacity, h, row_id, slots, first_slot):
    """(position, place): of row_id, or the empty position where it belongs and -1."""
    tag = _tag_of(h)
    position = home_of(h, capacity)
    while entries[position].tag != 0:
        if entries[position].tag == tag:
            place = np.int64(entries[position].place)
            if _row_id_at(slots, first_slot, place) == row_id:
                return position, place
        position += 1
        if position == capacity:
            position = 0
    return position, np.int64(-1)


# Building -----------------------------------------------------------------------------------------------------------


@kernel(void(view(uint8), _I64_IN, _I64))
def count_live(live, offsets, counts):
    """counts int64[B] += live rows of each bucket; bucket b has the positions from offsets[b] to offsets[b + 1]."""
    for b in range(counts.size):
        n = 0
        for p in range(offsets[b], offsets[b + 1]):
            if live[p] != 0:
                n += 1
        counts[b] += n


@kernel(int64(int64, _I64_IN, _I64_IN, _SLOTS, int64, int64, _I64_IN, view(uint8), _I64))
def insert_rows(entries_address, starts, first_slots, slots, first_place, ids_address, offsets, live, out_error):
    """Enters the live row_ids int64[n] at ids_address, position p with the place first_place + p, in order of bucket.

    Returns SOUND, or what is wrong, and out_error[0] = the position.
    """
    for b in range(offsets.size - 1):
        capacity = starts[b + 1] - starts[b]
        entries = _entries_at(entries_address + ENTRY_BYTES * starts[b], capacity)
        for p in range(offsets[b], offsets[b + 1]):
            if live[p] == 0:
                continue
            row_id = _int64_at(ids_address + 8 * p)
            h = hash_row_id(row_id)
            out_error[0] = p
            if bucket_of(h, _BUCKETS) != b:
                return MISPLACED
            position, place = _probe(entries, capacity, h, row_id, slots, first_slots[b])
            if place >= 0:
                return REPEATED
            entries[position].tag = _tag_of(h)
            entries[position].place = np.uint32(first_place + p)
    return SOUND


@kernel(int64(int64, _I64_IN, _I64_IN, _SLOTS, int64, _I64_IN, _I64, _I64))
def insert_anywhere(entries_address, starts, first_slots, slots, first_place, row_ids, out_error, out_buckets):
    """As insert_rows, of row_ids in any order. out_buckets int64[B]: how many of each bucket; with entries_address 0
    they are counted alone."""
    for p in range(row_ids.size):
        h = hash_row_id(row_ids[p])
        b = bucket_of(h, _BUCKETS)
        out_buckets[b] += 1
        if entries_address == 0:
            continue
        capacity = starts[b + 1] - starts[b]
        entries = _entries_at(entries_address + ENTRY_BYTES * starts[b], capacity)
        position, place = _probe(entries, capacity, h, row_ids[p], slots, first_slots[b])
        out_error[0] = p
        if place >= 0:
            return REPEATED
        entries[position].tag = _tag_of(h)
        entries[position].place = np.uint32(first_place + p)
    return SOUND


@kernel(int64(int64, _I64_IN, _I64_IN, _SLOTS, view(int64, 2), int64, int64, int64, int64, _I64))
def follow_parent(entries_address, starts, first_slots, slots, offsets, num_rows, first_place, parent_first, ids, out):
    """Leads rows that a delta has not written to its parent.

    offsets int64[4, B + 1]: of the delta, where the rows of each bucket begin and where its written rows do; then of
    the parent. Rows of the delta have the places from first_place on, num_rows of them; those of the parent, whose
    row_ids lie at `ids`, will have the places from parent_first on. Returns SOUND or MISPLACED; out int64[3]: the
    position of what is wrong; rows that were led on; how many of them the parent has not written either.
    """
    out[:] = 0
    for b in range(NUM_BUCKETS):
        capacity = starts[b + 1] - starts[b]
        written = offsets[1, b + 1] - offsets[1, b]
        if capacity == 0 or offsets[0, b + 1] - offsets[0, b] == written:
            continue
        entries = _entries_at(entries_address + ENTRY_BYTES * starts[b], capacity)
        its_written = offsets[3, b + 1] - offsets[3, b]
        for p in range(offsets[2, b], offsets[2, b + 1]):
            row_id = _int64_at(ids + 8 * p)
            h = hash_row_id(row_id)
            if bucket_of(h, _BUCKETS) != b:
                out[0] = p
                return MISPLACED
            position, place = _probe(entries, capacity, h, row_id, slots, first_slots[b])
            at = place - first_place
            if place < 0 or at < 0 or at >= num_rows or at - offsets[0, b] < written:
                continue
            entries[position].place = np.uint32(parent_first + p)
            out[1] += 1
            out[2] += np.int64(p - offsets[2, b] >= its_written)
    return SOUND


# Finding ------------------------------------------------------------------------------------------------------------


@njit(inline="always")
def _ask_for_entry(entries_address, starts, row_id):
    h = hash_row_id(row_id)
    b = bucket_of(h, _BUCKETS)
    capacity = starts[b + 1] - starts[b]
    prefetch(entries_address + ENTRY_BYTES * (starts[b] + home_of(h, capacity)))


@njit
def _ask_for_row_id(entries_address, starts, first_slots, slots, row_id):
    """Asks for the row_id of the first entry with its tag, which is nearly always its own."""
    h = hash_row_id(row_id)
    b = bucket_of(h, _BUCKETS)
    capacity = starts[b + 1] - starts[b]
    if capacity == 0:
        return
    entries = _entries_at(entries_address + ENTRY_BYTES * starts[b], capacity)
    tag = _tag_of(h)
    position = home_of(h, capacity)
    while entries[position].tag != 0:
        if entries[position].tag == tag:
            place = np.int64(entries[position].place)
            slot = first_slots[b] + (place >> PLACE_SHIFT)
            prefetch(slots[slot, IDS] + 8 * (place & (MAX_PLACES - 1)))
            return
        position += 1
        if position == capacity:
            position = 0


@njit
def _first_cut_off(slots):
    """1 + the slot of the first file whose last CRC is not what it was; 0: none."""
    for slot in range(slots.shape[0]):
        end = slots[slot, END]
        if end != 0 and np.int64(carray(pointer(end), (1,), np.uint32)[0]) != slots[slot, LAST_CRC]:
            return slot + 1
    return 0


@njit
def _find(entries_address, starts, first_slots, slots, row_id):
    """(slot, position in it, bucket) of a row_id; slot -1: there is none."""
    h = hash_row_id(row_id)
    b = bucket_of(h, _BUCKETS)
    capacity = starts[b + 1] - starts[b]
    if capacity == 0:
        return np.int64(-1), np.int64(0), b
    entries = _entries_at(entries_address + ENTRY_BYTES * starts[b], capacity)
    _, place = _probe(entries, capacity, h, row_id, slots, first_slots[b])
    if place < 0:
        return np.int64(-1), np.int64(0), b
    return first_slots[b] + (place >> PLACE_SHIFT), place & (MAX_PLACES - 1), b


@njit
def _note_unchecked(of_slot, address, k, slot, out_blocks, n):
    """Adds the blocks under a row that are not CHECKED to the first n; the new n."""
    start = address - of_slot[BLOCKS]
    for block in range(start >> _BLOCK_SHIFT, ((start + of_slot[ROW_BYTES] - 1) >> _BLOCK_SHIFT) + 1):
        is_checked = carray(pointer(of_slot[STATES] + block), (1,), np.uint8)[0] == _CHECKED
        is_last = n > 0 and out_blocks[n - 1, 0] == k and out_blocks[n - 1, 1] == slot and out_blocks[n - 1, 2] == block
        if not is_checked and not is_last:
            out_blocks[n, 0], out_blocks[n, 1], out_blocks[n, 2] = k, slot, block
            n += 1
    return n


@kernel(
    int64(
        view(int64, 2), _I64_IN, _I64_IN, _I64_IN, array(int64), array(uint8), array(uint8), array(int64, 2),
        array(int64, 2),
    )
)  # fmt: skip
def find_rows(directory, tables, id_addresses, starts, out_addresses, out_bits, out_flags, out_blocks, out_counts):
    """The rows of K tables: directory int64[T, TABLE_COLUMNS], tables int64[K] their numbers in it, the row_ids of each
    at id_addresses[k], int64[n] and perhaps not aligned, row i of table k at starts[k] + i of the outputs.

    Address 0, bits 0 of rows at no address and of row_ids without a row, whose flags are 0. out_blocks int64[2N, 3]:
    (k, slot, block) of blocks under the rows that are not CHECKED, some of them repeated. Returns how many.
    """
    n = 0
    for k in range(tables.size):
        table = directory[tables[k]]
        entries_address = table[ENTRIES]
        bucket_starts = carray(pointer(table[STARTS]), NUM_BUCKETS + 1, np.int64)
        first_slots = carray(pointer(table[FIRST_SLOTS]), NUM_BUCKETS, np.int64)
        slots = carray(pointer(table[SLOTS]), (table[NUM_SLOTS], SLOT_COLUMNS), np.int64)
        row_ids = carray(pointer(id_addresses[k]), starts[k + 1] - starts[k], np.int64)
        counts = out_counts[k]
        counts[:] = 0
        counts[CUT_OFF] = _first_cut_off(slots)
        for i in range(row_ids.size):
            if i + _AHEAD < row_ids.size:
                _ask_for_entry(entries_address, bucket_starts, row_ids[i + _AHEAD])
            if i + _IDS_AHEAD < row_ids.size:
                _ask_for_row_id(entries_address, bucket_starts, first_slots, slots, row_ids[i + _IDS_AHEAD])
            at = starts[k] + i
            out_addresses[at], out_bits[at], out_flags[at] = 0, np.uint8(0), np.uint8(0)
            slot, position, b = _find(entries_address, bucket_starts, first_slots, slots, row_ids[i])
            if slot < 0:
                counts[NUM_ABSENT] += 1
                continue
            of_slot = slots[slot]
            out_flags[at] = np.uint8(of_slot[FLAGS])
            if of_slot[BITS] == 0:
                counts[NUM_INITIAL] += 1
                continue
            if of_slot[SHIFTS] != 0:
                position -= _int64_at(of_slot[SHIFTS] + 8 * b)
            address = of_slot[ROWS] + of_slot[ROW_BYTES] * position
            out_addresses[at], out_bits[at] = address, np.uint8(of_slot[BITS])
            if of_slot[BLOCKS] != 0:
                n = _note_unchecked(of_slot, address, k, slot, out_blocks, n)
    return n


@kernel(int64(_I64_IN, int64))
def any_absent(addresses, samples):
    """Whether the first page of one of `samples` rows, evenly spread, is not in memory. Address 0: no row."""
    answer = np.zeros(1, np.uint8)
    step = max(1, addresses.size // samples)
    for i in range(0, addresses.size, step):
        if addresses[i] != 0 and not is_in_memory(addresses[i], answer):
            return 1
    return 0


@kernel(int64(_I64_IN, view(uint8), view(int64), _I64_IN, array(int64, 2)))
def pages_of(addresses, bits, dims, starts, out_ranges):
    """out_ranges int64[N, 2] = (address, bytes) of the pages of rows of K tables. Returns how many."""
    n = 0
    for k in range(dims.size):
        for i in range(starts[k], starts[k + 1]):
            if addresses[i] != 0:
                size = dims[k] * np.int64(bits[i]) // 8 + 8
                n = put_range(out_ranges, n, addresses[i], addresses[i] + size)
    return n
