"""python -m benchmarks WORKLOAD [WORKLOAD ...] [--repeats N] [--case NAME] [--set key=value] [--out DIR]"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import MIN_REPEATS, RESULTS, discover, run_workload, write_result


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    workloads = discover()
    if arguments.list or not arguments.workload:
        for workload in workloads.values():
            print(f"{workload.name:<16} {workload.summary} [{', '.join(case.name for case in workload.cases)}]")
        return 0
    names = list(workloads) if arguments.workload == ["all"] else arguments.workload
    unknown = [name for name in names if name not in workloads]
    if unknown:
        print(f"no workload {', '.join(unknown)!r}; the workloads are {', '.join(workloads)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"{name}: {workloads[name].summary}", flush=True)
        document = run_workload(workloads[name], arguments.repeats, arguments.case, _overrides(arguments.set), _say)
        path = write_result(document, arguments.out)
        _print_ratios(document)
        print(f"{name}: wrote {path}", flush=True)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workload", nargs="*", help="names, or `all`; none lists them")
    parser.add_argument("--repeats", type=int, default=MIN_REPEATS, help=f"at least {MIN_REPEATS}")
    parser.add_argument("--case", action="append", default=[], help="only this case of the workload (may be repeated)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides a config key")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--list", action="store_true", help="lists workloads and their cases")
    return parser.parse_args(argv)


def _overrides(pairs: list[str]) -> dict[str, Any]:
    """["batch=2048", "wire_dtype=float16"] -> {"batch": 2048, "wire_dtype": "float16"}; values are JSON or text."""
    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise SystemExit(f"--set {pair!r} is not KEY=VALUE; write for example --set batch=2048")
        try:
            overrides[key] = json.loads(text)
        except json.JSONDecodeError:
            overrides[key] = text
    return overrides


def _print_ratios(document: dict[str, Any]) -> None:
    for case_name, case in document["cases"].items():
        ours = case["ours"]
        print(f"  {case_name}: ours {ours['median']:.4g} {ours['unit']} (min {ours['min']:.4g}, max {ours['max']:.4g})")
        for rival, value in case["ratio"].items():
            print(f"  {case_name}: {value:.2f}x of {rival} ({case['rivals'][rival]['median']:.4g} {ours['unit']})")
        for name, net in case["net"].items():
            print(f"  {case_name}: {name} minus {net['control']}: {net['median']:.4g} {ours['unit']}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
