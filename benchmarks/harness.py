"""Measures ours and rivals side by side: one run, alternating, one JSON file per workload.

A workload is one or more cases (shapes). A case names its contestants: `ours`, `rivals`, and `controls` (what both
sides contain anyway, such as the dense layers alone; measured, never raced). Each contestant is a callable that takes
what `setup` returned and gives one figure in the case's unit. One repeat runs every contestant once; the order rotates
with each repeat, so that no contestant always runs on a warm or a throttled machine.

    benchmarks/results/WORKLOAD.json
      workload, commit, dirty, versions, machine       what was measured, where
      config, ours, rivals, ratio, controls, net       of the first case
      cases: {name: {config, ours, ...}}               every case, the first included

`ours`, each rival and each control: {median, min, max, unit, samples}. ratio > 1 means that we are faster: rival / ours
for times and sizes, ours / rival for units that end in "/s". `net` is a contestant minus its control, repeat by repeat.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import pkgutil
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MIN_REPEATS = 5
OURS = "ours"

State = Any
Contestant = Callable[[State], float]

_PACKAGES = ("numpy", "numba", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "grpcio", "protobuf", "ray")


@dataclass(frozen=True)
class Case:
    """One shape of a workload.

    `setup(config)` builds what all contestants share and returns it; `teardown(state)` ends processes and frees it.
    A contestant does its own timing (see `time_ms`) and returns one figure in `unit`.
    `net_of` maps a contestant to the control to subtract, e.g. {"ours": "dense_alone"}.
    """

    name: str
    config: Mapping[str, Any]
    unit: str  # "ms", "s", "bytes": lower is better; "GB/s", "rows/s": higher is better
    ours: Contestant
    rivals: Mapping[str, Contestant] = field(default_factory=dict)
    controls: Mapping[str, Contestant] = field(default_factory=dict)
    net_of: Mapping[str, str] = field(default_factory=dict)
    setup: Callable[[dict[str, Any]], State] = lambda config: config
    teardown: Callable[[State], None] = lambda state: None
    warmups: int = 1  # unrecorded runs of each contestant before the first repeat


@dataclass(frozen=True)
class Workload:
    name: str
    summary: str  # one line, shown by --list
    cases: Sequence[Case]


def discover() -> dict[str, Workload]:
    """Every workload of benchmarks/workloads/*.py by name."""
    package = importlib.import_module("benchmarks.workloads")
    found: dict[str, Workload] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"benchmarks.workloads.{module_info.name}")
        for workload in getattr(module, "WORKLOADS", ()):
            if workload.name in found:
                raise ValueError(f"workload {workload.name!r} is defined twice; rename the one in {module.__name__}")
            found[workload.name] = workload
    return found


def time_ms(function: Callable[[], object], iterations: int = 1) -> float:
    """Milliseconds of one call, averaged over `iterations`, with the garbage collector held off."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(iterations):
            function()
        return (time.perf_counter() - start) * 1e3 / iterations
    finally:
        gc.enable()


def throughput_gb_s(function: Callable[[], object], size_bytes: int, iterations: int = 1) -> float:
    """GB/s (10^9 bytes) of a call that moves `size_bytes`."""
    return size_bytes / 1e6 / time_ms(function, iterations)


def higher_is_better(unit: str) -> bool:
    return unit.endswith("/s")


def summarise(samples: Sequence[float], unit: str) -> dict[str, Any]:
    """{median, min, max, unit, samples} of one contestant."""
    rounded = [float(f"{sample:.6g}") for sample in samples]
    return {
        "median": statistics.median(rounded),
        "min": min(rounded),
        "max": max(rounded),
        "unit": unit,
        "samples": rounded,
    }


def ratio(ours: Mapping[str, Any], rival: Mapping[str, Any]) -> float:
    """Ratio of the medians, above 1 when we are faster."""
    better, worse = ours["median"], rival["median"]
    value = better / worse if higher_is_better(ours["unit"]) else worse / better
    return round(value, 4)


def run_case(case: Case, repeats: int, overrides: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Runs one case and returns its part of the result file."""
    if repeats < MIN_REPEATS:
        raise ValueError(f"repeats={repeats} is below {MIN_REPEATS}, the least that gives a median worth quoting")
    config = {**case.config, **_known_overrides(case, overrides)}
    contestants = {OURS: case.ours, **case.rivals, **case.controls}
    say(f"  {case.name}: setting up {json.dumps(config)}")
    state = case.setup(dict(config))
    try:
        samples = _alternate(contestants, state, repeats, case, say)
    finally:
        case.teardown(state)
    return _case_result(case, config, samples)


def run_workload(
    workload: Workload,
    repeats: int = MIN_REPEATS,
    case_names: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs a workload's cases (all, or those named) and returns the whole result document."""
    cases = [case for case in workload.cases if not case_names or case.name in case_names]
    if not cases:
        known = ", ".join(case.name for case in workload.cases)
        raise ValueError(f"workload {workload.name!r} has no case {', '.join(case_names)!r}; its cases are {known}")
    results = {case.name: run_case(case, repeats, overrides or {}, say) for case in cases}
    first = results[cases[0].name]
    return {"workload": workload.name, **provenance(), **first, "cases": results}


def write_result(document: Mapping[str, Any], out_dir: Path = RESULTS) -> Path:
    """Writes WORKLOAD.json by temporary name and rename; returns its path."""
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"{document['workload']}.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n")
    temporary.rename(path)
    return path


def provenance() -> dict[str, Any]:
    """commit, dirty, versions and machine of this run."""
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version(), **_package_versions()},
        "machine": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_gib": _memory_gib()},
    }


def _alternate(
    contestants: Mapping[str, Contestant], state: State, repeats: int, case: Case, say: Callable[[str], None]
) -> dict[str, list[float]]:
    for _ in range(case.warmups):
        for run in contestants.values():
            run(state)
    names = list(contestants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(float(contestants[name](state)))
        latest = ", ".join(f"{name} {samples[name][-1]:.4g}" for name in names)
        say(f"  {case.name}: {repeat + 1}/{repeats} [{case.unit}] {latest}")
    return samples


def _case_result(case: Case, config: Mapping[str, Any], samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    figures = {name: summarise(values, case.unit) for name, values in samples.items()}
    net = {}
    for name, control in case.net_of.items():
        differences = [a - b for a, b in zip(samples[name], samples[control], strict=True)]
        net[name] = {"control": control, **summarise(differences, case.unit)}
    return {
        "config": dict(config),
        OURS: figures[OURS],
        "rivals": {name: figures[name] for name in case.rivals},
        "ratio": {name: ratio(figures[OURS], figures[name]) for name in case.rivals},
        "controls": {name: figures[name] for name in case.controls},
        "net": net,
    }


def _known_overrides(case: Case, overrides: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(overrides) - set(case.config))
    if unknown:
        known = ", ".join(case.config)
        raise ValueError(f"case {case.name!r} has no config key {', '.join(unknown)!r}; its keys are {known}")
    return dict(overrides)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
