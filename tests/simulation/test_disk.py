"""The disk of the simulation: what a dead process and a power cut do to files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.simulation.disk import Disk

Made = Callable[..., Disk]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    contexts = []

    def made(seed: int = 0, *, can_link: bool = True) -> Disk:
        root = tmp_path / str(len(contexts))
        root.mkdir()
        disk = Disk(root, random.Random(seed), can_link=can_link)
        contexts.append(disk.in_place())
        contexts[-1].__enter__()
        return disk

    yield made
    for context in reversed(contexts):
        context.__exit__(None, None, None)


def write(path: Path, data: bytes, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def outcomes(made: Made, prepare: Callable[[Path], None], look: Callable[[Path], object]) -> set[object]:
    """What a power cut leaves, by many seeds."""
    found = set()
    for seed in range(30):
        disk = made(seed)
        prepare(disk.root)
        disk.cut_power()
        found.add(look(disk.root))
    return found


def content(root: Path) -> bytes | None:
    path = root / "file"
    return path.read_bytes() if path.exists() else None


def test_what_is_synced_with_its_name_stays(make: Made) -> None:
    def prepare(root: Path) -> None:
        write(root / "file", b"data", sync=True)
        sync_folder(root)

    assert outcomes(make, prepare, content) == {b"data"}


def test_a_synced_file_without_a_synced_name_may_be_gone_but_is_whole(make: Made) -> None:
    assert outcomes(make, lambda root: write(root / "file", b"data", sync=True), content) == {b"data", None}


def test_a_synced_name_of_a_file_that_is_not_may_hold_anything(make: Made) -> None:
    def prepare(root: Path) -> None:
        write(root / "file", b"data")
        sync_folder(root)

    found = outcomes(make, prepare, content)
    assert {b"data", b"", b"\0\0\0\0"} <= found
    assert None not in found


def test_a_replaced_file_is_the_old_or_the_new_one_until_the_folder_is_synced(make: Made) -> None:
    def prepare(root: Path) -> None:
        write(root / "file", b"old", sync=True)
        sync_folder(root)
        write(root / "new", b"new", sync=True)
        os.replace(root / "new", root / "file")

    assert outcomes(make, prepare, content) == {b"old", b"new"}


def test_a_removed_folder_may_be_back_with_what_was_synced(make: Made) -> None:
    def prepare(root: Path) -> None:
        (root / "folder").mkdir()
        write(root / "folder" / "file", b"data", sync=True)
        sync_folder(root / "folder")
        sync_folder(root)
        (root / "folder" / "file").unlink()
        (root / "folder").rmdir()

    assert outcomes(make, prepare, lambda root: content(root / "folder")) == {b"data", None}


def test_a_dead_process_changes_nothing(make: Made) -> None:
    disk = make()
    write(disk.root / "file", b"data")
    with disk.of_dead_process():
        (disk.root / "file").unlink()
        os.rename(disk.root / "file", disk.root / "other")
    assert os.listdir(disk.root) == ["file"]
    (disk.root / "file").unlink()
    assert os.listdir(disk.root) == []


def test_without_links_os_link_says_so(make: Made) -> None:
    disk = make(can_link=False)
    write(disk.root / "file", b"data")
    with pytest.raises(OSError, match="cross-device"):
        os.link(disk.root / "file", disk.root / "other")
