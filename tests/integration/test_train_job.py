"""Whole jobs: a real Ray, real shard processes, gRPC between them, on a stream with planted truth."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from embedding_server.errors import InvalidInput
from services import train_job
from services.local_shards import start_shards
from services.ray_group import RayGroup, ray_group
from services.train_job import JobFailed, SummaryNotWritten, check_arms, run_arm, run_inproc, run_job
from trainer.inspection import read_run
from trainer.job import Job, make_job
from trainer.report import Progress

# ray 2.60 uses settings of its own that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WORKERS = 2


def job_of(output_dir: Path, **changes) -> Job:
    raw = {
        "name": "tiny",
        "seed": 5,
        "data": {
            "reader": "synthetic",
            "num_samples": 3000,
            "num_test_samples": 1000,
            "num_features": 3,
            "num_dense": 2,
            "cardinalities": [400],
            "truth_scale": 1.5,
        },
        "model": {"kind": "dlrm", "dense_layers": [16, 8], "over_layers": [16, 1]},
        "embedding": {
            "dim": 8,
            "learning_rate": {"base": 0.2},
            "policy": "idle",
            "idle_samples": 600,
            "advanced": {"reselect_every_samples": 600, "control_fraction": 0.5},
        },
        "trainer": {
            "workers": WORKERS,
            "threads": 1,
            "mode": "sync",
            "batch_size": 100,
            "precision": "float32",
            "dense_optimizer": {"kind": "sgd", "learning_rate": {"base": 0.1}},
            "output_dir": str(output_dir),
        },
        "servers": {"num_shards": 2, "memory_limit_bytes": "128MiB"},
    }
    for name, values in changes.items():
        is_overlay = isinstance(values, dict) and "reader" not in values
        raw[name] = {**raw.get(name, {}), **values} if is_overlay else values  # type: ignore[dict-item]
    return make_job(raw)


@pytest.fixture(scope="module")
def ray(tmp_path_factory) -> RayGroup:
    with ray_group(WORKERS, tmp_path_factory.mktemp("ray")) as group:
        yield group


def quiet(*_: object) -> None:
    return None


def test_two_ray_workers_over_grpc_equal_one_process_in_every_arm(ray, tmp_path, monkeypatch):
    """sync: N workers x B = 1 worker x N B, whatever lies between trainer and rows; arms begin empty.

    Also what run_job says and leaves behind.
    """
    monkeypatch.setattr(train_job, "ray_group", lambda workers, storage: nullcontext(ray))
    shown: list[Progress] = []
    said: list[str] = []
    arms = {"full": {"embedding": {"policy": "off"}}, "idle": {}}
    remote = run_job(job_of(tmp_path, arms=arms), shown.append, said.append)
    alone = job_of(tmp_path, servers={"store": "inproc"}, trainer={"workers": 1}, arms=arms)
    for arm, job in alone.arm_jobs().items():
        local = run_inproc(job, arm, tmp_path / "local", quiet)
        assert remote[arm].test_logloss == pytest.approx(local.test_logloss, rel=1e-5)
        assert remote[arm].test_auc == pytest.approx(local.test_auc, abs=1e-5)
        for field in ("rows_hot", "rows_frozen", "rows_probation"):
            assert getattr(remote[arm], field) == getattr(local, field)
        # a row that both workers name is pulled and pushed by both
        assert local.rows_pushed < remote[arm].rows_pushed <= WORKERS * local.rows_pushed
        _expect_equal_masks(remote[arm].mask_info, local.mask_info)
        assert remote[arm].mask_info["total"]["traffic"]["gradient_rows"] == remote[arm].rows_pushed
        for name in ("total", "hot", "state", "frozen", "index", "heat", "peak"):
            assert remote[arm].mask_info["total"]["bytes"][name] == getattr(remote[arm], f"bytes_{name}")
    assert remote["full"].rows_frozen == 0
    assert remote["idle"].rows_frozen > 0
    assert [(p.arm, p.step, p.total_steps) for p in shown if p.step == p.total_steps] == [
        ("full", 30, 30),
        ("idle", 30, 30),
    ]
    assert said == [
        "starting Ray; the first run on a machine compiles kernels: a minute, more if it is busy",
        "full: trains with 2 Ray workers and 2 new shards",
        "idle: trains with 2 Ray workers and 2 new shards",
    ]
    folder = tmp_path / "tiny"
    document = json.loads((folder / "summary.json").read_text())
    assert document == {arm: asdict(summary) for arm, summary in remote.items()}
    assert json.loads((folder / "job.json").read_text())["trainer"]["batch_size"] == 100
    for arm in arms:
        assert {p.name for p in (folder / arm).iterdir()} >= {"shard-0.log", "shard-1.log"}
        assert list((folder / arm).glob("events.out.tfevents.*"))
        assert json.loads((folder / arm / "mask_info.json").read_text()) == document[arm]["mask_info"]


def _expect_equal_masks(remote: dict, local: dict) -> None:
    """What is hot, what moved and what the control group says; its losses come from both workers."""
    assert (remote["step"], remote["samples"]) == (local["step"], local["samples"]) == (30, 3000)
    for name, table in local["tables"].items():
        for key in ("rows", "moves", "heat_histogram", "frostline", "policy"):
            assert remote["tables"][name][key] == table[key]
        verdict, expected = remote["tables"][name]["control"], table["control"]
        assert (verdict is None) == (expected is None) == (table["policy"]["kind"] == "off")
        if expected is not None:
            assert verdict["lookups_control"] == expected["lookups_control"] > 100
            assert verdict["difference"] == pytest.approx(expected["difference"], abs=1e-4)
            assert verdict["low"] < verdict["difference"] < verdict["high"]


def test_a_worker_that_raises_fails_the_job_with_its_reason(ray, tmp_path):
    path = tmp_path / "broken.tsv"
    good = "1\t" + "\t".join(["3"] * 13 + ["0a1b2c3d"] * 26)
    path.write_text("\n".join([good] * 150 + ["1\tnot a sample"]) + "\n")
    job = job_of(tmp_path, data={"reader": "criteo_tsv", "train": [str(path)]})
    with pytest.raises(JobFailed, match=r"arm 'main': worker \d failed: InvalidInput: .*broken.tsv.*151"):
        run_arm(job, "main", tmp_path / "run", ray, quiet, quiet)


def test_a_worker_that_is_killed_fails_the_job(ray, tmp_path):
    job = job_of(tmp_path, trainer={"data_passes": 10_000})

    def kill_a_worker(progress: Progress) -> None:
        for process in psutil.Process().children(recursive=True):
            if "ray::" in process.name() and "TrainWorker" in " ".join(process.cmdline()):
                process.kill()
                return

    with pytest.raises(JobFailed, match=r"arm 'main': (a worker|worker \d) died.*logs"):
        run_arm(job, "main", tmp_path / "run", ray, kill_a_worker, quiet)


def test_a_shard_that_is_killed_fails_the_job_and_is_named(ray, tmp_path, monkeypatch):
    started = []
    start = train_job.start_shards

    def start_and_note(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(train_job, "start_shards", start_and_note)
    job = job_of(tmp_path, trainer={"data_passes": 10_000})

    def kill_shard_1(progress: Progress) -> None:
        os.kill(started[0].processes[1].pid, signal.SIGKILL)

    with pytest.raises(JobFailed, match=r"arm 'main': shard 1 \(process \d+\) ended with status -9"):
        run_arm(job, "main", tmp_path / "run", ray, kill_shard_1, quiet)
    assert all(process.poll() is not None for process in started[0].processes)


def test_an_earlier_run_of_the_name_leaves_nothing_behind(tmp_path):
    changes = {"servers": {"store": "inproc"}, "trainer": {"workers": 1, "max_steps": 2}}
    job = job_of(tmp_path, **changes)
    run_job(job_of(tmp_path, arms={"other": {}}, **changes), quiet, quiet)
    run_job(job, quiet, quiet)
    run_job(job, quiet, quiet)
    assert len(list((tmp_path / "tiny").glob("*/events.out.tfevents.*"))) == 1
    assert list(read_run(tmp_path / "tiny")) == ["main"]  # and no arm that the job has no longer
    assert not (tmp_path / "tiny" / "_former").exists()


def _in_process(tmp_path: Path, **changes) -> Job:
    return job_of(tmp_path, servers={"store": "inproc"}, trainer={"workers": 1, "max_steps": 2}, **changes)


def test_a_run_that_fails_leaves_the_results_of_the_run_before(tmp_path):
    folder, said = tmp_path / "tiny", []
    run_job(_in_process(tmp_path), quiet, quiet)
    before = {name: (folder / name).read_bytes() for name in ("summary.json", "job.json", "main/mask_info.json")}
    (folder / "notes.txt").write_text("mine")
    broken = _in_process(tmp_path, seed=7, model={"kind": "no_such:factory"})
    for _ in range(2):  # the second one does not take what the first has left for results
        with pytest.raises(InvalidInput, match="no_such"):
            run_job(broken, quiet, said.append)
        assert not (folder / "summary.json").exists()
        assert not list(folder.glob("main/*"))
        assert {name: (folder / "_former" / name).read_bytes() for name in before} == before
        assert len(list(folder.glob("_former/main/events.out.tfevents.*"))) == 1
    assert said[0] == f"the results of the run before are in {folder / '_former'} until this run has some"
    assert list(read_run(folder / "_former")) == ["main"]
    run_job(_in_process(tmp_path, arms={"one": {}, "two": {}}), quiet, quiet)
    assert not (folder / "_former").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_move_of_former_results_that_was_cut_short_is_finished(tmp_path):
    """As if the process had ended between two of its renames."""
    folder = tmp_path / "tiny"
    run_job(_in_process(tmp_path), quiet, quiet)
    summary = (folder / "summary.json").read_bytes()
    (folder / "_former.part" / "main").mkdir(parents=True)
    (folder / "summary.json").replace(folder / "_former.part" / "summary.json")
    with pytest.raises(InvalidInput, match="no_such"):
        run_job(_in_process(tmp_path, model={"kind": "no_such:factory"}), quiet, quiet)
    assert (folder / "_former" / "summary.json").read_bytes() == summary
    assert list(read_run(folder / "_former")) == ["main"]
    assert not (folder / "_former.part").exists()


def test_a_full_disk_ends_no_training_and_loses_no_figures(tmp_path):
    """/dev/full is a device on which every write finds no space."""
    folder, said, shown = tmp_path / "tiny", [], []
    (folder / "main").mkdir(parents=True)
    for name in ("summary.json.tmp", "main/mask_info.json.tmp"):
        (folder / name).symlink_to("/dev/full")
    job = _in_process(tmp_path, embedding={"advanced": {"reselect_every_samples": 100}})
    with pytest.raises(SummaryNotWritten, match=r"summary\.json: cannot be written \(No space left") as raised:
        run_job(job, shown.append, said.append)
    assert raised.value.arms["main"].rows_hot > 0
    assert said[-1].startswith("main: ") and "the figures are printed all the same" in said[-1]
    notes = [progress.note for progress in shown if "mask_info.json: cannot be written (No space left" in progress.note]
    assert len(notes) == 1  # of the first of its reports; the symbolic link is gone by the next


def test_a_folder_that_cannot_be_cleared_is_named(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "summary.json").touch()
    (tmp_path / "tiny" / "_former.part").touch()  # where a folder should be
    with pytest.raises(InvalidInput, match=r"trainer\.output_dir=.*_former\.part.*; name a folder for results, with"):
        run_job(_in_process(tmp_path), quiet, quiet)
    assert (tmp_path / "tiny" / "summary.json").exists()


def test_the_log_of_a_shard_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "main" / "shard-1.log").mkdir(parents=True)
    with pytest.raises(InvalidInput, match=r"main/shard-1\.log: cannot be written \(Is a directory\).*output_dir"):
        start_shards(2, log_dir=tmp_path / "main")


def test_a_folder_for_results_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    job = job_of(tmp_path / "file", servers={"store": "inproc"}, trainer={"workers": 1})
    with pytest.raises(InvalidInput, match=r"trainer\.output_dir=.*/file: .*; name a folder for results"):
        run_job(job, quiet, quiet)


def test_external_shards_serve_one_arm_only(tmp_path):
    job = job_of(
        tmp_path,
        servers={"launch": "external", "addresses": ["127.0.0.1:1"]},
        arms={"full": {"embedding": {"policy": "off"}}, "idle": {}},
    )
    with pytest.raises(InvalidInput, match="each arm needs fresh shards"):
        check_arms(job.arm_jobs())


def test_arms_share_one_number_of_workers(tmp_path):
    job = job_of(tmp_path, arms={"one": {"trainer": {"workers": 1}}, "two": {}})
    with pytest.raises(InvalidInput, match=r"trainer\.workers differs"):
        check_arms(job.arm_jobs())


def test_a_cluster_and_local_shards_do_not_go_together(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InvalidInput, match="RAY_ADDRESS"):
        check_arms(job_of(tmp_path).arm_jobs())
