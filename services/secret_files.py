"""Files of tokens, keys and certificates: read whole, refused if others may read a secret, and read again when changed.

No message of this module holds a byte of a file.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from embedding_server.errors import InvalidInput

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
#: of a secret's mode: the group may read it (a mounted Kubernetes secret with fsGroup is 0440), nothing else
_FORBIDDEN_MODE = 0o027

T = TypeVar("T")
#: of each file: inode, size, times of its last write and its last change of mode
Signature = list[tuple[int, int, int, int]]


def read_file(path: Path, what: str, *, is_secret: bool) -> bytes:
    """The whole file. InvalidInput, with `what` it is, if it is none, too large, or a secret that others may read."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())  # of what was opened, not of what has that name by now
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(f"{what} {path}: is not a file")
            if is_secret and status.st_mode & _FORBIDDEN_MODE:
                raise InvalidInput(
                    f"{what} {path}: its mode {stat.S_IMODE(status.st_mode):04o} lets others read or write it; only "
                    f"the owner, and its group for reading, may: chmod 600 {path}"
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{what} {path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"{what} {path}: has more than {MAX_FILE_BYTES} bytes")
    return data


def _signature(paths: Sequence[Path]) -> Signature:
    """OSError if one is not there."""
    found = [os.stat(path) for path in paths]
    return [(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in found]


class Reloaded(Generic[T]):
    """What `load` makes of some files, made anew when one of them changes.

    A change that cannot be loaded (a file is gone, cut short, or does not fit the others yet) keeps the value in use:
    a line says why, once, and it is tried again at every check. So files may be replaced one after the other.

    Thread safety: every method may be called from any thread; `_lock` guards a load.
    """

    def __init__(self, paths: Sequence[Path], what: str, load: Callable[[], T], check_every_s: float) -> None:
        """Raises what `load` raises. check_every_s: how old a look at the files may be; 0: every call looks."""
        self._paths = list(paths)
        self._what = what
        self._load = load
        self._check_every_s = check_every_s
        self._lock = threading.Lock()
        self._last_error = ""
        self._value, self._signature = self._loaded()
        self._next_check_s = time.monotonic() + check_every_s

    def _loaded(self) -> tuple[T, Signature]:
        try:
            before = _signature(self._paths)  # so that a change during the load is one more change
        except OSError:
            before = []
        return self._load(), before

    def current(self) -> T:
        if time.monotonic() >= self._next_check_s:
            self.check(waits=False)
        return self._value

    def check(self, *, waits: bool = True) -> None:
        """Looks now. waits: for another thread that is looking, so that what it finds is there on return."""
        if not self._lock.acquire(blocking=waits):
            return
        try:
            self._next_check_s = time.monotonic() + self._check_every_s
            if _signature(self._paths) != self._signature:
                self._value, self._signature = self._loaded()
                self._last_error = ""
                log.info("%s changed and was read again", self._what)
        except (InvalidInput, OSError) as error:
            self._note_failure(error)
        finally:
            self._lock.release()

    def _note_failure(self, error: Exception) -> None:
        text = str(error)
        if text != self._last_error:
            self._last_error = text
            log.error("%s changed and cannot be used, so what was read before stays in use: %s", self._what, text)
