"""Evidence of how processes ended."""

from __future__ import annotations

import os
from pathlib import Path

from services import process_ends
from services.process_ends import last_lines, oom_kills, peak_memory_bytes, signal_name, status_text


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(200) == "signal 200"
    assert status_text(-11) == "status -11 (SIGSEGV)"
    assert status_text(3) == "status 3"


def test_memory_of_a_process_that_runs_and_of_none() -> None:
    peak = peak_memory_bytes(os.getpid())
    assert peak is not None and 1 << 20 < peak < 1 << 40
    assert peak_memory_bytes(2**22 + 1) is None


def test_kills_for_want_of_memory_are_counted(tmp_path: Path, monkeypatch) -> None:
    found = oom_kills()
    assert found is None or found >= 0
    counters = tmp_path / "memory.events"
    counters.write_text("low 0\nhigh 3\nmax 17\noom 2\noom_kill 1\noom_group_kill 0\n")
    monkeypatch.setattr(process_ends, "_OOM_COUNTERS", ((tmp_path / "none", "oom_kill"), (counters, "oom_kill")))
    assert oom_kills() == 1
    counters.unlink()
    assert oom_kills() is None


def test_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == []
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(100_000)))
    assert last_lines(log) == [f"line {number} \ufffd" for number in range(99_950, 100_000)]
    log.write_text("one\ntwo")
    assert last_lines(log) == ["one", "two"]
