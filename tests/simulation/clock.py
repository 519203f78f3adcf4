"""A virtual clock, and processes whose tasks run on it: `async` functions that wait for one another or for a time.

Nothing sleeps and there are no threads: `run_next` takes the event that is due first and sets the clock to its time.
Events of one time run in the order in which they were made, so a run is a function of its seed alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

from embedding_server.failpoints import SimulatedCrash

T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), what))

    def run_next(self) -> bool:
        """False if nothing will ever happen any more."""
        if not self._events:
            return False
        self.now_s, _, what = heapq.heappop(self._events)
        what()
        return True

    async def sleep(self, seconds: float) -> None:
        done: Promise[None] = Promise()
        self.at(seconds, lambda: done.set(None))
        await done


class Promise(Generic[T]):
    """A value or an error to come. The first one counts."""

    def __init__(self) -> None:
        self.is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    def set(self, value: T) -> None:
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        if not self.is_done:
            self.is_done, self._value, self._error = True, value, error
            for then in self._then:
                then()

    def then(self, what: Callable[[], None]) -> None:
        if self.is_done:
            what()
        else:
            self._then.append(what)

    def result(self) -> T:
        assert self.is_done
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self.is_done:
            yield self
        return self.result()


class Process:
    """Tasks that die together. on_crash: called after a SimulatedCrash of one of them has killed it."""

    def __init__(self, clock: Clock, name: str, on_crash: Callable[[], None] = lambda: None) -> None:
        self.clock, self.name, self.on_crash = clock, name, on_crash
        self.is_dead = False
        self._tasks: list[_Task] = []

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Promise[T]:
        if self.is_dead:
            coroutine.close()
            return Promise()
        task = _Task(self, coroutine)
        self._tasks = [other for other in self._tasks if not other.done.is_done] + [task]
        return task.done

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All at once. When all are over, the first error in order is raised."""
        promises = [self.start(coroutine) for coroutine in coroutines]
        for promise in promises:
            over: Promise[None] = Promise()
            promise.then(lambda over=over: over.set(None))
            await over
        return [promise.result() for promise in promises]

    def kill(self) -> None:
        """Nothing of it happens any more."""
        self.is_dead = True
        for task in self._tasks:
            task.close()
        self._tasks = []


class _Task:
    def __init__(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._process = process
        self._coroutine = coroutine
        self.done: Promise[Any] = Promise()
        process.clock.at(0.0, self._go_on)

    def close(self) -> None:
        if not self._coroutine.cr_running:
            self._coroutine.close()

    def _go_on(self) -> None:
        if self._process.is_dead:
            return
        try:
            waits_for = self._coroutine.send(None)
        except StopIteration as end:
            self.done.set(end.value)
        except SimulatedCrash:
            self._process.kill()
            self._process.on_crash()
        except Exception as error:
            self.done.fail(error)
        else:
            waits_for.then(lambda: self._process.clock.at(0.0, self._go_on))
        if self._process.is_dead:
            self.close()
