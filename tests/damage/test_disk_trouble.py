"""A disk that is full, read-only, broken or slow under the snapshots of a job: a cut fails with a clear error and a
count, the snapshot before it stays whole, training goes on, and the first cut afterwards is taken.

Full and read-only disks are real ones where this process may mount; files that cannot be written or synced are played
by name, in the two functions through which every byte goes.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embedding_server import segment_file
from embedding_server.inproc import InprocStore
from embedding_server.snapshot_format import OBJECTS
from embedding_server.store import Identity, RoutedIds
from tests.trainer.test_board import read as read_board
from tests.trainer.test_cuts import job_of, run
from trainer.job import Job
from trainer.snapshot_list import verify
from trainer.snapshots import cuts_in, is_complete, job_folder

BEGINS, ENDS = 15, 35  # steps at which the trouble begins and ends; cuts are due at 10, 20, 30 and 40


class Troubled(InprocStore):
    """A store that waits with each push until the cut before is written, so that what is cut is no matter of time."""

    waits_for_writer = has_whole_cut = True

    def __init__(self, uri: Path, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self._folder, self._begin, self._end = job_folder(uri, "cutting"), begin, end

    def push(self, who: Identity, step: int, gradients):
        for thread in threading.enumerate():
            if self.waits_for_writer and thread.name == "frostline-cut":
                thread.join()
        if step == BEGINS:
            self._begin()
        if step == ENDS - 1 and self.has_whole_cut:
            assert verify(self._folder / "cut-000000000010-1").messages == []  # within the trouble
        if step == ENDS:
            self._end()
        return super().push(who, step, gradients)


def _job(uri: Path) -> Job:
    embedding = {"policy": "idle", "idle_samples": 128, "advanced": {"reselect_every_samples": 320}}
    return job_of(uri, embedding=embedding, snapshots={"keep": 9})


def _steps(uri: Path) -> list[int]:
    """Of the cuts that are there, each of them whole and sound."""
    folder = job_folder(uri, "cutting")
    cuts = cuts_in(folder)
    for cut in cuts:
        assert is_complete(folder / cut.folder)
        assert verify(folder / cut.folder).messages == []
    assert not list(uri.rglob("*.partial")) and not list((folder / OBJECTS).glob("new-*"))
    return [cut.step for cut in cuts]


def _failed_twice(job: Job, store: InprocStore, uri: Path, run_folder: Path, reason: str) -> None:
    summary, notes = run(job, store, run_folder)
    failures = [note for note in notes if note.startswith("snapshot of step")]
    assert [note.partition(":")[0] for note in failures] == [
        f"snapshot of step {step} failed, training goes on" for step in (20, 30)
    ]
    assert all(reason in note for note in failures), failures
    assert (summary.steps, summary.snapshots, summary.snapshots_failed, summary.snapshots_skipped) == (48, 2, 2, 0)
    assert summary.snapshot_last_error.startswith("step 30: ") and reason in summary.snapshot_last_error
    assert summary.snapshot_bytes > 1000 and summary.snapshot_s > 0
    board = read_board(run_folder)
    curves = {name: [(e.step, e.value) for e in board.Scalars(f"snapshots/{name}")] for name in ("taken", "failed")}
    assert curves["failed"][-1][1] == curves["taken"][-1][1] == 2
    assert _steps(uri) == [10, 40]


# Real disks -----------------------------------------------------------------------------------------------------------


def _mount(*arguments: object) -> None:
    try:
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"this process may not mount: {done.stderr.strip()}")


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", folder)
    yield folder
    _unmount(folder)


@pytest.mark.parametrize("free_kib", [0, 4, 8, 12, 16, 24, 32])
def test_a_full_disk_costs_the_cuts_that_do_not_fit(small_disk: Path, tmp_path: Path, free_kib: int) -> None:
    """free_kib: what is left, so that the disk is full at one file or another."""
    ballast = small_disk / "ballast"

    def fill() -> None:
        disk = os.statvfs(small_disk)
        ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - (free_kib << 10)))

    store = Troubled(small_disk, fill, ballast.unlink)
    _failed_twice(_job(small_disk), store, small_disk, tmp_path / "run", "No space left on device")


def test_a_read_only_disk_costs_the_cuts_of_that_time(small_disk: Path, tmp_path: Path) -> None:
    folder = job_folder(small_disk, "cutting")

    def forbid() -> None:  # not `remount,ro` of the disk itself: the training has its lock open there
        _mount("--bind", folder, folder)
        _mount("-o", "remount,bind,ro", folder)

    store = Troubled(small_disk, forbid, lambda: _unmount(folder))
    _failed_twice(_job(small_disk), store, small_disk, tmp_path / "run", "Read-only file system")


# Files that fail, by name ---------------------------------------------------------------------------------------------


class _Disk:
    """While it is bad, what `fails` says of a path that is written or synced happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, str], None]) -> None:
        self.is_bad, self._fails = False, fails
        for owner, name in ((segment_file, "write_bytes"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name), name))

    def _guarded(self, real: Callable[..., object], name: str) -> Callable[..., object]:
        def call(fd: int, *rest: object) -> object:
            if self.is_bad:
                self._fails(name, os.readlink(f"/proc/self/fd/{fd}"))
            return real(fd, *rest)

        return call

    def begin(self) -> None:
        self.is_bad = True

    def end(self) -> None:
        self.is_bad = False


FILES = {
    "hot columns": "-hot.safetensors.partial",
    "frozen columns": "-frozen.safetensors.partial",
    "segments": ".segment.",
    "record": "shard.json.partial",
    "dense": "dense.safetensors.partial",
    "manifest": "manifest.json.partial",
}


@pytest.mark.parametrize("call", ["write_bytes", "fsync"])
@pytest.mark.parametrize("what", FILES)
def test_a_file_that_fails_costs_the_cut_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, call: str
) -> None:
    hits = []

    def fail(name: str, path: str) -> None:
        if name == call and FILES[what] in path:
            hits.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = _Disk(monkeypatch, fail)
    uri = tmp_path / "uri"
    uri.mkdir()
    store = Troubled(uri, disk.begin, disk.end)
    _failed_twice(_job(uri), store, uri, tmp_path / "run", "Input/output error")
    assert len(hits) == 2


class Slow(Troubled):
    """Waits for no cut before the trouble is over, and looks rows up all the while."""

    has_whole_cut = waits_for_writer = False

    def push(self, who: Identity, step: int, gradients):
        self.waits_for_writer = step > ENDS
        for spec in self.table_specs().values():
            row_ids = np.arange(step, dtype=np.int64)
            found = self.lookup({spec.name: RoutedIds(row_ids, np.array([0, step]))})[spec.name]
            assert found.values.shape == (step, spec.dim)
        return super().push(who, step, gradients)


def test_a_slow_disk_costs_cuts_and_neither_steps_nor_look_ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of a column file does not return before step ENDS."""
    is_well = threading.Event()

    def wait(name: str, path: str) -> None:
        if name == "fsync" and "-hot.safetensors" in path:
            assert is_well.wait(60)

    disk = _Disk(monkeypatch, wait)
    disk.begin()
    summary, notes = run(_job(tmp_path), Slow(tmp_path, lambda: None, is_well.set), tmp_path / "run")
    skipped = [note for note in notes if "skipped" in note]
    assert skipped == [
        f"snapshot of step {step} skipped: that of step 10 is still being written; set snapshots.every_samples higher"
        for step in (20, 30)
    ]
    assert (summary.steps, summary.snapshots, summary.snapshots_failed, summary.snapshots_skipped) == (48, 2, 0, 2)
    assert _steps(tmp_path) == [10, 40]
