"""Snapshots and tables that somebody made to do harm: refused within a second and 100 MB, with the file named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.damage.hostile import CASES
from tests.damage.hostile_imports import make_imports

MAX_CPU_S, MAX_KIB = 1.0, 100_000_000 // 1024
#: `ckpt ls` reads JSON, sizes and which frozen rows are live; what else is wrong is verify's to find
LISTED = ("manifest: ", "record: ")
#: a server of rows alone reads neither the dense layers nor what training needs of a row
NOT_SERVED = (
    "dense: ",
    "hot: a step to come",
    "frozen: an ID that waits twice",
    "frozen: IDs of the other part",  # that wait
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hostile")
    make_imports(folder / "imports")
    command = [sys.executable, "-m", "tests.damage.hostile_child", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("name"): line for line in lines}


def test_each_is_refused_and_the_file_named(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() >= CASES.keys()
    assert len(found) > len(CASES) + 60
    missed = []
    for name, case in found.items():
        for way, of_way in case["ways_in"].items():
            told = of_way["refusal"]
            if way == "serve" and name.startswith(NOT_SERVED) and not told:
                continue
            if way != "ls" and not (told and Path(case["must_name"]).name in told):
                missed.append((name, way, told[:300]))
    assert not missed


def test_none_takes_a_second_or_100_megabytes(found: dict[str, dict[str, Any]]) -> None:
    costs = [(of["cpu_s"], of["kib"], name, way) for name, case in found.items() for way, of in case["ways_in"].items()]
    assert [cost for cost in costs if cost[0] >= MAX_CPU_S or cost[1] >= MAX_KIB] == []
