from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from embedding_server.errors import InvalidInput
from tests.trainer.masks import snapshot
from trainer.failures import FAILURES_FILE, Failure, ProcessEnd
from trainer.inspection import describe, read_run
from trainer.mask_report import MASK_FILE, ControlReport, mask_document
from trainer.report import write_json

DOCUMENT = mask_document(snapshot())


def text_of(documents) -> str:
    console = Console(file=io.StringIO(), width=200)
    for part in describe(documents):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for at, arm in enumerate(["topk", "idle"]):
        path = tmp_path / "runs" / "job" / arm / MASK_FILE
        write_json(path, {**DOCUMENT, "arm": arm})
        os.utime(path, (1000 + at, 1000 + at))
    return tmp_path / "runs" / "job"


def test_a_run_is_read_by_folder_by_name_and_by_arm(run, monkeypatch):
    assert list(read_run(run)) == ["topk", "idle"]  # as they ended
    assert read_run(run / "idle") == {"idle": {**DOCUMENT, "arm": "idle"}}
    monkeypatch.chdir(run.parents[1])
    assert list(read_run(Path("job"))) == ["topk", "idle"]
    assert list(read_run(Path("runs/job"))) == ["topk", "idle"]


def test_failures_of_a_run_are_told(run):
    failure = Failure(
        "2026-01-02T03:04:05+00:00", 132, "shard 1 was killed by SIGKILL", [ProcessEnd("shard 1", "was killed")],
        restart=1, cut="/mnt/cut-000000000100-1", back_to_step=100, epoch=2, away_s=9.54,
    )  # fmt: skip
    write_json(run / "idle" / FAILURES_FILE, [asdict(failure), asdict(Failure("2026-01-02", 140, "gone", []))])
    documents = read_run(run)
    assert "failures" not in documents["topk"]
    assert documents["idle"]["failures"][0]["processes"][0]["who"] == "shard 1"
    text = text_of({"idle": documents["idle"]})
    assert (
        "failure at 2026-01-02T03:04:05+00:00: step 132: shard 1 was killed by SIGKILL; restart 1 went back to step "
        "100 (cut-000000000100-1), epoch 2, training again after 9.5 s" in text
    )
    assert "step 140: gone; the job failed" in text
    (run / "idle" / FAILURES_FILE).write_text('[{"time": 1}]')
    with pytest.raises(InvalidInput, match=rf"idle.{FAILURES_FILE}: is no record of failures"):
        read_run(run)


def test_what_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(InvalidInput, match=r"absent: is no folder; give the folder of a run"):
        read_run(tmp_path / "absent")
    with pytest.raises(InvalidInput, match=rf"no arm in it has a {MASK_FILE}"):
        read_run(tmp_path)
    no_rows = json.dumps({**DOCUMENT, "tables": {"user": {}}})
    for content in ("{", "[]", '{"job": 1}', "\udcff", "[" * 100_000, no_rows, json.dumps({**DOCUMENT, "tables": []})):
        (run / "topk" / MASK_FILE).write_text(content, errors="surrogateescape")
        with pytest.raises(InvalidInput, match=rf"topk.{MASK_FILE}: .*run the job again"):
            read_run(run)


def test_people_see_rows_bytes_moves_ranks_heat_and_events():
    text = text_of({"topk": DOCUMENT})
    assert "job, arm topk: step 50, 5,000 samples" in text
    user = [line for line in text.splitlines() if "user" in line]
    assert all(part in user[0] for part in ("topk", "30", "75%", "70", "300 B", "350 B", "900 B"))
    assert all(part in user[1] for part in ("60", "20", "9", "4", "5 (4.10 kB pending)", "2"))
    assert all(part in user[2] for part in ("1.5", "75.0%", "0.12", "600", "300 (33%)", "12.00 kB"))
    assert all(part in user[3] for part in ("+0.0040", "+0.0030", "+0.0050", "5,000", "0.002", "too much is lost"))
    assert "table 'user' holds 75% of all hot rows" in text
    assert "event: something" in text
    assert "all" in text


def test_samples_and_traffic_of_a_resumed_run_are_said_to_be_of_the_steps_since():
    text = text_of({"topk": {**DOCUMENT, "since_step": 30}})
    assert "step 50, 5,000 samples since step 30, as all traffic below" in text


def test_an_event_that_was_repeated_is_shown_once_with_its_count():
    text = text_of({"topk": {**DOCUMENT, "events": ["a limit", "something", "a limit"]}})
    assert text.count("event: ") == 2
    assert "event: a limit (2 times)" in text


def test_heat_is_drawn_an_octave_a_column():
    lines = text_of({"topk": DOCUMENT}).splitlines()
    (hot,) = [line for line in lines if "user hot" in line]
    (frozen,) = [line for line in lines if "user frozen" in line]
    assert hot.endswith("|        █▄| 30 rows")
    assert frozen.endswith("|█         | 70 rows")
    assert lines[lines.index(frozen) + 1].index("#") == hot.index("█")


def test_a_table_without_rows_and_without_a_verdict():
    empty = replace(snapshot(), control={}, traffic={}, step=0)
    text = text_of({"a": mask_document(empty)})
    assert "film" in text
    assert "may freeze" not in text


def test_a_table_may_have_any_name():
    odd = "[/red]"
    given = snapshot()
    renamed = replace(
        given, specs={**given.specs, odd: given.specs["film"]}, infos={**given.infos, odd: given.infos["film"]}
    )
    assert text_of({"a": mask_document(renamed)}).count(odd) == 3  # one line in each table


def test_a_verdict_that_waits_says_so():
    control = {"user": ControlReport(None, None, None, 12, 300, max_loss=0.002)}
    (line,) = [
        line
        for line in text_of({"a": mask_document(replace(snapshot(), control=control))}).splitlines()
        if "too" in line
    ]
    assert "too little seen" in line
    assert "too much" not in line


def test_inspecting_imports_neither_torch_nor_numba():
    code = "import sys, trainer.inspection; print([m for m in ('torch', 'numba', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_documents_survive_json():
    assert json.loads(json.dumps(DOCUMENT, allow_nan=False)) == DOCUMENT
