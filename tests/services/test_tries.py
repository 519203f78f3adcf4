"""When and where a call is tried again, with a clock of the test's own."""

from __future__ import annotations

import grpc
import pytest

from embedding_server.errors import InvalidInput, Overloaded, StoreUnavailable
from services.tries import MAX_BACKOFF_S, REST_S, CallTimes, Target, Tries

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
LATE = grpc.StatusCode.DEADLINE_EXCEEDED
TIMES = CallTimes(deadline_s=10.0, try_s=2.0, reconnect_s=4.0)
GONE = StoreUnavailable("gone")


def tries_of(*names: str, waits_for_room: bool = True) -> tuple[Tries[Target], list[Target]]:
    targets = [Target(name) for name in names]
    return Tries("Lookup", targets, TIMES, 0.0, waits_for_room=waits_for_room), targets


def test_one_target_that_cannot_be_reached_is_tried_after_longer_and_longer_pauses() -> None:
    tries, (only,) = tries_of("a")
    now_s, pauses = 0.0, []

    def try_again() -> None:
        target, timeout_s = tries.begin(now_s)
        assert target is only
        assert timeout_s == min(2.0, 10.0 - now_s)
        pauses.append(tries.failed(UNAVAILABLE, GONE, now_s))

    while now_s <= 4.0:
        try_again()
        now_s += pauses[-1]
    with pytest.raises(StoreUnavailable, match=r"a: Lookup could not be reached for 4 s \(\d+ tries\).*answer: gone"):
        try_again()
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]
    assert max(pauses) == MAX_BACKOFF_S
    assert only.num_calls == 0


def test_another_replica_is_tried_at_once_and_the_failed_one_rests() -> None:
    tries, (a, b) = tries_of("a", "b")
    assert tries.begin(0.0)[0] is a
    assert tries.failed(UNAVAILABLE, GONE, 0.0) == 0.0
    assert tries.begin(0.0)[0] is b
    tries.succeeded()
    assert a.rests_until_s == REST_S
    later = Tries("Lookup", [a, b], TIMES, 1.0)
    assert later.begin(1.0)[0] is b
    later.succeeded()
    a.awake()
    b.begin()  # some other call is under way there
    assert Tries("Lookup", [b, a], TIMES, 2.0).begin(2.0)[0] is a


def test_all_replicas_are_gone() -> None:
    tries, targets = tries_of("a", "b")
    seen = []
    now_s = 0.0

    def try_again() -> float:
        seen.append(tries.begin(now_s)[0].name)
        return tries.failed(UNAVAILABLE, GONE, now_s)

    while now_s <= 4.0:
        now_s += try_again() + 0.001
    with pytest.raises(StoreUnavailable, match="a, b: Lookup could not be reached"):
        try_again()
    assert set(seen) == {"a", "b"}
    assert len(seen) < 20
    assert [target.num_calls for target in targets] == [0, 0]


def test_pushback() -> None:
    full = Overloaded("full", 300)
    tries, (a, b) = tries_of("a", "b")
    tries.begin(0.0)
    assert tries.failed(FULL, full, 0.0) == 0.0
    assert tries.begin(0.0)[0] is b
    assert tries.failed(FULL, full, 0.1) == pytest.approx(0.2)  # until the first has room
    assert tries.begin(0.3)[0] is a
    alone, _ = tries_of("a")
    alone.begin(0.0)
    assert alone.failed(FULL, full, 0.0) == 0.3
    with pytest.raises(StoreUnavailable, match="did not finish within 10 s"):
        alone.failed(FULL, full, 9.8)
    hurried, _ = tries_of("a", "b", waits_for_room=False)
    hurried.begin(0.0)
    assert hurried.failed(FULL, full, 0.0) == 0.0
    hurried.begin(0.0)
    with pytest.raises(Overloaded):
        hurried.failed(FULL, full, 0.0)


def test_a_try_that_takes_too_long() -> None:
    tries, (a, b) = tries_of("a", "b")
    tries.begin(0.0)
    assert tries.failed(LATE, GONE, 2.0) == 0.0
    assert a.rests_until_s == 2.0 + REST_S
    assert tries.begin(2.0) == (b, 2.0)
    alone, _ = tries_of("a")
    assert alone.begin(0.0)[1] == 2.0
    assert alone.failed(LATE, GONE, 2.0) == 0.0  # at once: it may wait for other workers
    assert alone.begin(9.5)[1] == 0.5
    with pytest.raises(StoreUnavailable, match=r"did not finish within 10 s \(2 tries\)"):
        alone.failed(LATE, GONE, 10.0)


def test_what_is_final_is_raised_as_it_is() -> None:
    tries, (a,) = tries_of("a")
    error = InvalidInput("no such thing")
    tries.begin(0.0)
    with pytest.raises(InvalidInput) as raised:
        tries.failed(grpc.StatusCode.INVALID_ARGUMENT, error, 0.0)
    assert raised.value is error
    assert a.num_calls == 0
    a.is_refusal_over = lambda failure: failure is error  # type: ignore[method-assign]
    tries.begin(0.0)
    assert tries.failed(grpc.StatusCode.UNAUTHENTICATED, error, 0.0) == 0.0
    assert a.rests_until_s == 0.0
