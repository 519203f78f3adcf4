"""`frostline serve`: snapshots over real gRPC, alone and following a job that trains on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embedding_server.errors import InvalidInput
from embedding_server.served_versions import Versions
from embedding_server.store import DEFAULT, FOUND, TRAINABLE
from frostline.v1 import embedding_pb2 as pb
from services.following import Follower, job_folder_in
from services.model_client import ModelClient
from services.served_model import ServedModel, ServeWhat
from services.snapshot_server import FOLLOW_HEALTH, LOOKUP_SERVICE, SnapshotServer
from tests.services.served_cuts import ROW_IDS, TABLES, ConstantJob, LookupCaller, wait_until
from tests.trainer.trained_snapshots import DIMS, EVERY_ID, JOB, make_snapshot
from trainer.snapshots import job_folder

ROWS_ONLY = ServeWhat(rows_only=True)
ROOT = Path(__file__).resolve().parents[2]
_STATE = TRAINABLE | DEFAULT | FOUND
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    return make_snapshot(tmp_path_factory.mktemp("served"), deltas=True)


def health_of(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


def check_all_tables(address: str, expected: dict) -> None:
    """Every row of every table in one call, against what the store answered at the cut."""
    caller, ids = LookupCaller(address), np.sort(EVERY_ID)
    answers = caller(dict.fromkeys(DIMS, ids))
    caller.close()
    for answer in answers:
        values, flags = expected[answer.table]
        assert np.array_equal(answer.values, values), answer.table
        assert np.array_equal(answer.flags & _STATE, flags & _STATE), answer.table


def test_a_snapshot_reads_over_grpc_as_the_store_did(trained) -> None:
    cut, expected = trained
    server = SnapshotServer(Versions(ServedModel(cut, ROWS_ONLY)))
    address = server.start()
    try:
        check_all_tables(address, expected)
        caller = LookupCaller(address)
        version = caller({"user": EVERY_ID[:3]})[0].version
        assert (version.job, version.snapshot_id) == (JOB, cut.name)
        with pytest.raises(grpc.RpcError, match="'nothing' is not in snapshot"):
            caller({"nothing": EVERY_ID})
        caller.close()
        client = ModelClient(address)
        described = client.describe()
        assert described.version.snapshot_id == cut.name and "--rows-only" in described.no_model
        assert not described.HasField("follow")
        with pytest.raises(InvalidInput, match="--rows-only"):
            client.predict(np.zeros((1, 1), np.float32), {})
        with pytest.raises(InvalidInput, match="start it with --follow"):
            client.choose("previous")
        client.close()
        _call_every_method(address)
        assert health_of(address) == health_of(address, LOOKUP_SERVICE) == _SERVING
    finally:
        server.stop(0.5)


def _call_every_method(address: str) -> None:
    """Of the services that reflection tells of: an empty request is answered, or refused as the caller's fault."""
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in reply.list_services_response.service}
        services = [each for each in pb.DESCRIPTOR.services_by_name.values() if each.full_name in names]
        assert {service.name for service in services} == {"EmbeddingLookup", "ModelServing"}
        for service in services:
            for method in service.methods:
                call = channel.unary_unary(f"/{service.full_name}/{method.name}")
                found = call.future(b"", timeout=20).code()
                allowed = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
                assert found in allowed, method.name


def test_processes_serve_one_snapshot_without_torch_and_drain(trained) -> None:
    cut, expected = trained
    command = [sys.executable, "-m", "services.cli", "serve", str(cut.parent), "--rows-only"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        for process in processes:
            line = json.loads(process.stdout.readline())
            assert (line["snapshot"], line["pid"]) == (cut.name, process.pid)
            check_all_tables(line["address"], expected)
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" not in maps and ".segment" in maps
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        ended = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert [status for _, status in ended] == [0, 0], ended


def test_a_command_that_cannot_serve_says_why(tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "-m", "services.cli", "serve", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1 and "nowhere is no folder; name a snapshot" in done.stderr
    assert not done.stdout


# Following ------------------------------------------------------------------------------------------------------------


class Followed:
    """A job, and a server that follows it."""

    def __init__(self, uri: Path) -> None:
        self.job = ConstantJob(uri)
        self.job.train()
        self.job.cut()
        self.follower = Follower(job_folder_in(uri), ROWS_ONLY, poll_s=0.02)
        versions = self.follower.begin(threading.Event())
        assert versions is not None
        self.versions = versions
        self.server = SnapshotServer(versions, self.follower)
        self.address = self.server.start()

    def step(self, *, is_delta: bool = False) -> float:
        """Trains a step and cuts; seconds from the complete cut on until it is served."""
        self.job.train()
        cut = self.job.cut(is_delta=is_delta)
        return wait_until(lambda: self.follower.state.served_id == cut.name)


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    each = Followed(tmp_path)
    yield each
    each.server.stop(1.0)
    assert each.versions.num_open == 0
    each.job.close()


@contextmanager
def load(address: str, threads: int) -> Iterator[dict[str, int]]:
    """Look-ups all the time, each of which must be of one version. Counts calls; errors of any thread are raised."""
    stopping, counts, errors = threading.Event(), {"calls": 0}, []

    def call() -> None:
        caller = LookupCaller(address)
        try:
            while not stopping.is_set():
                answers = caller(dict.fromkeys(TABLES, ROW_IDS))
                steps = {answer.version.step for answer in answers}
                assert len(steps) == 1
                for answer in answers:
                    assert (answer.values == steps.copy().pop()).all() and (answer.flags == FOUND | TRAINABLE).all()
                counts["calls"] += 1
        except BaseException as error:
            errors.append(error)
        finally:
            caller.close()

    running = [threading.Thread(target=call) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield counts
    finally:
        stopping.set()
        for thread in running:
            thread.join()
    assert not errors, errors


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _num_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def _swap_under_load(followed: Followed, swaps: int) -> None:
    with load(followed.address, threads=2) as counts:
        for k in range(swaps // 2):
            assert followed.step(is_delta=k % 4 != 3) < 2.0
        before, maps, calls = _resident_bytes(), _num_maps(), counts["calls"]
        for k in range(swaps // 2):
            assert followed.step(is_delta=k % 4 != 3) < 2.0
        assert counts["calls"] > calls > 0
        wait_until(lambda: followed.versions.num_open == 1)
        assert _resident_bytes() < before + (8 << 20)
        assert _num_maps() < maps + 40
    assert followed.follower.state.num_swaps == swaps


def test_swaps_under_load_fail_no_call_mix_no_versions_and_leave_no_memory(followed: Followed) -> None:
    _swap_under_load(followed, 20)


@pytest.mark.slow
def test_fifty_swaps_under_load(followed: Followed) -> None:
    _swap_under_load(followed, 50)


def _damage(path: Path) -> None:
    sound = path.read_bytes()
    at = len(sound) // 2
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])


@pytest.mark.parametrize("name", ["shard-0-of-1/table-1-hot.safetensors", "shard-0-of-1/shard.json", "manifest.json"])
def test_a_damaged_snapshot_is_refused_and_the_old_one_stays(followed: Followed, caplog, name: str) -> None:
    """Also if no look-up would have met the damage yet."""
    followed.job.train()
    with load(followed.address, threads=1):
        with followed.follower._work:  # it does not look before the damage is done
            cut = followed.job.cut()
            _damage(cut / name)
        wait_until(lambda: followed.follower.state.refusal != "")
        state = followed.follower.state
        assert state.served_id == followed.job.cuts[0].name and state.newest_id == cut.name
        assert name.rpartition("/")[2] in state.refusal and "it stays at" in caplog.text
        assert state.steps_behind == 1 and state.seconds_behind > 0
        wait_until(lambda: health_of(followed.address, FOLLOW_HEALTH) == _NOT_SERVING)
        assert health_of(followed.address) == _SERVING
        client = ModelClient(followed.address)
        assert client.describe().follow.refusal == state.refusal
        client.close()
        followed.step()  # the next one is taken up
    assert followed.follower.state.refusal == ""


def test_it_goes_back_on_command_stays_there_and_follows_again(followed: Followed) -> None:
    for _ in range(3):
        followed.step()
    names = [cut.name for cut in followed.job.cuts]
    client = ModelClient(followed.address)
    assert client.choose("previous").snapshot_id == names[-2]
    assert client.choose(names[0]).snapshot_id == names[0]
    followed.job.train()
    newest = followed.job.cut().name
    wait_until(lambda: client.describe().follow.newest_id == newest)
    follow = client.describe().follow
    assert follow.is_held
    assert (follow.steps_behind, follow.num_swaps) == (4, 5) and follow.seconds_behind > 0
    with pytest.raises(InvalidInput, match="complete are cut-"):
        client.choose("cut-000000000099-1")
    assert client.describe().version.snapshot_id == names[0]
    assert client.choose("").snapshot_id == followed.job.cuts[-1].name
    assert not client.describe().follow.is_held
    client.close()


def test_a_snapshot_that_is_removed_is_served_on(followed: Followed) -> None:
    """As by `ckpt gc`, of which nothing keeps a server."""
    caller = LookupCaller(followed.address)
    shutil.rmtree(followed.job.cuts[0])
    wait_until(lambda: followed.follower._newest is None)
    assert (caller(dict.fromkeys(TABLES, ROW_IDS))[0].values == 1).all()
    state = followed.follower.state
    assert (state.served_id, state.seconds_behind, state.refusal) == (followed.job.cuts[0].name, 0.0, "")
    followed.step()
    assert (caller(dict.fromkeys(TABLES, ROW_IDS))[0].values == 2).all()
    caller.close()


def test_it_waits_for_the_first_snapshot(tmp_path: Path) -> None:
    job = ConstantJob(tmp_path)
    job.train()
    folder = job_folder(tmp_path, JOB)
    folder.mkdir()
    follower = Follower(folder, ROWS_ONLY, poll_s=0.01)
    found: list[Versions[ServedModel] | None] = []
    thread = threading.Thread(target=lambda: found.append(follower.begin(threading.Event())))
    thread.start()
    cut = job.cut()
    thread.join(30)
    assert found[0] is not None and follower.state.served_id == cut.name
    found[0].close()
    stopped = threading.Event()
    stopped.set()
    assert Follower(tmp_path / "none", ROWS_ONLY).begin(stopped) is None
    job.close()


def test_which_job_of_a_folder_is_followed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no job has left a snapshot"):
        job_folder_in(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name / "objects").mkdir(parents=True)
    assert job_folder_in(tmp_path / "one") == tmp_path / "one"
    with pytest.raises(InvalidInput, match="one, two"):
        job_folder_in(tmp_path)
    shutil.rmtree(tmp_path / "two")
    assert job_folder_in(tmp_path) == tmp_path / "one"


def test_a_row_that_is_pushed_is_served_within_a_cut_interval_and_two_seconds(followed: Followed) -> None:
    interval_s, pushed_s, served_s, stopping = 0.5, {}, {}, threading.Event()

    def read() -> None:
        caller = LookupCaller(followed.address)
        while not stopping.wait(0.01):
            answer = caller({"a": ROW_IDS[:1]})[0]
            served_s.setdefault(answer.version.step, time.monotonic())
        caller.close()

    reader = threading.Thread(target=read)
    reader.start()
    for k in range(4):
        end_s = time.monotonic() + interval_s
        while time.monotonic() < end_s:
            followed.job.train()
            pushed_s[followed.job.step] = time.monotonic()
            time.sleep(0.05)
        followed.job.cut(is_delta=k % 2 == 1)
    wait_until(lambda: followed.job.step in served_s)
    stopping.set()
    reader.join()
    after_s = [min(at for step, at in served_s.items() if step >= pushed) - at_s for pushed, at_s in pushed_s.items()]
    assert len(after_s) > 8 and max(after_s) < interval_s + 2.0, max(after_s)
