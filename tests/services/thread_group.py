"""A worker group that is one thread of the test instead of Ray's processes, so that a run takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from embedding_server.errors import FrostlineError, StoreUnavailable
from services.ray_group import Attempt, RayGroup, WorkersFailed
from services.worker import WorkerFailed, run_as_worker
from trainer.job import Job, resolved_json
from trainer.report import ArmSummary, Progress


class ThreadGroup(RayGroup):
    """With one worker, a thread: it cannot be killed, and ends when it gives up on the shard."""

    def __init__(self) -> None:
        super().__init__(workers=1, storage=Path(), board=None)

    def run(
        self,
        job: Job,
        arm: str,
        attempt: Attempt,
        folder: Path,
        show: Callable[[Progress], None],
        check: Callable[[], None],
    ) -> ArmSummary:
        config = {
            "job": resolved_json(job),
            "arm": arm,
            "addresses": attempt.addresses,
            "folder": str(folder),
            "resume_from": str(attempt.resume_from) if attempt.resume_from else None,
            "epoch_above": attempt.epoch_above,
        }
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(ArmSummary(**run_as_worker(config, 0, 1, 1, show)))
            except FrostlineError as error:
                cause = WorkerFailed(f"{type(error).__name__}: {error}")
                outcome.append(WorkersFailed(f"worker 0 failed: {cause}", {0: cause}))

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            with suppress(StoreUnavailable):  # the worker finds out by itself
                check()
        if isinstance(outcome[0], WorkersFailed):
            raise outcome[0]
        return outcome[0]
