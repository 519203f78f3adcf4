"""`frostline ckpt gc --erase`: no file of a job's folder has a byte of the rows then, and every snapshot is sound."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.segment_erasure import ErasedIds
from embedding_server.snapshot_format import OBJECTS, ParentRecord
from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rows import TableRows
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity, RoutedIds, TableGradients
from services.cli import app
from tests.embedding_server.test_erasure import DIM, ids_of, traces, values_of
from tests.trainer.test_snapshots import manifest_of
from trainer import snapshot_erase
from trainer.row_id_files import read_erasures
from trainer.snapshot_erase import check_erased_tables, collect_and_erase
from trainer.snapshot_list import verify
from trainer.snapshots import CutName, cuts_in, job_folder, read_manifest, shard_entries, write_manifest

SPECS = [
    TableSpec(
        name=name,
        dim=DIM,
        optimizer=OptimizerSpec(kind="sgd"),
        policy=PolicySpec(kind="idle", idle_steps=2, frozen_bits=32, control_fraction=0.0, min_count=min_count),
        init_min=0,
        init_max=0,
    )
    for name, min_count in (("t", 1), ("rare", 2))
]
FROZEN, HOT, LATER = ids_of(400), ids_of(50, 10_000), ids_of(20, 20_000)
GONE = np.concatenate([FROZEN[::40], HOT[::10], LATER[:2]])


class Writer:
    """Trains, and takes cuts, full ones or deltas of the last."""

    def __init__(self, uri: Path) -> None:
        self.folder, self.step, self.parent = job_folder(uri, "job"), 0, None
        self.store = InprocStore(memory_limit_bytes=64 << 20)
        self.store.create_tables(SPECS)
        self.who = Identity("job", self.store.begin_epoch("job", 1, "sync").epoch, 0)

    def train(self, row_ids: np.ndarray) -> None:
        self.step += 1
        ids = RoutedIds(row_ids, np.array([0, row_ids.shape[0]]))
        found = self.store.pull(self.who, self.step, {"t": ids, "rare": ids})["t"]
        new = (found.values == 0).all(axis=1)
        trained = RoutedIds(row_ids[new], np.array([0, int(new.sum())]))
        self.store.push(self.who, self.step, {"t": TableGradients(trained, -values_of(row_ids[new]), 1.0)})

    def cut(self, *, is_delta: bool = False) -> Path:
        cut = self.folder / CutName(self.who.epoch, self.step).folder
        cut.mkdir(parents=True)
        parent = self.parent if is_delta else None
        self.store.begin_cut(self.who, self.step, str(cut), str(parent[0]) if parent else None)
        while not all(part.is_done for part in self.store.cut_progress(self.who)):
            time.sleep(0.005)
        assert not any(part.error for part in self.store.cut_progress(self.who))
        entry, sequence = (parent[1], parent[2] + 1) if parent else (None, 0)
        manifest = manifest_of(
            self.step, self.who.epoch, job="job", num_workers=1, shards=shard_entries(cut, 1), parent=entry,
            sequence=sequence,
        )  # fmt: skip
        written: ParentRecord = write_manifest(cut, manifest)
        self.parent = cut, written, sequence
        return cut


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A full cut with rows that are frozen, hot and waiting, and two deltas of it."""
    writer = Writer(tmp_path / "uri")
    writer.train(FROZEN)
    writer.train(HOT)
    writer.train(HOT)
    writer.store.reselect(writer.who, 3, {})
    writer.cut()
    writer.train(LATER)
    writer.cut(is_delta=True)
    writer.train(HOT)
    writer.cut(is_delta=True)
    writer.store.close()
    return writer.folder


def erased(row_ids: np.ndarray = GONE) -> dict[str, ErasedIds]:
    sets = {}
    for table in ("t", "rare"):
        sets[table] = ErasedIds()
        sets[table].add(row_ids)
    return sets


def rows_of(cut: Path) -> dict[int, bytes]:
    with TableRows(read_parts(cut), "t") as rows:
        return {
            row_id: values.tobytes()
            for chunk in rows.chunks()
            for row_id, values in zip(chunk.row_ids.tolist(), chunk.weights, strict=True)
        }


def assert_erased(folder: Path, before: dict[str, dict[int, bytes]]) -> None:
    assert traces(GONE, folder) == []
    gone = set(GONE.tolist())
    for name in cuts_in(folder):
        cut = folder / name.folder
        assert verify(cut).messages == []
        assert rows_of(cut) == {i: values for i, values in before[name.folder].items() if i not in gone}
    assert not [path for path in folder.iterdir() if path.name.startswith("eras")]


def all_rows(folder: Path) -> dict[str, dict[int, bytes]]:
    return {name.folder: rows_of(folder / name.folder) for name in cuts_in(folder)}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_no_byte_of_the_rows_is_left(folder: Path, keep: int) -> None:
    before = all_rows(folder)
    assert {row_id for _, row_id in traces(GONE, folder)} == set(GONE.tolist())
    removal = collect_and_erase(folder, keep, 0.0, erased())
    names = [name.folder for name in cuts_in(folder)]
    assert names == sorted(before)[-keep:]
    assert sorted(removal.rewritten) == names
    assert sorted(removal.removed) == sorted(before)[:-keep]
    assert removal.unerased == []
    assert_erased(folder, before)
    assert all(read_manifest(folder / name).parent is None for name in names)
    again = collect_and_erase(folder, keep, 0.0, erased())
    assert (again.rewritten, again.removed, again.objects) == ([], [], 0)


def test_a_restore_of_what_was_written_anew_goes_on_without_the_rows(folder: Path) -> None:
    collect_and_erase(folder, 1, 0.0, erased())
    (name,) = cuts_in(folder)
    store = InprocStore(memory_limit_bytes=64 << 20)
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 1, "sync", epoch=9, will_restore=True).epoch, 0)
    store.restore(who, str(folder / name.folder))
    left = np.setdiff1d(np.concatenate([FROZEN, HOT, LATER]), GONE)
    rows = store.lookup({"t": RoutedIds(left, np.array([0, left.shape[0]]))})["t"]
    assert np.array_equal(rows.values, values_of(left))
    stats = store.stats().tables["t"]
    assert stats.rows_hot + stats.rows_frozen == left.shape[0]
    store.close()


def test_snapshots_without_the_rows_stay_as_they_are(folder: Path) -> None:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    removal = collect_and_erase(folder, 3, 0.0, erased(ids_of(5, 90_000)))
    assert removal.rewritten == []
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_a_dry_run_says_what_would_be_and_changes_nothing(folder: Path) -> None:
    files = sorted(folder.rglob("*"))
    removal = collect_and_erase(folder, 2, 0.0, erased(), dry_run=True)
    assert len(removal.rewritten) == 2
    assert [path for path in sorted(folder.rglob("*")) if path.suffix != ".lock"] == files


@pytest.mark.parametrize("can_exchange", [True, False])
def test_whenever_it_ends_every_snapshot_is_whole_and_the_next_one_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """A crash before each rename, unlink, link and removal of a folder that the erasure makes."""
    before = all_rows(folder)
    if not can_exchange:
        monkeypatch.setattr(snapshot_erase._libc, "renameat2", lambda *_: -1)
    point, done = 0, False
    while not done:
        copy = tmp_path / f"copy-{point}" / folder.name
        shutil.copytree(folder, copy)
        with monkeypatch.context() as patched:
            calls = _crash_at(patched, point)
            try:
                collect_and_erase(copy, 3, 0.0, erased())
                done = True
            except _Crash:
                pass
        assert calls[0] >= point
        gone = set(GONE.tolist())
        for name in cuts_in(copy):
            cut = copy / name.folder
            if (cut / "manifest.json").exists():
                assert verify(cut).messages == []
                rows = before[name.folder]
                assert rows_of(cut) in (rows, {i: v for i, v in rows.items() if i not in gone})
        collect_and_erase(copy, 3, 0.0, erased())
        assert len(cuts_in(copy)) == 3
        assert_erased(copy, before)
        shutil.rmtree(copy)
        point += 1
    assert point > 10


class _Crash(BaseException):
    """The process ends here."""


def _crash_at(patched: pytest.MonkeyPatch, point: int) -> list[int]:
    """From the point-th change of names on nothing happens any more; counts them."""
    calls = [0]

    def wrap(real):
        def call(*args, **kwargs):
            if calls[0] >= point:
                raise _Crash
            calls[0] += 1
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (os, "unlink"), (os, "link"), (shutil, "rmtree"), (Path, "unlink")):
        patched.setattr(module, name, wrap(getattr(module, name)))
    patched.setattr(snapshot_erase, "_exchange", wrap(snapshot_erase._exchange))
    return calls


def test_a_damaged_snapshot_is_told_of(folder: Path) -> None:
    newest = folder / cuts_in(folder)[-1].folder
    path = newest / "shard-0-of-1" / "table-0-frozen.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    removal = collect_and_erase(folder, 1, 0.0, erased())
    assert removal.rewritten == []
    assert len(removal.unerased) == 3  # it, and what it is a delta of
    assert any("damaged" in text for text in removal.unerased)
    damaged_segment = next((folder / OBJECTS).glob("*.segment"))
    assert damaged_segment.exists()


def test_what_may_still_be_written_is_told_of(folder: Path) -> None:
    unfinished = folder / CutName(1, 77).folder
    unfinished.mkdir()
    (unfinished / "x").write_text("x")
    removal = collect_and_erase(folder, 3, 3600.0, erased())
    assert len(removal.rewritten) == 3
    assert removal.unerased == [f"{unfinished.name}: {removal.notes[0]}"]
    assert "may still be written" in removal.notes[0]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    before = all_rows(folder)
    (tmp_path / "gone.txt").write_text("\n".join(map(str, GONE.tolist())) + "\n\n")
    np.save(tmp_path / "gone.npy", GONE)
    arguments = ["ckpt", "gc", str(folder.parent), "--keep", "2", "--min-age-s", "0", "--json"]
    erase = ["--erase", f"t:{tmp_path / 'gone.txt'}", "--erase", f"rare:{tmp_path / 'gone.npy'}"]
    result = CliRunner().invoke(app, [*arguments, *erase])
    assert result.exit_code == 0, result.output
    (job,) = json.loads(result.stdout.splitlines()[-1])["jobs"]
    assert len(job["rewritten"]) == 2
    assert "written anew without the erased rows" in result.stderr
    assert_erased(folder, before)
    result = CliRunner().invoke(app, [*arguments, "--erase", "t"])
    assert result.exit_code == 2
    assert "write TABLE:FILE" in result.stderr
    result = CliRunner().invoke(app, [*arguments, *erase])
    assert result.exit_code == 0
    assert "no snapshot that stays there holds any of the rows" in result.stderr


def test_where_a_snapshot_cannot_be_read_a_table_is_not_called_unknown(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="has a table 'tt' .tables: rare, t"):
        check_erased_tables(folder.parent, [folder], {"tt": ErasedIds()})
    built = folder / "erasing-x"  # as an erasure that was interrupted leaves one
    built.mkdir()
    check_erased_tables(folder.parent, [folder], {"tt": ErasedIds()})
    built.rmdir()
    (folder / cuts_in(folder)[0].folder / "manifest.json").write_text("{}")
    check_erased_tables(folder.parent, [folder], {"tt": ErasedIds()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n2.5\n", "line 2: '2.5' is no row_id"),
        ("9223372036854775808", "line 1"),
        ("1_0", "line 1"),
        ("-\n", "line 1"),
    ],
)
def test_files_that_are_no_row_ids(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        read_erasures([f"t:{path}"])


def test_files_of_row_ids(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n\n -9223372036854775808 \r\n1\n9223372036854775807")
    np.save(tmp_path / "b.npy", np.array([5, 6]))
    found = read_erasures([f"t:{tmp_path / 'a'}", f"t:{tmp_path / 'b.npy'}", f"u:{tmp_path / 'b.npy'}"])
    assert (len(found["t"]), len(found["u"])) == (5, 2)
    assert found["t"].hold(np.array([1, -(2**63), 2**63 - 1, 5, 6, 7])).tolist() == [True] * 5 + [False]
    np.save(tmp_path / "c.npy", np.array([0.5]))
    with pytest.raises(InvalidInput, match=r"has float64\[1\]"):
        read_erasures([f"t:{tmp_path / 'c.npy'}"])
    np.save(tmp_path / "d.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InvalidInput, match="no NumPy file of numbers"):
        read_erasures([f"t:{tmp_path / 'd.npy'}"])
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_erasures([f"t:{tmp_path / 'none'}"])
