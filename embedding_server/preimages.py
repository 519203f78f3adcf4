"""PreImages: what rows of a table were at a cut, for those that changed before the cut had written them.

An index of its own says what a row_id was: hot (its columns are kept here, by log slot), frozen (the segment location,
which does not change while a cut is written), or not there. Its heat field is the row's heat. So a bucket of the cut is
the entries of the table's index that have none here, and the entries here.

Thread safety: none; it belongs to the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server.index import FROZEN_BIT, Entries, Index
from embedding_server.reserved import ReservedArray
from embedding_server.slots import Slots

if TYPE_CHECKING:
    from embedding_server.table import Table

ABSENT = np.uint32(0x7FFFFFFF)  # the location of a row_id that was no row; no log slot is that high
_SHARE, _LEAST_BYTES = 0.1, 1 << 20  # of the table's hot bytes
_ENTRY_BYTES = 22  # of index for one more row, at the lowest load


class PreImages:
    def __init__(self, table: Table) -> None:
        self._table = table
        self.row_bytes = table.hot_row_bytes + 1  # of its stamp
        self.limit_bytes = max(_LEAST_BYTES, int(_SHARE * table.slots.high_water * table.hot_row_bytes))
        most = self.limit_bytes // (self.row_bytes + _ENTRY_BYTES) + 1
        self._index = Index(table.index.num_buckets)
        self._index.reserve(min(most, table.slots.high_water))  # or each of its buckets would grow at each Pull
        self._slots = Slots(most)
        dtype = np.float32 if table.spec.policy.hot_bits == 32 else np.float16
        self._parts = (
            ReservedArray(most, table.spec.dim, dtype),
            ReservedArray(most, table.hot.num_state_columns, np.float32),
            ReservedArray(most, 1, np.int32),
            ReservedArray(most, 1, np.uint8),
            ReservedArray(most, 1, np.uint8),
        )

    @property
    def size_bytes(self) -> int:
        return self._slots.high_water * self.row_bytes + self._index.size_bytes

    def __len__(self) -> int:
        return len(self._index)

    def absent_from(self, row_ids: np.ndarray, first_bucket: int) -> np.ndarray:
        """Those of row_ids int64[n] in buckets from first_bucket on that have no pre-image."""
        return self._index.absent_from(row_ids, first_bucket)

    def has_room(self, locations: np.ndarray, is_absent: np.ndarray) -> bool:
        """For pre-images of rows at these locations of the table, uint32[n]."""
        num_hot = int(np.count_nonzero(~is_absent & ((locations & FROZEN_BIT) == 0)))
        taken = self._slots.num_taken + num_hot
        entries = max(self._index.size_bytes, (len(self._index) + locations.shape[0]) * _ENTRY_BYTES)
        return taken * self.row_bytes + entries <= self.limit_bytes

    def add(self, row_ids: np.ndarray, locations: np.ndarray, is_absent: np.ndarray, heat: np.ndarray) -> None:
        """Distinct row_ids int64[n] without a pre-image; uint32[n], bool[n], uint16[n]: what the table's index says."""
        kept = np.where(is_absent, ABSENT, locations)
        hot = np.flatnonzero(~is_absent & ((locations & FROZEN_BIT) == 0))
        if hot.shape[0]:
            kept[hot] = self._keep(locations[hot].astype(np.int32)).astype(np.uint32)
        entries, _, _ = self._index.insert(row_ids, kept)
        self._index.set_heat(entries, heat)

    def _keep(self, table_slots: np.ndarray) -> np.ndarray:
        """Log slots int32[n] that hold the rows of these slots of the table now."""
        table, n = self._table, table_slots.shape[0]
        freed = self._slots.take_free(n)
        slots = np.concatenate([freed, self._slots.grow(n - freed.shape[0])])
        # new ones lie in a row, and a slice is copied several times as fast as single rows
        at = slots if freed.shape[0] else slice(int(slots[0]), int(slots[0]) + n)
        weights, state, last_steps, visits, stamps = self._parts
        weights.array[at], state.array[at] = table.hot.read_stored(table_slots)
        last_steps.array[at], visits.array[at] = table.last_step.array[table_slots], table.visits.array[table_slots]
        stamps.array[at, 0] = table.changes.stamps_of(table_slots)
        return slots

    def locate(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Entries int64[n], 0 without a pre-image, and log slots, uint32[n], of hot ones."""
        return self._index.locate(row_ids)[:2]

    def heat_of(self, entries: np.ndarray) -> np.ndarray:
        return self._index.heat_of(entries)

    def rows_at(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weights [n, D] as they are stored, state float32[n, C]) of log slots int32[n], copies."""
        return self._parts[0].array[slots], self._parts[1].array[slots]

    def visits_at(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(last_steps int32[n], visits uint8[n]) of log slots int32[n]."""
        return self._parts[2].array[slots, 0], self._parts[3].array[slots, 0]

    def stamps_at(self, slots: np.ndarray) -> np.ndarray:
        """uint8[n] of log slots int32[n], as Changes.stamps_of."""
        return self._parts[4].array[slots, 0]

    def scan(self, first_bucket: int, last_bucket: int) -> Entries:
        return self._index.scan(first_bucket, last_bucket)

    def drop(self, first_bucket: int, last_bucket: int) -> None:
        """Buckets [first, last) are written."""
        entries = self._index.scan(first_bucket, last_bucket)
        if not entries.row_ids.shape[0]:
            return
        kept = (entries.locations != ABSENT) & ((entries.locations & FROZEN_BIT) == 0)
        self._slots.give_back(entries.locations[kept].astype(np.int32))
        self._index.remove(entries.row_ids, entries.addresses)

    def close(self) -> None:
        for part in self._parts:
            part.close()
