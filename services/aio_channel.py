"""The connection of an asyncio client to one shard; shard_channel.py is its twin for threads, tries.py their rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from embedding_server.errors import FrostlineError, StoreUnavailable, Unauthenticated
from services import rpc_errors
from services.channel_access import ChannelAccess, Metadata
from services.security_options import Credentials
from services.shard_channel import CHANNEL_OPTIONS, check_address
from services.tries import CallTimes, Target, Tries


class AioChannel(Target):
    """One shard's address and connection, of one event loop."""

    def __init__(self, index: int, address: str, credentials: Credentials | None = None) -> None:
        """InvalidInput if a file cannot be used, or the token would leave this machine in the clear."""
        super().__init__(f"shard {index} ({address})")
        check_address(address, f"shard {index}")
        self.address = address
        self.access = ChannelAccess(credentials or Credentials(), address)
        self._channel = self.access.open_aio(CHANNEL_OPTIONS)
        self._former: list[grpc.aio.Channel] = []
        self._stubs: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}

    def connection_lost(self) -> None:
        """A channel with the certificates as they are by now, if they have changed; `close` closes both."""
        if self.access.is_outdated():
            self._former.append(self._channel)
            self._channel = self.access.open_aio(CHANNEL_OPTIONS)
            self._stubs = {}

    async def call(self, method: str, request: bytes, timeout_s: float, metadata: Metadata | None) -> bytes:
        """One try; `method` is "Service/Method" in frostline.v1. Raises grpc.RpcError."""
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(f"/frostline.v1.{method}")
        return await stub(request, timeout=timeout_s, metadata=metadata)

    async def close(self) -> None:
        for channel in (self._channel, *self._former):
            await channel.close()


async def call_one(tries: Tries[AioChannel], method: str, request: bytes) -> bytes:
    """The reply. Raises the shard's error, or StoreUnavailable."""
    while True:
        channel, timeout_s = tries.begin(time.monotonic())
        metadata = channel.access.metadata()
        try:
            reply = await channel.call(method, request, timeout_s, metadata)
        except grpc.aio.AioRpcError as error:
            failure = rpc_errors.from_rpc_error(error, channel.name)
            if isinstance(failure, Unauthenticated):
                failure.is_over = channel.access.has_other_token(metadata)
            await asyncio.sleep(tries.failed(error.code(), failure, time.monotonic()))
        except grpc.aio.UsageError as error:
            tries.given_up()
            raise StoreUnavailable(f"{channel.name}: the client was closed; make a new one") from error
        except BaseException:  # the caller's task was cancelled
            tries.given_up()
            raise
        else:
            tries.succeeded()
            return reply


async def call_every(
    method: str, requests: Sequence[tuple[AioChannel, bytes]], times: CallTimes
) -> list[bytes | FrostlineError]:
    """One call to each channel, all at once; replies and errors in the same order."""

    async def outcome(channel: AioChannel, request: bytes) -> bytes | FrostlineError:
        try:
            return await call_one(Tries(method, (channel,), times, time.monotonic()), method, request)
        except FrostlineError as error:
            return error

    return list(await asyncio.gather(*(outcome(channel, request) for channel, request in requests)))
