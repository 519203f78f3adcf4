"""Checks every byte of a shard's part of a snapshot, and that what it says agrees: `frostline ckpt verify`.

Findings are collected, not raised: one damaged file says nothing of the others. What is checked of a table:

    column files   header, size, CRC-32 of each 64 KiB (snapshot_file.py), of a delta also the hot files of its parents
    segments       that they are there, header, layout, digest, CRC-32 of each 64 KiB, each row_id in its bucket
    rows           hot ones in their bucket, with a last step up to the cut's; all of them, and the IDs below min_count,
                   in buckets that the shard owns; none twice; numbers as shard.json has them; each hot row of a delta
                   is written there or in a parent

Memory: some 64 MiB, whatever the table's size. Thread safety: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from embedding_server.errors import InvalidInput, SegmentCorrupt
from embedding_server.kernels.hashing import buckets_of
from embedding_server.snapshot_file import ColumnReader, corrupt
from embedding_server.snapshot_hot import HotRowsFile
from embedding_server.snapshot_parts import Part
from embedding_server.snapshot_rows import PartTable, check_object, open_frozen, open_object
from embedding_server.store import NUM_BUCKETS

_ROWS_AT_ONCE = 1 << 16
_IDS_AT_ONCE = 1 << 22  # that are looked through for duplicates


@dataclass
class Findings:
    """Messages, each with the file's name; figures of what was read."""

    messages: list[str] = field(default_factory=list)
    bytes_read: int = 0
    rows_hot: int = 0
    rows_frozen: int = 0

    def gather(self, check: Callable[[], object]) -> bool:
        """Whether a check passed; what it raises becomes a message."""
        try:
            check()
        except (SegmentCorrupt, InvalidInput, OSError) as error:
            self.messages.append(str(error))
            return False
        return True


def check_part(part: Part, findings: Findings) -> None:
    for number in range(len(part.record.tables)):
        _TableCheck(part, number, findings).run()


class _TableCheck:
    def __init__(self, part: Part, number: int, findings: Findings) -> None:
        self._part, self._number, self._findings = part, number, findings
        self._record = part.record.tables[number]

    def run(self) -> None:
        findings = self._findings
        is_sound = [findings.gather(self._check_hot_bytes), findings.gather(self._check_frozen_bytes)]
        for k in range(len(self._record.segments)):
            is_sound.append(findings.gather(partial(self._check_segment, k)))
        if all(is_sound):
            findings.gather(self._check_rows)

    def _check_hot_bytes(self) -> None:
        self._read_all(HotRowsFile(self._part, self._number))

    def _check_frozen_bytes(self) -> None:
        self._read_all(open_frozen(self._part, self._number))

    def _read_all(self, file: ColumnReader | HotRowsFile) -> None:
        with closing(file):
            for size in file.verify():
                self._findings.bytes_read += size

    def _check_segment(self, k: int) -> None:
        segment = self._record.segments[k]
        self._findings.bytes_read += check_object(self._part.objects, segment, self._record.spec)

    def _check_rows(self) -> None:
        table = PartTable(self._part, self._number)
        with closing(table):
            offsets = table.hot.offsets()
            for _ in table.hot.chunks(_ROWS_AT_ONCE, with_weights=False):
                pass  # it checks what it reads
            counts = table.counts()
            self._findings.rows_hot += counts.hot
            self._findings.rows_frozen += counts.frozen
            num_ids = counts.hot + counts.frozen + self._record.rows_waiting
            passes = max(1, min(NUM_BUCKETS, -(-num_ids // _IDS_AT_ONCE)))
            edges = np.linspace(0, NUM_BUCKETS, passes + 1).astype(np.int64)
            for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                self._check_ids(table, offsets, first, last)

    def _check_ids(self, table: PartTable, offsets: np.ndarray, first: int, last: int) -> None:
        """Those in buckets [first, last): none twice, none in a bucket that the part does not own."""
        row_ids = np.concatenate([np.empty(0, np.int64), *self._ids(table, offsets, first, last)])
        where = f"here, in {table.frozen.path.name} or in a segment"
        foreign = row_ids[~self._part.owned[buckets_of(row_ids, NUM_BUCKETS)]]
        if foreign.shape[0]:
            raise corrupt(
                table.hot.path,
                f"row_id {foreign[0]}, {where}, is in a bucket that {self._part.folder.name} does not own",
            )
        row_ids.sort()
        twice = row_ids[1:][row_ids[1:] == row_ids[:-1]]
        if twice.shape[0]:
            raise corrupt(table.hot.path, f"row_id {twice[0]} occurs twice, {where}")

    def _ids(self, table: PartTable, offsets: np.ndarray, first: int, last: int) -> Iterator[np.ndarray]:
        yield table.hot.own.read("row_ids", int(offsets[first]), int(offsets[last]))
        for k, segment in enumerate(self._record.segments):
            with closing(open_object(self._part.objects, segment, self._record.spec)) as mapped:
                for start, live in table.live(k):
                    row_ids = mapped.arrays.row_ids[start + live]
                    yield _within(row_ids, first, last)
        for column in ("initial_row_ids", "waiting_row_ids"):
            for start in range(0, table.frozen.num_rows(column), _ROWS_AT_ONCE):
                stop = min(table.frozen.num_rows(column), start + _ROWS_AT_ONCE)
                yield _within(table.frozen.read(column, start, stop), first, last)


def _within(row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
    buckets = buckets_of(row_ids, NUM_BUCKETS)
    return row_ids[(buckets >= first) & (buckets < last)]
