"""Locks of files by flock(2): an open descriptor holds one, so that it ends with its process, however that ends.

They hold between machines where the file system carries flock: local ones, NFS from Linux 2.6.12 on. Where it does not,
taking one is an OSError, and the caller knows what that means to it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def open_lock(path: Path) -> int:
    """A descriptor of the file, made if need be, for try_lock and wait_for_share."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def try_lock(fd: int) -> bool:
    """Takes the lock for this descriptor alone; False if another has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_share(fd: int) -> None:
    """Takes the lock beside others who share it, once nobody has it alone."""
    fcntl.flock(fd, fcntl.LOCK_SH)
