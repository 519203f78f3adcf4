"""What a job lost and how it went on: <run>/<arm>/failures.json, oldest first, for people and `frostline inspect`.

    failures = FailureLog(folder, complain)
    failures.add(Failure(...))
    failures.update_last(epoch=4, away_s=9.5)       it trains again

It outlives the run: one that is resumed adds to it. A file that cannot be written is complained of, and nothing else.
Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from embedding_server.errors import InvalidInput
from trainer.report import write_json

FAILURES_FILE = "failures.json"
MAX_FAILURES = 1000  # in the file; of more, the oldest are forgotten
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process of the job that ended, or gave up. None is what is not known; of a worker Ray does not tell how it
    ended.

    memory_limit_bytes: a shard's own, a worker's machine. memory_peak_bytes: most that was resident, as last seen.
    oom_kills: what the kernel has killed for want of memory since the arm began, on this machine or in its cgroup.
    """

    who: str  # "shard 1", "worker 0"
    what: str  # "was killed by SIGKILL"
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    memory_limit_bytes: int | None = None
    memory_peak_bytes: int | None = None
    oom_kills: int | None = None
    log_file: str | None = None
    log: list[str] = field(default_factory=list)  # its last lines


@dataclass(frozen=True, slots=True)
class Failure:
    """restart None: the job failed. Else it went back to `cut`, behind `back_to_step`; without a cut, to its beginning.

    epoch and away_s are filled in when it trains again: seconds from when the failure was seen to the first step after.
    """

    time: str  # ISO 8601, UTC
    step: int  # that the arm had reached, as last reported
    reason: str
    processes: list[ProcessEnd]
    restart: int | None = None  # counts from 1
    cut: str | None = None
    back_to_step: int = 0
    epoch: int | None = None
    away_s: float | None = None


class FailureLog:
    """Thread safety: one thread."""

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self._path = folder / FAILURES_FILE
        self._complain = complain
        self._records: list[dict[str, Any]] = []
        try:
            self._records = read_failures(folder)
        except InvalidInput as error:
            complain(f"{error}; it is replaced")

    def add(self, failure: Failure) -> None:
        self._records.append(asdict(failure))
        del self._records[:-MAX_FAILURES]
        self._write()

    def update_last(self, **fields: Any) -> None:
        """What became of the last failure, by fields of Failure."""
        self._records[-1] = asdict(replace(_failure_of(self._records[-1]), **fields))
        self._write()

    def _write(self) -> None:
        try:
            write_json(self._path, self._records)
        except OSError as error:
            self._complain(f"{self._path}: cannot be written ({error.strerror}); free space there")


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Records of an arm, fields of Failure each; none without a file. InvalidInput if it holds something else."""
    path = folder / FAILURES_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidInput(f"{path}: more than {_MAX_BYTES} bytes, which no record of failures has")
        records = json.loads(path.read_text(encoding="utf-8"))
        return [asdict(_failure_of(record)) for record in records]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path}: is no record of failures of this version ({error})") from None


def _failure_of(record: Mapping[str, Any]) -> Failure:
    """TypeError if it has other fields."""
    processes = [ProcessEnd(**process) for process in record["processes"]]
    return Failure(**{**record, "processes": processes})


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line each, for people."""
    return [f"failure at {record['time']}: {_sentence(record)}" for record in failures]


def _sentence(record: Mapping[str, Any]) -> str:
    what = f"step {record['step']}: {record['reason']}"
    if record["restart"] is None:
        return f"{what}; the job failed"
    where = back_text(record["cut"], record["back_to_step"])
    again = f", epoch {record['epoch']}, training again after {record['away_s']:.1f} s" if record["epoch"] else ""
    return f"{what}; restart {record['restart']} went back to {where}{again}"


def back_text(cut: str | None, step: int) -> str:
    return f"step {step} ({Path(cut).name})" if cut else "its beginning, for there was no snapshot yet"
