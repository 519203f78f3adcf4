"""When and where a call is tried again: no clock, no socket, so that the sync and the asyncio client share it.

A call goes to any one of its targets, which answer alike: one shard, or replicas of it. What is repeated:

| status             | for how long  | where there is one target         | where another one does not rest |
|--------------------|---------------|-----------------------------------|---------------------------------|
| UNAVAILABLE        | `reconnect_s` | after 20 ms, 40 ms, ... 1 s       | there, at once                  |
| RESOURCE_EXHAUSTED | `deadline_s`  | after the pushback that it sends  | there, at once                  |
| DEADLINE_EXCEEDED  | `deadline_s`  | at once                           | there, at once                  |

and nothing else. A target that failed rests: calls go to the others meanwhile. Times are time.monotonic() in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import grpc

from embedding_server.errors import FrostlineError, Overloaded, StoreUnavailable, Unauthenticated

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
#: a target that cannot be reached, or did not answer in time; whoever finds it back earlier calls `awake`
REST_S = 30.0


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long a call may take, in seconds."""

    deadline_s: float = 300.0  # in all, waiting for other workers included
    try_s: float = 60.0  # one try
    reconnect_s: float = 20.0  # a shard that cannot be reached is given up after this


class Target:
    """Where calls may go. Thread safety: every method may be called from any thread; `_lock` guards the count."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rests_until_s = 0.0
        self.num_calls = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.num_calls += 1

    def end(self) -> None:
        with self._lock:
            self.num_calls -= 1

    def awake(self) -> None:
        self.rests_until_s = 0.0

    def connection_lost(self) -> None:
        """A call found it unreachable: what a connection is made with may be taken anew."""

    def is_refusal_over(self, failure: FrostlineError) -> bool:
        """Whether a call that was refused for its token may pass now, with another one."""
        return isinstance(failure, Unauthenticated) and failure.is_over


T = TypeVar("T", bound=Target)


class Tries(Generic[T]):
    """The tries of one call, owned by whoever makes it.

    target, timeout_s = tries.begin(now_s)           then the call to it, then one of
    tries.succeeded()
    pause_s = tries.failed(status, error, now_s)     how long to wait before the next `begin`; raises if there is none
    tries.given_up()                                 nobody wants the answer any more
    """

    def __init__(
        self, method: str, targets: Sequence[T], times: CallTimes, started_s: float, *, waits_for_room: bool = True
    ) -> None:
        """waits_for_room False: where every target is full, the caller is told so instead of waiting."""
        self._method = method
        self._targets = targets
        self._times = times
        self._started_s = started_s
        self._waits_for_room = waits_for_room
        self._unreachable_since_s: float | None = None
        self._num_tries = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._target = targets[0]

    def begin(self, now_s: float) -> tuple[T, float]:
        """The target of the next try and how long that may take."""
        self._num_tries += 1
        if len(self._targets) > 1:
            # One that does not rest, of these the one with the fewest calls; if all rest, the first to end it.
            self._target = min(self._targets, key=lambda each: (max(each.rests_until_s - now_s, 0.0), each.num_calls))
        self._target.begin()
        left_s = self._started_s + self._times.deadline_s - now_s
        return self._target, max(min(self._times.try_s, left_s), 0.001)

    def succeeded(self) -> None:
        self._target.end()
        self._target.awake()

    def given_up(self) -> None:
        self._target.end()

    def failed(self, status: grpc.StatusCode, failure: FrostlineError, now_s: float) -> float:
        """How long to wait before the next try. Raises `failure`, StoreUnavailable or Overloaded if there is none."""
        self._target.end()
        times, pause_s, rest_s = self._times, 0.0, REST_S
        if status == grpc.StatusCode.UNAVAILABLE:
            if self._unreachable_since_s is None:
                self._unreachable_since_s = now_s
            if now_s - self._unreachable_since_s > times.reconnect_s:
                self._give_up(failure, f"could not be reached for {times.reconnect_s:g} s")
            self._target.connection_lost()
            pause_s = self._backoff_s
            self._backoff_s = min(2 * pause_s, MAX_BACKOFF_S)
        elif isinstance(failure, Overloaded):
            self._unreachable_since_s = None
            pause_s = rest_s = failure.retry_after_ms / 1000
        elif status == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._unreachable_since_s = None
        elif self._target.is_refusal_over(failure):
            rest_s = 0.0
        else:
            raise failure
        self._target.rests_until_s = now_s + rest_s
        first_awake_s = min(target.rests_until_s for target in self._targets)
        if first_awake_s > now_s and isinstance(failure, Overloaded) and not self._waits_for_room:
            raise failure
        pause_s = max(min(pause_s, first_awake_s - now_s), 0.0)
        if now_s + pause_s - self._started_s >= times.deadline_s:
            self._give_up(failure, f"did not finish within {times.deadline_s:g} s")
        return pause_s

    def _give_up(self, failure: FrostlineError, why: str) -> NoReturn:
        names = ", ".join(target.name for target in self._targets)
        raise StoreUnavailable(
            f"{names}: {self._method} {why} ({self._num_tries} tries); the last answer: {failure}"
        ) from failure
