"""An in-memory network between clients and shards: messages come late, twice, in another order, or never."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from embedding_server.errors import StoreUnavailable
from tests.simulation.clock import Clock, Process, Promise

#: respond(result, error): exactly once for each request that a shard takes
Respond = Callable[[Any, BaseException | None], None]

TRY_S, DEADLINE_S, RECONNECT_S, BACKOFF_S = 0.4, 30.0, 2.0, 0.05


class Server(Protocol):
    """What a request reaches."""

    @property
    def is_alive(self) -> bool: ...

    def receive(self, request: Any, respond: Respond) -> None: ...


class _Lost(Exception):
    """The reply did not come in time."""


class _Unreachable(Exception):
    """Nobody listens there."""


@dataclass
class Weather:
    """Shares of messages, in each direction; seconds."""

    dropped: float
    doubled: float
    late: float  # come after seconds, when newer ones may have come

    @staticmethod
    def drawn(rng: random.Random) -> Weather:
        return Weather(rng.choice([0.0, 0.02, 0.1]), rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.05, 0.2]))


FINE = Weather(0.0, 0.0, 0.0)


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self._clock = clock
        self._rng = rng
        self.weather = weather
        self._generation = 0  # what is under way is of this one, or lost

    def lose_everything(self) -> None:
        """All that is under way, as after a power cut."""
        self._generation += 1

    async def call(self, client: Process, server: Server, request: Any) -> Any:
        """What the server answers; as services/shard_channel.py, repeats it until it does. StoreUnavailable in the end.

        Errors of the server are raised here.
        """
        start_s = self._clock.now_s
        unreachable_s: float | None = None
        while True:
            reply: Promise[Any] = Promise()
            self._clock.at(TRY_S, lambda reply=reply: reply.fail(_Lost()))
            self._send(server, request, reply)
            try:
                return await reply
            except _Unreachable:
                unreachable_s = self._clock.now_s if unreachable_s is None else unreachable_s
            except _Lost:
                unreachable_s = None
            now_s = self._clock.now_s
            if now_s - start_s > DEADLINE_S or (unreachable_s is not None and now_s - unreachable_s > RECONNECT_S):
                raise StoreUnavailable(f"{client.name}: no answer to {request}")
            await self._clock.sleep(BACKOFF_S)

    def _send(self, server: Server, request: Any, reply: Promise[Any]) -> None:
        def deliver() -> None:
            if server.is_alive:
                server.receive(request, lambda result, error: self._travel(lambda: _finish(reply, result, error)))
            else:
                self._travel(lambda: reply.fail(_Unreachable()))

        self._travel(deliver)

    def _travel(self, arrive: Callable[[], None]) -> None:
        weather, rng, generation = self.weather, self._rng, self._generation
        if rng.random() < weather.dropped:
            return
        for _ in range(2 if rng.random() < weather.doubled else 1):
            delay_s = rng.uniform(0.3, 3.0) if rng.random() < weather.late else rng.uniform(0.001, 0.02)
            self._clock.at(delay_s, lambda: arrive() if generation == self._generation else None)


def _finish(reply: Promise[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        reply.set(result)
    else:
        reply.fail(error)
