"""Settings of every test: threads, hypothesis, and what a process must not inherit.

Two cores run the whole suite, so each test process keeps to one thread of each pool: results do not depend on how a
pool splits its work, and several processes of one test do not fight over the cores.
"""

from __future__ import annotations

import os

# Read when the libraries load, so they stand before any import that could load one; processes of a test inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
from hypothesis import HealthCheck, settings

# Numba compiles inside the first example, so no example has a deadline; no test here is timed.
settings.register_profile(
    "frostline",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "frostline"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test under tests/containers or tests/gpu carries its marker by its place."""
    for item in items:
        for folder in ("containers", "gpu"):
            if f"/tests/{folder}/" in item.path.as_posix():
                item.add_marker(getattr(pytest.mark, folder))
