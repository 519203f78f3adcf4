"""Starts shard processes on this machine, waits until they serve, and ends them: `launch: local`, tests, benchmarks.

A shard ends when its standard input closes, and only this process holds the other end: however this process dies, kill
-9 included, its shards end too. (A parent-death signal would fire when the *thread* that started them ends.)
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from embedding_server.errors import InvalidInput, StoreUnavailable

START_TIMEOUT_S = 600.0  # a first start on a machine compiles the kernels: half a minute, four on one that is busy
STOP_TIMEOUT_S = 10.0
_LOG_TAIL_CHARS = 2000


class LocalShards:
    """Shard processes that this object owns. Use it as a context manager, or call `stop`.

    Thread safety: `stop` and `check` may be called from any thread.
    """

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path], temporary: Path | None = None
    ) -> None:
        """temporary: a folder of logs to remove after a clean end; after any other it stays to be read."""
        self.processes = list(processes)
        self.logs = list(logs)
        self._temporary = temporary
        self.addresses: list[str] = []
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises StoreUnavailable if a shard has ended, with the end of its log."""
        for index, process in enumerate(self.processes):
            status = process.poll()
            if status is not None:
                raise StoreUnavailable(
                    f"shard {index} (process {process.pid}) ended with status {status}; the end of "
                    f"{self.logs[index]}:\n{self.log_tail(index)}"
                )

    def log_tail(self, index: int) -> str:
        text = self.logs[index].read_text(errors="replace") if self.logs[index].exists() else ""
        return text[-_LOG_TAIL_CHARS:].strip() or "(empty)"

    def stop(self) -> None:
        """Drains and ends every shard; kills what has not ended in STOP_TIMEOUT_S. Repeating it is harmless."""
        with self._lock:
            for process in self.processes:
                if process.stdin and not process.stdin.closed:
                    process.stdin.close()
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for process in self.processes:
                try:
                    process.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _kill_group(process)
                    process.wait()
                if process.stdout:
                    process.stdout.close()
            if self._temporary and all(process.returncode == 0 for process in self.processes):
                shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> LocalShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start_shards(
    num_shards: int,
    *,
    data_dir: Path | None = None,
    memory_limit_bytes: int = 8 << 30,
    backend: str = "auto",
    threads: int = 1,
    log_dir: Path | None = None,
    snapshot_root: Path | None = None,
    ports: Sequence[int] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> LocalShards:
    """Starts the shards of one store and returns when all serve. Raises StoreUnavailable with a log's end otherwise.

    memory_limit_bytes is for all of them together. data_dir: each uses the folder shard-<index> in it; None: temporary.
    log_dir: shard-<index>.log in it; None: a temporary folder. snapshot_root: the folder within which the shards take
    cuts; None: anywhere on this machine. ports: one for each shard; None: free ones.
    """
    if num_shards < 1:
        raise InvalidInput(f"num_shards={num_shards} must be at least 1")
    folder = Path(tempfile.mkdtemp(prefix="frostline-shards-")) if log_dir is None else Path(log_dir)
    logs = [folder / f"shard-{index}.log" for index in range(num_shards)]
    _make_logs(logs)
    processes = []
    for index, log_path in enumerate(logs):
        command = [sys.executable, "-m", "services.shard_process", "--bound-to-stdin"]
        command += ["--shard-index", str(index), "--num-shards", str(num_shards)]
        command += ["--memory-limit-bytes", str(max(memory_limit_bytes // num_shards, 1 << 20))]
        command += ["--backend", backend, "--threads", str(threads)]
        command += ["--port", str(ports[index] if ports else 0)]
        if snapshot_root is not None:
            command += ["--snapshot-root", str(snapshot_root)]
        if data_dir is not None:
            command += ["--data-dir", str(Path(data_dir) / f"shard-{index}")]
        with open(log_path, "a") as log_file:
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    text=True,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C at a terminal is the trainer's: it ends the shards in order
                )
            )
    shards = LocalShards(processes, logs, temporary=folder if log_dir is None else None)
    try:
        shards.addresses = _wait_for_addresses(shards, start_timeout_s)
    except BaseException:
        shards.stop()
        raise
    return shards


def _make_logs(logs: Sequence[Path]) -> None:
    """Before any shard starts: one whose log cannot be written would fail without a word."""
    for log_path in logs:
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            open(log_path, "a").close()
        except OSError as error:
            raise InvalidInput(
                f"{log_path}: cannot be written ({error.strerror}), and a shard must have its log; free space there, "
                "or name another folder (of a job: trainer.output_dir)"
            ) from None


def _environment() -> dict[str, str]:
    """This process's environment, with the packages findable where this process found them."""
    roots = [str(Path(__file__).resolve().parent.parent)]
    frostline = importlib.util.find_spec("frostline")
    for place in (frostline.submodule_search_locations or ()) if frostline else ():
        roots.append(str(Path(place).resolve().parent))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, before] if before else roots)}


def _wait_for_addresses(shards: LocalShards, timeout_s: float) -> list[str]:
    """Reads each shard's line; a timer ends the shards, and so the reading, when it takes too long."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        for process in shards.processes:
            _kill_group(process)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        addresses = []
        for index, process in enumerate(shards.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if is_late.is_set():
                raise StoreUnavailable(
                    f"shard {index} did not serve within {timeout_s:g} s; a first start on a machine compiles"
                    " kernels and keeps what it has: where other programs take the cores, start again; the end of"
                    f" {shards.logs[index]}:\n"
                    f"{shards.log_tail(index)}"
                )
            if not line:
                process.wait()
                shards.check()
            addresses.append(json.loads(line)["address"])
        return addresses
    finally:
        timer.cancel()
