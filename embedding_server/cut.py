"""Cut: writes what a shard has of a job's tables at one step, in slices, while training goes on.

    slices   each table in turn (table_cut.py); a table that is complete changes freely again
    the end  files are synced and named, and shard.json comes last, in the executor

A cut with a parent is a delta: of hot rows that have not changed since the parent it has no weights and state. The
parent must be a cut that this shard completed in the same epoch (`Completed`); a full cut begins a new chain.

A failure of whatever kind ends the cut and nothing else: its part of the folder goes, an event and `progress` tell why.

Thread safety: none; the thread that owns the shard calls. Work of the executor touches only files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.changes import Mark
from embedding_server.errors import InvalidInput
from embedding_server.failpoints import failpoint
from embedding_server.segment_file import sync_folder
from embedding_server.snapshot_format import (
    MANIFEST,
    MAX_SHARDS,
    OBJECTS,
    RECORD,
    FileRecord,
    ParentRecord,
    ShardRecord,
    bucket_text,
    cut_folder,
    part_folder,
    write_sealed_json,
)
from embedding_server.store import MAX_SEQUENCE, CutProgress, Identity
from embedding_server.table_cut import TableCut

if TYPE_CHECKING:
    from embedding_server.table import Table


@dataclass(frozen=True, slots=True)
class CutRequest:
    """folder: absolute, ROOT/JOB/cut-<step, 12 digits>-<epoch>; part: the shard's number of num_parts; parent: folder
    of the cut that this one is a delta of."""

    who: Identity
    step: int
    folder: Path
    part: int
    num_parts: int
    parent: Path | None = None

    @property
    def own_folder(self) -> Path:
        """Of the shard's part."""
        return self.folder / part_folder(self.part, self.num_parts)

    def check(self) -> None:
        folder, name = self.folder, cut_folder(self.step, self.who.epoch)
        if not folder.is_absolute() or ".." in folder.parts or "\0" in str(folder) or folder.name != name:
            raise InvalidInput(
                f"folder={str(folder)!r:.1100} must be an absolute path without '..' that ends in {name}: that is"
                f" cut-<step, 12 digits>-<epoch>, by which a delta of it is found"
            )
        for place in (folder, folder.parent / OBJECTS):
            if os.path.islink(place):
                raise InvalidInput(f"{place} is a symbolic link, which no restore follows; name the folder itself")
        if os.path.exists(folder / MANIFEST):  # False where one cannot look: then the cut cannot begin
            raise InvalidInput(
                f"folder={str(folder)!r} has a whole snapshot, which no cut replaces; begin an epoch above that of"
                " every snapshot of the job"
            )
        if not 0 <= self.part < self.num_parts <= MAX_SHARDS:
            raise InvalidInput(f"part={self.part} of num_parts={self.num_parts}: at most {MAX_SHARDS}, counted from 0")


@dataclass(frozen=True, slots=True)
class Completed:
    """A shard's part of a cut that is whole, as a parent of others. marks: by table; parent: that it is a delta of."""

    record: Path  # its shard.json
    entry: ParentRecord
    sequence: int
    marks: Mapping[str, Mark]
    parent: Completed | None


#: Those of a job's epoch from the last full cut on, by folder.
Parents = dict[Path, Completed]


def check_parent(request: CutRequest, parents: Parents) -> None:
    """InvalidInput unless the cut may build on the parent that it names."""
    if request.parent is None:
        return
    found = parents.get(request.parent)
    if found is None or request.parent.parent != request.folder.parent or found.entry.step >= request.step:
        raise InvalidInput(
            f"parent={str(request.parent)!r} is no earlier cut in {request.folder.parent} that this shard has completed"
            f" in epoch {request.who.epoch} since its last full one began; take a full cut, without a parent"
        )
    if found.sequence >= MAX_SEQUENCE:
        raise InvalidInput(
            f"parent={str(request.parent)!r} is delta {found.sequence} of its chain, and a chain has at most"
            f" {MAX_SEQUENCE}; take a full cut, without a parent"
        )
    link: Completed | None = found
    while link is not None:
        if not os.path.exists(link.record):
            raise InvalidInput(
                f"parent={str(request.parent)!r} is of no use: {link.record} is gone; take a full cut, without a parent"
            )
        link = link.parent


class Cut:
    """It begins in the constructor, at a barrier, and ends when is_under_way is False."""

    def __init__(
        self,
        request: CutRequest,
        tables: Mapping[str, Table],
        buckets: np.ndarray,
        executor: Executor | None,
        on_event: Callable[[str], None],
        parents: Parents,
    ) -> None:
        """tables: those of the job, which own `buckets` (bool[NUM_BUCKETS]). parents: what check_parent looked at; the
        cut is added once it is whole."""
        self.request = request
        self._base = parents[request.parent] if request.parent is not None else None
        if self._base is None:
            parents.clear()
        parents.pop(request.folder, None)  # begun once before: what it was is void
        self._parents = parents
        self._buckets, self._executor, self._on_event = buckets, executor, on_event
        self._folder = request.own_folder
        self._tables: list[TableCut] = []
        self._end: Future[FileRecord] | None = None
        self._error: str | None = None
        self._bytes = self._rows = 0
        self.is_under_way = True
        try:
            self._begin(tables)
        except Exception as error:  # training goes on without this cut, whatever ails it
            self.fail(error)

    def _begin(self, tables: Mapping[str, Table]) -> None:
        failpoint("cut.begin")
        objects = self.request.folder.parent / OBJECTS
        objects.mkdir(parents=True, exist_ok=True)
        if self._folder.exists():  # of a process that died
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        marks = self._base.marks if self._base is not None else {}
        for number, (name, table) in enumerate(tables.items()):
            self._tables.append(
                TableCut(
                    table, number, self.request.step, marks.get(name), self._folder, objects, self._executor, self.fail
                )
            )

    def progress(self) -> CutProgress:
        written = sum(table.bytes_written for table in self._tables) + self._bytes
        rows = sum(table.rows_written for table in self._tables) + self._rows
        return CutProgress(self.request.step, not self.is_under_way, self._error, written, rows)

    @property
    def stands(self) -> bool:
        """It is under way or whole; not if it failed, was abandoned, or its part of the folder is gone since."""
        if self._error is not None:
            return False
        return self.is_under_way or os.path.exists(self._folder / RECORD)

    @property
    def is_waiting(self) -> bool:
        """The executor has work of it: slice has more to do afterwards."""
        return self._end is not None or any(table.is_waiting for table in self._tables)

    def slice(self) -> bool:
        """A bounded part of the work. False: nothing can be done now; it is over, or waits for a thread."""
        try:
            return self.is_under_way and (self._slice_tables() or self._finish())
        except Exception as error:  # as in the constructor
            self.fail(error)
            return False

    def slice_tables(self) -> bool:
        """As slice, of the part that keeps tables from an Advance. False when they are free, which may take waiting."""
        try:
            if self._slice_tables():
                return True
            for table in self._tables:
                table.finish()
        except Exception as error:  # as in the constructor
            self.fail(error)
        return False

    def wait(self) -> None:
        """Until the executor is done with what it has of it."""
        if self._end is not None:
            self._end.exception()
        elif self.is_under_way:
            self.slice_tables()

    def _slice_tables(self) -> bool:
        return any(table.slice() for table in self._tables)

    def _finish(self) -> bool:
        if not all(table.is_complete for table in self._tables):
            return False
        if self._end is None:
            self._end = self._start_end()
            return True
        if not self._end.done():
            return False
        record, progress = self._end.result(), self.progress()
        self._note_completed(record)
        self._bytes, self._rows, self._tables = progress.bytes_written + record.size_bytes, progress.rows, []
        self._end, self.is_under_way = None, False
        return False

    def _note_completed(self, record: FileRecord) -> None:
        request = self.request
        entry = ParentRecord(
            step=request.step, epoch=request.who.epoch, size_bytes=record.size_bytes, crc32=record.crc32
        )
        marks = {table.name: table.mark for table in self._tables}
        self._parents[request.folder] = Completed(self._folder / RECORD, entry, self._sequence, marks, self._base)

    @property
    def _sequence(self) -> int:
        return self._base.sequence + 1 if self._base is not None else 0

    def _start_end(self) -> Future[FileRecord]:
        request = self.request
        record = ShardRecord(
            format_version=1,
            part=request.part,
            num_parts=request.num_parts,
            buckets=bucket_text(self._buckets),
            job=request.who.job,
            step=request.step,
            epoch=request.who.epoch,
            tables=[table.record() for table in self._tables],
            parent=self._base.entry if self._base is not None else None,
            sequence=self._sequence,
        )
        if self._executor is not None:
            return self._executor.submit(_publish, self._folder, self._tables, record)
        done: Future[FileRecord] = Future()
        done.set_result(_publish(self._folder, self._tables, record))
        return done

    def fail(self, error: Exception) -> None:
        """Ends it: its files go, training goes on."""
        self._error = f"{type(error).__name__}: {error}"
        self._on_event(
            f"job {self.request.who.job!r}: the cut of step {self.request.step} to {self._folder} failed"
            f" ({self._error}); training goes on, earlier snapshots are as they were. Free or repair the disk"
        )
        self._end_early()

    def abandon(self) -> None:
        """As fail, for somebody wants it no more; nothing happens if it is over."""
        if self.is_under_way:
            self._error = "it was abandoned"
            self._end_early()

    def _end_early(self) -> None:
        if self._end is not None and not self._end.cancel():
            self._end.exception()
        for table in self._tables:
            table.abandon()
        self._end, self._tables, self.is_under_way = None, [], False
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other shards have parts there
            self.request.folder.rmdir()


def _publish(folder: Path, tables: list[TableCut], record: ShardRecord) -> FileRecord:
    """Brings a shard's part to disk, shard.json, which is returned, last."""
    failpoint("cut.before_publish")
    for table in tables:
        table.publish()
    failpoint("cut.before_folders")
    for place in (folder.parent.parent / OBJECTS, folder, folder.parent, folder.parent.parent):
        sync_folder(place)
    failpoint("cut.before_record")
    written = write_sealed_json(folder / RECORD, record.model_dump(mode="json"))
    failpoint("cut.after_record")
    return written
