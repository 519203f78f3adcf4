"""Feeds one worker's loop: reads, pulls rows and pushes gradients beside the dense computation.

    for step, batch in pipeline:        rows of `batch` are there
        ... forward, backward ...
        pipeline.push(learning_rate)    gradients of this step go out
    pipeline.drain()                    every push is acknowledged, nothing is pulled ahead

pipelined   one background thread runs, in this order, push(t-1), then read and pull(t+1), while the caller computes
            step t. So a pull misses exactly the updates of the step before it: staleness one step, never more, and with
            one worker the result does not depend on timing. At most one push is in flight.
sync        the background thread only reads ahead; pull and push happen in the caller's thread and wait for the shards.

Before a barrier step's successor nothing is pulled ahead, so that after `drain()` the shards may re-select.

announces   the batch whose pull comes next is read one step earlier and announced, so that the shards read its frozen
            rows from disk while a step computes: in mode pipelined, during step t, batch t+2 after the pull of t+1; in
            mode sync, t+1. An announcement is no visit and belongs to no step: barriers need not wait for it, and a
            batch that is announced and then not pulled has changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from embedding_server.store import UpdateMode
from trainer.data.batch import Batch

T = TypeVar("T")

_REACH = 2  # steps from the one that computes to the batch that is announced in mode pipelined


class RowsPort(Protocol):
    """What the pipeline needs of an embedding collection; FrostlineEmbeddingBagCollection is one."""

    def announce(self, features: Any) -> None:
        """A hint that `features` will be pulled soon; never raises."""

    def prefetch(self, features: Any) -> None:
        """Pulls the rows of the next training forward."""

    def step(self, learning_rate: float) -> None:
        """Pushes the gradients of the last backward; returns when the shards acknowledged them."""


class Pipeline:
    """Iterates over (step, batch); steps count from `first_step`.

    Thread safety: one thread iterates, pushes and drains. An error of the background thread is raised, once and as it
    was, by the call that comes next; after it the pipeline only can be closed.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        rows: RowsPort,
        mode: UpdateMode,
        is_barrier: Callable[[int], bool],
        max_steps: int | None = None,
        first_step: int = 1,
        announces: bool = False,
    ) -> None:
        self._batches = batches
        self._rows = rows
        self._is_pipelined = mode == "pipelined"
        self._is_barrier = is_barrier
        self._announces = announces
        self._last_step = None if max_steps is None else first_step + max_steps - 1
        self._step = self._read_step = first_step - 1
        self._announced: deque[Batch] = deque()  # mode pipelined: read ahead of their turn; at most _REACH
        self._background = ThreadPoolExecutor(1, thread_name_prefix="frostline-pipeline")
        self._failure: BaseException | None = None
        self._prepared: Future[Batch | None] | None = None
        self._pushed: Future[None] | None = None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        while self._last_step is None or self._step < self._last_step:
            batch = (self._prepared or self._submit(self._prepare)).result()
            self._prepared = None
            if batch is None:
                return
            if not self._is_pipelined:
                self._rows.prefetch(batch.sparse)
            self._step += 1
            if self._may_prepare_next():
                self._prepared = self._submit(self._prepare)
            if self._announces and self._is_pipelined:
                self._submit(partial(self._announce_up_to, self._step + _REACH))
            yield self._step, batch

    def push(self, learning_rate: float) -> None:
        """Sends the gradients of the step that was yielded last."""
        if not self._is_pipelined:
            self._rows.step(learning_rate)
            return
        self._await_push()
        self._pushed = self._submit(lambda: self._rows.step(learning_rate))

    def drain(self) -> None:
        self._await_push()

    def close(self) -> None:
        """Drops what is queued and waits for the call that is under way."""
        self._background.shutdown(wait=True, cancel_futures=True)

    def _may_prepare_next(self) -> bool:
        if self._step == self._last_step:
            return False
        # reading ahead alone touches no shard
        return not self._is_pipelined or not self._is_barrier(self._step)

    def _await_push(self) -> None:
        if self._pushed is not None:
            pushed, self._pushed = self._pushed, None
            pushed.result()

    def _prepare(self) -> Batch | None:
        batch = self._announced.popleft() if self._announced else self._read()
        if batch is not None:
            if self._is_pipelined:
                self._rows.prefetch(batch.sparse)
            elif self._announces:
                self._rows.announce(batch.sparse)
        return batch

    def _announce_up_to(self, step: int) -> None:
        while self._read_step < (step if self._last_step is None else min(step, self._last_step)):
            batch = self._read()
            if batch is None:
                return
            self._rows.announce(batch.sparse)
            self._announced.append(batch)

    def _read(self) -> Batch | None:
        batch = next(self._batches, None)
        if batch is not None:
            self._read_step += 1
        return batch

    def _submit(self, task: Callable[[], T]) -> Future[T]:
        return self._background.submit(self._run, task)

    def _run(self, task: Callable[[], T]) -> T:
        # after a failed push, a pull would only add a second, misleading error
        if self._failure is not None:
            raise self._failure
        try:
            return task()
        except BaseException as error:
            self._failure = error
            raise
