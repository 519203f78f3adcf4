"""DeltaChain: whether the next cut of a run is a delta, and of which cut.

It is a delta of the last complete cut of this run in this epoch, unless
    - there is none, or it is gone from disk;
    - max_deltas deltas lie on the full cut already;
    - with one more, of the size of the last, they would be as large as the full cut: a restore reads all of them, so it
      reads at most about twice as much.
A cut that failed is never a parent. After a full one that failed there is none: the shards have begun to count anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedding_server.snapshot_format import ParentRecord
from trainer.snapshots import is_complete


@dataclass(frozen=True, slots=True)
class ParentCut:
    cut: Path
    entry: ParentRecord
    sequence: int


class DeltaChain:
    def __init__(self, max_deltas: int) -> None:
        self._max_deltas = max_deltas
        self._last: ParentCut | None = None
        self._bytes_full = self._bytes_deltas = self._bytes_last_delta = 0

    def parent(self) -> ParentCut | None:
        """Of the next cut; None: a full one is due."""
        last = self._last
        if last is None or last.sequence >= self._max_deltas:
            return None
        if self._bytes_deltas + self._bytes_last_delta >= self._bytes_full:
            return None
        return last if is_complete(last.cut) else None

    def begin_full(self) -> None:
        """A full cut begins, so no earlier one is a parent any more."""
        self._last = None

    def add(self, cut: ParentCut, bytes_written: int) -> None:
        """A cut is complete; bytes_written: by the shards."""
        if cut.sequence:
            self._bytes_deltas += bytes_written
            self._bytes_last_delta = bytes_written
        else:
            self._bytes_full, self._bytes_deltas, self._bytes_last_delta = bytes_written, 0, 0
        self._last = cut
