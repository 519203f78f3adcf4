"""A short training run in this process that is stopped as soon as it is seen to be hopeless.

Every training sample is scored before it is trained on, so the scores need no samples of their own, and rows that are
frozen, thawed or not admitted count as they do in training. Two runs of one job see the same samples in the same order:
their scores compare sample by sample (paired_auc.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embedding_server.inproc import InprocStore
from trainer.access_spec import AccessSection
from trainer.data.batch import Batch
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import train
from trainer.overlay import overlay
from trainer.run import build_run
from trainer.run_log import RunLog


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the samples in order, from the first step on; n of each."""

    labels: np.ndarray  # float32[n]
    logits: np.ndarray  # float32[n]
    is_complete: bool  # the run was not stopped

    def __len__(self) -> int:
        return int(self.labels.shape[0])


#: looks at the scores so far; True stops the run
IsHopeless = Callable[[Scores], bool]


def run_trial(job: Job, num_steps: int, checks: Mapping[int, IsHopeless] | None = None) -> Scores:
    """Trains `num_steps` steps; learning rates are as if the job ended there. InvalidInput as a run would say it.

    checks: by step, after which they look. The shards' memory limits are added up, since all rows lie in this process.
    """
    # a validation within so short a run would cost more than the run
    never = (num_steps + 1) * job.trainer.batch_size
    job = in_process(job, max_steps=num_steps, validate_every_samples=never)
    servers = job.servers
    store = InprocStore(
        wire_dtype=job.embedding.wire_dtype,
        memory_limit_bytes=servers.memory_limit_bytes * servers.num_shards,
        backend=servers.backend,
    )
    log = _ScoreLog(checks or {})
    try:
        with log:
            train(build_run(job, store, Group()), log)
        return log.scores_so_far(is_complete=True)
    except _Stopped:
        return log.scores_so_far(is_complete=False)
    finally:
        store.close()


def in_process(job: Job, **trainer: Any) -> Job:
    """The job with one worker and its shards in this process; `trainer`: further keys of that section."""
    num_shards = len(job.servers.addresses) or job.servers.num_shards
    over: dict[str, Any] = {
        "trainer": {"workers": 1, **trainer},
        "servers": {
            "store": "inproc",
            "launch": "local",
            "addresses": [],
            "num_shards": num_shards,
            **AccessSection().model_dump(),
        },
        "snapshots": None,  # it is tried, not kept
    }
    return make_job(overlay(job.model_dump(mode="json", exclude_unset=True), over, "trial"))


class _Stopped(Exception):
    """Leaves the loop of a run that is hopeless."""


class _ScoreLog(RunLog):
    """A worker's log that writes nothing and keeps the scores."""

    def __init__(self, checks: Mapping[int, IsHopeless]) -> None:
        super().__init__("trial", None, None, lambda progress: None)
        self._checks = checks
        self._labels: list[np.ndarray] = []
        self._logits: list[np.ndarray] = []

    def observe(self, step: int, batch: Batch, logits: torch.Tensor) -> None:
        super().observe(step, batch, logits)
        self._labels.append(batch.labels.numpy())
        self._logits.append(logits.numpy())
        is_hopeless = self._checks.get(step)
        if is_hopeless is not None and is_hopeless(self.scores_so_far(is_complete=False)):
            raise _Stopped

    def scores_so_far(self, *, is_complete: bool) -> Scores:
        empty = np.empty(0, np.float32)
        return Scores(np.concatenate([empty, *self._labels]), np.concatenate([empty, *self._logits]), is_complete)
