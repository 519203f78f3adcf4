"""The connection to one shard: calls that return bytes, repeated until they succeed, are refused, or time runs out.

Every call may be repeated, because shards apply each step once and answer a repeat as they answered the first. What is
repeated, and for how long, is in tries.py. What connections and calls need to be let in is in channel_access.py; a call
that is refused for its token is repeated if the token's file has another one by now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable, Unauthenticated
from services import rpc_errors, tensor_codec
from services.channel_access import ChannelAccess, Metadata
from services.security_options import Credentials
from services.tries import CallTimes, Target, Tries

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


def check_address(address: str, what: str) -> None:
    if ":" not in address:
        raise InvalidInput(f"address {address!r} of {what} has no port; write host:port")


class PendingCall:
    """One call with its tries. Owned by the thread that makes it; `result` may be asked once."""

    def __init__(self, tries: Tries[ShardChannel], method: str, request: bytes) -> None:
        self._tries = tries
        self._method = method
        self._request = request
        self._channel: ShardChannel | None = None
        self._future: grpc.Future | None = None
        self._metadata: Metadata | None = None

    def start(self) -> None:
        """Sends the first try and returns. Without it `result` sends it, and waits on this thread: one switch less."""
        channel, timeout_s = self._begin()
        with self._closed_as_unavailable(channel):
            self._metadata = channel.access.metadata()
            self._future = channel.send(self._method, self._request, timeout_s, self._metadata)

    def result(self) -> bytes:
        """The reply. Raises the shard's error, or StoreUnavailable."""
        while True:
            future, self._future = self._future, None
            channel, timeout_s = (self._channel, 0.0) if future is not None and self._channel else self._begin()
            try:
                with self._closed_as_unavailable(channel):
                    if future is not None:
                        reply = future.result()
                    else:
                        self._metadata = channel.access.metadata()
                        reply = channel.call(self._method, self._request, timeout_s, self._metadata)
            except grpc.RpcError as error:
                failure = rpc_errors.from_rpc_error(error, channel.name)
                if isinstance(failure, Unauthenticated):
                    failure.is_over = channel.access.has_other_token(self._metadata)
                time.sleep(self._tries.failed(error.code(), failure, time.monotonic()))
            else:
                self._tries.succeeded()
                return reply

    @property
    def target_name(self) -> str:
        """Where the last try went."""
        return self._channel.name if self._channel is not None else ""

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()
            self._future = None
            self._tries.given_up()

    def _begin(self) -> tuple[ShardChannel, float]:
        self._channel, timeout_s = self._tries.begin(time.monotonic())
        return self._channel, timeout_s

    @contextmanager
    def _closed_as_unavailable(self, channel: ShardChannel) -> Iterator[None]:
        """grpc answers with ValueError on a closed channel, and cancels the calls of one that closes."""
        try:
            yield
        except (ValueError, grpc.FutureCancelledError) as error:
            self._tries.given_up()
            raise StoreUnavailable(f"{channel.name}: the store was closed; make a new one") from error


class ShardChannel(Target):
    """One shard's address and connection. Thread safety: every method may be called from any thread."""

    def __init__(self, index: int, address: str, times: CallTimes, credentials: Credentials | None = None) -> None:
        """InvalidInput if a file cannot be used, or the token would leave this machine in the clear."""
        super().__init__(f"shard {index} ({address})")
        check_address(address, f"shard {index}")
        self.index = index
        self.address = address
        self.times = times
        self.access = ChannelAccess(credentials or Credentials(), address)
        self._channel = self.access.open(CHANNEL_OPTIONS)
        self._former: list[grpc.Channel] = []
        self._stubs: dict[str, grpc.UnaryUnaryMultiCallable] = {}
        self._renew_lock = threading.Lock()  # guards _channel, _former and _stubs in `connection_lost`
        self._hints_lock = threading.Lock()  # guards _num_hints
        self._num_hints = 0

    def tries(self, method: str) -> Tries[ShardChannel]:
        """Of one call that only this shard can answer."""
        return Tries(method, (self,), self.times, time.monotonic())

    def call(self, method: str, request: bytes, timeout_s: float, metadata: Metadata | None) -> bytes:
        """One try, on this thread; `method` is "Service/Method" in frostline.v1. Raises grpc.RpcError."""
        return self._stub(method)(request, timeout=timeout_s, metadata=metadata)

    def send(self, method: str, request: bytes, timeout_s: float, metadata: Metadata | None) -> grpc.Future:
        """As call, beside this thread."""
        return self._stub(method).future(request, timeout=timeout_s, metadata=metadata)

    def _stub(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        stubs = self._stubs  # before the channel, which `connection_lost` sets first: no old stub among the new ones
        stub = stubs.get(method)
        if stub is None:
            stub = stubs[method] = self._channel.unary_unary(f"/frostline.v1.{method}")
        return stub

    def connection_lost(self) -> None:
        """A channel with the certificates as they are by now, if they have changed.

        Calls of other threads on the former one end as they may; it is closed with this object.
        """
        with self._renew_lock:
            if self.access.is_outdated():
                self._former.append(self._channel)
                self._channel = self.access.open(CHANNEL_OPTIONS)
                self._stubs = {}

    def hint(self, method: str, request: bytes) -> None:
        """Sends a call whose outcome nobody needs. Returns at once; it is not repeated, and its failure is no error."""
        with self._hints_lock:
            if self._num_hints >= MAX_HINTS:
                return
            self._num_hints += 1
        try:
            call = self.send(method, request, self.times.try_s, self.access.metadata())
        except ValueError:  # the channel is closed
            self._hint_ended()
        else:
            call.add_done_callback(lambda _: self._hint_ended())

    def _hint_ended(self) -> None:
        with self._hints_lock:
            self._num_hints -= 1

    def close(self) -> None:
        """Ends running calls with StoreUnavailable."""
        for channel in (self._channel, *self._former):
            channel.close()


def call_each(method: str, requests: Sequence[tuple[ShardChannel, bytes]]) -> Iterator[tuple[int, bytes]]:
    """One call to each channel, all at once; yields (number of the request, reply), the last request's first.

    Raises the first error. What the caller does with a reply overlaps the calls still under way.
    """
    return run_each([PendingCall(channel.tries(method), method, request) for channel, request in requests])


def run_each(calls: Sequence[PendingCall]) -> Iterator[tuple[int, bytes]]:
    """As call_each, of calls that know where they go."""
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
    return run_every([PendingCall(channel.tries(method), method, request) for channel, request in requests])


def run_every(calls: Sequence[PendingCall]) -> list[bytes | FrostlineError]:
    """As call_every, of calls that know where they go."""
    outcomes: list[bytes | FrostlineError] = []
    try:
        for call in calls[:-1]:
            with suppress(StoreUnavailable):  # the channel is closed: `result` says so
                call.start()
        for call in calls:
            try:
                outcomes.append(call.result())
            except FrostlineError as error:
                outcomes.append(_named(error, call.target_name))
    finally:
        for call in calls:
            call.cancel()  # no effect on those that have ended
    return outcomes


def _named(error: FrostlineError, shard: str) -> FrostlineError:
    """The same error with the shard in its message: what one shard refuses may be its own trouble."""
    if shard not in str(error):
        error.args = (f"{shard}: {error}", *error.args[1:])
    return error


def call_all(method: str, requests: Sequence[tuple[ShardChannel, bytes]]) -> list[bytes]:
    """One call to each channel, all at once; the replies in the same order. Raises the first error."""
    replies = dict(call_each(method, requests))
    return [replies[number] for number in range(len(requests))]
