"""The jobs of a shard: who trains here, in which epoch, how far each one is, and what of it waits.

    JobBook   all jobs by name; begins their epochs and keeps these on disk
    Job       one of them: its steps (steps.py), and the pushes and pulls that wait for other workers

Thread safety: none; they belong to the thread that owns the shard.
Invariants:
1. An epoch is on disk before anybody may rely on its fence, unless the shard's folder is temporary.
2. What is staged, and whoever waits, is of the running epoch: a new one drops the first and tells the second.
3. Where steps.check_barrier passes, `steps` alone says how far a job is: every push up to that step is applied, default
   rows too. What is staged then is of a later step and not acknowledged as applied, so it will be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from embedding_server.epochs import load_epochs, save_epochs
from embedding_server.errors import FencedEpoch, NotReady
from embedding_server.gradients import Push, ShardGradients
from embedding_server.meetings import Meetings
from embedding_server.steps import JobSteps
from embedding_server.store import EpochInfo, Identity, PushAck, UpdateMode

T = TypeVar("T")


@dataclass(slots=True)
class Job:
    steps: JobSteps
    staged: dict[int, Push] = field(default_factory=dict)  # by worker
    #: default-row gradients of pipelined pushes, by step and worker, until all workers' are here
    defaults: dict[int, dict[int, dict[str, ShardGradients]]] = field(default_factory=dict)
    waiting_pulls: list[tuple[int, Callable[[], None], Future[Any]]] = field(default_factory=list)
    meetings: Meetings = field(init=False)

    def __post_init__(self) -> None:
        self.meetings = Meetings(self.steps)

    def begin(self, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool) -> None:
        """What steps.check_begin allowed."""
        if num_workers != self.steps.num_workers or will_restore:
            self.defaults.clear()
        self.steps.begin(num_workers, mode, epoch, will_restore)
        fenced = [future for push in self.staged.values() for future in push.waiting]
        fenced += [future for _, _, future in self.waiting_pulls]
        self.staged.clear()
        self.waiting_pulls.clear()
        self.meetings.fence(epoch)
        for future in fenced:
            fail(future, FencedEpoch(f"job {self.steps.job!r}: epoch {epoch} has begun; stop this worker", epoch))

    def pull_in_turn(self, worker: int, step: int, part: int, num_parts: int, read: Callable[[bool], T]) -> Future[T]:
        """Calls read(is_repeat) when it is this Pull's turn: at once, or inside the call that it waits for."""
        future: Future[T] = Future()
        if self.steps.is_repeated_pull(worker, step, part, num_parts):
            future.set_result(read(True))
            return future

        def run() -> None:
            # a retry of it may have run while this one waited
            is_repeat = self.steps.is_repeated_pull(worker, step, part, num_parts)
            rows = read(is_repeat)
            if not is_repeat:
                self.steps.note_pull(worker, step, part, num_parts)
                self.meetings.went_on(worker, step)
            future.set_result(rows)

        self.waiting_pulls.append((step, run, future))
        self.run_waiting_pulls()
        return future

    def run_waiting_pulls(self) -> None:
        """Runs those whose turn has come: after a Pull, and after every Push."""
        progressed = True
        while progressed:
            progressed = False
            for entry in list(self.waiting_pulls):
                step, run, future = entry
                if future.cancelled():
                    self.waiting_pulls.remove(entry)
                elif self.steps.may_pull(step):
                    self.waiting_pulls.remove(entry)
                    try:
                        run()
                    except Exception as error:  # it belongs to this Pull, not to the call that let it run
                        fail(future, error)
                    progressed = True


class JobBook:
    def __init__(self, folder: Path | None) -> None:
        """folder: where epochs outlive the process; None: nowhere. InvalidInput if what lies there cannot be read."""
        self._folder = folder
        self._jobs: dict[str, Job] = {}
        for name, epoch in (load_epochs(folder) if folder is not None else {}).items():
            self._jobs[name] = Job(JobSteps(name))
            self._jobs[name].steps.epoch = epoch

    def job_of(self, who: Identity) -> Job:
        """NotReady without an epoch, or before the restore that it began for; FencedEpoch or InvalidInput unless `who`
        is a worker of the running one."""
        job = self._of_running_epoch(who)
        if job.steps.is_awaiting_restore:
            raise NotReady(
                f"job {who.job!r}: epoch {who.epoch} began with will_restore, and no restore is done yet; call Restore,"
                " or begin an epoch without it"
            )
        return job

    def job_to_restore(self, who: Identity) -> Job:
        """As job_of, but NotReady unless the epoch began for a restore that is not done yet."""
        job = self._of_running_epoch(who)
        if not job.steps.is_awaiting_restore:
            raise NotReady(
                f"job {who.job!r}: epoch {who.epoch} takes no restore, or has had it; call BeginEpoch with"
                " will_restore, then Restore before the first Pull"
            )
        return job

    def _of_running_epoch(self, who: Identity) -> Job:
        job = self._jobs.get(who.job)
        if job is None or not job.steps.num_workers:
            raise NotReady(f"job {who.job!r}: no epoch has begun on this shard; call BeginEpoch first")
        job.steps.check(who)
        return job

    def current_epoch(self, name: str) -> EpochInfo:
        """The job's epoch here and the last step applied in full; epoch 0 if the job is unknown."""
        return self._jobs[name].steps.info() if name in self._jobs else EpochInfo(0, 0)

    def begin_epoch(
        self, name: str, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool = False
    ) -> EpochInfo:
        """Fences every earlier epoch of the job: what was staged is dropped, who waits gets FencedEpoch."""
        job = self._jobs.get(name) or Job(JobSteps(name))
        job.steps.check_begin(num_workers, mode, epoch, will_restore)
        if self._folder is not None:
            save_epochs(self._folder, {**{known: j.steps.epoch for known, j in self._jobs.items()}, name: epoch})
        self._jobs[name] = job
        job.begin(num_workers, mode, epoch, will_restore)
        return job.steps.info()


def complete(future: Future[PushAck], ack: PushAck) -> None:
    """Answers who still waits."""
    if not future.cancelled():
        future.set_result(ack)


def fail(future: Future[Any], error: Exception) -> None:
    """As complete, with an error."""
    if not future.cancelled():
        future.set_exception(error)
