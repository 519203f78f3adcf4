"""The shard process: its one line of output, its options, how it ends, and that it never outlives who started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from embedding_server.errors import InvalidInput, StoreUnavailable, Unauthenticated
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, Identity
from services import cli, local_shards, shard_process
from services.external_shards import silent_shards
from services.shard_client import RemoteStore
from services.shard_process import LocalShards, ShardOptions, owned_buckets, parse_buckets, start_shards
from tests.services.authority import Files, lines_of_key, new_token, write_secret
from tests.services.secure_shards import secure_shards


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(pid: int, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.05)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 1024])
def test_shards_own_contiguous_ranges_that_partition_the_buckets(num_shards: int) -> None:
    owned = np.stack([owned_buckets(index, num_shards) for index in range(num_shards)])
    assert (owned.sum(axis=0) == 1).all()
    owner = owned.argmax(axis=0)
    assert (owner == np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS).all()
    sizes = owned.sum(axis=1)
    assert sizes.max() - sizes.min() <= 1


def test_explicit_buckets() -> None:
    assert np.flatnonzero(owned_buckets(0, 2, (10, 12))).tolist() == [10, 11, 12]
    assert parse_buckets("0-511") == (0, 511)
    for text in ("", "7", "a-b", "-3", "1-2-3"):
        with pytest.raises(InvalidInput, match="first-last"):
            parse_buckets(text)
    for bad in ((5, 4), (0, 1024)):
        with pytest.raises(InvalidInput, match="within 0-1023"):
            owned_buckets(0, 1, bad)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0), (0, 1025)])
def test_indexes_out_of_range_are_refused(index: int, count: int) -> None:
    with pytest.raises(InvalidInput, match=r"num_shards=|shard_index="):
        owned_buckets(index, count)


def test_two_local_shards_serve_a_store_and_end_cleanly(tmp_path: Path) -> None:
    with start_shards(2, data_dir=tmp_path / "data", log_dir=tmp_path / "logs", memory_limit_bytes=1 << 28) as shards:
        with grpc.insecure_channel(shards.addresses[0]) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        store = RemoteStore(shards.addresses)
        store.create_tables([TableSpec(name="t", dim=4)])
        assert store.begin_epoch("job", 1, "sync").epoch == 1
        shards.check()
        store.close()
    assert [process.returncode for process in shards.processes] == [0, 0]
    log = (tmp_path / "logs" / "shard-1.log").read_text()
    assert "allocator: " in log
    assert log.count("row kernels: ") == 1
    assert log.strip().endswith("stopped")
    # The fence outlives the process.
    with start_shards(2, data_dir=tmp_path / "data", log_dir=tmp_path / "logs", memory_limit_bytes=1 << 28) as shards:
        store = RemoteStore(shards.addresses)
        store.create_tables([TableSpec(name="t", dim=4)])
        assert store.begin_epoch("job", 1, "sync").epoch == 2
        store.close()


def test_the_announced_line_and_sigterm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.shard_process", "--buckets", "0-1023", "--memory-limit-bytes", str(1 << 26)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=local_shards._environment(),
    )
    try:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["pid"] == process.pid
        assert (line["shard_index"], line["num_shards"]) == (0, 1)
        store = RemoteStore([line["address"]])
        store.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


_STARTER = """
import os, signal, sys, threading
from services.shard_process import start_shards
def start():
    shards = start_shards(1, memory_limit_bytes=1 << 26)
    print(shards.processes[0].pid, flush=True)
    threading.keep = shards
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""


def test_shards_end_when_their_starter_is_killed_and_not_when_its_thread_ends() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=local_shards._environment(),
    )
    assert starter.stdout is not None
    assert starter.stdin is not None
    pid = int(starter.stdout.readline())
    time.sleep(0.3)
    assert is_running(pid)
    starter.kill()
    starter.wait()
    wait_until_ended(pid)
    starter.stdout.close()
    starter.stdin.close()


def test_a_shard_that_cannot_start_is_explained_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"shard 0 .* ended with status 1[\s\S]*backend='abacus'"):
        start_shards(1, backend="abacus", log_dir=tmp_path)


def test_a_shard_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    with start_shards(2, log_dir=tmp_path, memory_limit_bytes=1 << 27) as shards:
        shards.check()
        os.kill(shards.processes[1].pid, signal.SIGKILL)
        shards.processes[1].wait(20)
        with pytest.raises(
            StoreUnavailable, match=rf"shard 1 \(process {shards.processes[1].pid}\) ended with status -9"
        ):
            shards.check()


def test_a_shard_that_died_is_started_anew_and_the_others_are_not(tmp_path: Path) -> None:
    with start_shards(2, data_dir=tmp_path / "data", log_dir=tmp_path / "logs", memory_limit_bytes=1 << 27) as shards:
        store = RemoteStore(shards.addresses)
        store.create_tables([TableSpec(name="t", dim=4)])
        store.close()
        kept, killed = shards.processes
        before = list(shards.addresses)
        shards.check()
        assert shards.memory_peak_bytes[1] is not None
        killed.kill()
        killed.wait()
        assert shards.ended() == [1]
        shards.restart([1])
        assert shards.processes[0] is kept and kept.poll() is None
        assert shards.ended() == [] and shards.memory_peak_bytes[1] is None
        assert shards.addresses[0] == before[0] and shards.addresses[1] != before[1]
        store = RemoteStore(shards.addresses)
        assert list(store.table_specs()) == ["t"]  # of shard 0, the other has none
        store.close()
        shards.restart([0])  # one that runs is killed
        assert kept.returncode == -signal.SIGKILL
        shards.check()
    assert [process.returncode for process in shards.processes] == [0, 0]
    assert (tmp_path / "logs" / "shard-1.log").read_text().count("serving at") == 2


def test_logs_in_a_temporary_folder_stay_if_a_shard_has_died() -> None:
    with start_shards(1, memory_limit_bytes=1 << 26) as shards:
        shards.restart([0])
    assert shards.logs[0].exists()
    shutil.rmtree(shards.logs[0].parent)


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"shard 0 did not serve within 0.05 s"):
        start_shards(1, log_dir=tmp_path, start_timeout_s=0.05)


def test_a_shard_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_shards, "STOP_TIMEOUT_S", 0.3)
    deaf = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shards = LocalShards([deaf], [tmp_path / "log"])
    shards.stop()
    shards.stop()
    assert deaf.returncode == -signal.SIGKILL
    assert shards.log_tail(0) == "(empty)"


def test_a_root_of_snapshots_is_a_folder_and_bounds_what_clients_name(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"ended with status 1[\s\S]*--snapshot-root .*missing is not a folder"):
        start_shards(1, log_dir=tmp_path / "logs", snapshot_root=tmp_path / "missing", memory_limit_bytes=1 << 26)
    root = tmp_path / "root"
    root.mkdir()
    with start_shards(1, snapshot_root=root, memory_limit_bytes=1 << 26) as shards:
        store = RemoteStore(shards.addresses)
        store.create_tables([TableSpec(name="t", dim=4)])
        who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
        store.pull(who, 1, {})
        store.push(who, 1, {})
        with pytest.raises(InvalidInput, match=r"shard 0 \(127.*does not lie within"):
            store.begin_cut(who, 1, str(tmp_path / "job" / "cut-000000000001-1"))
        assert not (tmp_path / "job").exists()
        store.begin_cut(who, 1, str(root / "job" / "cut-000000000001-1"))
        while not store.cut_progress(who)[0].is_done:
            time.sleep(0.01)
        assert store.cut_progress(who)[0].error is None
        store.close()
    assert (root / "job" / "cut-000000000001-1").is_dir()


def test_a_shard_that_others_reach_does_not_start_without_tls_and_tokens(files: Files) -> None:
    command = [sys.executable, "-m", "services.shard_process", "--memory-limit-bytes", str(1 << 26)]
    for host, options in (("0.0.0.0", []), ("::", ["--token-file", str(files.token_file)])):
        done = subprocess.run(
            [*command, "--host", host, *options],
            env=local_shards._environment(), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert f"--host {host} can be reached from other machines, and this server would have no TLS" in done.stderr
        assert "--insecure" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        [*command, "--tls-cert", str(files.cert)],
        env=local_shards._environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "tls_cert without tls_key" in done.stderr) == (2, True)


def test_a_process_with_tls_and_tokens_shows_no_secret(files: Files, tmp_path: Path) -> None:
    cert, key = files.authority.issue("trainer").write(files.folder, "client")
    credentials = files.client("admin", tls_cert=cert, tls_key=key)
    with secure_shards(files, 1, tmp_path / "logs") as shards:
        (address,), (process,) = shards.addresses, shards.processes
        store = RemoteStore([address], credentials=credentials)
        assert store.table_specs() == {}
        store.close()
        wrong = write_secret(files.folder / "wrong", new_token())
        with pytest.raises(Unauthenticated):
            RemoteStore([address], credentials=files.client(tls_cert=cert, tls_key=key, token_file=wrong))
        files.tokens["serve"] = new_token()
        files.write_tokens()
        reader = files.client("serve", tls_cert=cert, tls_key=key)
        deadline_s = time.monotonic() + 20.0
        while isinstance(silent_shards([address], credentials=reader).get(0), Unauthenticated):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        shown = [Path(f"/proc/{process.pid}/{name}").read_text() for name in ("cmdline", "environ")]
    log = shards.logs[0].read_text()
    assert f"callers: TLS with {files.cert}, client certificates of {files.ca}; tokens of {files.token_file}" in log
    assert "(1 train, 1 serve, 1 admin)" in log and "the token file changed and was read again" in log
    assert "calls refused since the last such line: 1 wrong_token" in log
    assert str(files.token_file) in shown[0]
    for secret in (*files.secrets(), wrong.read_text(), *lines_of_key(key.read_bytes())):
        assert not any(secret in text for text in (log, *shown))


def test_frostline_shard_takes_its_files_from_the_environment_too(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ShardOptions] = []
    monkeypatch.setattr(shard_process, "run_shard", lambda options: seen.append(options) or 0)
    monkeypatch.setenv("FROSTLINE_SERVER_TOKEN_FILE", str(files.token_file))
    monkeypatch.setenv("FROSTLINE_SERVER_TLS_KEY", "/not/this")
    options = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--insecure"]
    result = CliRunner().invoke(cli.app, ["shard", *options])
    assert result.exit_code == 0, result.output
    assert seen[0].security == files.options(insecure=True)
    result = CliRunner().invoke(cli.app, ["shard", "--tls-client-ca", str(files.ca)])
    assert (result.exit_code, len(seen)) == (2, 1)
    assert "tls_key without tls_cert" in result.stderr
