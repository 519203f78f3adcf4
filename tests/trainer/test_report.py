from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from embedding_server.store import TableStats, WireStats
from trainer.metrics import Metrics
from trainer.report import (
    PUBLISHED_CLAIM,
    ArmSummary,
    Progress,
    ProgressShow,
    bias_only_line,
    claim_lines,
    event_lines,
    final_table,
    restart_lines,
    resume_lines,
    summarise_arm,
    write_json,
    write_summary,
)

#: the keys that issue 1 names, in its order, those that say what freezing did, those of snapshots
KEYS = [
    "test_auc", "test_logloss", "test_ne", "bytes_total", "bytes_hot", "bytes_state", "bytes_frozen", "bytes_index",
    "bytes_heat", "rows_hot", "rows_frozen", "rows_probation", "bytes_pulled", "bytes_pushed", "rows_pushed",
    "samples_per_s", "wall_s", "bytes_peak", "rows_push_saved", "bytes_push_saved", "mask_info", "steps", "snapshots",
    "snapshots_delta", "snapshots_failed", "snapshots_skipped", "snapshot_pause_s_max", "snapshot_bytes", "snapshot_s",
    "snapshot_last_error", "resumed_from", "resumed_step",
    "restarts",
]  # fmt: skip

ROWS = TableStats(
    rows_hot=10,
    rows_frozen=30,
    rows_probation=2,
    bytes_hot=1000,
    bytes_state=200,
    bytes_frozen=300,
    bytes_index=40,
    bytes_heat=5,
)
WIRE = WireStats(bytes_pulled=7, bytes_pushed=8, rows_pulled=9, rows_pushed=10)
FULL = summarise_arm(ROWS, WIRE, Metrics(0.8, 0.5, 0.9, 100), num_samples=5000, train_s=2.0, wall_s=3.0)


def text_of(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_json_has_exactly_the_keys_of_the_contract(tmp_path):
    path = tmp_path / "runs" / "job" / "summary.json"
    write_summary(path, {"full": FULL, "idle": replace(FULL, rows_hot=3)})
    document = json.loads(path.read_text())
    assert list(document) == ["full", "idle"]
    assert list(document["full"]) == KEYS
    assert document["full"]["bytes_total"] == 1545
    assert document["full"]["samples_per_s"] == 2500.0
    assert document["full"]["rows_pushed"] == 10
    assert document["idle"]["rows_hot"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


def test_without_test_samples_metrics_are_null_and_so_is_nan(tmp_path):
    none = summarise_arm(ROWS, WIRE, None, 10, 1.0, 1.0)
    nan = summarise_arm(ROWS, WIRE, Metrics(float("nan"), 0.5, float("nan"), 1), 10, 1.0, 1.0)
    write_summary(tmp_path / "summary.json", {"a": none, "b": nan})
    document = json.loads((tmp_path / "summary.json").read_text())
    assert (document["a"]["test_auc"], document["a"]["test_logloss"]) == (None, None)
    assert (document["b"]["test_auc"], document["b"]["test_logloss"]) == (None, 0.5)


def test_a_summary_takes_what_was_saved_from_the_mask_info():
    mask = {"total": {"traffic": {"gradient_rows_saved": 30, "bytes_push_saved": 700}}}
    peak = replace(ROWS, bytes_peak=2000)
    summary = summarise_arm(peak, WIRE, None, num_samples=1, train_s=1.0, wall_s=1.0, mask=mask)
    assert (summary.rows_push_saved, summary.bytes_push_saved, summary.bytes_peak) == (30, 700, 2000)
    assert summary.mask_info == mask
    assert (FULL.rows_push_saved, FULL.bytes_peak, FULL.mask_info) == (0, 1545, {})


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_final_table_compares_arms_with_the_first():
    text = text_of(
        final_table({"full": FULL, "topk": replace(FULL, test_auc=0.79, rows_pushed=5, bytes_total=1_000_000)})
    )
    assert "0.7900 (-0.0100)" in text
    assert "5 (-50%)" in text
    assert "1.00 MB" in text
    assert "1.54 kB" in text


def test_events_are_told_once_by_arm_with_the_share_of_default_rows():
    mask = {"events": ["full", "full"], "total": {"traffic": {"rows_pulled": 200, "rows_default": 50}}}
    assert event_lines({"main": replace(FULL, mask_info=mask), "quiet": FULL}) == [
        "main: event: full (2 times)",
        "main: 50 rows pulled (25%) were the default row",
    ]


def test_a_resumed_arm_says_which_of_its_figures_are_of_the_steps_since():
    resumed = replace(FULL, resumed_from="/snapshots/job/cut-000000001156-1", resumed_step=1156)
    (line,) = resume_lines({"full": FULL, "idle": resumed})
    assert line.startswith("idle: went on from the snapshot of step 1,156: peak bytes, traffic, gradient rows,")
    assert resume_lines({"full": FULL}) == []


def test_final_table_shows_a_dash_where_there_is_no_metric():
    (line,) = [t for t in text_of(final_table({"main": replace(FULL, test_auc=None)})).splitlines() if "test AUC" in t]
    assert line.split("│")[2].strip() == "-"


def test_the_published_claim_stands_beside_our_topk():
    topk = replace(FULL, bytes_total=927, samples_per_s=3000.0, test_auc=0.796)
    lines = claim_lines({"full": FULL, "idle": FULL, "topk": topk})
    assert lines[:2] == [
        "topk against full here: memory -40%, speed 1.20x, AUC -0.5% (relative)",
        PUBLISHED_CLAIM,
    ]
    assert claim_lines({"full": FULL}) == []
    assert claim_lines({"topk": topk}) == []


def test_bias_only_line():
    assert "test AUC 0.7412, logloss 0.5800, NE 0.8900" in bias_only_line(Metrics(0.7412, 0.58, 0.89, 10))


def shown(reports: list[Progress], log_every_s: float) -> list[str]:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    with ProgressShow(console, log_every_s) as show:
        for report in reports:
            show.update(report)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def at(step: int, arm: str = "full") -> Progress:
    return Progress(arm, step, 10, 51234.4, 0.61, 0.93, 0.71)


def test_without_a_terminal_a_line_comes_now_and_then_and_for_the_last_step():
    lines = shown([at(1), at(2), at(3), at(10), at(10)], log_every_s=3600.0)
    assert lines == [
        "full: step 1/10, 51,234 samples/s, loss 0.6100, NE 0.9300, AUC 0.7100",
        "full: step 10/10, 51,234 samples/s, loss 0.6100, NE 0.9300, AUC 0.7100",
    ]


def test_an_event_is_told_at_once():
    note = replace(at(2), note="table 'user': too much is lost")
    assert shown([at(1), note], log_every_s=3600.0)[1:] == ["full: step 2: table 'user': too much is lost"]


def test_on_a_terminal_every_arm_has_a_bar_with_its_figures():
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    with ProgressShow(console, 1.0) as show:
        show.say("full: trains")
        show.update(at(10))
        show.update(at(4, "topk"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "full: trains" in text
    assert "10/10" in text
    assert "4/10" in text
    assert "AUC 0.7100" in text


def test_summary_fields_are_the_contract():
    assert list(ArmSummary.__dataclass_fields__) == KEYS


def test_restarts_are_told_of_at_the_end():
    assert restart_lines({"full": FULL}) == []
    (line,) = restart_lines({"full": FULL, "idle": replace(FULL, restarts=2)})
    assert line.startswith("idle: lost a process and went back to a snapshot 2 times; ")
