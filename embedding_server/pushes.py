"""What becomes of a Push: its parts are checked and staged, then summed, applied and acknowledged together.

    sync        the step is applied when all workers' pushes are here: summed per row in worker order, each row once
    pipelined   each push is applied when it is complete; default rows wait for all workers

So default rows see the same gradients in the same order, by step, then worker, on every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.gradients import Push, ShardGradients, sum_by_row
from embedding_server.hot_path import HotPath, Update
from embedding_server.jobs import Job, complete, fail
from embedding_server.kernels.updates import make_sums
from embedding_server.request_checks import RequestChecks
from embedding_server.store import PushAck, WireDtype
from embedding_server.table import Table

MAX_STAGED_BYTES = 2 << 30  # parts of one worker's push that wait for the others

Chunks = list[tuple[ShardGradients, WireDtype]]  # of one table, in the order in which they are summed


class Pushes:
    """`tables` is the shard's own dictionary, `rows` holds the same. Thread safety: none; the shard's thread calls."""

    def __init__(
        self, tables: Mapping[str, Table], rows: HotPath, checks: RequestChecks, on_event: Callable[[str], None]
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._checks = checks
        self._on_event = on_event

    def push(
        self,
        job: Job,
        worker: int,
        step: int,
        gradients: Mapping[str, ShardGradients],
        wire_dtype: WireDtype,
        part: int,
        num_parts: int,
    ) -> Future[PushAck]:
        """As Shard.push, which has checked who is calling; pulls that this one lets run are run too."""
        future: Future[PushAck] = Future()
        if job.steps.is_repeated_push(worker, step):
            future.set_result(PushAck(step, 0, 0, duplicate=True))
            return future
        try:
            push = self._stage(job, worker, step, gradients, wire_dtype, part, num_parts)
        except InvalidInput:
            staged = job.staged.get(worker)
            if staged is not None and not staged.is_complete:  # the whole push will be sent again
                del job.staged[worker]
            raise
        if not push.is_complete:
            future.set_result(PushAck(step, 0, 0, duplicate=False))
            return future
        push.waiting.append(future)
        if job.steps.mode == "sync":
            if len(job.staged) == job.steps.num_workers and all(p.is_complete for p in job.staged.values()):
                self._apply_step(job, step)
        else:
            self._apply_one(job, worker)
        job.run_waiting_pulls()
        return future

    def _stage(
        self,
        job: Job,
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

    def _apply_step(self, job: Job, step: int) -> None:
        """sync: sums all workers' gradients per row in worker order and applies each row once."""
        workers = [job.staged[w] for w in range(job.steps.num_workers)]
        waiting = [future for push in workers for future in push.waiting]
        job.staged.clear()
        chunks = _chunks_by_table(workers)
        try:
            defaults = [
                _default_update(name, [c for c, _ in of_table if c.default_gradient is not None])
                for name, of_table in chunks.items()
            ]
            applied, ignored = self._apply_rows(job, chunks, step)
        except InvalidInput as error:  # a sum over the workers overflowed: nothing was applied
            for future in waiting:
                fail(future, error)
            return
        for default in defaults:
            self._apply_default(job, default, step)
        for worker in range(job.steps.num_workers):
            job.steps.note_push(worker, step)
        for future in waiting:
            complete(future, PushAck(step, applied, ignored, duplicate=False))

    def _apply_one(self, job: Job, worker: int) -> None:
        """pipelined: applies one worker's push; default rows wait for all workers, so that all shards agree on them."""
        push = job.staged.pop(worker)
        chunks = _chunks_by_table([push])
        applied, ignored = self._apply_rows(job, chunks, push.step)
        job.steps.note_push(worker, push.step)
        job.defaults.setdefault(push.step, {})[worker] = {
            name: chunk
            for name, of_table in chunks.items()
            for chunk, _ in of_table
            if chunk.default_gradient is not None
        }
        self._apply_waiting_defaults(job)
        for future in push.waiting:
            complete(future, PushAck(push.step, applied, ignored, duplicate=False))

    def _apply_waiting_defaults(self, job: Job) -> None:
        """pipelined: those of the steps that all workers have pushed."""
        for step in sorted(job.defaults):
            by_worker = job.defaults[step]
            if len(by_worker) < job.steps.num_workers:
                break
            del job.defaults[step]
            for name in {name: None for w in sorted(by_worker) for name in by_worker[w]}:
                gradients_of_name = [by_worker[w][name] for w in sorted(by_worker) if name in by_worker[w]]
                try:
                    update = _default_update(name, gradients_of_name)
                except InvalidInput as error:  # the rows are applied and acknowledged by now
                    self._on_event(f"step {step}: {error}; the default row skips this step")
                    continue
                self._apply_default(job, update, step)

    def _apply_rows(self, job: Job, chunks: Mapping[str, Chunks], step: int) -> tuple[int, int]:
        """(rows applied, rows ignored) over all tables."""
        updates = []
        for name, of_table in chunks.items():
            with_rows = [(chunk, dtype) for chunk, dtype in of_table if chunk.row_ids.shape[0]]
            if not with_rows and self._tables[name].decay is not None:
                with_rows = of_table[:1]  # its learning rate is what all hot rows decay by
            if with_rows:
                updates.append(_update_of(self._tables[name], with_rows))
        return self._rows.apply(updates, scale=1.0 / job.steps.num_workers, step=step)

    def _apply_default(self, job: Job, update: tuple[str, np.ndarray, float] | None, step: int) -> None:
        if update is not None:
            name, total, rate = update
            scale = 1.0 / job.steps.num_workers
            self._tables[name].default_row.apply(total, scale=scale, learning_rate=rate, step=step)


def _chunks_by_table(pushes: list[Push]) -> dict[str, Chunks]:
    names = list({name: None for push in pushes for part in push.parts.values() for name in part})
    return {name: [(chunk, push.wire_dtype) for push in pushes for chunk in push.chunks(name)] for name in names}


def _update_of(table: Table, chunks: Chunks) -> Update:
    """Chunks of several workers or parts are summed by row, in order."""
    first, dtype = chunks[0]
    if len(chunks) == 1:
        return Update(table, first.row_ids, first.values, dtype, first.learning_rate, first.sums)
    dim = table.spec.dim
    values = [(c.values, d) if c.sums is None else (make_sums(c.sums, dim), "float32") for c, d in chunks]
    row_ids, total = sum_by_row(np.concatenate([chunk.row_ids for chunk, _ in chunks]), values, dim)
    return Update(table, row_ids, total, "float32", first.learning_rate)


def _default_update(name: str, chunks: list[ShardGradients]) -> tuple[str, np.ndarray, float] | None:
    """(table, summed gradient of its default row float32[D], learning rate); None if no chunk has one."""
    if not chunks:
        return None
    total = np.zeros_like(chunks[0].default_gradient)
    for chunk in chunks:
        assert chunk.default_gradient is not None
        total += chunk.default_gradient
    if not np.isfinite(total).all():
        raise InvalidInput(f"table {name!r}: the default row's gradient, summed over the workers, is not finite")
    return name, total, chunks[0].learning_rate
