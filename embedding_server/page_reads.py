"""PageReads: pages of mapped files that are to be read in, and checked, ahead of the rows on them.

Found within the turn of a shard, for its index and its files must stay as they are meanwhile; asked for outside of it,
because the asking waits while the disk's queue is full. What is asked for may be gone by then: that costs a little time
and does nothing.

How much around a row is read. A disk gives nearly as many pieces of 16 KiB a second as pages of 4 (here 50,000 of
either, and 22,500 of 64 KiB), so 16 it is; the whole block of 64 KiB while memory lies idle, so that a tail which the
page cache has lost (after a restart, or where the host takes idle pages away) comes back fast.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from embedding_server.kernels import paging
from embedding_server.segment_reader import BlockCheck

PAGE_BYTES, PIECE_BYTES, BLOCK_BYTES = 4096, 16 << 10, 64 << 10
_IDLE_SHARE = 32  # of all memory: with more than a 32nd free, nothing has to go for what comes


def bytes_around() -> int:
    """Of the file to read around a row ahead of time: PIECE_BYTES or BLOCK_BYTES. 1 us."""
    is_idle = os.sysconf("SC_AVPHYS_PAGES") > os.sysconf("SC_PHYS_PAGES") // _IDLE_SHARE
    return BLOCK_BYTES if is_idle else PIECE_BYTES


def _nothing() -> np.ndarray:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class PageReads:
    """Ranges int64[., 2] (address, bytes): what to read in, and the pages that the rows themselves lie on; and blocks
    that the first read of the rows would have to compare with their CRC-32."""

    reads: np.ndarray = field(default_factory=_nothing)
    pages: np.ndarray = field(default_factory=_nothing)
    checks: Sequence[BlockCheck] = ()

    @staticmethod
    def union(parts: Sequence[PageReads]) -> PageReads:
        """All of one or more, so that each step is one call without Python in between."""
        if len(parts) == 1:
            return parts[0]
        reads, pages = np.concatenate([p.reads for p in parts]), np.concatenate([p.pages for p in parts])
        return PageReads(reads, pages, [check for p in parts for check in p.checks])

    def start(self) -> None:
        """Queues the reads; waits only while the disk's queue is full."""
        paging.will_need(self.reads)

    def finish(self) -> None:
        """Waits until the rows' pages are there and maps them, so that reading the rows meets no page fault."""
        paging.map_in(self.pages)
