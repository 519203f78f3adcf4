"""The simulation finds bugs: each one that is planted, within a few seeds."""

from __future__ import annotations

import re

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.runs import run_seed

_MOST_SEEDS = 20
_OPERATIONS = 600


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_is_caught(bug: str, record_property: pytest.RecordProperty) -> None:
    for seed in range(_MOST_SEEDS):
        outcome = run_seed(seed, _OPERATIONS, bug)
        if isinstance(outcome, str):
            record_property("seeds_until_caught", seed + 1)
            print(f"{bug}: caught by seed {seed}")
            assert re.match(rf"seed {seed}: .+\n", outcome), "the message begins with the seed and what is wrong"
            assert f"make simulate SEED={seed}" in outcome
            return
    pytest.fail(f"{bug} was not caught by {_MOST_SEEDS} seeds")
