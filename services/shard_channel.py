"""The connection to one shard: calls that return bytes, repeated until they succeed, are refused, or time runs out.

Every call may be repeated, because shards apply each step once and answer a repeat as they answered the first.
What is repeated: UNAVAILABLE (the shard cannot be reached) for `reconnect_s`; RESOURCE_EXHAUSTED after the pushback the
shard asks for, and DEADLINE_EXCEEDED of one try (it waits for other workers), until `deadline_s`. Nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import grpc

from embedding_server.errors import FrostlineError, InvalidInput, Overloaded, StoreUnavailable
from services import rpc_errors, tensor_codec

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
#: hints under way to a shard; more are dropped, since the shard is behind with them
MAX_HINTS = 4

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", tensor_codec.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", tensor_codec.MAX_MESSAGE_BYTES),
    # One TCP connection per store, so that two stores in a process do not queue behind each other.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are ours: grpc's know neither pushback beyond its own policy nor our total deadline.
    ("grpc.enable_retries", 0),
    # http_proxy is meant for the web; through it a shard on loopback cannot be reached.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long a call may take, in seconds."""

    deadline_s: float = 300.0  # in all, waiting for other workers included
    try_s: float = 60.0  # one try
    reconnect_s: float = 20.0  # a shard that cannot be reached is given up after this


class PendingCall:
    """One call with its tries. Owned by the thread that makes it; `result` may be asked once."""

    def __init__(self, channel: ShardChannel, method: str, request: bytes) -> None:
        self._channel = channel
        self._method = method
        self._request = request
        self._started_s = time.monotonic()
        self._unreachable_since_s: float | None = None
        self._tries = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._future: grpc.Future | None = None

    def _next_timeout_s(self) -> float:
        self._tries += 1
        times = self._channel.times
        left_s = self._started_s + times.deadline_s - time.monotonic()
        return max(min(times.try_s, left_s), 0.001)

    def start(self) -> None:
        """Sends the first try and returns. Without it `result` sends it, and waits on this thread: one switch less."""
        with self._closed_as_unavailable():
            self._future = self._channel.stub(self._method).future(self._request, timeout=self._next_timeout_s())

    def result(self) -> bytes:
        """The reply. Raises the shard's error, or StoreUnavailable."""
        while True:
            try:
                with self._closed_as_unavailable():
                    future, self._future = self._future, None
                    if future is not None:
                        return future.result()
                    return self._channel.stub(self._method)(self._request, timeout=self._next_timeout_s())
            except grpc.RpcError as error:
                failure = rpc_errors.from_rpc_error(error, self._channel.name)
                time.sleep(self._pause_s(error.code(), failure))

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    @contextmanager
    def _closed_as_unavailable(self) -> Iterator[None]:
        """grpc answers with ValueError on a closed channel, and cancels the calls of one that closes."""
        try:
            yield
        except (ValueError, grpc.FutureCancelledError) as error:
            raise StoreUnavailable(f"{self._channel.name}: the store was closed; make a new one") from error

    def _pause_s(self, status: grpc.StatusCode, failure: FrostlineError) -> float:
        """How long to wait before the next try. Raises `failure`, or StoreUnavailable, if there is none."""
        times, now_s = self._channel.times, time.monotonic()
        if status == grpc.StatusCode.UNAVAILABLE:
            self._unreachable_since_s = self._unreachable_since_s or now_s
            if now_s - self._unreachable_since_s > times.reconnect_s:
                self._give_up(failure, f"could not be reached for {times.reconnect_s:g} s")
            pause_s = self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        elif isinstance(failure, Overloaded):
            self._unreachable_since_s = None
            pause_s = failure.retry_after_ms / 1000
        elif status == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._unreachable_since_s = None
            pause_s = 0.0
        else:
            raise failure
        if now_s + pause_s - self._started_s >= times.deadline_s:
            self._give_up(failure, f"did not finish within {times.deadline_s:g} s")
        return pause_s

    def _give_up(self, failure: FrostlineError, why: str) -> NoReturn:
        raise StoreUnavailable(
            f"{self._channel.name}: {self._method} {why} ({self._tries} tries); the last answer: {failure}"
        ) from failure


class ShardChannel:
    """One shard's address and connection. Thread safety: every method may be called from any thread."""

    def __init__(self, index: int, address: str, times: CallTimes) -> None:
        self.index = index
        self.name = f"shard {index} ({address})"
        self.times = times
        if ":" not in address:
            raise InvalidInput(f"address {address!r} of shard {index} has no port; write host:port")
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stubs: dict[str, grpc.UnaryUnaryMultiCallable] = {}
        self._lock = threading.Lock()  # guards _num_hints
        self._num_hints = 0

    def stub(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        """Bytes to bytes; `method` is "Service/Method" in frostline.v1."""
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(f"/frostline.v1.{method}")
        return stub

    def hint(self, method: str, request: bytes) -> None:
        """Sends a call whose outcome nobody needs. Returns at once; it is not repeated, and its failure is no error."""
        with self._lock:
            if self._num_hints >= MAX_HINTS:
                return
            self._num_hints += 1
        try:
            call = self.stub(method).future(request, timeout=self.times.try_s)
        except ValueError:  # the channel is closed
            self._hint_ended()
        else:
            call.add_done_callback(lambda _: self._hint_ended())

    def _hint_ended(self) -> None:
        with self._lock:
            self._num_hints -= 1

    def close(self) -> None:
        """Ends running calls with StoreUnavailable."""
        self._channel.close()


def call_each(method: str, requests: Sequence[tuple[ShardChannel, bytes]]) -> Iterator[tuple[int, bytes]]:
    """One call to each channel, all at once; yields (number of the request, reply), the last request's first.

    Raises the first error. What the caller does with a reply overlaps the calls still under way.
    """
    calls = [PendingCall(channel, method, request) for channel, request in requests]
    try:
        for call in calls[:-1]:
            call.start()
        for number in reversed(range(len(calls))):
            yield number, calls[number].result()
    finally:
        for call in calls:
            call.cancel()  # no effect on those that have ended


def call_every(method: str, requests: Sequence[tuple[ShardChannel, bytes]]) -> list[bytes | FrostlineError]:
    """One call to each channel, all at once; replies and errors in the same order. It waits for every one of them."""
    calls = [PendingCall(channel, method, request) for channel, request in requests]
    outcomes: list[bytes | FrostlineError] = []
    try:
        for call in calls[:-1]:
            with suppress(StoreUnavailable):  # the channel is closed: `result` says so
                call.start()
        for call, (channel, _) in zip(calls, requests, strict=True):
            try:
                outcomes.append(call.result())
            except FrostlineError as error:
                outcomes.append(_named(error, channel))
    finally:
        for call in calls:
            call.cancel()  # no effect on those that have ended
    return outcomes


def _named(error: FrostlineError, channel: ShardChannel) -> FrostlineError:
    """The same error with the shard in its message: what one shard refuses may be its own trouble."""
    if channel.name not in str(error):
        error.args = (f"{channel.name}: {error}", *error.args[1:])
    return error


def call_all(method: str, requests: Sequence[tuple[ShardChannel, bytes]]) -> list[bytes]:
    """One call to each channel, all at once; the replies in the same order. Raises the first error."""
    replies = dict(call_each(method, requests))
    return [replies[number] for number in range(len(requests))]
