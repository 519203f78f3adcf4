"""One trainer process under Ray: settings that must land first, then the loop of trainer/loop.py."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from embedding_server.errors import FrostlineError
from embedding_server.failpoints import set_from_environment
from services.allocator import set_allocator
from trainer.report import Progress

#: of a call's whole deadline, what one try and the search for a lost shard may take
TRY_SHARE = 0.5
RECONNECT_SHARE = 1 / 3


#: of trainer processes; libgomp reads it when it is loaded, so it must stand before torch is imported.
#: torch's idle threads then sleep instead of spinning: pulls, pushes and local shards need those cores. A DLRM step of
#: one worker and two shards on two cores takes 200 ms of CPU so, and 250 to 600 otherwise.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


class WorkerFailed(RuntimeError):
    """A FrostlineError of a worker, as text: Ray carries exceptions by their constructor's one argument."""


def train_on_ray(config: dict[str, Any]) -> dict[str, Any]:
    """What TorchTrainer runs in every worker. Returns the fields of ArmSummary.

    config: job (JSON text), arm, addresses, folder, board (ray_group.Board), attempt (its number there), resume_from
    (the folder of a cut, or None), epoch_above (of the worker groups that this one takes over from).
    """
    import ray
    import ray.train

    from services.ray_group import Member

    faulthandler.enable(2)  # what a signal left of the process is at the end of its log
    context = ray.train.get_context()
    rank, board, attempt = context.get_world_rank(), config["board"], config["attempt"]
    log_file = os.path.realpath("/proc/self/fd/2")
    actor = ray.get_runtime_context().current_actor
    board.join.remote(attempt, Member(rank, socket.gethostname(), os.getpid(), log_file, actor))
    try:
        return run_as_worker(
            config,
            rank,
            context.get_world_size(),
            context.get_local_world_size(),
            partial(board.post.remote, attempt),
        )
    except FrostlineError as error:
        raise WorkerFailed(f"{type(error).__name__}: {error}") from None


def run_as_worker(
    config: dict[str, Any], rank: int, size: int, local_size: int, show: Callable[[Progress], Any]
) -> dict[str, Any]:
    set_allocator()
    set_from_environment(os.environ)
    from services.security_options import Credentials
    from services.shard_channel import CallTimes
    from services.shard_client import RemoteStore
    from trainer.group import Group
    from trainer.job import make_job
    from trainer.loop import run_worker

    job = make_job(json.loads(config["job"]))
    set_threads(job.trainer.threads, local_size)
    deadline_s = job.servers.deadline_s
    times = CallTimes(deadline_s, deadline_s * TRY_SHARE, deadline_s * RECONNECT_SHARE)
    credentials = Credentials.of_job(job.servers)
    store = RemoteStore(config["addresses"], wire_dtype=job.embedding.wire_dtype, times=times, credentials=credentials)
    resume_from = Path(config["resume_from"]) if config.get("resume_from") else None
    group, folder = Group(rank, size), Path(config["folder"])
    above = config.get("epoch_above", 0)
    try:
        return asdict(run_worker(job, config["arm"], store, group, folder, show, resume_from, above))
    finally:
        store.close()


def set_environment() -> None:
    """For this process and those it starts; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def set_threads(threads: int | None, local_workers: int) -> None:
    """Threads of torch's kernels; default: this machine's cores over its workers.

    Ray starts workers with OMP_NUM_THREADS=1, so leaving them alone would use one core of many. Our own kernels run on
    the thread that calls them.
    """
    import torch

    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_workers))
