"""Many seeds, over some processes; what became of each as text or figures, so that it can cross processes."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from embedding_server.failpoints import NAMES
from tests.simulation.bugs import BUGS
from tests.simulation.checked_shard import Violation
from tests.simulation.simulation import Outcome, Simulation

OPERATIONS = 1000


def run_seed(seed: int, operations: int = OPERATIONS, bug: str | None = None) -> Outcome | str:
    """The text of a Violation, or what was done without one. bug: of bugs.BUGS, planted for the while."""
    with BUGS[bug]() if bug is not None else contextlib.nullcontext():
        try:
            return Simulation(seed, operations).run()
        except Violation as violation:
            return str(violation)


def run_seeds(seeds: Sequence[int], operations: int, processes: int, bug: str | None = None) -> Iterator[Outcome | str]:
    """In the order of the seeds, as they are done."""
    run = partial(run_seed, operations=operations, bug=bug)
    if processes == 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"):  # the seeds share the cores, not each one
        os.environ.setdefault(name, "1")
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=logging.disable, initargs=(logging.WARNING,)
    )
    with pool:
        yield from pool.map(run, seeds, chunksize=2)


def never_hit(outcomes: Iterable[Outcome]) -> set[str]:
    """Failpoints that no run came to."""
    return set(NAMES) - {name for outcome in outcomes for name in outcome.failpoints}


def totals(outcomes: Sequence[Outcome]) -> str:
    """For people."""
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
    steps, attempts = sum(o.steps for o in outcomes), sum(o.attempts for o in outcomes)
    struck = ", ".join(f"{count} {name}" for name, count in sorted(faults.items())) or "none"
    return (
        f"{len(outcomes)} seeds clean, {sum(o.operations for o in outcomes)} operations, {steps} steps kept, "
        f"{attempts} worker groups; faults: {struck}"
    )
