"""How many random moments the tests of kill -9 try: FROSTLINE_CHAOS_SEEDS of each kind (make chaos SEEDS=25)."""

from __future__ import annotations

import os
from typing import Any

import pytest

NUM_SEEDS = int(os.environ.get("FROSTLINE_CHAOS_SEEDS", "2"))


def seeds(num_quick: int) -> list[Any]:
    """Parameters of a test: seeds 0, 1, ..., of which those from num_quick on are slow."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_quick, NUM_SEEDS)]
    return [*range(min(num_quick, NUM_SEEDS)), *slow]
