"""Recovery without hands: an arm that loses a shard or a worker goes back to its newest snapshot and goes on.

    summary = Recovery(job, arm, folder, shards, ray, show, say, resume_from).run()

The life of a failure:
1. seen: a shard process ended, a worker died, or a worker gave up on a shard. What is left of the workers is ended.
2. recorded: failures.json (trainer/failures.py), and a line for people.
3. judged: what a restart cannot mend (a bad job, bad data, a damaged snapshot, numbers that are not finite) fails the
   job, and so do a failure without a section `snapshots` and one beyond trainer.max_failures.
4. mended: shards that ended or hang are started anew, empty; shards of others are waited for.
5. tried again: a new worker group begins an epoch above all earlier ones, which fences whoever is left of those, and
   restores every shard, the dense part and the reader from the cut. Without a cut it begins anew, on new shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from services.external_shards import silent_shards, wait_for_return
from services.local_shards import LocalShards
from services.post_mortem import PostMortem
from services.ray_group import Attempt, RayGroup, WorkersFailed, has_died
from services.security_options import Credentials
from trainer.failures import FAILURES_FILE, Failure, FailureLog, ProcessEnd, back_text
from trainer.job import Job
from trainer.report import ArmSummary, Progress
from trainer.snapshot_search import newest_epoch, newest_of_run, wait_for_end_of_training
from trainer.snapshots import is_complete, now_text, read_manifest

#: errors of a worker by which it says that a shard is gone, or came back without its rows
LOST_SHARD = ("StoreUnavailable", "NotReady", "UnknownTable")
#: in what torch says in a worker whose neighbour is gone, if Ray has not seen yet that it died
LOST_WORKER = ("gloo", "Connection closed by peer", "Connection reset by peer")


class JobFailed(FrostlineError):
    """An arm did not finish. What the arms before it gave stands in summary.json."""


class Shards(Protocol):
    """The shards of an arm, whoever starts them."""

    @property
    def addresses(self) -> list[str]: ...

    def check(self) -> None:
        """StoreUnavailable if one is known to have ended. Cheap."""

    def lost(self, post_mortem: PostMortem) -> list[ProcessEnd]:
        """Those that have ended or do not answer."""

    def mend(self, from_scratch: bool) -> None:
        """Returns when all serve; from_scratch: and none has rows. StoreUnavailable; InvalidInput if it cannot be."""


class OwnShards:
    """launch: local."""

    def __init__(self, shards: LocalShards) -> None:
        self._shards = shards

    @property
    def addresses(self) -> list[str]:
        return list(self._shards.addresses)

    def check(self) -> None:
        self._shards.check()

    def lost(self, post_mortem: PostMortem) -> list[ProcessEnd]:
        return [post_mortem.of_shard(self._shards, index) for index in self._lost()]

    def mend(self, from_scratch: bool) -> None:
        self._shards.restart(range(len(self._shards.processes)) if from_scratch else self._lost())

    def _lost(self) -> list[int]:
        ended = self._shards.ended()
        running = [index for index in range(len(self._shards.processes)) if index not in ended]
        silent = silent_shards([self._shards.addresses[index] for index in running])
        return sorted([*ended, *(running[position] for position in silent)])


class ForeignShards:
    """launch: external. Whoever started them starts them again, at the same addresses."""

    def __init__(self, addresses: list[str], credentials: Credentials | None = None) -> None:
        self.addresses = list(addresses)
        self._credentials = credentials

    def check(self) -> None:
        """Nothing of them is seen from here."""

    def lost(self, post_mortem: PostMortem) -> list[ProcessEnd]:
        silent = silent_shards(self.addresses, credentials=self._credentials)
        return [ProcessEnd(f"shard {index} ({self.addresses[index]})", "does not answer") for index in silent]

    def mend(self, from_scratch: bool) -> None:
        if from_scratch:
            raise InvalidInput(
                "there is no snapshot yet to go back to, and shards that this job has not started keep the rows that "
                "it trained: start them anew, then the job"
            )
        wait_for_return(self.addresses, credentials=self._credentials)


class Recovery:
    """One arm, from its first attempt to its summary. Thread safety: one thread."""

    def __init__(
        self,
        job: Job,
        arm: str,
        folder: Path,
        shards: Shards,
        ray: RayGroup,
        show: Callable[[Progress], None],
        say: Callable[[str], None],
        resume_from: Path | None,
    ) -> None:
        """folder: of the arm."""
        self._job = job
        self._arm = arm
        self._folder = folder
        self._shards = shards
        self._ray = ray
        self._show = show
        self._say = say
        self._resume_from = resume_from
        self._last_epoch = newest_epoch(job, arm)  # cuts of later ones are this run's
        self._post_mortem = PostMortem()
        self._failures = FailureLog(folder, self._say_of_arm)
        self._restarts = 0
        self._step = 0  # as last reported
        #: no attempt so far has had a higher one, reported or not, unless shards remembered it
        self._epoch = self._last_epoch
        self._failed_s: float | None = None  # when the failure was seen that the arm is coming back from

    def run(self) -> ArmSummary:
        """JobFailed, with why, where a restart cannot help."""
        cut = self._resume_from
        while True:
            attempt = Attempt(self._shards.addresses, cut, self._epoch)
            try:
                summary = self._ray.run(self._job, self._arm, attempt, self._folder, self._watch, self._check)
                return replace(summary, restarts=self._restarts)
            except FrostlineError as error:
                self._failed_s = self._failed_s or time.monotonic()
                self._epoch = max(self._epoch, attempt.epoch_above + 1)
                cut = self._recover(self._named(error), cut)

    def _check(self) -> None:
        try:
            self._shards.check()
        except StoreUnavailable:
            self._failed_s = time.monotonic()  # the workers, who are ended now, take seconds for it
            raise

    def _named(self, error: FrostlineError) -> FrostlineError:
        """A shard that has ended is the reason, whatever its workers say."""
        try:
            self._shards.check()
        except StoreUnavailable as ended:
            return ended
        return error

    def _watch(self, progress: Progress) -> None:
        if progress.epoch > self._epoch:
            self._epoch = progress.epoch
            if self._failed_s is not None:
                away_s = round(time.monotonic() - self._failed_s, 2)
                self._failures.update_last(epoch=self._epoch, away_s=away_s)
                self._failed_s = None
        if not progress.note:
            self._step = progress.step
        self._show(progress)

    def _recover(self, error: FrostlineError, began_from: Path | None) -> Path | None:
        """As _go_back, with a record of it. began_from: the cut of the attempt that failed. JobFailed if no other is
        allowed."""
        lost = self._shards.lost(self._post_mortem)
        processes = lost or self._post_mortem.of_workers(self._ray, error)
        reason = "; ".join(f"{process.who} {process.what}" for process in processes) or str(error)
        self._failures.add(Failure(now_text(), self._step, reason, processes))
        # a worker of an earlier attempt, on a machine without locks of files, may have completed a newer cut since
        is_overtaken = began_from is not None and not is_complete(began_from)
        if not lost and not is_overtaken and not can_be_mended(error):
            raise JobFailed(f"arm {self._arm!r}: {error}") from error
        try:
            return self._go_back(reason)
        except FrostlineError as final:
            raise JobFailed(f"arm {self._arm!r}: {error}\n{final}") from error

    def _go_back(self, reason: str) -> Path | None:
        """Mends the shards. Returns the cut to begin from; None: with step 1. FrostlineError with why it cannot be."""
        most = self._job.trainer.max_failures
        if self._job.snapshots is None:
            raise InvalidInput(
                "the job has no section `snapshots`: with snapshots.uri and snapshots.every_samples it would have gone "
                "back to its last snapshot by itself, and gone on"
            )
        if self._restarts >= most:
            raise InvalidInput(
                f"restarts so far: {self._restarts}, and trainer.max_failures={most}; {self._folder / FAILURES_FILE} "
                "tells of each. Mend what ends them; --resume then goes on from the newest snapshot"
            )
        wait_for_end_of_training(self._job, self._arm)
        cut = newest_of_run(self._job, self._arm, self._last_epoch, self._resume_from)
        step = read_manifest(cut).run_step if cut else 0
        self._step = max(self._step, step)  # workers report twice a second
        cut_text = str(cut) if cut else None
        self._restarts += 1
        self._say_of_arm(
            f"step {self._step}: {reason}; goes back to {back_text(cut_text, step)}, restart {self._restarts} of at "
            f"most {most}"
        )
        self._shards.mend(from_scratch=cut is None)
        self._failures.update_last(restart=self._restarts, cut=cut_text, back_to_step=step, step=self._step)
        return cut

    def _say_of_arm(self, text: str) -> None:
        self._say(f"{self._arm}: {text}")


def can_be_mended(error: FrostlineError) -> bool:
    """Whether another attempt may succeed: workers died or lost a shard, and no job, data or numbers are wrong."""
    if not isinstance(error, WorkersFailed):
        return isinstance(error, StoreUnavailable)
    causes = error.causes.values()
    own = [str(cause).partition(":")[0] for cause in causes if type(cause).__name__ == "WorkerFailed"]
    if any(name not in LOST_SHARD for name in own):
        return False
    if own or any(has_died(cause) for cause in causes):
        return True
    return bool(causes) and all(any(words in str(cause) for words in LOST_WORKER) for cause in causes)
