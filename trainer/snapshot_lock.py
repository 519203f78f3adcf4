"""Who works in a job's folder of snapshots: a lock, so that `frostline ckpt gc` never removes what is being written.

    with in_use(folder): ...        a training that takes cuts there, or a reader; many may; waits for who is alone
    with alone_in(folder): ...      gc, import; InvalidInput while anybody else works there
    with only_training(folder) as is_only: ...      a training; whether no other one takes cuts there

The locks are flock(2) of JOB/in-use.lock, and of JOB/training.lock for trainings among themselves; they end with the
process that holds them. They hold between machines where the file system carries flock (local ones; NFS from Linux
2.6.12 on). gc has a rule of age besides.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedding_server.errors import InvalidInput

LOCK_FILE = "in-use.lock"
TRAINING_LOCK_FILE = "training.lock"


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Where the file cannot be made (a read-only folder) nothing is locked, and others can tell by age alone."""
    try:
        fd = _open(folder)
    except OSError:
        yield
        return
    try:
        _lock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    try:
        fd = _open(folder)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror}; name a folder that this machine can write") from None
    try:
        if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise InvalidInput(
                f"{folder} is in use: a training takes snapshots there, which removes its old ones itself, or another"
                " command reads or writes there; wait for its end"
            )
        yield
    finally:
        os.close(fd)


@contextmanager
def only_training(folder: Path) -> Iterator[bool]:
    """True where it cannot be told (a read-only folder, a file system without locks)."""
    try:
        fd = _open(folder, TRAINING_LOCK_FILE)
    except OSError:
        yield True
        return
    try:
        yield _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _open(folder: Path, name: str = LOCK_FILE) -> int:
    return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _lock(fd: int, how: int) -> bool:
    """False if somebody else has it."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
