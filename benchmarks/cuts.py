"""What a cut costs those who train and look up, and how soon a shard serves again: python -m benchmarks.cuts

    off, idle   5 million rows x 64 in one shard process over gRPC, policy off, and idle with a sixth of the rows hot:
                pause of the trainer, look-ups' p99 during a cut against before it, extra memory, bytes, a delta
                                                                                        (cut_under_load.py)
    large       25 million rows, 5% hot: from the start of a shard process to the first look-up   (cut_restore.py)

Writes benchmarks/results/cuts.json and prints a table; ends with status 1 if a limit is not met. Wants 6 GiB of memory
and 10 GiB of disk, and some five minutes. Figures of latency want a machine that nobody else uses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.cut_restore import measure_large
from benchmarks.cut_trainee import Policy, Size
from benchmarks.cut_under_load import DELTA_SHARE, LOOK_UPS_A_ROW, measure_policy
from benchmarks.harness import RESULTS, provenance, write_result
from services.allocator import set_allocator

LARGE_ROWS, HOT_SHARE = 25_000_000, 0.05
#: at most
LIMITS = {
    "pause_ms_off": 250.0,
    "pause_ms_idle": 250.0,
    "look_up_p99_factor_off": 2.0,
    "look_up_p99_factor_idle": 2.0,
    "memory_share_off": 0.1,
    "memory_share_idle": 0.1,
    "delta_share_off": 0.25,
    "serving_again_s": 10.0,
}


def measure(
    size: Size, large_rows: int, folder: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """The result document. folder: where everything lies meanwhile; None: the folder of temporary files."""
    runs: dict[str, Any] = {}
    for policy in get_args(Policy):
        say(f"policy {policy}: {size.rows} rows x {size.dim}")
        with tempfile.TemporaryDirectory(prefix="frostline-cuts-", dir=folder) as own:
            runs[policy] = measure_policy(size, policy, Path(own), say)
    say(f"large: {large_rows} rows x {size.dim}, {HOT_SHARE:.0%} hot")
    with tempfile.TemporaryDirectory(prefix="frostline-cuts-", dir=folder) as own:
        runs["large"] = measure_large(size, large_rows, HOT_SHARE, Path(own), say)
    config = {
        **vars(size), "large_rows": large_rows, "hot_share": HOT_SHARE, "look_ups_a_row": LOOK_UPS_A_ROW,
        "delta_share": DELTA_SHARE, "optimizer": "rowwise_adagrad", "zipf_exponent": 1.05,
    }  # fmt: skip
    return {
        "workload": "cuts",
        **provenance(),
        "config": config,
        "figures": _figures(runs),
        "limits": LIMITS,
        "runs": runs,
    }


def _figures(runs: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for policy in get_args(Policy):
        run = runs[policy]
        loads = run["loads"].values()
        figures |= {
            f"pause_ms_{policy}": max(run["first_cut"]["pause_ms"], *(load["pause_ms"] for load in loads)),
            f"look_up_p99_factor_{policy}": run["loads"]["training"]["p99_factor"],
            f"look_up_p99_factor_alone_{policy}": run["loads"]["alone"]["p99_factor"],
            f"memory_share_{policy}": max(load["memory_share"] for load in loads),
            f"new_bytes_{policy}": run["first_cut"]["new_bytes"],
            f"new_bytes_a_hot_row_{policy}": run["first_cut"]["new_bytes_a_hot_row"],
            f"delta_share_{policy}": run["delta"]["share_of_full"],
            f"restore_s_{policy}": run["restore"]["restore_s"],
        }
    figures["serving_again_s"] = runs["large"]["warm"]["total_s"]
    figures["serving_again_cold_s"] = runs["large"]["cold"]["total_s"]
    return figures


def missed(document: dict[str, Any]) -> list[str]:
    """Names of the limits that the document's figures do not meet."""
    return [name for name, limit in LIMITS.items() if not document["figures"][name] <= limit]


def table_of(document: dict[str, Any]) -> Table:
    table = Table("figure", "is", "at most", "")
    for name, figure in document["figures"].items():
        limit = LIMITS.get(name)
        verdict = "" if limit is None else "MISSED" if name in missed(document) else "met"
        table.add_row(name, f"{figure:,}", "" if limit is None else f"{limit:g}", verdict)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuts", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=Size().rows, help="a smaller figure for a quick look")
    parser.add_argument("--large-rows", type=int, default=LARGE_ROWS)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default that of temporary files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    set_allocator()  # as every process that moves rows does
    document = measure(size_of(arguments.rows), arguments.large_rows, arguments.folder, _say)
    print(f"wrote {write_result(document, arguments.out)}")
    Console().print(table_of(document))
    return 1 if missed(document) else 0


def size_of(rows: int) -> Size:
    """With steps that are no more than a twentieth of the rows."""
    size = Size()
    most = max(1, rows // 20)
    return replace(
        size, rows=rows, new_per_step=min(size.new_per_step, most), draws_per_step=min(size.draws_per_step, most)
    )


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
