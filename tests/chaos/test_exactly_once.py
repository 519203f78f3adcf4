"""Each push is applied wholly and once: a client killed in the middle of one, every acknowledgement lost once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from embedding_server.errors import FencedEpoch
from embedding_server.inproc import InprocStore
from embedding_server.store import Identity, Moves, UpdateMode
from services import parts, shard_client
from services.local_shards import _environment
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore

TRAINEE = Path(__file__).with_name("trainee.py")
TIMEOUT_S = 30.0
STEPS_AFTER = 4

Serve = Callable[[int], list[str]]
MakeProxy = Callable[[str], Any]


def load_trainee() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frostline_chaos_trainee", TRAINEE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainee = load_trainee()


class Victim:
    """The client process that is killed."""

    def __init__(self, addresses: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINEE), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )

    def wait_for(self, step: int) -> None:
        """Returns when the client stands before the push of `step`."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline().split()) != ["ready", str(step)]:
            assert line, "the client ended"
            self.go()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def victim() -> Iterator[Callable[[list[str]], Victim]]:
    started: list[Victim] = []

    def start(addresses: list[str]) -> Victim:
        started.append(Victim(addresses))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def last_steps(addresses: list[str]) -> list[int]:
    """The last step applied on each shard, asked directly."""
    import grpc

    from frostline.v1 import embedding_pb2 as pb
    from frostline.v1 import embedding_pb2_grpc as pb_grpc

    steps = []
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.EmbeddingShardStub(channel)
            steps.append(stub.GetEpoch(pb.GetEpochRequest(job=trainee.JOB)).last_step)
    return steps


# A push of step 5 is about 150 unique rows of 64 and of 32 bytes to each shard: some 16 KB.
NOTHING, FEW, HALF, MOST, ALL = 0, 20, 8_000, 14_000, 10**9


@pytest.mark.parametrize(
    ("sent_0", "sent_1", "applied"),
    [
        (NOTHING, ALL, [4, 5]),
        (FEW, ALL, [4, 5]),
        (HALF, ALL, [4, 5]),
        (ALL, MOST, [5, 4]),
        (HALF, HALF, [4, 4]),
        (ALL, ALL, [5, 5]),
    ],
    ids=["nothing-all", "few-all", "half-all", "all-most", "half-half", "all-all"],
)
def test_kill_9_in_the_middle_of_a_push(
    serve: Serve,
    proxy: MakeProxy,
    victim: Callable[[list[str]], Victim],
    sent_0: int,
    sent_1: int,
    applied: list[int],
) -> None:
    addresses = serve(2)
    proxies = [proxy(address) for address in addresses]
    client = victim([each.address for each in proxies])
    client.wait_for(5)
    for each, sent in zip(proxies, (sent_0, sent_1), strict=True):
        each.hold_replies()
        each.hold_after(sent)
    client.go()
    for each, sent in zip(proxies, (sent_0, sent_1), strict=True):
        if sent != ALL:
            assert each.is_held.wait(TIMEOUT_S)
    wait_until(lambda: last_steps(addresses) == applied)
    client.kill()
    for each in proxies:
        each.close()

    store = RemoteStore(addresses)
    epoch = store.begin_epoch(trainee.JOB, 1, "sync")
    assert epoch.epoch == 2
    assert epoch.last_step == min(applied)
    who = Identity(trainee.JOB, epoch.epoch, 0)
    last = 5 + STEPS_AFTER
    for step in range(epoch.last_step + 1, last + 1):
        ack, _ = trainee.run_step(store, who, step)
        assert not ack.duplicate  # one shard at least had not seen it
        assert ack.rows_ignored == 0
    trainee.assert_equals_model(store, last)
    stats = store.stats().total()
    assert stats.rows_frozen > 0
    with pytest.raises(FencedEpoch):
        store.pull(Identity(trainee.JOB, 1, 0), last + 1, {})
    store.close()


def test_a_push_staged_when_another_worker_dies_is_dropped(serve: Serve) -> None:
    """sync with two workers: one has pushed and waits, the other never will. The new epoch sends both again."""
    addresses = serve(2)
    store = RemoteStore(addresses)
    store.create_tables(trainee.SPECS)
    epoch = store.begin_epoch(trainee.JOB, 2, "sync")
    failures: list[FencedEpoch] = []

    def wait_in_vain() -> None:
        try:
            trainee.run_step(store, Identity(trainee.JOB, epoch.epoch, 0), 1)
        except FencedEpoch as error:
            failures.append(error)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    store.pull(Identity(trainee.JOB, epoch.epoch, 1), 1, {})
    time.sleep(0.3)
    assert thread.is_alive()
    again = store.begin_epoch(trainee.JOB, 2, "sync")
    thread.join(TIMEOUT_S)
    assert [error.current_epoch for error in failures] == [again.epoch]
    assert again.last_step == 0
    # Both workers send the same integers; their mean is what one of them sends.
    for step in range(1, 5):
        threads = [
            threading.Thread(target=trainee.run_step, args=(store, Identity(trainee.JOB, again.epoch, worker), step))
            for worker in range(2)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(TIMEOUT_S)
    trainee.assert_equals_model(store, 4)
    store.close()


@pytest.mark.parametrize(
    ("mode", "is_split"),
    [("sync", False), ("pipelined", False), ("sync", True)],
    ids=["sync", "pipelined", "sync in parts"],
)
def test_every_acknowledgement_lost_once(
    serve: Serve, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch, mode: UpdateMode, is_split: bool
) -> None:
    if is_split:
        monkeypatch.setattr(
            shard_client, "split", lambda call, rows, **options: parts.split(call, rows, limit_bytes=8_000, **options)
        )
    addresses = serve(2)
    proxies = [proxy(address) for address in addresses]
    for each in proxies:
        each.loses_each_reply_once = True
    store = RemoteStore([each.address for each in proxies], times=CallTimes(deadline_s=TIMEOUT_S))
    local = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    moves: dict[str, dict[str, Moves]] = {"remote": {}, "local": {}}
    for name, each in (("remote", store), ("local", local)):
        each.create_tables(trainee.SPECS)
        epoch = each.begin_epoch(trainee.JOB, 1, mode)
        assert (epoch.epoch, epoch.last_step) == (1, 0)
        for step in range(1, 7):
            ack, moved = trainee.run_step(each, Identity(trainee.JOB, 1, 0), step)
            assert ack.step == step
            # Of a push whose acknowledgement was lost, the repeat is known as one on every shard.
            assert ack.duplicate == (name == "remote")
            for table, counts in moved.items():
                moves[name][table] = moves[name].get(table, Moves()) + counts
    trainee.assert_equals_model(store, 6)
    trainee.assert_equals_model(local, 6)
    assert moves["remote"] == moves["local"]
    assert moves["remote"]["user"].frozen > 0
    for each in proxies:
        assert each.replies_lost >= 16
        assert each.replies_lost == each.replies_passed
    for figure in ("rows_hot", "rows_frozen", "moves_frozen", "moves_thawed"):
        assert getattr(store.stats().total(), figure) == getattr(local.stats().total(), figure)
    store.close()
    local.close()
