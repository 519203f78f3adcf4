"""The one thread that owns a shard: it runs requests one at a time and background work between them.

Thread safety: `run` and `close` may be called from any thread; the Shard is touched by the executor thread alone.

Invariants
1. Work whose caller is gone before its turn is skipped: every request may be repeated, so nothing is lost by it.
2. Background work comes in slices of a few ms (Shard.maintain): at once while no request waits, and after
   MAX_REQUESTS_BETWEEN_SLICES requests if there is always one waiting.
3. A shard call may finish later than it runs (sync mode waits for other workers). `run` hands out its Future; nobody
   cancels that one, because the shard completes it.
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


class ShardExecutor:
    """Runs work on a shard; takes ownership of it and closes it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._queue: queue.SimpleQueue[tuple[Work, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="shard-executor", daemon=True)
        self._thread.start()

    def run(self, work: Work) -> Future:
        """Queues `work(shard)`. The Future holds what it returned or raised once it has run."""
        done: Future = Future()
        self._queue.put((work, done))
        return done

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
        self._shard.close()

    def _idle_s(self) -> float:
        return WRITING_MAINTAIN_S if self._shard.is_being_written else IDLE_MAINTAIN_S

    def _run_one(self, work: Work, done: Future) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work(self._shard))
        except BaseException as error:
            done.set_exception(error)

    def _maintain(self) -> bool:
        try:
            return self._shard.maintain()
        except Exception:
            # A slice of background work that fails leaves the rows where they are; serving goes on.
            log.exception("background work of the shard failed; it is tried again in %.0f s", IDLE_MAINTAIN_S)
            return False
