"""Whole jobs that are killed and resumed: real Ray workers and shard processes, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedding_server.errors import InvalidInput
from services import train_job
from services.ray_group import RayGroup, ray_group
from services.train_job import JobFailed, find_cuts, run_arm, run_inproc, run_job
from trainer.job import Job, make_job
from trainer.report import ArmSummary, Progress
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import CutName, cuts_in, is_complete, job_folder, read_manifest

# ray 2.60 uses settings of its own that it has deprecated
# a run over Ray takes 20 s on an idle machine, and ten times that on one that others use too
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(900)]

WORKERS, STEPS, BATCH = 2, 200, 50
ROOT = Path(__file__).resolve().parents[2]


def raw_job(folder: Path, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": "killed",
        "seed": 5,
        "data": {
            "reader": "synthetic",
            "num_samples": STEPS * BATCH,
            "num_test_samples": 1000,
            "num_features": 3,
            "num_dense": 2,
            "cardinalities": [2000],
            "truth_scale": 1.5,
        },
        "model": {"kind": "dlrm", "dense_layers": [16, 8], "over_layers": [16, 1]},
        "embedding": {
            "dim": 8,
            "learning_rate": {"base": 0.1},
            "policy": "idle",
            "idle_samples": 15 * BATCH,
            "frozen_bits": 8,
            "advanced": {"reselect_every_samples": 7 * BATCH},
        },
        "trainer": {
            "workers": WORKERS,
            "threads": 1,
            "mode": "sync",
            "batch_size": BATCH,
            "precision": "float32",
            "dense_optimizer": {"kind": "adam", "learning_rate": {"base": 0.005}},
            "output_dir": str(folder / "runs"),
        },
        "servers": {"num_shards": 2, "memory_limit_bytes": "128MiB"},
        "snapshots": {"uri": str(folder / "snapshots"), "every_samples": 50 * BATCH, "on_finish": False},
    }
    for name, values in changes.items():
        raw[name] = {**raw.get(name, {}), **values} if isinstance(values, dict) else values
    return raw


@pytest.fixture(scope="module")
def ray(tmp_path_factory) -> RayGroup:
    with ray_group(WORKERS, tmp_path_factory.mktemp("ray")) as group:
        yield group


def quiet(*_: object) -> None:
    return None


def killed_arm(job: Job, ray: RayGroup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kills a shard once a cut is complete; the cut. All else of the run ends with it."""
    started = []
    start = train_job.start_shards

    def start_and_note(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(train_job, "start_shards", start_and_note)
    cuts = job_folder(job.snapshots.uri, job.name)

    def kill_a_shard(progress: Progress) -> None:
        if any(is_complete(cuts / cut.folder) for cut in cuts_in(cuts)):
            os.kill(started[0].processes[1].pid, signal.SIGKILL)

    with pytest.raises(JobFailed, match=r"shard 1 .* ended with status -9"):
        run_arm(job, "main", folder, ray, kill_a_shard, quiet)
    monkeypatch.undo()
    return find_snapshot(job, "main")


@pytest.fixture(scope="module")
def whole(ray, tmp_path_factory) -> tuple[ArmSummary, Path]:
    """A run that is left alone, and its cut of step 100."""
    folder = tmp_path_factory.mktemp("whole")
    job = make_job(raw_job(folder, snapshots={"keep": 9}))
    summary = run_arm(job, "main", folder, ray, quiet, quiet)
    assert (summary.snapshots, summary.snapshots_failed, summary.steps) == (4, 0, STEPS)
    assert summary.rows_frozen > 500
    return summary, job_folder(job.snapshots.uri, job.name) / CutName(1, 100).folder


@pytest.mark.slow
def test_two_workers_and_two_shards_resume_to_the_figures_of_one_process(ray, tmp_path, monkeypatch) -> None:
    """sync: two workers are one with their batches together, so the run that is left alone needs no Ray."""
    # so many passes that it is still running when it is killed
    cut = killed_arm(make_job(raw_job(tmp_path, trainer={"data_passes": 1000})), ray, tmp_path, monkeypatch)
    manifest = read_manifest(cut)
    assert (manifest.num_workers, len(manifest.shards), manifest.run_step % 50) == (2, 2, 0)
    length = {"data_passes": 1000, "max_steps": manifest.run_step + 50}
    resumed = run_arm(make_job(raw_job(tmp_path, trainer=length)), "main", tmp_path, ray, quiet, quiet, cut)
    assert (resumed.resumed_from, resumed.resumed_step) == (str(cut), manifest.run_step)
    assert resumed.steps == manifest.run_step + 50
    alone = make_job(in_process(tmp_path, trainer=length, snapshots=None))
    expect_same_figures(resumed, run_inproc(alone, "main", tmp_path / "alone", quiet))


@pytest.mark.slow
def test_another_number_of_workers_and_shards_goes_on_from_the_same_cut(ray, whole, tmp_path) -> None:
    job = make_job(raw_job(tmp_path, servers={"num_shards": 3}, trainer={"workers": 1}, snapshots=None))
    alone = RayGroup(1, ray._storage, ray._board)
    resumed = run_arm(job, "main", tmp_path, alone, quiet, quiet, whole[1])
    assert (resumed.resumed_step, resumed.steps) == (100, STEPS)
    expect_same_figures(resumed, whole[0])


def expect_same_figures(resumed: ArmSummary, whole: ArmSummary) -> None:
    assert resumed.test_logloss == pytest.approx(whole.test_logloss, rel=1e-5)
    assert resumed.test_auc == pytest.approx(whole.test_auc, abs=1e-5)
    assert (resumed.rows_hot, resumed.rows_frozen) == (whole.rows_hot, whole.rows_frozen)


def in_process(folder: Path, **changes: Any) -> dict[str, Any]:
    trainer = {"workers": 1, "data_passes": 1, **changes.pop("trainer", {})}
    return raw_job(folder, trainer=trainer, servers={"store": "inproc"}, **changes)


def command(job_file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", "train", str(job_file), "--json", *options]


def test_a_killed_driver_is_resumed_by_the_name_of_its_job(tmp_path) -> None:
    """kill -9 of the process that holds all: what is on disk is enough."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    job_file = tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump(in_process(tmp_path, trainer={"data_passes": 1000})))
    driver = subprocess.Popen(
        command(job_file), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=tmp_path
    )
    cuts = job_folder(tmp_path / "snapshots", "killed")
    try:
        while not any(is_complete(cuts / cut.folder) for cut in cuts_in(cuts)):  # pytest's timeout bounds it
            assert driver.poll() is None
            time.sleep(0.01)
    finally:
        driver.kill()
        driver.wait()
    step = read_manifest(find_snapshot(make_job(in_process(tmp_path)), "main")).run_step
    steps = max(STEPS, step + 10)
    job_file.write_text(yaml.safe_dump(in_process(tmp_path, trainer={"data_passes": 1000, "max_steps": steps})))
    done = subprocess.run(command(job_file, "--resume"), capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)["arms"]["main"]
    assert (resumed["resumed_step"], resumed["steps"]) == (step, steps)
    assert json.loads((tmp_path / "runs" / "killed" / "summary.json").read_text())["main"] == resumed
    whole = in_process(tmp_path / "whole", trainer={"data_passes": 1000, "max_steps": steps}, snapshots=None)
    expected = run_job(make_job(whole), quiet, quiet)["main"]
    assert resumed["test_logloss"] == expected.test_logloss
    assert (resumed["rows_hot"], resumed["rows_frozen"]) == (expected.rows_hot, expected.rows_frozen)


def test_resuming_without_a_snapshot_is_refused_before_anything_is_started(tmp_path) -> None:
    job = make_job(raw_job(tmp_path))
    with pytest.raises(InvalidInput, match=r"snapshots/killed-[0-9a-f]+: no complete snapshot of job 'killed'"):
        run_job(job, quiet, quiet, resumes=True)
    assert not (tmp_path / "runs").exists()


def test_each_arm_goes_on_from_its_own_and_one_that_was_not_begun_begins(tmp_path) -> None:
    arms = {"full": {"embedding": {"policy": "off"}}, "idle": {}}
    raw = in_process(tmp_path, trainer={"max_steps": 60}, snapshots={"on_finish": True}, arms=arms)
    said: list[str] = []
    run_job(make_job({**raw, "arms": {"full": arms["full"]}}), quiet, quiet)
    job = make_job({**raw, "trainer": {**raw["trainer"], "max_steps": 80}})
    assert list(find_cuts(job.arm_jobs(), said.append)) == ["full"]
    assert len(said) == 1 and said[0].startswith("idle: begins with step 1: ")
    events_before = list((tmp_path / "runs" / "killed" / "full").glob("events.out.tfevents.*"))
    results = run_job(job, quiet, quiet, resumes=True)
    assert (results["full"].resumed_step, results["full"].steps) == (60, 80)
    assert (results["idle"].resumed_from, results["idle"].steps) == (None, 80)
    assert all(path.exists() for path in events_before)  # the curves of the run before go on
    assert len(list((tmp_path / "runs" / "killed" / "full").glob("events.out.tfevents.*"))) == 2
