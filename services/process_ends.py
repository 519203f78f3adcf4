"""What is known of a process that ended: its signal by name, the end of its log, memory, and what the kernel killed.

All of it is evidence for people: where /proc or a log cannot be read, nothing is known, and that is no error.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

LOG_LINES = 50
_LOG_BYTES = 64 << 10  # of a log's end, in which its last lines are looked for
#: counters of processes killed for want of memory: of this cgroup, version 2 and 1, or of the whole machine
_OOM_COUNTERS = (
    (Path("/sys/fs/cgroup/memory.events"), "oom_kill"),
    (Path("/sys/fs/cgroup/memory/memory.oom_control"), "oom_kill"),
    (Path("/proc/vmstat"), "oom_kill"),
)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def status_text(status: int) -> str:
    """A status as subprocess gives it: negative, if a signal ended the process."""
    return f"status {status} ({signal_name(-status)})" if status < 0 else f"status {status}"


def peak_memory_bytes(pid: int) -> int | None:
    """Most resident memory so far of a process that runs; None if it cannot be told."""
    with suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), flags=re.M)
        if match:
            return int(match[1]) << 10
    return None


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory so far: a count to compare with an earlier one."""
    for path, name in _OOM_COUNTERS:
        with suppress(OSError):
            match = re.search(rf"^{name}\s+(\d+)$", path.read_text(), flags=re.M)
            if match:
                return int(match[1])
    return None


def last_lines(path: Path, num_lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []
