"""Online look-ups beside Redis: the same row_ids, the same float32 rows, one client and one server process each.

    python -m benchmarks.lookup [--repeats N] [--case NAME] [--out DIR]

What is timed is what a ranking service does: from an array of row_ids to an array of rows. For Redis that is
building the keys, MGET through redis-py with hiredis, and joining the values into one array; a ranking request is one
pipeline of an MGET for each table. Both servers listen on loopback TCP, for a ranking service is on another machine;
`redis_unix` is Redis on a Unix socket, measured and not raced. Each client answers with the rows/s of the median of its
calls, the contestants take turns, and ratios are of medians over the turns.

Writes benchmarks/results/lookup.json: `ratio` of every case, `limits`, and `bytes_per_row` of both servers, by what
their processes hold more than before the rows came. Ends with status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIN_REPEATS, RESULTS, Case, provenance, run_case, write_result
from benchmarks.lookup_clients import RANKING, Rows, Shape
from benchmarks.memory import read_memory
from benchmarks.wire import end_process, read_line, start_redis_process

REPEATS = 9
CHUNK_ROWS = 50_000
CASES = ("redis_100", "redis_1000", "redis_10000", "redis_ranking")
#: the least rows/s, as a multiple of Redis's
LIMITS = {"redis_100": 0.4, "redis_1000": 1.2, "redis_10000": 4.0, "redis_ranking": 4.0}


@dataclass
class Contest:
    """Running processes; they last for all cases."""

    stack: ExitStack
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    bytes_per_row: dict[str, float] = field(default_factory=dict)

    def rows_per_s(self, role: str, request: str) -> float:
        client = self.clients[role]
        assert client.stdin is not None
        client.stdin.write(request + "\n")
        client.stdin.flush()
        return float(read_line(client, role))


def start(shape: Shape) -> Contest:
    """Both servers with all rows, and a client of each that has found the same rows in both."""
    from services.local_shards import start_shards

    with ExitStack() as starting:
        shards = starting.enter_context(start_shards(1, memory_limit_bytes=4 << 30))
        port = _free_port()
        path, redis_pid = start_redis_process(starting, port)
        pids = {"ours": shards.processes[0].pid, "redis": redis_pid}
        before = {name: read_memory(pid).held_bytes for name, pid in pids.items()}
        num_rows = _load(shape, shards.addresses[0], path)
        held = {name: read_memory(pid).held_bytes - before[name] for name, pid in pids.items()}
        addresses = {"ours": shards.addresses[0], "redis": f"127.0.0.1:{port}", "redis_unix": path}
        clients = {role: _spawn(starting, role, address, shape) for role, address in addresses.items()}
        sums = {role: read_line(client, role).split() for role, client in clients.items()}
        if len({tuple(each) for each in sums.values()}) != 1:
            raise RuntimeError(f"the clients read different rows: sums of their bits are {sums}")
        bytes_per_row = {name: round(size / num_rows, 1) for name, size in held.items()}
        return Contest(starting.pop_all(), clients, bytes_per_row)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(stack: ExitStack, role: str, address: str, shape: Shape) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.lookup_clients", role, address, json.dumps(shape.as_dict())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(end_process, process)
    return process


def _load(shape: Shape, address: str, redis_path: str) -> int:
    """Rows that were trained once, in both; how many."""
    import redis

    from embedding_server.spec import PolicySpec, TableSpec
    from embedding_server.store import Identity, RoutedIds, TableGradients
    from services.shard_client import RemoteStore

    store, cache = RemoteStore([address]), redis.Redis(unix_socket_path=redis_path)
    tables = shape.tables()
    store.create_tables([TableSpec(name=name, dim=shape.dim, policy=PolicySpec(kind="off")) for name in tables])
    who = Identity("bench", store.begin_epoch("bench", 1, "sync").epoch, 0)
    random, step = np.random.default_rng(0), 0
    for name, row_ids in tables.items():
        for at in range(0, len(row_ids), CHUNK_ROWS):
            step += 1
            chunk = row_ids[at : at + CHUNK_ROWS]
            ids = RoutedIds(chunk, np.array([0, len(chunk)]))
            store.pull(who, step, {name: ids})
            gradients = random.standard_normal((len(chunk), shape.dim), np.float32)
            store.push(who, step, {name: TableGradients(ids, gradients, 0.1)})
            values = store.lookup({name: ids})[name].values
            cache.mset(dict(zip(Rows.keys(name, chunk), map(bytes, values), strict=True)))
    store.close()
    cache.close()
    return sum(map(len, tables.values()))


def case_of(contest: Contest, name: str, shape: Shape) -> Case:
    request = name.removeprefix("redis_")
    of_request = {"rows": shape.num_rows(request), "tables": len(RANKING) if request == "ranking" else 1}
    return Case(
        name=name,
        config={**shape.as_dict(), **of_request},
        unit="rows/s",
        ours=lambda _: contest.rows_per_s("ours", request),
        rivals={name: lambda _: contest.rows_per_s("redis", request)},
        controls={"redis_unix": lambda _: contest.rows_per_s("redis_unix", request)},
    )


def missed(document: dict[str, Any]) -> list[str]:
    """Limits that the figures miss."""
    return [
        f"{name}: {document['ratio'][name]:.2f}x of Redis, the limit is {limit:g}x"
        for name, limit in document["limits"].items()
        if document["ratio"][name] < limit
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"at least {MIN_REPEATS}")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one (may be repeated)")
    parser.add_argument("--rows", type=int, default=Shape().rows, help="of the large table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    shape, names = Shape(rows=arguments.rows), arguments.case or CASES
    contest = start(shape)
    try:
        cases = {name: run_case(case_of(contest, name, shape), arguments.repeats, {}, _say) for name in names}
    finally:
        contest.stack.close()
    document = {
        "workload": "lookup",
        **provenance(),
        **cases[names[0]],
        "ratio": {name: case["ratio"][name] for name, case in cases.items()},
        "limits": {name: LIMITS[name] for name in names},
        "bytes_per_row": contest.bytes_per_row,
        "cases": cases,
    }
    _report(document)
    _say(f"lookup: wrote {write_result(document, arguments.out)}")
    broken = missed(document)
    for line in broken:
        _say(f"MISSED: {line}")
    return 1 if broken else 0


def _report(document: dict[str, Any]) -> None:
    for name, case in document["cases"].items():
        ours, rival = case["ours"]["median"], case["rivals"][name]["median"]
        rows, ratio, limit = case["config"]["rows"], document["ratio"][name], document["limits"][name]
        took = f"{rows / ours * 1e3:.3f} ms a call, Redis {rows / rival * 1e3:.3f} ms"
        _say(f"  {name}: {took}: {ratio:.2f}x (least: {limit:g}x)")
    _say(f"  bytes a row: {document['bytes_per_row']}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
