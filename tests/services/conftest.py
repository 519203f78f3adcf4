"""Shard servers inside the test process, stopped at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embedding_server.shard import Shard
from services.admission import Limits
from services.shard_process import owned_buckets
from services.shard_server import ShardServer
from tests.services.authority import Files

Serve = Callable[..., list[str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(num_shards=1, limits=None, ports=None, **options of ShardServer) -> addresses. 64 MiB each, with numba."""
    servers: list[ShardServer] = []

    def start(
        num_shards: int = 1,
        limits: Limits | None = None,
        ports: list[int] | None = None,
        **options: Any,
    ) -> list[str]:
        addresses = []
        for index in range(num_shards):
            buckets = owned_buckets(index, num_shards)
            shard = Shard(buckets=buckets, memory_limit_bytes=64 << 20, backend="cpu")
            servers.append(ShardServer(shard, limits, **options))
            addresses.append(servers[-1].start(port=ports[index] if ports else 0))
        return addresses

    start.servers = servers  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.stop(grace_s=0.5)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Certificates, keys and tokens of a server and its clients."""
    return Files(tmp_path / "secrets")
