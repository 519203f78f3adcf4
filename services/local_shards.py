"""Starts shard processes on this machine, waits until they serve, and ends them: `launch: local`, tests, benchmarks.

A shard ends when its standard input closes, and only this process holds the other end: however this process dies, kill
-9 included, its shards end too. (A parent-death signal would fire when the *thread* that started them ends.)

What becomes of a shard that ended is for others to decide: `check` tells of it, `restart` starts another in its place.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from embedding_server.errors import InvalidInput, StoreUnavailable
from services.process_ends import peak_memory_bytes, status_text

START_TIMEOUT_S = 600.0  # a first start on a machine compiles the kernels: half a minute, four on one that is busy
STOP_TIMEOUT_S = 10.0
_LOG_TAIL_CHARS = 2000

#: the process of the shard of this index, its standard input and output piped
Launch = Callable[[int], "subprocess.Popen[str]"]


class LocalShards:
    """Shard processes that this object owns. Use it as a context manager, or call `stop`.

    Thread safety: `stop` and `check` may be called from any thread; `restart` from one, that of the owner.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[str]],
        logs: Sequence[Path],
        temporary: Path | None = None,
        launch: Launch | None = None,
        memory_limit_bytes: int = 0,
    ) -> None:
        """temporary: a folder of logs to remove after a clean end; after any other it stays to be read.
        memory_limit_bytes: of each."""
        self.processes = list(processes)
        self.logs = list(logs)
        #: of each shard, as of the last `check`
        self.memory_peak_bytes: list[int | None] = [None] * len(self.processes)
        self.memory_limit_bytes = memory_limit_bytes
        self.addresses: list[str] = []
        self._temporary = temporary
        self._launch = launch
        self._has_failed = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises StoreUnavailable if a shard has ended, with the end of its log."""
        for index, process in enumerate(self.processes):
            status = process.poll()
            if status is not None:
                raise StoreUnavailable(
                    f"shard {index} (process {process.pid}) ended with {status_text(status)}; the end of "
                    f"{self.logs[index]}:\n{self.log_tail(index)}"
                )
            self.memory_peak_bytes[index] = peak_memory_bytes(process.pid) or self.memory_peak_bytes[index]

    def ended(self) -> list[int]:
        """Indexes of the shards whose process has ended."""
        return [index for index, process in enumerate(self.processes) if process.poll() is not None]

    def restart(self, indexes: Sequence[int], start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Kills these shards if they still run and starts others in their place, without rows, at new addresses.

        StoreUnavailable with a log's end if one does not serve; then the shard has ended and may be restarted again.
        """
        assert self._launch is not None, "made by start_shards"
        with self._lock:
            self._has_failed = True  # so the logs stay
            for index in indexes:
                _kill_group(self.processes[index])
                self.processes[index].wait()
                _close_pipes(self.processes[index])
            for index in indexes:
                self.processes[index] = self._launch(index)
                self.memory_peak_bytes[index] = None
        for index, address in _wait_for_addresses(self, indexes, start_timeout_s).items():
            self.addresses[index] = address

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
                _close_pipes(process)
            if self._temporary and not self._has_failed and not any(process.returncode for process in self.processes):
                shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> LocalShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


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
    limit_bytes = max(memory_limit_bytes // num_shards, 1 << 20)
    options = ["--num-shards", str(num_shards), "--backend", backend, "--threads", str(threads)]
    options += ["--memory-limit-bytes", str(limit_bytes)]
    if snapshot_root is not None:
        options += ["--snapshot-root", str(snapshot_root)]

    def launch(index: int) -> subprocess.Popen[str]:
        own = ["--shard-index", str(index), "--port", str(ports[index] if ports else 0)]
        if data_dir is not None:
            own += ["--data-dir", str(Path(data_dir) / f"shard-{index}")]
        return _launch([*options, *own], logs[index])

    processes = [launch(index) for index in range(num_shards)]
    shards = LocalShards(processes, logs, folder if log_dir is None else None, launch, limit_bytes)
    try:
        shards.addresses = list(_wait_for_addresses(shards, range(num_shards), start_timeout_s).values())
    except BaseException:
        shards.stop()
        raise
    return shards


def _launch(options: Sequence[str], log_path: Path) -> subprocess.Popen[str]:
    with open(log_path, "a") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "services.shard_process", "--bound-to-stdin", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=_environment(),
            start_new_session=True,  # Ctrl-C at a terminal is the trainer's: it ends the shards in order
        )


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


def _wait_for_addresses(shards: LocalShards, indexes: Sequence[int], timeout_s: float) -> dict[int, str]:
    """Reads the line of each of these shards; a timer ends them, and so the reading, when it takes too long."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        for index in indexes:
            _kill_group(shards.processes[index])

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        addresses = {}
        for index in indexes:
            process = shards.processes[index]
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
            addresses[index] = json.loads(line)["address"]
        return addresses
    finally:
        timer.cancel()
