"""A Prefetch in slices: asking a disk for pages waits while its queue is full, and a shard must not wait with it.

20,000 cold rows of one table, 18,000 pages of a 234 MiB file, keep the asking thread for 220 ms. In slices other calls
come between: a Pull that thaws such rows takes 270 ms, and 96 after a hint that came 300 ms before it (2 busy cores).

    pieces = pieces_of(ids)
    while not prefetch_slice(shard, pieces): ...        let others in
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np

from embedding_server.shard import Shard

#: rows between looks at the clock: three reads each, and a disk takes some 100,000 a second
PIECE_ROWS = 128
SLICE_S = 0.002


def pieces_of(ids: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The row_ids int64[n] of each table, in parts of at most PIECE_ROWS over all tables; an empty table in one too."""
    piece: dict[str, np.ndarray] = {}
    room = PIECE_ROWS
    for name, row_ids in ids.items():
        start = 0
        while True:
            piece[name] = row_ids[start : start + room]
            room -= piece[name].shape[0]
            start += piece[name].shape[0]
            if not room:
                yield piece
                piece, room = {}, PIECE_ROWS
            if start == row_ids.shape[0]:
                break
    if piece:
        yield piece


def prefetch_slice(shard: Shard, pieces: Iterator[dict[str, np.ndarray]]) -> bool:
    """Prefetches some of the pieces, for about SLICE_S; whether that was all. Raises what Shard.prefetch raises."""
    end_s = time.monotonic() + SLICE_S
    for piece in pieces:
        shard.prefetch(piece)
        if time.monotonic() >= end_s:
            return False
    return True
