"""A Prefetch in slices: asking a disk for pages waits while its queue is full, and a shard must not wait with it.

20,000 cold rows of one table, 18,000 pages of a 234 MiB file, keep the asking thread for 220 ms. In slices other calls
come between: a Pull that thaws such rows takes 270 ms, and 96 after a hint that came 300 ms before it (2 busy cores).

    hint = Hint(ids)
    while not hint.advance(shard): ...        let others in

First every page is asked for, then the blocks under them are checked against their CRC-32, as a first read would
have to: 15 us a block of 64 KiB, most of it for touching its pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np

from embedding_server.shard import Shard

#: rows between looks at the clock: three reads each, and a disk takes some 100,000 a second
ASKED_ROWS = 128
#: likewise, of pages that have arrived
CHECKED_ROWS = 1024
SLICE_S = 0.002


class Hint:
    """One Prefetch of the row_ids int64[n] of each table, which must stay as they are until it is over."""

    def __init__(self, ids: Mapping[str, np.ndarray]) -> None:
        self._to_ask = pieces_of(ids, ASKED_ROWS)
        self._to_check = pieces_of(ids, CHECKED_ROWS)

    def advance(self, shard: Shard) -> bool:
        """Goes on for about SLICE_S; whether all is done. Raises what Shard.prefetch raises."""
        end_s = time.monotonic() + SLICE_S
        for call, pieces in ((shard.prefetch, self._to_ask), (shard.check_ahead, self._to_check)):
            for piece in pieces:
                call(piece)
                if time.monotonic() >= end_s:
                    return False
        return True


def pieces_of(ids: Mapping[str, np.ndarray], most_rows: int) -> Iterator[dict[str, np.ndarray]]:
    """The row_ids of each table, in parts of at most most_rows over all tables; an empty table in one too."""
    piece: dict[str, np.ndarray] = {}
    room = most_rows
    for name, row_ids in ids.items():
        start = 0
        while True:
            piece[name] = row_ids[start : start + room]
            room -= piece[name].shape[0]
            start += piece[name].shape[0]
            if not room:
                yield piece
                piece, room = {}, most_rows
            if start == row_ids.shape[0]:
                break
    if piece:
        yield piece
