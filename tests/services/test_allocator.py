"""The allocator setting: applied with glibc, explained without it, and effective."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services import allocator


def test_setting_on_glibc() -> None:
    report = allocator.set_allocator()
    if allocator._glibc_version() is None:
        pytest.skip("this C library is not glibc")
    assert report.is_set
    assert "M_MMAP_THRESHOLD=1024 MiB" in report.message
    assert "M_TRIM_THRESHOLD=2048 MiB" in report.message
    assert "M_TOP_PAD=64 MiB" in report.message


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_glibc_version", lambda: None)
    report = allocator.set_allocator()
    assert not report.is_set
    assert "not glibc" in report.message


def test_refused_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if allocator._glibc_version() is None:
        pytest.skip("this C library is not glibc")
    # 4 GiB does not fit mallopt's C int and arrives as 0; an unknown number is refused.
    monkeypatch.setattr(allocator, "SETTINGS", (("M_UNKNOWN", 12345, 1),))
    report = allocator.set_allocator()
    assert report.is_set or "M_UNKNOWN" in report.message


_COUNT_FAULTS = """
import resource, sys
if sys.argv[1] == "set":
    from services.allocator import set_allocator
    set_allocator()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytes(8 << 20)
before = faults()
for _ in range(20):
    bytes(8 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(allocator._glibc_version() is None, reason="this C library is not glibc")
def test_large_buffers_stay_mapped() -> None:
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", _COUNT_FAULTS, mode], capture_output=True, check=True).stdout)
        for mode in ("set", "default")
    }
    # 20 buffers of 8 MiB: 40,960 pages of 4 KiB when each buffer is mapped anew.
    assert faults["set"] < 3000
    assert faults["default"] > faults["set"]
