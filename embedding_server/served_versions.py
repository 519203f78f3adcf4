"""Versions: what is served, replaced while it is read.

    versions = Versions(first)
    with versions.pinned() as version: ...     any thread; it stays as it is until the block ends
    versions.replace(second)                   at once for whoever pins from now on

The old version is closed by whoever leaves it last, so beside the one that is served there are only those that calls
under way still read. Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from embedding_server.errors import StoreUnavailable


class Closable(Protocol):
    def close(self) -> None: ...


V = TypeVar("V", bound=Closable)


class _Counted(Generic[V]):
    def __init__(self, version: V) -> None:
        self.version = version
        self.readers = 1  # whoever pinned it, and Versions itself as long as it is the one


class Versions(Generic[V]):
    """Takes ownership of each version. Invariant: a version is closed once, when its readers are 0."""

    def __init__(self, version: V) -> None:
        self._lock = threading.Lock()  # guards the two below, and readers
        self._current: _Counted[V] | None = _Counted(version)
        self._open = 1

    @property
    def num_open(self) -> int:
        """Versions that are not closed yet."""
        return self._open

    @contextmanager
    def pinned(self) -> Iterator[V]:
        """StoreUnavailable after close."""
        with self._lock:
            counted = self._current
            if counted is None:
                raise StoreUnavailable("the server is shutting down; try again at another one")
            counted.readers += 1
        try:
            yield counted.version
        finally:
            self._leave(counted)

    def replace(self, version: V) -> None:
        with self._lock:
            old, self._current = self._current, _Counted(version)
            self._open += 1
        if old is not None:
            self._leave(old)

    def close(self) -> None:
        """Nobody may pin any more; whoever has pinned goes on."""
        with self._lock:
            old, self._current = self._current, None
        if old is not None:
            self._leave(old)

    def _leave(self, counted: _Counted[V]) -> None:
        with self._lock:
            counted.readers -= 1
            if counted.readers:
                return
            self._open -= 1
        counted.version.close()
