"""Bugs to plant in the code under test, one at a time: proof that the simulation would find them.

Each is a mistake that somebody could make, in the code where it would be made. The code itself knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from embedding_server import cut
from embedding_server.changes import Changes
from embedding_server.gradients import ShardGradients
from embedding_server.index import FROZEN_BIT, Index
from embedding_server.pushes import Pushes
from embedding_server.segments import SegmentSet
from embedding_server.shard import Shard
from embedding_server.snapshot_format import RECORD, FileRecord, ShardRecord, write_sealed_json
from embedding_server.steps import JobSteps
from embedding_server.store import Identity
from embedding_server.table import Table
from embedding_server.table_cut import TableCut


@contextmanager
def lost_dedup() -> Iterator[None]:
    """A Push that was applied counts as new when it comes again."""
    real = JobSteps.is_repeated_push

    def is_repeated_push(self: JobSteps, worker: int, step: int) -> bool:
        return real(self, worker, step) and step < self.applied[worker]

    with mock.patch.object(JobSteps, "is_repeated_push", is_repeated_push):
        yield


@contextmanager
def wrong_slot() -> Iterator[None]:
    """A Push goes to the slots that some Pull found, though rows have left theirs since."""

    def slots_of_pull(self: Table, row_ids: np.ndarray) -> np.ndarray | None:
        for pulled, slots, _ in self._pulled:
            if np.array_equal(pulled, row_ids):
                return slots
        return None

    with mock.patch.object(Table, "slots_of_pull", slots_of_pull):
        yield


@contextmanager
def stale_pre_image() -> Iterator[None]:
    """A cut writes rows as they are by then, and not as they were when it began."""
    with mock.patch.object(TableCut, "preserve", return_value=None):
        yield


@contextmanager
def stale_delta() -> Iterator[None]:
    """Nobody notes which rows a Push changes, so a delta leaves them to its parent."""
    with mock.patch.object(Changes, "note", return_value=None):
        yield


@contextmanager
def early_manifest() -> Iterator[None]:
    """shard.json is on disk before the files that it vouches for."""

    def publish(folder: Path, tables: list[TableCut], record: ShardRecord) -> FileRecord:
        written = write_sealed_json(folder / RECORD, record.model_dump(mode="json"))
        for table in tables:
            for file in table._files:
                file.publish()
        return written

    with mock.patch.object(cut, "_publish", publish):
        yield


@contextmanager
def cold_accumulator_at_thaw() -> Iterator[None]:
    """A row that thaws begins with the accumulator of a new one."""
    real = SegmentSet.read_all

    def read_all(self: SegmentSet, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, accumulators, visits = real(self, locations)
        return rows, np.zeros_like(accumulators), visits

    with mock.patch.object(SegmentSet, "read_all", read_all):
        yield


@contextmanager
def cold_accumulator_at_restore() -> Iterator[None]:
    """Frozen rows lose their accumulators when a cut is restored."""
    real = SegmentSet.adopt

    def adopt(self: SegmentSet, segment: Any, *, is_cold: bool) -> int:
        return real(self, segment, is_cold=True)

    with mock.patch.object(SegmentSet, "adopt", adopt):
        yield


@contextmanager
def diverging_default_rows() -> Iterator[None]:
    """A default gradient counts only on shards that the Push has rows for."""
    real = Pushes.push

    def push(
        self: Pushes, job: Any, worker: int, step: int, gradients: Mapping[str, ShardGradients], *rest: Any
    ) -> Any:
        kept = {n: g if g.row_ids.size else replace(g, default_gradient=None) for n, g in gradients.items()}
        return real(self, job, worker, step, kept, *rest)

    with mock.patch.object(Pushes, "push", push):
        yield


@contextmanager
def half_deletion() -> Iterator[None]:
    """Rows that are deleted leave the index, and nobody looks for them in segments."""
    with mock.patch.object(SegmentSet, "erase", return_value=None):
        yield


@contextmanager
def revived_row() -> Iterator[None]:
    """A row that is deleted while it is frozen stays in the index, and a look-up finds it."""
    real = Index.take_out

    def take_out(self: Index, row_ids: np.ndarray) -> int:
        entries, locations, _, _ = self.locate(row_ids)
        return real(self, row_ids[(entries == 0) | ((locations & FROZEN_BIT) == 0)])

    with mock.patch.object(Index, "take_out", take_out):
        yield


@contextmanager
def early_drop() -> Iterator[None]:
    """A drop is acknowledged after its first slice, while a cut may still keep the table."""
    real = Shard.drop_tables

    def drop_tables(self: Shard, who: Identity, step: int, names: Sequence[str]) -> bool:
        real(self, who, step, names)
        return True

    with mock.patch.object(Shard, "drop_tables", drop_tables):
        yield


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        lost_dedup,
        wrong_slot,
        stale_pre_image,
        stale_delta,
        early_manifest,
        cold_accumulator_at_thaw,
        cold_accumulator_at_restore,
        diverging_default_rows,
        half_deletion,
        revived_row,
        early_drop,
    )
}
