"""Cuts of a shard process while it trains and answers look-ups: pause, look-ups' p99, memory, bytes, a delta.

    alone      look-ups, and nothing else
    training   look-ups, and a step of Zipf traffic every `step_s`

Under each load stretches without a cut and stretches with one take turns and last alike; the figures are over all of
one kind. A stretch with a cut lasts from the call that begins it until the shard says that it is whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cut_look_ups import Interval, LookUps
from benchmarks.cut_restore import serve_again
from benchmarks.cut_trainee import JOB, CutFigures, Policy, Size, Trainee
from benchmarks.memory import PeakWatch, read_memory
from services.local_shards import LocalShards, start_shards
from services.shard_client import RemoteStore

#: look-ups a row in a data pass: Criteo Kaggle has 45.8 million samples x 26 features over 33.8 million IDs
LOOK_UPS_A_ROW = 35
DELTA_SHARE = 0.01  # of a data pass that trains between a cut and its delta
_POLL_S = 0.02


def memory_limit(size: Size) -> int:
    return 2 * (size.rows * 5 * size.dim + (64 << 20))


def measure_policy(size: Size, policy: Policy, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All figures of one policy."""
    root = folder / "snapshots" / JOB
    root.mkdir(parents=True)
    options = {"memory_limit_bytes": memory_limit(size), "snapshot_root": folder, "data_dir": folder / "data"}
    with start_shards(1, **options) as shards, closing(RemoteStore(shards.addresses)) as store:  # type: ignore[arg-type]
        trainee = Trainee(store, size, policy)
        _prepare(trainee, policy, say)
        first = trainee.cut(root)
        say(f"  first cut: {first.as_dict()}")
        loads = {}
        for load in ("alone", "training"):
            loads[load] = _under_load(trainee, load == "training", shards, root, first.seconds)
            say(f"  {load}: {loads[load]}")
        trainee.train_by_traffic()
        if policy == "idle":
            trainee.freeze_idle()
        later = trainee.cut(root)
        say(f"  a later cut: {later.as_dict()}")
        delta = _delta(trainee, later, root)
        say(f"  a delta: {delta}")
        sample = trainee.draw(2_000)
        served = serve_again(later.folder, trainee.spec, sample, folder / "again", memory_limit(size))
        say(f"  restored: {served.as_dict()}")
    return {
        "first_cut": first.as_dict(),
        "later_cut": later.as_dict(),
        "loads": loads,
        "delta": delta,
        "restore": served.as_dict(),
    }


def _prepare(trainee: Trainee, policy: Policy, say: Callable[[str], None]) -> None:
    start, size = time.perf_counter(), trainee.size
    trainee.fill(size.rows)
    if policy == "idle":
        trainee.train_by_traffic(size.idle_steps)
        trainee.freeze_idle()
    stats = trainee.stats()
    say(f"  {stats.rows_hot} rows hot, {stats.rows_frozen} frozen after {time.perf_counter() - start:.0f} s")


class _Load:
    """Passes time as a load has it, and notes intervals of either kind."""

    def __init__(self, trainee: Trainee, trains: bool) -> None:
        self._trainee, self._trains = trainee, trains
        self.before: list[Interval] = []
        self.during: list[Interval] = []
        self.steps: dict[str, list[float]] = {"before": [], "during": []}

    def pass_time(self, kind: str, is_over: Callable[[], bool], start: float | None = None) -> None:
        """Steps, if it trains, until is_over(); a step that is due then is left out. The interval begins at `start`."""
        size, start = self._trainee.size, start or time.monotonic()
        time.sleep(_POLL_S)  # so that there is a look-up in it, however small a table is
        while not is_over():
            due = time.monotonic() + size.step_s
            if self._trains:
                row_ids = self._trainee.draw(size.draws_per_step)
                begin = time.perf_counter()
                self._trainee.train(row_ids)
                self.steps[kind].append(time.perf_counter() - begin)
            while time.monotonic() < due and not is_over():
                time.sleep(min(_POLL_S, max(0.0, due - time.monotonic())))
        interval = (start, time.monotonic())
        (self.before if kind == "before" else self.during).append(interval)


def _after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def _under_load(trainee: Trainee, trains: bool, shards: LocalShards, root: Path, cut_s: float) -> dict[str, Any]:
    size, pid = trainee.size, shards.processes[0].pid
    load, pauses, growth = _Load(trainee, trains), [], []
    held = read_memory(pid).held_bytes
    with LookUps(shards.addresses[0], size, trainee.seen, root.parent) as look_ups, PeakWatch(pid=pid) as watch:
        for _ in range(size.cuts):
            load.pass_time("before", _after(max(size.least_s, cut_s)))
            if not trains:
                trainee.train_by_traffic()  # a cut is taken behind a step of its own
            held, start = watch.restart(), time.monotonic()
            folder, pause_s = trainee.begin_cut(root)
            pauses.append(pause_s)
            load.pass_time("during", trainee.is_cut_done, start)
            growth.append(watch.peak_bytes - held)
            cut_s = load.during[-1][1] - load.during[-1][0]
            shutil.rmtree(folder)
    before, during = look_ups.durations(load.before), look_ups.durations(load.during)
    p99 = [float(np.percentile(durations, 99)) for durations in (before, during)]
    figures = {
        "pause_ms": round(1e3 * max(pauses), 1),
        "cut_s": round(cut_s, 2),
        "look_ups": [int(before.shape[0]), int(during.shape[0])],
        "p50_ms": [round(1e3 * float(np.median(durations)), 3) for durations in (before, during)],
        "p99_ms": [round(1e3 * value, 3) for value in p99],
        "p99_factor": round(p99[1] / p99[0], 3),
        "memory_share": round(max(growth) / held, 4),
    }
    if trains:
        figures["step_ms"] = [round(1e3 * sum(times) / max(1, len(times)), 1) for times in load.steps.values()]
    return figures


def _delta(trainee: Trainee, parent: CutFigures, root: Path) -> dict[str, Any]:
    """A delta of a cut after DELTA_SHARE of a data pass."""
    size = trainee.size
    trainee.train_by_traffic(max(1, round(DELTA_SHARE * LOOK_UPS_A_ROW * size.rows / size.draws_per_step)))
    delta = trainee.cut(root, parent.folder)
    return {**delta.as_dict(), "share_of_full": round(delta.new_bytes / parent.new_bytes, 4)}
