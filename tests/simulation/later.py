"""An executor without a thread: work waits until the scheduler runs it, or until somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from embedding_server.failpoints import SimulatedCrash


class LaterFuture(Future):  # type: ignore[type-arg]
    """Waiting for it runs the work that is queued before it, and it."""

    def __init__(self, executor: LaterExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        self._executor.run_until(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._executor.run_until(self)
        return super().exception(0)


class LaterExecutor(Executor):
    """One worker's queue. A SimulatedCrash of the work is one of whoever runs it."""

    def __init__(self) -> None:
        self._queue: deque[tuple[LaterFuture, Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **named: Any) -> LaterFuture:
        future = LaterFuture(self)
        self._queue.append((future, lambda: fn(*arguments, **named)))
        return future

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def run_one(self) -> None:
        future, work = self._queue.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except SimulatedCrash:
            raise
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run_until(self, future: LaterFuture) -> None:
        while not future.done() and self._queue:
            self.run_one()

    def drop(self) -> None:
        """What a dead process would have done; who waits for it is dead, too."""
        while self._queue:
            self._queue.popleft()[0].cancel()
