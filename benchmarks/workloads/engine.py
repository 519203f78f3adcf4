"""`engine`: the embeddings alone, in one process, against TorchRec's DistributedModelParallel."""

from __future__ import annotations

from typing import Any

from benchmarks import engine
from benchmarks.harness import Case, Workload

_ONE_HOT: dict[str, Any] = {"batch_size": 4096, "is_multihot": False}
_MLPERF: dict[str, Any] = {"batch_size": 2048, "is_multihot": True}
_SHAPES = [("onehot_64", _ONE_HOT, 64), ("mlperf_64", _MLPERF, 64), ("mlperf_128", _MLPERF, 128)]


def _case(name: str, shape: dict[str, Any], dim: int, threads: int) -> Case:
    return Case(
        name=f"{name}_{threads}t",
        config={
            **shape,
            "dim": dim,
            "threads": threads,
            "rows_per_table": 100_000,
            "zipf_exponent": 1.05,
            "num_batches": 4,
            "steps": 8,
        },
        unit="ms",
        ours=engine.run_ours,
        rivals={"torchrec_dmp": engine.run_torchrec},
        setup=engine.setup,
        teardown=engine.teardown,
    )


WORKLOADS = [
    Workload(
        "engine",
        "dedup, gather, pooling, backward and row-wise Adagrad in one process, against TorchRec's DMP",
        [_case(name, shape, dim, threads) for threads in (1, 2) for name, shape, dim in _SHAPES],
    )
]
