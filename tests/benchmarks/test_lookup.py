"""The benchmark of look-ups on a few rows: both servers give the same rows, and limits that are missed are named."""

from __future__ import annotations

import pytest

from benchmarks import lookup
from benchmarks.harness import run_case
from benchmarks.lookup_clients import CALLS, RANKING, Shape

TINY = Shape(rows=12_000, user_rows=20, item_rows=600)


def test_both_servers_give_the_same_rows_and_figures_of_them() -> None:
    pytest.importorskip("hiredis")
    contest = lookup.start(TINY)  # raises if a client reads other rows than the others
    try:
        case = run_case(lookup.case_of(contest, "redis_ranking", TINY), 5, {}, lambda line: None)
    finally:
        contest.stack.close()
    assert case["config"]["rows"] == 7_505
    assert case["config"]["tables"] == 20
    assert case["ratio"].keys() == {"redis_ranking"}
    assert case["ratio"]["redis_ranking"] > 0
    assert contest.bytes_per_row.keys() == {"ours", "redis"}
    assert min(contest.bytes_per_row.values()) > 64 * 4 * 0.5


def test_requests_name_known_rows_without_repeats() -> None:
    tables = TINY.tables()
    for request in CALLS:
        ids = TINY.calls(request)
        assert len(ids) == CALLS[request]
        for name, row_ids in ids[0].items():
            assert len(set(row_ids.tolist())) == len(row_ids)
            assert set(row_ids.tolist()) <= set(tables[name].tolist())
    assert {name: len(row_ids) for name, row_ids in ids[0].items()} == RANKING


def test_limits_that_are_missed_are_named() -> None:
    document = {"limits": lookup.LIMITS, "ratio": dict.fromkeys(lookup.CASES, 5.0) | {"redis_1000": 1.1}}
    assert lookup.missed(document) == ["redis_1000: 1.10x of Redis, the limit is 1.2x"]
