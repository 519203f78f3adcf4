"""Bytes a row in one shard, hot, frozen and after churn: the shape `rows` of python -m benchmarks.capacity

One shard in this process, one table of policy idle, row-wise Adagrad, frozen rows of 4 bits, then of 8. Four phases:

    empty    a shard whose kernels are compiled and whose table has no row: what everything below is measured above
    hot      every row pulled and pushed once, so that every map is populated
    frozen   nothing visited until all rows are idle, then one re-selection, segment files written
    churned  rounds of: a share of the rows thaws and trains, everything idles and freezes again, segments merge

Each phase reports RssAnon + RssShmem above the empty shard and segment bytes apart, beside the shard's own accounting;
`free_heap_row_bytes` is the part of it that malloc_trim gives back, which is malloc's and no row's.
`largest_step` is the call whose peak grew memory by the largest factor, once a tenth of the final hot rows is there.
Rates are rows over the time of the calls alone: admitted in the Pulls of the first phase, frozen in the re-selections
of the second (reading, quantising, appending, index), on one core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness import provenance
from benchmarks.memory import PeakWatch, read_memory
from embedding_server.heap import release_free_heap
from embedding_server.kernels.hashing import hash_row_ids
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import TRAINABLE, Identity, TableStats

#: at most; frozen_row_bytes in 4 and 8 bits hold at dim 64
LIMITS = {
    "hot_row_bytes": 300.0,
    "frozen_row_bytes_4bit": 78.0,
    "frozen_row_bytes_8bit": 118.0,
    "accounting_error": 0.05,
    "largest_step_factor": 2.0,
}
TABLE = "rows"
BITS: tuple[Literal[4, 8], ...] = (4, 8)
IDLE_STEPS = 200
WHO = Identity("capacity", 1, 0)


@dataclass(frozen=True)
class Size:
    rows: int = 10_000_000
    dim: int = 64
    frozen_bits: Literal[4, 8] = 4
    rows_per_step: int = 100_000
    churn_rounds: int = 5
    churn_fraction: float = 0.1


class Run:
    """Drives one shard step by step, and watches what each call does to memory."""

    def __init__(self, size: Size, data_dir: Path, watch: PeakWatch) -> None:
        self.size = size
        self.data_dir = data_dir
        self._watch = watch
        self._step = 0
        self.largest_step: dict[str, Any] = {"call": "none", "factor": 1.0}
        self.seconds: dict[str, float] = {}  # by kind of call
        self.shard = Shard(data_dir=data_dir, memory_limit_bytes=2 * (size.rows * 400 + (64 << 20)))
        policy = PolicySpec(kind="idle", idle_steps=IDLE_STEPS, frozen_bits=size.frozen_bits, control_fraction=0.0)
        optimizer = OptimizerSpec(kind="rowwise_adagrad")
        self.shard.create_tables([TableSpec(name=TABLE, dim=size.dim, optimizer=optimizer, policy=policy)])
        self.shard.begin_epoch(WHO.job, 1, "sync", WHO.epoch)
        # mix64 is a bijection, so these are distinct and fall into all buckets alike
        self.row_ids = hash_row_ids(np.arange(size.rows, dtype=np.int64)).view(np.int64)
        release_free_heap()
        self._empty_bytes = read_memory().held_bytes

    def train(self, row_ids: np.ndarray) -> None:
        """One step that pulls and pushes the rows."""
        self._step += 1
        rows = self._call("pull", lambda: self.shard.pull(WHO, self._step, {TABLE: row_ids}, "float32").result())[TABLE]
        assert bool(np.all(rows.flags & TRAINABLE))
        gradients = {TABLE: ShardGradients(row_ids, rows.values, learning_rate=0.01)}
        self._call("push", lambda: self.shard.push(WHO, self._step, gradients, "float32").result())

    def idle(self) -> None:
        """Steps without a visit until every row is idle, then a re-selection and all background work."""
        for _ in range(IDLE_STEPS + 1):
            self._step += 1
            self.shard.pull(WHO, self._step, {}, "float32").result()
            self.shard.push(WHO, self._step, {}, "float32").result()
        done = False
        while not done:
            _, done = self._call("reselect", lambda: self.shard.reselect(WHO, self._step, {}))
            self._call("maintain", self.shard.maintain)
        while self._call("maintain", self.shard.maintain):
            pass

    def phase(self) -> dict[str, Any]:
        """Figures of the present state, per row of the table where they say row."""
        memory = read_memory()
        stats = self.shard.stats().total()
        held = memory.held_bytes - self._empty_bytes
        accounted = in_memory_bytes(stats)
        on_disk = sum(path.stat().st_size for path in self.data_dir.rglob("*.safetensors"))
        release_free_heap()
        free_heap = memory.held_bytes - read_memory().held_bytes
        return {
            "rows_hot": stats.rows_hot,
            "rows_frozen": stats.rows_frozen,
            "held_bytes": held,
            "held_row_bytes": round(held / self.size.rows, 2),
            "free_heap_row_bytes": round(free_heap / self.size.rows, 2),
            "accounted_in_memory_bytes": accounted,
            "accounting_error": round(abs(held - accounted) / max(held, accounted), 4),
            "segment_file_bytes": on_disk,
            "segment_row_bytes": round(on_disk / self.size.rows, 2),
            "segment_resident_bytes": memory.file_bytes,
            "accounted_segment_bytes": stats.bytes_frozen,
            "row_bytes": round((accounted + stats.bytes_frozen) / self.size.rows, 2),
            "index_row_bytes": round((stats.bytes_index + stats.bytes_heat) / self.size.rows, 2),
            "moves_frozen": stats.moves_frozen,
            "moves_thawed": stats.moves_thawed,
        }

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        before = self._watch.restart() - self._empty_bytes
        start = time.perf_counter()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        peak = self._watch.peak_bytes - self._empty_bytes
        hot_bytes = 4 * self.size.dim * self.size.rows
        if before > hot_bytes / 10 and peak / before > self.largest_step["factor"]:
            self.largest_step = {
                "call": name,
                "step": self._step,
                "before_bytes": before,
                "peak_bytes": peak,
                "factor": round(peak / before, 3),
            }
        return result


def in_memory_bytes(stats: TableStats) -> int:
    """The shard's own count of what it holds in memory once segments are files."""
    return stats.bytes_hot + stats.bytes_state + stats.bytes_index + stats.bytes_heat


def measure(size: Size, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs all phases in 4 and in 8 bits and returns the result document."""
    runs = {}
    for bits in BITS:
        say(f"{size.rows} rows x {size.dim}, frozen in {bits} bits")
        runs[f"{bits}bit"] = _measure_bits(replace(size, frozen_bits=bits), say)
    first = runs["4bit"]["phases"]
    figures = {
        "hot_row_bytes": first["hot"]["held_row_bytes"],
        "accounting_error": first["hot"]["accounting_error"],
        "largest_step_factor": max(run["largest_step"]["factor"] for run in runs.values()),
    }
    for name, run in runs.items():
        churned = run["phases"]["churned"]
        figures[f"frozen_row_bytes_{name}"] = round(churned["held_row_bytes"] + churned["segment_row_bytes"], 2)
        figures[f"frozen_rows_per_s_{name}"] = run["frozen_rows_per_s"]
    figures["admitted_rows_per_s"] = max(run["admitted_rows_per_s"] for run in runs.values())
    return {
        "workload": "capacity",
        **provenance(),
        "config": {**vars(size), "frozen_bits": list(BITS), "idle_steps": IDLE_STEPS, "optimizer": "rowwise_adagrad"},
        "figures": figures,
        "limits": LIMITS,
        "runs": runs,
    }


def _measure_bits(size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="frostline-capacity-") as folder, PeakWatch() as watch:
        compile_kernels(size, Path(folder) / "warm-up", watch)
        run = Run(size, Path(folder) / "shard", watch)
        phases: dict[str, dict[str, Any]] = {}
        rates: dict[str, int] = {}
        for name, act in (("hot", fill), ("frozen", Run.idle), ("churned", churn)):
            start = time.perf_counter()
            act(run)
            if name == "hot":
                rates["admitted_rows_per_s"] = int(size.rows / run.seconds["pull"])
            elif name == "frozen":
                rates["frozen_rows_per_s"] = int(size.rows / run.seconds["reselect"])
            phases[name] = {**run.phase(), "seconds": round(time.perf_counter() - start, 1)}
            say(f"{name}: {describe(phases[name])}")
        run.shard.close()
    return {**rates, "largest_step": run.largest_step, "phases": phases}


def compile_kernels(size: Size, data_dir: Path, watch: PeakWatch) -> None:
    """All phases on a few rows, so that what numba and the libraries take is part of the empty shard."""
    few = replace(size, rows=4096, rows_per_step=1024, churn_rounds=1)
    run = Run(few, data_dir, watch)
    fill(run)
    run.idle()
    churn(run)
    run.shard.close()


def fill(run: Run) -> None:
    for start in range(0, run.size.rows, run.size.rows_per_step):
        run.train(run.row_ids[start : start + run.size.rows_per_step])


def churn(run: Run) -> None:
    random = np.random.default_rng(0)
    for _ in range(run.size.churn_rounds):
        visited = random.choice(run.row_ids, int(run.size.rows * run.size.churn_fraction), replace=False)
        for start in range(0, len(visited), run.size.rows_per_step):
            run.train(visited[start : start + run.size.rows_per_step])
        run.idle()


def describe(phase: dict[str, Any]) -> str:
    return (
        f"{phase['rows_hot']} hot, {phase['rows_frozen']} frozen; in memory {phase['held_row_bytes']} bytes a row"
        f" ({phase['free_heap_row_bytes']} of them free heap; accounted"
        f" {phase['accounted_in_memory_bytes'] / max(1, phase['held_bytes']):.1%}), segments"
        f" {phase['segment_row_bytes']} bytes a row; {phase['seconds']} s"
    )
