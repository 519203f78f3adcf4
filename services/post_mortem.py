"""Why a process of a job ended, as far as it can be told, for the record of failures (trainer/failures.py)."""

from __future__ import annotations

from pathlib import Path

from embedding_server.errors import FrostlineError
from services.doctor import usable_memory_bytes
from services.local_shards import LocalShards
from services.process_ends import last_lines, oom_kills, signal_name
from services.ray_group import RayGroup, WorkersFailed, has_died, name_of, what_happened
from trainer.failures import ProcessEnd

#: what faulthandler writes into the log of a process before a signal ends it
_LAST_WORDS = {
    "Fatal Python error: Segmentation fault": "SIGSEGV",
    "Fatal Python error: Bus error": "SIGBUS",
    "Fatal Python error: Aborted": "SIGABRT",
    "Fatal Python error: Illegal instruction": "SIGILL",
    "Fatal Python error: Floating point exception": "SIGFPE",
}
#: Ray tells no exit status
_WITHOUT_LAST_WORDS = "died without a word in its log, as of SIGKILL: kill -9, or the kernel's OOM killer"


class PostMortem:
    """Counts the kernel's kills for want of memory from here on."""

    def __init__(self) -> None:
        self._oom_kills_before = oom_kills()

    def _oom_kills(self) -> int | None:
        now = oom_kills()
        return None if now is None or self._oom_kills_before is None else now - self._oom_kills_before

    def of_shard(self, shards: LocalShards, index: int) -> ProcessEnd:
        """Of a process that ended, or that runs and does not answer."""
        process, log_file = shards.processes[index], shards.logs[index]
        status = process.poll()
        if status is None:
            what = "does not answer"
        else:
            what = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return ProcessEnd(
            who=f"shard {index}",
            what=what,
            pid=process.pid,
            exit_code=status if status is not None and status >= 0 else None,
            signal=signal_name(-status) if status is not None and status < 0 else None,
            memory_limit_bytes=shards.memory_limit_bytes,
            memory_peak_bytes=shards.memory_peak_bytes[index],
            oom_kills=self._oom_kills(),
            log_file=str(log_file),
            log=last_lines(log_file),
        )

    def of_workers(self, ray: RayGroup, error: FrostlineError) -> list[ProcessEnd]:
        """Of those that died or raised, the cause first. Logs of workers on other machines stay there."""
        causes = error.causes if isinstance(error, WorkersFailed) else {}
        return [self._of_worker(ray, rank, cause) for rank, cause in causes.items()]

    def _of_worker(self, ray: RayGroup, rank: int | None, cause: BaseException) -> ProcessEnd:
        member = None if rank is None else ray.members.get(rank)
        if member is None:
            return ProcessEnd(who=name_of(rank), what=what_happened(cause), oom_kills=self._oom_kills())
        log = last_lines(Path(member.log_file)) if member.is_here else []
        what, signal = what_happened(cause), None
        if has_died(cause) and member.is_here:
            signal = next((name for words, name in _LAST_WORDS.items() if any(words in line for line in log)), None)
            what = f"was killed by {signal}" if signal else _WITHOUT_LAST_WORDS
        return ProcessEnd(
            who=name_of(rank),
            what=what,
            pid=member.pid,
            signal=signal,
            memory_limit_bytes=usable_memory_bytes() if member.is_here else None,
            memory_peak_bytes=ray.memory_peak_bytes.get(member.rank),
            oom_kills=self._oom_kills() if member.is_here else None,
            log_file=member.log_file if member.is_here else f"{member.host}:{member.log_file}",
            log=log,
        )
