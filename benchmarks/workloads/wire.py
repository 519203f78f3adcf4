"""`pull` and `push`: rows between a client and a shard in two processes over loopback gRPC, in GB/s of row values."""

from __future__ import annotations

from benchmarks import wire
from benchmarks.harness import Case, Contestant, Workload

_SHAPES = [(rows, wire_dtype) for wire_dtype in ("float32", "bfloat16") for rows in (10_000, 50_000)]


def _cases(ours: Contestant, rivals: dict[str, Contestant]) -> list[Case]:
    return [
        Case(
            name=f"{rows // 1000}k_{wire_dtype}",
            config={"rows": rows, "dim": 64, "wire_dtype": wire_dtype},
            unit="GB/s",
            ours=ours,
            rivals=rivals,
            setup=wire.setup,
            teardown=wire.teardown,
        )
        for rows, wire_dtype in _SHAPES
    ]


WORKLOADS = [
    Workload(
        "pull",
        "a training Pull of 10,000 and 50,000 rows x 64 from one shard over gRPC (bare_grpc: the bound)",
        _cases(
            wire.pull_ours,
            {
                "plain_grpc": wire.pull_plain_grpc,
                "bare_grpc": wire.pull_bare_grpc,
                "redis": wire.pull_redis,
            },
        ),
    ),
    Workload(
        "push",
        "a Push of 10,000 and 50,000 gradients x 64 to one shard over gRPC (bare_grpc: the bound)",
        _cases(
            wire.push_ours,
            {
                "plain_grpc": wire.push_plain_grpc,
                "bare_grpc": wire.push_bare_grpc,
                "redis": wire.push_redis,
            },
        ),
    ),
]
