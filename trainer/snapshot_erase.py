"""Erases rows from the snapshots of a job: `frostline ckpt gc --erase`.

Each snapshot that stays and holds some of them, in whatever file of it or of what it is a delta of, is written anew, as
a full one, without them; then what only was a parent goes, and every segment file that no snapshot names. The new one
is built beside, under a name that no snapshot has, and exchanged with the old one in one step of the file system. So
whenever the process ends, each snapshot is whole: the old one, or the new one. At the end all files are looked through.

Newest first: a delta is written anew before its parent, which it needs no more then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from embedding_server.errors import FrostlineError, InvalidInput, SegmentCorrupt
from embedding_server.segment_file import sync_folder
from embedding_server.snapshot_erasure import Erased, SegmentsWithout, holds_any
from embedding_server.snapshot_objects import link_or_copy
from embedding_server.snapshot_rewrite import rewrite_part
from trainer.snapshot_gc import Removal, collect_alone, kept_and_old
from trainer.snapshot_list import open_snapshot
from trainer.snapshot_list import verify as find_damage
from trainer.snapshot_lock import alone_in
from trainer.snapshots import (
    DENSE_FILE,
    CutName,
    cuts_in,
    is_complete,
    read_dense_file,
    read_manifest,
    read_records,
    remove_cut,
    shard_entries,
    write_manifest,
)

#: before the name of a snapshot that is being written anew, and of the one whose place it takes
_BUILT, _OLD = "erasing-", "erased-"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def check_erased_tables(uri: Path, folders: Sequence[Path], erased: Erased) -> None:
    """InvalidInput if a table is in no snapshot of these folders of jobs: its name, or the URI, is another than was
    meant, and nothing would be erased. What cannot be read tells nothing: it is told of later."""
    known: set[str] = set()
    for folder in folders:
        if any(folder.glob(f"{_BUILT}*")):  # of an erasure that was interrupted; the tables of that snapshot are unread
            return
        for name in cuts_in(folder):
            cut = folder / name.folder
            try:
                if is_complete(cut):
                    known.update(t.spec.name for record in read_records(cut, read_manifest(cut)) for t in record.tables)
            except SegmentCorrupt:
                return
    for table in erased:
        if table not in known:
            raise InvalidInput(
                f"--erase: no snapshot in {uri} has a table {table!r:.300} (tables:"
                f" {', '.join(sorted(known)) or 'none'}); check name and URI, nothing was changed"
            )


def collect_and_erase(folder: Path, keep: int, min_age_s: float, erased: Erased, *, dry_run: bool = False) -> Removal:
    """As snapshot_gc.collect, and no file of what stays holds the rows. Removal.unerased: snapshots that stay and may
    hold some, with the reason; they are damaged, or may still be being written.

    InvalidInput if the folder is in use, with nothing changed; FrostlineError if rows are left all the same.
    """
    with alone_in(folder):
        if not dry_run:
            _settle(folder)
        kept = kept_and_old(folder, keep, min_age_s)[0]
        rewritten, problems = _rewrite_all(folder, kept, erased, dry_run=dry_run)
        removal = collect_alone(folder, keep, min_age_s, dry_run=dry_run)
        unerased = {**_unread(folder, kept, removal), **problems}
        if not dry_run:
            _check(folder, [cut for cut in kept if cut.folder not in unerased], erased)
    return replace(removal, rewritten=rewritten, unerased=[f"{name}: {why}" for name, why in unerased.items()])


def _settle(folder: Path) -> None:
    """What an erasure that was interrupted left: a snapshot on its way, which goes, unless it is the only one left."""
    for path in folder.glob(f"{_BUILT}*"):
        place = folder / path.name.removeprefix(_BUILT)
        if is_complete(path) and not place.exists():
            os.rename(path, place)
            sync_folder(folder)
    for path in (*folder.glob(f"{_BUILT}*"), *folder.glob(f"{_OLD}*")):
        remove_cut(path)


def _rewrite_all(
    folder: Path, kept: Sequence[CutName], erased: Erased, *, dry_run: bool
) -> tuple[list[str], dict[str, str]]:
    """Names of the snapshots that were written anew, or would be; what is wrong, by the names of others."""
    rewritten: list[str] = []
    problems: dict[str, str] = {}
    segments = SegmentsWithout(erased)
    for name in reversed(kept):
        cut = folder / name.folder
        try:
            _, parts = open_snapshot(cut)
            if not any(holds_any(part, erased) for part in parts):
                continue
            if not dry_run:
                _rewrite(cut, erased, segments)
        except SegmentCorrupt as error:
            problems[name.folder] = f"it is damaged: {error}"
            continue
        rewritten.append(name.folder)
    return rewritten, problems


def _rewrite(cut: Path, erased: Erased, segments: SegmentsWithout) -> None:
    """SegmentCorrupt, OSError: the snapshot is as it was."""
    target = cut.with_name(_BUILT + cut.name)
    try:
        manifest, parts = open_snapshot(cut)

        def keeps(table: str, row_ids: np.ndarray) -> np.ndarray:
            ids = erased.get(table)
            return np.ones(row_ids.shape[0], np.bool_) if ids is None else ~ids.hold(row_ids)

        for part in parts:
            rewrite_part(part, target, manifest.epoch, keeps, segments)
        for entry in manifest.dense:
            read_dense_file(cut, entry)
            link_or_copy(cut / DENSE_FILE, target / DENSE_FILE, entry.size_bytes)
        update = {"shards": shard_entries(target, len(parts)), "parent": None, "sequence": 0}
        write_manifest(target, manifest.model_copy(update=update))
        _exchange(target, cut)
    finally:
        remove_cut(target)  # what was begun, or the old one


def _exchange(new: Path, old: Path) -> None:
    """Each gets the name of the other, at once. A file system that cannot do that renames them one after the other: who
    ends in between leaves `new` alone, which the next erasure brings to its place."""
    first, second = os.fsencode(new), os.fsencode(old)
    if _libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) != 0:
        aside = old.with_name(_OLD + old.name)
        os.rename(old, aside)
        try:
            os.rename(new, old)
        except OSError:
            os.rename(aside, old)
            raise
        sync_folder(old.parent)
        remove_cut(aside)
    sync_folder(old.parent)


def _unread(folder: Path, kept: Sequence[CutName], removal: Removal) -> dict[str, str]:
    """Snapshots that stay without having been looked at, and why."""
    known = {cut.folder for cut in kept}
    reasons = {name: note for name in removal.kept for note in removal.notes if note.startswith(name)}
    return {
        name: reasons.get(name, "it was not looked at")
        for name in removal.kept
        if name not in known and (folder / name).exists()
    }


def _check(folder: Path, cuts: Sequence[CutName], erased: Erased) -> None:
    for name in cuts:
        cut = folder / name.folder
        damage = find_damage(cut).messages
        if damage:
            raise FrostlineError(f"{cut}: it was written anew without the rows, and is damaged now: {damage[0]}")
        _, parts = open_snapshot(cut)
        if any(holds_any(part, erased) for part in parts):
            raise FrostlineError(f"{cut}: it still holds some of the rows; this is a bug, please report it")
