"""The one thread that owns a shard: it runs requests one at a time and background work between them.

Thread safety: `run`, `run_now` and `close` may be called from any thread; the Shard is touched by whoever has the turn,
the lock `_turn`: the executor thread, or a caller of `run_now` while nothing waits for that thread.

Invariants
1. Work whose caller is gone before its turn is skipped: every request may be repeated, so nothing is lost by it.
2. Background work comes in slices of a few ms (Shard.maintain): at once while no request waits, and after
   MAX_REQUESTS_BETWEEN_SLICES requests if there is always one waiting.
3. A shard call may finish later than it runs (sync mode waits for other workers). `run` hands out its Future; nobody
   cancels that one, because the shard completes it.

`run_now` is for look-ups. To hand one to the executor thread and wait for it takes two switches between threads, each
with a wait for the interpreter's lock, and that is more than a small look-up itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from embedding_server.shard import Shard

log = logging.getLogger(__name__)

MAX_REQUESTS_BETWEEN_SLICES = 64
#: with nothing to do, how often maintain() is asked all the same: it retries writes that failed
IDLE_MAINTAIN_S = 1.0
#: likewise while a segment is being written: what waits for it (the next one, a merge) should not wait for longer
WRITING_MAINTAIN_S = 0.02

Work = Callable[[Shard], Any]
#: what run_now returns if it has not run
NOT_NOW = object()


class ShardExecutor:
    """Runs work on a shard; takes ownership of it and closes it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._queue: queue.SimpleQueue[tuple[Work, Future] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # guards the shard and _is_closed
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="shard-executor", daemon=True)
        self._thread.start()

    def run(self, work: Work) -> Future:
        """Queues `work(shard)`. The Future holds what it returned or raised once it has run."""
        done: Future = Future()
        self._queue.put((work, done))
        return done

    def run_now(self, work: Work) -> Any:
        """What `work(shard)` returned, run on this thread; NOT_NOW if other work waits or runs. For short work that
        changes nothing: it gets ahead of background work, and nothing of this thread's is waited for."""
        if not self._queue.empty() or not self._turn.acquire(blocking=False):
            return NOT_NOW
        try:
            if self._is_closed:
                return NOT_NOW
            return work(self._shard)
        finally:
            self._turn.release()

    def close(self, timeout_s: float = 30.0) -> None:
        """Finishes the work queued so far, closes the shard, ends the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the shard's executor thread did not end within %.0f s", timeout_s)

    def _loop(self) -> None:
        more_background = True
        since_slice = 0
        while True:
            try:
                if since_slice >= MAX_REQUESTS_BETWEEN_SLICES:
                    raise queue.Empty
                item = self._queue.get(block=not more_background, timeout=self._idle_s())
            except queue.Empty:
                more_background = self._maintain()
                since_slice = 0
                continue
            if item is None:
                break
            self._run_one(*item)
            since_slice += 1
            more_background = True
        with self._turn:
            self._is_closed = True
            self._shard.close()

    def _idle_s(self) -> float:
        return WRITING_MAINTAIN_S if self._shard.is_being_written else IDLE_MAINTAIN_S

    def _run_one(self, work: Work, done: Future) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            with self._turn:
                result = work(self._shard)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    def _maintain(self) -> bool:
        try:
            with self._turn:
                return self._shard.maintain()
        except Exception:
            # A slice of background work that fails leaves the rows where they are; serving goes on.
            log.exception("background work of the shard failed; it is tried again in %.0f s", IDLE_MAINTAIN_S)
            return False
