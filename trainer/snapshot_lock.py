"""Who works in a job's folder of snapshots: a lock, so that `frostline ckpt gc` never removes what is being written.

    with in_use(folder): ...        a training that takes cuts there, or a reader; many may; waits for who is alone
    with alone_in(folder): ...      gc, import; InvalidInput while anybody else works there
    with only_training(folder) as is_only: ...      a training; whether no other one takes cuts there

The locks (embedding_server/file_lock.py) are those of JOB/in-use.lock, and of JOB/training.lock for trainings among
themselves; they end with the process that holds them. gc has a rule of age besides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedding_server.errors import InvalidInput
from embedding_server.file_lock import open_lock, try_lock, wait_for_share

LOCK_FILE = "in-use.lock"
TRAINING_LOCK_FILE = "training.lock"


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Where the file cannot be made (a read-only folder) nothing is locked, and others can tell by age alone."""
    try:
        fd = open_lock(folder / LOCK_FILE)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            wait_for_share(fd)
        yield
    finally:
        os.close(fd)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    try:
        fd = open_lock(folder / LOCK_FILE)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror}; name a folder that this machine can write") from None
    try:
        if not _is_alone(fd):
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
        fd = open_lock(folder / TRAINING_LOCK_FILE)
    except OSError:
        yield True
        return
    try:
        yield _is_alone(fd)
    finally:
        os.close(fd)


def _is_alone(fd: int) -> bool:
    """False if somebody else has the lock; True on a file system without locks."""
    try:
        return try_lock(fd)
    except OSError:
        return True
