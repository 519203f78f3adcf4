"""Which snapshots of a job stay, and the files of frozen rows that none of them needs any more.

Nothing but what this run took, or garbage of epochs that are over, is ever removed: snapshots of another run under the
same name stay until somebody removes them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from embedding_server.errors import SegmentCorrupt
from embedding_server.snapshot_format import OBJECTS, segment_object
from trainer.snapshots import CutName, cuts_in, digests_in, is_complete, read_manifest, remove_cut


def keep_newest(folder: Path, keep: int, run: str | None, epoch: int) -> list[CutName]:
    """Removes what is older than the newest `keep` cuts of `run` in a job's folder; returns it, oldest first.

    Called by the one that writes cuts of `epoch`, while none is under way: so what has no manifest, of this epoch and
    before, is garbage. A cut whose manifest is damaged stays, for whoever looks into it.
    """
    own = [cut for cut in cuts_in(folder) if is_complete(folder / cut.folder) and _run_of(folder / cut.folder) == run]
    garbage = [cut for cut in cuts_in(folder) if cut.epoch <= epoch and not is_complete(folder / cut.folder)]
    removed = sorted([*own[:-keep], *garbage])
    for cut in removed:
        remove_cut(folder / cut.folder)
    remove_unused_objects(folder)
    return removed


def _run_of(cut: Path) -> str | None:
    try:
        return read_manifest(cut).run
    except SegmentCorrupt:
        return None


def remove_unused_objects(folder: Path) -> None:
    """Segment files that no cut names. None is removed while a cut is there whose list of them cannot be read."""
    try:
        used = {segment_object(digest) for cut in cuts_in(folder) for digest in digests_in(folder / cut.folder)}
    except SegmentCorrupt:
        return
    for path in list((folder / OBJECTS).glob("*.segment")):
        if path.name not in used:
            with suppress(OSError):
                path.unlink()
