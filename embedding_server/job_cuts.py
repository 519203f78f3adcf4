"""JobCuts: the cuts of a shard's jobs. One is written at a time; of each job the last one and what a delta may build on
are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.cut import Cut, CutRequest, Parents, check_parent
from embedding_server.errors import NotReady
from embedding_server.store import CutProgress, Identity

if TYPE_CHECKING:
    from embedding_server.table import Table

_SLICES = 16  # in a call of an Advance, each of 1 to 2 ms


class JobCuts:
    """Thread safety: none; the thread that owns the shard calls."""

    def __init__(self, buckets: np.ndarray, executor: Executor | None, on_event: Callable[[str], None]) -> None:
        self._buckets, self._executor, self._on_event = buckets, executor, on_event
        self._newest: Cut | None = None  # the last one that began
        self._last: dict[str, Cut] = {}  # the last one of each job
        self._parents: dict[str, Parents] = {}  # what a delta may build on, by job, of its running epoch

    @property
    def is_under_way(self) -> bool:
        """A cut is being written."""
        return self._newest is not None and self._newest.is_under_way

    @property
    def is_waiting(self) -> bool:
        """The executor has work of it: slice has more to do afterwards."""
        return self._newest is not None and self._newest.is_waiting

    def last_of(self, job: str) -> Cut | None:
        return self._last.get(job)

    def has(self, request: CutRequest) -> bool:
        """This very cut is under way, or whole."""
        last = self._last.get(request.who.job)
        return last is not None and last.request == request and last.stands

    def make_way(self) -> bool:
        """Another cut can begin. False: one is being written, and a bounded part of it was done or waited for."""
        if self._newest is None or not self._newest.is_under_way:
            return True
        if not self._newest.slice():
            self._newest.wait()
        return False

    def check_parent(self, request: CutRequest) -> None:
        """InvalidInput unless the cut may build on the parent that it names."""
        check_parent(request, self._parents.get(request.who.job, {}))

    def begin(self, request: CutRequest, tables: Mapping[str, Table]) -> None:
        """Of the job's tables; none is under way."""
        job = request.who.job
        parents = self._parents.setdefault(job, {})
        self._newest = self._last[job] = Cut(request, tables, self._buckets, self._executor, self._on_event, parents)

    def progress(self, who: Identity) -> CutProgress:
        """Of the last cut that this epoch of the job began. NotReady if there is none."""
        cut = self._last.get(who.job)
        if cut is None or cut.request.who.epoch != who.epoch:
            raise NotReady(f"job {who.job!r}: epoch {who.epoch} has begun no cut on this shard; call begin_cut first")
        return cut.progress()

    def slice(self) -> bool:
        """A bounded part of the work. False: nothing can be done now."""
        return self._newest is not None and self._newest.slice()

    def free_tables(self) -> bool:
        """No table is kept by a cut any more; else that was a bounded part of what the cut has to do first."""
        if self._newest is None:
            return True
        return not all(self._newest.slice_tables() for _ in range(_SLICES))

    def abandon(self, job: str) -> None:
        """Ends the job's cut that is being written, if there is one, and removes its files."""
        if job in self._last:
            self._last[job].abandon()

    def end_epoch(self, job: str) -> None:
        """Another one has begun: it builds on none of the cuts of before."""
        self.abandon(job)
        self._parents.pop(job, None)

    def close(self) -> None:
        if self._newest is not None:
            self._newest.abandon()
