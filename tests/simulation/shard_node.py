"""A shard server of a simulation: the server's own functions (services/shard_calls.py) on a Shard that is checked.

Requests are run one at a time as they come; between them, when the clock says so, background work and the writer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.errors import FrostlineError
from embedding_server.gradients import ShardGradients
from embedding_server.shard import Shard
from embedding_server.store import NUM_BUCKETS, Identity
from frostline.v1 import embedding_pb2 as pb
from services import shard_calls
from services.snapshot_paths import SnapshotPaths
from tests.simulation.checked_shard import CheckedShard, Violation
from tests.simulation.later import LaterExecutor
from tests.simulation.network import Respond
from tests.simulation.shard_model import JOB, ShardModel
from tests.simulation.world import World

IDLE = "idle"  # what becomes of a turn of background work that found none
MEMORY_BYTES = 32 << 20
_MAX_WORKERS = 8
_IDLE_S, _BUSY_S = 3.0, 0.004  # between two turns of background work
_ROUSED = 0.4  # share of requests after which there is one soon
_MOST_SLICES = 24  # of background work in one operation


@dataclass(frozen=True)
class Pull:
    who: Identity
    step: int
    ids: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        return f"Pull step {self.step} worker {self.who.worker} epoch {self.who.epoch}"


@dataclass(frozen=True)
class Push:
    who: Identity
    step: int
    gradients: Mapping[str, ShardGradients]

    def __str__(self) -> str:
        return f"Push step {self.step} worker {self.who.worker} epoch {self.who.epoch}"


@dataclass(frozen=True)
class Lookup:
    ids: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        return "Lookup"


@dataclass(frozen=True)
class Prefetch:
    ids: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        return "Prefetch"


class ShardNode:
    """`start` makes the process, `crash` ends it; requests to a dead one do not arrive."""

    def __init__(
        self, world: World, index: int, num_shards: int, *, has_writer: bool, folder: Path | None = None
    ) -> None:
        """folder: its data_dir, which outlives its processes."""
        self._world = world
        self.index = index
        self.num_shards = num_shards
        self._has_writer = has_writer
        self.folder = folder or world.root / "data" / f"shard-{index}"
        self.buckets = np.arange(NUM_BUCKETS) % num_shards == index
        self.checked: CheckedShard | None = None
        self._acknowledged_epoch = 0  # the highest that any begin_epoch answered, through all its processes
        self._turn = 0  # the next one of background work; others that were planned are not taken

    @property
    def is_alive(self) -> bool:
        return self.checked is not None

    def start(self) -> None:
        assert self.checked is None
        world = self._world
        self._writer = LaterExecutor() if self._has_writer else None
        shard = Shard(
            buckets=self.buckets,
            data_dir=self.folder,
            memory_limit_bytes=MEMORY_BYTES,
            backend="cpu",
            writer=self._writer,
        )
        model = ShardModel(world.sizes.row_ids, self.buckets)
        model.epoch = shard.current_epoch(JOB).epoch
        if model.epoch < self._acknowledged_epoch:
            raise Violation(
                f"shard {self.index} has forgotten epoch {self._acknowledged_epoch}: it is at {model.epoch}"
            )
        self.checked = CheckedShard(shard, model, world.cuts, lambda: world.faults.has_failed)
        self._answers = shard_calls.LastAnswers()
        self._paths = SnapshotPaths(world.root, "127.0.0.1")
        self._maintain_later(_BUSY_S)

    def crash(self) -> None:
        """Memory is gone, files stay as they are."""
        if self.checked is None:
            return
        shard, self.checked = self.checked.shard, None
        with self._world.disk.of_dead_process():
            if self._writer is not None:
                self._writer.drop()
            with contextlib.suppress(Exception):  # what it holds may be in any state
                shard.close()
            shard._folder.close()

    # Work -----------------------------------------------------------------------------------------------------------

    def receive(self, request: Any, respond: Respond) -> None:
        def work() -> str:
            try:
                answer = self._run(request)
            except FrostlineError as error:
                respond(None, error)
                return type(error).__name__
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done: _tell(done, respond))
                return "done" if answer.done() else "waits"
            respond(answer, None)
            return "done"

        self._world.operate(_label(request), self, work)
        if self.is_alive and self._world.rng.random() < _ROUSED:
            self._maintain_later(_BUSY_S)

    def _run(self, request: Any) -> Any:
        checked, answers, paths = self.checked, self._answers, self._paths
        assert checked is not None
        match request:
            case Pull():
                return checked.pull(request.who, request.step, request.ids)
            case Push():
                return checked.push(request.who, request.step, request.gradients)
            case Lookup():
                return checked.lookup(request.ids)
            case Prefetch():
                return checked.prefetch(request.ids)
            case pb.CreateTablesRequest():
                return shard_calls.create_tables(checked, request)  # type: ignore[arg-type]
            case pb.GetEpochRequest():
                return shard_calls.get_epoch(checked, request)  # type: ignore[arg-type]
            case pb.BeginEpochRequest():
                answer = shard_calls.begin_epoch(checked, answers, request, _MAX_WORKERS)  # type: ignore[arg-type]
                self._acknowledged_epoch = max(self._acknowledged_epoch, answer.epoch)
                return answer
            case pb.AdvanceRequest():
                return shard_calls.advance(checked, answers, paths, request)  # type: ignore[arg-type]
            case pb.GetCutProgressRequest():
                return shard_calls.cut_progress(checked, request)  # type: ignore[arg-type]
            case pb.AbandonCutRequest():
                return shard_calls.abandon_cut(checked, request)  # type: ignore[arg-type]
            case pb.RestoreRequest():
                return shard_calls.restore(checked, answers, paths, request)  # type: ignore[arg-type]
        raise AssertionError(f"no request: {request}")

    def _maintain_later(self, delay_s: float) -> None:
        self._turn += 1
        turn = self._turn

        def go_on() -> None:
            if self.is_alive and turn == self._turn:
                self._maintain()

        self._world.clock.at(delay_s, go_on)

    def _maintain(self) -> None:
        """Some slices, and sometimes a piece of the writer's work."""
        rng, is_busy = self._world.rng, False

        def work() -> str:
            nonlocal is_busy
            assert self.checked is not None
            if self._writer is not None and self._writer.has_work and rng.random() < 0.5:
                self._writer.run_one()
                is_busy = True
                return "writer"
            slices = 0
            for _ in range(rng.randint(1, _MOST_SLICES)):
                is_busy = self.checked.maintain()
                if not is_busy:
                    break
                slices += 1
            is_busy |= self._writer is not None and self._writer.has_work
            return f"{slices} slices" if slices else IDLE

        self._world.operate("maintain", self, work)
        self._maintain_later(rng.uniform(0.5, 1.5) * (_BUSY_S if is_busy else _IDLE_S))


def _tell(done: Future[Any], respond: Respond) -> None:
    error = done.exception(0)
    respond(None if error else done.result(0), error)


def _label(request: Any) -> str:
    if isinstance(request, pb.AdvanceRequest):
        return f"Advance {request.WhichOneof('action')} step {request.step} epoch {request.caller.epoch}"
    if isinstance(request, Pull | Push | Lookup | Prefetch):
        return str(request)
    return type(request).__name__.removesuffix("Request")
