"""What a process holds in memory, as the kernel counts it: /proc/PID/status, and a thread that keeps the peak."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes. Private maps and the heap are anonymous; mapped segment files are `file` and may be paged out."""

    anon_bytes: int
    shmem_bytes: int
    file_bytes: int

    @property
    def held_bytes(self) -> int:
        """RssAnon + RssShmem: what cannot be dropped without losing it."""
        return self.anon_bytes + self.shmem_bytes

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def read_memory(pid: int | None = None) -> Memory:
    """None: of this process."""
    text = Path(f"/proc/{pid or 'self'}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile")}
    return Memory(kib["RssAnon"] * 1024, kib["RssShmem"] * 1024, kib["RssFile"] * 1024)


class PeakWatch:
    """Samples held_bytes in a thread; `peak_bytes` is the largest value since `restart`. Use as a context manager.

    Thread safety: `_lock` guards `_peak_bytes`, so that a sample begun before a restart never outlives it.
    """

    def __init__(self, interval_s: float = 0.005, pid: int | None = None) -> None:
        """pid: of another process, which must outlive the watch; None: this one."""
        self._interval_s = interval_s
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._lock = threading.Lock()
        self._peak_bytes = 0

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def restart(self) -> int:
        """Forgets the peak; returns held_bytes now."""
        with self._lock:
            self._peak_bytes = read_memory(self._pid).held_bytes
            return self._peak_bytes

    @property
    def peak_bytes(self) -> int:
        self._sample()
        return self._peak_bytes

    def _sample(self) -> None:
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, read_memory(self._pid).held_bytes)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._sample()
