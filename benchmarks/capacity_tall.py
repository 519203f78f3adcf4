"""A table far larger than memory trains: the shapes `tall` and `tall-memory` of python -m benchmarks.capacity

In this process: InprocStore, one table of policy idle, row-wise Adagrad, 4-bit frozen rows, float16 on the wire.

    tall         200 million distinct IDs x 128 (100 GB in float32), hot rows in 16 bits, segments on disk
    tall-memory  100 million x 64, hot rows in 32 bits, segments in memory (files under /dev/shm)

The stream is made as it is needed; the driver holds one step of it and the IDs of the last `idle_steps`. A step names
`new_per_step` IDs never seen before (while there are some left: the part `fill`) and `draws_per_step` look-ups of IDs
seen so far: half of them by popularity, which falls with age as Zipf's law (exponent 1.05), half repeated from the last
steps, as sessions and trends do. So a fifth of the distinct IDs of a step without new ones thaw (`thawed_share`); on
real streams 8 to 21% do. After the fill `train_steps` steps without new IDs follow (the part `train`), from the
re-selection on that freezes the fill's last. After the Pull of step t the IDs of step t + 2 are drawn and announced to
the store (Prefetch), as the training loop does with `trainer.prefetch_frozen` (trainer/pipeline.py): their pages are
read while the Push is sent and the driver draws, which takes a quarter of the time that a dense part would.

The same job with a tenth of the IDs runs first: the steps/s of both are compared, part by part, since a step of the
fill does other work than one of the training. Time is that of the store's calls: Pull, Prefetch, Push, re-selection
with its background work; the driver's own is left out. `reselect_ratio`: steps/s over whole rounds from one
re-selection to the next, against the other calls of the same steps alone.

Memory is RssAnon + RssShmem of the whole process, sampled every 20 ms: peak, and the largest factor by which one call
grew it once half a GiB is there. At the end a sample of all IDs is looked up: each must be found and finite.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness import provenance
from benchmarks.memory import PeakWatch, read_memory
from embedding_server.inproc import InprocStore
from embedding_server.kernels.hashing import hash_row_ids
from embedding_server.kernels.kernel import warm_up
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, TRAINABLE, Identity, RoutedIds, TableGradients

GIB = 1 << 30
TABLE, JOB = "tall", "capacity"
EXPONENT = 1.05
#: at most / at least
LIMITS_MOST = {"peak_held_gib": 14.0, "largest_step_factor": 2.0}
LIMITS_LEAST = {"steps_ratio_fill": 0.6, "steps_ratio_train": 0.6, "reselect_ratio": 0.7}
_LARGE_BYTES = 1 << 29  # below this a call may well double memory
_SAMPLE = 20_000
_REACH = 2  # steps ahead that IDs are announced


@dataclass(frozen=True)
class Shape:
    name: str = "capacity_tall"
    rows: int = 200_000_000
    dim: int = 128
    hot_bits: Literal[16, 32] = 16
    in_memory: bool = False
    new_per_step: int = 100_000
    draws_per_step: int = 65_536
    idle_steps: int = 48
    reselect_every: int = 96
    train_steps: int = 288
    memory_limit_bytes: int = 12 * GIB  # of the store; the rest of the 14 GiB is Python, the driver and the heap


TALL = Shape()
TALL_MEMORY = Shape("capacity_tall_memory", rows=100_000_000, dim=64, hot_bits=32, in_memory=True)


@dataclass
class Part:
    """Time of one part of the run."""

    steps: int = 0
    call_s: float = 0.0  # Pulls, Prefetches and Pushes
    reselect_s: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)  # seconds by call
    read_bytes: int = 0  # from the disk
    rows: int = 0  # distinct IDs named, and those of them that thawed
    thawed: int = 0

    def steps_per_s(self) -> float:
        return self.steps / max(1e-9, self.call_s + self.reselect_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "steps_per_s": round(self.steps_per_s(), 3),
            "reselect_ratio": round(self.call_s / max(1e-9, self.call_s + self.reselect_s), 3),
            "rows_per_step": round(self.rows / self.steps),
            "thawed_share": round(self.thawed / max(1, self.rows), 3),
            "ms_per_step": {name: round(1e3 * s / self.steps, 2) for name, s in self.calls.items()},
            "read_mib_per_step": round(self.read_bytes / (1 << 20) / self.steps, 2),
        }


@dataclass
class Run:
    """Drives one store through the job."""

    shape: Shape
    store: InprocStore
    watch: PeakWatch
    who: Identity
    step: int = 0
    seen: int = 0  # ranks 0 to seen - 1 were drawn
    peak_bytes: int = 0
    largest_step: dict[str, Any] = field(default_factory=lambda: {"call": "none", "factor": 1.0})
    rows_pulled: int = 0
    calls: dict[str, float] = field(default_factory=dict)  # seconds by call
    announced: deque[RoutedIds] = field(default_factory=deque)  # of the next two steps
    recent: deque[np.ndarray] = field(default_factory=deque)  # distinct ranks drawn in the last idle_steps steps
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    _gradients: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint16))

    def __post_init__(self) -> None:
        most = self.shape.new_per_step + self.shape.draws_per_step
        values = self._random.standard_normal((most, self.shape.dim), np.float32) * np.float32(0.01)
        self._gradients = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16

    def train(self) -> float:
        """One step, which names new IDs while there are some left. Seconds of its calls."""
        self.step += 1
        while len(self.announced) < _REACH:
            self.announced.append(self._next_ids())
        ids = self.announced.popleft()
        self.rows_pulled += ids.row_ids.shape[0]
        start = time.perf_counter()
        rows = self._watched("pull", lambda: self.store.pull(self.who, self.step, {TABLE: ids}))[TABLE]
        pulled_s = time.perf_counter() - start
        if not bool((rows.flags & TRAINABLE).all()):
            raise RuntimeError(f"step {self.step}: a row is not trainable: the memory limit was reached")
        gradients = {TABLE: TableGradients(ids, self._gradients[: ids.row_ids.shape[0]], 0.05)}
        self.announced.append(self._next_ids())
        start = time.perf_counter()
        self._watched("prefetch", lambda: self.store.prefetch({TABLE: self.announced[-1]}))
        self._watched("push", lambda: self.store.push(self.who, self.step, gradients))
        return pulled_s + time.perf_counter() - start

    def thawed(self) -> int:
        """Rows that thawed since the start."""
        return self.store.stats().tables[TABLE].moves_thawed

    def reselect(self) -> float:
        start = time.perf_counter()
        self._watched("reselect", lambda: self.store.reselect(self.who, self.step, {}))
        return time.perf_counter() - start

    def _next_ids(self) -> RoutedIds:
        """New row_ids, and the distinct ones of draws_per_step look-ups of those seen before."""
        num_new = min(self.shape.new_per_step, self.shape.rows - self.seen)
        new = np.arange(self.seen, self.seen + num_new, dtype=np.int64)
        old = np.unique(self._draw()) if self.seen else new[:0]
        self.recent.append(old)
        if len(self.recent) > self.shape.idle_steps:
            self.recent.popleft()
        self.seen += num_new
        row_ids = row_ids_of(np.concatenate([new, old]))
        return RoutedIds(row_ids, np.array([0, row_ids.shape[0]], np.int64))

    def _draw(self) -> np.ndarray:
        """int64[draws_per_step] ranks seen before: half by popularity, half as in one of the last steps."""
        popular = draw_ranks(self._random, self.seen, self.shape.draws_per_step // 2)
        num_repeats = self.shape.draws_per_step - popular.shape[0]
        past = [ranks for ranks in self.recent if ranks.shape[0]]
        if not past:
            return popular
        sources = self._random.integers(len(past), size=num_repeats)
        places = self._random.random(num_repeats)
        sizes = np.array([ranks.shape[0] for ranks in past])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        repeats = np.concatenate(past)[starts[sources] + (places * sizes[sources]).astype(np.int64)]
        return np.concatenate([popular, repeats])

    def _watched(self, name: str, call: Callable[[], Any]) -> Any:
        before = self.watch.restart()
        start = time.perf_counter()
        result = call()
        self.calls[name] = self.calls.get(name, 0.0) + time.perf_counter() - start
        peak = self.watch.peak_bytes
        self.peak_bytes = max(self.peak_bytes, peak)
        if before > _LARGE_BYTES and peak / before > self.largest_step["factor"]:
            self.largest_step = {"call": name, "step": self.step, "factor": round(peak / before, 3)}
        return result


def row_ids_of(ranks: np.ndarray) -> np.ndarray:
    """int64[n] ranks -> distinct row_ids: mix64 is a bijection, so they fall into all buckets alike."""
    return hash_row_ids(ranks).view(np.int64)


def draw_ranks(random: np.random.Generator, num_ranks: int, n: int) -> np.ndarray:
    """int64[n] in [0, num_ranks), rank r with a probability close to that of Zipf's law, (r + 1)^-EXPONENT.

    By inversion of the continuous law on [1, num_ranks + 1): no table of the size of the IDs.
    """
    shape = 1.0 - EXPONENT
    top = (num_ranks + 1.0) ** shape
    draws = (1.0 + random.random(n) * (top - 1.0)) ** (1.0 / shape)
    return np.minimum(draws.astype(np.int64) - 1, num_ranks - 1)


def run_job(shape: Shape, folder: Path, watch: PeakWatch, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole job once; figures as a dictionary."""
    store = InprocStore(wire_dtype="float16", memory_limit_bytes=shape.memory_limit_bytes, data_dir=folder)
    try:
        policy = PolicySpec(
            kind="idle", idle_steps=shape.idle_steps, frozen_bits=4, hot_bits=shape.hot_bits, control_fraction=0.0
        )
        optimizer = OptimizerSpec(kind="rowwise_adagrad")
        store.create_tables([TableSpec(name=TABLE, dim=shape.dim, optimizer=optimizer, policy=policy)])
        info = store.begin_epoch(JOB, 1, "sync")
        run = Run(shape, store, watch, Identity(JOB, info.epoch, 0))
        fill = _fill(run, say)
        train = _train(run, say)
        _check(run)
        return _figures(run, fill, train)
    finally:
        store.close()


def _fill(run: Run, say: Callable[[str], None]) -> Part:
    part, shape = Part(), run.shape
    before, read = dict(run.calls), _read_bytes()
    tenth = max(1, shape.rows // 10)
    for _ in range(-(-shape.rows // shape.new_per_step)):
        told = run.seen // tenth
        part.call_s += run.train()
        part.steps += 1
        if run.step % shape.reselect_every == 0:
            part.reselect_s += run.reselect()
        if run.seen // tenth > told:
            say(f"  {run.seen} IDs, {part.steps_per_s():.2f} steps/s, peak {run.peak_bytes / GIB:.2f} GiB")
    part.rows, part.thawed = run.rows_pulled, run.thawed()
    part.calls = {name: s - before.get(name, 0.0) for name, s in run.calls.items()}
    part.read_bytes = _read_bytes() - read
    return part


def _train(run: Run, say: Callable[[str], None]) -> Part:
    """Steps without new IDs, from the first re-selection on that finds no row of the fill's last steps still hot."""
    shape = run.shape
    for _ in range(shape.idle_steps + 1):
        run.train()
    run.reselect()
    say("  the fill is frozen")
    part = Part()
    rows, thawed = run.rows_pulled, run.thawed()
    before, read = dict(run.calls), _read_bytes()
    for i in range(1, shape.train_steps + 1):
        part.call_s += run.train()
        part.steps += 1
        if i % shape.reselect_every == 0:
            part.reselect_s += run.reselect()
    part.rows, part.thawed = run.rows_pulled - rows, run.thawed() - thawed
    part.calls = {name: s - before.get(name, 0.0) for name, s in run.calls.items()}
    part.read_bytes = _read_bytes() - read
    say(f"  train: {part.as_dict()}")
    return part


def _read_bytes() -> int:
    """Bytes that this process has had read from a disk, by read() or by touching a map (proc_pid_io(5))."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return 0


def _check(run: Run) -> None:
    """Looks up IDs spread over all: none may be lost."""
    ranks = np.linspace(0, run.seen - 1, min(_SAMPLE, run.seen)).astype(np.int64)
    row_ids = row_ids_of(ranks)
    rows = run.store.lookup({TABLE: RoutedIds(row_ids, np.array([0, row_ids.shape[0]], np.int64))})[TABLE]
    lost = int((rows.flags & FOUND == 0).sum())
    if lost or not bool(np.isfinite(rows.values).all()):
        raise RuntimeError(f"{lost} of {row_ids.shape[0]} row_ids looked up were not found, or a value is not finite")


def _figures(run: Run, fill: Part, train: Part) -> dict[str, Any]:
    stats = run.store.stats().tables[TABLE]
    memory = read_memory()
    moves_s = fill.reselect_s + train.reselect_s
    return {
        "rows": run.shape.rows,
        "rows_hot": stats.rows_hot,
        "rows_frozen": stats.rows_frozen,
        "rows_unfreezable": stats.rows_unfreezable,
        "fill": fill.as_dict(),
        "train": train.as_dict(),
        "peak_held_gib": round(run.peak_bytes / GIB, 3),
        "held_row_bytes": round(memory.held_bytes / run.shape.rows, 2),
        "mapped_resident_gib": round(memory.file_bytes / GIB, 3),
        "segment_gib": round(stats.bytes_frozen / GIB, 3),
        "segment_row_bytes": round(stats.bytes_frozen / run.shape.rows, 2),
        "index_row_bytes": round((stats.bytes_index + stats.bytes_heat) / run.shape.rows, 2),
        "moves_frozen": stats.moves_frozen,
        "moves_thawed": stats.moves_thawed,
        "admitted_rows_per_s": int(run.shape.rows / max(1e-9, fill.call_s)),
        "moves_per_s": int(stats.moves_frozen / max(1e-9, moves_s)),
        "largest_step": run.largest_step,
        "events": run.store.stats().events[-5:],
    }


def measure(shape: Shape, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The job at a tenth of its IDs, then whole; the result document."""
    warm_up()
    results = {}
    parent = "/dev/shm" if shape.in_memory else None
    with PeakWatch(interval_s=0.02) as watch:
        for name, rows in (("tenth", max(1, shape.rows // 10)), ("whole", shape.rows)):
            say(f"{name}: {rows} IDs x {shape.dim}, hot rows in {shape.hot_bits} bits")
            with tempfile.TemporaryDirectory(prefix="frostline-capacity-", dir=parent) as folder:
                results[name] = run_job(replace(shape, rows=rows), Path(folder), watch, say)
    tenth, whole = results["tenth"], results["whole"]
    figures = {
        "peak_held_gib": whole["peak_held_gib"],
        "held_row_bytes": whole["held_row_bytes"],
        "largest_step_factor": whole["largest_step"]["factor"],
        "steps_ratio_fill": round(whole["fill"]["steps_per_s"] / tenth["fill"]["steps_per_s"], 3),
        "steps_ratio_train": round(whole["train"]["steps_per_s"] / tenth["train"]["steps_per_s"], 3),
        "reselect_ratio": whole["train"]["reselect_ratio"],
        "admitted_rows_per_s": whole["admitted_rows_per_s"],
    }
    return {
        "workload": shape.name,
        **provenance(),
        "config": vars(shape),
        "figures": figures,
        "limits": {"most": LIMITS_MOST, "least": LIMITS_LEAST},
        "runs": results,
    }


def missed(document: dict[str, Any]) -> list[str]:
    """Names of the limits that the document's figures do not meet."""
    figures = document["figures"]
    most = [name for name, limit in LIMITS_MOST.items() if figures[name] > limit]
    return most + [name for name, limit in LIMITS_LEAST.items() if figures[name] < limit]
