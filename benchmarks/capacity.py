"""How many bytes a row takes, and how tall a table may be: python -m benchmarks.capacity [--shape SHAPE] [--rows N]

    rows         bytes of a hot row, and of a frozen one in 4 and 8 bits after churn   (capacity_rows.py)
    tall         200 million IDs x 128 with segments on disk, in 14 GiB                (capacity_tall.py)
    tall-memory  100 million IDs x 64 with segments in memory, in 14 GiB               (capacity_tall.py)
    all          the three, each in a process of its own

Writes benchmarks/results/capacity.json, capacity_tall.json and capacity_tall_memory.json; ends with status 1 if a limit
is not met. The tall shapes want 40 GiB of disk and 16 GiB of free memory, and take 10 to 30 minutes each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import capacity_rows, capacity_tall
from benchmarks.harness import RESULTS, write_result
from services.allocator import set_allocator

SHAPES = ("rows", "tall", "tall-memory")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=(*SHAPES, "all"), default="all")
    parser.add_argument("--rows", type=int, help="a smaller figure for a quick look")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if arguments.shape == "all":  # memory that one leaves behind is no memory of the next
        rest = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--shape", "all")]
        command = [sys.executable, "-m", "benchmarks.capacity", *rest]
        return max(subprocess.call([*command, "--shape", shape]) for shape in SHAPES)
    measure = _measure_rows if arguments.shape == "rows" else _measure_tall
    document, missed = measure(arguments)
    print(f"wrote {write_result(document, arguments.out)}")
    for name, figure in document["figures"].items():
        print(f"{name}: {figure}{' MISSED' if name in missed else ''}")
    return 1 if missed else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _measure_rows(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    size = capacity_rows.Size()
    size = replace(size, rows=arguments.rows or size.rows, dim=arguments.dim or size.dim)
    size = replace(size, rows_per_step=min(size.rows_per_step, max(1, size.rows // 20)))
    document = capacity_rows.measure(size, _say)
    limits = capacity_rows.LIMITS
    return document, [name for name, limit in limits.items() if document["figures"][name] > limit]


def _measure_tall(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    set_allocator()  # as every process that moves rows does: a step's rows are one large buffer
    shape = capacity_tall.TALL if arguments.shape == "tall" else capacity_tall.TALL_MEMORY
    shape = replace(shape, rows=arguments.rows or shape.rows, dim=arguments.dim or shape.dim)
    document = capacity_tall.measure(shape, _say)
    return document, capacity_tall.missed(document)


if __name__ == "__main__":
    sys.exit(main())
