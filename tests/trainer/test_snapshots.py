"""Manifests, which cut is the newest, and which ones stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput, SegmentCorrupt
from embedding_server.snapshot_format import OBJECTS, read_sealed_json, segment_object, write_sealed_json
from tests.trainer.snapshot_folders import file_of, manifest_of, write_cut, write_part
from trainer.job import make_job
from trainer.resume import read_snapshot
from trainer.snapshot_gc import keep_newest
from trainer.snapshot_lock import only_training
from trainer.snapshot_search import find_snapshot, newest_epoch, newest_of_run, wait_for_end_of_training
from trainer.snapshots import (
    CutName,
    chain_of,
    check_files,
    cuts_in,
    job_folder,
    newest_complete,
    read_manifest,
    read_records,
    shard_entries,
    write_manifest,
)

DIGESTS = [f"{i:064x}" for i in range(10)]


def test_a_manifest_says_what_was_written(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1, num_shards=2)
    found = read_manifest(cut)
    assert found == manifest_of(100, 1, shards=shard_entries(cut, 2))
    assert [entry.part for entry in found.shards] == [0, 1]
    assert [record.tables[0].spec.name for record in read_records(cut, found)] == ["f", "f"]
    assert sorted(path.name for path in cut.iterdir()) == ["manifest.json", "shard-0-of-2", "shard-1-of-2"]


def test_no_byte_of_a_manifest_can_change(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1)
    path = cut / "manifest.json"
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(SegmentCorrupt, match=r"manifest\.json"):
            read_manifest(cut)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(SegmentCorrupt, match=r"manifest\.json"):
            read_manifest(cut)


def test_what_a_manifest_names_is_checked(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1)
    record = cut / "shard-0-of-1" / "shard.json"
    data = record.read_bytes()
    record.write_bytes(data.replace(b'"step":100', b'"step":101'))
    with pytest.raises(SegmentCorrupt, match=r"shard\.json.*manifest"):
        read_snapshot(cut)
    record.write_bytes(data + b" ")
    with pytest.raises(SegmentCorrupt, match=rf"shard\.json.*{len(data) + 1} bytes"):
        read_snapshot(cut)
    record.unlink()
    with pytest.raises(SegmentCorrupt, match=r"shard\.json.*cannot be read"):
        read_snapshot(cut)


def test_a_manifest_in_another_folder_is_refused(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1)
    cut.rename(tmp_path / "cut-000000000200-1")
    with pytest.raises(SegmentCorrupt, match=r"is that of cut-000000000100-1, and lies in cut-000000000200-1"):
        read_manifest(tmp_path / "cut-000000000200-1")


def test_a_manifest_that_is_a_link_is_refused(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1)
    (cut / "manifest.json").rename(tmp_path / "elsewhere")
    (cut / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SegmentCorrupt, match="symbolic link"):
        read_manifest(cut)


def test_the_newest_is_the_last_of_the_last_epoch_and_has_a_manifest(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nothing") is None
    write_cut(tmp_path, 300, 1)
    cut = write_cut(tmp_path, 100, 2)
    write_part(tmp_path / "cut-000000000200-2", 0, 1, "j", 200, 2, [])  # was not finished
    (tmp_path / "cut-000000000400-9").symlink_to(cut)
    (tmp_path / "cut-7-7").mkdir()
    assert cuts_in(tmp_path) == [CutName(1, 300), CutName(2, 100), CutName(2, 200)]
    assert newest_complete(tmp_path) == cut


def test_keeping_removes_old_cuts_of_the_run_garbage_and_unused_segments(tmp_path: Path) -> None:
    write_cut(tmp_path, 50, 1, [DIGESTS[0]], run="other")
    for number, step in enumerate((100, 200, 300), start=1):
        write_cut(tmp_path, step, 2, DIGESTS[number : number + 2])
    write_part(tmp_path / "cut-000000000250-2", 0, 1, "j", 250, 2, [DIGESTS[7]])
    assert keep_newest(tmp_path, 2, "r1", 2) == [CutName(2, 100), CutName(2, 250)]
    assert cuts_in(tmp_path) == [CutName(1, 50), CutName(2, 200), CutName(2, 300)]
    left = {path.name for path in (tmp_path / OBJECTS).iterdir()}
    assert left == {segment_object(DIGESTS[i]) for i in (0, 2, 3, 4)}
    assert keep_newest(tmp_path, 2, "r1", 2) == []


def write_chain(folder: Path, steps: tuple[int, ...], epoch: int = 1, **changes) -> list[Path]:
    """A full cut and deltas on it."""
    cuts: list[Path] = []
    for sequence, step in enumerate(steps):
        cut = folder / CutName(epoch, step).folder
        write_part(cut, 0, 1, "j", step, epoch, [DIGESTS[sequence]], cuts[-1] if cuts else None)
        parent = None
        if cuts:
            parent = file_of(cuts[-1] / "manifest.json") | {"step": steps[sequence - 1], "epoch": epoch}
        shards = shard_entries(cut, 1)
        write_manifest(cut, manifest_of(step, epoch, shards=shards, parent=parent, sequence=sequence, **changes))
        cuts.append(cut)
    return cuts


def test_keeping_leaves_what_a_kept_cut_is_a_delta_of(tmp_path: Path) -> None:
    write_chain(tmp_path, (100, 200, 300))
    write_chain(tmp_path, (400, 500))
    assert keep_newest(tmp_path, 3, "r1", 1) == []
    assert keep_newest(tmp_path, 2, "r1", 1) == [CutName(1, 100), CutName(1, 200), CutName(1, 300)]
    left = {path.name for path in (tmp_path / OBJECTS).iterdir()}
    assert left == {segment_object(DIGESTS[i]) for i in (0, 1)}
    assert keep_newest(tmp_path, 1, "r1", 1) == []


def test_nothing_goes_while_it_cannot_be_told_what_a_kept_cut_needs(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, (100, 200, 300))
    (chain[1] / "manifest.json").write_text("{}")
    assert keep_newest(tmp_path, 1, "r1", 1) == []
    assert all(cut.is_dir() for cut in chain)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["manifest.json", "shard-0-of-1/shard.json", "shard-0-of-1/table-0-hot.safetensors"])
def test_a_chain_that_lacks_a_file_is_refused_and_the_file_named(tmp_path: Path, which: int, name: str) -> None:
    job = make_job({"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path)}})
    chain = write_chain(job_folder(tmp_path, "j"), (100, 200, 300))
    assert find_snapshot(job, "main") == chain[2]
    (chain[which] / name).rename(tmp_path / "away")
    with pytest.raises(SegmentCorrupt, match=rf"{chain[which] / name}.*move {chain[2]} away"):
        find_snapshot(job, "main")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"step": 300}, "earlier step than 300"),
        ({"step": 400}, "earlier step than 300"),
        ({"epoch": 2}, "of epoch 1"),
        ({"crc32": 1}, "is not the one that it was"),
    ],
)
def test_a_manifest_whose_parent_cannot_be_is_refused(tmp_path: Path, change, what: str) -> None:
    """A circle among others."""
    chain = write_chain(tmp_path, (100, 200, 300))
    content = read_sealed_json(chain[2] / "manifest.json")
    write_sealed_json(chain[2] / "manifest.json", content | {"parent": content["parent"] | change})
    with pytest.raises(SegmentCorrupt, match=what):
        check_files(chain[2])


def test_a_chain_of_another_job_is_none(tmp_path: Path) -> None:
    chain = write_chain(tmp_path, (100, 200))
    for changes in ({"job": "k"}, {"arm": "topk"}, {"sequence": 2}):
        content = read_sealed_json(chain[1] / "manifest.json")
        write_sealed_json(chain[1] / "manifest.json", content | changes)
        with pytest.raises(SegmentCorrupt, match="job, arm, sequence or number of shards"):
            list(chain_of(chain[1]))
        write_sealed_json(chain[1] / "manifest.json", content)
    content = read_sealed_json(chain[1] / "manifest.json")
    write_sealed_json(chain[1] / "manifest.json", content | {"parent": None, "sequence": 0})
    with pytest.raises(SegmentCorrupt, match=r"shard\.json: is a delta of another cut than its manifest"):
        check_files(chain[1])


def test_what_a_later_epoch_is_writing_stays_and_so_do_its_segments(tmp_path: Path) -> None:
    write_cut(tmp_path, 100, 1)
    cut = tmp_path / "cut-000000000200-2"
    write_part(cut, 0, 1, "j", 200, 2, [DIGESTS[5]])
    assert keep_newest(tmp_path, 1, "r1", 1) == []
    assert cut.is_dir()
    assert (tmp_path / OBJECTS / segment_object(DIGESTS[5])).exists()


def test_a_damaged_cut_stays_and_so_do_all_segments(tmp_path: Path) -> None:
    cut = write_cut(tmp_path, 100, 1, [DIGESTS[0]])
    (cut / "manifest.json").write_text("{}")
    write_cut(tmp_path, 200, 1)
    write_cut(tmp_path, 300, 1)
    assert keep_newest(tmp_path, 1, "r1", 1) == [CutName(1, 200)]
    assert cut.is_dir()
    assert os.listdir(tmp_path / OBJECTS) == [segment_object(DIGESTS[0])]


def test_jobs_and_arms_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {job_folder(tmp_path, "a.b"), job_folder(tmp_path, "a_b"), job_folder(tmp_path, "a.b", "topk")}
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {tmp_path}
    assert all(set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for folder in folders)


def test_where_there_is_no_snapshot_the_folder_is_named(tmp_path: Path) -> None:
    raw = {"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path)}}
    folder = job_folder(tmp_path, "j")
    with pytest.raises(InvalidInput, match=rf"{folder}: no complete snapshot .*no cut there.*--resume"):
        find_snapshot(make_job(raw), "main")
    write_part(folder / "cut-000000000200-2", 0, 1, "j", 200, 2, [])
    with pytest.raises(InvalidInput, match=rf"{folder}: .*1 cuts there, and none has a manifest"):
        find_snapshot(make_job(raw), "main")
    with pytest.raises(InvalidInput, match="no section `snapshots`"):
        find_snapshot(make_job({**raw, "snapshots": None}), "main")


def test_where_the_newest_snapshot_lacks_a_file_the_one_before_is_named(tmp_path: Path) -> None:
    job = make_job({"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path)}})
    before, newest = (write_cut(job_folder(tmp_path, "j"), step, 1) for step in (100, 200))
    assert find_snapshot(job, "main") == newest
    lost = newest / "shard-0-of-1" / "table-0-hot.safetensors"
    lost.unlink()
    with pytest.raises(SegmentCorrupt, match=rf"{lost}.*move {newest} away: --resume then goes on from {before}"):
        find_snapshot(job, "main")
    (before / "manifest.json").unlink()
    with pytest.raises(SegmentCorrupt, match=rf"move {newest} away: there is no other"):
        find_snapshot(job, "main")


def test_a_section_that_would_never_take_a_cut_is_refused(tmp_path: Path) -> None:
    raw = {"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path), "on_finish": False}}
    with pytest.raises(InvalidInput, match=r"snapshots: every_samples is not given.*set every_samples"):
        make_job(raw)
    assert json.loads(make_job({**raw, "snapshots": {"uri": str(tmp_path)}}).model_dump_json())["snapshots"] == {
        "uri": str(tmp_path),
        "every_samples": None,
        "keep": 2,
        "max_deltas": 7,
        "on_finish": True,
    }


def test_a_run_goes_back_to_its_own_cuts_alone(tmp_path: Path) -> None:
    job = make_job({"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path)}})
    folder = job_folder(tmp_path, "j")
    assert (newest_epoch(job, "main"), newest_of_run(job, "main", 0, None)) == (0, None)
    former = write_cut(folder, 500, 3)
    assert newest_epoch(job, "main") == 3
    assert newest_of_run(job, "main", 3, None) is None
    assert newest_of_run(job, "main", 3, former) == former  # it was resumed from it
    write_part(folder / "cut-000000000200-5", 0, 1, "j", 200, 5, [])  # has no manifest
    assert newest_of_run(job, "main", 3, None) is None
    own = write_cut(folder, 100, 4)
    assert newest_of_run(job, "main", 3, former) == own
    (own / "shard-0-of-1" / "table-0-hot.safetensors").unlink()
    with pytest.raises(SegmentCorrupt, match=rf"{own}.*then goes on from {former}"):
        newest_of_run(job, "main", 3, former)


def test_a_training_that_still_runs_is_waited_for_and_named(tmp_path: Path) -> None:
    job = make_job({"name": "j", "data": {"reader": "synthetic"}, "snapshots": {"uri": str(tmp_path)}})
    wait_for_end_of_training(job, "main")  # there is not even a folder
    folder = job_folder(tmp_path, "j")
    folder.mkdir()
    wait_for_end_of_training(job, "main")
    with (
        only_training(folder),
        pytest.raises(InvalidInput, match=rf"{folder}: another training takes snapshots there"),
    ):
        wait_for_end_of_training(job, "main", timeout_s=0.1)
    wait_for_end_of_training(job, "main", timeout_s=0.1)
