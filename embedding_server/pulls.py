"""What becomes of a Pull: its row_ids are checked, and when it is its turn (jobs.py) rows and flags are read.

The first of its kind in a step counts visits, admits and thaws; a repeat reads the rows again and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from embedding_server.hot_path import HotPath
from embedding_server.jobs import Job
from embedding_server.request_checks import RequestChecks
from embedding_server.store import PlacedRows, ReplyBuffers, Rows, WireDtype
from embedding_server.table import Table

T = TypeVar("T")


class Pulls:
    """`tables` is the shard's own dictionary, `rows` holds the same. Thread safety: none; the shard's thread calls."""

    def __init__(self, tables: Mapping[str, Table], rows: HotPath, checks: RequestChecks) -> None:
        self._tables = tables
        self._rows = rows
        self._checks = checks

    def pull(
        self,
        job: Job,
        worker: int,
        step: int,
        ids: Mapping[str, np.ndarray],
        wire_dtype: WireDtype,
        part: int,
        num_parts: int,
        buffers: ReplyBuffers | None,
    ) -> Future[dict[str, Rows]]:
        """As Shard.pull, which has checked who is calling."""

        def read(is_repeat: bool) -> dict[str, Rows]:
            if is_repeat:
                return self._rows.read(ids, wire_dtype, buffers, always_default=True)
            return self._rows.pull(ids, step, wire_dtype, buffers)

        return self._in_order(job, worker, step, ids, part, num_parts, read)

    def pull_in_place(
        self,
        job: Job,
        worker: int,
        step: int,
        ids: Mapping[str, np.ndarray],
        use: Callable[[Mapping[str, PlacedRows]], None],
    ) -> Future[None]:
        """As Shard.pull_in_place."""

        def read(is_repeat: bool) -> None:
            use(self._rows.read_in_place(ids) if is_repeat else self._rows.pull_in_place(ids, step))

        return self._in_order(job, worker, step, ids, 0, 1, read)

    def _in_order(
        self,
        job: Job,
        worker: int,
        step: int,
        ids: Mapping[str, np.ndarray],
        part: int,
        num_parts: int,
        read: Callable[[bool], T],
    ) -> Future[T]:
        """Calls read(is_repeat) when it is the Pull's turn. The tables are the job's from then on."""
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
            self._checks.owner(job.steps.job, name)

        def read_and_own(is_repeat: bool) -> T:
            rows = read(is_repeat)
            if not is_repeat:
                for name in ids:
                    self._tables[name].job = job.steps.job
            return rows

        return job.pull_in_turn(worker, step, part, num_parts, read_and_own)
