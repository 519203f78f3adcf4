"""kill -9 of `frostline train` at random moments: shards, Ray and workers end by themselves, and --resume goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.chaos.exact_job import DATA_PASSES, STEPS, assert_cut_is_exact, exact_job, raw_exact_job
from tests.chaos.seeds import seeds
from trainer.job import Job
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import cuts_in, is_complete, job_folder

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 60.0
#: two processes of Ray that hold nothing of a job: they look for the rest of it for a minute before they end
AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
pytestmark = pytest.mark.timeout(900)


def start_driver(job_file: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    command = [sys.executable, "-m", "services.cli", "train", str(job_file), *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, cwd=job_file.parent
    )


def whole_cuts(job: Job) -> int:
    assert job.snapshots is not None
    folder = job_folder(job.snapshots.uri, job.name)
    return sum(is_complete(folder / cut.folder) for cut in cuts_in(folder))


def kill_alone(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Kills the driver; what it has started ends by itself. Returns Ray's agents, which take longer."""
    started = psutil.Process(driver.pid).children(recursive=True)
    agents = [process for process in started if _name_of(process) in AGENTS]
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    wait_for_end([process for process in started if process not in agents])
    return agents


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def wait_for_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    assert not alive, alive


def finish(driver: subprocess.Popen[bytes]) -> None:
    _, errors = driver.communicate()
    assert driver.returncode == 0, errors.decode()


@pytest.mark.parametrize("seed", seeds(num_quick=0))
def test_kill_9_of_the_driver_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job, job_file = exact_job(tmp_path), tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump(raw_exact_job(tmp_path)))
    driver = start_driver(job_file)
    # one in five is killed while it starts
    wanted, delay_s = (0, rng.uniform(0.0, 10.0)) if seed % 5 == 4 else (rng.randint(1, 2), rng.uniform(0.0, 1.0))
    while whole_cuts(job) < wanted:  # pytest's timeout bounds it
        assert driver.poll() is None
        time.sleep(0.02)
    time.sleep(delay_s)
    agents = kill_alone(driver)
    if whole_cuts(job):
        # what is whole is right, wherever the kill came
        assert 0 < assert_cut_is_exact(job, find_snapshot(job, "main")) <= STEPS
        finish(start_driver(job_file, "--resume"))
    else:
        finish(start_driver(job_file))
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS
    wait_for_end(agents)


@pytest.mark.parametrize("seed", seeds(num_quick=1))
def test_kill_9_of_a_process_that_holds_all(seed: int, tmp_path: Path) -> None:
    """store: inproc, killed again and again: what is on disk is enough each time."""
    rng = random.Random(seed)
    changes = {"servers": {"store": "inproc"}, "trainer": {"data_passes": DATA_PASSES}}
    job, job_file = exact_job(tmp_path, **changes), tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump(raw_exact_job(tmp_path, **changes)))
    options: tuple[str, ...] = ()
    for _ in range(2):
        driver = start_driver(job_file, *options)
        before = newest_step(job)
        while newest_step(job) == before:
            assert driver.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.1))
        kill_alone(driver)
        options = ("--resume",)
        assert_cut_is_exact(job, find_snapshot(job, "main"))
    finish(start_driver(job_file, *options))
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS


def newest_step(job: Job) -> int:
    assert job.snapshots is not None
    folder = job_folder(job.snapshots.uri, job.name)
    return max((cut.step for cut in cuts_in(folder) if is_complete(folder / cut.folder)), default=0)
