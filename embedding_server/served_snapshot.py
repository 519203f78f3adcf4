"""ServedSnapshot: look-ups of all tables of one cut, full or delta, from its files. It writes nothing.

    snapshot = ServedSnapshot(cut)       seconds for tens of millions of rows (served_table.py)
    snapshot.look_up(...)                lookup.py
    snapshot.close()

What is read of a row_id is what a shard would read that was restored from the cut, bit for bit, and so are the flags.
All buckets of a cut are served, whatever number of shards wrote it.

Thread safety: it never changes, so any number of threads may read; close() once none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from embedding_server.errors import InvalidInput, UnknownTable
from embedding_server.kernels import paging
from embedding_server.kernels import served as kernels
from embedding_server.kernels.cpu import initial_values
from embedding_server.lookup import INITIAL, FoundRows, LookupSource, Version
from embedding_server.served_files import Area
from embedding_server.served_table import ServedTable
from embedding_server.snapshot_parts import Part, check_none_is_partly_dropped, read_parts, tables_in
from embedding_server.spec import TableSpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TableStats

_FLOAT32_BITS = np.uint8(32)
_LEAST_BATCH, _SAMPLES = 64, 32  # fewer rows are read one page fault after the other; rows whose pages are asked about


class ServedSnapshot(LookupSource):
    def __init__(self, cut: Path) -> None:
        """SegmentCorrupt, naming the file, InvalidInput or OSError if it cannot be served."""
        self.cut, self.buckets = cut, np.ones(NUM_BUCKETS, np.bool_)
        try:
            parts = read_parts(cut)
        except FileNotFoundError as error:
            raise InvalidInput(f"serve {cut}: {error.strerror}; name the folder of one cut") from error
        records = [part.record for part in parts]
        check_none_is_partly_dropped(cut, records)
        first = records[0]
        self.snapshot_version = Version(first.job, first.epoch, first.step, cut.name)
        self._tables: dict[str, ServedTable] = {}
        self._stack = ExitStack()
        try:
            self._open(parts)
        except BaseException:
            self.close()
            raise
        self._numbers = {name: number for number, name in enumerate(self._tables)}
        rows = [table.directory_row() for table in self._tables.values()]
        self._directory = np.array(rows, np.int64).reshape(len(rows), kernels.TABLE_COLUMNS)

    def _open(self, parts: Sequence[Part]) -> None:
        for name in tables_in([part.record for part in parts]):
            self._tables[name] = self._stack.enter_context(closing(ServedTable(parts, name)))

    def close(self) -> None:
        self._stack.close()

    def check_rows(self, before: ServedSnapshot | None = None) -> None:
        """Reads and checks every row, but for blocks that `before`, which is open, has checked of the same files.

        SegmentCorrupt, naming the file. Without it each block is checked when the first row of it is read.
        """
        known = {area.key: area for area in before._areas()} if before else {}
        for area in self._areas():
            if area.key in known:
                area.take_over(known[area.key])
            area.check()

    def _areas(self) -> list[Area]:
        return [area for table in self._tables.values() for area in table.areas]

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self._tables.values())

    @property
    def index_bytes(self) -> int:
        """Memory of this process alone."""
        return sum(table.stats.bytes_index for table in self._tables.values())

    def spec(self, table: str) -> TableSpec:
        return self._table(table).spec

    def table_specs(self) -> dict[str, TableSpec]:
        return {name: table.spec for name, table in self._tables.items()}

    def version(self, table: str) -> Version:
        self._table(table)
        return self.snapshot_version

    def stats(self, table: str) -> TableStats:
        return self._table(table).stats

    def find_rows(self, ids: Sequence[tuple[str, np.ndarray]]) -> FoundRows:
        tables = [self._table(name) for name, _ in ids]
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([row_ids.shape[0] for _, row_ids in ids], out=starts[1:])
        n = int(starts[-1])
        found = FoundRows(np.empty(n, np.int64), np.empty(n, np.uint8), np.empty(n, np.uint8))
        blocks, counts = np.empty((2 * n, 3), np.int64), np.empty((len(ids), kernels.COUNTS), np.int64)
        num_blocks = kernels.find_rows(
            self._directory,
            np.array([self._numbers[name] for name, _ in ids], np.int64),
            np.array([row_ids.__array_interface__["data"][0] for _, row_ids in ids], np.int64),
            starts, found.addresses, found.bits, found.flags, blocks, counts,
        )  # fmt: skip
        for k in np.flatnonzero(counts.any(axis=1)).tolist():
            initial, absent, cut_off = counts[k].tolist()
            if cut_off:
                tables[k].refuse_cut_off(cut_off - 1)
            these = slice(int(starts[k]), int(starts[k + 1]))
            if initial:
                _place_initial(tables[k], ids[k][1], found, these)
            if absent and tables[k].spec.policy.min_count > 1:
                _place_default(tables[k], found, these)
        if n >= _LEAST_BATCH:
            self._page_in(tables, starts, found)
        if num_blocks:
            _check(tables, blocks[:num_blocks])
        return found

    def _page_in(self, tables: Sequence[ServedTable], starts: np.ndarray, found: FoundRows) -> None:
        """Has the pages of all rows read at once, where memory has not got them: one after the other takes five times
        as long."""
        if not kernels.any_absent(found.addresses, _SAMPLES):
            return
        dims = np.array([table.spec.dim for table in tables], np.int64)
        ranges = np.empty((found.addresses.shape[0], 2), np.int64)
        paging.will_need(ranges[: kernels.pages_of(found.addresses, found.bits, dims, starts, ranges)])

    def _table(self, name: str) -> ServedTable:
        table = self._tables.get(name)
        if table is None:
            raise UnknownTable(f"table {name!r} is not in snapshot {self.cut.name}; ListTables names those that are")
        return table


def _check(tables: Sequence[ServedTable], blocks: np.ndarray) -> None:
    """int64[n, 3] of (k, slot, block)."""
    for k in np.unique(blocks[:, 0]).tolist():
        of_table = blocks[blocks[:, 0] == k, 1:]
        tables[k].check_blocks(sorted(set(map(tuple, of_table.tolist()))))


def _place_initial(table: ServedTable, row_ids: np.ndarray, found: FoundRows, these: slice) -> None:
    at, spec = np.flatnonzero(found.flags[these] & INITIAL), table.spec
    rows = initial_values(row_ids[at], table.seed, spec.dim, spec.init_min, spec.init_max)
    found.kept.append(rows)
    found.addresses[these][at] = rows.ctypes.data + rows.strides[0] * np.arange(rows.shape[0])
    found.bits[these][at] = _FLOAT32_BITS


def _place_default(table: ServedTable, found: FoundRows, these: slice) -> None:
    at = np.flatnonzero((found.flags[these] & FOUND) == 0)
    found.kept.append(table.default_row)
    found.addresses[these][at] = table.default_row.ctypes.data
    found.bits[these][at] = _FLOAT32_BITS
    found.flags[these][at] = DEFAULT
