"""The index of a table: row_id (any int64) -> location and heat. Collisionless, grows without doubling memory.

Layout. Rows are split over NUM_BUCKETS buckets by hash; each bucket is its own open-addressing sub-table (linear
probing, load 0.73 to 0.875 while it grows) in one buffer: `capacity` packed 14-byte entries (row_id int64, location
uint32, heat uint16), then `capacity` tag bytes. Tag 0 means empty, so that every row_id stays usable as a key; one bit
of a tag says whether the row is hot. A bucket grows by 1.2 when it is full, each at its own phase, so that the whole
grows smoothly; one bucket's copy exists at a time. A bucket that loses entries is built anew without them, in a smaller
buffer when it fits one two sizes below.

Arithmetic: 15 bytes / 0.8 mean load = 18.8 bytes a row.

A location is a uint32 (kernels/locations.py): bit 31 clear: hot, the slot; bit 31 set: frozen, where in which segment.
INITIAL is a frozen row that still has its initial value and needs no storage.

Thread safety: none; the thread that owns the shard owns the index.
Invariants: (1) count[b] entries of bucket b have a tag; (2) an entry address stays valid until the next `insert` or
`remove`; (3) a tag says that its row is hot exactly when the location does.
"""

from __future__ import annotations

import math
import mmap

import numpy as np

from embedding_server import index_entries as kernels
from embedding_server.index_entries import ENTRY_BYTES
from embedding_server.index_entries import FROZEN_BIT as FROZEN_BIT
from embedding_server.kernels.locations import NO_SEGMENT
from embedding_server.spec import MAX_STEPS

INITIAL = NO_SEGMENT
BYTES_PER_SLOT = ENTRY_BYTES + 1
HEAT_BYTES = 2
_MAX_LOAD = 0.875
_GROWTH = 1.2
_SHRINK_AT = _GROWTH**-2 + 1e-3  # share of the capacity; between it and 1 a bucket that lost rows keeps its buffer
_OWN_MAP_BYTES = 128 << 10  # buffers from here on are maps of their own: freed at once, no holes in the heap


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

    def directory(self) -> tuple[np.ndarray, np.ndarray]:
        """Bucket addresses and capacities, int64[num_buckets] each, for kernels; read only."""
        return self._addresses, self._capacities

    def directory_addresses(self) -> tuple[int, int]:
        """Addresses of the bucket addresses and of the capacities, int64[num_buckets] each; they never move."""
        return self._addresses.ctypes.data, self._capacities.ctypes.data

    def locate(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
        """int64[n] -> entry addresses int64[n] (0: absent), locations uint32[n], number absent, number frozen."""
        entries = np.empty(row_ids.shape[0], np.int64)
        locations = np.empty(row_ids.shape[0], np.uint32)
        missing, frozen = kernels.locate(self._addresses, self._capacities, row_ids, entries, locations)
        return entries, locations, missing, frozen

    def insert(self, row_ids: np.ndarray, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Inserts absent row_ids with `locations` in order; returns entry addresses, locations and how many were used.

        Invalidates entry addresses obtained earlier.
        """
        self._reserve(row_ids)
        entries = np.empty(row_ids.shape[0], np.int64)
        out = np.empty(row_ids.shape[0], np.uint32)
        used = kernels.insert(self._addresses, self._capacities, self._counts, row_ids, locations, entries, out)
        return entries, out, used

    def reserve(self, rows: int) -> np.ndarray:
        """Room for so many rows of any buckets in an index without entries, so that it does not grow step by step.

        In one buffer for all, which is returned: one for each of 1,024 buckets takes 4 ms.
        """
        capacity = int(rows / self.num_buckets / _MAX_LOAD * _GROWTH) + 1 if rows else 0  # buckets differ
        buffer = _zeros(self.num_buckets * capacity * BYTES_PER_SLOT)
        if rows:
            self._buffers = [buffer] * self.num_buckets
            self._addresses[:] = buffer.ctypes.data + np.arange(self.num_buckets) * capacity * BYTES_PER_SLOT
            self._capacities[:] = capacity
            self._num_slots = self.num_buckets * capacity
        return buffer

    def grow_to(self, rows: int, buckets: np.ndarray) -> None:
        """Room for so many rows in each of buckets int64[b], so that they are not moved as often as rows arrive."""
        for bucket in buckets[self._capacities[buckets] * _MAX_LOAD < rows].tolist():
            self._resize(bucket, rows)

    def clear(self, first_bucket: int, last_bucket: int) -> None:
        """Buckets [first, last) lose all entries and their memory. Invalidates their entry addresses."""
        these = slice(first_bucket, last_bucket)
        self._num_slots -= int(self._capacities[these].sum())
        self._buffers[these] = [None] * (last_bucket - first_bucket)
        self._addresses[these] = self._capacities[these] = self._counts[these] = 0

    def remove(self, row_ids: np.ndarray, entry_addresses: np.ndarray) -> None:
        """Removes entries, each given once, and gives memory back. Invalidates entry addresses obtained earlier."""
        touched = np.zeros(self.num_buckets, np.bool_)
        kernels.untag(self._addresses, self._capacities, self._counts, row_ids, entry_addresses, touched)
        kernels.rebuild_in_place(self._addresses, self._capacities, self._shrink(np.flatnonzero(touched)))

    def take_out(self, row_ids: np.ndarray) -> int:
        """As remove, for few entries of many: it pays for each, where remove goes through all of their buckets.

        Unknown row_ids are left out; returns how many were there. The bytes of what it removes are overwritten.
        """
        touched = np.zeros(self.num_buckets, np.bool_)
        removed = kernels.take_out(self._addresses, self._capacities, self._counts, row_ids, touched)
        self._shrink(np.flatnonzero(touched))
        return removed

    def _shrink(self, buckets: np.ndarray) -> np.ndarray:
        """Gives memory of those back that lost enough entries; returns the others."""
        wanted = np.fromiter((self._capacity_for(b, int(self._counts[b])) for b in buckets.tolist()), np.int64)
        shrinks = wanted <= self._capacities[buckets] * _SHRINK_AT
        for b in buckets[shrinks].tolist():
            self._resize(b, int(self._counts[b]))
        return buckets[~shrinks]

    def set_locations(self, entry_addresses: np.ndarray, locations: np.ndarray) -> None:
        kernels.set_locations(self._addresses, self._capacities, entry_addresses, locations)

    def bump_heat(
        self, entry_addresses: np.ndarray, counted: np.ndarray, now: float, step: int, log_table: np.ndarray
    ) -> None:
        """One visit for each entry with counted[i]; address 0 is skipped."""
        kernels.bump_heat(entry_addresses, counted, now, step, log_table)

    def heat_of(self, entry_addresses: np.ndarray) -> np.ndarray:
        """int64[n] -> heat codes uint16[n], 0 for address 0."""
        out = np.empty(entry_addresses.shape[0], np.uint16)
        kernels.heat_of(entry_addresses, out)
        return out

    def set_heat(self, entry_addresses: np.ndarray, heat: np.ndarray) -> None:
        """heat uint16[n]; no address is 0."""
        kernels.set_heat(entry_addresses, heat)

    def absent_from(self, row_ids: np.ndarray, first_bucket: int) -> np.ndarray:
        """Those of row_ids int64[n] in buckets from first_bucket on that have no entry, in order."""
        out = np.empty(row_ids.shape[0], np.int64)
        return out[: kernels.absent_from(self._addresses, self._capacities, row_ids, first_bucket, out)]

    def lower_heat(self, by: int) -> None:
        kernels.lower_heat(self._addresses, self._capacities, by)

    def count_in(self, first_bucket: int, last_bucket: int) -> int:
        return int(self._counts[first_bucket:last_bucket].sum())

    def scan(self, first_bucket: int, last_bucket: int) -> Entries:
        """All entries of buckets [first, last), in bucket order."""
        n = self.count_in(first_bucket, last_bucket)
        out = Entries(np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint16))
        kernels.scan(
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

    def scan_hot(
        self, first_bucket: int, last_bucket: int, last_step: np.ndarray, *, until: int = MAX_STEPS, least_slot: int = 0
    ) -> Entries:
        """Hot entries of buckets [first, last), in bucket order, in slots from least_slot on whose last_step[slot],
        int32, is at most `until`."""
        room = self.count_in(first_bucket, last_bucket)  # memory is committed for what is found only
        out = (np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint32), np.empty(room, np.uint16))
        where = self._addresses, self._capacities, first_bucket, last_bucket
        n = kernels.scan_hot(*where, last_step, until, least_slot, *out)
        return Entries(*out).take(slice(n))

    def _reserve(self, row_ids: np.ndarray) -> None:
        arriving = kernels.count_buckets(row_ids, self.num_buckets)
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
            kernels.rehash(self._addresses[bucket], old, address, capacity)
        self._buffers[bucket] = buffer
        self._addresses[bucket] = address
        self._capacities[bucket] = capacity


def _next_capacity(phase: float, least: int) -> int:
    """The smallest 4 * 1.2^(k + phase) that holds `least` entries.

    Buckets fill alike, so without a phase of its own each, all 1,024 would grow within a few steps of each other.
    """
    k = max(0, math.ceil(math.log(least / 4) / math.log(_GROWTH) - phase)) if least > 4 else 0
    return max(least, int(4 * _GROWTH ** (k + phase)))


def _zeros(size_bytes: int) -> np.ndarray:
    if size_bytes < _OWN_MAP_BYTES:
        return np.zeros(size_bytes, np.uint8)
    # Private: the mmap module's default is a shared map, whose pages a kernel that reclaims idle memory (DAMON) unmaps
    # even where there is no swap to put them, and a private one's fault is a quarter cheaper.
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
