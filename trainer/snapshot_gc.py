"""Which snapshots of a job stay, and the files of frozen rows that none of them needs any more.

Neither removes a cut that one that stays is a delta of, directly or through others.

keep_newest, after each cut of a run: removes nothing but what this run took, or garbage of epochs that are over;
snapshots of another run under the same name stay until somebody removes them.
collect, `frostline ckpt gc`: that somebody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from embedding_server.errors import SegmentCorrupt
from embedding_server.segment_file import PARTIAL_SUFFIX
from embedding_server.snapshot_format import OBJECTS, segment_object
from trainer.snapshot_list import newest_change, size_of_tree
from trainer.snapshot_lock import alone_in
from trainer.snapshots import (
    CutName,
    chain_of,
    check_files,
    cuts_in,
    digests_in,
    is_complete,
    read_manifest,
    remove_cut,
)


def keep_newest(folder: Path, keep: int, run: str | None, epoch: int) -> list[CutName]:
    """Removes what is older than the newest `keep` cuts of `run` in a job's folder, and none of these is a delta of;
    returns it, oldest first.

    Called by the one that writes cuts of `epoch`, while none is under way: so what has no manifest, of this epoch and
    before, is garbage. A cut whose manifest is damaged stays, for whoever looks into it.
    """
    own = [cut for cut in cuts_in(folder) if is_complete(folder / cut.folder) and _run_of(folder / cut.folder) == run]
    garbage = [cut for cut in cuts_in(folder) if cut.epoch <= epoch and not is_complete(folder / cut.folder)]
    needed = needed_by(folder, own[-keep:])
    old = [cut for cut in own[:-keep] if needed is not None and cut not in needed]
    removed = sorted([*old, *garbage])
    for cut in reversed(removed):  # deltas before what they are deltas of
        remove_cut(folder / cut.folder)
    remove_unused_objects(folder)
    return removed


def needed_by(folder: Path, cuts: Iterable[CutName]) -> set[CutName] | None:
    """Those that the given ones are deltas of, and they themselves; None if a manifest that would tell is damaged."""
    try:
        chains = [chain_of(folder / cut.folder) for cut in cuts]
        return {CutName(manifest.epoch, manifest.step) for chain in chains for _, manifest in chain}
    except SegmentCorrupt:
        return None


def _run_of(cut: Path) -> str | None:
    try:
        return read_manifest(cut).run
    except SegmentCorrupt:
        return None


def remove_unused_objects(folder: Path) -> int:
    """Removes segment files that no cut names; returns their bytes. None goes while a cut is there whose list of them
    cannot be read: one that is damaged, or still being written."""
    freed = 0
    for path in unused_objects(folder, cuts_in(folder)) or ():
        with suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            freed += size
    return freed


def unused_objects(folder: Path, kept: Sequence[CutName]) -> list[Path] | None:
    """Files in objects/ that none of the `kept` cuts names; None if that cannot be told."""
    try:
        used = {segment_object(digest) for cut in kept for digest in digests_in(folder / cut.folder)}
    except SegmentCorrupt:
        return None
    found = list((folder / OBJECTS).glob("*.segment")) + list((folder / OBJECTS).glob(f"*{PARTIAL_SUFFIX}"))
    return sorted(path for path in found if path.name not in used and (path.is_symlink() or not path.is_dir()))


# By hand: `frostline ckpt gc` -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Removal:
    """What `collect` removed, or would, of one job's folder. notes: what stays for now, and why."""

    path: str
    kept: list[str]
    removed: list[str]
    objects: int
    bytes: int
    notes: list[str]
    rewritten: list[str] = field(default_factory=list)  # of --erase (snapshot_erase.py)
    unerased: list[str] = field(default_factory=list)


def collect(folder: Path, keep: int, min_age_s: float, *, dry_run: bool = False) -> Removal:
    """Keeps the newest `keep` complete cuts of a job, of whichever run, with those that they are deltas of, and removes
    older ones, cuts without a manifest and segment files that no cut names.

    Whatever may be being written stays: InvalidInput if the folder is in use (snapshot_lock.py); a cut without a
    manifest in which something was written less than `min_age_s` ago stays, and all segment files with it.
    """
    with alone_in(folder):
        return collect_alone(folder, keep, min_age_s, dry_run=dry_run)


def collect_alone(folder: Path, keep: int, min_age_s: float, *, dry_run: bool) -> Removal:
    """collect, for one who holds the folder's lock."""
    _, old, notes = kept_and_old(folder, keep, min_age_s)
    kept = [cut for cut in cuts_in(folder) if cut not in old]
    freed = sum(size_of_tree(folder / cut.folder) for cut in old)
    objects = unused_objects(folder, kept)
    if objects is None:
        notes.append("no segment file was removed, for a snapshot that stays does not say which ones it needs")
    freed += sum(path.lstat().st_size for path in objects or ())
    if not dry_run:
        for cut in reversed(old):  # deltas before what they are deltas of
            remove_cut(folder / cut.folder)
        for path in objects or ():
            path.unlink(missing_ok=True)
    return Removal(
        str(folder), [cut.folder for cut in kept], [cut.folder for cut in old], len(objects or ()), freed, notes
    )


def kept_and_old(folder: Path, keep: int, min_age_s: float) -> tuple[list[CutName], list[CutName], list[str]]:
    """(the newest complete cuts, oldest first; what is to go; why other cuts stay, which is neither).

    What a kept one is a delta of, and is not kept itself, is in neither list."""
    cuts, notes = cuts_in(folder), []
    complete, damaged, garbage = [], [], []
    for cut in cuts:
        path = folder / cut.folder
        if not is_complete(path):
            if time.time() - newest_change(path) >= min_age_s:
                garbage.append(cut)
            else:
                notes.append(f"{cut.folder} may still be written: something in it is less than {min_age_s:g} s old")
            continue
        try:
            check_files(path)  # a snapshot that lacks a file must not cost one that is whole
            complete.append(cut)
        except SegmentCorrupt as error:
            damaged.append(cut)
            notes.append(f"{cut.folder} stays for whoever looks into it: {error}")
    needed = set().union(*(needed_by(folder, [cut]) or set() for cut in [*complete[-keep:], *damaged]))
    old = [cut for cut in complete[:-keep] if cut not in needed]
    return complete[-keep:], sorted([*old, *garbage]), notes
