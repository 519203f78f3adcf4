"""`python -m tests.simulation --seeds 500`, or `--seed N`: what `make simulate` runs. Status 1: a rule was broken."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from tests.simulation.bugs import BUGS
from tests.simulation.runs import OPERATIONS, never_hit, run_seeds, totals
from tests.simulation.simulation import Outcome

_SHOWN_EVERY = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.simulation", description="Simulates shards and workers that fail.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=500, help="how many, from --first on (500)")
    which.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--operations", type=int, default=OPERATIONS, help=f"before nothing fails any more ({OPERATIONS})"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bug", choices=sorted(BUGS), help="planted: seeds must fail then")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # what the code under test says of planted troubles
    seeds = [given.seed] if given.seed is not None else list(range(given.first, given.first + given.seeds))
    started_s, clean, failed = time.monotonic(), [], 0
    for number, outcome in enumerate(run_seeds(seeds, given.operations, given.processes, given.bug), 1):
        if isinstance(outcome, Outcome):
            clean.append(outcome)
        else:
            failed += 1
            print(outcome, flush=True)
        if number % _SHOWN_EVERY == 0:
            print(f"simulate: {number} of {len(seeds)} seeds, {failed} failed", flush=True)
    print(f"simulate: {totals(clean)}; {failed} failed; {time.monotonic() - started_s:.0f} s")
    if len(seeds) == 1 and clean:
        print(f"simulate: digest {clean[0].digest}")
    elif len(clean) > _SHOWN_EVERY and never_hit(clean):
        print(f"simulate: failpoints that were never hit: {', '.join(sorted(never_hit(clean)))}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
