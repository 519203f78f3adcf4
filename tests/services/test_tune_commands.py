from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from embedding_server.store import TableStats
from services import cli
from services.tune_commands import disk_notes, estimate_lines, frontier_lines, pick_lines, tuning_document
from trainer.estimate import Estimate
from trainer.job import load_job
from trainer.tune import Point, TuneResult
from trainer.tune_grid import Candidate, baseline

JOB = """
name: tiny
data: {reader: synthetic, num_samples: 3000, num_test_samples: 0, num_dense: 1, num_features: 2, cardinalities: [500]}
model: {kind: deepfm, hidden_width: 4, fm_dim: 2}
embedding: {dim: 4, idle_samples: 500, advanced: {reselect_every_samples: 200}}
trainer: {batch_size: 100, threads: 1}
servers: {store: inproc}
arms:
  full: {embedding: {policy: "off"}}
  idle: {embedding: {policy: idle}}
"""


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def estimate_of(size: int) -> Estimate:
    return Estimate(
        3, 300, {"item": TableStats(rows_hot=7, bytes_hot=size)}, size, size, 0, {"item": 0.125}, ["a note"]
    )


def point_of(candidate: Candidate, size: int, drop: float, is_complete: bool = True) -> Point:
    return Point(candidate, estimate_of(size), 300, 0.7 - drop / 100, drop, drop - 0.01, drop + 0.02, is_complete)


def result_of(pick: int = 0, meets_drop: bool = True, meets_budget: bool = True) -> TuneResult:
    idle = Candidate("idle 100", "idle", {"embedding.policy": "idle", "embedding.idle_samples": 100})
    topk = Candidate("topk 0.1", "topk", {"embedding.policy": "topk"})
    points = [
        point_of(idle, 2_000_000, 0.04),
        point_of(topk, 3_000_000, 9.0, False),
        point_of(baseline(), 8_000_000, 0.0),
    ]
    return TuneResult(0.05, 4_000_000, 300, points, 9, points[pick], meets_drop, meets_budget)


def test_estimate_prints_every_arm_and_json_alone_on_standard_output(runner, job_file):
    result = runner.invoke(cli.app, ["estimate", str(job_file), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document["arms"]) == ["full", "idle"]
    full, idle = document["arms"]["full"], document["arms"]["idle"]
    assert (full["num_samples"], full["num_steps"]) == (3000, 30)
    assert full["bytes_total"] == sum(table["bytes_total"] for table in full["tables"].values())
    assert full["tables"]["cat_0"]["rows_frozen"] == 0 < idle["tables"]["cat_0"]["rows_frozen"]
    assert full["bytes_peak"] >= full["bytes_total"] > 0
    assert "memory peak MB" in result.stderr


def test_tune_picks_a_setting_and_says_how_to_use_it(runner, job_file):
    result = runner.invoke(
        cli.app,
        ["tune", str(job_file), "--max-auc-drop", "100", "--budget-bytes", "8GiB", "--samples", "2000", "--json"],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    by_name = {point["name"]: point for point in document["points"]}
    pick = by_name[document["pick"]]
    assert (document["budget_bytes"], document["num_samples"]) == (8 << 30, 2000)
    assert pick["bytes_peak"] == min(point["bytes_peak"] for point in by_name.values())
    assert pick["is_on_frontier"] and document["set"] == pick["set"]
    use = [part for line in document["set"] for part in ("--set", line)]
    used = runner.invoke(cli.app, ["estimate", str(job_file), *use])
    assert used.exit_code == 0, used.output
    assert "use it: --set" in result.stderr


def test_tune_ends_with_status_3_and_the_nearest_setting_where_none_fits(runner, job_file):
    result = runner.invoke(
        cli.app,
        ["tune", str(job_file), "--max-auc-drop", "100", "--budget-bytes", "1kB", "--samples", "2000", "--json"],
    )
    assert result.exit_code == 3, result.output
    document = json.loads(result.stdout)
    assert (document["meets_budget"], document["meets_drop"]) == (False, True)
    nearest = min(document["points"], key=lambda point: point["bytes_peak"])
    assert document["pick"] == nearest["name"]
    assert f"nearest: {nearest['name']};" in result.stderr
    assert "no setting fits --budget-bytes=1000" in result.stderr


@pytest.mark.parametrize("arguments", [["tune", "--budget-bytes", "lots"], ["tune", "--max-auc-drop", "-1"]])
def test_options_that_mean_nothing_are_status_2(runner, job_file, arguments):
    assert runner.invoke(cli.app, [arguments[0], str(job_file), *arguments[1:]]).exit_code == 2


def test_a_faulty_job_is_status_2_and_one_message(runner, job_file):
    for command in ("estimate", "tune"):
        result = runner.invoke(cli.app, [command, str(job_file), "--set", "embedding.polcy=idle"])
        assert (result.exit_code, "did you mean 'policy'" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "text"),
    [("estimate", "before anything is trained"), ("tune", "scored before it is trained on")],
)
def test_help_says_what_is_measured(runner, command, text):
    assert text in " ".join(runner.invoke(cli.app, [command, "--help"]).stdout.split())


def test_lines_of_an_estimate_stand_in_columns_and_name_the_sample():
    head, row, source, note = estimate_lines({"main": estimate_of(5_000_000)})
    assert len(head) == len(row)
    assert row.split() == ["main", "7", "0", "5.00", "0.00", "0.00", "0.00", "5.00", "5.00", "5.00"]
    assert "12.5% of the IDs" in source and "item 5.00" in source
    assert note == "main: a note"


def test_the_frontier_marks_the_pick_and_what_was_stopped():
    lines = frontier_lines(result_of())
    assert lines[1].endswith("frontier, PICK")
    assert lines[2].endswith("stopped after 300 samples")
    assert lines[3].endswith("frontier")


def test_the_pick_comes_with_what_is_doubtful():
    first, use = pick_lines(result_of())
    assert "2.0 MB at the peak, 75% less" in first
    assert use == "use it: --set embedding.policy=idle --set embedding.idle_samples=100"
    assert any("it may lose more than --max-auc-drop=0.05" in x for x in pick_lines(result_of(0, meets_drop=False)))
    assert any("it loses more than --max-auc-drop=0.05" in x for x in pick_lines(result_of(1, meets_drop=False)))
    assert any("idle 100 takes 2.0 MB and may do too" in x for x in pick_lines(result_of(2)))
    assert any("no setting fits" in line for line in pick_lines(result_of(0, meets_budget=False)))
    for doubtful in (result_of(0, meets_drop=False), result_of(0, meets_budget=False)):
        assert pick_lines(doubtful)[0].startswith("nearest: idle 100; ")
        assert pick_lines(doubtful)[-1].startswith("use it all the same: --set ")
        assert frontier_lines(doubtful)[1].endswith("frontier, NEAREST")
    assert pick_lines(result_of(2))[-1] == "use it: --set embedding.policy=off"


def test_a_model_that_learned_nothing_is_told():
    result = result_of()
    assert not any("hardly learned" in line for line in pick_lines(result))
    points = [replace(point, auc=0.505) for point in result.points]
    assert any("hardly learned" in line and "0.5050" in line for line in pick_lines(replace(result, points=points)))


def test_the_document_of_a_search_is_plain_data():
    document = json.loads(json.dumps(tuning_document(result_of())))
    assert [point["is_on_frontier"] for point in document["points"]] == [True, False, True]
    assert document["set"] == ["embedding.policy=idle", "embedding.idle_samples=100"]


def test_frozen_rows_that_do_not_fit_this_machine_are_to_be_prefetched(job_file):
    estimated = Estimate(3, 300, {}, 0, 6_000_000, 5_000_000, {})  # memory_peak, frozen_peak
    job = load_job(job_file)
    assert disk_notes(job, estimated, 11_000_000) == []
    (note,) = disk_notes(job, estimated, 10_000_000)
    assert "frozen rows reach 5.00 MB and this machine has 4.00 MB beside the hot ones" in note
    assert "set trainer.prefetch_frozen=true" in note
    assert "has 0.00 MB" in disk_notes(job, estimated, 1)[0]
    assert disk_notes(load_job(job_file, ["trainer.prefetch_frozen=true"]), estimated, 1) == []
    external = ["servers.store=remote", "servers.launch=external", "servers.addresses=['10.0.0.5:7100']"]
    assert disk_notes(load_job(job_file, external), estimated, 1) == []  # memory of other machines is not known here


def test_estimate_recommends_prefetching_on_a_small_machine(runner, job_file, monkeypatch):
    monkeypatch.setattr("services.doctor.usable_memory_bytes", lambda: 1000)
    result = runner.invoke(cli.app, ["estimate", str(job_file), "--json"])
    document = json.loads(result.stdout)
    assert any("prefetch_frozen" in note for note in document["arms"]["idle"]["notes"])
    assert not any("prefetch_frozen" in note for note in document["arms"]["full"]["notes"])
    assert "idle: frozen rows reach" in result.stderr
