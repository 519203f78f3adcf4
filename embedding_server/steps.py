"""Exactly once: which Pull and Push of a job a shard may run now, has run before, or must refuse.

Pure bookkeeping, no rows: jobs.py and pushes.py ask and then act. One JobSteps per job, thrown away never, renewed
by each epoch.

Rules (seq = step, steps count from 1):
- A worker's Push of step s is applied iff s == applied[worker] + 1; s <= applied[worker] is a repeat (acknowledged
  again, not applied); anything later is a StepGap.
- A worker's Pull of step s is new iff s == pulled[worker] + 1; earlier is a repeat (read again, no effect).
- sync: Pull s waits until every push of s-1 is applied. pipelined: it waits until every worker has pulled s-1 and every
  push of s-2 is applied, so staleness is one step and a visit is counted once whatever the number of workers.
- A new epoch drops what was staged and not applied, and keeps `applied`: a push that was applied before the workers
  died is a repeat when they send it again.
- An epoch that begins with `will_restore` takes nothing before a restore is done, which sets `applied` to its step.
"""

from __future__ import annotations

from embedding_server.errors import FencedEpoch, InvalidInput, NotReady, StepGap
from embedding_server.store import EpochInfo, Identity, UpdateMode

MAX_WORKERS = 4096


class JobSteps:
    def __init__(self, job: str) -> None:
        self.job = job
        self.epoch = 0
        self.num_workers = 0
        self.mode: UpdateMode = "sync"
        self.applied: list[int] = []
        self.pulled: list[int] = []
        self.is_awaiting_restore = False
        self._pull_parts: dict[int, tuple[int, set[int]]] = {}  # by worker: num_parts, parts that ran

    @property
    def last_step(self) -> int:
        """The last step that every worker's push was applied of."""
        return min(self.applied, default=0)

    def info(self) -> EpochInfo:
        return EpochInfo(self.epoch, self.last_step)

    def check_begin(self, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool) -> None:
        """FencedEpoch unless epoch rises; NotReady if workers or mode change while a step is applied for some only.

        That is fine if a restore follows: it undoes the step.
        """
        if epoch <= self.epoch:
            raise FencedEpoch(
                f"job {self.job!r}: epoch {epoch} must be above the current epoch {self.epoch};"
                f" begin epoch {self.epoch + 1}",
                self.epoch,
            )
        if not 1 <= num_workers <= MAX_WORKERS:
            raise InvalidInput(f"job {self.job!r}: num_workers={num_workers} must be in [1, {MAX_WORKERS}]")
        if mode not in ("sync", "pipelined"):
            raise InvalidInput(f"job {self.job!r}: mode={mode!r} must be 'sync' or 'pipelined'")
        is_torn = bool(self.applied) and max(self.applied) != self.last_step
        if is_torn and not will_restore and (num_workers, mode) != (self.num_workers, self.mode):
            raise NotReady(
                f"job {self.job!r}: {self.num_workers} workers in mode {self.mode!r} cannot become {num_workers} in"
                f" mode {mode!r} while step {max(self.applied)} is applied for some workers only; finish the step first"
            )

    def begin(self, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool) -> None:
        """What check_begin allowed."""
        if num_workers != self.num_workers:
            self.applied = [self.last_step] * num_workers
        self.epoch, self.num_workers, self.mode = epoch, num_workers, mode
        self.pulled = list(self.applied)  # what was applied was pulled: pulling it again is a repeat
        self._pull_parts.clear()
        self.is_awaiting_restore = will_restore

    def begin_restore(self) -> None:
        """The rows are gone, so no step is applied any more."""
        self.applied, self.pulled = [0] * self.num_workers, [0] * self.num_workers

    def end_restore(self, step: int) -> None:
        """The rows are those after `step`."""
        self.applied, self.pulled = [step] * self.num_workers, [step] * self.num_workers
        self.is_awaiting_restore = False

    def check(self, who: Identity) -> None:
        """FencedEpoch or InvalidInput unless `who` is a worker of the running epoch."""
        if who.epoch != self.epoch:
            raise FencedEpoch(
                f"job {self.job!r}: epoch {who.epoch} is not the current epoch {self.epoch}: another worker group has"
                " taken over; stop this worker, or begin a new epoch",
                self.epoch,
            )
        if not 0 <= who.worker < self.num_workers:
            raise InvalidInput(f"job {self.job!r}: worker={who.worker} must be in [0, {self.num_workers})")

    def is_repeated_pull(self, worker: int, step: int, part: int, num_parts: int) -> bool:
        """Whether this Pull ran before. StepGap if it skips a step."""
        if step < 1:
            raise InvalidInput(f"job {self.job!r}: step={step} must be at least 1")
        if step > self.pulled[worker] + 1:
            raise StepGap(
                f"job {self.job!r}, worker {worker}: Pull of step {step} skips step {self.pulled[worker] + 1};"
                f" pull step {self.pulled[worker] + 1} first",
                self.pulled[worker] + 1,
            )
        known_parts, ran = self._pull_parts.get(worker, (num_parts, set()))
        return step <= self.pulled[worker] or (known_parts == num_parts and part in ran)

    def may_pull(self, step: int) -> bool:
        if self.mode == "sync":
            return self.last_step >= step - 1
        return min(self.pulled) >= step - 1 and self.last_step >= step - 2

    def note_pull(self, worker: int, step: int, part: int, num_parts: int) -> None:
        """The part ran. Another num_parts than before starts the Pull over: its parts hold other rows."""
        known_parts, ran = self._pull_parts.get(worker, (num_parts, set()))
        ran = {*ran, part} if known_parts == num_parts else {part}
        self._pull_parts[worker] = num_parts, ran
        if len(ran) == num_parts:
            self.pulled[worker] = step
            del self._pull_parts[worker]

    def is_repeated_push(self, worker: int, step: int) -> bool:
        """Whether this Push was applied before. StepGap if it skips a step."""
        if step < 1:
            raise InvalidInput(f"job {self.job!r}: step={step} must be at least 1")
        if step > self.applied[worker] + 1:
            raise StepGap(
                f"job {self.job!r}, worker {worker}: Push of step {step} skips step {self.applied[worker] + 1};"
                f" push step {self.applied[worker] + 1} first",
                self.applied[worker] + 1,
            )
        return step <= self.applied[worker]

    def note_push(self, worker: int, step: int) -> None:
        """The push is applied. A new epoch may push what an earlier one pulled, so the pull counts as done too."""
        self.applied[worker] = step
        if self.pulled[worker] < step:
            self.pulled[worker] = step
            self._pull_parts.pop(worker, None)

    def check_barrier(self, step: int) -> None:
        """NotReady unless `step` is applied for all workers and none has pulled the next."""
        if min(self.applied) != step or max(self.applied) != step or max(self.pulled) > step or self._pull_parts:
            raise NotReady(
                f"job {self.job!r}: Advance at step {step} needs that step applied for all workers and none beyond it"
                f" pulled; applied: {self.applied[:8]}, pulled: {self.pulled[:8]}. Drain pushes and prefetches first"
            )
