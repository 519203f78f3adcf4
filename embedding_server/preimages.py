"""PreImages: what rows of a table were at a cut, for those that changed before the cut had written them.

An index of its own says what a row_id was: hot (its columns are kept here, by log slot), frozen (the segment location,
which does not change while a cut is written), or not there. Its heat field is the row's heat. So a bucket of the cut is
the entries of the table's index that have none here, and the entries here.

Thread safety: none; it belongs to the table.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.index import FROZEN_BIT, Entries, Index
from embedding_server.kernels.cut_rows import ABSENT, columns_of, copy_rows, survey
from embedding_server.reserved import ReservedArray, populate
from embedding_server.slots import Slots

if TYPE_CHECKING:
    from embedding_server.table import Table

_SHARE, _LEAST_BYTES = 0.08, 1 << 20  # of the table's hot bytes; what waits for the disk is the rest of a tenth
#: A Pull may need some MiB of the log at once, and new memory costs 0.5 ms a MiB in pages of 4 KiB (in huge ones 0.05
#: to 2 ms, at one stroke): so another thread has it taken ahead.
_AHEAD_BYTES, _NEVER_HUGE = 8 << 20, 1 << 62
_ENTRY_BYTES = 22  # of index for one more row, at the lowest load


@dataclass(frozen=True, slots=True)
class Found:
    """Rows without a pre-image, as the table's index has them: int64[n], uint32[n] (or ABSENT), uint16[n]; the slots of
    the hot ones among them, int32[h], in order."""

    row_ids: np.ndarray
    locations: np.ndarray
    heat: np.ndarray
    slots: np.ndarray


class PreImages:
    def __init__(self, table: Table, executor: Executor | None) -> None:
        self._table, self._executor = table, executor
        self.row_bytes = table.hot_row_bytes + 1  # of its stamp
        self.limit_bytes = max(_LEAST_BYTES, int(_SHARE * table.slots.high_water * table.hot_row_bytes))
        most = self.limit_bytes // (self.row_bytes + _ENTRY_BYTES) + 1
        self._index = Index(table.index.num_buckets)
        room = self._index.reserve(min(most, table.slots.high_water))  # or each of its buckets would grow at each Pull
        if executor is not None:
            executor.submit(populate, room)
        self._slots = Slots(most)
        dtype = np.float32 if table.spec.policy.hot_bits == 32 else np.float16
        self._parts = (
            ReservedArray(most, table.spec.dim, dtype, small_bytes=_NEVER_HUGE),
            ReservedArray(most, table.hot.num_state_columns, np.float32),
            ReservedArray(most, 1, np.int32),
            ReservedArray(most, 1, np.uint8),
            ReservedArray(most, 1, np.uint8),
        )

        weights, state, *small = (part.array for part in self._parts)
        columns = columns_of((table.last_step.array, table.visits.array, table.changes.stamps), small)
        wide = table.hot.stored_columns(weights, state)
        self._are_in_memory = wide is not None
        self._columns = columns if wide is None else np.concatenate([wide, columns])
        self._most, self._populated = most, 0
        self._populate_ahead()

    def _populate_ahead(self) -> None:
        """Has memory taken for the rows that come next."""
        ahead = _AHEAD_BYTES // self.row_bytes
        until = min(self._most, self._slots.high_water + ahead)
        if self._executor is not None and until - self._populated >= min(self._most, ahead // 2):
            for part in self._parts[:2]:
                self._executor.submit(populate, part.array[self._populated : until])
            self._populated = until

    @property
    def size_bytes(self) -> int:
        return self._slots.high_water * self.row_bytes + self._index.size_bytes

    def __len__(self) -> int:
        return len(self._index)

    def survey(self, row_ids: np.ndarray, first_bucket: int) -> Found:
        """Those of row_ids int64[n] in buckets from first_bucket on that have no pre-image."""
        n = row_ids.shape[0]
        out = np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(n, np.uint16), np.empty(n, np.int32)
        found, hot = survey(*self._table.index.directory(), *self._index.directory(), row_ids, first_bucket, *out)
        return Found(out[0][:found], out[1][:found], out[2][:found], out[3][:hot])

    def has_room(self, found: Found) -> bool:
        taken = self._slots.num_taken + found.slots.shape[0]
        entries = max(self._index.size_bytes, (len(self._index) + found.row_ids.shape[0]) * _ENTRY_BYTES)
        return taken * self.row_bytes + entries <= self.limit_bytes

    def add(self, found: Found) -> None:
        """Distinct row_ids."""
        kept = found.locations
        is_hot = ((kept & FROZEN_BIT) == 0) & (kept != ABSENT)
        kept[is_hot] = self._keep(found.slots).astype(np.uint32)
        entries, _, _ = self._index.insert(found.row_ids, kept)
        self._index.set_heat(entries, found.heat)

    def _keep(self, table_slots: np.ndarray) -> np.ndarray:
        """Log slots int32[n] that hold the rows of these slots of the table now."""
        n = table_slots.shape[0]
        freed = self._slots.take_free(n)
        slots = np.concatenate([freed, self._slots.grow(n - freed.shape[0])])
        copy_rows(self._columns, table_slots, slots)
        self._populate_ahead()
        if not self._are_in_memory:
            weights, state = self._parts[:2]
            weights.array[slots], state.array[slots] = self._table.hot.read_stored(table_slots)
        return slots

    def locate(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Entries int64[n], 0 without a pre-image, and log slots, uint32[n], of hot ones."""
        return self._index.locate(row_ids)[:2]

    def heat_of(self, entries: np.ndarray) -> np.ndarray:
        return self._index.heat_of(entries)

    def copy_rows(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray, positions: np.ndarray) -> None:
        """Rows of log slots int32[n] to rows positions int32[n] of contiguous arrays."""
        columns = columns_of((self._parts[0].array, self._parts[1].array), (weights, state))
        copy_rows(columns, slots, positions)

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
        locations = self._index.scan(first_bucket, last_bucket).locations
        if locations.shape[0]:
            self._slots.give_back(locations[(locations != ABSENT) & ((locations & FROZEN_BIT) == 0)].view(np.int32))
        self._index.clear(first_bucket, last_bucket)

    def close(self) -> None:
        for part in self._parts:
            part.close()
