from __future__ import annotations

import threading

import pytest

from embedding_server.errors import StepGap
from trainer.pipeline import Pipeline


class Batch:
    def __init__(self, number: int) -> None:
        self.sparse = number


class FakeRows:
    """Records pulls and pushes in the order in which they happen, and which thread made them."""

    def __init__(self, fail_at: tuple[str, int] | None = None) -> None:
        self.log: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self._pushes = 0
        self._fail_at = fail_at

    def _note(self, what: str, number: int) -> None:
        self.threads.add(threading.current_thread().name.partition("_")[0])
        if (what, number) == self._fail_at:
            raise StepGap(f"{what} {number}", expected_step=number)
        self.log.append((what, number))

    def announce(self, features: int) -> None:
        self._note("announce", features)

    def prefetch(self, features: int) -> None:
        self._note("pull", features)

    def step(self, learning_rate: float) -> None:
        self._pushes += 1
        self._note("push", self._pushes)


def run(
    rows: FakeRows,
    mode: str,
    count: int,
    barriers: tuple[int, ...] = (),
    max_steps: int | None = None,
    announces: bool = False,
) -> list[int]:
    batches = (Batch(n) for n in range(1, count + 1))
    steps = []
    is_barrier = barriers.__contains__
    with Pipeline(batches, rows, mode, is_barrier, max_steps, announces=announces) as pipeline:  # type: ignore[arg-type]
        for step, batch in pipeline:
            assert batch.sparse == step
            assert ("pull", step) in rows.log
            pipeline.push(0.1)
            if step in barriers:
                pipeline.drain()
                rows.log.append(("barrier", step))
            steps.append(step)
        pipeline.drain()
    return steps


def test_sync_pulls_and_pushes_in_the_callers_thread_and_in_step_order():
    rows = FakeRows()
    assert run(rows, "sync", 3) == [1, 2, 3]
    assert rows.log == [("pull", 1), ("push", 1), ("pull", 2), ("push", 2), ("pull", 3), ("push", 3)]
    assert rows.threads == {threading.current_thread().name.partition("_")[0]}


def test_pipelined_pull_misses_the_updates_of_one_step_exactly():
    rows = FakeRows()
    assert run(rows, "pipelined", 4) == [1, 2, 3, 4]
    assert rows.log == [
        ("pull", 1), ("pull", 2), ("push", 1), ("pull", 3), ("push", 2), ("pull", 4), ("push", 3), ("push", 4),
    ]  # fmt: skip
    assert rows.threads == {"frostline-pipeline"}


def test_nothing_is_pulled_ahead_of_a_barrier():
    rows = FakeRows()
    assert run(rows, "pipelined", 4, barriers=(2,)) == [1, 2, 3, 4]
    assert rows.log.index(("barrier", 2)) < rows.log.index(("pull", 3))
    assert rows.log.index(("push", 2)) < rows.log.index(("barrier", 2))


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_max_steps_ends_the_run_without_a_pull_beyond_it(mode):
    rows = FakeRows()
    assert run(rows, mode, 10, max_steps=3) == [1, 2, 3]
    assert ("pull", 4) not in rows.log


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_no_batches_is_no_step(mode):
    assert run(FakeRows(), mode, 0) == []


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("fail_at", [("pull", 3), ("push", 2)])
def test_the_first_error_reaches_the_caller_as_it_was_and_stops_all_traffic(mode, fail_at):
    rows = FakeRows(fail_at)
    with pytest.raises(StepGap, match=f"{fail_at[0]} {fail_at[1]}"):
        run(rows, mode, 10)
    assert all(number <= 3 for _, number in rows.log)


def test_a_failed_last_push_is_not_lost():
    with pytest.raises(StepGap, match="push 3"):
        run(FakeRows(("push", 3)), "pipelined", 3)


def test_first_step_continues_a_run():
    rows = FakeRows()
    batches = (Batch(n) for n in range(3))
    with Pipeline(batches, rows, "sync", lambda step: False, max_steps=2, first_step=7) as pipeline:  # type: ignore[arg-type]
        assert [step for step, _ in pipeline] == [7, 8]


def test_pipelined_announces_the_batch_after_the_one_that_is_pulled():
    rows = FakeRows()
    assert run(rows, "pipelined", 5, announces=True) == [1, 2, 3, 4, 5]
    assert rows.log == [
        ("pull", 1), ("pull", 2), ("announce", 3), ("push", 1), ("pull", 3), ("announce", 4), ("push", 2),
        ("pull", 4), ("announce", 5), ("push", 3), ("pull", 5), ("push", 4), ("push", 5),
    ]  # fmt: skip
    assert rows.threads == {"frostline-pipeline"}


def test_sync_announces_the_next_batch_beside_the_step():
    rows = FakeRows()
    assert run(rows, "sync", 3, announces=True) == [1, 2, 3]
    assert sorted(entry for entry in rows.log if entry[0] == "announce") == [("announce", n) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        assert rows.log.index(("announce", n)) < rows.log.index(("pull", n))
    assert [entry for entry in rows.log if entry[0] != "announce"] == [
        ("pull", 1), ("push", 1), ("pull", 2), ("push", 2), ("pull", 3), ("push", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_announcing_leaves_pulls_pushes_and_barriers_as_they_are(mode):
    barriers = (2, 3, 6)
    with_it, without = FakeRows(), FakeRows()
    assert run(with_it, mode, 7, barriers, announces=True) == run(without, mode, 7, barriers)
    assert [entry for entry in with_it.log if entry[0] != "announce"] == without.log
    announced = [number for what, number in with_it.log if what == "announce"]
    assert announced == ([1, 2, 3, 4, 5, 6, 7] if mode == "sync" else [3, 4, 5, 6, 7])  # once each, and in order
    for number in announced:
        assert with_it.log.index(("announce", number)) < with_it.log.index(("pull", number))


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_nothing_beyond_max_steps_is_read_or_announced(mode, max_steps):
    rows, read = FakeRows(), []

    def batches():
        for number in range(1, 10):
            read.append(number)
            yield Batch(number)

    with Pipeline(batches(), rows, mode, lambda step: False, max_steps, announces=True) as pipeline:  # type: ignore[arg-type]
        for _ in pipeline:
            pipeline.push(0.1)
        pipeline.drain()
    assert read == list(range(1, max_steps + 1))
    assert all(number <= max_steps for _, number in rows.log)


def test_a_batch_that_cannot_be_read_ends_the_run_though_it_was_to_be_announced():
    def batches():
        yield Batch(1)
        yield Batch(2)
        raise ValueError("row 3 of the file")

    def train() -> None:
        with Pipeline(batches(), FakeRows(), "pipelined", lambda step: False, announces=True) as pipeline:  # type: ignore[arg-type]
            for _ in pipeline:
                pipeline.push(0.1)

    with pytest.raises(ValueError, match="row 3"):
        train()
