"""A Prefetch in slices: which pages to read is found within the turns of a shard, and asked for outside of them.

    Hint(ids).run(in_turn)      in_turn(advance) calls advance(shard) while nobody else may; others come between

Asking a disk for pages waits while its queue is full: 9 us a page that is not there, 0.3 one that is. When that was
done within the turns, a hint of 46,000 row_ids a step of 60 ms seldom came to its end before the Pull that it was for,
and the Pull waited for the disk itself: 25 of its 41 ms (200 million rows x 128 on 2 cores).

Blocks under the rows that nobody has read yet are compared with their CRC-32, as a first read would have to: 10 us a
block of 64 KiB, most of it for fetching it from memory, without the GIL and outside of the turns too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from embedding_server.page_reads import PageReads
from embedding_server.shard import Shard

#: rows between looks at the clock: 0.2 us each to find
FOUND_ROWS = 8192
SLICE_S = 0.002


class Hint:
    """One Prefetch of the row_ids int64[n] of each table, which must stay as they are until it is over."""

    def __init__(self, ids: Mapping[str, np.ndarray]) -> None:
        self._to_find = pieces_of(ids, FOUND_ROWS)
        self._found: list[PageReads] = []
        self.is_checking = False  # the pages of what was found are there
        self._has_time = True

    def run(self, in_turn: Callable[[Callable[[Shard], bool]], bool]) -> None:
        """The whole of it; in_turn returns what its argument returned, or True to end it. Raises what that raises."""
        while not in_turn(self.advance):
            self.read()
        self.read()

    def advance(self, shard: Shard, slice_s: float = SLICE_S) -> bool:
        """Within a turn: goes on for about slice_s; whether it needs no further one. Raises as Shard.find_pages."""
        end_s = time.monotonic() + slice_s
        for piece in self._to_find:
            self._found.append(shard.find_pages(piece))
            if time.monotonic() >= end_s:
                return False
        return True

    def read(self) -> None:
        """Outside of a turn: has what the last turn found read in, all together, waits for it, and checks it."""
        if self._found:
            found, self._found = PageReads.union(self._found), []
            found.start()
            found.finish()
            self.is_checking = True
            for check in found.checks:
                check.run(lambda: self._has_time)
            self.is_checking = False

    def hurry(self) -> None:
        """From any thread: checks nothing more; the reads of the rows will."""
        self._has_time = False


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
