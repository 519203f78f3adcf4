"""What needs no running Ray; tests/integration/test_train_job.py has the rest."""

from __future__ import annotations

import pytest

from embedding_server.errors import InvalidInput, StoreUnavailable
from services.ray_group import MAX_WAITING_REPORTS, Board, Member, causes_of, check_resources, ray_group, reason_of
from services.worker import WorkerFailed
from trainer.report import Progress


class GroupError(RuntimeError):
    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("Training failed due to worker errors:\nTraceback ...")
        self.worker_failures = failures


class WorkerHealthCheckFailedError(RuntimeError):
    """As ray names it."""


def reason(error: BaseException) -> str:
    return reason_of(causes_of(error))


def test_our_own_error_is_passed_on_without_a_trace():
    error = GroupError({1: WorkerFailed("InvalidInput: train.tsv row 7: label 'x'")})
    assert reason(error) == "worker 1 failed: InvalidInput: train.tsv row 7: label 'x'"


def test_every_failed_worker_is_named():
    error = GroupError(
        {2: ValueError("second\nline"), 0: WorkerHealthCheckFailedError("A worker health check failed.")}
    )
    first, second = reason(error).split("; worker 2 ")
    assert first.startswith("worker 0 died: killed, out of memory, or a crash")
    assert second.startswith("failed: ValueError: second; see the logs in ")


def test_the_worker_that_died_is_named_before_those_that_lost_it():
    error = GroupError({0: RuntimeError("gloo: Connection reset"), 1: WorkerHealthCheckFailedError("died")})
    assert reason(error).startswith("worker 1 died: ")


def test_a_dead_actor_is_a_dead_worker():
    error = RuntimeError(
        "Training failed due to controller error:\nThe actor died unexpectedly before finishing this task."
    )
    assert reason(error).startswith("a worker died")


def test_a_cluster_with_too_few_cpus_is_refused_at_once():
    with pytest.raises(InvalidInput, match=r"trainer\.workers=4 needs as many CPUs, and the Ray cluster has 2"):
        check_resources(4, 2.0)
    check_resources(2, 2.0)


def test_the_board_gives_each_report_once_and_keeps_the_newest():
    board = Board()
    board.begin(1)
    for step in range(MAX_WAITING_REPORTS + 5):
        board.post(1, Progress("main", step, None, 1.0, 1.0, 1.0, 0.5))
    reports, members = board.take()
    assert (len(reports), reports[0].step, reports[-1].step) == (MAX_WAITING_REPORTS, 5, MAX_WAITING_REPORTS + 4)
    assert members == []
    assert board.take() == ([], [])


def test_the_board_does_not_listen_to_workers_of_an_earlier_attempt():
    board = Board()
    report, member = Progress("main", 7, None, 1.0, 1.0, 1.0, 0.5), Member(0, "here", 4711, "/dev/null", None)
    board.begin(1)
    board.post(1, report)
    board.join(1, member)
    board.begin(2)
    assert board.take() == ([], [])
    board.post(1, report)
    board.join(1, member)
    assert board.take() == ([], [])
    board.join(2, member)
    assert board.take() == ([], [member])


@pytest.mark.parametrize(("address", "text"), [(None, "local Ray did not start"), ("10.0.0.1:6379", "10.0.0.1:6379")])
def test_a_ray_that_does_not_start_is_one_line(tmp_path, monkeypatch, address, text):
    import ray

    def init(**settings):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(StoreUnavailable, match=f"{text}: Exception: The current node timed out"),
        ray_group(1, tmp_path),
    ):
        pass
