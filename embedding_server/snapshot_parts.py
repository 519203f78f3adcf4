"""The parts of a cut, one a shard, each with the parents that its rows may lie in. Every reader begins here.

    parts = read_parts(folder)      reads and checks JSON alone; no column file and no segment is looked at

A parent is found by its step and epoch, beside the cut, and is the one only if its shard.json is, byte for byte, what
the delta says. So a chain cannot have a circle, and nothing of another training gets into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from embedding_server.errors import InvalidInput
from embedding_server.snapshot_file import corrupt
from embedding_server.snapshot_format import (
    MAX_SHARDS,
    OBJECTS,
    RECORD,
    ParentRecord,
    ShardRecord,
    TableRecord,
    cut_folder,
    part_folder,
    read_bounded,
    read_shard_record,
)
from embedding_server.store import NUM_BUCKETS

_PART = re.compile(r"shard-(\d{1,4})-of-(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard wrote."""

    folder: Path
    record: ShardRecord
    owned: np.ndarray  # bool[NUM_BUCKETS]
    parent: Part | None = None  # of a delta

    @property
    def objects(self) -> Path:
        """Where its segment files lie."""
        return self.folder.parent.parent / OBJECTS

    @property
    def chain(self) -> Iterator[Part]:
        """It, its parent, and so on to the full cut."""
        part: Part | None = self
        while part is not None:
            yield part
            part = part.parent

    def number_of(self, table: str) -> int | None:
        return next((k for k, record in enumerate(self.record.tables) if record.spec.name == table), None)

    def table(self, name: str) -> TableRecord | None:
        number = self.number_of(name)
        return None if number is None else self.record.tables[number]


def tables_in(records: Sequence[ShardRecord]) -> list[str]:
    """Names of the tables of a cut, by what its shards say. A table that one shard lacks and no shard has a row of is
    none: somebody created it on some shards, and a failure kept him from the others."""
    found: dict[str, list[TableRecord]] = {}
    for record in records:
        for table in record.tables:
            found.setdefault(table.spec.name, []).append(table)
    return [name for name, tables in found.items() if len(tables) == len(records) or any(map(_has_rows, tables))]


def check_none_is_partly_dropped(cut: Path, records: Sequence[ShardRecord]) -> None:
    """InvalidInput if one shard lacks a table that others have rows of: no shard could be restored from the cut."""
    for name in tables_in(records):
        lacking = [record.part for record in records if all(table.spec.name != name for table in record.tables)]
        if lacking:
            raise InvalidInput(
                f"{cut}: table {name!r} has rows, and is missing on shards {lacking}: a drop has failed on the others;"
                " drop it again, then take another cut"
            )


def _has_rows(table: TableRecord) -> bool:
    return bool(table.rows_hot or table.rows_initial or table.rows_waiting or table.segments)


def read_parts(folder: Path) -> list[Part]:
    """All parts of a cut, in order. InvalidInput or SegmentCorrupt unless they are whole and of one cut; OSError."""
    if "\0" in str(folder):
        raise InvalidInput(f"restore from {str(folder)!r:.300}: no path has a NUL; name the folder of one cut")
    if folder.is_symlink():
        raise corrupt(folder, "is a symbolic link")
    matches = (_PART.fullmatch(path.name) for path in folder.iterdir())
    found = sorted({int(match[2]) for match in matches if match is not None})
    if len(found) != 1 or not 1 <= found[0] <= MAX_SHARDS:
        raise InvalidInput(f"restore from {folder}: it has parts of {found or 'no'} shards; name the folder of one cut")
    parts: list[Part] = []
    owned_by_all = np.zeros(NUM_BUCKETS, np.int64)
    for k in range(found[0]):
        parts.append(read_part(folder, k, found[0]))
        first, record = parts[0].record, parts[-1].record
        if (record.job, record.step, record.epoch) != (first.job, first.step, first.epoch):
            raise corrupt(parts[-1].folder, f"it is of another cut than {parts[0].folder.name}")
        owned_by_all += parts[-1].owned
    if (owned_by_all != 1).any():
        bucket = int(np.flatnonzero(owned_by_all != 1)[0])
        raise corrupt(folder, f"bucket {bucket} is owned by {int(owned_by_all[bucket])} of its parts")
    return parts


def read_part(cut: Path, number: int, num_parts: int) -> Part:
    """Part `number` of num_parts of a cut, with its parents. SegmentCorrupt names the file; OSError."""
    chain = [_read_own(cut / part_folder(number, num_parts), number, num_parts)]
    while (entry := chain[-1].record.parent) is not None:
        chain.append(_read_parent(chain[-1], entry))
    part = chain.pop()
    while chain:
        child = chain.pop()
        part = Part(child.folder, child.record, child.owned, part)
    return part


def _read_own(folder: Path, number: int, num_parts: int) -> Part:
    record = read_shard_record(folder)
    if (record.part, record.num_parts) != (number, num_parts):
        raise corrupt(folder, f"its shard.json is of part {record.part} of {record.num_parts}")
    names = [table.spec.name for table in record.tables]
    if len(set(names)) != len(names):
        raise corrupt(folder, "its shard.json names a table twice")
    return Part(folder, record, record.owned_buckets())


def _read_parent(child: Part, entry: ParentRecord) -> Part:
    """The parent that a part names; `entry` is of a step before the child's (snapshot_format.check_lineage)."""
    folder = child.folder.parent.parent / cut_folder(entry.step, entry.epoch) / child.folder.name
    path = folder / RECORD
    needed = f"{child.folder} is a delta of it"
    if folder.parent.is_symlink():
        raise corrupt(folder.parent, f"is a symbolic link, and {needed}")
    try:
        data = read_bounded(path)
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror}), and {needed}") from None
    if (len(data), crc32(data)) != (entry.size_bytes, entry.crc32):
        raise corrupt(path, f"is not the one that it was when {child.folder} was written as a delta of it")
    parent = _read_own(folder, child.record.part, child.record.num_parts)
    record, of = parent.record, child.record
    said = (record.job, record.step, record.epoch, record.sequence, record.buckets)
    if said != (of.job, entry.step, entry.epoch, of.sequence - 1, of.buckets):
        raise corrupt(path, f"job, step, epoch, sequence or buckets are not those of a parent of {child.folder}")
    for table in of.tables:
        known = parent.table(table.spec.name)
        if not table.is_whole and (known is None or known.spec != table.spec):
            raise corrupt(path, f"has no table {table.spec.name!r} of the spec in {child.folder}, which needs its rows")
    return parent
