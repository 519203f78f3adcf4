"""Some seeds of the simulation, what they must reach, and that a seed is a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.runs import never_hit, run_seed
from tests.simulation.simulation import Outcome

_SEEDS = range(14)
_OPERATIONS = 700
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome | str]:
    return [run_seed(seed, _OPERATIONS) for seed in _SEEDS]


def test_seeds_break_no_rule(outcomes: list[Outcome | str]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcome
    struck = {name for outcome in outcomes for name in outcome.faults}
    assert struck == {"shard", "worker", "driver", "power", "crash"}
    assert sum(outcome.steps for outcome in outcomes) > 100


def test_every_failpoint_is_hit(outcomes: list[Outcome | str]) -> None:
    assert never_hit([outcome for outcome in outcomes if isinstance(outcome, Outcome)]) == set()


def test_a_seed_is_a_run() -> None:
    """The same operations with the same outcomes, in this process and in one that hashes strings in another way."""
    seed, operations = 17, 300
    first, second = run_seed(seed, operations), run_seed(seed, operations)
    assert isinstance(first, Outcome), first
    assert first == second
    environ = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--operations", str(operations)]
    other = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    assert f"digest {first.digest}" in other.stdout
