"""A TCP proxy that holds bytes back or loses acknowledgements, and shard servers to put behind it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from embedding_server.shard import Shard
from services.shard_process import owned_buckets
from services.shard_server import ShardServer

_CHUNK_BYTES = 4096
_HTTP2_HEADERS = 1


class Proxy:
    """Forwards connections to `target`, and misbehaves on request.

    Thread safety: set the public fields and call the methods from any thread; `_lock` guards the counters.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._budget: int | None = None  # bytes towards the shard that may still pass; None: all
        self._are_replies_held = False
        self.is_held = threading.Event()  # the budget is used up: what follows waits for ever
        self.loses_each_reply_once = False
        self._lose_next = True
        self.replies_lost = 0
        self.replies_passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, num_bytes: int) -> None:
        """Lets `num_bytes` more pass towards the shard, then nothing more in that direction."""
        with self._lock:
            self._budget = num_bytes
            if not num_bytes:
                self.is_held.set()

    def hold_replies(self) -> None:
        """From now on nothing passes towards the client."""
        self._are_replies_held = True

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                shard = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._sockets += [client, shard]
            threading.Thread(target=self._forward_requests, args=(client, shard), daemon=True).start()
            threading.Thread(target=self._forward_replies, args=(shard, client), daemon=True).start()

    def _forward_requests(self, client: socket.socket, shard: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK_BYTES):
                with self._lock:
                    if self._budget is not None:
                        data = data[: self._budget]
                        self._budget -= len(data)
                        if not self._budget:
                            self.is_held.set()
                shard.sendall(data)
        _shut(client)
        _shut(shard)

    def _forward_replies(self, shard: socket.socket, client: socket.socket) -> None:
        """Frame by frame, because a reply begins with the first HEADERS frame of its stream."""
        seen: set[int] = set()
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = _read_exactly(shard, 9)
                length = int.from_bytes(header[:3], "big")
                kind, stream = header[3], struct.unpack(">I", header[5:])[0] & 0x7FFFFFFF
                body = _read_exactly(shard, length)
                if kind == _HTTP2_HEADERS and stream not in seen:
                    seen.add(stream)
                    if self._is_to_be_lost():
                        break
                if not self._are_replies_held:
                    client.sendall(header + body)
        _shut(client)
        _shut(shard)

    def _is_to_be_lost(self) -> bool:
        with self._lock:
            if not self.loses_each_reply_once:
                return False
            lost, self._lose_next = self._lose_next, not self._lose_next
            self.replies_lost += lost
            self.replies_passed += not lost
            return lost


def _read_exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@pytest.fixture
def proxy() -> Iterator[Callable[[str], Proxy]]:
    """proxy(address) -> Proxy in front of that address."""
    proxies: list[Proxy] = []

    def make(target: str) -> Proxy:
        proxies.append(Proxy(target))
        return proxies[-1]

    yield make
    for each in proxies:
        each.close()


@pytest.fixture
def serve() -> Iterator[Callable[[int], list[str]]]:
    """serve(num_shards) -> addresses of shard servers in this process."""
    servers: list[ShardServer] = []

    def start(num_shards: int) -> list[str]:
        first = len(servers)
        for index in range(num_shards):
            shard = Shard(buckets=owned_buckets(index, num_shards), memory_limit_bytes=64 << 20, backend="cpu")
            servers.append(ShardServer(shard))
        return [server.start() for server in servers[first:]]

    yield start
    for server in servers:
        server.stop(grace_s=0.5)
