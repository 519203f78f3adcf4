from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from services import cli, train_job
from services.doctor import Check
from tests.trainer.masks import snapshot
from trainer.mask_report import mask_document
from trainer.metrics import Metrics
from trainer.report import ArmSummary, write_json

SUMMARY = ArmSummary(0.8, 0.5, 0.9, 100, 50, 20, 10, 15, 5, 4, 3, 1, 1000, 500, 40, 123.0, 1.5)
JOB = """
name: tiny
data: {reader: synthetic, num_samples: 100, num_test_samples: 10}
model: {dense_layers: [8, 4]}
embedding: {dim: 4}
"""


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_train_prints_json_alone_on_standard_output(runner, job_file, monkeypatch, tmp_path):
    seen = {}

    def fake_run(job, show, say, resumes):
        seen["job"], seen["resumes"] = job, resumes
        say("main: trains")
        return {"main": SUMMARY}

    monkeypatch.setattr(train_job, "run_job", fake_run)
    monkeypatch.setattr(train_job, "bias_only", lambda job: Metrics(0.7, 0.6, 1.0, 10))
    result = runner.invoke(
        cli.app,
        ["train", str(job_file), "--json", "--set", "trainer.batch_size=32", "--set", f"trainer.output_dir={tmp_path}"],
    )
    assert result.exit_code == 0, result.output
    assert not seen["resumes"]
    document = json.loads(result.stdout)
    assert document["arms"]["main"]["rows_pushed"] == 40
    assert document["bias_only"]["auc"] == 0.7
    assert document["summary"] == str(tmp_path / "tiny" / "summary.json")
    assert seen["job"].trainer.batch_size == 32
    assert "main: trains" in result.stderr


def test_a_faulty_job_is_status_2_and_one_message(runner, job_file):
    result = runner.invoke(cli.app, ["train", str(job_file), "--set", "trainer.batchsize=32"])
    assert result.exit_code == 2
    assert "did you mean 'batch_size'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_failed_job_is_status_1(runner, job_file, monkeypatch):
    def fail(*_):
        raise train_job.JobFailed("arm 'main': worker 1 failed: InvalidInput: row 7")

    monkeypatch.setattr(train_job, "run_job", fail)
    result = runner.invoke(cli.app, ["train", str(job_file)])
    assert (result.exit_code, "worker 1 failed" in result.stderr) == (1, True)


def test_figures_are_printed_though_their_file_could_not_be_written(runner, job_file, monkeypatch, tmp_path):
    def fail(*_):
        raise train_job.SummaryNotWritten(
            "summary.json: cannot be written (No space left on device)", {"main": SUMMARY}
        )

    monkeypatch.setattr(train_job, "run_job", fail)
    monkeypatch.setattr(train_job, "bias_only", lambda job: Metrics(0.7, 0.6, 1.0, 10))
    command = ["train", str(job_file), "--set", f"trainer.output_dir={tmp_path}"]
    machine = runner.invoke(cli.app, [*command, "--json"])
    document = json.loads(machine.stdout)
    assert (machine.exit_code, document["summary"], document["arms"]["main"]["rows_pushed"]) == (1, None, 40)
    people = runner.invoke(cli.app, command)
    assert people.exit_code == 1
    assert "test AUC" in people.stdout and "0.8000" in people.stdout
    assert "summary: " not in people.stdout
    assert "error: summary.json: cannot be written (No space left on device)" in people.stderr


def test_schema_is_json_schema_of_the_job(runner):
    result = runner.invoke(cli.app, ["schema"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(document["required"]) == {"name", "data"}
    assert document["additionalProperties"] is False


def test_doctor_tells_by_its_status_whether_all_is_well(runner, monkeypatch):
    from services import doctor

    monkeypatch.setattr(doctor, "examine", lambda: [Check("torch", "fail", "2.1", "make setup")])
    plain = runner.invoke(cli.app, ["doctor"])
    assert plain.exit_code == 1
    assert "make setup" in plain.stdout
    machine = runner.invoke(cli.app, ["doctor", "--json"])
    assert json.loads(machine.stdout) == {
        "healthy": False,
        "checks": [{"name": "torch", "verdict": "fail", "found": "2.1", "remedy": "make setup"}],
    }


def test_inspect_prints_json_alone_with_json_and_tables_without(runner, tmp_path):
    document = mask_document(snapshot())
    write_json(tmp_path / "job" / "topk" / "mask_info.json", document)
    machine = runner.invoke(cli.app, ["inspect", str(tmp_path / "job"), "--json"])
    assert json.loads(machine.stdout) == {"topk": document}
    people = runner.invoke(cli.app, ["inspect", str(tmp_path / "job")])
    assert (people.exit_code, "rows and bytes by tier" in people.stdout) == (0, True)
    absent = runner.invoke(cli.app, ["inspect", str(tmp_path / "absent")])
    assert (absent.exit_code, "is no folder" in absent.stderr) == (2, True)


def test_shard_refuses_buckets_that_do_not_exist(runner):
    result = runner.invoke(cli.app, ["shard", "--buckets", "half"])
    assert (result.exit_code, "0-511" in result.stderr) == (2, True)


def test_the_command_starts_without_torch_ray_and_torchrec():
    code = (
        "import sys, services.cli; "
        "print([name for name in ('torch', 'ray', 'torchrec', 'numba', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
