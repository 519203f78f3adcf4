"""The epochs of a shard's jobs on disk: what keeps an old worker group fenced after the shard was restarted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from embedding_server.errors import InvalidInput, StoreUnavailable
from embedding_server.failpoints import failpoint
from embedding_server.segment_file import sync_folder

_FILE = "epochs.json"  # {job: epoch}; DO NOT CHANGE


def load_epochs(folder: Path) -> dict[str, int]:
    """Epoch by job; empty without a file. InvalidInput if the file is not what save_epochs wrote."""
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        return {str(job): int(epoch) for job, epoch in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise InvalidInput(
            f"{path} is not a file of epochs ({error}); without it old workers are not fenced: give the shard an empty"
            " data_dir"
        ) from error


def save_epochs(folder: Path, epochs: Mapping[str, int]) -> None:
    """Replaces the file as a whole. StoreUnavailable, with the old one intact, if the disk does not take it."""
    path = folder / _FILE
    temporary = path.with_suffix(".tmp")
    try:
        failpoint("epochs.before_write")
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(epochs, file)
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
