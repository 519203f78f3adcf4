"""python -m benchmarks.quality [--smoke] [--processes N] [--only TEXT] [--fresh] [--work DIR] [--out DIR]

Runs the cases of a study that have no result yet, side by side in processes of one thread each, and then writes
quality.json and quality.png. What ran before is kept under --work, one line per case, so a study that was stopped goes
on where it stood. Ends with status 1 if a criterion of a full study is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, provenance, write_result
from benchmarks.quality.acceptance import check, shown
from benchmarks.quality.cases import full_cases, smoke_cases
from benchmarks.quality.chart import draw_frontier
from benchmarks.quality.comparison import BASELINE, Compared, compare
from benchmarks.quality.contestants import CONTESTANTS, OPTIMIZERS
from benchmarks.quality.results import Results
from benchmarks.quality.runner import Say, run_cases
from benchmarks.quality.samples import MOVIELENS, stream_spec
from benchmarks.quality.training import Case

WORK = ROOT / "runs" / "quality"


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    name = "quality-smoke" if arguments.smoke else "quality"
    cases = smoke_cases() if arguments.smoke else full_cases()
    cases = [case for case in cases if arguments.only in case.key]
    folder = arguments.work / name
    if arguments.fresh:
        (folder / "cases.jsonl").unlink(missing_ok=True)
    results = Results(folder)
    run_cases(results, cases, arguments.processes, _say)
    compared = report(name, results, cases, arguments.out, _say)
    if any(results.of(case) is None for case in cases):
        return 1
    return 0 if arguments.smoke else judge(compared, _say)


def judge(compared: Sequence[Compared], say: Say) -> int:
    """Says which criteria are met; status 1 if one is missed."""
    criteria = check(compared)
    for criterion in criteria:
        say(f"{'met   ' if criterion.is_met else 'MISSED'} {criterion.name}: {criterion.figure}")
    return 0 if all(criterion.is_met for criterion in criteria) else 1


def report(name: str, results: Results, cases: Sequence[Case], out: Path, say: Say) -> list[Compared]:
    """Prints the table, writes NAME.json and NAME.png."""
    compared = compare(results, cases)
    criteria = check(compared)
    for line in table_of(compared):
        say(line)
    document = {
        "workload": name,
        **provenance(),
        **_settings(cases),
        "criteria": [asdict(criterion) for criterion in criteria],
        "compared": [c.as_json() for c in compared],
    }
    say(f"wrote {write_result(document, out)}")
    panels = _panels(compared)
    if panels:
        draw_frontier(panels, out / f"{name}.png")
        say(f"wrote {out / f'{name}.png'}")
    return compared


def table_of(compared: Sequence[Compared]) -> list[str]:
    """One line per contestant, by stream, optimizer and data pass, most bytes first."""
    lines = []
    for title, group in _grouped(compared).items():
        oracle = group[0].oracle_auc
        of_truth = f", of the truth {oracle:.4f}" if oracle else ""
        lines.append(f"{title}: AUC of off {_auc_of_off(group):.4f}{of_truth}")
        lines.append(
            f"  {'':12} {'saved end':>9} {'peak':>7} {'gradients':>9}   AUC difference x 100 and its 95% interval"
        )
        for c in sorted(group, key=lambda c: c.saved_end):
            lines.append(
                f"  {c.contestant:12} {c.saved_end:9.1%} {c.saved_peak:7.1%} {c.gradient_rows_saved:9.1%}   {shown(c)}"
                f" ({c.difference.kind}, {c.difference.num_seeds} seeds)"
            )
    return lines


def _settings(cases: Sequence[Case]) -> dict[str, Any]:
    streams = {case.stream: asdict(stream_spec(case.stream, case.share)) for case in cases if case.stream != MOVIELENS}
    names = dict.fromkeys(case.contestant for case in cases)
    return {
        "config": {
            "streams": streams,
            "contestants": {name: asdict(CONTESTANTS[name]) for name in names},
            "optimizers": {name: optimizer.as_json() for name, optimizer in OPTIMIZERS.items()},
            "cases": [case.key for case in cases],
        }
    }


def _grouped(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = {}
    for c in compared:
        groups.setdefault(f"{c.stream}, {c.optimizer}, data pass {c.data_pass}", []).append(c)
    return groups


def _panels(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Groups in which there is something to see beside `off` and one more."""
    return {title: group for title, group in _grouped(compared).items() if len(group) > 2}


def _auc_of_off(group: Sequence[Compared]) -> float:
    return next((c.auc for c in group if c.contestant == BASELINE), float("nan"))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="S1 at a fiftieth, one seed: two minutes")
    parser.add_argument("--processes", type=int, default=2, help="cases that run side by side")
    parser.add_argument("--only", default="", help="only cases with this in their name, such as S1-idle or seed0")
    parser.add_argument("--fresh", action="store_true", help="forgets results of earlier runs")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of results by case and of test scores")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file and the chart")
    return parser.parse_args(argv)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
