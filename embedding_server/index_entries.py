"""The entries of an index in memory (index.py), and the kernels that read and change them.

A bucket is one buffer: `capacity` packed entries, then as many tag bytes. Linear probing. A tag of 0 is an empty
position; else its low 7 bits are some of the row's hash, so that few entries are read in vain, and the bit HOT says
what FROZEN_BIT of the location denies: who looks for hot rows reads a byte a position, not the entry. An entry address
is that of the entry's first byte; 0: there is none. Kernels take, for all buckets, the addresses of the buffers, their
capacities and the number of entries, int64[B] each.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, carray, float32, float64, int32, int64, njit, types, uint16, uint32, void

from embedding_server.heat import CODES_PER_BIN, bump
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.locations import FROZEN

FROZEN_BIT = np.uint32(FROZEN)
ENTRY_BYTES = 14
HOT = np.uint8(128)
_TAG_BITS = np.uint8(127)
_HOT_AT_ONCE = 32  # positions that a scan for hot rows looks at together: 0.1 ns each where there is none
_AHEAD = 12  # IDs between asking for a bucket's lines and probing them: 8 to 16 were alike, 4 and 32 slower

ENTRY = np.dtype(
    {"names": ["row_id", "location", "heat"], "formats": ["<i8", "<u4", "<u2"], "offsets": [0, 8, 12], "itemsize": 14}
)
_ONE = np.uint64(1)
_I64, _I64_IN, _U32, _U32_IN = array(int64), view(int64), array(uint32), view(uint32)


@njit(inline="always")
def entries_at(address, capacity):
    """The entries of the bucket whose buffer starts at `address`; with capacity 1, the entry at an entry address."""
    return carray(pointer(address), capacity, ENTRY)


@njit(inline="always")
def tags_at(address, capacity):
    return carray(pointer(address + ENTRY_BYTES * capacity), capacity, np.uint8)


@njit(inline="always")
def tag_of(h):
    return np.uint8(max(_ONE, (h >> np.uint64(12)) & np.uint64(_TAG_BITS)))


@njit(inline="always")
def hot_bit(location):
    """HOT, or 0 where the location is a frozen one."""
    return np.uint8((~location & FROZEN_BIT) >> np.uint32(24))


@njit(inline="always")
def home_of(h, capacity):
    """Where a row of hash h would lie if nobody were in the way: the high 32 bits, scaled to the capacity."""
    return np.int64(((h >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def ask_for(addresses, capacities, row_id, num_buckets):
    """Asks for the cache lines that a probe for row_id reads first; three quarters of a probe is waiting for them."""
    h = hash_row_id(row_id)
    b = bucket_of(h, num_buckets)
    capacity = capacities[b]
    home = home_of(h, capacity)
    prefetch(addresses[b] + ENTRY_BYTES * capacity + home)
    prefetch(addresses[b] + ENTRY_BYTES * home)


@njit(inline="always")
def probe(address, capacity, h, row_id):
    """(position, found): where row_id is, or the empty position where it belongs. capacity > 0 and not full."""
    entries = entries_at(address, capacity)
    tags = tags_at(address, capacity)
    tag = tag_of(h)
    position = home_of(h, capacity)
    while tags[position] != 0:
        if tags[position] & _TAG_BITS == tag and entries[position].row_id == row_id:
            return position, True
        position += 1
        if position == capacity:
            position = 0
    return position, False


@kernel(types.UniTuple(int64, 2)(_I64, _I64, _I64_IN, _I64, _U32))
def locate(addresses, capacities, row_ids, out_entries, out_locations):
    missing = 0
    frozen = 0
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        if i + _AHEAD < row_ids.shape[0]:
            ask_for(addresses, capacities, row_ids[i + _AHEAD], num_buckets)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, num_buckets)
        found = False
        if capacities[b] > 0:
            position, found = probe(addresses[b], capacities[b], h, row_ids[i])
            if found:
                location = entries_at(addresses[b], capacities[b])[position].location
                out_entries[i] = addresses[b] + ENTRY_BYTES * position
                out_locations[i] = location
                if location & FROZEN_BIT:
                    frozen += 1
        if not found:
            out_entries[i] = 0
            out_locations[i] = 0
            missing += 1
    return missing, frozen


@kernel(int64(_I64, _I64, _I64, _I64_IN, _U32_IN, _I64, _U32))
def insert(addresses, capacities, counts, row_ids, locations, out_entries, out_locations):
    """Inserts what is absent, taking locations in order; a repeated row_id gets its first one. Returns how many."""
    used = 0
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, num_buckets)
        position, found = probe(addresses[b], capacities[b], h, row_ids[i])
        entries = entries_at(addresses[b], capacities[b])
        if not found:
            entries[position].row_id = row_ids[i]
            entries[position].location = locations[used]
            entries[position].heat = 0
            tags_at(addresses[b], capacities[b])[position] = tag_of(h) | hot_bit(locations[used])
            counts[b] += 1
            used += 1
        out_entries[i] = addresses[b] + ENTRY_BYTES * position
        out_locations[i] = entries[position].location
    return used


@kernel(void(int64, int64, int64, int64))
def rehash(old_address, old_capacity, new_address, new_capacity):
    old = entries_at(old_address, old_capacity)
    old_tags = tags_at(old_address, old_capacity)
    new = entries_at(new_address, new_capacity)
    new_tags = tags_at(new_address, new_capacity)
    for i in range(old_capacity):
        if old_tags[i] != 0:
            h = hash_row_id(old[i].row_id)
            position, _ = probe(new_address, new_capacity, h, old[i].row_id)
            new[position].row_id = old[i].row_id
            new[position].location = old[i].location
            new[position].heat = old[i].heat
            new_tags[position] = old_tags[i]


@kernel(void(_I64, _I64, _I64, _I64_IN, _I64_IN, array(boolean)))
def untag(addresses, capacities, counts, row_ids, entry_addresses, out_touched):
    """Takes the tags of entries away and marks their buckets, whose probes find nothing until they are built anew."""
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        b = bucket_of(hash_row_id(row_ids[i]), num_buckets)
        position = (entry_addresses[i] - addresses[b]) // ENTRY_BYTES
        tags_at(addresses[b], capacities[b])[position] = 0
        counts[b] -= 1
        out_touched[b] = True


@kernel(void(_I64, _I64, _I64_IN))
def rebuild_in_place(addresses, capacities, buckets):
    """Inserts the tagged entries of these buckets again, each into its own buffer."""
    largest = np.int64(1)
    for k in range(buckets.shape[0]):
        largest = max(largest, capacities[buckets[k]])
    row_ids, locations = np.empty(largest, np.int64), np.empty(largest, np.uint32)
    heat = np.empty(largest, np.uint16)
    for k in range(buckets.shape[0]):
        address, capacity = addresses[buckets[k]], capacities[buckets[k]]
        entries, tags = entries_at(address, capacity), tags_at(address, capacity)
        n = 0
        for i in range(capacity):
            if tags[i] != 0:
                row_ids[n], locations[n], heat[n] = entries[i].row_id, entries[i].location, entries[i].heat
                tags[i] = 0
                n += 1
        for i in range(n):
            h = hash_row_id(row_ids[i])
            position, _ = probe(address, capacity, h, row_ids[i])
            entries[position].row_id = row_ids[i]
            entries[position].location = locations[i]
            entries[position].heat = heat[i]
            tags[position] = tag_of(h) | hot_bit(locations[i])


@kernel(int64(_I64, _I64, _I64, _I64_IN, array(boolean)))
def take_out(addresses, capacities, counts, row_ids, out_touched):
    """Removes row_ids one by one, marks their buckets and returns how many there were. Nothing of an entry is left.

    Those that stand behind a hole and not where they belong move up, so that probes find them; other entries stay.
    """
    removed = 0
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        if i + _AHEAD < row_ids.shape[0]:
            ask_for(addresses, capacities, row_ids[i + _AHEAD], num_buckets)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, num_buckets)
        capacity = capacities[b]
        if capacity == 0:
            continue
        hole, found = probe(addresses[b], capacity, h, row_ids[i])
        if not found:
            continue
        entries, tags = entries_at(addresses[b], capacity), tags_at(addresses[b], capacity)
        position = hole
        while True:
            position = position + 1 if position + 1 < capacity else 0
            if tags[position] == 0:
                break
            home = home_of(hash_row_id(entries[position].row_id), capacity)
            # it may move up if the hole lies between its home and it, round the end of the buffer
            behind_home = hole - home if hole >= home else hole - home + capacity
            at = position - home if position >= home else position - home + capacity
            if behind_home < at:
                entries[hole].row_id = entries[position].row_id
                entries[hole].location = entries[position].location
                entries[hole].heat = entries[position].heat
                tags[hole] = tags[position]
                hole = position
        tags[hole] = 0
        entries[hole].row_id = 0
        entries[hole].location = 0
        entries[hole].heat = 0
        counts[b] -= 1
        removed += 1
        out_touched[b] = True
    return removed


@njit(inline="always")
def _tag_address(addresses, capacities, entry_address):
    b = bucket_of(hash_row_id(entries_at(entry_address, 1)[0].row_id), np.uint64(addresses.shape[0]))
    return addresses[b] + ENTRY_BYTES * capacities[b] + (entry_address - addresses[b]) // ENTRY_BYTES


@kernel(void(_I64, _I64, _I64_IN, _U32_IN))
def set_locations(addresses, capacities, entry_addresses, locations):
    for i in range(entry_addresses.shape[0]):
        if i + 2 * _AHEAD < entry_addresses.shape[0]:
            prefetch(entry_addresses[i + 2 * _AHEAD])
        if i + _AHEAD < entry_addresses.shape[0]:
            prefetch(_tag_address(addresses, capacities, entry_addresses[i + _AHEAD]))
        entry = entries_at(entry_addresses[i], 1)
        before = entry[0].location
        entry[0].location = locations[i]
        if hot_bit(before) != hot_bit(locations[i]):
            carray(pointer(_tag_address(addresses, capacities, entry_addresses[i])), 1, np.uint8)[0] ^= HOT


@kernel(void(_I64_IN, view(boolean), float64, int64, view(float32)))
def bump_heat(entry_addresses, counted, now, step, log_table):
    for i in range(entry_addresses.shape[0]):
        if counted[i] and entry_addresses[i] != 0:
            entry = entries_at(entry_addresses[i], 1)
            entry[0].heat = bump(entry[0].heat, now, entry[0].row_id, step, log_table)


@kernel(void(_I64_IN, array(uint16)))
def heat_of(entry_addresses, out):
    for i in range(entry_addresses.shape[0]):
        out[i] = entries_at(entry_addresses[i], 1)[0].heat if entry_addresses[i] != 0 else np.uint16(0)


@kernel(void(_I64_IN, view(uint16)))
def set_heat(entry_addresses, heat):
    for i in range(entry_addresses.shape[0]):
        entries_at(entry_addresses[i], 1)[0].heat = heat[i]


@kernel(int64(_I64, _I64, _I64_IN, int64, _I64))
def absent_from(addresses, capacities, row_ids, first, out_row_ids):
    n = 0
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        if i + _AHEAD < row_ids.shape[0]:
            ask_for(addresses, capacities, row_ids[i + _AHEAD], num_buckets)
        h = hash_row_id(row_ids[i])
        b = bucket_of(h, num_buckets)
        if b < first:
            continue
        found = False
        if capacities[b] > 0:
            _, found = probe(addresses[b], capacities[b], h, row_ids[i])
        if not found:
            out_row_ids[n] = row_ids[i]
            n += 1
    return n


@kernel(int64(_I64, _I64, int64, int64, _I64, _I64, _U32, array(uint16)))
def scan(addresses, capacities, first, last, out_row_ids, out_entries, out_locations, out_heat):
    n = 0
    for b in range(first, last):
        entries = entries_at(addresses[b], capacities[b])
        tags = tags_at(addresses[b], capacities[b])
        for i in range(capacities[b]):
            if tags[i] != 0:
                out_row_ids[n] = entries[i].row_id
                out_entries[n] = addresses[b] + ENTRY_BYTES * i
                out_locations[n] = entries[i].location
                out_heat[n] = entries[i].heat
                n += 1
    return n


@njit(inline="always")
def _has_hot(tags, start):
    """A hot row lies at one of the _HOT_AT_ONCE positions from `start` on."""
    found = np.uint8(0)
    for i in range(_HOT_AT_ONCE):  # a constant, so that it becomes a few wide instructions
        found |= tags[start + i]
    return found & HOT != 0


@njit
def _hot_entries(address, capacity, n, out):
    """Writes the addresses of the hot rows' entries to out[n:], in order; where they end."""
    tags = tags_at(address, capacity)
    for start in range(0, capacity, _HOT_AT_ONCE):
        if start + _HOT_AT_ONCE <= capacity and not _has_hot(tags, start):
            continue
        for i in range(start, min(start + _HOT_AT_ONCE, capacity)):
            if tags[i] & HOT:
                out[n] = address + ENTRY_BYTES * i
                n += 1
    return n


@kernel(int64(_I64, _I64, int64, int64, view(int32), int64, int64, _I64, _I64, _U32, array(uint16)))
def scan_hot(
    addresses, capacities, first, last, last_step, until, least_slot, out_row_ids, out_entries, out_locations, out_heat
):
    """Of a tall table one entry in 300 is hot. To read all entries took 2 to 3 ns each, half a second of each
    re-selection of 200 million rows. So the tags of a bucket say which to read, and those are asked for ahead."""
    n = 0
    for b in range(first, last):
        end = _hot_entries(addresses[b], capacities[b], n, out_entries)
        for k in range(n, end):
            if k + _AHEAD < end:
                prefetch(out_entries[k + _AHEAD])
            entry = entries_at(out_entries[k], 1)[0]
            if entry.location >= least_slot and last_step[entry.location] <= until:
                out_row_ids[n] = entry.row_id
                out_entries[n] = out_entries[k]
                out_locations[n] = entry.location
                out_heat[n] = entry.heat
                n += 1
    return n


@kernel(void(_I64, _I64, int64))
def lower_heat(addresses, capacities, by):
    for b in range(addresses.shape[0]):
        entries = entries_at(addresses[b], capacities[b])
        for i in range(capacities[b]):
            if entries[i].heat != 0:
                entries[i].heat = np.uint16(max(np.int64(1), np.int64(entries[i].heat) - by))


@kernel(void(view(uint16), view(boolean), _I64))
def count_bins(heat, counted, out_counts):
    """Adds each counted row to the bin of its heat code."""
    for i in range(heat.shape[0]):
        if counted[i]:
            out_counts[heat[i] // CODES_PER_BIN] += 1


@kernel(_I64(_I64_IN, int64))
def count_buckets(row_ids, num_buckets):
    counts = np.zeros(num_buckets, np.int64)
    for i in range(row_ids.shape[0]):
        counts[bucket_of(hash_row_id(row_ids[i]), np.uint64(num_buckets))] += 1
    return counts
