"""kill -9 of Ray workers, and of a shard beside them, at random moments of a job, which recovers by itself."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services import train_job
from services.local_shards import LocalShards
from services.ray_group import RayGroup, ray_group
from services.train_job import run_arm
from tests.chaos.exact_job import STEPS, assert_cut_is_exact, exact_job
from tests.chaos.seeds import seeds
from trainer.failures import read_failures
from trainer.report import Progress
from trainer.snapshot_search import find_snapshot

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2
# ray 2.60 uses settings of its own that it has deprecated
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "proto")]))  # the model is in tests/
        with ray_group(WORKERS, tmp_path_factory.mktemp("ray")) as group:
            yield group


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalShards]:
    """The shards that jobs have started."""
    shards: list[LocalShards] = []
    start = train_job.start_shards

    def start_and_note(*args, **kwargs):
        shards.append(start(*args, **kwargs))
        return shards[-1]

    monkeypatch.setattr(train_job, "start_shards", start_and_note)
    return shards


class Killer:
    """Calls `kill` a random time after `step` was reported, once."""

    def __init__(self, step: int, delay_s: float, kill: Callable[[], None]) -> None:
        self._step = step
        self._timer = threading.Timer(delay_s, kill)
        self._is_started = False

    def watch(self, progress: Progress) -> None:
        if progress.step >= self._step and not progress.note and not self._is_started:
            self._is_started = True
            self._timer.start()


def kill_worker(ray: RayGroup, rank: int) -> None:
    os.kill(ray.members[rank].pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", seeds(num_quick=0))
def test_kill_9_of_a_worker_at_a_random_moment(seed: int, ray: RayGroup, tmp_path: Path) -> None:
    rng = random.Random(seed)
    mode = rng.choice(["sync", "pipelined"])  # the gradients do not depend on the rows, so staleness changes nothing
    job = exact_job(tmp_path, trainer={"workers": WORKERS, "mode": mode})
    rank = rng.randrange(WORKERS)
    killer = Killer(rng.randrange(1, STEPS - 150), rng.uniform(0.0, 0.5), lambda: kill_worker(ray, rank))
    summary = run_arm(job, "main", tmp_path / "run", ray, killer.watch, print)
    assert (summary.steps, summary.restarts) == (STEPS, 1)
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS
    (failure,) = read_failures(tmp_path / "run" / "main")
    assert f"worker {rank}" in [process["who"] for process in failure["processes"]]
    assert failure["processes"][0]["memory_peak_bytes"] > 50 << 20
    assert failure["epoch"] > 1


@pytest.mark.slow  # two minutes: `make chaos` and `make slow` run it
def test_a_shard_and_then_a_worker_are_killed(ray: RayGroup, started: list[LocalShards], tmp_path: Path) -> None:
    job = exact_job(tmp_path, trainer={"workers": WORKERS, "max_failures": 2})
    shard = Killer(STEPS // 4, 0.1, lambda: started[0].processes[1].send_signal(signal.SIGKILL))
    worker = Killer(STEPS // 2, 0.1, lambda: kill_worker(ray, 1))
    said: list[str] = []

    def watch(progress: Progress) -> None:
        shard.watch(progress)
        worker.watch(progress)

    summary = run_arm(job, "main", tmp_path / "run", ray, watch, said.append)
    assert (summary.steps, summary.restarts) == (STEPS, 2)
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS
    of_shard, of_worker = read_failures(tmp_path / "run" / "main")
    assert (of_shard["processes"][0]["who"], of_shard["processes"][0]["signal"]) == ("shard 1", "SIGKILL")
    assert any("serving at" in line for line in of_shard["processes"][0]["log"])
    assert of_worker["processes"][0]["who"] == "worker 1"
    assert of_shard["epoch"] < of_worker["epoch"]
    assert "shard 1 was killed by SIGKILL; goes back to" in said[1]
