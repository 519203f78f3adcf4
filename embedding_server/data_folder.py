"""The folder of a shard's files: the one that it was given, which it locks, or a temporary one.

folder = DataFolder(None)       folder.path; InvalidInput if it cannot be made, or is another shard's
folder.close()                  a temporary one goes
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from embedding_server.errors import InvalidInput
from embedding_server.file_lock import open_lock, try_lock
from embedding_server.segment_file import make_folder
from embedding_server.temporary_folder import TemporaryFolder

_LOCK = "shard.lock"


class DataFolder:
    def __init__(self, given: Path | None) -> None:
        self._temporary = TemporaryFolder() if given is None else None
        self._fd = -1
        if self._temporary is not None:
            self.path = self._temporary.path
        else:
            assert given is not None
            self.path = _made(Path(given))
            self._fd = _locked(self.path)

    @property
    def is_temporary(self) -> bool:
        return self._temporary is not None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            self._temporary.remove()


def _made(folder: Path) -> Path:
    try:
        make_folder(folder)
    except OSError as error:
        raise InvalidInput(f"data_dir={folder}: {error}; name a folder that can be made there") from None
    return folder


def _locked(folder: Path) -> int:
    """A descriptor that holds the lock, -1 where there can be none: two shards would write over each other's files."""
    try:
        fd = open_lock(folder / _LOCK)
    except OSError:
        return -1
    with suppress(OSError):  # a file system without locks
        if not try_lock(fd):
            os.close(fd)
            raise InvalidInput(f"data_dir={folder}: a shard of another process uses it; name a folder of its own")
    return fd
