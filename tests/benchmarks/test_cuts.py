"""The benchmark of cuts on a few thousand rows: its figures are those of the cuts that it took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cuts
from benchmarks.cut_look_ups import LookUps
from benchmarks.cut_restore import measure_large
from benchmarks.cut_trainee import Size
from benchmarks.cut_under_load import measure_policy

TINY = replace(cuts.size_of(20_000), cuts=1, least_s=0.1, idle_steps=4, step_s=0.02)


def test_figures_of_a_policy_are_those_of_its_cuts(tmp_path: Path) -> None:
    run = measure_policy(TINY, "off", tmp_path, say=lambda line: None)
    first, later, delta = run["first_cut"], run["later_cut"], run["delta"]
    for cut in (first, later, delta):
        assert cut["rows"] == TINY.rows
        assert cut["rows_hot"] == TINY.rows
    # row_id, weights, accumulator, last step, heat and visits of each row; headers
    assert 8 + 256 + 4 + 4 + 2 + 1 < first["new_bytes_a_hot_row"] < 285
    assert first["new_bytes"] == pytest.approx(later["new_bytes"], rel=0.01)
    assert delta["new_bytes"] < later["new_bytes"]
    assert delta["share_of_full"] == pytest.approx(delta["new_bytes"] / later["new_bytes"], abs=1e-4)
    assert run["restore"]["rows"] == TINY.rows
    for load in run["loads"].values():
        assert min(load["look_ups"]) > 0 and load["pause_ms"] > 0 and load["p99_factor"] > 0
    json.dumps(run)
    document = {
        "figures": cuts._figures({"off": run, "idle": run, "large": {"warm": {"total_s": 2}, "cold": {"total_s": 3}}})
    }
    assert document["figures"].keys() >= cuts.LIMITS.keys()
    document["figures"].update(
        dict.fromkeys(cuts.LIMITS, 0.0) | {"pause_ms_idle": 251.0, "delta_share_off": float("nan")}
    )
    assert cuts.missed(document) == ["pause_ms_idle", "delta_share_off"]
    assert cuts.table_of(document).row_count == len(document["figures"])


def test_a_large_snapshot_serves_the_same_rows_again(tmp_path: Path) -> None:
    run = measure_large(TINY, 50_000, 0.05, tmp_path, say=lambda line: None)
    assert run["cut"]["rows"] == 50_000 and run["cut"]["rows_hot"] == 2_500
    assert run["cut"]["linked_bytes"] > 46 * 47_500, "frozen rows of 4 bits are linked, and not written again"
    assert run["cut"]["new_bytes"] < 2_500 * 275 + 50_000 * 3
    assert run["warm"]["rows"] == run["cold"]["rows"] == 50_000
    assert run["warm"]["total_s"] >= run["warm"]["process_s"] + run["warm"]["restore_s"] - 0.02
    assert not (tmp_path / "again").exists()


def test_look_ups_count_in_the_intervals_in_which_they_were_under_way(tmp_path: Path) -> None:
    look_ups = LookUps("nowhere:1", Size(), 10, tmp_path)
    look_ups.times = np.array([[0.0, 1.0], [2.0, 2.5], [3.0, 7.0], [8.0, 8.1]])
    assert look_ups.durations([(0.5, 2.2), (5.0, 6.0)]).tolist() == [1.0, 0.5, 4.0]
    assert look_ups.durations([(1.0, 2.0)]).tolist() == []
