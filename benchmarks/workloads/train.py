"""`train_onehot` and `train_multihot`: whole steps of DLRM, ours over gRPC, TorchRec in process."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import train
from benchmarks.harness import Case, Workload


def _case(name: str, shape: dict[str, Any], wire_dtype: str, dense: str) -> Case:
    config: dict[str, Any] = {
        **shape,
        "dim": 64,
        "rows_per_table": 100_000,
        "zipf_exponent": 1.05,
        "num_batches": 8,
        "steps": 12,
        "threads": 2,
        "num_shards": 2,
        "wire_dtype": wire_dtype,
        "policy": "idle",
        "dense": dense,
    }
    rivals = {
        "torchrec_1_rank_as_shipped": partial(train.run, contestant="torchrec_1_as_shipped"),
        "torchrec_2_ranks_as_shipped": partial(train.run, contestant="torchrec_2_as_shipped"),
    }
    controls = {"dense_alone": partial(train.run, contestant="frostline", what="dense_alone")}
    net_of = {"ours": "dense_alone", "torchrec_1_rank_as_shipped": "dense_alone"}
    if dense == "same":
        rivals["torchrec_1_rank_same_dense"] = partial(train.run, contestant="torchrec_1_same")
        rivals["torchrec_2_ranks_same_dense"] = partial(train.run, contestant="torchrec_2_same")
        controls["dense_alone_as_shipped"] = partial(train.run, contestant="torchrec_1_as_shipped", what="dense_alone")
        net_of |= {
            "torchrec_1_rank_same_dense": "dense_alone",
            "torchrec_1_rank_as_shipped": "dense_alone_as_shipped",
        }
    return Case(
        name=name,
        config=config,
        unit="ms",
        ours=partial(train.run, contestant="frostline"),
        rivals=rivals,
        controls=controls,
        net_of=net_of,
        setup=train.setup,
        teardown=train.teardown,
    )


def _cases(shape: dict[str, Any]) -> list[Case]:
    """Rows of 32 and of 16 bits on the wire under our default dense layers, and torch's own layers on both sides."""
    return [
        _case("float32_rows", shape, "float32", "same"),
        _case("bfloat16_rows", shape, "bfloat16", "same"),
        _case("torch_dense", shape, "float32", "as_shipped"),
        _case("torch_dense_bfloat16_rows", shape, "bfloat16", "as_shipped"),
    ]


WORKLOADS = [
    Workload(
        "train_onehot",
        "DLRM 512-256-64 / 512-512-256-1, batch 4096, 26 x 64, two shards over gRPC, against TorchRec in process",
        _cases({"batch_size": 4096, "is_multihot": False}),
    ),
    Workload(
        "train_multihot",
        "the same with MLPerf's 214 values a sample, batch 2048",
        _cases({"batch_size": 2048, "is_multihot": True}),
    ),
]
