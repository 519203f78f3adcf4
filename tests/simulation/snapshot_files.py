"""What worker 0 writes of a cut, by the trainer's own code: the dense part, the manifest last; then old cuts go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from embedding_server.store import CutProgress, Identity, UpdateMode
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
