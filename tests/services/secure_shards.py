"""Shard processes with TLS, client certificates and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services import local_shards
from services.local_shards import LocalShards
from tests.services.authority import Files


@contextmanager
def secure_shards(files: Files, num_shards: int, log_dir: Path) -> Iterator[LocalShards]:
    """Clients need a certificate of files.ca and one of its tokens. 64 MiB each; logs are shard-<index>.log."""
    log_dir.mkdir()
    options = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(files.ca)]
    options += ["--token-file", str(files.token_file), "--num-shards", str(num_shards)]
    options += ["--memory-limit-bytes", str(64 << 20)]
    logs = [log_dir / f"shard-{index}.log" for index in range(num_shards)]
    processes = [local_shards._launch([*options, "--shard-index", str(i)], log) for i, log in enumerate(logs)]
    with LocalShards(processes, logs) as shards:
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, [log.read_text() for log in logs]
            shards.addresses.append(json.loads(line)["address"])
        yield shards
