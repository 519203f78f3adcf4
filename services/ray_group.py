"""Ray for a job: a local instance (or the cluster at RAY_ADDRESS) kept for all arms, and one TorchTrainer for each try.

    with ray_group(workers, storage) as group:
        summary = group.run(job, arm, attempt, folder, show, check)     may be called again after it raised

Progress, and which process each worker is, travel through an actor that the driver polls; Ray's own log forwarding
stays off, so that the terminal shows our lines alone. Ray's logs are in /tmp/ray/session_latest/logs.

Measured here (2 cores): ray.init 4 to 5 s, an arm's workers 9 s to start (controller, then workers that import torch)
and 1 s to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from services import worker
from services.process_ends import peak_memory_bytes
from trainer.job import Job, resolved_json
from trainer.report import ArmSummary, Progress

POLL_S = 0.2
END_TIMEOUT_S = 60.0  # for the workers of an attempt that failed, which Ray kills; a busy machine takes 10 s for it
MAX_WAITING_REPORTS = 1000  # older ones are dropped
OBJECT_STORE_BYTES = 128 << 20  # nothing large goes through it
LOGS = "/tmp/ray/session_latest/logs"
#: Ray reads these when it is imported
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # sends nothing to anybody
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_AUTH_MODE": "token",  # head, workers and client alike, or a client waits 30 s without a reason
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how late the end of an arm is seen; default 2
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one actor less to start
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at an arm: the shards, the cut behind which it goes on, and the last epoch of the tries before."""

    addresses: list[str]
    resume_from: Path | None = None
    epoch_above: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """The process of one worker. log_file: its standard error, on its own machine. actor: Ray's handle."""

    rank: int
    host: str
    pid: int
    log_file: str
    actor: Any

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()


class WorkersFailed(FrostlineError):
    """Workers of an arm raised or died. causes: by worker; rank None: Ray does not say which one."""

    def __init__(self, message: str, causes: Mapping[int | None, BaseException] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})


class Board:
    """Actor: holds what the workers of the running attempt report until the driver takes it."""

    def __init__(self) -> None:
        self._attempt = 0
        self._reports: deque[Progress] = deque(maxlen=MAX_WAITING_REPORTS)
        self._members: list[Member] = []

    def begin(self, attempt: int) -> None:
        """From now on nobody of an earlier attempt is listened to."""
        self._attempt = attempt
        self._reports.clear()
        self._members.clear()

    def join(self, attempt: int, member: Member) -> None:
        if attempt == self._attempt:
            self._members.append(member)

    def post(self, attempt: int, report: Progress) -> None:
        if attempt == self._attempt:
            self._reports.append(report)

    def take(self) -> tuple[list[Progress], list[Member]]:
        """What came since the last time."""
        reports, members = list(self._reports), list(self._members)
        self._reports.clear()
        self._members.clear()
        return reports, members


class RayGroup:
    """Runs arms on `workers` Ray workers. Made by `ray_group`.

    members: of the attempt that runs or ran last, by rank; memory_peak_bytes: of those on this machine, as last seen.
    """

    def __init__(self, workers: int, storage: Path, board: Any) -> None:
        self._workers = workers
        self._storage = storage
        self._board = board
        self._attempts = 0
        self.members: dict[int, Member] = {}
        self.memory_peak_bytes: dict[int, int] = {}

    def run(
        self,
        job: Job,
        arm: str,
        attempt: Attempt,
        folder: Path,
        show: Callable[[Progress], None],
        check: Callable[[], None],
    ) -> ArmSummary:
        """Blocks until the arm is done. `check` is called meanwhile and ends the attempt by raising.

        Every worker must be able to read the cut. Raises WorkersFailed, naming the worker and why. After an error no
        worker of the attempt is left, on this machine at least: whoever is left elsewhere is fenced by the next epoch.
        """
        self._attempts += 1
        self.members, self.memory_peak_bytes = {}, {}
        self._ask("begin", self._attempts)
        outcome = _Outcome()
        fit = self._trainer(self._config(job, arm, attempt, folder), arm).fit
        # a thread, because fit() blocks: this one shows progress, watches the shards and takes Ctrl-C
        thread = threading.Thread(target=outcome.fill, args=(fit,), daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_S)
                self._watch(show)
                check()
            self._watch(show)
            return ArmSummary(**outcome.value())
        except FrostlineError:
            self._end_workers(thread)
            raise

    def _config(self, job: Job, arm: str, attempt: Attempt, folder: Path) -> dict[str, Any]:
        """As services/worker.py takes it."""
        return {
            "job": resolved_json(job),
            "arm": arm,
            "addresses": list(attempt.addresses),
            "folder": str(folder),
            "board": self._board,
            "attempt": self._attempts,
            "resume_from": str(attempt.resume_from) if attempt.resume_from else None,
            "epoch_above": attempt.epoch_above,
        }

    def _trainer(self, config: dict[str, Any], arm: str) -> Any:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        from services.worker import train_on_ray

        worker: Callable[..., Any] = train_on_ray
        return TorchTrainer(
            worker,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=self._workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name=arm, storage_path=str(self._storage)),
        )

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._board, method).remote(*arguments))
        except Exception as error:  # of many kinds; without the board nobody can say what the workers do
            raise WorkersFailed(
                f"Ray does not answer any more ({type(error).__name__}); see the logs in {LOGS}", {None: error}
            ) from error

    def _watch(self, show: Callable[[Progress], None]) -> None:
        reports, members = self._ask("take")
        self.members |= {member.rank: member for member in members}
        for member in self.members.values():
            peak = peak_memory_bytes(member.pid) if member.is_here else None
            if peak is not None:
                self.memory_peak_bytes[member.rank] = peak
        for report in reports:
            show(report)

    def _end_workers(self, thread: threading.Thread) -> None:
        """Kills every worker of the attempt, and those that still join, until Ray's trainer has seen its end."""
        import ray

        deadline_s = time.monotonic() + END_TIMEOUT_S
        while thread.is_alive() or any(member.is_here and _is_alive(member.pid) for member in self.members.values()):
            for member in self.members.values():
                ray.kill(member.actor)
            if time.monotonic() > deadline_s:
                raise WorkersFailed(f"Ray has not ended the workers within {END_TIMEOUT_S:g} s; see the logs in {LOGS}")
            thread.join(POLL_S)
            with contextlib.suppress(WorkersFailed):  # Ray itself is gone, and the workers with it
                self._watch(lambda report: None)


def _is_alive(pid: int) -> bool:
    return peak_memory_bytes(pid) is not None  # a zombie has no memory


class _Outcome:
    """What fit() returned or raised, across threads."""

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

    def fill(self, fit: Callable[[], Any]) -> None:
        try:
            self._result = fit()
        except BaseException as error:
            self._error = error

    def value(self) -> Any:
        if self._error is not None:
            causes = causes_of(self._error)
            raise WorkersFailed(reason_of(causes), causes) from self._error
        return self._result.return_value


def causes_of(error: BaseException) -> dict[int | None, BaseException]:
    """What each failed worker raised, by rank. The cause comes first: when a worker dies or raises, the others lose
    their connection to it and fail too."""
    failures: Mapping[int | None, BaseException] = getattr(error, "worker_failures", None) or {None: error}
    return dict(sorted(failures.items(), key=lambda item: (_precedence(item[1]), item[0] or 0)))


def reason_of(causes: Mapping[int | None, BaseException]) -> str:
    """One line for each failed worker, without Ray's own trace."""
    return "; ".join(f"{name_of(rank)} {what_happened(cause)}" for rank, cause in causes.items())


def name_of(rank: int | None) -> str:
    return "a worker" if rank is None else f"worker {rank}"


def has_died(error: BaseException) -> bool:
    return type(error).__name__ == "WorkerHealthCheckFailedError" or "died unexpectedly" in str(error)


def _precedence(error: BaseException) -> int:
    return 0 if has_died(error) else 1 if type(error).__name__ == "WorkerFailed" else 2


def what_happened(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip()
    if name == "WorkerFailed":
        return f"failed: {text}"
    if has_died(error):
        return f"died: killed, out of memory, or a crash; see the logs in {LOGS}"
    first_line = text.splitlines()[0] if text else ""
    return f"failed: {name}: {first_line}; see the logs in {LOGS}"


@contextmanager
def ray_group(workers: int, storage: Path) -> Iterator[RayGroup]:
    """Starts a local Ray, or connects to RAY_ADDRESS; ends it (or the connection) on leaving."""
    try:
        storage.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"{storage}: Ray's state cannot be kept there ({error.strerror}); free space, or set trainer.output_dir to "
            "another folder"
        ) from None
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    worker.set_environment()  # a local Ray passes our environment on to its workers
    address = os.environ.get("RAY_ADDRESS")
    if address is None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        # a token of this run alone, so that none is written into the user's home
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            cores = len(os.sched_getaffinity(0))
            ray.init(
                address="local",
                num_cpus=max(cores, workers),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **common,
            )
        else:
            ray.init(address=address, runtime_env={"env_vars": worker.ENVIRONMENT}, **common)
    except Exception as error:  # Ray raises many kinds, plain Exception among them
        with contextlib.suppress(Exception):
            ray.shutdown()
        where = "a local Ray did not start" if address is None else f"no connection to Ray at RAY_ADDRESS={address}"
        raise StoreUnavailable(
            f"{where}: {type(error).__name__}: {error} On a busy machine start again; Ray's logs are in"
            " /tmp/ray/session_latest/logs; servers.store=inproc trains without Ray"
        ) from error
    try:
        check_resources(workers, ray.cluster_resources().get("CPU", 0.0))
        board = ray.remote(num_cpus=0)(Board).remote()
        yield RayGroup(workers, storage, board)
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


def check_resources(workers: int, cpus: float) -> None:
    """Ray would wait for ever."""
    if cpus < workers:
        raise InvalidInput(
            f"trainer.workers={workers} needs as many CPUs, and the Ray cluster has {cpus:g}; add nodes or lower it"
        )
