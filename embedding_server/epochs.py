"""The epochs of a shard's jobs on disk: what keeps an old worker group fenced after the shard was restarted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from embedding_server.errors import InvalidInput, SegmentCorrupt, StoreUnavailable
from embedding_server.failpoints import failpoint
from embedding_server.segment_file import sync_folder
from embedding_server.snapshot_file import corrupt
from embedding_server.snapshot_format import read_sealed_json, sealed_json

EPOCHS = "epochs.json"  # sealed JSON, {job: epoch}; DO NOT CHANGE


def load_epochs(folder: Path) -> dict[str, int]:
    """Epoch by job; empty without a file. InvalidInput if the file is not what save_epochs wrote."""
    path = folder / EPOCHS
    if not path.exists():
        return {}
    try:
        epochs = read_sealed_json(path)
        if not all(type(epoch) is int and 0 <= epoch < 2**63 for epoch in epochs.values()):
            raise corrupt(path, "an epoch is no number in 0 to 2^63 - 1")
    except (SegmentCorrupt, OSError) as error:
        raise InvalidInput(
            f"{path} is not a file of epochs ({error}); without it old workers are not fenced: give the shard an empty"
            " data_dir"
        ) from error
    return epochs


def save_epochs(folder: Path, epochs: Mapping[str, int]) -> None:
    """Replaces the file as a whole. StoreUnavailable, with the old one intact, if the disk does not take it."""
    path = folder / EPOCHS
    temporary = path.with_suffix(".tmp")
    try:
        failpoint("epochs.before_write")
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(sealed_json(epochs))
            file.flush()
            os.fsync(file.fileno())
        failpoint("epochs.before_rename")
        os.replace(temporary, path)
        failpoint("epochs.before_folder_sync")
        sync_folder(folder)
    except OSError as error:
        raise StoreUnavailable(
            f"the epoch cannot be written to {path}: {error}; no epoch has begun. Free or repair the disk"
        ) from error
