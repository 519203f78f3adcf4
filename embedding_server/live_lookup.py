"""LiveLookups: look-ups of the tables of a shard, between the calls that train them.

One kernel call finds the hot rows of all tables; the others follow table by table, for 5 to 20 us each:

    stored    in a segment: checked and paged in as every read of it (segment_rows.py), read where they lie
    initial   made anew, float32[D] each
    away      hot rows that no kernel can read where they are, in GPU memory or owing weight decay: copied as float32[D]
    absent    the default row, or nothing

Thread safety: none; it belongs to the thread that owns the shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embedding_server.errors import StoreUnavailable, UnknownTable
from embedding_server.hot_path import HotPath
from embedding_server.index import FROZEN_BIT, INITIAL
from embedding_server.jobs import JobBook
from embedding_server.kernels import lookups as kernels
from embedding_server.kernels.cpu import initial_values
from embedding_server.lookup import INITIAL as INITIAL_FLAG
from embedding_server.lookup import FoundRows, LookupSource, Version, starts_of
from embedding_server.request_checks import RequestChecks
from embedding_server.restore import Restore
from embedding_server.spec import TableSpec
from embedding_server.store import DEFAULT, FOUND, TRAINABLE, TableStats
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

_FLOAT32_BITS = np.uint8(32)


class LiveLookups(LookupSource):
    def __init__(
        self,
        tables: Mapping[str, Table],
        path: HotPath,
        threads: TableThreads,
        checks: RequestChecks,
        jobs: JobBook,
        restores: Mapping[str, Restore],
        buckets: np.ndarray,
    ) -> None:
        """All of them the shard's own."""
        self._tables, self._path, self._threads, self._checks = tables, path, threads, checks
        self._jobs, self._restores, self.buckets = jobs, restores, buckets

    def spec(self, table: str) -> TableSpec:
        if table not in self._tables:
            raise UnknownTable(f"table {table!r} is not on this shard; ListTables names those that are")
        return self._tables[table].spec

    def table_specs(self) -> dict[str, TableSpec]:
        return {name: table.spec for name, table in self._tables.items()}

    def version(self, table: str) -> Version:
        job = self._checks.table(table).job
        if job is None:
            return Version()
        info = self._jobs.current_epoch(job)
        return Version(job, info.epoch, info.last_step)

    def stats(self, table: str) -> TableStats:
        return self._checks.table(table).stats()

    def find_rows(self, ids: Sequence[tuple[str, np.ndarray]]) -> FoundRows:
        """StoreUnavailable too, while a restore fills one of the tables."""
        self._check_restores({name for name, _ in ids})
        for name, row_ids in ids:
            self._checks.ids(name, row_ids)
        names, arrays = [name for name, _ in ids], [np.ascontiguousarray(row_ids) for _, row_ids in ids]
        sizes = [row_ids.shape[0] for row_ids in arrays]
        starts, n = starts_of(sizes), sum(sizes)
        found = FoundRows(np.empty(n, np.int64), np.empty(n, np.uint8), np.empty(n, np.uint8))
        locations, counts = np.empty(n, np.uint32), np.empty((len(ids), kernels.COUNTS), np.int64)
        where = *self._path.directory_of(names), _addresses(arrays), starts
        out = found.addresses, found.bits, found.flags, locations, counts
        self._threads.run(sizes, lambda share: kernels.find_rows(*where, share, *out))
        for k, counts_k in enumerate(counts.tolist()):
            if any(counts_k):
                these = slice(int(starts[k]), int(starts[k + 1]))
                _Others(self._tables[names[k]], arrays[k], found, these, locations[these]).place(counts_k)
        return found

    def _check_restores(self, names: set[str]) -> None:
        for job, restore in self._restores.items():
            if restore.names & names:
                raise StoreUnavailable(
                    f"Lookup: table {min(restore.names & names)!r} is being restored by job {job!r} and has not all of"
                    " its rows yet; try again"
                )


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)


class _Others:
    """The rows of one table that find_rows has not placed."""

    def __init__(
        self, table: Table, row_ids: np.ndarray, found: FoundRows, these: slice, locations: np.ndarray
    ) -> None:
        """these: of the table, in the arrays of found; locations uint32[n]."""
        self._table, self._row_ids, self._locations, self._kept = table, row_ids, locations, found.kept
        self._addresses, self._bits, self._flags = found.addresses[these], found.bits[these], found.flags[these]

    def place(self, counts: Sequence[int]) -> None:
        """counts: by the columns of kernels.find_rows."""
        kinds = (self._place_stored, self._place_initial, self._place_away, self._place_absent)
        for count, place in zip(counts, kinds, strict=True):
            if count:
                place()

    def _place_stored(self) -> None:
        at = np.flatnonzero(((self._locations & FROZEN_BIT) != 0) & (self._locations != INITIAL))
        self._addresses[at], self._bits[at] = self._table.segments.place(self._locations[at])

    def _place_initial(self) -> None:
        at, spec = np.flatnonzero(self._locations == INITIAL), self._table.spec
        self._point_at(at, initial_values(self._row_ids[at], self._table.seed, spec.dim, spec.init_min, spec.init_max))
        self._flags[at] |= np.uint8(INITIAL_FLAG)

    def _place_away(self) -> None:
        at = np.flatnonzero(((self._flags & TRAINABLE) != 0) & (self._bits == 0))
        self._point_at(at, self._table.read_hot(self._locations[at].astype(np.int32))[0])

    def _place_absent(self) -> None:
        if self._table.spec.policy.min_count <= 1:
            return
        at, row = np.flatnonzero((self._flags & FOUND) == 0), self._table.default_row.read()
        self._kept.append(row)
        self._addresses[at], self._bits[at] = row.__array_interface__["data"][0], _FLOAT32_BITS
        self._flags[at] = np.uint8(DEFAULT)

    def _point_at(self, at: np.ndarray, rows: np.ndarray) -> None:
        """The rows at these positions are those of float32[m, D]."""
        rows = np.ascontiguousarray(rows, np.float32)
        self._kept.append(rows)
        first = rows.__array_interface__["data"][0]
        self._addresses[at] = first + rows.strides[0] * np.arange(rows.shape[0])
        self._bits[at] = _FLOAT32_BITS
