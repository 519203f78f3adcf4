"""The index of a table: row_id (any int64) -> location and heat. Collisionless, grows without doubling memory.

Layout. Rows are split over NUM_BUCKETS buckets by hash; each bucket is its own open-addressing sub-table (linear
probing, load 0.73 to 0.875 while it grows) in one buffer: `capacity` packed 14-byte entries (row_id int64, location
uint32, heat uint16), then `capacity` tag bytes. Tag 0 means empty, so that every row_id stays usable as a key. A bucket
grows by 1.2 when it is full, each at its own phase, so that the whole grows smoothly; one bucket's copy exists at a
time. A bucket that loses entries is built anew without them, in a smaller buffer when it fits one two sizes below.

Arithmetic: 15 bytes / 0.8 mean load = 18.8 bytes a row.

A location is a uint32 (kernels/locations.py): bit 31 clear: hot, the slot; bit 31 set: frozen, where in which segment.
INITIAL is a frozen row that still has its initial value and needs no storage.

Thread safety: none; the thread that owns the shard owns the index.
Invariants: (1) count[b] entries of bucket b have a tag; (2) an entry address stays valid until the next `insert` or
`remove`.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
from numba import boolean, carray, float32, float64, int32, int64, njit, types, uint16, uint32, void

from embedding_server.heat import CODES_PER_BIN, bump
from embedding_server.kernels.hashing import bucket_of, hash_row_id
from embedding_server.kernels.kernel import array, kernel, pointer, prefetch, view
from embedding_server.kernels.locations import FROZEN, NO_SEGMENT

FROZEN_BIT = np.uint32(FROZEN)
INITIAL = NO_SEGMENT
ENTRY_BYTES = 14
BYTES_PER_SLOT = ENTRY_BYTES + 1
HEAT_BYTES = 2
_AHEAD = 12  # IDs between asking for a bucket's lines and probing them: 8 to 16 were alike, 4 and 32 slower
_MAX_LOAD = 0.875
_GROWTH = 1.2
_SHRINK_AT = _GROWTH**-2 + 1e-3  # share of the capacity; between it and 1 a bucket that lost rows keeps its buffer
_OWN_MAP_BYTES = 128 << 10  # buffers from here on are maps of their own: freed at once, no holes in the heap

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
def _tags_at(address, capacity):
    return carray(pointer(address + ENTRY_BYTES * capacity), capacity, np.uint8)


@njit(inline="always")
def _tag(h):
    return np.uint8(max(_ONE, (h >> np.uint64(12)) & np.uint64(255)))


@njit(inline="always")
def _home(h, capacity):
    """Where a row of hash h would lie if nobody were in the way: the high 32 bits, scaled to the capacity."""
    return np.int64(((h >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def ask_for(addresses, capacities, row_id, num_buckets):
    """Asks for the cache lines that a probe for row_id reads first; three quarters of a probe is waiting for them."""
    h = hash_row_id(row_id)
    b = bucket_of(h, num_buckets)
    capacity = capacities[b]
    home = _home(h, capacity)
    prefetch(addresses[b] + ENTRY_BYTES * capacity + home)
    prefetch(addresses[b] + ENTRY_BYTES * home)


@njit(inline="always")
def probe(address, capacity, h, row_id):
    """(position, found): where row_id is, or the empty position where it belongs. capacity > 0 and not full."""
    entries = entries_at(address, capacity)
    tags = _tags_at(address, capacity)
    tag = _tag(h)
    position = _home(h, capacity)
    while tags[position] != 0:
        if tags[position] == tag and entries[position].row_id == row_id:
            return position, True
        position += 1
        if position == capacity:
            position = 0
    return position, False


@kernel(types.UniTuple(int64, 2)(_I64, _I64, _I64_IN, _I64, _U32))
def _locate(addresses, capacities, row_ids, out_entries, out_locations):
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
def _insert(addresses, capacities, counts, row_ids, locations, out_entries, out_locations):
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
            _tags_at(addresses[b], capacities[b])[position] = _tag(h)
            counts[b] += 1
            used += 1
        out_entries[i] = addresses[b] + ENTRY_BYTES * position
        out_locations[i] = entries[position].location
    return used


@kernel(void(int64, int64, int64, int64))
def _rehash(old_address, old_capacity, new_address, new_capacity):
    old = entries_at(old_address, old_capacity)
    old_tags = _tags_at(old_address, old_capacity)
    new = entries_at(new_address, new_capacity)
    new_tags = _tags_at(new_address, new_capacity)
    for i in range(old_capacity):
        if old_tags[i] != 0:
            h = hash_row_id(old[i].row_id)
            position, _ = probe(new_address, new_capacity, h, old[i].row_id)
            new[position].row_id = old[i].row_id
            new[position].location = old[i].location
            new[position].heat = old[i].heat
            new_tags[position] = old_tags[i]


@kernel(void(_I64, _I64, _I64, _I64_IN, _I64_IN, array(boolean)))
def _untag(addresses, capacities, counts, row_ids, entry_addresses, out_touched):
    """Takes the tags of entries away and marks their buckets, whose probes find nothing until they are built anew."""
    num_buckets = np.uint64(addresses.shape[0])
    for i in range(row_ids.shape[0]):
        b = bucket_of(hash_row_id(row_ids[i]), num_buckets)
        position = (entry_addresses[i] - addresses[b]) // ENTRY_BYTES
        _tags_at(addresses[b], capacities[b])[position] = 0
        counts[b] -= 1
        out_touched[b] = True


@kernel(void(_I64, _I64, _I64_IN))
def _rebuild_in_place(addresses, capacities, buckets):
    """Inserts the tagged entries of these buckets again, each into its own buffer."""
    largest = np.int64(1)
    for k in range(buckets.shape[0]):
        largest = max(largest, capacities[buckets[k]])
    row_ids, locations = np.empty(largest, np.int64), np.empty(largest, np.uint32)
    heat = np.empty(largest, np.uint16)
    for k in range(buckets.shape[0]):
        address, capacity = addresses[buckets[k]], capacities[buckets[k]]
        entries, tags = entries_at(address, capacity), _tags_at(address, capacity)
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
            tags[position] = _tag(h)


@kernel(void(_I64_IN, _U32_IN))
def _set_locations(entry_addresses, locations):
    for i in range(entry_addresses.shape[0]):
        entries_at(entry_addresses[i], 1)[0].location = locations[i]


@kernel(void(_I64_IN, view(boolean), float64, int64, view(float32)))
def _bump_heat(entry_addresses, counted, now, step, log_table):
    for i in range(entry_addresses.shape[0]):
        if counted[i] and entry_addresses[i] != 0:
            entry = entries_at(entry_addresses[i], 1)
            entry[0].heat = bump(entry[0].heat, now, entry[0].row_id, step, log_table)


@kernel(void(_I64_IN, array(uint16)))
def _heat_of(entry_addresses, out):
    for i in range(entry_addresses.shape[0]):
        out[i] = entries_at(entry_addresses[i], 1)[0].heat if entry_addresses[i] != 0 else np.uint16(0)


@kernel(void(_I64_IN, view(uint16)))
def _set_heat(entry_addresses, heat):
    for i in range(entry_addresses.shape[0]):
        entries_at(entry_addresses[i], 1)[0].heat = heat[i]


@kernel(int64(_I64, _I64, _I64_IN, int64, _I64))
def _absent_from(addresses, capacities, row_ids, first, out_row_ids):
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
def _scan(addresses, capacities, first, last, out_row_ids, out_entries, out_locations, out_heat):
    n = 0
    for b in range(first, last):
        entries = entries_at(addresses[b], capacities[b])
        tags = _tags_at(addresses[b], capacities[b])
        for i in range(capacities[b]):
            if tags[i] != 0:
                out_row_ids[n] = entries[i].row_id
                out_entries[n] = addresses[b] + ENTRY_BYTES * i
                out_locations[n] = entries[i].location
                out_heat[n] = entries[i].heat
                n += 1
    return n


@kernel(int64(_I64, _I64, int64, int64, view(int32), int64, _I64, _I64, _U32, array(uint16)))
def _scan_unvisited(
    addresses, capacities, first, last, last_step, until, out_row_ids, out_entries, out_locations, out_heat
):
    n = 0
    for b in range(first, last):
        entries = entries_at(addresses[b], capacities[b])
        tags = _tags_at(addresses[b], capacities[b])
        for i in range(capacities[b]):
            if tags[i] != 0:
                location = entries[i].location
                if not location & FROZEN_BIT and last_step[location] <= until:
                    out_row_ids[n] = entries[i].row_id
                    out_entries[n] = addresses[b] + ENTRY_BYTES * i
                    out_locations[n] = location
                    out_heat[n] = entries[i].heat
                    n += 1
    return n


@kernel(int64(_I64, _I64, int64, int64, int64, _I64, _U32))
def _scan_hot_from(addresses, capacities, first, last, least_slot, out_entries, out_locations):
    n = 0
    for b in range(first, last):
        entries = entries_at(addresses[b], capacities[b])
        tags = _tags_at(addresses[b], capacities[b])
        for i in range(capacities[b]):
            if tags[i] != 0:
                location = entries[i].location
                if not location & FROZEN_BIT and location >= least_slot:
                    out_entries[n] = addresses[b] + ENTRY_BYTES * i
                    out_locations[n] = location
                    n += 1
    return n


@kernel(void(_I64, _I64, int64))
def _lower_heat(addresses, capacities, by):
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


class Entries:
    """Index entries in bucket order: row_ids int64[n], addresses int64[n], locations uint32[n], heat uint16[n]."""

    __slots__ = ("addresses", "heat", "locations", "row_ids")

    def __init__(self, row_ids: np.ndarray, addresses: np.ndarray, locations: np.ndarray, heat: np.ndarray) -> None:
        self.row_ids = row_ids
        self.addresses = addresses
        self.locations = locations
        self.heat = heat

    def take(self, at: np.ndarray | slice) -> Entries:
        """Those at positions, where a mask is true, or in a slice (views then)."""
        return Entries(self.row_ids[at], self.addresses[at], self.locations[at], self.heat[at])


class Index:
    """See the module's text. All arrays are one-dimensional and contiguous."""

    def __init__(self, num_buckets: int) -> None:
        if num_buckets & (num_buckets - 1):
            raise AssertionError("num_buckets must be a power of two")
        self.num_buckets = num_buckets
        self._addresses = np.zeros(num_buckets, np.int64)
        self._capacities = np.zeros(num_buckets, np.int64)
        self._counts = np.zeros(num_buckets, np.int64)
        self._buffers: list[np.ndarray | None] = [None] * num_buckets
        self._num_slots = 0  # sum of the capacities

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """Entries of each bucket, int64[num_buckets]; read only."""
        return self._counts

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries, heat and tags included."""
        return self.num_slots * BYTES_PER_SLOT

    def directory_addresses(self) -> tuple[int, int]:
        """Addresses of the bucket addresses and of the capacities, int64[num_buckets] each; they never move."""
        return self._addresses.ctypes.data, self._capacities.ctypes.data

    def locate(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
        """int64[n] -> entry addresses int64[n] (0: absent), locations uint32[n], number absent, number frozen."""
        entries = np.empty(row_ids.shape[0], np.int64)
        locations = np.empty(row_ids.shape[0], np.uint32)
        missing, frozen = _locate(self._addresses, self._capacities, row_ids, entries, locations)
        return entries, locations, missing, frozen

    def insert(self, row_ids: np.ndarray, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Inserts absent row_ids with `locations` in order; returns entry addresses, locations and how many were used.

        Invalidates entry addresses obtained earlier.
        """
        self._reserve(row_ids)
        entries = np.empty(row_ids.shape[0], np.int64)
        out = np.empty(row_ids.shape[0], np.uint32)
        used = _insert(self._addresses, self._capacities, self._counts, row_ids, locations, entries, out)
        return entries, out, used

    def reserve(self, rows: int) -> None:
        """Room for so many rows of any buckets in an index without entries, so that it does not grow step by step."""
        for bucket in range(self.num_buckets if rows else 0):
            self._resize(bucket, -(-rows // self.num_buckets))

    def remove(self, row_ids: np.ndarray, entry_addresses: np.ndarray) -> None:
        """Removes entries, each given once, and gives memory back. Invalidates entry addresses obtained earlier."""
        touched = np.zeros(self.num_buckets, np.bool_)
        _untag(self._addresses, self._capacities, self._counts, row_ids, entry_addresses, touched)
        buckets = np.flatnonzero(touched)
        wanted = np.fromiter((self._capacity_for(b, int(self._counts[b])) for b in buckets.tolist()), np.int64)
        shrinks = wanted <= self._capacities[buckets] * _SHRINK_AT
        _rebuild_in_place(self._addresses, self._capacities, buckets[~shrinks])
        for b in buckets[shrinks].tolist():
            self._resize(b, int(self._counts[b]))

    def set_locations(self, entry_addresses: np.ndarray, locations: np.ndarray) -> None:
        _set_locations(entry_addresses, locations)

    def bump_heat(
        self, entry_addresses: np.ndarray, counted: np.ndarray, now: float, step: int, log_table: np.ndarray
    ) -> None:
        """One visit for each entry with counted[i]; address 0 is skipped."""
        _bump_heat(entry_addresses, counted, now, step, log_table)

    def heat_of(self, entry_addresses: np.ndarray) -> np.ndarray:
        """int64[n] -> heat codes uint16[n], 0 for address 0."""
        out = np.empty(entry_addresses.shape[0], np.uint16)
        _heat_of(entry_addresses, out)
        return out

    def set_heat(self, entry_addresses: np.ndarray, heat: np.ndarray) -> None:
        """heat uint16[n]; no address is 0."""
        _set_heat(entry_addresses, heat)

    def absent_from(self, row_ids: np.ndarray, first_bucket: int) -> np.ndarray:
        """Those of row_ids int64[n] in buckets from first_bucket on that have no entry, in order."""
        out = np.empty(row_ids.shape[0], np.int64)
        return out[: _absent_from(self._addresses, self._capacities, row_ids, first_bucket, out)]

    def lower_heat(self, by: int) -> None:
        _lower_heat(self._addresses, self._capacities, by)

    def count_in(self, first_bucket: int, last_bucket: int) -> int:
        return int(self._counts[first_bucket:last_bucket].sum())

    def scan(self, first_bucket: int, last_bucket: int) -> Entries:
        """All entries of buckets [first, last), in bucket order."""
        n = self.count_in(first_bucket, last_bucket)
        out = Entries(np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint16))
        _scan(
            self._addresses,
            self._capacities,
            first_bucket,
            last_bucket,
            out.row_ids,
            out.addresses,
            out.locations,
            out.heat,
        )
        return out

    def scan_unvisited(self, first_bucket: int, last_bucket: int, last_step: np.ndarray, until: int) -> Entries:
        """Hot entries of buckets [first, last) whose last_step[slot], int32, is at most `until`, in bucket order."""
        room = self.count_in(first_bucket, last_bucket)
        out = (np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint32), np.empty(room, np.uint16))
        n = _scan_unvisited(self._addresses, self._capacities, first_bucket, last_bucket, last_step, until, *out)
        return Entries(*out).take(slice(n))

    def scan_hot_from(self, first_bucket: int, last_bucket: int, least_slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Addresses int64[n] and slots int32[n] of hot entries of buckets [first, last) in least_slot or above."""
        room = self.count_in(first_bucket, last_bucket)  # memory is committed for what is found only
        entries, locations = np.empty(room, np.int64), np.empty(room, np.uint32)
        n = _scan_hot_from(self._addresses, self._capacities, first_bucket, last_bucket, least_slot, entries, locations)
        return entries[:n], locations[:n].view(np.int32)

    def _reserve(self, row_ids: np.ndarray) -> None:
        arriving = _count_buckets(row_ids, self.num_buckets)
        for b in np.flatnonzero(self._counts + arriving > self._capacities * _MAX_LOAD):
            self._resize(int(b), int(self._counts[b] + arriving[b]))

    def _capacity_for(self, bucket: int, rows: int) -> int:
        return _next_capacity(bucket / self.num_buckets, int(rows / _MAX_LOAD) + 1) if rows else 0

    def _resize(self, bucket: int, rows: int) -> None:
        """Moves what the bucket holds into a new buffer for `rows` entries."""
        old, capacity = int(self._capacities[bucket]), self._capacity_for(bucket, rows)
        self._num_slots += capacity - old
        if not capacity:
            self._buffers[bucket] = None
            self._addresses[bucket] = self._capacities[bucket] = 0
            return
        buffer = _zeros(capacity * BYTES_PER_SLOT)
        address = buffer.ctypes.data
        if old:
            _rehash(self._addresses[bucket], old, address, capacity)
        self._buffers[bucket] = buffer
        self._addresses[bucket] = address
        self._capacities[bucket] = capacity


@kernel(_I64(_I64_IN, int64))
def _count_buckets(row_ids, num_buckets):
    counts = np.zeros(num_buckets, np.int64)
    for i in range(row_ids.shape[0]):
        counts[bucket_of(hash_row_id(row_ids[i]), np.uint64(num_buckets))] += 1
    return counts


def _next_capacity(phase: float, least: int) -> int:
    """The smallest 4 * 1.2^(k + phase) that holds `least` entries.

    Buckets fill alike, so without a phase of its own each, all 1,024 would grow within a few steps of each other.
    """
    k = max(0, math.ceil(math.log(least / 4) / math.log(_GROWTH) - phase)) if least > 4 else 0
    return max(least, int(4 * _GROWTH ** (k + phase)))


def _zeros(size_bytes: int) -> np.ndarray:
    if size_bytes < _OWN_MAP_BYTES:
        return np.zeros(size_bytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
