"""A snapshot that is damaged anywhere is refused, with the file named: cut off at every byte, a bit of every byte
flipped. The functions that read a kind of file take every byte in turn; the ways in, which are made of them, a sample,
and every byte among the slow tests.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from embedding_server.errors import FrostlineError, InvalidInput, SegmentCorrupt
from embedding_server.restore import Part, read_parts
from embedding_server.snapshot_file import ColumnReader
from embedding_server.snapshot_format import RECORD, read_shard_record
from embedding_server.snapshot_objects import take_object
from embedding_server.snapshot_rows import TableRows, open_frozen, open_hot, open_object
from tests.damage.tiny import SPECS, files_of, job_of, make_tiny
from tests.embedding_server.cut_shards import CutShards
from trainer.resume import find_snapshot, read_snapshot
from trainer.snapshot_list import open_snapshot, verify
from trainer.snapshots import read_dense_file, read_manifest, read_record

Check = Callable[[], object]
SAMPLE = 199  # bytes from one damage to the next


def _told(check: Check) -> str:
    """What it refuses; else its result."""
    try:
        return str(check())
    except (SegmentCorrupt, InvalidInput) as error:
        return str(error)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    return make_tiny(tmp_path)


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
    assert len(files) == 9
    assert sum(path.stat().st_size for path in files) < 40_000
    assert verify(cut).messages == []


# Every byte, by the functions that read each kind of file ----------------------------------------------------------


def _read_columns(open_file: Callable[[Part, int], ColumnReader], part: Part, number: int) -> None:
    with closing(open_file(part, number)) as file:
        for _ in file.verify():
            pass


def _readers(cut: Path, path: Path, scratch: Path) -> list[Check]:
    """Whatever reads this file: for ckpt verify and export, for a trainer that resumes, for a shard that restores."""
    manifest, (part,) = open_snapshot(cut)
    if path.name == "manifest.json":
        return [lambda: read_manifest(cut)]
    if path.name == "dense.safetensors":
        return [lambda: read_dense_file(cut, manifest.dense[0])]
    if path.name == RECORD:
        return [lambda: read_record(cut, manifest, 0), lambda: read_shard_record(path.parent)]
    if path.suffix == ".safetensors":
        number = int(path.name.split("-")[1])
        return [lambda: _read_columns(open_hot if "hot" in path.name else open_frozen, part, number)]
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


def test_every_byte_of_every_file_counts(cut: Path, tmp_path: Path) -> None:
    cases = 0
    for path in files_of(cut):
        checks = _readers(cut, path, tmp_path)
        for check in checks:
            check()
        for what in damages(path):
            for check in checks:
                cases += 1
                told = _told(check)
                assert str(path) in told or (path.suffix == ".segment" and "taken" in told), (what, told)
                (tmp_path / "taken").unlink(missing_ok=True)
    assert cases > 2 * sum(path.stat().st_size for path in files_of(cut))


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


def _all_ways_in(cut: Path, every: int) -> None:
    job, rows = job_of(cut.parent.parent), _export(cut)
    with CutShards(SPECS, will_restore=True) as shards:
        for path in files_of(cut):
            is_of_trainer = path.parent == cut
            for what in damages(path, every):
                messages = verify(cut).messages
                assert messages and all(path.name in message for message in messages), (what, messages)
                if not is_of_trainer:
                    with pytest.raises(FrostlineError, match=re.escape(path.name)):
                        shards.restore(cut)
                    assert all(shards.state()[spec.name]["rows"] == {} for spec in SPECS), what
                    told = _told(lambda: _export(cut) != rows)
                    assert path.name in told or told == "False", (what, told)
                if path.suffix == ".json" or is_of_trainer:
                    told = _told(lambda: read_snapshot(find_snapshot(job, "main")))
                    assert path.name in told, (what, told)
                elif what.endswith("bytes"):
                    told = _told(lambda: find_snapshot(job, "main"))
                    assert path.name in told, (what, told)
        shards.restore(cut)
        assert shards.state()["a"]["rows"]


def test_every_way_in_refuses_what_is_damaged(cut: Path) -> None:
    _all_ways_in(cut, SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_way_in_refuses_whatever_byte_is_damaged(cut: Path) -> None:
    _all_ways_in(cut, 1)


def test_a_file_that_is_missing_is_named(cut: Path, tmp_path: Path) -> None:
    for path in files_of(cut):
        path.rename(tmp_path / "aside")
        if path.name != "manifest.json":
            assert any(path.name in message for message in verify(cut).messages), path
        told = "none has a manifest" if path.name == "manifest.json" else re.escape(str(path))
        with pytest.raises((SegmentCorrupt, InvalidInput), match=told):
            find_snapshot(job_of(cut.parent.parent), "main")
        shutil.move(tmp_path / "aside", path)
    assert verify(cut).messages == []
