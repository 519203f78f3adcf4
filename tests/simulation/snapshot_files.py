"""Files of a cut: what worker 0 writes, by the trainer's own code, and what lies there in the end.

The dense part, the manifest last; then old cuts go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rows import open_object
from embedding_server.store import CutProgress, Identity, UpdateMode
from tests.simulation.checked_shard import Violation
from tests.simulation.shard_model import Tables
from trainer.cuts import _Writing
from trainer.delta_chain import ParentCut
from trainer.snapshots import Manifest, frostline_version, now_text, remove_cut

KEEP = 2
_RUN = "simulated"


class _Dense:
    """The dense layers: nothing of them matters here but that they are written."""

    def to_bytes(self) -> bytes:
        return b"dense"


class _Store:
    """What the writing asks of the store, once the shards are done."""

    def __init__(self, progress: list[CutProgress]) -> None:
        self.num_shards = len(progress)
        self._progress = progress

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        return self._progress


def write_rest(
    folder: Path,
    who: Identity,
    step: int,
    num_workers: int,
    mode: UpdateMode,
    progress: list[CutProgress],
    parent: ParentCut | None,
) -> ParentCut:
    """progress: of the shards, which are done. What deltas may build on now. OSError."""
    manifest = Manifest(
        frostline_version=frostline_version(),
        created=now_text(),
        job=who.job,
        arm="main",
        run=_RUN,
        step=step,
        run_step=step,
        epoch=who.epoch,
        num_workers=num_workers,
        mode=mode,
        shards=[],
        dense=[],
        reader={},
        resolved_job={},
        parent=parent.entry if parent is not None else None,
        sequence=parent.sequence + 1 if parent is not None else 0,
    )
    store, dense = cast(Any, _Store(progress)), cast(Any, _Dense())
    writing = _Writing(store, who, folder.parent, manifest, dense, KEEP)
    writing._write()
    assert writing.completed is not None
    return writing.completed


def remove_failed(folder: Path) -> None:
    remove_cut(folder)


def tables_of(cut: Path) -> set[str]:
    """Those that every shard had: the job's."""
    return set.intersection(*({table.spec.name for table in part.record.tables} for part in read_parts(cut)))


def check_content(cut: Path, expected: Sequence[Tables]) -> None:
    """expected: of each part. The tables are those, and no segment has a row that was deleted before; that the other
    rows are there, and right, a restore shows."""
    parts = read_parts(cut)
    for part, tables in zip(parts, expected, strict=True):
        found = {record.spec.name for record in part.record.tables}
        if found != tables.keys():
            raise Violation(f"{part.folder} has tables {sorted(found)}, not {sorted(tables)}")
        for record in part.record.tables:
            erased = set().union(*(of[record.spec.name].erased for of in expected if record.spec.name in of))
            for segment in record.segments:
                with closing(open_object(part.objects, segment, record.spec)) as mapped:
                    left = erased.intersection(mapped.arrays.row_ids.tolist())
                if left:
                    raise Violation(f"{part.folder}: table {record.spec.name} has deleted rows {sorted(left)}")
