from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_HEAT_BANDS, MaskInfo, TableStats
from tests.trainer.masks import FILM, USER, counts, snapshot
from trainer.mask_report import (
    ControlReport,
    Snapshot,
    board_scalars,
    histogram_of,
    lower_edges,
    mask_document,
    total_stats,
)


def test_the_document_is_json_and_says_everything_of_a_table():
    document = json.loads(json.dumps(mask_document(snapshot()), allow_nan=False))
    assert (document["job"], document["arm"], document["step"], document["samples"]) == ("job", "topk", 50, 5000)
    user = document["tables"]["user"]
    assert user["policy"] == PolicySpec(kind="topk").model_dump(mode="json")
    assert (user["dim"], user["optimizer"]) == (8, "adam")
    assert user["rows"] == {
        "hot": 30, "frozen": 70, "probation": 0, "unfreezable": 2, "ignored": 0, "default_reads": 0, "erased": 5,
    }  # fmt: skip
    assert user["bytes"] == {
        "total": 350, "peak": 900, "hot": 300, "state": 0, "frozen": 0, "index": 50, "heat": 0, "erasure_pending": 4096,
    }  # fmt: skip
    assert user["moves"] == {
        "frozen": 80, "frozen_idle": 60, "frozen_rank": 20, "frozen_limit": 0, "thawed": 9, "thawed_visit": 9,
        "thawed_rank": 0, "forgotten": 4,
    }  # fmt: skip
    assert user["frostline"] == {"bin": 77, "tie_fraction": 0.25, "heat": 1.5}
    assert user["topk_overlap"] == 0.75
    assert user["share_of_hot_rows"] == 0.75
    assert user["traffic"] == {
        "rows_pulled": 1000, "rows_default": 100, "gradient_rows": 600, "gradient_rows_saved": 300,
        "bytes_push_saved": 12_000,
    }  # fmt: skip
    assert user["update_frequency"] == 600 / (50 * 100)
    assert user["control"]["is_alarm"] is True
    histogram = user["heat_histogram"]
    assert (sum(histogram["hot"]), sum(histogram["frozen"])) == (30, 70)
    assert len(histogram["lower_edges"]) == len(histogram["hot"]) == NUM_HEAT_BANDS


def test_the_document_adds_up_tables_and_names_the_one_with_most_hot_rows():
    document = mask_document(snapshot())
    assert document["total"]["rows"]["hot"] == 40
    assert document["total"]["bytes"]["peak"] == 1000
    assert document["total"]["traffic"]["gradient_rows"] == 650
    assert document["total"]["traffic"]["bytes_push_saved"] == 12_000
    assert document["largest_hot_table"] == {"table": "user", "share": 0.75}
    assert document["events"] == ["something"]


def test_the_total_is_what_the_store_said():
    assert total_stats(mask_document(snapshot())) == USER + FILM


def test_updates_a_step_are_those_of_the_steps_that_the_traffic_is_of():
    document = mask_document(replace(snapshot(), since_step=30))
    assert document["since_step"] == 30
    assert document["tables"]["user"]["update_frequency"] == 600 / (20 * 100)
    assert mask_document(replace(snapshot(), since_step=50))["tables"]["user"]["update_frequency"] is None


def test_what_a_table_lacks_is_null():
    film = mask_document(snapshot())["tables"]["film"]
    assert (film["frostline"], film["topk_overlap"], film["control"]) == (None, None, None)


def test_an_empty_store_has_a_document_too():
    empty = Snapshot("j", "a", 0, 0, {"user": TableSpec(name="user", dim=4)}, {"user": MaskInfo(TableStats())}, {})
    document = mask_document(empty)
    assert document["largest_hot_table"] is None
    assert document["tables"]["user"]["update_frequency"] is None
    assert document["tables"]["user"]["traffic"]["gradient_rows_saved"] == 0
    assert board_scalars(document)["rows/hot"] == 0


def test_scalars_for_the_board():
    scalars = board_scalars(mask_document(snapshot()))
    assert scalars["rows/hot"] == 40
    assert scalars["moves/frozen_idle"] == 60
    assert scalars["traffic/gradient_rows_saved"] == 300
    assert scalars["rows/share_of_largest_hot_table"] == 0.75
    assert scalars["table_user/bytes_total"] == 350
    assert scalars["table_user/frostline_heat"] == 1.5
    assert scalars["table_user/topk_overlap"] == 0.75
    assert scalars["control/user/low"] == 0.003
    assert scalars["control/user/alarm"] == 1.0
    assert not any(tag.startswith("control/film") for tag in scalars)
    assert all(math.isfinite(value) for value in scalars.values())


@pytest.mark.parametrize(("low", "is_alarm"), [(0.0021, True), (0.002, False), (-1.0, False), (None, False)])
def test_an_alarm_needs_a_lower_bound_above_max_loss(low, is_alarm):
    assert ControlReport(0.01, low, 0.02, 1, 1, max_loss=0.002).is_alarm is is_alarm


def test_bands_are_half_octaves():
    edges = lower_edges()
    assert edges[0] == 0.0
    assert edges[16] == 1.0
    assert edges[18] == pytest.approx(2.0)
    assert edges[63] == pytest.approx(2.0**23.5)


def test_a_histogram_for_the_board_is_over_octaves():
    histogram = histogram_of(counts(b16=2, b19=3).tolist())
    assert histogram == {
        "min": 0.0,
        "max": 2.0,
        "num": 5,
        "sum": pytest.approx(2 * 0.25 + 3 * 1.75),
        "sum_squares": pytest.approx(2 * 0.25**2 + 3 * 1.75**2),
        "bucket_limits": [0.5, 1.0, 1.5, 2.0],
        "bucket_counts": [2, 0, 0, 3],
    }
    assert histogram_of(counts().tolist()) is None
