"""A Shard beside its model: every call goes to both, and what comes of it must be the same, rows included.

It has the methods that services/shard_calls.py calls, so the server's own functions run on it. `check` compares all
that the shard holds; the simulation calls it after every operation. A Violation says what differs.

While a pass (re-selection, end of a data pass) goes on in slices, each row may be as before or as after it. While a
restore goes on nothing is compared: the tables are being filled, and no Pull can see them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from embedding_server.errors import FencedEpoch, FrostlineError
from embedding_server.gradients import ShardGradients
from embedding_server.hints import Hint
from embedding_server.lookup import TableQuery
from embedding_server.segment_reader import MappedSegment
from embedding_server.segment_writer import segment_prefix
from embedding_server.shard import Shard
from embedding_server.snapshot_format import MANIFEST
from embedding_server.spec import TableSpec
from embedding_server.store import (
    DEFAULT,
    FOUND,
    TRAINABLE,
    CutProgress,
    EpochInfo,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    Moves,
    PushAck,
    Rows,
    UpdateMode,
)
from embedding_server.table import Table
from tests.embedding_server.looked_up import look_up
from tests.embedding_server.table_model import TableModel
from tests.embedding_server.table_state import rows_of, waiting_of
from tests.simulation.shard_model import (
    JOB,
    ShardModel,
    Tables,
    class_of,
    expected_rows,
    expected_waiting,
)

T = TypeVar("T")
_SEEN = TRAINABLE | DEFAULT | FOUND


class Violation(AssertionError):
    """The code under test did what it must not."""


class CutBook:
    """What each part of each cut must hold, noted when the shard begins it."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, tuple[int, int, Tables]]] = {}  # by folder and part: num_parts, step, tables

    def note(self, folder: Path, part: int, num_parts: int, step: int, tables: Tables) -> None:
        """tables are the book's from here on."""
        self._parts.setdefault(folder.name, {})[part] = num_parts, step, tables

    def parts_of(self, folder: Path) -> tuple[int, list[Tables]]:
        """(step, tables by part) of a whole cut."""
        parts = self._parts.get(folder.name, {})
        steps = {step for _, step, _ in parts.values()}
        numbers = {num_parts for num_parts, _, _ in parts.values()}
        if len(steps) != 1 or numbers != {len(parts)}:
            raise Violation(f"{folder.name} has a manifest, but its parts are of steps {steps}: {sorted(parts)}")
        return steps.pop(), [parts[part][2] for part in sorted(parts)]


@dataclass(frozen=True)
class _Waiting:
    """A Pull, or a Push in mode sync, that was not refused."""

    who: Identity
    step: int
    future: Future[Any]
    ids: Mapping[str, np.ndarray]


class CheckedShard:
    def __init__(self, shard: Shard, model: ShardModel, cuts: CutBook, is_disk_failing: Callable[[], bool]) -> None:
        """is_disk_failing: an error was planted during this operation."""
        self.shard, self.model = shard, model
        self._cuts = cuts
        self._is_disk_failing = is_disk_failing
        self._pulls: list[_Waiting] = []  # that wait for their turn
        self._pushes: list[_Waiting] = []
        self._ran: list[_Waiting] = []  # pulls that ran in this operation, in order
        self._pass: tuple[tuple[Any, ...], Tables] | None = None  # its key, and the tables after it
        self._had_trouble = False  # rows may have stayed hot because segments could not be written
        self.is_restoring = False
        self.default_rows: dict[str, tuple[bytes, bytes]] = {}  # by table, as of the last check

    @property
    def buckets(self) -> np.ndarray:
        return self.shard.buckets

    def table_specs(self) -> dict[str, TableSpec]:
        return self.shard.table_specs()

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        self.shard.create_tables(specs)
        self.model.create_tables(specs)

    def current_epoch(self, job: str) -> EpochInfo:
        return self.shard.current_epoch(job)

    def maintain(self) -> bool:
        return self.shard.maintain()

    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool = False
    ) -> EpochInfo:
        expected = _tried(lambda: self.model.check_begin(epoch))
        info = self._agreed(
            "begin_epoch", expected, lambda: self.shard.begin_epoch(job, num_workers, mode, epoch, will_restore)
        )
        self.model.begin_epoch(num_workers, mode, epoch, will_restore)
        self._settle_pass()
        for waiting in (*self._pulls, *self._pushes):
            if not isinstance(waiting.future.exception(0), FencedEpoch):
                raise Violation(f"{waiting.who}, step {waiting.step} still waits in an epoch that is over")
        self._pulls, self._pushes, self._ran = [], [], []
        return info

    # Pull and Push ------------------------------------------------------------------------------------------------

    def pull(self, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> Future[dict[str, Rows]]:
        expected = _tried(lambda: self.model.is_repeated_pull(who, step, ids))
        if expected is False:
            self._settle_pass()  # it cannot go on after this
        future = self._agreed("pull", expected, lambda: self.shard.pull(who, step, ids, "float32"))
        waiting = _Waiting(who, step, future, ids)
        if future.done():
            self._ran.insert(0, waiting)  # it let the others run
        else:
            self._pulls.append(waiting)
            future.add_done_callback(lambda _: self._ran.append(waiting))
        self._follow_pulls()
        return future

    def push(self, who: Identity, step: int, gradients: Mapping[str, ShardGradients]) -> Future[PushAck]:
        expected = _tried(lambda: self.model.is_repeated_push(who, step))
        if expected is False:
            self._settle_pass()
        future = self._agreed("push", expected, lambda: self.shard.push(who, step, gradients, "float32"))
        self._pushes.append(_Waiting(who, step, future, {}))
        if expected is True:
            self._check_acks(lambda push: push.future is future, duplicate=True)
        elif self.model.push(who.worker, step, gradients):
            self._check_acks(lambda push: push.step == step, duplicate=False)
        early = [push for push in self._pushes if push.future.done()]
        if early:
            raise Violation(f"push of {early[0].who}, step {early[0].step} is acknowledged before it is applied")
        self._follow_pulls()
        return future

    def _check_acks(self, is_meant: Callable[[_Waiting], bool], *, duplicate: bool) -> None:
        for push in [push for push in self._pushes if is_meant(push)]:
            if not push.future.done():
                raise Violation(f"push of {push.who}, step {push.step} is not acknowledged")
            ack = push.future.result(0)
            if (ack.step, ack.rows_ignored, ack.duplicate) != (push.step, 0, duplicate):
                raise Violation(f"push of {push.who}, step {push.step}: {ack}, which should say duplicate={duplicate}")
            self._pushes.remove(push)

    def _follow_pulls(self) -> None:
        """Does in the model what the pulls of this operation did, in their order, and compares what they read."""
        ran, self._ran = self._ran, []
        for pull in ran:
            self._pulls = [other for other in self._pulls if other is not pull]
            model, worker = self.model, pull.who.worker
            if pull.step > model.pulled[worker]:
                if pull.step != model.pulled[worker] + 1 or not model.may_pull(pull.step):
                    raise Violation(f"pull of {pull.who}, step {pull.step} ran too early; pulled {model.pulled}")
                model.pull(worker, pull.step, pull.ids)
            if self._pass is None:  # else a repeat that comes late reads each row as before or as after
                self._check_reply(pull.ids, pull.future.result(0), reads_default=True)
        for pull in self._pulls:
            if self.model.may_pull(pull.step):
                raise Violation(f"pull of {pull.who}, step {pull.step} waits though its turn has come")

    def lookup(self, ids: Mapping[str, np.ndarray]) -> dict[str, Rows]:
        expected = _tried(lambda: self.model.check_tables(ids.keys()))
        rows = self._agreed("lookup", expected, lambda: self.shard.lookup(ids, "float32"))
        if not self.is_restoring and self._pass is None:
            self._check_reply(ids, rows, reads_default=False)
        if not self.is_restoring and not self._is_disk_failing():
            self._check_served(ids, rows)
        return rows

    def _check_served(self, ids: Mapping[str, np.ndarray], rows: Mapping[str, Rows]) -> None:
        """What EmbeddingLookup sends of these rows, as stored, is what the shard reads."""
        queries = [TableQuery(name, row_ids) for name, row_ids in ids.items()]
        for query, answer in zip(queries, look_up(self.shard.lookups, queries, "stored"), strict=True):
            read = rows[query.table]
            if answer.values.tobytes() != read.values.tobytes() or ((answer.flags ^ read.flags) & _SEEN).any():
                raise Violation(f"table {query.table} is served otherwise than it is read")

    def prefetch(self, ids: Mapping[str, np.ndarray]) -> None:
        expected = _tried(lambda: self.model.check_tables(ids.keys()))
        self._agreed("prefetch", expected, lambda: Hint(ids).run(lambda advance: advance(self.shard)))

    def _check_reply(self, ids: Mapping[str, np.ndarray], rows: Mapping[str, Rows], *, reads_default: bool) -> None:
        for name, row_ids in ids.items():
            table = self.model.tables[name]
            for i, row_id in enumerate(row_ids.tolist()):
                values, flags = _as_read(table, row_id, reads_default)
                got = rows[name].values[i].tobytes(), int(rows[name].flags[i]) & _SEEN
                if got != (values.tobytes(), flags):
                    raise Violation(
                        f"table {name}, row {row_id} reads {rows[name].values[i]}, {got[1]}, not {values}, {flags}"
                    )

    # Advance ------------------------------------------------------------------------------------------------------

    def heat_slice(self, who: Identity, step: int, first_bucket: int) -> tuple[dict[str, HeatHistogram], int]:
        expected = _tried(lambda: self.model.check_barrier(who, step))
        return self._agreed("heat_slice", expected, lambda: self.shard.heat_slice(who, step, first_bucket))

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> tuple[dict[str, Moves], bool]:
        key = "re-selection", step, *sorted(frostlines.items())
        return self._slice_of_pass(
            who,
            step,
            key,
            frostlines.keys(),
            lambda: self.model.after_reselection(step, frostlines),
            lambda: self.shard.reselect(who, step, frostlines),
        )

    def end_data_pass(self, who: Identity, step: int) -> tuple[dict[str, Moves], bool]:
        return self._slice_of_pass(
            who,
            step,
            ("end of data pass", step),
            (),
            self.model.after_data_pass,
            lambda: self.shard.end_data_pass(who, step),
        )

    def _slice_of_pass(
        self,
        who: Identity,
        step: int,
        key: tuple[Any, ...],
        tables: Collection[str],
        after: Callable[[], Tables],
        work: Callable[[], tuple[dict[str, Moves], bool]],
    ) -> tuple[dict[str, Moves], bool]:
        expected = _tried(lambda: self.model.check_barrier(who, step, tables))
        if expected is None and (self._pass is None or self._pass[0] != key):
            self._settle_pass()
            self._had_trouble = self._is_write_failing()
            self._pass = key, after()
        moves, done = self._agreed(str(key[0]), expected, work)
        self._had_trouble |= self._is_disk_failing() or self._is_write_failing()
        if done:
            if self._had_trouble:
                self._settle_pass()
            else:
                assert self._pass is not None
                self.model.tables, self._pass = self._pass[1], None
        return moves, done

    def _is_write_failing(self) -> bool:
        return any(table.segments.is_write_failing for table in self.shard._tables.values())

    def _settle_pass(self) -> None:
        """A pass ended where it stood: each row is as before or as after."""
        if self._pass is None:
            return
        for name, after in self._pass[1].items():
            table, before = self.shard._tables[name], self.model.tables[name]
            found, done = rows_of(table), expected_rows(after)
            for row_id, was in expected_rows(before).items():
                if found.get(row_id) == was:
                    continue
                if row_id in done:
                    before.rows[row_id] = after.rows[row_id]
                else:
                    before.forget(row_id)
            before.frostline = table.frostline
        self._pass = None

    # Rows and tables that go --------------------------------------------------------------------------------------

    def delete_rows(
        self, who: Identity, step: int, ids: Mapping[str, np.ndarray], *, is_last: bool
    ) -> tuple[dict[str, Erased], bool]:
        expected = _tried(lambda: self.model.check_barrier(who, step, ids.keys()))
        if expected is None:
            self._settle_pass()
        erased, done = self._agreed(
            "delete_rows", expected, lambda: self.shard.delete_rows(who, step, ids, is_last=is_last)
        )
        found = self.model.delete_rows(ids) if done else {}
        if erased != found:
            raise Violation(f"delete_rows: erased {erased}, not {found}")
        if done and is_last:
            self.model.end_deletion()
        return erased, done

    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> bool:
        """A repeat that comes late, of a drop that is done, finds the tables unknown."""
        key, model = frozenset(names), self.model
        expected = _tried(lambda: model.check_barrier(who, step, () if key in model.dropping else names))
        if expected is None and key not in model.dropping:
            self._settle_pass()
        done = self._agreed("drop_tables", expected, lambda: self.shard.drop_tables(who, step, names))
        if not key & self.shard._tables.keys() and key not in model.dropping:
            model.drop_tables(names)
        if done:
            self._check_dropped(key)
            model.dropping.remove(key)
        return done

    def _check_dropped(self, names: frozenset[str]) -> None:
        """Whoever dropped them is told that they are gone."""
        left = names & self.shard._tables.keys()
        if left:
            raise Violation(f"drop of {sorted(left)} is acknowledged, and they are still here")
        prefixes = tuple(segment_prefix(name) for name in names)
        files = [path.name for path in self.shard.data_dir.rglob("*") if path.name.startswith(prefixes)]
        if files and not any("cannot delete" in event for event in self.shard._events):
            raise Violation(f"drop of {sorted(names)} is acknowledged, and {files} are still here")

    # Cuts and restores --------------------------------------------------------------------------------------------

    def begin_cut(
        self, who: Identity, step: int, folder: Path, part: int, num_parts: int, parent: Path | None = None
    ) -> bool:
        last = self.shard._cuts.last_of(JOB)
        expected = _tried(lambda: self.model.check_barrier(who, step))

        def work() -> bool:
            return self.shard.begin_cut(who, step, folder, part, num_parts, parent)

        # A repeat may come late; and what a shard may build a delta on, it knows better than whoever asks.
        may_refuse = (folder / MANIFEST).exists() or parent is not None
        done = work() if expected is None and may_refuse else self._agreed("begin_cut", expected, work)
        if self.shard._cuts.last_of(JOB) is not last:
            self._settle_pass()
            self._cuts.note(folder, part, num_parts, step, self.model.without_foreign())
        return done

    def cut_progress(self, who: Identity) -> CutProgress:
        return self.shard.cut_progress(who)

    def abandon_cut(self, who: Identity) -> None:
        self._agreed("abandon_cut", _tried(lambda: self.model.check(who)), lambda: self.shard.abandon_cut(who))

    def restore(self, who: Identity, folder: Path, anew: Collection[str] = ()) -> bool:
        expected = _tried(lambda: self.model.check(who, to_restore=True))
        self.is_restoring |= expected is None
        if (
            expected is None and not (folder / MANIFEST).exists()
        ):  # a worker that is fenced by now had removed it before
            return self.shard.restore(who, folder, anew)
        done = self._agreed("restore", expected, lambda: self.shard.restore(who, folder, anew))
        if done:
            step, parts = self._cuts.parts_of(folder)
            self.model.end_restore(step, self.model.tables_of_parts(parts), anew)
            self.is_restoring = False
        return done

    # Comparing ----------------------------------------------------------------------------------------------------

    def _agreed(self, call: str, expected: Any, work: Callable[[], T]) -> T:
        """What the shard does. A planted error of the disk may be answered by any error, and changes nothing."""
        error: FrostlineError | None = expected if isinstance(expected, FrostlineError) else None
        try:
            result = work()
        except FrostlineError as got:
            if class_of(got) != class_of(error) and not self._is_disk_failing():
                raise Violation(f"{call}: {type(got).__name__} ({got}), expected {class_of(error)}") from got
            raise
        if error is not None:
            raise Violation(f"{call} should be refused with {class_of(error)}")
        return result

    def check(self) -> None:
        """All that the shard holds is what the model holds."""
        self._check_steps()
        if self.is_restoring:
            return
        if self.model.tables.keys() != self.shard._tables.keys():
            raise Violation(f"the tables are {[*self.shard._tables]}, not {[*self.model.tables]}")
        self.default_rows = {}
        for name, of_model in self.model.tables.items():
            table = self.shard._tables[name]
            after = self._pass[1].get(name) if self._pass is not None else None
            _check_erased(name, table, of_model.erased - self.model.erasing.get(name, set()))
            _check_rows(name, rows_of(table), expected_rows(of_model), after and expected_rows(after))
            default = table.default_row.read()[0].tobytes(), table.default_row.read_state()[0].tobytes()
            self.default_rows[name] = default
            if default != (of_model.default.values.tobytes(), of_model.default.state.tobytes()):
                raise Violation(f"table {name}: default row {table.default_row.read()}, not {of_model.default.values}")
            if waiting_of(table) != expected_waiting(of_model) and after is None:
                raise Violation(f"table {name}: waiting {waiting_of(table)}, not {expected_waiting(of_model)}")

    def _check_steps(self) -> None:
        job, model = self.shard._jobs._jobs.get(JOB), self.model
        if job is None or not model.num_workers:
            return
        steps = job.steps
        found = steps.epoch, steps.num_workers, steps.mode, steps.is_awaiting_restore
        if found != (model.epoch, model.num_workers, model.mode, model.awaits_restore):
            raise Violation(f"the epoch is {found}")
        if not self.is_restoring and (steps.applied, steps.pulled) != (model.applied, model.pulled):
            raise Violation(
                f"applied {steps.applied}, pulled {steps.pulled}; should be {model.applied}, {model.pulled}"
            )


def _check_erased(name: str, table: Table, erased: set[int]) -> None:
    """No segment has them any more but those that are known to be looked through yet."""
    segments = table.segments
    for slot in np.flatnonzero(segments._slots.rows).tolist() if erased else ():
        if not segments.is_erasing(slot):
            stage = segments.stage_of(slot)
            arrays = stage.arrays if isinstance(stage, MappedSegment) else stage.arrays()
            left = erased.intersection(arrays.row_ids.tolist())
            if left:
                raise Violation(f"table {name}: deleted rows {sorted(left)} are left in a segment")


def _tried(work: Callable[[], T]) -> T | FrostlineError:
    try:
        return work()
    except FrostlineError as error:
        return error


def _as_read(table: TableModel, row_id: int, reads_default: bool) -> tuple[np.ndarray, int]:
    row = table.rows.get(row_id)
    if row is not None:
        return row.values, TRAINABLE | FOUND if row.hot else FOUND
    if reads_default or table.policy.min_count > 1:
        return table.default.values, DEFAULT
    return np.zeros_like(table.default.values), 0


def _check_rows(
    name: str, found: Mapping[int, tuple], expected: Mapping[int, tuple], after: Mapping[int, tuple] | None
) -> None:
    if found == expected:
        return
    for row_id in found.keys() | expected.keys():
        allowed = [expected.get(row_id)] if after is None else [expected.get(row_id), after.get(row_id)]
        if found.get(row_id) not in allowed:
            raise Violation(f"table {name}, row {row_id} is {found.get(row_id)}, not {' or '.join(map(str, allowed))}")
