"""Runs a job: its arms in turn, each on fresh shards, with Ray workers or in this process.

    run_job(job, show, say) -> {arm: ArmSummary}

    store remote, launch local      shard processes on this machine, new ones for each arm; one Ray for all arms
    store remote, launch external   shards that run already (one arm only: a second one would find the first one's rows)
    store inproc                    neither servers nor Ray

A worker that dies and a shard that ends are recovered from (recovery.py), if the job leaves snapshots. What cannot be
mended fails the job: JobFailed says which, why, and where to read on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from embedding_server.errors import FrostlineError, InvalidInput
from services.allocator import set_allocator
from services.local_shards import LocalShards, start_shards
from services.ray_group import RayGroup, ray_group
from services.recovery import ForeignShards, JobFailed, OwnShards, Recovery
from services.run_folder import RunFolder
from services.security_options import Credentials
from trainer.job import Job, resolved_json
from trainer.report import ArmSummary, Progress
from trainer.snapshot_search import find_snapshot, wait_for_end_of_training

if TYPE_CHECKING:
    from trainer.metrics import Metrics

__all__ = ["JobFailed", "SummaryNotWritten", "run_job"]

Show = Callable[[Progress], None]
Say = Callable[[str], None]
_COMPILES = "the first run on a machine compiles kernels: a minute, more if it is busy"


class SummaryNotWritten(FrostlineError):
    """The job is done, and its summary.json could not be written. `arms` is what it would hold."""

    def __init__(self, message: str, arms: dict[str, ArmSummary]) -> None:
        super().__init__(message)
        self.arms = arms


def run_job(job: Job, show: Show, say: Say, resumes: bool = False) -> dict[str, ArmSummary]:
    """Trains every arm. Writes <output_dir>/<name>/: job.json, summary.json after each arm; by arm the shards' logs and
    TensorBoard's files and mask_info.json. Those of an earlier run of this name are replaced (run_folder.py).

    resumes: each arm goes on behind the newest of its snapshots, and the curves of the run before stay. An arm that the
    run before did not get to begins anew; InvalidInput if no arm has a snapshot.

    SummaryNotWritten, with the results, if the last summary.json could not be written; of those before, a line says so.
    """
    arms = job.arm_jobs()
    check_arms(arms)
    cuts = find_cuts(arms, say) if resumes else {}
    folder = RunFolder(job.trainer.output_dir, job.name)
    folder.begin(resolved_json(job), say, resumes)
    results: dict[str, ArmSummary] = {}
    unwritten: SummaryNotWritten | None = None
    with _workers(arms, folder.path, say) as ray:
        for arm, arm_job in arms.items():
            results[arm] = run_arm(arm_job, arm, folder.path, ray, show, say, cuts.get(arm))
            unwritten = _write_summary(folder, results)
            if unwritten:
                say(f"{arm}: {unwritten}")
    if unwritten:
        raise unwritten
    return results


def _write_summary(folder: RunFolder, results: dict[str, ArmSummary]) -> SummaryNotWritten | None:
    """A full disk must not cost what hours of training gave: it is said, and whoever started the job gets it anyway."""
    try:
        folder.write_summary(results)
    except OSError as error:
        return SummaryNotWritten(
            f"{folder.summary_path}: cannot be written ({error.strerror}); the figures are printed all the same, so "
            "keep them, and free space there or set trainer.output_dir to another folder for the next run",
            results,
        )
    return None


def find_cuts(arms: Mapping[str, Job], say: Say) -> dict[str, Path]:
    """The cut that each arm goes on from. InvalidInput, naming the folder, if no arm has one."""
    found: dict[str, Path] = {}
    missing: dict[str, InvalidInput] = {}
    for arm, job in arms.items():
        wait_for_end_of_training(job, arm)
        try:
            found[arm] = find_snapshot(job, arm)
        except InvalidInput as error:
            missing[arm] = error
    if not found:
        raise next(iter(missing.values()))
    for arm, reason in missing.items():
        say(f"{arm}: begins with step 1: {reason}")
    return found


def bias_only(job: Job) -> Metrics | None:
    """Test metrics of the logistic regression to beat, on the job's data; None without test samples.

    It sees the same samples as the model, in the same order and as often.
    """
    from trainer.data.registry import open_reader
    from trainer.metrics import bias_metrics

    if not job.data.has_split("test"):
        return None
    reader = open_reader(job, "train")
    return bias_metrics(itertools.islice(reader, job.trainer.max_steps), open_reader(job, "test"), reader.schema)


def check_arms(arms: Mapping[str, Job]) -> None:
    """What only the whole set of arms and the environment can tell. Raises InvalidInput."""
    first = next(iter(arms.values()))
    if len(arms) > 1 and any(job.servers.launch == "external" for job in arms.values()):
        raise InvalidInput(
            f"servers.launch='external' with {len(arms)} arms ({', '.join(arms)}): each arm needs fresh shards; set "
            "launch='local', or give the job one arm"
        )
    if len({job.trainer.workers for job in arms.values()}) > 1:
        raise InvalidInput("trainer.workers differs between the arms; set it in the job, so that the arms compare")
    if os.environ.get("RAY_ADDRESS") and first.servers.store == "remote" and first.servers.launch == "local":
        raise InvalidInput(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']!r} names a cluster, whose workers cannot reach shards on this "
            "machine's loopback; unset it, or set servers.launch='external' and servers.addresses"
        )


def run_arm(
    arm_job: Job,
    arm: str,
    folder: Path,
    ray: RayGroup | None,
    show: Show,
    say: Say,
    resume_from: Path | None = None,
) -> ArmSummary:
    """resume_from: a cut, behind which the arm goes on."""
    servers = arm_job.servers
    if servers.store == "inproc":
        say(f"{arm}: trains in this process; {_COMPILES}")
        return run_inproc(arm_job, arm, folder, show, resume_from)
    assert ray is not None
    if servers.launch == "external":
        say(f"{arm}: trains with {_workers_text(arm_job)} and the shards at {', '.join(servers.addresses)}")
        foreign = ForeignShards(servers.addresses, Credentials.of_job(servers))
        return Recovery(arm_job, arm, folder / arm, foreign, ray, show, say, resume_from).run()
    shards_text = "1 new shard" if servers.num_shards == 1 else f"{servers.num_shards} new shards"
    say(f"{arm}: trains with {_workers_text(arm_job)} and {shards_text}")
    with _local_shards(arm_job, arm, folder) as shards:
        return Recovery(arm_job, arm, folder / arm, OwnShards(shards), ray, show, say, resume_from).run()


def _workers_text(job: Job) -> str:
    return f"{job.trainer.workers} Ray worker" + ("s" if job.trainer.workers > 1 else "")


def run_inproc(arm_job: Job, arm: str, folder: Path, show: Show, resume_from: Path | None = None) -> ArmSummary:
    """The arm in this process, its shard too."""
    from embedding_server.inproc import InprocStore
    from services.worker import set_threads
    from trainer.group import Group
    from trainer.loop import run_worker

    set_allocator()
    set_threads(arm_job.trainer.threads, local_workers=1)
    servers = arm_job.servers
    store = InprocStore(
        wire_dtype=arm_job.embedding.wire_dtype,
        memory_limit_bytes=servers.memory_limit_bytes * servers.num_shards,
        data_dir=servers.data_dir / arm if servers.data_dir else None,
        backend=servers.backend,
    )
    try:
        return run_worker(arm_job, arm, store, Group(), folder / arm, show, resume_from)
    finally:
        store.close()


def _local_shards(arm_job: Job, arm: str, folder: Path) -> LocalShards:
    servers = arm_job.servers
    return start_shards(
        servers.num_shards,
        data_dir=servers.data_dir / arm if servers.data_dir else None,
        memory_limit_bytes=servers.memory_limit_bytes * servers.num_shards,
        backend=servers.backend,
        threads=servers.threads,
        log_dir=folder / arm,
    )


@contextmanager
def _workers(arms: Mapping[str, Job], folder: Path, say: Say) -> Iterator[RayGroup | None]:
    remote = [job for job in arms.values() if job.servers.store == "remote"]
    if not remote:
        yield None
        return
    say(f"starting Ray; {_COMPILES}")
    with ray_group(remote[0].trainer.workers, folder / "ray") as group:
        yield group
