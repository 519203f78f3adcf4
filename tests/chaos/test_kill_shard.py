"""kill -9 of shards at random moments of a job, which recovers by itself: the real recovery, shards, cuts and worker.

The worker is a thread of the test instead of Ray's process, so that a run takes seconds; test_kill_worker.py has Ray.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
from pathlib import Path

import pytest

from embedding_server.errors import FencedEpoch
from embedding_server.store import Identity
from services import external_shards
from services.local_shards import LocalShards, start_shards
from services.recovery import ForeignShards, OwnShards, Recovery
from services.shard_client import RemoteStore
from tests.chaos.exact_job import STEPS, assert_cut_is_exact, exact_job
from tests.chaos.seeds import seeds
from tests.services.thread_group import ThreadGroup
from trainer.failures import read_failures
from trainer.report import Progress
from trainer.snapshot_search import find_snapshot

KILLS = 2
pytestmark = pytest.mark.timeout(600)


class Killer:
    """Sends signals to shards, each a random time after a random step was reported, and after the recovery from the one
    before: two at once are one failure."""

    def __init__(self, rng: random.Random, shards: LocalShards, numbers: list[signal.Signals]) -> None:
        self._rng = rng
        self._shards = shards
        self._moments = sorted(rng.sample(range(1, STEPS - 50), len(numbers)))
        self._numbers = list(numbers)
        self._epoch = 0  # in which the last one was sent
        self._timer = threading.Timer(0.0, lambda: None)
        self.killed: list[int] = []

    def watch(self, progress: Progress) -> None:
        is_recovered = progress.epoch > self._epoch
        if self._moments and progress.step >= self._moments[0] and not progress.note and is_recovered:
            del self._moments[0]
            self._epoch = progress.epoch
            index, number = self._rng.randrange(len(self._shards.processes)), self._numbers.pop(0)
            self._timer = threading.Timer(self._rng.uniform(0.0, 0.3), self._kill, (index, number))
            self._timer.start()

    def _kill(self, index: int, number: signal.Signals) -> None:
        self.killed.append(index)
        self._shards.processes[index].send_signal(number)

    def stop(self) -> None:
        """The run was over first: what was still to come is not sent."""
        self._timer.cancel()


@pytest.mark.parametrize("seed", seeds(num_quick=2))
def test_kill_9_of_a_shard_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    mode = rng.choice(["sync", "pipelined"])  # the gradients do not depend on the rows, so staleness changes nothing
    job = exact_job(tmp_path, servers={"deadline_s": 6.0}, trainer={"max_failures": KILLS, "mode": mode})
    said: list[str] = []
    with start_shards(2, memory_limit_bytes=128 << 20, log_dir=tmp_path / "run") as shards:
        killer, group = Killer(rng, shards, [signal.SIGKILL] * KILLS), ThreadGroup()
        recovery = Recovery(job, "main", tmp_path / "run", OwnShards(shards), group, killer.watch, said.append, None)
        summary = recovery.run()
        killer.stop()
        store = RemoteStore(shards.addresses)
        for epoch in range(1, store.begin_epoch(job.name, 1, "sync").epoch):
            with pytest.raises(FencedEpoch):
                store.push(Identity(job.name, epoch, 0), STEPS + 1, {})
        store.close()
    assert summary.steps == STEPS
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS
    failures = read_failures(tmp_path / "run")
    assert 1 <= len(failures) == summary.restarts == len(said) == len(killer.killed) <= KILLS
    for number, (failure, index, line) in enumerate(zip(failures, killer.killed, said, strict=True), 1):
        (process,) = failure["processes"]
        assert (process["who"], process["signal"]) == (f"shard {index}", "SIGKILL")
        assert process["memory_limit_bytes"] == 64 << 20
        assert process["memory_peak_bytes"] > 10 << 20
        assert failure["restart"] == number
        assert failure["back_to_step"] <= failure["step"]
        assert f"shard {index} was killed by SIGKILL; goes back to " in line
    epochs = [failure["epoch"] for failure in failures]
    assert epochs == sorted(set(epochs)) and epochs[0] > 1
    assert summary.resumed_from == failures[-1]["cut"]


def test_a_shard_that_hangs_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_shards, "ANSWER_TIMEOUT_S", 2.0)
    job = exact_job(tmp_path, servers={"deadline_s": 6.0})
    with start_shards(2, memory_limit_bytes=128 << 20, log_dir=tmp_path / "run") as shards:
        killer, group = Killer(random.Random(1), shards, [signal.SIGSTOP]), ThreadGroup()
        recovery = Recovery(job, "main", tmp_path / "run", OwnShards(shards), group, killer.watch, print, None)
        assert recovery.run().restarts == 1
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS
    (failure,) = read_failures(tmp_path / "run")
    (process,) = failure["processes"]
    assert (process["what"], process["signal"], process["exit_code"]) == ("does not answer", None, None)


def test_shards_of_others_that_come_back_empty_are_filled_again(tmp_path: Path) -> None:
    """Whoever started them starts them again at their addresses; the others go back to the cut as well."""
    job = exact_job(tmp_path, servers={"deadline_s": 6.0})
    ports = free_ports(2)
    with start_shards(2, memory_limit_bytes=128 << 20, log_dir=tmp_path / "run", ports=ports) as shards:
        killer, group = Killer(random.Random(2), shards, [signal.SIGKILL]), ThreadGroup()
        foreign, over = ForeignShards(list(shards.addresses)), threading.Event()

        def start_again() -> None:
            while not over.wait(0.5):
                if shards.ended():
                    shards.restart(shards.ended())

        owner = threading.Thread(target=start_again)
        owner.start()
        try:
            summary = Recovery(job, "main", tmp_path / "run", foreign, group, killer.watch, print, None).run()
        finally:
            over.set()
            owner.join()
        assert summary.restarts == 1
        assert shards.addresses == foreign.addresses
    assert assert_cut_is_exact(job, find_snapshot(job, "main")) == STEPS


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
