"""`frostline ckpt` killed, or met by a full or broken disk, at the changes that it makes to the disk: every third one,
or, with -m slow, every one.

Each point is a process of its own (a fork), which ends at once there, or gets an error there and says it in one line.
Afterwards every snapshot is whole and has the rows that it had, and the same command does what it is for.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import app
from tests.trainer.test_snapshot_erase import FROZEN, HOT, LATER, Writer, rows_of
from trainer.snapshot_list import verify
from trainer.snapshots import cuts_in, is_complete

#: what changes the disk, and can fail
CALLS = ("rename", "link", "mkdir", "write", "fsync", "fdatasync", "posix_fallocate", "open", "unlink", "rmdir")
FAIL = CALLS[:8]  # a full disk stops no removal
KILLED, FAILED, DONE, TRACE = 9, 1, 0, 3


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A full cut and two deltas of it."""
    writer = Writer(tmp_path / "uri")
    writer.train(FROZEN)
    writer.train(HOT)
    writer.train(HOT)
    writer.store.reselect(writer.who, 3, {})
    writer.cut()
    for row_ids in (LATER, HOT):
        writer.train(row_ids)
        writer.cut(is_delta=True)
    writer.store.close()
    return writer.folder


def _armed(point: int, act: Callable[[], None]) -> list[int]:
    """act() at the point-th call that changes the disk; counts them."""
    count = [0]

    def wrap(name: str, real: Callable) -> Callable:
        def call(*arguments, **options):
            is_read = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
            if not is_read:
                count[0] += 1
                if count[0] == point:
                    act()
            return real(*arguments, **options)

        return call

    names = CALLS if act is _kill else FAIL
    for name in names:
        setattr(os, name, wrap(name, getattr(os, name)))
    return count


def _kill() -> None:
    os._exit(KILLED)


def _fail(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _at_point(arguments: list[str], point: int, act: Callable[[], None]) -> tuple[int, bool]:
    """Exit status of the command in a process of its own, and whether it came so far; TRACE for an error that is no
    single line."""
    child = os.fork()
    if child == 0:
        status = TRACE
        try:
            count = _armed(point, act)
            result = CliRunner().invoke(app, arguments)
            is_clear = result.exception is None or isinstance(result.exception, SystemExit)
            if is_clear and (result.exit_code == DONE or result.stderr.count("\n") <= 1 + arguments.count("gc") * 9):
                status = result.exit_code
            status += 64 if count[0] >= point else 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (status, True) if status == KILLED else (status % 64, status >= 64)


def _points(folder: Path, arguments: list[str], act: str, every: int) -> Iterator[tuple[int, int]]:
    """(point, exit status) of the first point and every so many, each beginning with the folder as it is now, until the
    command does not come so far. With 3 each act takes others."""
    original = folder.with_name("original")
    shutil.copytree(folder, original)
    for point in sorted({1, *range(1 + list(ACTS).index(act) % every, 1000, every)}):
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        status, is_reached = _at_point(arguments, point, ACTS[act])
        assert status in (DONE, FAILED, 2, KILLED), (point, status)
        if not is_reached:
            assert status == DONE and point > 1
            return
        yield point, status


def _run(arguments: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def _assert_whole(job: Path, rows: dict[str, dict[int, bytes]]) -> None:
    """Every snapshot of before is there, and what is new beside it has the rows of the newest."""
    found = [job / cut.folder for cut in cuts_in(job) if is_complete(job / cut.folder)]
    assert rows.keys() <= {cut.name for cut in found}
    for cut in found:
        assert verify(cut).messages == []
        assert rows_of(cut) == rows.get(cut.name, rows[max(rows)])


ACTS = {"killed": _kill, "full": _fail(errno.ENOSPC), "broken": _fail(errno.EIO)}


@pytest.fixture(params=[pytest.param(3, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)])
def every(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("act", ACTS)
def test_compact(job: Path, act: str, every: int) -> None:
    rows = {cut.folder: rows_of(job / cut.folder) for cut in cuts_in(job)}
    before = {path for path in job.rglob("*") if path.is_file()}
    for point, status in _points(job.parent, ["ckpt", "compact", str(job)], act, every):
        _assert_whole(job, rows)
        if status not in (DONE, KILLED):
            assert {path for path in job.rglob("*") if path.is_file()} <= {*before, job / "in-use.lock"}, point
        status, text = _run(["ckpt", "compact", str(job)])
        assert status == DONE or "is a full snapshot" in text, (point, text)
        _assert_whole(job, rows)


@pytest.mark.parametrize("act", ACTS)
def test_gc(job: Path, act: str, every: int) -> None:
    assert _run(["ckpt", "compact", str(job)])[0] == DONE
    newest = cuts_in(job)[-1].folder
    rows = {newest: rows_of(job / newest)}
    collect = ["ckpt", "gc", str(job), "--keep", "1", "--min-age-s", "0"]
    for point, _ in _points(job.parent, collect, act, every):
        assert verify(job / newest).messages == [] and rows_of(job / newest) == rows[newest]
        assert _run(collect)[0] == DONE, point
        assert [cut.folder for cut in cuts_in(job)] == [newest]
        _assert_whole(job, rows)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", ["safetensors", "parquet", "torchrec"])
def test_export(job: Path, act: str, kind: str, every: int) -> None:
    folder = job.parent.parent / "out"
    folder.mkdir()
    out = folder / "table"
    command = ["ckpt", "export", str(job), str(out), "--table", "t", "--format", kind]
    command += ["--num-embeddings", "50", "--drop-outside"] if kind == "torchrec" else []
    assert _run(command)[0] == DONE
    whole = out.read_bytes()
    out.unlink()
    for point, status in _points(folder, command, act, every):
        if status not in (DONE, KILLED):
            assert not list(folder.iterdir()), point
        if out.exists():  # whole, or not under its name
            assert out.read_bytes() == whole, point
            out.unlink()
        assert _run(command)[0] == DONE
        assert out.read_bytes() == whole
        assert list(folder.iterdir()) == [out]


@pytest.mark.parametrize("act", ACTS)
def test_import(job: Path, act: str, every: int) -> None:
    file, uri = job.parent.parent / "table", job.parent.parent / "imported"
    assert _run(["ckpt", "export", str(job), str(file), "--table", "t", "--format", "safetensors"])[0] == DONE
    uri.mkdir()
    command = ["ckpt", "import", str(file), "--format", "safetensors", "--table", "t"]
    command += ["--snapshot-uri", str(uri), "--job", "new"]
    for point, status in _points(uri, command, act, every):
        if status not in (DONE, KILLED):
            assert not [path for path in uri.rglob("*") if path.is_file()], point
        status, text = _run(command)
        assert status == DONE or "has snapshots of this job already" in text, (point, text)
        (cut,) = uri.glob("*/cut-*")
        assert is_complete(cut) and verify(cut).messages == [], point
