"""Serving again: from the start of a shard process to the first look-up of restored rows; and a large snapshot for it.

The large one has 25 million rows of which 5% are hot: filled and frozen in pieces, then 5% of all IDs, drawn evenly,
visited again, so that its segments have dead rows as in a training. `cold` is the same after the kernel was asked to
drop the snapshot's pages (POSIX_FADV_DONTNEED), as on a machine that has not just written it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.capacity_tall import row_ids_of
from benchmarks.cut_trainee import JOB, TABLE, Size, Trainee, look_up
from embedding_server.inproc import InprocStore
from embedding_server.spec import TableSpec
from embedding_server.store import Identity
from services.local_shards import start_shards
from services.shard_client import RemoteStore

_EPOCH = 1000  # above that of every cut
_SAMPLE = 2_000


@dataclass(frozen=True)
class Serving:
    process_s: float  # until the shard serves
    restore_s: float
    total_s: float  # with the first look-up
    rows: int

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in vars(self).items()}


def serve_again(
    cut: Path, spec: TableSpec, row_ids: np.ndarray, folder: Path, limit_bytes: int, wanted: np.ndarray | None = None
) -> Serving:
    """row_ids: looked up first. wanted float32[n, D]: what they must be, bit for bit. `folder` goes afterwards."""
    start = time.perf_counter()
    options = {"memory_limit_bytes": limit_bytes, "data_dir": folder, "log_dir": folder / "log"}
    with start_shards(1, **options) as shards, closing(RemoteStore(shards.addresses)) as store:  # type: ignore[arg-type]
        process_s = time.perf_counter() - start
        store.create_tables([spec])
        who = Identity(JOB, store.begin_epoch(JOB, 1, "sync", _EPOCH, will_restore=True).epoch, 0)
        store.restore(who, str(cut))
        restore_s = time.perf_counter() - start - process_s
        values = look_up(store, row_ids)
        total_s = time.perf_counter() - start
        if wanted is not None and not np.array_equal(values, wanted):
            raise RuntimeError(f"{cut}: a restored row is another than it was")
        stats = store.stats().tables[TABLE]
    shutil.rmtree(folder)
    return Serving(process_s, restore_s, total_s, stats.rows_hot + stats.rows_frozen)


def measure_large(size: Size, rows: int, hot_share: float, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """A snapshot of `rows` rows, and how soon they are served again."""
    limit_bytes = 2 * (rows * 60 + size.rows * 5 * size.dim + (64 << 20))
    root = folder / "snapshots" / JOB
    root.mkdir(parents=True)
    start = time.perf_counter()
    with closing(InprocStore(memory_limit_bytes=limit_bytes, data_dir=folder / "data")) as store:
        trainee = _filled(Trainee(store, replace(size, idle_steps=2), "idle"), rows, hot_share)
        cut = trainee.cut(root)
        sample = row_ids_of(np.linspace(0, rows - 1, min(_SAMPLE, rows)).astype(np.int64))
        wanted = look_up(store, sample)
    say(f"  {cut.as_dict()} after {time.perf_counter() - start:.0f} s")
    served = {}
    for name in ("warm", "cold"):
        if name == "cold":
            _forget_pages(root)
        served[name] = serve_again(cut.folder, trainee.spec, sample, folder / "again", limit_bytes, wanted)
        say(f"  {name}: {served[name].as_dict()}")
    return {"cut": cut.as_dict(), **{name: times.as_dict() for name, times in served.items()}}


def _filled(trainee: Trainee, rows: int, hot_share: float) -> Trainee:
    """All rows frozen but hot_share of them."""
    piece = trainee.size.rows
    while trainee.seen < rows:
        trainee.fill(min(rows, trainee.seen + piece))
        _rest(trainee)
        trainee.freeze_idle()
    visited = np.random.default_rng(0).choice(rows, round(hot_share * rows), replace=False)
    for start in range(0, visited.shape[0], trainee.size.new_per_step):
        trainee.train(row_ids_of(visited[start : start + trainee.size.new_per_step]))
    return trainee


def _rest(trainee: Trainee) -> None:
    """Steps without a visit, until every row is idle."""
    for _ in range(trainee.size.idle_steps + 1):
        trainee.train(np.empty(0, np.int64))


def _forget_pages(folder: Path) -> None:
    """Has the kernel drop the pages of all files below."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
