"""Reads of all tables of a request: hot rows in one kernel call for all tables, the other rows table by table.

    find and visit (one kernel)  ->  cold rows: admit, thaw (table.py)  ->  gather hot (one kernel)  ->  read the rest

A hot row costs about 80 ns here; what Python does for a table, 5 us. With 26 tables and 2,400 rows each that is half of
what a call per table and kind of work took.

Thread safety: none; it belongs to the thread that owns the shard. Inside a call, threads share the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embedding_server import heat
from embedding_server.hot_rows import ReservedHotRows
from embedding_server.index import FROZEN_BIT
from embedding_server.kernels import tables as kernels
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.store import WIRE_NUMPY, ReplyBuffers, Rows, WireDtype
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

_NO_CODES = np.zeros(0)


@dataclass(slots=True)
class _Request:
    """K tables of one call. Row i of table k is row starts[k] + i of slots and flags."""

    tables: list[Table]
    row_ids: list[np.ndarray]
    numbers: np.ndarray  # int64[K] in the directory
    addresses: np.ndarray  # int64[K]
    starts: np.ndarray  # int64[K+1]
    slots: np.ndarray  # int32[N]
    cold: np.ndarray  # int64[K]


@dataclass(slots=True)
class _Cold:
    """Rows of one table that stayed cold: positions in the request, and what the index says of them."""

    positions: np.ndarray  # int32[c]
    entries: np.ndarray
    locations: np.ndarray


class HotPath:
    def __init__(self, threads: TableThreads) -> None:
        self._directory = np.zeros((0, kernels.COLUMNS), np.int64)
        self._numbers: dict[str, int] = {}
        self._tables: dict[str, Table] = {}
        self._half_lives = np.zeros(0)
        self._all_reserved = True
        self._threads = threads

    def add(self, table: Table) -> None:
        name = table.spec.name
        self._numbers[name] = len(self._tables)
        self._tables[name] = table
        self._directory = np.concatenate([self._directory, table.directory_row()[None]])
        self._half_lives = np.append(self._half_lives, table.spec.policy.half_life_steps)
        self._all_reserved = self._all_reserved and isinstance(table.hot, ReservedHotRows)

    def pull(
        self, ids: Mapping[str, np.ndarray], step: int, wire_dtype: WireDtype, buffers: ReplyBuffers | None = None
    ) -> dict[str, Rows]:
        """Training read at `step`: counts the visit, admits new rows, thaws (policy idle)."""
        request = self._find(ids, step)
        left: dict[int, _Cold] = {}
        for k in np.flatnonzero(request.cold).tolist():
            cold = self._visit_cold(request, k, step)
            if cold.positions.shape[0]:
                left[k] = cold
        for k, table in enumerate(request.tables):
            if k not in left:
                table.remember(request.row_ids[k], request.slots[request.starts[k] : request.starts[k + 1]])
            else:
                table.rows_default_reads += int((left[k].entries == 0).sum())
        return self._gather(ids, request, left, wire_dtype, buffers, always_default=True)

    def read(
        self,
        ids: Mapping[str, np.ndarray],
        wire_dtype: WireDtype,
        buffers: ReplyBuffers | None = None,
        *,
        always_default: bool,
    ) -> dict[str, Rows]:
        """Read without any effect. Unknown row_ids: default row if always_default or min_count > 1, else zeros."""
        request = self._find(ids, None)
        left = {}
        for k in np.flatnonzero(request.cold).tolist():
            positions = np.flatnonzero(self._slots(request, k) < 0)
            entries, locations, _, _ = request.tables[k].index.locate(request.row_ids[k][positions])
            left[k] = _Cold(positions.astype(np.int32), entries, locations)
        return self._gather(ids, request, left, wire_dtype, buffers, always_default=always_default)

    def _find(self, ids: Mapping[str, np.ndarray], step: int | None) -> _Request:
        row_ids = [np.ascontiguousarray(of_table) for of_table in ids.values()]
        starts = np.zeros(len(row_ids) + 1, np.int64)
        np.cumsum([of_table.shape[0] for of_table in row_ids], out=starts[1:])
        request = _Request(
            tables=[self._tables[name] for name in ids],
            row_ids=row_ids,
            numbers=np.array([self._numbers[name] for name in ids], np.int64),
            addresses=np.array([of_table.__array_interface__["data"][0] for of_table in row_ids], np.int64),
            starts=starts,
            slots=np.empty(int(starts[-1]), np.int32),
            cold=np.zeros(len(row_ids), np.int64),
        )
        codes = _NO_CODES
        if step is not None:
            for table in request.tables:
                table.move_origin_of_heat(step)
            codes = heat.now_codes(step, self._half_lives[request.numbers])
        self._threads.run(starts, lambda first, last: self._find_tables(request, first, last, step, codes))
        return request

    def _find_tables(self, request: _Request, first: int, last: int, step: int | None, codes: np.ndarray) -> None:
        kernels.find_and_visit(
            self._directory, request.numbers, request.addresses, request.starts, first, last,
            step is not None, step or 0, codes, heat.LOG_TABLE, request.slots, request.cold,
        )  # fmt: skip

    def _visit_cold(self, request: _Request, k: int, step: int) -> _Cold:
        table, row_ids, slots = request.tables[k], request.row_ids[k], self._slots(request, k)
        positions = np.flatnonzero(slots < 0)
        generation = table.generation
        entries, locations = table.visit_cold(row_ids[positions], step)
        if table.generation != generation:  # rows moved to make room, perhaps some of this request
            self._find_tables(request, k, k + 1, None, _NO_CODES)
        is_hot = (entries != 0) & ((locations & FROZEN_BIT) == 0)
        slots[positions[is_hot]] = locations[is_hot]
        stays = ~is_hot
        return _Cold(positions[stays].astype(np.int32), entries[stays], locations[stays])

    def _gather(
        self,
        ids: Mapping[str, np.ndarray],
        request: _Request,
        left: Mapping[int, _Cold],
        wire_dtype: WireDtype,
        buffers: ReplyBuffers | None,
        *,
        always_default: bool,
    ) -> dict[str, Rows]:
        starts = request.starts
        dims = self._directory[request.numbers, kernels.DIM]
        value_starts = np.zeros(starts.shape[0], np.int64)
        np.cumsum(np.diff(starts) * dims, out=value_starts[1:])
        if buffers is None:
            flags = np.empty(int(starts[-1]), np.uint8)
            values = np.empty(int(value_starts[-1]), WIRE_NUMPY[wire_dtype])
        else:
            flags, values = buffers(list(ids), np.diff(starts).tolist(), dims.tolist())
        if self._all_reserved:
            flat, mode = wire_view(values), MODES[wire_dtype]
            self._threads.run(
                starts,
                lambda first, last: kernels.gather_hot(
                    self._directory, request.numbers, starts, value_starts, first, last,
                    request.slots, flat, flags, mode,
                ),
            )  # fmt: skip
        rows = {}
        bounds, value_bounds = starts.tolist(), value_starts.tolist()
        for k, name in enumerate(ids):
            of_table = values[value_bounds[k] : value_bounds[k + 1]].reshape(-1, int(dims[k]))
            its_flags = flags[bounds[k] : bounds[k + 1]]
            table = request.tables[k]
            if not self._all_reserved:
                table.gather_hot(self._slots(request, k), of_table, its_flags, wire_dtype)
            if k in left:
                cold = left[k]
                default = always_default or table.spec.policy.min_count > 1
                table.read_cold(
                    request.row_ids[k], cold.positions, cold.entries, cold.locations, of_table, its_flags, wire_dtype,
                    reads_default=default,
                )  # fmt: skip
            rows[name] = Rows(of_table, its_flags)
        return rows

    @staticmethod
    def _slots(request: _Request, k: int) -> np.ndarray:
        return request.slots[request.starts[k] : request.starts[k + 1]]
