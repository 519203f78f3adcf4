"""Look-ups from a process of its own, one after another at an even pace, and what percentile they took in intervals.

One is sent every `look_up_s`, or when the one before is answered if that is later, as by a thread of an online ranker.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks.capacity_tall import draw_ranks, row_ids_of
from benchmarks.cut_trainee import Size, look_up

Interval = tuple[float, float]  # of time.monotonic(), which all processes of a machine share
_BATCHES = 256


def _run(address: str, size: Size, rows: int, ready: Event, ended: Event, out: Path) -> None:
    from services.shard_client import RemoteStore

    random = np.random.default_rng(1)
    batches = [row_ids_of(np.unique(draw_ranks(random, rows, size.look_up_rows))) for _ in range(_BATCHES)]
    store = RemoteStore([address])
    times: list[Interval] = []
    while not ended.is_set():
        start = time.monotonic()
        look_up(store, batches[len(times) % _BATCHES])
        end = time.monotonic()
        times.append((start, end))
        if len(times) == 20:
            ready.set()
        time.sleep(max(0.0, start + size.look_up_s - end))
    np.save(out, np.array(times))
    store.close()


class LookUps:
    """Look-ups of rows of rank 0 to `rows` while the context lasts; `times` afterwards, float64[n, 2]: begin, end."""

    def __init__(self, address: str, size: Size, rows: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, self._ended, self._out = context.Event(), context.Event(), folder / "look-ups.npy"
        arguments = (address, size, rows, self._ready, self._ended, self._out)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self.times = np.empty((0, 2))

    def __enter__(self) -> LookUps:
        self._process.start()
        if not self._ready.wait(120):
            raise RuntimeError("the process that looks up has not begun within 120 s; see its error above")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._process.join(60)
        if kind is None:
            self.times = np.load(self._out)

    def durations(self, intervals: Sequence[Interval]) -> np.ndarray:
        """Seconds, float64[n], of those under way in one of the intervals at some time."""
        begin, end = self.times.T
        is_within = np.zeros(self.times.shape[0], np.bool_)
        for first, last in intervals:
            is_within |= (begin < last) & (end > first)
        return end[is_within] - begin[is_within]
