"""Rows into the store of a training loop of one's own, and out of it: `load`, `restore` and `save` of a collection.

Files become a snapshot (import_tables.py) in a temporary folder, and the store restores that: rows come in by one way,
whatever they come from and wherever the shards are.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from embedding_server.spec import OptimizerSpec, TableSpec
from embedding_server.store import EmbeddingStore, Identity, UpdateMode
from trainer.import_tables import Imported, ImportRequest, import_tables
from trainer.interchange import FileFormat
from trainer.snapshots import CutName, cut_name, error_of_shards

Files = str | Path | Mapping[str, str | Path]
#: between two questions how far the shards are
_POLL_S = 0.05


def save_rows(store: EmbeddingStore, who: Identity, step: int, folder: Path) -> Path:
    """A full cut of all rows as they are after `step`, in `folder`, which is made; returns when it is whole.

    StoreUnavailable, with what the shard said, if one cannot write it: then nothing of it is left.
    """
    cut = folder.absolute() / CutName(who.epoch, step).folder
    store.begin_cut(who, step, str(cut))
    while True:
        progress = store.cut_progress(who)
        if reason := error_of_shards(progress):
            with suppress(FrostlineError):  # a shard that cannot be reached: what failed first is what counts
                store.abandon_cut(who)
            raise StoreUnavailable(f"{cut}: {reason}; free or repair the disk, or name another folder")
        if all(of_shard.is_done for of_shard in progress):
            return cut
        time.sleep(_POLL_S)


def restore_rows(
    store: EmbeddingStore, job: str, mode: UpdateMode, cut: Path, anew: Collection[str]
) -> tuple[Identity, int]:
    """Begins an epoch of one worker, whose tables get the rows of a cut; (the worker, the cut's step).

    InvalidInput, SegmentCorrupt: then the job's tables are empty, and may be restored from another.
    """
    step = cut_name(cut).step
    who = Identity(job, store.begin_epoch(job, 1, mode, will_restore=True).epoch, 0)
    store.restore(who, str(cut.absolute()), anew)
    return who, step


def import_files(specs: Sequence[TableSpec], files: Files, kind: FileFormat, folder: Path) -> Imported:
    """A snapshot in `folder` of the rows of these tables, all of which must be in the files. InvalidInput, OSError."""
    names = [spec.name for spec in specs]
    if kind == "torchrec":
        if isinstance(files, Mapping):
            raise InvalidInput("torchrec is one file with all tables; name it, and not a file for each table")
        paths = [Path(files)]
    else:
        if not isinstance(files, Mapping) or set(files) != set(names):
            raise InvalidInput(
                f"{kind} has a file for each table; give {{table: file}} with exactly {', '.join(map(repr, names))}"
            )
        paths = [Path(files[name]) for name in names]
    return import_tables(
        ImportRequest(
            paths,
            kind,
            names,
            dim=None,
            optimizer=OptimizerSpec(),
            uri=folder,
            job="load",
            specs={spec.name: spec for spec in specs},
        )
    )
