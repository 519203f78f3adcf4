"""Bounds on what a server process takes on at once. Beyond them a call is refused, with the time to try again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from embedding_server.errors import Overloaded

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Named maxima of one shard server."""

    max_calls: int = 256  # Pull, Push and Lookup calls inside the server; waiting for other workers counts
    max_bytes: int = GIB  # requests not yet run and replies not yet sent, in bytes
    retry_after_ms: int = 50

    @property
    def max_workers(self) -> int:
        """Workers of one job: each may have a Pull and a Push waiting for the others at once."""
        return max(1, self.max_calls // 4)


class Admission:
    """Counts calls and bytes. Thread safety: every method may be called from any thread; `_lock` guards the counters.

    A call that waits for other workers gives its bytes back first: if they kept those workers out, nobody would get on.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._calls = 0
        self._bytes = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Room for one call. Raises Overloaded."""
        limit = self.limits.max_calls
        with self._lock:
            if self._calls >= limit:
                raise self._overloaded(f"max_calls={limit} calls are in the server")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    @contextmanager
    def bytes(self, size: int) -> Iterator[HeldBytes]:
        """Room for `size` bytes until the block ends or they are released. Raises Overloaded; one call alone fits."""
        limit = self.limits.max_bytes
        with self._lock:
            if self._bytes and self._bytes + size > limit:
                raise self._overloaded(f"{self._bytes} bytes are in the server, {size} more pass max_bytes={limit}")
            self._bytes += size
        held = HeldBytes(self, size)
        try:
            yield held
        finally:
            held.release()

    def give_back(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _overloaded(self, reason: str) -> Overloaded:
        after_ms = self.limits.retry_after_ms
        return Overloaded(f"server full: {reason}; try again in {after_ms} ms", after_ms)


class HeldBytes:
    """Bytes that one call holds; owned by the call's thread."""

    def __init__(self, admission: Admission, size: int) -> None:
        self._admission = admission
        self._size = size

    def release(self) -> None:
        """Gives them back; repeating it is harmless."""
        self._admission.give_back(self._size)
        self._size = 0
