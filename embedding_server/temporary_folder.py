"""A shard's temporary folder, which goes even if its process is killed: the next one removes it.

    folder = TemporaryFolder()      folder.path; removes those whose process has ended
    folder.remove()

The process holds the lock (file_lock.py) of <folder>/in-use.lock, which ends with it. The lock is taken under another
name first, so that nobody finds the file without it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from embedding_server.file_lock import open_lock, try_lock

_PREFIX = "frostline-"
_LOCK, _NEW_LOCK = "in-use.lock", "in-use.lock.new"


class TemporaryFolder:
    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._fd = open_lock(self.path / _NEW_LOCK)
        with suppress(OSError):  # a file system without locks: then nobody removes it either
            try_lock(self._fd)
            os.rename(self.path / _NEW_LOCK, self.path / _LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _remove_abandoned(where: Path) -> None:
    for lock in where.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            if lock.parent.is_symlink() or lock.parent.lstat().st_uid != os.getuid():
                continue
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(fd):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
