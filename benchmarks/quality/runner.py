"""Runs the cases of a study side by side. A module of its own: a spawned process cannot import from a __main__."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.quality.results import Results, save_outcome
from benchmarks.quality.training import Case, run_case

Say = Callable[[str], None]


def run_cases(results: Results, cases: Sequence[Case], num_processes: int, say: Say) -> None:
    """Runs what has no result yet. With several processes, a case that fails is named and the others go on."""
    waiting = [case for case in cases if results.of(case) is None]
    say(f"{len(cases)} cases, {len(waiting)} to run in {num_processes} processes")
    start = time.perf_counter()
    for number, (case, line) in enumerate(_run_all(waiting, results.folder, num_processes), 1):
        if isinstance(line, Exception):
            say(f"{number}/{len(waiting)} {case.key} failed: {line!r}")
            continue
        results.add(line)
        last = line["passes"][-1]
        say(
            f"{number}/{len(waiting)} {line['key']}: AUC {last['auc']:.4f}, {last['bytes_end'] / 1e6:.0f} MB, peak"
            f" {last['bytes_peak'] / 1e6:.0f} MB; {line['seconds']} s, {(time.perf_counter() - start) / 60:.1f} min"
        )


def run_one(case: Case, folder: Path) -> dict[str, Any]:
    """One case in this process; its result line."""
    start = time.perf_counter()
    outcome = run_case(case)
    return save_outcome(folder, case, outcome, time.perf_counter() - start)


def _run_all(
    cases: Sequence[Case], folder: Path, num_processes: int
) -> Iterator[tuple[Case, dict[str, Any] | Exception]]:
    if num_processes < 2 or len(cases) < 2:
        yield from ((case, run_one(case, folder)) for case in cases)
        return
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when the libraries load
        os.environ[variable] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        futures = {pool.submit(run_one, case, folder): case for case in cases}
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, Exception):
                yield futures[future], error
            else:
                yield futures[future], future.result()
