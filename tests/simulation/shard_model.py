"""What a shard must be after each call: tables as dictionaries (table_model.py), and the rules of epochs and steps.

The rules are written once more here, from DESIGN.md, so that a mistake in embedding_server has to be made twice to go
unseen. Errors are embedding_server's own classes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from embedding_server.errors import FencedEpoch, FrostlineError, NotReady, StepGap, UnknownTable
from embedding_server.gradients import ShardGradients
from embedding_server.kernels.hashing import buckets_of
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, Erased, Frostline, Identity, UpdateMode
from tests.embedding_server.table_model import Row, TableModel

JOB = "job"
Tables = dict[str, TableModel]
Gradients = Mapping[str, ShardGradients]


@dataclass
class ShardModel:
    row_ids: Sequence[int]
    buckets: np.ndarray  # bool[NUM_BUCKETS]
    epoch: int = 0
    num_workers: int = 0  # 0: no epoch has begun in this process
    mode: UpdateMode = "sync"
    awaits_restore: bool = False
    applied: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    staged: dict[int, tuple[int, Gradients]] = field(default_factory=dict)
    #: pipelined: default gradients of a step until all workers have pushed it
    defaults: dict[int, dict[int, Gradients]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables: Tables = {}
        #: by table: row_ids of the deletion under way, whose bytes may still be anywhere
        self.erasing: dict[str, set[int]] = {}
        self.dropping: set[frozenset[str]] = set()  # tables that are gone, for whose memory and files somebody asks
        self.owns = dict(zip(self.row_ids, self.buckets[buckets_of(self.row_array, NUM_BUCKETS)].tolist(), strict=True))

    @property
    def row_array(self) -> np.ndarray:
        return np.array(self.row_ids, np.int64)

    def check_tables(self, names: Collection[str]) -> None:
        if set(names) - self.tables.keys():
            raise UnknownTable("")

    # Epochs and steps ---------------------------------------------------------------------------------------------

    def check_begin(self, epoch: int) -> None:
        if epoch <= self.epoch:
            raise FencedEpoch("", self.epoch)

    def begin_epoch(self, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool) -> None:
        """What check_begin allowed."""
        if num_workers != self.num_workers:
            self.applied = [min(self.applied, default=0)] * num_workers
        self.epoch, self.num_workers, self.mode, self.awaits_restore = epoch, num_workers, mode, will_restore
        self.pulled = list(self.applied)
        self.staged.clear()
        self.defaults.clear()
        self.end_deletion()

    def check(self, who: Identity, *, to_restore: bool = False) -> None:
        if not self.num_workers:
            raise NotReady("")
        if who.epoch != self.epoch:
            raise FencedEpoch("", self.epoch)
        if self.awaits_restore != to_restore:
            raise NotReady("")

    def check_barrier(self, who: Identity, step: int, tables: Collection[str] = ()) -> None:
        self.check(who)
        if set(self.applied) != {step} or max(self.pulled) > step:
            raise NotReady("")
        self.check_tables(tables)

    # Pull and Push ------------------------------------------------------------------------------------------------

    def is_repeated_pull(self, who: Identity, step: int, tables: Collection[str]) -> bool:
        self.check(who)
        self.check_tables(tables)
        if step > self.pulled[who.worker] + 1:
            raise StepGap("", self.pulled[who.worker] + 1)
        return step <= self.pulled[who.worker]

    def may_pull(self, step: int) -> bool:
        if self.mode == "sync":
            return min(self.applied) >= step - 1
        return min(self.pulled) >= step - 1 and min(self.applied) >= step - 2

    def pull(self, worker: int, step: int, ids: Mapping[str, np.ndarray]) -> None:
        """Its turn has come, and it is no repeat."""
        for name, row_ids in ids.items():
            self.tables[name].pull(row_ids.tolist(), step, _nothing_is_capped)
        self.pulled[worker] = step

    def is_repeated_push(self, who: Identity, step: int) -> bool:
        self.check(who)
        if step > self.applied[who.worker] + 1:
            raise StepGap("", self.applied[who.worker] + 1)
        return step <= self.applied[who.worker]

    def push(self, worker: int, step: int, gradients: Gradients) -> bool:
        """Not a repeat. Whether it is applied now, and not staged until the other workers' are here."""
        if self.mode == "pipelined":
            self._apply([gradients])
            self._note_push(worker, step)
            self.defaults.setdefault(step, {})[worker] = gradients
            while self.defaults and len(self.defaults[min(self.defaults)]) == self.num_workers:
                self._apply_defaults(self.defaults.pop(min(self.defaults)))
            return True
        self.staged.setdefault(worker, (step, gradients))
        if len(self.staged) < self.num_workers:
            return False
        by_worker = {w: self.staged[w][1] for w in range(self.num_workers)}
        self.staged.clear()
        self._apply([by_worker[w] for w in range(self.num_workers)])
        self._apply_defaults(by_worker)
        for each in range(self.num_workers):
            self._note_push(each, step)
        return True

    def _note_push(self, worker: int, step: int) -> None:
        self.applied[worker] = step
        self.pulled[worker] = max(step, self.pulled[worker])

    def _apply(self, pushes: Sequence[Gradients]) -> None:
        """Summed by row in order, then applied."""
        for name in pushes[0]:
            table, total = self.tables[name], dict[int, np.ndarray]()
            for gradients in pushes:
                of_table = gradients[name]
                for row_id, gradient in zip(of_table.row_ids.tolist(), of_table.values, strict=True):
                    total[row_id] = total[row_id] + gradient if row_id in total else gradient
            for row_id, gradient in total.items():
                table.apply(table.rows[row_id], gradient, 1 / self.num_workers)

    def _apply_defaults(self, by_worker: Mapping[int, Gradients]) -> None:
        for name in by_worker[0]:
            table = self.tables[name]
            chunks = [by_worker[worker][name].default_gradient for worker in sorted(by_worker)]
            given = [chunk for chunk in chunks if chunk is not None]
            if given:
                table.apply(table.default, np.sum(given, axis=0, dtype=np.float32), 1 / self.num_workers)

    # Advance and restore ------------------------------------------------------------------------------------------

    def after_reselection(self, step: int, frostlines: Mapping[str, Frostline]) -> Tables:
        """The tables as they are when the pass is done."""
        tables = copied(self.tables)
        for name, table in tables.items():
            if table.policy.kind in ("idle", "compact") or name in frostlines:
                table.reselect(step, frostlines.get(name), _nothing_is_capped)
        return tables

    def after_data_pass(self) -> Tables:
        tables = copied(self.tables)
        for table in tables.values():
            table.end_data_pass()
        return tables

    def end_restore(self, step: int, tables: Tables, anew: Collection[str]) -> None:
        """Tables that the cut lacks and nobody wants anew stay what they are: nobody has trained them."""
        self.tables |= tables
        for name in set(anew) - tables.keys():
            self.tables[name] = TableModel(self.tables[name].spec, self.row_ids)
        self.applied, self.pulled = [step] * self.num_workers, [step] * self.num_workers
        self.awaits_restore = False

    # Rows and tables that come and go --------------------------------------------------------------------------------

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        for spec in specs:
            if spec.name not in self.tables:
                self.tables[spec.name] = TableModel(spec, self.row_ids)
            self.dropping = {names for names in self.dropping if spec.name not in names}

    def drop_tables(self, names: Collection[str]) -> None:
        self.end_deletion()
        for name in names:
            del self.tables[name]
        self.dropping.add(frozenset(names))

    def delete_rows(self, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
        """What was there of the row_ids that the shard owns. It looks for the bytes of all."""
        found = {}
        for name, row_ids in ids.items():
            table, distinct = self.tables[name], set(row_ids.tolist())
            found[name] = Erased(**Counter(table.erase(row_id) for row_id in distinct if self.owns[row_id]))
            table.erased |= distinct
            self.erasing.setdefault(name, set()).update(distinct)
        return found

    def end_deletion(self) -> None:
        """All row_ids are here, or no more come: from now on each place that has one of them is to be blanked."""
        self.erasing = {}

    def without_foreign(self) -> Tables:
        """As they are, with those row_ids alone among the erased ones that the shard owns: of others it does not know
        when they come again."""
        tables = copied(self.tables)
        for table in tables.values():
            table.erased = {row_id for row_id in table.erased if self.owns[row_id]}
        return tables

    def tables_of_parts(self, parts: Sequence[Tables]) -> Tables:
        """What this shard has of tables that were cut on others."""
        tables = {name: table for name, table in copied(parts[0]).items() if all(name in part for part in parts)}
        for name, table in tables.items():
            table.erased = set().union(*(part[name].erased for part in parts))
            rows: dict[int, Row] = {}
            counts: dict[int, int] = {}
            for part in parts:
                rows |= part[name].rows
                counts |= part[name].counts
            table.rows = {row_id: copy.copy(row) for row_id, row in rows.items() if self.owns[row_id]}
            table.counts = {row_id: count for row_id, count in counts.items() if self.owns[row_id]}
        return tables


def copied(tables: Tables) -> Tables:
    return {name: table.copy() for name, table in tables.items()}


def _nothing_is_capped(row_id: int) -> bool:
    raise AssertionError("no table of the simulation has a cap")


def expected_rows(table: TableModel) -> dict[int, tuple]:
    """As table_state.rows_of."""
    found: dict[int, tuple] = {}
    for row_id, row in table.rows.items():
        if row.hot:
            found[row_id] = row.heat, "hot", row.values.tobytes(), row.state.tobytes(), row.last_step, row.visits, b""
        elif row.stored is None:
            found[row_id] = row.heat, "initial"
        else:
            found[row_id] = row.heat, "frozen", *row.stored, row.visits
    return found


def expected_waiting(table: TableModel) -> dict[int, int]:
    if table.policy.min_count == 1:
        return {}
    return {row_id: count for row_id, count in table.counts.items() if count and row_id not in table.rows}


def class_of(error: FrostlineError | None) -> str:
    return "nothing" if error is None else type(error).__name__
