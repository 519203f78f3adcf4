"""Threads that share the work of one call: whole tables, so that a table needs no lock, or parts of a kernel.

A shard process has one thread (more cores: more shards); a store in the trainer's process takes the trainer's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class TableThreads:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "frostline-tables") if num_threads > 1 else None

    def run(self, sizes: Sequence[int] | np.ndarray, work: Callable[[np.ndarray], None]) -> None:
        """Calls work(tables) on every thread, tables an int64 array of numbers below K, each table in one of them.

        sizes [K]: how much there is to do for each table. Returns when all are done; raises any thread's error.
        """
        shares = shared_out(sizes, self._num_threads)
        self.run_parts(lambda part, parts: work(shares[part]))

    def run_parts(self, work: Callable[[int, int], None]) -> None:
        """work(0, n), ..., work(n-1, n) on n threads."""
        n = self._num_threads
        pending = [self._pool.submit(work, part, n) for part in range(1, n)] if self._pool is not None else []
        try:
            work(0, n)
        finally:
            for one in pending:
                one.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def shared_out(sizes: Sequence[int] | np.ndarray, parts: int) -> list[np.ndarray]:
    """Numbers of the tables of each part, rising, int64: the largest first, each to the part that has least so far."""
    if parts == 1:
        return [np.arange(len(sizes))]
    loads = [0] * parts
    shares: list[list[int]] = [[] for _ in range(parts)]
    amounts = [int(size) for size in sizes]
    for k in sorted(range(len(amounts)), key=lambda k: -amounts[k]):
        part = loads.index(min(loads))
        loads[part] += amounts[k]
        shares[part].append(k)
    return [np.array(sorted(share), np.int64) for share in shares]
