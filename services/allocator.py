"""Keeps large message buffers in the process instead of returning them to the kernel after every message.

glibc serves a request above M_MMAP_THRESHOLD with mmap and gives it back with munmap, so each message of some MB pays
one page fault for every 4 KiB of it: 9.9 ms instead of 2.6 for 10,000 rows x 64 float32 on a 2-core AMD EPYC. The
setting lets such buffers come from the heap and stay there. Call `set_allocator()` first thing in every process that
moves rows: memory that was mapped before keeps its old treatment. Other C libraries (musl, macOS) have no such knob.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

MIB = 1 << 20
# Numbers of malloc.h; part of glibc's ABI.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

#: name, number, value in bytes
SETTINGS: tuple[tuple[str, int, int], ...] = (
    ("M_MMAP_THRESHOLD", _M_MMAP_THRESHOLD, 1024 * MIB),
    # mallopt takes a C int: 2 GiB itself does not fit.
    ("M_TRIM_THRESHOLD", _M_TRIM_THRESHOLD, 2048 * MIB - 1),
    ("M_TOP_PAD", _M_TOP_PAD, 64 * MIB),
)


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """What `set_allocator` did."""

    is_set: bool
    library: str  # "glibc 2.36", or what was found instead
    message: str  # one line for logs and `frostline doctor`


def _glibc_version() -> str | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
    return text if text and text.startswith("glibc") else None


def set_allocator() -> AllocatorReport:
    """Applies SETTINGS to this process; repeating it is harmless. Never raises: without glibc it reports why not."""
    library = _glibc_version()
    if library is None:
        return AllocatorReport(
            False, "not glibc", "allocator: not glibc, settings left alone; large messages are slower"
        )
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    refused = [name for name, number, value in SETTINGS if mallopt(number, value) != 1]
    if refused:
        return AllocatorReport(
            False, library, f"allocator: {library} refused {', '.join(refused)}; large messages are slower"
        )
    values = ", ".join(f"{name}={value / MIB:.0f} MiB" for name, _, value in SETTINGS)
    return AllocatorReport(True, library, f"allocator: {library}, {values}")
