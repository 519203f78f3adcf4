"""run_now: work on the caller's thread, never at the same time as other work, and never ahead of work that waits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from services.shard_executor import NOT_NOW, ShardExecutor


class Shard:
    """What ShardExecutor needs of one. `inside` is how many threads are in it."""

    is_being_written = False

    def __init__(self) -> None:
        self.inside = self.most_inside = self.calls = 0
        self.is_closed = False

    def work(self) -> str:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.calls += 1
        for _ in range(50):
            pass
        self.inside -= 1
        return threading.current_thread().name

    def maintain(self) -> bool:
        self.work()
        return False

    def close(self) -> None:
        self.is_closed = True


def test_it_runs_on_this_thread_while_nothing_waits() -> None:
    shard = Shard()
    executor = ShardExecutor(shard)  # type: ignore[arg-type]
    executor.run(Shard.work).result(10.0)  # type: ignore[arg-type]
    names = [executor.run_now(Shard.work) for _ in range(200)]  # type: ignore[arg-type]
    assert threading.current_thread().name in names  # but for turns in which the executor had its slices
    outcome: object = NOT_NOW
    while outcome is NOT_NOW:  # the executor may have a slice just now
        try:
            outcome = executor.run_now(lambda _: 1 // 0)
        except ZeroDivisionError as error:
            outcome = error
    assert isinstance(outcome, ZeroDivisionError)
    executor.close()
    assert shard.is_closed
    assert executor.run_now(Shard.work) is NOT_NOW  # type: ignore[arg-type]


def test_it_stands_back_for_work_that_runs_or_waits() -> None:
    executor = ShardExecutor(Shard())  # type: ignore[arg-type]
    has_begun, release = threading.Event(), threading.Event()

    def hold(shard: object) -> None:
        has_begun.set()
        release.wait(30.0)

    executor.run(hold)
    assert has_begun.wait(30.0)
    assert executor.run_now(Shard.work) is NOT_NOW  # type: ignore[arg-type]
    release.set()
    executor.close()


def test_no_two_are_in_the_shard_at_once() -> None:
    shard = Shard()
    executor = ShardExecutor(shard)  # type: ignore[arg-type]

    def call(number: int) -> int:
        ran = 0
        for _ in range(300):
            if number % 2:
                executor.run(Shard.work).result(10.0)  # type: ignore[arg-type]
            elif executor.run_now(Shard.work) is NOT_NOW:  # type: ignore[arg-type]
                continue
            ran += 1
        return ran

    with ThreadPoolExecutor(6) as pool:
        ran = sum(pool.map(call, range(6)))
    executor.close()
    assert shard.most_inside == 1
    assert shard.inside == 0
    assert shard.calls >= ran >= 900
