"""SegmentWriter: takes sealed segments of one table to disk, one after the other, and tries again when the disk fails.

A write that fails (disk full, EIO, read-only) loses nothing: the buffer goes on serving reads, one event says so, and
the same segment is tried again after FIRST_RETRY_S, then twice that, up to LAST_RETRY_S.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.segment_builder import SegmentBuilder
from embedding_server.segment_file import SegmentArrays, SegmentFormat, write_segment
from embedding_server.segment_reader import MappedSegment, open_segment

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0


def segment_prefix(table: str) -> str:
    """What names of the table's files begin with. Any text may name a table; its digest makes a file name of it."""
    return f"segment-{hashlib.blake2b(table.encode(), digest_size=6).hexdigest()}"


@dataclass(slots=True)
class _Write:
    """A segment file being written."""

    builder: SegmentBuilder
    done: Future[MappedSegment]


class SegmentWriter:
    """The queue of sealed segments of one table and shard.

    Thread safety: one thread at a time calls the methods. With an executor the file itself is written in its thread,
    which touches nothing but the sealed buffer and the file.
    """

    def __init__(
        self,
        directory: Path,
        table: str,
        *,
        executor: Executor | None,
        on_event: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Several tables may share `directory`. Files that an earlier process left there for this table are deleted:
        nothing points at their rows once that process is gone."""
        self.directory = directory
        self._table = table
        self._executor = executor
        self._on_event = on_event
        self._clock = clock
        self._prefix = segment_prefix(table)
        self._next_file = 0
        self._waiting: deque[SegmentBuilder] = deque()
        self._write: _Write | None = None
        self._retry_s = 0.0  # 0: the last write went well
        self._retry_at = 0.0
        self.remove_leftovers()

    @property
    def is_failing(self) -> bool:
        """The last write failed."""
        return self._retry_s > 0

    @property
    def has_pending(self) -> bool:
        """A segment waits to be written, or is being written."""
        return bool(self._waiting) or self._write is not None

    @property
    def can_step(self) -> bool:
        """`step` has something to do now: it neither waits for the executor nor for the next try."""
        if self._write is not None:
            return self._write.done.done()
        return bool(self._waiting) and self._clock() >= self._retry_at

    def wait(self) -> bool:
        """Waits until the write under way is done. False if there is none."""
        if self._write is None:
            return False
        self._write.done.exception()
        return True

    @property
    def is_executor_at_work(self) -> bool:
        return self._write is not None and not self._write.done.done()

    @property
    def waiting(self) -> Collection[SegmentBuilder]:
        """Sealed segments whose writing has not begun."""
        return self._waiting

    @property
    def writing(self) -> SegmentBuilder | None:
        return None if self._write is None else self._write.builder

    def enqueue(self, builder: SegmentBuilder) -> None:
        """The builder has at least one row and gets no more."""
        self._waiting.append(builder)

    def discard(self, builder: SegmentBuilder) -> None:
        """Forgets a waiting segment. Not the one being written."""
        if builder in self._waiting:
            self._waiting.remove(builder)
        if not self.has_pending:  # what failed to be written is needed no more, and nothing would clear the failure
            self._retry_s = self._retry_at = 0.0

    def step(self, *, here: bool = False) -> tuple[SegmentBuilder, MappedSegment] | None:
        """Starts a write if none is under way, and returns a finished one with its mapped file, if any.

        here: for a caller who waits, in its own thread, unless the executor has begun: other tables use it too.
        """
        if here and self._write is not None and self._write.done.cancel():
            self._waiting.appendleft(self._write.builder)
            self._write = None
        if self._write is None:
            if not self.can_step:
                return None
            self._write = self._start(self._waiting.popleft(), None if here else self._executor)
        write = self._write
        if not write.done.done():
            return None
        self._write = None
        try:
            mapped = write.done.result()
        except (OSError, SegmentCorrupt) as error:
            self._note_failure(write.builder, error)
            return None
        if self.is_failing:
            self._on_event(f"table {self._table!r}: segments are written again under {self.directory}")
        self._retry_s = self._retry_at = 0.0
        return write.builder, mapped

    def _start(self, builder: SegmentBuilder, executor: Executor | None) -> _Write:
        arguments = (self.new_path(), builder.format, builder.frozen_step, builder.arrays())
        if executor is not None:
            return _Write(builder, executor.submit(_write_and_map, *arguments))
        done: Future[MappedSegment] = Future()
        try:
            done.set_result(_write_and_map(*arguments))
        except (OSError, SegmentCorrupt) as error:
            done.set_exception(error)
        return _Write(builder, done)

    def _note_failure(self, builder: SegmentBuilder, error: Exception) -> None:
        self._waiting.appendleft(builder)
        if not self.is_failing:
            self._on_event(
                f"table {self._table!r}: cannot write a segment of {builder.num_rows} rows under "
                f"{self.directory}: {error}; they stay in memory and the write is tried again; free or repair the disk"
            )
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s) if self.is_failing else FIRST_RETRY_S
        self._retry_at = self._clock() + self._retry_s

    def new_path(self) -> Path:
        """A name that no file of the table has had in this process."""
        path = self.directory / f"{self._prefix}-{self._next_file:08d}.safetensors"
        self._next_file += 1
        return path

    def unlink(self, path: Path) -> None:
        """Deletes a file that nothing reads any more; an event if that fails."""
        try:
            failpoint("segment.before_unlink")
            path.unlink(missing_ok=True)
        except OSError as error:
            self._on_event(f"table {self._table!r}: cannot delete {path}: {error}; nothing uses it: delete it")

    def remove_leftovers(self) -> None:
        """Deletes every file of the table; none is in use."""
        if not self.directory.is_dir():
            return
        name = re.compile(re.escape(self._prefix) + r"-\d{8,}\.safetensors(\.partial)?")
        for path in self.directory.iterdir():
            if name.fullmatch(path.name):
                self.unlink(path)

    def close(self) -> None:
        """Waits for the write under way. Waiting segments are not written."""
        if self._write is not None and not self._write.done.cancel() and self._write.done.exception() is None:
            self._write.done.result().close()
        self._write = None
        self._waiting.clear()


def _write_and_map(path: Path, fmt: SegmentFormat, frozen_step: int, arrays: SegmentArrays) -> MappedSegment:
    """Runs in the executor's thread: the buffer is sealed, so nobody writes to `arrays`."""
    write_segment(path, fmt, frozen_step, arrays)
    return open_segment(path, verify=False)
