"""Which snapshot a run goes on from, and whether somebody still writes there. Importing this module imports no torch.

find_snapshot(job, arm)                     what `--resume` goes on from: the newest, of whichever run
newest_of_run(job, arm, epoch, resumed)     what a run that lost a process goes back to: the newest of its own
"""

from __future__ import annotations

import time
from pathlib import Path

from embedding_server.errors import InvalidInput, SegmentCorrupt
from trainer.job import Job
from trainer.snapshot_lock import only_training
from trainer.snapshots import check_files, cuts_in, is_complete, job_folder, newest_complete, no_snapshot

#: a worker whose driver was killed, or that was killed itself, is gone by then
END_TIMEOUT_S = 60.0
_POLL_S = 0.2


def find_snapshot(job: Job, arm: str) -> Path:
    """The newest complete cut of a job's arm. InvalidInput, naming the folder, if there is none; SegmentCorrupt if it
    lacks a file, with the cut before it: what a run goes on from is for its owner to decide."""
    if job.snapshots is None:
        raise InvalidInput("the job has no section `snapshots`, so it left none to resume from; add snapshots.uri")
    folder = job_folder(job.snapshots.uri, job.name, arm)
    found = newest_complete(folder)
    if found is None:
        raise no_snapshot(folder, job.name, arm)
    return _checked(folder, found)


def newest_of_run(job: Job, arm: str, last_epoch: int, resumed_from: Path | None) -> Path | None:
    """The newest complete cut of the epochs after `last_epoch`, which are this run's; before its first one that which
    it was resumed from. None: it has nothing but its beginning. SegmentCorrupt as find_snapshot."""
    assert job.snapshots is not None
    folder = job_folder(job.snapshots.uri, job.name, arm)
    own = [cut for cut in cuts_in(folder) if cut.epoch > last_epoch and is_complete(folder / cut.folder)]
    found = folder / own[-1].folder if own else resumed_from
    return None if found is None else _checked(folder, found)


def _checked(folder: Path, found: Path) -> Path:
    try:
        check_files(found)
    except SegmentCorrupt as error:
        others = [folder / cut.folder for cut in cuts_in(folder) if is_complete(folder / cut.folder)]
        before = others[others.index(found) - 1] if found in others[1:] else None
        then = f"--resume then goes on from {before}" if before else "there is no other"
        raise SegmentCorrupt(f"{error}; or move {found} away: {then}", error.path) from None
    return found


def newest_epoch(job: Job, arm: str) -> int:
    """Of the cuts in the job's folder; 0 without any."""
    if job.snapshots is None:
        return 0
    return max((cut.epoch for cut in cuts_in(job_folder(job.snapshots.uri, job.name, arm))), default=0)


def wait_for_end_of_training(job: Job, arm: str, timeout_s: float | None = None) -> None:
    """Returns once no training takes cuts in the arm's folder: until then one that ends could complete another, and
    remove the one that was to be gone on from. InvalidInput if it goes on after END_TIMEOUT_S."""
    if job.snapshots is None:
        return
    folder = job_folder(job.snapshots.uri, job.name, arm)
    timeout_s = END_TIMEOUT_S if timeout_s is None else timeout_s
    deadline_s = time.monotonic() + timeout_s
    while folder.is_dir():
        with only_training(folder) as is_only:
            if is_only:
                return
        if time.monotonic() > deadline_s:
            raise InvalidInput(
                f"{folder}: another training takes snapshots there, and has not ended for {timeout_s:g} s; end it, or "
                "give this job another name or snapshots.uri"
            )
        time.sleep(_POLL_S)
