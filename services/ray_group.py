"""Ray for a job: a local instance (or the cluster at RAY_ADDRESS) kept for all arms, and one TorchTrainer for each arm.

    with ray_group(workers, storage) as group:
        summary = group.run(job, arm, addresses, folder, show, check)

Progress travels through an actor that the driver polls; Ray's own log forwarding stays off, so that the terminal shows
our lines alone. Ray's logs are in /tmp/ray/session_latest/logs.

Measured here (2 cores): ray.init 4 to 5 s, an arm's workers 9 s to start (controller, then workers that import torch)
and 1 s to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from services import worker
from trainer.job import Job, resolved_json
from trainer.report import ArmSummary, Progress

POLL_S = 0.2
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


class WorkersFailed(FrostlineError):
    """A worker of an arm raised or died."""


class Board:
    """Actor: holds Progress reports until the driver takes them."""

    def __init__(self) -> None:
        self._reports: deque[Progress] = deque(maxlen=MAX_WAITING_REPORTS)

    def post(self, report: Progress) -> None:
        self._reports.append(report)

    def take(self) -> list[Progress]:
        reports = list(self._reports)
        self._reports.clear()
        return reports


class RayGroup:
    """Runs arms on `workers` Ray workers. Made by `ray_group`."""

    def __init__(self, workers: int, storage: Path, board: Any) -> None:
        self._workers = workers
        self._storage = storage
        self._board = board

    def run(
        self,
        job: Job,
        arm: str,
        addresses: list[str],
        folder: Path,
        show: Callable[[Progress], None],
        check: Callable[[], None],
        resume_from: Path | None = None,
    ) -> ArmSummary:
        """Blocks until the arm is done. `check` is called meanwhile and ends the wait by raising.

        resume_from: the folder of a cut, which every worker can read. Raises WorkersFailed, naming the worker and why.
        """
        config = {
            "job": resolved_json(job),
            "arm": arm,
            "addresses": list(addresses),
            "folder": str(folder),
            "board": self._board,
            "resume_from": str(resume_from) if resume_from else None,
        }
        outcome = _Outcome()
        # a thread, because fit() blocks: this one shows progress, watches the shards and takes Ctrl-C
        thread = threading.Thread(target=outcome.fill, args=(self._trainer(config, arm).fit,), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            self._show(show)
            check()
        self._show(show)
        return ArmSummary(**outcome.value())

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

    def _show(self, show: Callable[[Progress], None]) -> None:
        import ray

        for report in ray.get(self._board.take.remote()):
            show(report)


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
            raise WorkersFailed(reason_of(self._error)) from self._error
        return self._result.return_value


def reason_of(error: BaseException) -> str:
    """One line for each failed worker, without Ray's own trace."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        # the cause first: when a worker dies or raises, the others lose their connection to it and fail too
        in_order = sorted(failures.items(), key=lambda item: (_precedence(item[1]), item[0]))
        return "; ".join(f"worker {rank} {_what_happened(cause)}" for rank, cause in in_order)
    return f"a worker {_what_happened(error)}"


def _has_died(error: BaseException) -> bool:
    return type(error).__name__ == "WorkerHealthCheckFailedError" or "died unexpectedly" in str(error)


def _precedence(error: BaseException) -> int:
    return 0 if _has_died(error) else 1 if type(error).__name__ == "WorkerFailed" else 2


def _what_happened(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip()
    if name == "WorkerFailed":
        return f"failed: {text}"
    if _has_died(error):
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
