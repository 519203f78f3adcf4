from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import capacity_rows, capacity_tall
from benchmarks.capacity_rows import LIMITS, Size
from benchmarks.capacity_tall import LIMITS_LEAST, LIMITS_MOST, Shape, draw_ranks, row_ids_of, run_job
from benchmarks.memory import PeakWatch

#: id 8, accumulator 1, visits 1, and a row of 64 values with its scale and bias
FROZEN_ROW_BYTES = {4: 8 + 1 + 1 + 36, 8: 8 + 1 + 1 + 72}


def test_phases_account_for_every_row() -> None:
    size = Size(rows=20_000, dim=64, rows_per_step=5_000, churn_rounds=2)
    document = capacity_rows.measure(size, say=lambda line: None)
    assert document["figures"].keys() >= LIMITS.keys()
    for bits, least in FROZEN_ROW_BYTES.items():
        phases = document["runs"][f"{bits}bit"]["phases"]
        hot, frozen, churned = (phases[name] for name in ("hot", "frozen", "churned"))
        assert (hot["rows_hot"], hot["rows_frozen"]) == (size.rows, 0)
        assert (frozen["rows_hot"], frozen["rows_frozen"]) == (0, size.rows)
        assert (churned["rows_hot"], churned["rows_frozen"]) == (0, size.rows)
        assert churned["moves_frozen"] - frozen["moves_frozen"] == 2 * size.rows * size.churn_fraction
        assert churned["moves_thawed"] == 2 * size.rows * size.churn_fraction
        assert frozen["segment_file_bytes"] == frozen["accounted_segment_bytes"]
        assert least <= frozen["segment_row_bytes"] < least + 1
        assert churned["segment_row_bytes"] <= least / 0.8 + 1  # merged at 20% dead
    json.dumps(document)


def test_drawn_ranks_follow_zipf() -> None:
    ranks = draw_ranks(np.random.default_rng(0), 1_000_000, 400_000)
    assert ranks.min() == 0
    assert ranks.max() < 1_000_000
    counts = np.bincount(ranks, minlength=1_000_000)
    for start, end in ((10, 100), (100, 1_000), (1_000, 10_000)):
        # the mass of [start, end) under the continuous law
        mass = (start + 1.0) ** -0.05 - (end + 1.0) ** -0.05
        expected = 400_000 * mass / (1.0 - 1_000_001.0**-0.05)
        assert counts[start:end].sum() == pytest.approx(expected, rel=0.05)
    assert np.unique(row_ids_of(np.arange(10_000))).shape[0] == 10_000


@pytest.mark.parametrize("hot_bits", [16, 32])
def test_a_tall_table_keeps_every_row_in_little_memory(tmp_path: Path, hot_bits: int) -> None:
    """The tall shape at 5 million IDs (1 million with hot rows of 32 bits): run_job looks up IDs spread over all."""
    rows = 5_000_000 if hot_bits == 16 else 1_000_000
    shape = Shape(
        rows=rows,
        dim=32,
        hot_bits=hot_bits,
        draws_per_step=30_000,
        idle_steps=4,
        reselect_every=8,
        train_steps=16,
        memory_limit_bytes=1 << 30,
    )
    with PeakWatch() as watch:
        figures = run_job(shape, tmp_path, watch, say=lambda line: None)
    assert figures["rows_hot"] + figures["rows_frozen"] == rows
    assert figures["rows_hot"] < 0.05 * rows
    assert figures["rows_unfreezable"] == 0
    assert figures["moves_thawed"] > 0.01 * rows
    assert figures["index_row_bytes"] < 23
    # 16 + 4 + 10 bytes a row, dead rows a fifth at most, and what the last re-selection wrote
    assert figures["segment_row_bytes"] < 30 / 0.75
    assert figures["largest_step"]["factor"] < 2.0
    assert figures["events"] == []
    json.dumps(figures)


def test_limits_name_figures_of_the_tall_shapes(tmp_path: Path) -> None:
    shape = Shape(rows=20_000, dim=8, new_per_step=1_000, draws_per_step=500, idle_steps=2, reselect_every=4)
    shape = Shape(**{**vars(shape), "train_steps": 8, "hot_bits": 32, "memory_limit_bytes": 1 << 28})
    document = capacity_tall.measure(shape, say=lambda line: None)
    assert document["figures"].keys() >= LIMITS_MOST.keys() | LIMITS_LEAST.keys()
    document["figures"].update(peak_held_gib=15.0, reselect_ratio=0.1, steps_ratio_fill=1.0, steps_ratio_train=1.0)
    assert capacity_tall.missed(document) == ["peak_held_gib", "reselect_ratio"]
    json.dumps(document)
