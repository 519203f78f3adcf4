"""Rows that are to be gone from snapshots, offline: whether files of a part hold them, and segments without them.

    holds_any(part, erased)           any file of the part or of what it is a delta of
    SegmentsWithout(erased)           for snapshot_rewrite.rewrite_part, as `replace`

Memory: a chunk, and of a segment the pages that change. Thread safety: none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from embedding_server.segment_erasure import ErasedIds, places_of, write_without
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_folder
from embedding_server.snapshot_format import SegmentRecord, TableRecord, segment_object
from embedding_server.snapshot_objects import digest_of
from embedding_server.snapshot_parts import Part
from embedding_server.snapshot_rows import PartTable, open_object

_ROWS_AT_ONCE = 1 << 16
#: row_ids by table
Erased = Mapping[str, ErasedIds]


def holds_any(part: Part, erased: Erased) -> bool:
    """SegmentCorrupt, OSError: a file that would tell cannot be read."""
    return any(_table_holds(of, number, erased) for of in part.chain for number in range(len(of.record.tables)))


def _table_holds(part: Part, number: int, erased: Erased) -> bool:
    record = part.record.tables[number]
    ids = erased.get(record.spec.name)
    if ids is None:
        return False
    with closing(PartTable(part, number)) as table:
        if any(ids.hold(row_ids).any() for row_ids in _row_ids(table)):
            return True
    return any(_segment_holds(part, record, segment, ids) for segment in record.segments)


def _row_ids(table: PartTable) -> Iterator[np.ndarray]:
    """Of both column files, int64[n] at a time."""
    yield from table.hot.own.ranges("row_ids", _ROWS_AT_ONCE)
    for column in ("initial_row_ids", "waiting_row_ids"):
        yield from table.frozen.ranges(column, _ROWS_AT_ONCE)


def _segment_holds(part: Part, table: TableRecord, segment: SegmentRecord, ids: ErasedIds) -> bool:
    """Also where the row is dead."""
    with closing(open_object(part.objects, segment, table.spec)) as mapped:
        mapped.check_offsets()
        return bool(places_of(mapped.arrays, [ids], mapped.check_part).shape[0])


class SegmentsWithout:
    """Puts segments without the rows beside those with them, each once whichever cuts name it."""

    def __init__(self, erased: Erased) -> None:
        self._erased = erased
        self._known: dict[str, SegmentRecord] = {}  # by digest

    def __call__(self, part: Part, table: str, segment: SegmentRecord) -> SegmentRecord:
        """What stands in the segment's place: itself, if it has none of the rows. SegmentCorrupt, OSError."""
        ids = self._erased.get(table)
        if ids is None:
            return segment
        if segment.digest not in self._known:
            self._known[segment.digest] = _without(part.objects, segment, ids)
        return self._known[segment.digest].model_copy(update={"has_state": segment.has_state})


def _without(objects: Path, segment: SegmentRecord, ids: ErasedIds) -> SegmentRecord:
    new = objects / f"erasing.segment{PARTIAL_SUFFIX}"  # gc removes it, should this process end here
    mapped = write_without(objects / segment_object(segment.digest), new, [ids])
    if mapped is None:
        return segment
    with closing(mapped):
        digest = digest_of(mapped)
    os.rename(new, objects / segment_object(digest))
    sync_folder(objects)
    return segment.model_copy(update={"digest": digest})
