"""Pull, Push and look-up of all tables of a request: hot rows in one kernel call, others table by table.

    read    find and visit (one kernel) -> cold rows: admit, thaw (cold_path.py) -> gather hot (one kernel) -> the rest
    apply   slots (from the Pull, or the index) -> update (one kernel)

A hot row costs about 80 ns here; what Python does for a table, 5 us. With 26 tables and 2,400 rows each that is half of
what a call per table and kind of work took.

Thread safety: none; it belongs to the thread that owns the shard. Inside a call, threads share the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embedding_server import cold_path, heat
from embedding_server.gradients import sum_by_row
from embedding_server.hot_rows import CpuHotRows, ReservedHotRows, kernel_constants, kernel_rate
from embedding_server.index import FROZEN_BIT
from embedding_server.kernels import tables as kernels
from embedding_server.kernels import updates as update_kernels
from embedding_server.kernels.row_updates import NUM_CONSTANTS
from embedding_server.kernels.updates import make_sums
from embedding_server.kernels.visits import has_duplicates
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.store import WIRE_NUMPY, PlacedRows, ReplyBuffers, Rows, RowSums, WireDtype
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

_NO_TOTALS = np.zeros(0)
_NO_COPIES = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step does to the hot rows of one table: gradients of n rows, as values or as sums."""

    table: Table
    row_ids: np.ndarray  # int64[n], contiguous; a repeated one is summed first
    values: np.ndarray  # [n, D] of WIRE_NUMPY[wire_dtype]; not looked at if there are sums
    wire_dtype: WireDtype
    learning_rate: float
    sums: RowSums | None = None


@dataclass(slots=True)
class _Request:
    """K tables of one call. Row i of table k is row starts[k] + i of slots and flags."""

    tables: list[Table]
    row_ids: list[np.ndarray]
    numbers: np.ndarray  # int64[K] in the directory
    addresses: np.ndarray  # int64[K]
    starts: np.ndarray  # int64[K+1]
    slots: np.ndarray  # int32[N]
    bands: np.ndarray  # uint8[N], heat bands of hot rows
    cold: np.ndarray  # int64[K]


@dataclass(slots=True)
class _Cold:
    """Rows of one table that stayed cold: positions in the request, and what the index says of them."""

    positions: np.ndarray  # int32[c]
    entries: np.ndarray
    locations: np.ndarray


class HotPath:
    def __init__(self, threads: TableThreads) -> None:
        self._threads = threads
        self._start()

    def _start(self) -> None:
        """Without any table."""
        self._directory = np.zeros((0, kernels.COLUMNS), np.int64)
        self._numbers: dict[str, int] = {}
        self._tables: dict[str, Table] = {}
        self._half_lives = np.zeros(0)
        self._constants = np.zeros((0, NUM_CONSTANTS), np.float32)
        self._all_reserved = self._all_cpu = True
        self._any_decays = self._any_half = False

    def add(self, table: Table) -> None:
        name = table.spec.name
        self._numbers[name] = len(self._tables)
        self._tables[name] = table
        self._directory = np.concatenate([self._directory, table.directory_row()[None]])
        self._half_lives = np.append(self._half_lives, table.spec.policy.half_life_steps)
        self._all_reserved = self._all_reserved and isinstance(table.hot, ReservedHotRows)
        self._all_cpu = self._all_cpu and isinstance(table.hot, CpuHotRows)
        self._any_decays = self._any_decays or table.decay is not None
        self._any_half = self._any_half or table.spec.policy.hot_bits == 16
        self._constants = np.concatenate([self._constants, kernel_constants(table.spec.optimizer)[None]])

    def remove(self, name: str) -> None:
        left = [table for known, table in self._tables.items() if known != name]
        self._start()
        for table in left:
            self.add(table)

    def replace(self, table: Table) -> None:
        """A new table, of the spec of one that was added, takes its place."""
        name = table.spec.name
        self._tables[name] = table
        self._directory[self._numbers[name]] = table.directory_row()

    def directory_of(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """What kernels over many tables take first: the directory, and int64[K], where in it these are."""
        return self._directory, np.array([self._numbers[name] for name in names], np.int64)

    def pull(
        self, ids: Mapping[str, np.ndarray], step: int, wire_dtype: WireDtype, buffers: ReplyBuffers | None = None
    ) -> dict[str, Rows]:
        """Training read at `step`: counts the visit, admits new rows, thaws (policy idle)."""
        return self._gather(ids, *self._visit(ids, step), wire_dtype, buffers, always_default=True, totals=_NO_TOTALS)

    def pull_in_place(self, ids: Mapping[str, np.ndarray], step: int) -> dict[str, PlacedRows]:
        """As pull; the addresses hold until the next call of anything here or of a table. Only if is_in_place."""
        return self._place(ids, *self._visit(ids, step))

    def read(
        self,
        ids: Mapping[str, np.ndarray],
        wire_dtype: WireDtype,
        buffers: ReplyBuffers | None = None,
        *,
        always_default: bool,
    ) -> dict[str, Rows]:
        """Read without any effect. Unknown row_ids: default row if always_default or min_count > 1, else zeros."""
        request, left = self._look(ids)
        totals = self._totals(request.tables)
        return self._gather(ids, request, left, wire_dtype, buffers, always_default=always_default, totals=totals)

    def read_in_place(self, ids: Mapping[str, np.ndarray]) -> dict[str, PlacedRows]:
        """As read with always_default, and as pull_in_place."""
        return self._place(ids, *self._look(ids))

    def _visit(self, ids: Mapping[str, np.ndarray], step: int) -> tuple[_Request, dict[int, _Cold]]:
        for name, row_ids in ids.items():
            self._tables[name].preserve(row_ids)
        request = self._find(ids, step)
        left: dict[int, _Cold] = {}
        generations = [table.generation for table in request.tables]
        for k in np.flatnonzero(request.cold).tolist():
            cold = self._visit_cold(request, k, step)
            if cold.positions.shape[0]:
                left[k] = cold
        # Rows move to make room, also of other tables; none that was visited at this step freezes.
        moved = [k for k, table in enumerate(request.tables) if table.generation != generations[k]]
        if moved:
            self._find_tables(request, np.array(moved, np.int64), None, self._now_codes(request, step))
        for k, table in enumerate(request.tables):
            if k not in left:
                table.remember(request.row_ids[k], request.slots[request.starts[k] : request.starts[k + 1]])
            else:
                table.rows_default_reads += int((left[k].entries == 0).sum())
        return request, left

    def _look(self, ids: Mapping[str, np.ndarray]) -> tuple[_Request, dict[int, _Cold]]:
        request = self._find(ids, None)
        left = {}
        for k in np.flatnonzero(request.cold).tolist():
            positions = np.flatnonzero(self._slots(request, k) < 0)
            entries, locations, _, _ = request.tables[k].index.locate(request.row_ids[k][positions])
            left[k] = _Cold(positions.astype(np.int32), entries, locations)
        return request, left

    def apply(self, updates: Sequence[Update], *, scale: float, step: int) -> tuple[int, int]:
        """One optimizer step of each table's hot rows, gradients times scale. (rows applied, rows ignored)."""
        ready: list[tuple[Update, np.ndarray]] = []
        total = ignored = 0
        for update in updates:
            slots = update.table.slots_of_pull(update.row_ids)
            distinct = _without_repeats(update)
            if slots is None or distinct is not update:
                update = distinct
                update.table.preserve(update.row_ids)  # a Pull that is remembered has done it
                slots, not_hot = update.table.find_slots(update.row_ids)
                ignored += not_hot
            total += slots.shape[0]
            update.table.changes.note(slots)
            update.table.rate = kernel_rate(update.table.spec.optimizer, update.learning_rate, step)
            ready.append((update, slots))
        if self._any_decays:
            for update, _ in ready:
                if update.table.decay is not None:
                    update.table.decay.note(step, update.learning_rate)
        if self._all_cpu:
            for dtype in dict.fromkeys(update.wire_dtype for update, _ in ready if update.sums is None):
                self._apply_values([r for r in ready if r[0].sums is None and r[0].wire_dtype == dtype], scale, step)
            self._apply_sums([r for r in ready if r[0].sums is not None], scale, step)
        else:
            for update, slots in ready:
                _apply_alone(update, slots, scale, step)
        return total - ignored, ignored

    def _apply_values(self, ready: list[tuple[Update, np.ndarray]], scale: float, step: int) -> None:
        mode, like = MODES[ready[0][0].wire_dtype], wire_view(ready[0][0].values).reshape(-1)[:0]
        values = [np.ascontiguousarray(update.values) for update, _ in ready]
        arguments = self._update_arguments(ready, scale, step)
        addresses = _addresses(values)
        self._threads.run_parts(
            lambda part, parts: update_kernels.apply_values(*arguments, addresses, like, mode, part, parts)
        )

    def _apply_sums(self, ready: list[tuple[Update, np.ndarray]], scale: float, step: int) -> None:
        sums = np.zeros((len(ready), update_kernels.SUMS_COLUMNS), np.int64)
        shared: dict[int, int] = {}  # tables of one batch share three of the five arrays; asking costs 1 us
        for k, (update, _) in enumerate(ready):
            s = update.sums
            assert s is not None
            for array in (s.source, s.positions, s.scales):
                if id(array) not in shared:
                    shared[id(array)] = _address(array)
            sums[k] = (
                shared[id(s.source)], shared[id(s.positions)], s.positions.shape[0], shared[id(s.scales)],
                s.scales.shape[0], _address(s.starts), _address(s.rows),
            )  # fmt: skip
        arguments = self._update_arguments(ready, scale, step)
        self._threads.run_parts(lambda part, parts: update_kernels.apply_sums(*arguments, sums, part, parts))

    def _update_arguments(self, ready: list[tuple[Update, np.ndarray]], scale: float, step: int) -> tuple[Any, ...]:
        """What both update kernels take first."""
        tables = [update.table for update, _ in ready]
        slots = [slots for _, slots in ready]
        rates = [kernel_rate(update.table.spec.optimizer, update.learning_rate, step) for update, _ in ready]
        return (
            self._directory,
            self._constants,
            np.array([self._numbers[table.spec.name] for table in tables], np.int64),
            np.array(rates, np.float32),
            self._totals(tables) if self._any_decays else np.zeros(len(tables)),
            np.float32(scale),
            step,
            np.array([of_table.shape[0] for of_table in slots], np.int64),
            _addresses(slots),
            _addresses([update.row_ids for update, _ in ready]),
        )

    def _find(self, ids: Mapping[str, np.ndarray], step: int | None) -> _Request:
        row_ids = [np.ascontiguousarray(of_table) for of_table in ids.values()]
        starts = np.zeros(len(row_ids) + 1, np.int64)
        np.cumsum([of_table.shape[0] for of_table in row_ids], out=starts[1:])
        request = _Request(
            tables=[self._tables[name] for name in ids],
            row_ids=row_ids,
            numbers=np.array([self._numbers[name] for name in ids], np.int64),
            addresses=_addresses(row_ids),
            starts=starts,
            slots=np.empty(int(starts[-1]), np.int32),
            bands=np.empty(int(starts[-1]), np.uint8),
            cold=np.zeros(len(row_ids), np.int64),
        )
        if step is not None:
            for table in request.tables:
                table.move_origin_of_heat(step)
            if self._any_decays:
                self._begin_decay(request, step)
        codes = self._now_codes(request, step)
        self._threads.run(np.diff(starts), lambda share: self._find_tables(request, share, step, codes))
        if step is not None and self._any_decays:  # a visit has settled it
            for k, table in enumerate(request.tables):
                if table.decay is not None:
                    table.changes.note(self._slots(request, k))
        return request

    def _find_tables(self, request: _Request, share: np.ndarray, step: int | None, codes: np.ndarray) -> None:
        kernels.find_and_visit(
            self._directory, request.numbers, request.addresses, request.starts, share,
            step is not None, step or 0, codes, heat.LOG_TABLE, request.slots, request.bands, request.cold,
        )  # fmt: skip

    def _now_codes(self, request: _Request, step: int | None) -> np.ndarray:
        """float64[K]: the heat code of a visit at `step`; None: at the newest step that each table has seen."""
        half_lives = self._half_lives[request.numbers]
        if step is not None:
            return heat.now_codes(step, half_lives)
        return heat.now_codes(np.array([table.last_step_seen for table in request.tables]), half_lives)

    def _begin_decay(self, request: _Request, step: int) -> None:
        for k, table in enumerate(request.tables):
            if table.decay is None:
                continue
            table.decay.begin_step(step)
            if not isinstance(table.hot, ReservedHotRows):  # find_and_visit settles the others
                table.settle(request.row_ids[k], step)

    def _totals(self, tables: Sequence[Table]) -> np.ndarray:
        """float64[K]: the log-sums of weight decay up to now, or empty if no table decays."""
        if not self._any_decays:
            return _NO_TOTALS
        return np.array([0.0 if table.decay is None else table.decay.total for table in tables])

    def _visit_cold(self, request: _Request, k: int, step: int) -> _Cold:
        table, row_ids, slots = request.tables[k], request.row_ids[k], self._slots(request, k)
        positions = np.flatnonzero(slots < 0)
        entries, locations = cold_path.visit(table, row_ids[positions], step)
        is_hot = (entries != 0) & ((locations & FROZEN_BIT) == 0)
        slots[positions[is_hot]] = locations[is_hot]
        if is_hot.any():
            request.bands[request.starts[k] + positions[is_hot]] = table.bands(entries[is_hot])
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
        totals: np.ndarray,
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
                np.diff(value_starts),
                lambda share: kernels.gather_hot(
                    self._directory, request.numbers, starts, value_starts, share,
                    request.slots, request.bands, totals, flat, flags, mode,
                ),
            )  # fmt: skip
        rows = {}
        bounds, value_bounds = starts.tolist(), value_starts.tolist()
        for k, name in enumerate(ids):
            of_table = values[value_bounds[k] : value_bounds[k + 1]].reshape(-1, int(dims[k]))
            its_flags = flags[bounds[k] : bounds[k + 1]]
            table = request.tables[k]
            if not self._all_reserved:
                its_bands = request.bands[bounds[k] : bounds[k + 1]]
                table.gather_hot(self._slots(request, k), its_bands, of_table, its_flags, wire_dtype)
            if k in left:
                cold = left[k]
                default = always_default or table.spec.policy.min_count > 1
                cold_path.read(
                    table, request.row_ids[k], cold.positions, cold.entries, cold.locations, of_table, its_flags,
                    wire_dtype, reads_default=default,
                )  # fmt: skip
            rows[name] = Rows(of_table, its_flags)
        return rows

    def _place(
        self, ids: Mapping[str, np.ndarray], request: _Request, left: Mapping[int, _Cold]
    ) -> dict[str, PlacedRows]:
        num_rows = int(request.starts[-1])
        addresses, flags = np.empty(num_rows, np.int64), np.empty(num_rows, np.uint8)
        kernels.place_hot(
            self._directory, request.numbers, request.starts, np.arange(len(ids)), request.slots, request.bands,
            addresses, flags,
        )  # fmt: skip
        rows = {}
        bounds = request.starts.tolist()
        for k, name in enumerate(ids):
            table, low, high = request.tables[k], bounds[k], bounds[k + 1]
            placed = PlacedRows(addresses[low:high], flags[low:high], table.spec.dim, _NO_COPIES)
            if self._any_half and table.spec.policy.hot_bits == 16:
                placed = self._copied(request, k, placed)
            rows[name] = self._with_copies(request, k, placed, left[k]) if k in left else placed
        return rows

    def _copied(self, request: _Request, k: int, placed: PlacedRows) -> PlacedRows:
        """Hot rows of float16 are read into memory of their own: PlacedRows are float32."""
        slots = self._slots(request, k)
        copies = np.empty((slots.shape[0], placed.dim), np.float32)
        request.tables[k].hot.gather(slots, copies, np.arange(slots.shape[0], dtype=np.int32), "float32")
        return PlacedRows(_row_addresses(copies), placed.flags, placed.dim, copies)

    def _with_copies(self, request: _Request, k: int, placed: PlacedRows, cold: _Cold) -> PlacedRows:
        """Rows that are not hot are read into memory of their own."""
        n, at = cold.positions.shape[0], cold.positions
        if placed.copies.shape[0]:  # every row has its place there
            cold_path.read(
                request.tables[k], request.row_ids[k], at, cold.entries, cold.locations, placed.copies, placed.flags,
                "float32", reads_default=True,
            )  # fmt: skip
            return placed
        copies, flags = np.empty((n, placed.dim), np.float32), np.empty(n, np.uint8)
        cold_path.read(
            request.tables[k], request.row_ids[k][at], np.arange(n, dtype=np.int32), cold.entries, cold.locations,
            copies, flags, "float32", reads_default=True,
        )  # fmt: skip
        placed.flags[at] = flags
        placed.addresses[at] = _row_addresses(copies)
        return PlacedRows(placed.addresses, placed.flags, placed.dim, copies)

    @staticmethod
    def _slots(request: _Request, k: int) -> np.ndarray:
        return request.slots[request.starts[k] : request.starts[k + 1]]


def _apply_alone(update: Update, slots: np.ndarray, scale: float, step: int) -> None:
    """One table whose rows no kernel of ours reaches."""
    values, dtype = update.values, update.wire_dtype
    if update.sums is not None:
        values, dtype = make_sums(update.sums, update.table.spec.dim), "float32"
    positions = np.arange(slots.shape[0], dtype=np.int32)
    pending = update.table.pending(slots)
    update.table.hot.apply(slots, values, positions, dtype, scale, update.learning_rate, step, pending, update.row_ids)


def _row_addresses(rows: np.ndarray) -> np.ndarray:
    """int64[n] of the rows of float32[n, D]."""
    return rows.__array_interface__["data"][0] + 4 * rows.shape[1] * np.arange(rows.shape[0])


def _without_repeats(update: Update) -> Update:
    if update.sums is not None or not has_duplicates(update.row_ids):  # sums are of distinct rows
        return update
    chunks: list[tuple[np.ndarray, WireDtype]] = [(update.values, update.wire_dtype)]
    row_ids, values = sum_by_row(update.row_ids, chunks, update.table.spec.dim)
    return Update(update.table, row_ids, values, "float32", update.learning_rate)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([_address(array) for array in arrays], np.int64)
