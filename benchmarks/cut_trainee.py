"""One worker that fills a table, trains it by Zipf traffic and takes its cuts: what benchmarks.cuts measures.

Rank r of the rows is drawn with Zipf's law (exponent 1.05, capacity_tall.draw_ranks). The dense part that a cut copies
is that of the DLRM of the other benchmarks, 512-256-64 and 512-512-256-1, with Adam's state.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.capacity_tall import draw_ranks, row_ids_of
from embedding_server.snapshot_format import OBJECTS
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, CutProgress, EmbeddingStore, Identity, RoutedIds, TableGradients, TableStats
from trainer.dense_state import capture
from trainer.snapshots import CutName

TABLE, JOB = "rows", "cuts"
NUM_DENSE, NUM_FEATURES = 13, 26
Policy = Literal["off", "idle"]


@dataclass(frozen=True)
class Size:
    """Of one table on one shard, and of its traffic."""

    rows: int = 5_000_000
    dim: int = 64
    new_per_step: int = 100_000
    draws_per_step: int = 65_536
    idle_steps: int = 60  # of that traffic: what it does not name in so many steps is frozen when cuts begin
    step_s: float = 0.1  # from one step to the next, as a dense part of 90 ms would have it
    look_up_rows: int = 256
    look_up_s: float = 0.004  # from one look-up to the next
    cuts: int = 3  # under each load
    least_s: float = 2.0  # of the traffic before a cut, which is as long as the cut before


def dense_part() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Layers without tables, after one step, so that Adam has its state."""
    pairs = NUM_FEATURES * (NUM_FEATURES + 1) // 2
    widths = [(NUM_DENSE, 512, 256, 64), (64 + pairs, 512, 512, 256, 1)]
    layers = [torch.nn.Linear(a, b) for stack in widths for a, b in pairwise(stack)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


class Trainee:
    """Use from one thread. Rows of rank 0 to `seen` exist."""

    def __init__(self, store: EmbeddingStore, size: Size, policy: Policy) -> None:
        self.store, self.size, self.seen, self.step = store, size, 0, 0
        self._random = np.random.default_rng(0)
        idle = {"idle_steps": size.idle_steps, "frozen_bits": 4, "control_fraction": 0.0} if policy == "idle" else {}
        self.spec = TableSpec(
            name=TABLE,
            dim=size.dim,
            optimizer=OptimizerSpec(kind="rowwise_adagrad"),
            policy=PolicySpec(kind=policy, **idle),
        )
        store.create_tables([self.spec])
        self.who = Identity(JOB, store.begin_epoch(JOB, 1, "sync").epoch, 0)
        most = max(size.new_per_step, size.draws_per_step)
        self._gradients = self._random.standard_normal((most, size.dim), np.float32) * np.float32(0.01)
        self._model, self._optimizer = dense_part()
        self._rng_states = torch.get_rng_state()[None].clone()

    def train(self, row_ids: np.ndarray) -> None:
        """One step that pulls and pushes these distinct rows."""
        self.step += 1
        ids = routed(row_ids)
        self.store.pull(self.who, self.step, {TABLE: ids})
        gradients = TableGradients(ids, self._gradients[: row_ids.shape[0]], 0.05)
        self.store.push(self.who, self.step, {TABLE: gradients})

    def fill(self, rows: int) -> None:
        """The next ranks up to `rows` get their first step."""
        while self.seen < rows:
            last = min(rows, self.seen + self.size.new_per_step)
            self.train(row_ids_of(np.arange(self.seen, last)))
            self.seen = last

    def train_by_traffic(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.train(self.draw(self.size.draws_per_step))

    def draw(self, n: int) -> np.ndarray:
        """Distinct row_ids of n look-ups, int64."""
        return row_ids_of(np.unique(draw_ranks(self._random, self.seen, n)))

    def freeze_idle(self) -> None:
        """Idle rows freeze, and their segments are written; no step is under way."""
        self.store.reselect(self.who, self.step, {})
        self.stats()

    def stats(self) -> TableStats:
        return self.store.stats().tables[TABLE]

    def begin_cut(self, root: Path, parent: Path | None = None) -> tuple[Path, float]:
        """(its folder, seconds for which training pauses). parent: a whole cut of this epoch, for a delta of it."""
        folder = root / CutName(self.who.epoch, self.step).folder
        start = time.perf_counter()
        folder.mkdir(parents=True)
        self.store.begin_cut(self.who, self.step, str(folder), None if parent is None else str(parent))
        capture(self._model, self._optimizer, "adam", self._rng_states)
        return folder, time.perf_counter() - start

    def is_cut_done(self) -> bool:
        (progress,) = self.store.cut_progress(self.who)
        if progress.error is not None:
            raise RuntimeError(f"the cut of step {progress.step} failed: {progress.error}")
        return progress.is_done

    def cut(self, root: Path, parent: Path | None = None) -> CutFigures:
        """A cut without other traffic, until it is whole."""
        before = set_of_objects(root)
        start = time.perf_counter()
        folder, pause_s = self.begin_cut(root, parent)
        while not self.is_cut_done():
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        (progress,) = self.store.cut_progress(self.who)
        return CutFigures.of(folder, before, pause_s, seconds, progress, self.stats())


def routed(row_ids: np.ndarray) -> RoutedIds:
    """For a store of one shard."""
    return RoutedIds(row_ids, np.array([0, row_ids.shape[0]], np.int64))


def look_up(store: EmbeddingStore, row_ids: np.ndarray) -> np.ndarray:
    """float32[n, D]. RuntimeError unless every row is there."""
    rows = store.lookup({TABLE: routed(row_ids)})[TABLE]
    lost = int((rows.flags & FOUND == 0).sum())
    if lost:
        raise RuntimeError(f"{lost} of {row_ids.shape[0]} row_ids looked up were not found")
    return rows.values.astype(np.float32)


def set_of_objects(root: Path) -> set[str]:
    return {path.name for path in (root / OBJECTS).iterdir()} if (root / OBJECTS).exists() else set()


@dataclass(frozen=True)
class CutFigures:
    folder: Path
    pause_s: float
    seconds: float
    rows: int  # the cut has
    rows_hot: int
    own_bytes: int  # of files in the cut's folder
    new_bytes: int  # that it wrote: own_bytes and segments that were no files yet
    linked_bytes: int  # of segments that it shares with the shard

    @classmethod
    def of(
        cls,
        folder: Path,
        before: set[str],
        pause_s: float,
        seconds: float,
        progress: CutProgress,
        stats: TableStats,
    ) -> CutFigures:
        """before: the objects there were. A segment with a second link is a file of the shard's."""
        own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        objects = {path.name: path.stat() for path in (folder.parent / OBJECTS).iterdir()}
        written = sum(stat.st_size for name, stat in objects.items() if stat.st_nlink == 1 and name not in before)
        linked = sum(stat.st_size for stat in objects.values() if stat.st_nlink > 1)
        return cls(folder, pause_s, seconds, progress.rows, stats.rows_hot, own, own + written, linked)

    def as_dict(self) -> dict[str, float]:
        return {
            "pause_ms": round(1e3 * self.pause_s, 1),
            "seconds": round(self.seconds, 2),
            "rows": self.rows,
            "rows_hot": self.rows_hot,
            "new_bytes": self.new_bytes,
            "linked_bytes": self.linked_bytes,
            "new_bytes_a_hot_row": round(self.new_bytes / max(1, self.rows_hot), 1),
        }
