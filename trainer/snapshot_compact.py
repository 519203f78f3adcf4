"""A chain of deltas as one full snapshot, offline: `frostline ckpt compact`.

The new snapshot is of the same step, and of an epoch above that of every other in the folder: so it is the newest, and
a training that resumes goes on from it. Therefore only the newest can be compacted. It is there when its manifest is,
written last; until then nothing has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedding_server.errors import InvalidInput
from embedding_server.snapshot_objects import link_or_copy
from embedding_server.snapshot_rewrite import rewrite_part
from trainer.snapshot_list import open_snapshot, size_of_tree
from trainer.snapshot_lock import alone_in
from trainer.snapshots import (
    DENSE_FILE,
    CutName,
    chain_of,
    cuts_in,
    newest_complete,
    now_text,
    read_dense_file,
    remove_cut,
    shard_entries,
    write_manifest,
)


@dataclass(frozen=True, slots=True)
class Compacted:
    path: str
    chain: list[str]  # names of the snapshots that it is made of, newest first
    rows_hot: int
    bytes: int  # of its own files


def compact(cut: Path) -> Compacted:
    """InvalidInput, with nothing written, if the folder is in use, or it is a full snapshot or not the newest one;
    SegmentCorrupt or OSError, with nothing left behind."""
    folder = cut.parent
    with alone_in(folder):
        manifest, parts = open_snapshot(cut)
        chain = [path.name for path, _ in chain_of(cut)]
        if manifest.parent is None:
            raise InvalidInput(f"{cut} is a full snapshot, which builds on no other; there is nothing to compact")
        newest = newest_complete(folder)
        if newest is not None and newest.name != cut.name:
            raise InvalidInput(
                f"{cut} is not the newest snapshot there, and what is made of it would count as newer than {newest}:"
                f" compact {newest}, or move the newer ones away first"
            )
        epoch = max(name.epoch for name in cuts_in(folder)) + 1
        target = folder / CutName(epoch, manifest.step).folder
        try:
            for part in parts:
                rewrite_part(part, target, epoch)
            for entry in manifest.dense:
                read_dense_file(cut, entry)
                link_or_copy(cut / DENSE_FILE, target / DENSE_FILE, entry.size_bytes)
            update = {
                "epoch": epoch,
                "created": now_text(),
                "shards": shard_entries(target, len(parts)),
                "parent": None,
                "sequence": 0,
            }
            write_manifest(target, manifest.model_copy(update=update))
        except BaseException:
            remove_cut(target)
            raise
    rows_hot = sum(table.rows_hot for part in parts for table in part.record.tables)
    return Compacted(str(target), chain, rows_hot, size_of_tree(target))
