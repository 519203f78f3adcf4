"""Splits one kernel call over a few threads. Kernels release the GIL and never start threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class KernelThreads:
    """Runs the parts of a kernel call on `num_threads` threads, the caller's among them.

    Thread safety: two callers may run at the same time; they share the helper threads.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads - 1, "frostline-rows") if num_threads > 1 else None

    def run(self, part: Callable[[int, int], T]) -> list[T]:
        """[part(0, n), ..., part(n-1, n)] for n threads."""
        if self._helpers is None:
            return [part(0, 1)]
        n = self.num_threads
        others = [self._helpers.submit(part, p, n) for p in range(1, n)]
        return [part(0, n), *(other.result() for other in others)]
