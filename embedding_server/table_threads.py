"""Threads that share the tables of one call. They meet in no table, so a table still needs no lock.

A shard process has one thread (more cores: more shards); a store in the trainer's process takes the trainer's number.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np


class TableThreads:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "frostline-tables") if num_threads > 1 else None

    def run(self, starts: np.ndarray, work: Callable[[int, int], None]) -> None:
        """Calls work(first, last) over tables 0 to K on all threads, about equal rows each; returns when all are done.

        starts int64[K+1]: row count before each table. The first error of any thread is raised.
        """
        num_tables = starts.shape[0] - 1
        if self._pool is None or num_tables < 2:
            work(0, num_tables)
            return
        shares = starts[-1] * np.arange(1, self._num_threads) // self._num_threads
        bounds = [0, *np.searchsorted(starts[:-1], shares).tolist(), num_tables]
        pending = [self._pool.submit(work, a, b) for a, b in pairwise(bounds[1:])]
        try:
            work(bounds[0], bounds[1])
        finally:
            for one in pending:
                one.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
