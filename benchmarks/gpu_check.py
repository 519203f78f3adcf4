"""The FBGEMM backend on a GPU: right first, then fast. python -m benchmarks.gpu_check [--rows N] [--on-cpu]

Compares FbgemmHotRows with the plain torch reference after every step, for each optimizer and wire dtype, then a whole
shard on either backend over freezing and thawing; then measures gather and apply beside the numba kernels. With no GPU
it says so in one line and ends with status 0. `--on-cpu` runs the same comparisons on FBGEMM's CPU path (no adam).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, provenance, summarise, time_ms, write_result
from embedding_server.hot_rows import CpuHotRows, HotRows, ReferenceHotRows
from embedding_server.kernels import why_not_fbgemm
from embedding_server.kernels.wire import from_float32, to_float32
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import TRAINABLE, WIRE_NUMPY, Identity, WireDtype

DIM = 64
STEPS = 8
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of a gathered value: half a unit in the last place
WIRE_DTYPES: tuple[WireDtype, ...] = ("float32", "float16", "bfloat16")
OPTIMIZERS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
LEARNING_RATE = 0.05

MakeRows = Callable[[int, OptimizerSpec, int], HotRows]


def compare_rows(make_rows: MakeRows, kind: OptimizerKind, wire_dtype: WireDtype, num_rows: int = 5_000) -> float:
    """Largest difference from the reference in gathered values, weights and state over STEPS steps.

    AssertionError names what differs by more than the tolerance.
    """
    random = np.random.default_rng(0)
    spec = TableSpec(name="gpu-check", dim=DIM, optimizer=OptimizerSpec(kind=kind))
    ours, reference = (make(DIM, spec.optimizer, num_rows) for make in (make_rows, ReferenceHotRows))
    slots = np.arange(num_rows, dtype=np.int32)
    for rows in (ours, reference):
        rows.initialise(slots, row_ids(num_rows), spec)
    worst = difference(ours.read(slots)[0], reference.read(slots)[0], 0.0, f"initial values: {kind}")
    for step in range(1, STEPS + 1):
        named = random.choice(slots, num_rows // 2, replace=False)
        positions = np.arange(len(named), dtype=np.int32)
        gradients = from_float32(random.normal(0, 0.1, (len(named), DIM)).astype(np.float32), wire_dtype)
        gathered = []
        for rows in (ours, reference):
            rows.apply(named, gradients, positions, wire_dtype, 0.5, LEARNING_RATE, step)
            out = np.empty((len(named), DIM), WIRE_NUMPY[wire_dtype])
            rows.gather(named, out, positions, wire_dtype)
            gathered.append(to_float32(out, wire_dtype))
        what = f"{kind}, {wire_dtype}, step {step}"
        worst = max(worst, difference(gathered[0], gathered[1], TOLERANCE[wire_dtype], f"gathered rows: {what}"))
        for name, mine, theirs in zip(("weights", "state"), ours.read(slots), reference.read(slots), strict=True):
            worst = max(worst, difference(mine, theirs, TOLERANCE["float32"], f"{name}: {what}"))
    for rows in (ours, reference):
        rows.close()
    return worst


def compare_shards(backend: str, kind: OptimizerKind, num_rows: int = 4_000) -> float:
    """Largest difference of all rows between a shard on `backend` and one on the reference, over freezes and thaws."""
    spec = TableSpec(
        name="rows", dim=DIM, optimizer=OptimizerSpec(kind=kind), policy=PolicySpec(idle_steps=2, frozen_bits=32)
    )
    shards = [Shard(backend=name, memory_limit_bytes=1 << 30) for name in (backend, "reference")]
    who = Identity("gpu-check", 1, 0)
    for shard in shards:
        shard.create_tables([spec])
        shard.begin_epoch(who.job, 1, "sync", 1)
    random = np.random.default_rng(1)
    for step in range(1, 4 * STEPS + 1):
        named = random.choice(row_ids(num_rows), num_rows // 8, replace=False)
        gradients = random.normal(0, 0.1, (len(named), DIM)).astype(np.float32)
        for shard in shards:
            train_and_reselect(shard, who, step, named, gradients)
    found = [shard.lookup({"rows": row_ids(num_rows)}, "float32")["rows"] for shard in shards]
    moved = [shard.stats().total() for shard in shards]
    assert moved[0].moves_frozen == moved[1].moves_frozen > 0, "the shards froze different rows"
    assert moved[0].moves_thawed == moved[1].moves_thawed > 0, "the shards thawed different rows"
    for shard in shards:
        shard.close()
    return difference(
        found[0].values, found[1].values, TOLERANCE["float32"], f"look-up after {4 * STEPS} steps: {kind}"
    )


def train_and_reselect(shard: Shard, who: Identity, step: int, named: np.ndarray, gradients: np.ndarray) -> None:
    rows = shard.pull(who, step, {"rows": named}, "float32").result()["rows"]
    assert bool(np.all(rows.flags & TRAINABLE))
    shard.push(who, step, {"rows": ShardGradients(named, gradients, LEARNING_RATE)}, "float32").result()
    done = False
    while not done:
        _, done = shard.reselect(who, step, {})
    while shard.maintain():
        pass


def row_ids(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.int64) * 7919 - num_rows


def difference(ours: np.ndarray, reference: np.ndarray, tolerance: float, what: str) -> float:
    """max |ours - reference| / max(1, |reference|); AssertionError above the tolerance."""
    if not ours.size:
        return 0.0
    worst = float(np.max(np.abs(ours - reference) / np.maximum(1.0, np.abs(reference))))
    assert worst <= tolerance, f"{what}: differs by {worst:.3g}, tolerance {tolerance:g}"
    return worst


def measure_rows(make_rows: MakeRows, num_rows: int, repeats: int = 5) -> dict[str, Any]:
    """M rows/s of gather and of row-wise Adagrad, 100,000 rows a call out of num_rows, float32."""
    optimizer = OptimizerSpec(kind="rowwise_adagrad")
    rows = make_rows(DIM, optimizer, num_rows)
    slots = np.arange(num_rows, dtype=np.int32)
    state = np.full((num_rows, 1), 0.1, np.float32)
    rows.write(slots, np.zeros((num_rows, DIM), np.float32), state)
    named = np.random.default_rng(2).choice(slots, min(100_000, num_rows), replace=False)
    positions = np.arange(len(named), dtype=np.int32)
    values = np.zeros((len(named), DIM), np.float32)
    calls = {
        "gather": lambda: rows.gather(named, values, positions, "float32"),
        "apply": lambda: rows.apply(named, values, positions, "float32", 1.0, LEARNING_RATE, 1),
    }
    figures = {}
    for name, call in calls.items():
        call()
        figures[name] = summarise([len(named) / time_ms(call, 10) / 1e3 for _ in range(repeats)], "M rows/s")
    rows.close()
    return figures


def run(make_rows: MakeRows, optimizers: Sequence[OptimizerKind], num_rows: int) -> dict[str, Any]:
    """All comparisons, then all figures; prints a line for each."""
    differences = {}
    for kind in optimizers:
        for wire_dtype in WIRE_DTYPES:
            differences[f"rows {kind} {wire_dtype}"] = compare_rows(make_rows, kind, wire_dtype)
        differences[f"shard {kind}"] = compare_shards("fbgemm", kind)
    for name, worst in differences.items():
        print(f"gpu-check: {name}: equal to the reference, worst difference {worst:.2g}", flush=True)
    figures = {"fbgemm": measure_rows(make_rows, num_rows), "cpu": measure_rows(CpuHotRows, num_rows)}
    for backend, calls in figures.items():
        for name, figure in calls.items():
            print(f"gpu-check: {backend} {name}: {figure['median']:.1f} {figure['unit']}", flush=True)
    return {"differences": differences, "figures": figures}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table that is measured")
    parser.add_argument("--on-cpu", action="store_true", help="compare FBGEMM's CPU path instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    reason = why_not_fbgemm()
    if reason and not arguments.on_cpu:
        print(f"gpu-check: skipped: {reason}")
        return 0
    from embedding_server.kernels.fbgemm import FbgemmHotRows

    optimizers = tuple(kind for kind in OPTIMIZERS if not (reason and kind == "adam"))
    result = run(FbgemmHotRows, optimizers, arguments.rows)
    device = "FBGEMM's CPU path" if reason else "GPU"
    document = {"workload": "gpu_check", **provenance(), "config": {"device": device, "rows": arguments.rows}, **result}
    print(f"gpu-check: passed on {device}; wrote {write_result(document, arguments.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
