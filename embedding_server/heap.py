"""Gives the heap that malloc keeps free back to the kernel.

A re-selection reads and quantises some 65,000 rows at a time, and growing buckets leave smaller copies behind: what
they free stays in malloc's hands, 50 to 100 MB in a shard of 10 million rows, unless it lies at the top of the heap.
"""

from __future__ import annotations

import ctypes


def release_free_heap() -> None:
    """malloc_trim(0): milliseconds. glibc only; with another C library nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
