"""The disk of a simulation: real files in /dev/shm, with what crashes and power cuts do to them.

    a killed process    what it has written stays, whatever was synced: the page cache is the machine's. From then on it
                        changes nothing, though its clean-up code still runs in the simulation: calls do nothing
    a power cut         kills all processes; of what was not synced since, each change is kept or lost, independently:
                        a file's content may be whole, cut off or zeros; a name in a folder may be there or not, a name
                        that was removed may be back, a file that was replaced may be the old one

A file is synced by fsync of itself, a name by fsync of its folder. That is less than any file system keeps, so code
that survives here does not rely on the order in which one of them writes.

Only calls that the code under test makes are looked at, by replacing them in `os` while a simulation runs.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Names = dict[str, int]  # inode by name

_CHANGES = ("unlink", "remove", "rmdir", "rename", "replace", "link", "mkdir")


class Disk:
    def __init__(self, root: Path, rng: random.Random, *, can_link: bool) -> None:
        """can_link False: no hard links, as between two file systems."""
        self.root = root
        self._rng = rng
        self._can_link = can_link
        self._is_dead = False  # whoever runs now is a dead process
        self._names: dict[int, Names] = {}  # of synced folders, by inode
        self._contents: dict[int, bytes] = {}  # of synced files, by inode
        self._real_fsync = os.fsync

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The calls of `os` are the disk's."""
        replaced: dict[str, Callable[..., Any]] = {name: self._guarded(getattr(os, name)) for name in _CHANGES}
        replaced["link"] = self._link(os.link)
        replaced["write"] = self._write(os.write)
        replaced["fsync"] = self._fsync
        with mock.patch.multiple(os, **replaced):
            self._note_all()
            yield

    @contextmanager
    def of_dead_process(self) -> Iterator[None]:
        """What runs within is clean-up that never happened: files stay as they are."""
        self._is_dead = True
        try:
            yield
        finally:
            self._is_dead = False

    def die(self) -> None:
        """As of_dead_process, from within the process that dies, until `revive`."""
        self._is_dead = True

    def revive(self) -> None:
        """The next one runs."""
        self._is_dead = False

    # What is replaced in os ---------------------------------------------------------------------------------------

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return None if self._is_dead else real(*arguments, **named)

        return call

    def _link(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def link(*arguments: Any, **named: Any) -> Any:
            if not self._can_link:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return None if self._is_dead else real(*arguments, **named)

        return link

    def _write(self, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def write(fd: int, data: Any) -> int:
            return len(data) if self._is_dead else real(fd, data)

        return write

    def _fsync(self, fd: int) -> None:
        """Nothing to do in /dev/shm but to note it."""
        if self._is_dead:
            return
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            self._names[info.st_ino] = _names_in(Path(f"/proc/self/fd/{fd}"))
        else:
            self._contents[info.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    # Power cuts ---------------------------------------------------------------------------------------------------

    def cut_power(self) -> int:
        """Returns how many changes were lost. No process may be alive."""
        lost = self._settle(self.root, self._names.get(self.root.stat().st_ino, {}))
        self._note_all()
        return lost

    def _settle(self, folder: Path, synced: Names) -> int:
        lost, now = 0, _names_in(folder)
        for name in sorted(now.keys() | synced.keys()):
            path = folder / name
            if now.get(name) != synced.get(name) and self._rng.random() < 0.5:
                lost += 1
                self._undo(path, synced.get(name))
            if path.is_dir():
                lost += self._settle(path, self._names.get(path.stat().st_ino, {}))
            elif path.exists():
                lost += self._settle_content(path)
        return lost

    def _undo(self, path: Path, inode: int | None) -> None:
        """The name points at what it did when it was synced."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if inode is None:
            return
        if inode in self._names:
            path.mkdir()
            for name, of_name in self._names[inode].items():
                self._undo(path / name, of_name)
            self._names[path.stat().st_ino] = _names_in(path)
        else:
            path.write_bytes(self._contents.get(inode, b""))
            self._contents[path.stat().st_ino] = path.read_bytes()

    def _settle_content(self, path: Path) -> int:
        data = path.read_bytes()
        if self._contents.get(path.stat().st_ino) == data or self._rng.random() < 1 / 3:
            return 0
        kept = self._rng.randrange(len(data) + 1)
        path.write_bytes(data[:kept] if self._rng.random() < 0.5 else data[:kept] + bytes(len(data) - kept))
        return 1

    def _note_all(self) -> None:
        """What is there is on disk."""
        self._names, self._contents = {}, {}
        for folder, _, files in os.walk(self.root):
            self._names[os.stat(folder).st_ino] = _names_in(Path(folder))
            for name in files:
                path = Path(folder) / name
                self._contents[path.stat().st_ino] = path.read_bytes()


def _names_in(folder: Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}
