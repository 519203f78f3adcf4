from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.harness import Case, Workload, ratio, run_workload, summarise, write_result


def figures(*values: float) -> Callable[[Any], float]:
    """A contestant that gives these figures in turn."""
    rest = list(values)
    return lambda state: rest.pop(0)


def quiet(line: str) -> None: ...


def run(case: Case, **kwargs: Any) -> dict[str, Any]:
    return run_workload(Workload("example", "an example", [case]), say=quiet, **kwargs)


def test_ratio_is_above_one_when_a_smaller_time_is_ours() -> None:
    case = Case("small", {}, "ms", figures(10, 12, 8, 10, 10), {"rival": figures(20, 20, 26, 20, 18)}, warmups=0)
    document = run(case)
    assert document["ours"] == {"median": 10, "min": 8, "max": 12, "unit": "ms", "samples": [10, 12, 8, 10, 10]}
    assert document["rivals"]["rival"]["median"] == 20
    assert document["ratio"] == {"rival": 2.0}


@pytest.mark.parametrize(
    ("unit", "expected"), [("ms", 0.5), ("s", 0.5), ("bytes", 0.5), ("GB/s", 2.0), ("rows/s", 2.0)]
)
def test_ratio_follows_the_unit(unit: str, expected: float) -> None:
    assert ratio(summarise([4.0], unit), summarise([2.0], unit)) == expected


def test_contestants_alternate_and_the_order_rotates() -> None:
    calls: list[str] = []

    def contestant(name: str) -> Callable[[Any], float]:
        return lambda state: calls.append(name) or 1.0

    rivals = {"a": contestant("a")}
    case = Case("turns", {}, "ms", contestant("ours"), rivals, {"alone": contestant("alone")}, warmups=1)
    run(case)
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert turns[0] == ["ours", "a", "alone"]  # the warm-up, of which nothing is kept
    assert turns[1:] == [
        ["ours", "a", "alone"],
        ["a", "alone", "ours"],
        ["alone", "ours", "a"],
        ["ours", "a", "alone"],
        ["a", "alone", "ours"],
    ]


def test_net_is_taken_repeat_by_repeat() -> None:
    controls = {"dense": figures(5, 5, 9, 5, 5)}
    case = Case("net", {}, "ms", figures(7, 7, 11, 7, 7), {}, controls, net_of={"ours": "dense"}, warmups=0)
    assert run(case)["net"]["ours"] == {
        "control": "dense", "median": 2, "min": 2, "max": 2, "unit": "ms", "samples": [2, 2, 2, 2, 2],
    }  # fmt: skip


def test_setup_gets_the_config_with_overrides_and_teardown_its_state() -> None:
    seen: list[Any] = []
    case = Case(
        "state",
        {"batch": 1, "dim": 64},
        "ms",
        ours=lambda state: float(state["batch"]),
        setup=lambda config: seen.append(config) or config,
        teardown=lambda state: seen.append("down"),
    )
    document = run(case, overrides={"batch": 9})
    assert seen == [{"batch": 9, "dim": 64}, "down"]
    assert document["config"] == {"batch": 9, "dim": 64}
    assert document["ours"]["median"] == 9


def test_teardown_runs_when_a_contestant_fails() -> None:
    downs: list[Any] = []

    def fail(state: Any) -> float:
        raise RuntimeError("no luck")

    case = Case("fails", {}, "ms", fail, setup=lambda config: "state", teardown=downs.append)
    with pytest.raises(RuntimeError, match="no luck"):
        run(case)
    assert downs == ["state"]


def test_the_document_has_what_the_issue_asks_for(tmp_path: Path) -> None:
    case = Case("one", {"n": 3}, "GB/s", lambda state: 2.0, {"rival": lambda state: 1.0})
    document = run(case)
    path = write_result(document, tmp_path)
    assert path == tmp_path / "example.json"
    assert json.loads(path.read_text()) == document
    assert document.keys() >= {"workload", "commit", "versions", "config", "ours", "rivals", "ratio"}
    assert document["ours"].keys() >= {"median", "min", "max", "unit"}
    assert document["versions"]["numpy"]
    assert document["cases"].keys() == {"one"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"repeats": 4}, "repeats=4 is below 5"),
        ({"case_names": ["two"]}, "has no case 'two'; its cases are one"),
        ({"overrides": {"m": 1}}, "has no config key 'm'; its keys are n"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Case("one", {"n": 3}, "ms", lambda state: 1.0), **kwargs)


def test_every_workload_is_found_and_well_formed() -> None:
    for name, workload in harness.discover().items():
        assert workload.name == name
        assert workload.cases
        for case in workload.cases:
            contestants = {harness.OURS, *case.rivals}
            assert set(case.net_of) <= contestants, f"{name}/{case.name}: net_of names no contestant"
            assert set(case.net_of.values()) <= set(case.controls), f"{name}/{case.name}: net_of names no control"
            json.dumps(dict(case.config))
