"""A shard: the tables of some buckets, as a single-threaded state machine.

Every method must be called by one thread at a time (the server's executor thread, or under InprocStore's lock); each
returns within milliseconds. Calls that must wait for other workers return a future that a later call completes.

The core knows no clock, no network and no threads; files are written only for segments and the epochs.

Invariants:
1. A call that raises, or whose future holds an error, has changed nothing.
2. Effects of Pull and Push follow steps.py: exactly once per (job, worker, step).
3. Default rows see the same gradients in the same order (by step, then worker) on every shard.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from embedding_server import pushes
from embedding_server.advance import Advances
from embedding_server.epochs import load_epochs, save_epochs
from embedding_server.errors import FencedEpoch, InvalidInput, NotReady, TableConflict
from embedding_server.heap import release_free_heap
from embedding_server.hot_limit import give_back_others, rows_under_cap
from embedding_server.hot_path import HotPath
from embedding_server.kernels import choose_backend
from embedding_server.pushes import Push, ShardGradients, check_parts, check_wire_dtype, default_update, update_of
from embedding_server.request_checks import RequestChecks
from embedding_server.scores import check_score
from embedding_server.segments import SETTLED_IN_A_REPORT_BYTES
from embedding_server.slots import MemoryBudget
from embedding_server.spec import TableSpec, differing_fields
from embedding_server.steps import JobSteps
from embedding_server.store import (
    NUM_BUCKETS,
    EpochInfo,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    PlacedRows,
    PushAck,
    ReplyBuffers,
    Rows,
    StoreStats,
    UpdateMode,
    WireDtype,
)
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

__all__ = ["Shard", "ShardGradients"]

T = TypeVar("T")

MAX_STAGED_BYTES = 2 << 30  # parts of one worker's push that wait for the others
MAX_EVENTS = 100
_MOVES_BETWEEN_RELEASES = 1 << 18  # fewer leave little behind, and what is released must be faulted in again


@dataclass(slots=True)
class _Job:
    steps: JobSteps
    staged: dict[int, Push] = field(default_factory=dict)  # by worker
    #: default-row gradients of pipelined pushes, by step and worker, until all workers' are here
    defaults: dict[int, dict[int, dict[str, ShardGradients]]] = field(default_factory=dict)
    waiting_pulls: list[tuple[int, Callable[[], None], Future[Any]]] = field(default_factory=list)


class Shard:
    def __init__(
        self,
        *,
        buckets: np.ndarray | None = None,
        data_dir: Path | None = None,
        memory_limit_bytes: int = 8 << 30,
        backend: str = "auto",
        writer: Executor | None = None,
        threads: int = 1,
    ) -> None:
        """buckets bool[NUM_BUCKETS] (None: all). data_dir None: a temporary folder, removed by `close`.

        threads: that share the tables of a Pull or Push.
        writer: a one-thread executor that writes segment files beside the caller; None: `maintain` writes them itself.
        """
        if memory_limit_bytes < 1 << 20:
            raise InvalidInput(f"memory_limit_bytes={memory_limit_bytes} must be at least {1 << 20} (1 MiB)")
        self.buckets = np.ones(NUM_BUCKETS, np.bool_) if buckets is None else np.asarray(buckets, np.bool_)
        if self.buckets.shape != (NUM_BUCKETS,):
            raise InvalidInput(f"buckets has shape {list(self.buckets.shape)}; it must have {NUM_BUCKETS} entries")
        self._backend = choose_backend(backend)
        self._writer = writer
        self._temporary = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="frostline-")) if data_dir is None else Path(data_dir)
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"data_dir={self.data_dir}: {error}; name a folder that can be made there") from None
        self._budget = MemoryBudget(memory_limit_bytes)
        self._tables: dict[str, Table] = {}
        self._threads = TableThreads(threads)
        self._rows = HotPath(self._threads)
        self._checks = RequestChecks(self._tables, self.buckets)
        self._advances = Advances(self._tables)
        self._jobs: dict[str, _Job] = {}
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._moves_at_release = 0  # rows frozen, thawed, forgotten before the last release_free_heap
        for job, epoch in load_epochs(self.data_dir).items():
            self._jobs[job] = _Job(JobSteps(job))
            self._jobs[job].steps.epoch = epoch

    @property
    def is_in_place(self) -> bool:
        """Hot rows lie in this process, so that pull_in_place and sums work."""
        return self._backend.name == "cpu"

    # Tables -----------------------------------------------------------------------------------------------------------

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """All or none: what is wrong with a spec is found before anything is created."""
        fresh: dict[str, TableSpec] = {}
        for spec in specs:
            known = self._tables[spec.name].spec if spec.name in self._tables else fresh.get(spec.name)
            if known is None:
                check_score(spec)
                rows_under_cap(spec, self.buckets)
                fresh[spec.name] = spec
            elif known != spec:
                raise TableConflict(
                    f"table {spec.name!r} exists with another spec ({differing_fields(known, spec)});"
                    " use the same spec or another name"
                )
        for spec in fresh.values():
            table = self._tables[spec.name] = Table(
                spec,
                backend=self._backend,
                data_dir=self.data_dir,
                budget=self._budget,
                buckets=self.buckets,
                on_event=self._events.append,
                writer=self._writer,
                ask_others=partial(give_back_others, self._tables),
            )
            self._rows.add(table)

    def table_specs(self) -> dict[str, TableSpec]:
        return {name: table.spec for name, table in self._tables.items()}

    # Epochs -----------------------------------------------------------------------------------------------------------

    def current_epoch(self, job: str) -> EpochInfo:
        """The job's epoch here and the last step applied in full; epoch 0 if the job is unknown."""
        return self._jobs[job].steps.info() if job in self._jobs else EpochInfo(0, 0)

    def begin_epoch(self, job: str, num_workers: int, mode: UpdateMode, epoch: int) -> EpochInfo:
        """Fences every earlier epoch of the job: what was staged is dropped, who waits gets FencedEpoch."""
        state = self._jobs.get(job) or _Job(JobSteps(job))
        state.steps.check_begin(num_workers, mode, epoch)
        if not self._temporary:  # persisted before anybody may rely on the fence
            save_epochs(self.data_dir, {**{name: known.steps.epoch for name, known in self._jobs.items()}, job: epoch})
        same_workers = num_workers == state.steps.num_workers
        state.steps.begin(num_workers, mode, epoch)
        self._jobs[job] = state
        fenced = [f for push in state.staged.values() for f in push.waiting]
        fenced += [future for _, _, future in state.waiting_pulls]
        state.staged.clear()
        state.waiting_pulls.clear()
        if not same_workers:
            state.defaults.clear()
        self._advances.abandon(job)
        for future in fenced:
            pushes.fail(future, FencedEpoch(f"job {job!r}: epoch {epoch} has begun; stop this worker", epoch))
        return state.steps.info()

    # Pull -------------------------------------------------------------------------------------------------------------

    def pull(
        self,
        who: Identity,
        step: int,
        ids: Mapping[str, np.ndarray],
        wire_dtype: WireDtype,
        part: int = 0,
        num_parts: int = 1,
        buffers: ReplyBuffers | None = None,
    ) -> Future[dict[str, Rows]]:
        """`buffers` is asked where the rows are to lie when the pull runs; None: in arrays of their own."""
        check_wire_dtype(wire_dtype)

        def read(is_repeat: bool) -> dict[str, Rows]:
            if is_repeat:
                return self._rows.read(ids, wire_dtype, buffers, always_default=True)
            return self._rows.pull(ids, step, wire_dtype, buffers)

        return self._pull_in_order(who, step, ids, part, num_parts, read)

    def pull_in_place(
        self, who: Identity, step: int, ids: Mapping[str, np.ndarray], use: Callable[[Mapping[str, PlacedRows]], None]
    ) -> Future[None]:
        """As pull; use(rows) runs when it is this Pull's turn, inside whatever call that happens in."""

        def read(is_repeat: bool) -> None:
            use(self._rows.read_in_place(ids) if is_repeat else self._rows.pull_in_place(ids, step))

        return self._pull_in_order(who, step, ids, 0, 1, read)

    def _pull_in_order(
        self,
        who: Identity,
        step: int,
        ids: Mapping[str, np.ndarray],
        part: int,
        num_parts: int,
        read: Callable[[bool], T],
    ) -> Future[T]:
        """Checks a Pull and calls read(is_repeat) when it is its turn."""
        job = self._job(who)
        check_parts(part, num_parts)
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
            self._checks.owner(who.job, name)
        future: Future[T] = Future()
        if job.steps.is_repeated_pull(who.worker, step, part, num_parts):
            future.set_result(read(True))
            return future

        def run() -> None:
            # a retry of it may have run while this one waited
            is_repeat = job.steps.is_repeated_pull(who.worker, step, part, num_parts)
            rows = read(is_repeat)
            if not is_repeat:
                for name in ids:
                    self._tables[name].job = who.job
                job.steps.note_pull(who.worker, step, part, num_parts)
            future.set_result(rows)

        job.waiting_pulls.append((step, run, future))
        self._run_waiting_pulls(job)
        return future

    def _run_waiting_pulls(self, job: _Job) -> None:
        progressed = True
        while progressed:
            progressed = False
            for entry in list(job.waiting_pulls):
                step, run, future = entry
                if future.cancelled():
                    job.waiting_pulls.remove(entry)
                elif job.steps.may_pull(step):
                    job.waiting_pulls.remove(entry)
                    try:
                        run()
                    except Exception as error:  # it belongs to this Pull, not to the call that let it run
                        pushes.fail(future, error)
                    progressed = True

    # Push -------------------------------------------------------------------------------------------------------------

    def push(
        self,
        who: Identity,
        step: int,
        gradients: Mapping[str, ShardGradients],
        wire_dtype: WireDtype,
        part: int = 0,
        num_parts: int = 1,
    ) -> Future[PushAck]:
        """A part that is not the last is acknowledged at once, with rows_applied 0; the last applies all of them."""
        job = self._job(who)
        check_parts(part, num_parts)
        check_wire_dtype(wire_dtype)
        future: Future[PushAck] = Future()
        if job.steps.is_repeated_push(who.worker, step):
            future.set_result(PushAck(step, 0, 0, duplicate=True))
            return future
        try:
            push = self._stage(job, who.worker, step, gradients, wire_dtype, part, num_parts)
        except InvalidInput:
            staged = job.staged.get(who.worker)
            if staged is not None and not staged.is_complete:  # the whole push will be sent again
                del job.staged[who.worker]
            raise
        if not push.is_complete:
            future.set_result(PushAck(step, 0, 0, duplicate=False))
            return future
        push.waiting.append(future)
        if job.steps.mode == "sync":
            if len(job.staged) == job.steps.num_workers and all(p.is_complete for p in job.staged.values()):
                self._apply_step(job, step)
        else:
            self._apply_one(job, who.worker)
        self._run_waiting_pulls(job)
        return future

    def _stage(
        self,
        job: _Job,
        worker: int,
        step: int,
        gradients: Mapping[str, ShardGradients],
        wire_dtype: WireDtype,
        part: int,
        num_parts: int,
    ) -> Push:
        """Validates one part and keeps it. A part sent again replaces itself."""
        for name, table_gradients in gradients.items():
            self._checks.gradients(job.steps.job, job.staged, worker, step, name, table_gradients, wire_dtype)
        push = job.staged.get(worker)
        if push is not None and push.is_complete:  # it waits for other workers: this is a retry, and changes nothing
            return push
        if push is None or push.num_parts != num_parts or push.wire_dtype != wire_dtype:
            push = job.staged[worker] = Push(step, num_parts, wire_dtype=wire_dtype)
        if part not in push.parts:
            push.size_bytes += sum(g.row_ids.nbytes + g.values.nbytes for g in gradients.values())
        if push.size_bytes > MAX_STAGED_BYTES:
            raise InvalidInput(
                f"job {job.steps.job!r}, worker {worker}: the push of step {step} holds {push.size_bytes} bytes,"
                f" more than {MAX_STAGED_BYTES}; use a smaller batch"
            )
        # A default gradient may wait for other workers' pushes, long after the caller has reused its array.
        push.parts[part] = {
            name: g if g.default_gradient is None else replace(g, default_gradient=g.default_gradient.copy())
            for name, g in gradients.items()
        }
        return push

    def _apply_step(self, job: _Job, step: int) -> None:
        """sync: sums all workers' gradients per row in worker order and applies each row once."""
        workers = [job.staged[w] for w in range(job.steps.num_workers)]
        waiting = [future for push in workers for future in push.waiting]
        job.staged.clear()
        names = list({name: None for push in workers for part in push.parts.values() for name in part})
        chunks = [[(chunk, push.wire_dtype) for push in workers for chunk in push.chunks(name)] for name in names]
        try:
            defaults = [
                default_update(name, [c for c, _ in of_table if c.default_gradient is not None])
                for name, of_table in zip(names, chunks, strict=True)
            ]
            applied, ignored = self._apply_tables(job, names, chunks, step)
        except InvalidInput as error:  # a sum over the workers overflowed: nothing was applied
            for future in waiting:
                pushes.fail(future, error)
            return
        self._apply_defaults(job, [default for default in defaults if default], step)
        for worker in range(job.steps.num_workers):
            job.steps.note_push(worker, step)
        for future in waiting:
            pushes.complete(future, PushAck(step, applied, ignored, duplicate=False))

    def _apply_one(self, job: _Job, worker: int) -> None:
        """pipelined: applies one worker's push; default rows wait for all workers, so that all shards agree on them."""
        push = job.staged.pop(worker)
        names = list({name: None for part in push.parts.values() for name in part})
        chunks = [[(chunk, push.wire_dtype) for chunk in push.chunks(name)] for name in names]
        applied, ignored = self._apply_tables(job, names, chunks, push.step)
        defaults = {
            name: chunk
            for name, of_table in zip(names, chunks, strict=True)
            for chunk, _ in of_table
            if chunk.default_gradient is not None
        }
        job.steps.note_push(worker, push.step)
        job.defaults.setdefault(push.step, {})[worker] = defaults
        for step in sorted(job.defaults):
            by_worker = job.defaults[step]
            if len(by_worker) < job.steps.num_workers:
                break
            del job.defaults[step]
            for name in {name: None for w in sorted(by_worker) for name in by_worker[w]}:
                gradients_of_name = [by_worker[w][name] for w in sorted(by_worker) if name in by_worker[w]]
                try:
                    update = default_update(name, gradients_of_name)
                except InvalidInput as error:  # the rows are applied and acknowledged by now
                    self._events.append(f"step {step}: {error}; the default row skips this step")
                    continue
                self._apply_defaults(job, [update] if update else [], step)
        for future in push.waiting:
            pushes.complete(future, PushAck(push.step, applied, ignored, duplicate=False))

    def _apply_tables(
        self, job: _Job, names: list[str], chunks: list[list[tuple[ShardGradients, WireDtype]]], step: int
    ) -> tuple[int, int]:
        """(rows applied, rows ignored) over all tables."""
        updates = []
        for name, of_table in zip(names, chunks, strict=True):
            with_rows = [(chunk, dtype) for chunk, dtype in of_table if chunk.row_ids.shape[0]]
            if not with_rows and self._tables[name].decay is not None:
                with_rows = of_table[:1]  # its learning rate is what all hot rows decay by
            if with_rows:
                updates.append(update_of(self._tables[name], with_rows))
        return self._rows.apply(updates, scale=1.0 / job.steps.num_workers, step=step)

    def _apply_defaults(self, job: _Job, updates: list[tuple[str, np.ndarray, float]], step: int) -> None:
        for name, total, learning_rate in updates:
            self._tables[name].apply_default(
                total, scale=1.0 / job.steps.num_workers, learning_rate=learning_rate, step=step
            )

    # Advance ----------------------------------------------------------------------------------------------------------

    def heat_slice(self, who: Identity, step: int, first_bucket: int) -> tuple[dict[str, HeatHistogram], int]:
        """Ranks of the tables of policy `topk` in the buckets from first_bucket on, as many as fit a bounded call.

        Returns the next first_bucket, NUM_BUCKETS when all are counted.
        """
        self._check_barrier(who, step)
        return self._advances.heat_slice(who.job, step, first_bucket)

    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        """All slices at once."""
        self._check_barrier(who, step)
        return self._advances.heat_histograms(who.job, step)

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> tuple[dict[str, Moves], bool]:
        """One slice of the pass; (moves of this slice, done). Call again with the same arguments until done."""
        self._check_barrier(who, step)
        for name, frostline in frostlines.items():
            self._checks.frostline(who.job, name, frostline)
        return self._advances.reselect(who.job, step, frostlines)

    def end_data_pass(self, who: Identity, step: int) -> tuple[dict[str, Moves], bool]:
        """One slice of forgetting what is rare (epoch_end: forget_rare), as reselect."""
        self._check_barrier(who, step)
        return self._advances.end_data_pass(who.job, step)

    def _check_barrier(self, who: Identity, step: int) -> None:
        self._job(who).steps.check_barrier(step)

    # Look-up, statistics, background ----------------------------------------------------------------------------------

    def lookup(
        self, ids: Mapping[str, np.ndarray], wire_dtype: WireDtype, buffers: ReplyBuffers | None = None
    ) -> dict[str, Rows]:
        check_wire_dtype(wire_dtype)
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
        return self._rows.read(ids, wire_dtype, buffers, always_default=False)

    def prefetch(self, ids: Mapping[str, np.ndarray]) -> None:
        """Has the frozen rows among these read from disk beside what follows. A hint, with no other effect."""
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
            self._tables[name].prefetch(row_ids)

    def settle(self, max_bytes: int = SETTLED_IN_A_REPORT_BYTES) -> None:
        """Finishes the background work on the segments of every table that has no more than max_bytes of it."""
        for table in self._tables.values():
            table.settle_segments(max_bytes)

    @property
    def is_being_written(self) -> bool:
        """The writer has work of this shard: maintain has more to do once it is done."""
        return any(table.segments.is_being_written for table in self._tables.values())

    def stats(self) -> StoreStats:
        """Of settled tables, so that figures do not depend on how far the background work is."""
        self.settle()
        return StoreStats({name: table.stats() for name, table in self._tables.items()}, list(self._events))

    def fixed_bytes(self) -> dict[str, tuple[int, int]]:
        """By table, what Table.fixed_bytes gives."""
        return {name: table.fixed_bytes() for name, table in self._tables.items()}

    def mask_slice(self, first_bucket: int) -> tuple[dict[str, MaskInfo], int]:
        """What is hot and what is frozen: parts that add up, each of as many buckets as fit a bounded call.

        Returns the next first_bucket, NUM_BUCKETS when all are counted. The first part settles the tables, as stats.
        """
        if first_bucket == 0:
            self.settle()
        return self._advances.mask_slice(first_bucket)

    def maintain(self) -> bool:
        """One slice of background work of some table: compaction, segment files, merges. True if more is waiting."""
        if any(table.maintain() for table in self._tables.values()):
            return True
        moves = sum(table.moves_frozen + table.moves_thawed + table.moves_forgotten for table in self._tables.values())
        if moves - self._moves_at_release > _MOVES_BETWEEN_RELEASES:
            release_free_heap()
            self._moves_at_release = moves
        return False

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._tables.clear()
        self._threads.close()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    # Checks -----------------------------------------------------------------------------------------------------------

    def _job(self, who: Identity) -> _Job:
        job = self._jobs.get(who.job)
        if job is None or not job.steps.num_workers:
            raise NotReady(f"job {who.job!r}: no epoch has begun on this shard; call BeginEpoch first")
        job.steps.check(who)
        return job
