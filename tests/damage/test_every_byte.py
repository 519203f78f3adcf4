"""A snapshot that is damaged anywhere is refused, with the file named: cut off at every byte, a bit of every byte
flipped. The functions that read a kind of file take every byte in turn; the ways in, which are made of them, a sample,
and every byte among the slow tests.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput, SegmentCorrupt
from embedding_server.snapshot_format import RECORD
from embedding_server.snapshot_hot import HotRowsFile
from embedding_server.snapshot_objects import take_object
from embedding_server.snapshot_parts import Part, read_parts
from embedding_server.snapshot_rows import TableRows, open_frozen, open_object
from tests.damage.prepared import once
from tests.damage.tiny import SPECS, files_of, job_of, make_tiny
from tests.embedding_server.cut_shards import CutShards, State
from tests.embedding_server.table_state import rows_of
from trainer.resume import read_snapshot
from trainer.snapshot_list import open_snapshot, verify
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import chain_of, read_dense_file, read_manifest, read_records

Check = Callable[[], object]
SAMPLE = 199  # bytes from one damage to the next


def _told(check: Check) -> str:
    """What it refuses; else its result."""
    try:
        return str(check())
    except (SegmentCorrupt, InvalidInput) as error:
        return str(error)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory where that can be: a file of a shard that restores is made and deleted for each byte."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="frostline-damage-", dir=where) as path:
        monkeypatch.setattr(tempfile, "tempdir", path)  # shards have their data there, so that segments are linked
        yield Path(path)


@pytest.fixture(params=["full", "delta"])
def cut(folder: Path, request: pytest.FixtureRequest) -> Path:
    return make_tiny(folder, is_delta=request.param == "delta")


def damages(path: Path, every: int = 1) -> Iterator[str]:
    """Damages a file in each way in turn, says what it did, and repairs it at the end."""
    good = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for at in range(0, len(good), every):
            os.pwrite(file.fileno(), bytes([good[at] ^ 1 << at % 8]), at)
            yield f"{path.name}: bit {at % 8} of byte {at} flipped"
            os.pwrite(file.fileno(), good[at : at + 1], at)
        for length in range(0, len(good), every):
            file.truncate(length)
            yield f"{path.name}: cut off at {length} bytes"
            os.pwrite(file.fileno(), good[length:], length)
        os.pwrite(file.fileno(), b"\0", len(good))
        yield f"{path.name}: a byte more"
        file.truncate(len(good))
    assert path.read_bytes() == good


def test_there_is_a_byte_of_everything(cut: Path) -> None:
    (part,) = read_parts(cut)
    a, b = part.record.tables
    assert min(a.rows_hot, b.rows_hot, b.rows_initial, b.rows_waiting, len(a.segments), len(b.segments)) > 0
    assert a.decay_steps > 0
    files = files_of(cut)
    assert len(files) == (9 if part.parent is None else 13)
    assert _size(cut) < 70_000
    if part.parent is not None:
        assert 0 < a.rows_written < a.rows_hot and 0 < b.rows_written < b.rows_hot
    assert verify(cut).messages == []


# Every byte, by the functions that read each kind of file ----------------------------------------------------------


def _read_hot(part: Part, number: int) -> None:
    """As a restore, through the chain; and the columns that it does not use."""
    with closing(HotRowsFile(part, number)) as file:
        list(file.chunks(1 << 16))
        list(file.verify())


def _read_frozen(part: Part, number: int) -> None:
    with closing(open_frozen(part, number)) as file:
        list(file.verify())


def _readers(cut: Path, path: Path, scratch: Path) -> list[Check]:
    """Whatever reads this file: for ckpt verify and export, for a trainer that resumes, for a shard that restores."""
    manifest, (part,) = open_snapshot(cut)
    if path.name == "manifest.json":
        return [lambda: list(chain_of(cut))]
    if path.name == "dense.safetensors":
        return [lambda: read_dense_file(cut, manifest.dense[0])]
    if path.name == RECORD:
        own = path.parent.parent
        return [lambda: read_records(own, read_manifest(own)), lambda: read_parts(cut)]
    if path.suffix == ".safetensors":
        number = int(path.name.split("-")[1])
        return [lambda: (_read_hot if "hot" in path.name else _read_frozen)(part, number)]
    (segment, spec), *_ = [
        (segment, table.spec)
        for table in part.record.tables
        for segment in table.segments
        if segment.digest == path.stem
    ]

    def take() -> None:
        with closing(take_object(part.objects, segment, scratch / "taken")) as mapped:
            list(mapped.check_all())
        (scratch / "taken").unlink()

    def open_here() -> None:
        with closing(open_object(part.objects, segment, spec)) as mapped:
            list(mapped.check_all())

    return [take, open_here]


def _every_byte_counts(cut: Path, scratch: Path, every: int) -> int:
    """Cases."""
    cases = 0
    with once():
        for path in files_of(cut):
            checks = _readers(cut, path, scratch)
            for check in checks:
                check()
            for what in damages(path, every):
                for check in checks:
                    cases += 1
                    told = _told(check)
                    assert str(path) in told or (path.suffix == ".segment" and "taken" in told), (what, told)
                    (scratch / "taken").unlink(missing_ok=True)
    return cases


def _size(cut: Path) -> int:
    return sum(path.stat().st_size for path in files_of(cut))


def test_every_byte_of_every_file_counts(cut: Path, folder: Path) -> None:
    every = 1 if read_parts(cut)[0].parent is None else 7
    assert _every_byte_counts(cut, folder, every) > 2 * _size(cut) // every


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_byte_of_a_chain_counts(folder: Path) -> None:
    cut = make_tiny(folder, is_delta=True)
    assert _every_byte_counts(cut, folder, 1) > 2 * _size(cut)


# The ways in ----------------------------------------------------------------------------------------------------------


def _export(cut: Path) -> list[bytes]:
    """What `ckpt export` would write. It does not read heat and other columns that it has no use for."""
    _, parts = open_snapshot(cut)
    found = []
    for spec in SPECS:
        with TableRows(parts, spec.name) as rows:
            for chunk in rows.chunks():
                found += [chunk.row_ids.tobytes(), chunk.weights.tobytes(), chunk.state.tobytes()]
    return found


def _restored(shards: CutShards, cut: Path, right: State) -> State:
    """The state after a restore, which may not have come to its end; shards are ready for another afterwards."""
    try:
        shards.restore(cut)
        return shards.state()
    except (SegmentCorrupt, InvalidInput):
        found = [rows_of(table) for spec in SPECS for table in shards.tables(spec.name)]
        assert found in ([{}, {}], [right[spec.name]["rows"] for spec in SPECS])  # refused before anything was touched
        raise
    finally:
        shards.begin(shards.epoch + 1, will_restore=True)


def _all_ways_in(cut: Path, every: int) -> int:
    """Cases. Of a parent's hot file a delta needs some rows alone: damage of others is verify's to find."""
    job, cases = job_of(cut.parent.parent), 0
    with once(), CutShards(SPECS, will_restore=True) as shards:
        rows, right = _export(cut), _restored(shards, cut, {})
        for path in files_of(cut):
            is_of_trainer = path.name in ("manifest.json", "dense.safetensors")
            is_of_parent = cut not in path.parents and path.suffix == ".safetensors"
            for what in damages(path, every):
                cases += 1
                messages = verify(cut).messages
                assert messages and all(path.name in message for message in messages), (what, messages)
                if not is_of_trainer:
                    told = _told(lambda: _restored(shards, cut, right) != right)
                    assert path.name in told or (is_of_parent and told == "False"), (what, told)
                    told = _told(lambda: _export(cut) != rows)
                    assert path.name in told or told == "False", (what, told)
                if path.suffix == ".json" or is_of_trainer:
                    told = _told(lambda: read_snapshot(find_snapshot(job, "main")))
                    assert path.name in told, (what, told)
                elif what.endswith("bytes"):
                    told = _told(lambda: find_snapshot(job, "main"))
                    assert path.name in told, (what, told)
        assert _restored(shards, cut, right) == right
    return cases


def test_every_way_in_refuses_what_is_damaged(cut: Path) -> None:
    assert _all_ways_in(cut, SAMPLE) > 2 * _size(cut) // SAMPLE


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_way_in_refuses_whatever_byte_is_damaged(cut: Path) -> None:
    every = 1 if read_parts(cut)[0].parent is None else 5
    cases = _all_ways_in(cut, every)
    print(f"{_size(cut)} bytes, every {every}: {cases} damages")
    assert cases > 2 * _size(cut) // every


def test_a_file_that_is_missing_is_named(cut: Path, folder: Path) -> None:
    for path in files_of(cut):
        path.rename(folder / "aside")
        if path.name != "manifest.json":
            assert any(path.name in message for message in verify(cut).messages), path
        told = "none has a manifest|cut-000000000007-1$" if path == cut / "manifest.json" else re.escape(str(path))
        found = _told(lambda: find_snapshot(job_of(cut.parent.parent), "main"))
        assert re.search(told, found), (path, found)
        shutil.move(folder / "aside", path)
    assert verify(cut).messages == []
