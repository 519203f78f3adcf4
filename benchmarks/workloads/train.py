"""`train_onehot` and `train_multihot`: whole steps of DLRM, ours over gRPC, TorchRec in process."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import train
from benchmarks.harness import Case, Workload


def _case(name: str, batch_size: int, is_multihot: bool, wire_dtype: str) -> Case:
    config: dict[str, Any] = {
        "batch_size": batch_size,
        "is_multihot": is_multihot,
        "dim": 64,
        "rows_per_table": 100_000,
        "zipf_exponent": 1.05,
        "num_batches": 8,
        "steps": 16,
        "threads": 2,
        "num_shards": 2,
        "wire_dtype": wire_dtype,
        "policy": "idle",
    }
    rivals = {
        "torchrec_1_rank_same_dense": partial(train.run, contestant="torchrec_1_same"),
        "torchrec_1_rank_as_shipped": partial(train.run, contestant="torchrec_1_as_shipped"),
        "torchrec_2_ranks_same_dense": partial(train.run, contestant="torchrec_2_same"),
        "torchrec_2_ranks_as_shipped": partial(train.run, contestant="torchrec_2_as_shipped"),
    }
    controls = {
        "dense_alone": partial(train.run, contestant="frostline", what="dense_alone"),
        "dense_alone_as_shipped": partial(train.run, contestant="torchrec_1_as_shipped", what="dense_alone"),
    }
    return Case(
        name=name,
        config=config,
        unit="ms",
        ours=partial(train.run, contestant="frostline"),
        rivals=rivals,
        controls=controls,
        net_of={
            "ours": "dense_alone",
            "torchrec_1_rank_same_dense": "dense_alone",
            "torchrec_1_rank_as_shipped": "dense_alone_as_shipped",
        },
        setup=train.setup,
        teardown=train.teardown,
    )


WORKLOADS = [
    Workload(
        "train_onehot",
        "DLRM 512-256-64 / 512-512-256-1, batch 4096, 26 x 64, two shards over gRPC, against TorchRec in process",
        [_case("float32_rows", 4096, False, "float32"), _case("bfloat16_rows", 4096, False, "bfloat16")],
    ),
    Workload(
        "train_multihot",
        "the same with MLPerf's 214 values a sample, batch 2048",
        [_case("float32_rows", 2048, True, "float32"), _case("bfloat16_rows", 2048, True, "bfloat16")],
    ),
]
