"""What is recovered from, where to, and what is told of it; real processes are in tests/chaos."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from embedding_server.errors import InvalidInput, StoreUnavailable
from services import external_shards
from services.external_shards import silent_shards, wait_for_return
from services.post_mortem import PostMortem
from services.ray_group import Attempt, Member, WorkersFailed
from services.recovery import ForeignShards, JobFailed, Recovery, can_be_mended
from services.worker import WorkerFailed
from tests.trainer.snapshot_folders import write_cut
from tests.trainer.test_report import FULL
from trainer.failures import ProcessEnd, read_failures
from trainer.job import Job, make_job
from trainer.report import ArmSummary, Progress
from trainer.snapshots import job_folder, remove_cut


class WorkerHealthCheckFailedError(RuntimeError):
    """As ray names it."""


DIED = WorkersFailed("worker 1 died", {1: WorkerHealthCheckFailedError("The actor died unexpectedly.")})


def raised(text: str) -> WorkersFailed:
    return WorkersFailed(f"worker 0 failed: {text}", {0: WorkerFailed(text)})


@dataclass
class FakeShards:
    addresses: list[str] = field(default_factory=lambda: ["a:1", "b:2"])
    gone: list[int] = field(default_factory=list)
    mended: list[bool] = field(default_factory=list)

    def check(self) -> None:
        if self.gone:
            raise StoreUnavailable(f"shard {self.gone[0]} (process 1) ended with status -9 (SIGKILL)")

    def lost(self, post_mortem: PostMortem) -> list[ProcessEnd]:
        return [ProcessEnd(f"shard {index}", "was killed by SIGKILL", signal="SIGKILL") for index in self.gone]

    def mend(self, from_scratch: bool) -> None:
        self.mended.append(from_scratch)
        self.gone.clear()
        self.addresses = [f"new-{address}" for address in self.addresses]


@dataclass
class FakeRay:
    """Each attempt reports an epoch, then does the next of `happenings`; without any it is done."""

    happenings: list[Callable[[], None]]
    attempts: list[Attempt] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    memory_peak_bytes: dict[int, int] = field(default_factory=dict)

    def run(self, job: Job, arm: str, attempt: Attempt, folder: Path, show: Any, check: Any) -> ArmSummary:
        self.attempts.append(attempt)
        epoch = max(attempt.epoch_above, 4) + 1
        show(Progress(arm, 10 * len(self.attempts), 100, 1.0, 1.0, 1.0, 1.0, epoch=epoch))
        if self.happenings:
            self.happenings.pop(0)()
        check()
        return FULL


def fail(error: Exception) -> Callable[[], None]:
    def happen() -> None:
        raise error

    return happen


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job({"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path / "snapshots")}})


@dataclass
class Trial:
    """A recovery with all of it made up but the files."""

    job: Job
    folder: Path
    ray: FakeRay
    shards: FakeShards = field(default_factory=FakeShards)
    said: list[str] = field(default_factory=list)
    resume_from: Path | None = None

    def run(self) -> ArmSummary:
        ray: Any = self.ray
        return Recovery(
            self.job, "main", self.folder, self.shards, ray, lambda progress: None, self.said.append, self.resume_from
        ).run()


def test_a_run_without_failures_leaves_no_record(job: Job, tmp_path: Path) -> None:
    trial = Trial(job, tmp_path / "run", FakeRay([]))
    assert trial.run().restarts == 0
    assert trial.ray.attempts == [Attempt(["a:1", "b:2"], None, 0)]
    assert not (tmp_path / "run").exists() and not trial.said


def test_a_shard_dies_twice_and_the_run_goes_back_to_its_newest_cut(job: Job, tmp_path: Path) -> None:
    cuts = job_folder(tmp_path / "snapshots", "j")
    write_cut(cuts, 900, 4)  # of an earlier run: the epoch is before this one's
    shards = FakeShards()

    def lose_before_a_cut() -> None:
        shards.gone.append(1)

    def lose_after_a_cut() -> None:
        write_cut(cuts, 15, 6)
        shards.gone[:] = [0, 1]

    trial = Trial(job, tmp_path / "run", FakeRay([lose_before_a_cut, lose_after_a_cut]), shards)
    assert trial.run().restarts == 2
    cut = cuts / "cut-000000000015-6"
    assert trial.ray.attempts[1:] == [
        Attempt(["new-a:1", "new-b:2"], None, 5),
        Attempt(["new-new-a:1", "new-new-b:2"], cut, 6),
    ]
    assert shards.mended == [True, False]
    first_line, second_line = trial.said
    assert first_line == (
        "main: step 10: shard 1 was killed by SIGKILL; goes back to its beginning, for there was no snapshot yet, "
        "restart 1 of at most 3"
    )
    assert second_line == (
        "main: step 20: shard 0 was killed by SIGKILL; shard 1 was killed by SIGKILL; goes back to step 15 "
        f"({cut.name}), restart 2 of at most 3"
    )
    first, second = read_failures(tmp_path / "run")
    assert (first["restart"], first["cut"], first["epoch"]) == (1, None, 6)
    assert (second["restart"], second["cut"], second["back_to_step"], second["epoch"]) == (2, str(cut), 15, 7)
    assert [process["who"] for process in second["processes"]] == ["shard 0", "shard 1"]
    assert second["away_s"] >= 0.0


def test_a_resumed_run_goes_back_to_where_it_was_resumed_from(job: Job, tmp_path: Path) -> None:
    cut = write_cut(job_folder(tmp_path / "snapshots", "j"), 50, 2)
    trial = Trial(job, tmp_path / "run", FakeRay([fail(DIED)]), resume_from=cut)
    assert trial.run().restarts == 1
    assert [attempt.resume_from for attempt in trial.ray.attempts] == [cut, cut]


def test_the_record_of_a_worker_has_its_log_and_memory(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("\n".join(["Fatal Python error: Segmentation fault", *[f"line {number}" for number in range(49)]]))
    ray = FakeRay([fail(DIED)])
    ray.members[1], ray.memory_peak_bytes[1] = Member(1, socket.gethostname(), 4711, str(log), None), 123 << 20
    Trial(job, tmp_path / "run", ray).run()
    (failure,) = read_failures(tmp_path / "run")
    (process,) = failure["processes"]
    assert (process["who"], process["what"], process["signal"]) == ("worker 1", "was killed by SIGSEGV", "SIGSEGV")
    assert (process["pid"], process["memory_peak_bytes"], len(process["log"])) == (4711, 123 << 20, 50)
    assert process["memory_limit_bytes"] > 1 << 30 and process["oom_kills"] == 0


def test_too_many_failures_end_the_job_and_are_all_recorded(job: Job, tmp_path: Path) -> None:
    few = job.model_copy(update={"trainer": job.trainer.model_copy(update={"max_failures": 1})})
    trial = Trial(few, tmp_path / "run", FakeRay([fail(DIED)] * 3))
    with pytest.raises(JobFailed, match=r"arm 'main': worker 1 died\n.*1, and trainer\.max_failures=1; "):
        trial.run()
    assert [failure["restart"] for failure in read_failures(tmp_path / "run")] == [1, None]
    # a run that is resumed adds to the record
    Trial(few, tmp_path / "run", FakeRay([fail(DIED)])).run()
    assert [failure["restart"] for failure in read_failures(tmp_path / "run")] == [1, None, 1]


def test_without_snapshots_the_job_fails_and_says_what_to_set(job: Job, tmp_path: Path) -> None:
    trial = Trial(job.model_copy(update={"snapshots": None}), tmp_path / "run", FakeRay([fail(DIED)]))
    with pytest.raises(JobFailed, match=r"worker 1 died\n.*no section `snapshots`: with snapshots\.uri"):
        trial.run()
    assert [failure["restart"] for failure in read_failures(tmp_path / "run")] == [None]


def test_a_damaged_newest_cut_ends_the_job_by_name(job: Job, tmp_path: Path) -> None:
    cuts = job_folder(tmp_path / "snapshots", "j")

    def take_cuts_and_die() -> None:
        write_cut(cuts, 10, 5)
        newest = write_cut(cuts, 20, 5)
        (newest / "shard-0-of-1" / "table-0-hot.safetensors").unlink()
        raise DIED

    trial = Trial(job, tmp_path / "run", FakeRay([take_cuts_and_die]))
    with pytest.raises(JobFailed, match=r"worker 1 died\n.*cut-0+20-5.*move .* away: --resume .*-0+10-5"):
        trial.run()
    assert trial.shards.mended == []


@pytest.mark.parametrize(
    "text",
    [
        "InvalidInput: train.tsv row 7",
        "SegmentCorrupt: /mnt/cut/table-0-hot.safetensors",
        "FencedEpoch: another worker group has taken over",
        "TableConflict: table 'user' exists with another spec",
    ],
)
def test_what_a_restart_cannot_mend_is_not_tried_again(job: Job, tmp_path: Path, text: str) -> None:
    trial = Trial(job, tmp_path / "run", FakeRay([fail(raised(text))]))
    with pytest.raises(JobFailed, match=f"worker 0 failed: {text}"):
        trial.run()
    assert len(trial.ray.attempts) == 1
    (failure,) = read_failures(tmp_path / "run")
    assert (failure["restart"], failure["processes"][0]["who"]) == (None, "worker 0")


def test_what_may_be_mended() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
    assert can_be_mended(DIED)
    assert can_be_mended(raised("StoreUnavailable: shard 1 (10.0.0.5:7100): could not be reached for 20 s"))
    assert can_be_mended(raised("NotReady: job 'j': no epoch has begun on this shard"))
    assert can_be_mended(WorkersFailed("", {0: gloo}))
    assert can_be_mended(WorkersFailed("", {1: WorkerHealthCheckFailedError("died"), 0: ValueError("anything")}))
    assert not can_be_mended(WorkersFailed("", {0: gloo, 1: WorkerFailed("InvalidInput: row 7")}))
    assert not can_be_mended(WorkersFailed("", {0: gloo, 1: ValueError("a bug of a model")}))
    assert not can_be_mended(WorkersFailed("Ray does not answer", {}))
    assert not can_be_mended(InvalidInput("a job"))


def test_shards_of_others_are_waited_for_and_cannot_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = ForeignShards(["127.0.0.1:1"])
    monkeypatch.setattr(external_shards, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(external_shards, "RETURN_TIMEOUT_S", 0.3)
    with pytest.raises(InvalidInput, match="no snapshot yet to go back to.*start them anew"):
        shards.mend(from_scratch=True)
    with pytest.raises(StoreUnavailable, match=r"shard 0 \(127\.0\.0\.1:1\) did not come back within 0\.3 s"):
        shards.mend(from_scratch=False)
    assert list(silent_shards(["127.0.0.1:1"], timeout_s=0.1)) == [0]
    with pytest.raises(StoreUnavailable):
        wait_for_return(["127.0.0.1:1"], timeout_s=0.1)


def test_an_attempt_that_dies_before_it_reports_its_epoch_is_fenced_too(job: Job, tmp_path: Path) -> None:
    """Shards that lost their memory might give the next one the same number."""
    write_cut(job_folder(tmp_path / "snapshots", "j"), 900, 4)

    class SilentRay(FakeRay):
        def run(self, job: Job, arm: str, attempt: Attempt, folder: Path, show: Any, check: Any) -> ArmSummary:
            return super().run(job, arm, attempt, folder, lambda progress: None, check)

    trial = Trial(job, tmp_path / "run", SilentRay([fail(DIED), fail(DIED)]))
    trial.run()
    assert [attempt.epoch_above for attempt in trial.ray.attempts] == [4, 5, 6]


def test_a_cut_that_somebody_replaced_while_it_was_restored_is_no_end(job: Job, tmp_path: Path) -> None:
    cuts = job_folder(tmp_path / "snapshots", "j")
    first = write_cut(cuts, 10, 2)

    def replace_it() -> None:
        write_cut(cuts, 20, 5)
        remove_cut(first)
        raise raised(f"InvalidInput: {first}: No such file")

    trial = Trial(job, tmp_path / "run", FakeRay([replace_it]), resume_from=first)
    assert trial.run().restarts == 1
    assert [attempt.resume_from for attempt in trial.ray.attempts] == [first, cuts / "cut-000000000020-5"]
