"""`ckpt ls`, `verify` and `gc` as a library: what they say of whole, damaged, unfinished and hostile snapshots."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from isal.isal_zlib import crc32

from embedding_server import snapshot_rewrite
from embedding_server.errors import FrostlineError, InvalidInput, SegmentCorrupt
from embedding_server.inproc import InprocStore
from embedding_server.segment_file import SegmentArrays, SegmentFormat, write_segment
from embedding_server.segment_reader import open_segment
from embedding_server.snapshot_check import Findings, check_part
from embedding_server.snapshot_format import (
    MANIFEST,
    OBJECTS,
    part_folder,
    read_sealed_json,
    segment_object,
    write_sealed_json,
)
from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rows import TableRows
from embedding_server.store import FOUND, Identity
from tests.trainer.test_resume import job_of, run
from tests.trainer.test_snapshots import write_chain, write_cut
from tests.trainer.trained_snapshots import EVERY_ID, SPECS, make_snapshot, objects_in
from trainer import snapshot_gc
from trainer.snapshot_compact import compact
from trainer.snapshot_gc import collect
from trainer.snapshot_list import find_cut, list_jobs, open_snapshot, verify
from trainer.snapshot_lock import alone_in, in_use
from trainer.snapshots import CutName, ShardEntry, job_folder, read_manifest, write_manifest


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return make_snapshot(tmp_path_factory.mktemp("snapshots"))[0]


@pytest.fixture
def cut(trained, tmp_path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(trained.parent, tmp_path / "job")
    return tmp_path / "job" / trained.name


def files_of(cut: Path) -> list[Path]:
    return sorted(path for path in cut.rglob("*") if path.is_file()) + objects_in(cut)


# verify -----------------------------------------------------------------------------------------------------------


def test_a_whole_snapshot_is_sound_and_every_byte_is_read(trained):
    findings = verify(trained)
    assert findings.messages == []
    (job,) = list_jobs(trained.parent.parent)
    (snapshot,) = job.snapshots
    assert (findings.rows_hot, findings.rows_frozen) == (snapshot.rows_hot, snapshot.rows_frozen)
    assert findings.rows_hot > 100 and findings.rows_frozen > 100
    json_bytes = sum(path.stat().st_size for path in trained.rglob("*.json"))
    every_byte = sum(path.stat().st_size for path in files_of(trained)) - json_bytes
    assert 0.8 * every_byte < findings.bytes_read <= every_byte  # headers and CRCs of column files are not counted


def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(cut):
    rng = np.random.default_rng(0)
    for path in files_of(cut):
        good = path.read_bytes()
        for at in [0, len(good) - 1, *rng.integers(0, len(good), 8).tolist()]:
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            messages = verify(cut).messages
            assert messages and any(path.name in message for message in messages), (path, at, messages)
        path.write_bytes(good)
    assert verify(cut).messages == []


def test_a_file_that_was_cut_off_or_is_missing_is_found(cut):
    for path in files_of(cut):
        good = path.read_bytes()
        for length in (0, 7, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:length])
            assert any(path.name in message for message in verify(cut).messages), (path, length)
        path.unlink()
        if path.name == MANIFEST:
            with pytest.raises(InvalidInput, match=r"has no manifest\.json"):
                verify(cut)
        else:
            assert any(path.name in message for message in verify(cut).messages), path
        path.write_bytes(good)


def test_all_damaged_files_are_named_at_once(cut):
    damaged = [path for path in files_of(cut) if path.suffix != ".json"]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    messages = verify(cut).messages
    assert all(any(path.name in message for message in messages) for path in damaged)


def rewrite(cut: Path, table: int, change) -> None:
    """Has `change` alter the shard record, and makes all checksums right again."""
    folder = cut / part_folder(0, 1)
    record = read_sealed_json(folder / "shard.json")
    change(record["tables"][table], record)
    write_sealed_json(folder / "shard.json", record)
    data = (folder / "shard.json").read_bytes()
    entry = ShardEntry(part=0, size_bytes=len(data), crc32=crc32(data))  # shard_entries would refuse some of these
    write_manifest(cut, read_manifest(cut).model_copy(update={"shards": [entry]}))


def test_numbers_that_do_not_agree_are_found_though_all_checksums_do(cut):
    def fewer_rows(table, _record):
        table["rows_hot"] -= 1
        table["rows_written"] -= 1

    rewrite(cut, 0, fewer_rows)
    (message,) = verify(cut).messages
    assert "table-0-hot.safetensors" in message and "its columns take" in message


def test_rows_in_buckets_of_another_shard_are_found(cut):
    def own_less(_table, record):
        record["buckets"] = "7" + record["buckets"][1:]

    rewrite(cut, 0, own_less)
    messages = verify(cut).messages
    assert any("bucket 0 is owned by 0 of its parts" in message for message in messages)


def test_a_misplaced_row_of_a_segment_is_found_though_its_checksums_are_right(cut):
    number = next(i for i, table in enumerate(read_parts(cut)[0].record.tables) if table.segments)
    record = read_parts(cut)[0].record.tables[number].segments[0]
    path = cut.parent / OBJECTS / f"{record.digest}.segment"
    segment = open_segment(path)
    row_ids = segment.arrays.row_ids.copy()
    row_ids[0] += 1
    arrays = segment.arrays
    fmt: SegmentFormat = segment.format
    changed = SegmentArrays(
        row_ids, arrays.bucket_offsets.copy(), arrays.rows.copy(), arrays.accumulators.copy(), arrays.visits.copy()
    )
    frozen_step = segment.frozen_step
    segment.close()
    write_segment(path, fmt, frozen_step, changed)
    messages = verify(cut).messages
    assert any(path.name in message and "digest" in message for message in messages)


def test_a_row_that_occurs_twice_is_found(trained):
    """The check is given the first row of each table once more: no writer of ours makes such a file."""
    part = read_parts(trained)[0]
    findings = Findings()
    check_part(part, findings)
    assert findings.messages == []
    from embedding_server import snapshot_check

    ids = snapshot_check._TableCheck._ids

    def twice(self, *arguments):
        found = list(ids(self, *arguments))
        yield from found
        yield found[0][:1]

    try:
        snapshot_check._TableCheck._ids = twice
        check_part(part, findings)
    finally:
        snapshot_check._TableCheck._ids = ids
    assert len(findings.messages) == len(SPECS) and all("occurs twice" in message for message in findings.messages)


HOSTILE = {
    "pickle as manifest": lambda cut: (cut / MANIFEST).write_bytes(pickle.dumps({"step": 12})),
    "pickle as a column file": lambda cut: hot(cut).write_bytes(pickle.dumps([1] * 1000)),
    "header of 2^63": lambda cut: hot(cut).write_bytes((2**63).to_bytes(8, "little") + b"{}" * 100),
    "manifest of zeros": lambda cut: (cut / MANIFEST).write_bytes(bytes(1 << 20)),
    "manifest of 17 MiB": lambda cut: (cut / MANIFEST).write_bytes(b"[" * (17 << 20)),
    "deep manifest": lambda cut: seal(cut / MANIFEST, b"[" * 100_000),
    "manifest of many values": lambda cut: seal(cut / MANIFEST, b'{"a":[' + b"1," * (1 << 20) + b"1]}"),
    "absolute path for a digest": lambda cut: rewrite(
        cut, 1, lambda t, r: t["segments"][0].update(digest="/etc/passwd")
    ),
    "dots for a digest": lambda cut: rewrite(cut, 1, lambda t, r: t["segments"][0].update(digest="../" * 20 + "aaaa")),
    "rows beyond all bounds": lambda cut: rewrite(cut, 0, lambda t, r: t.update(rows_hot=2**30)),
    "waiting IDs beyond all bounds": lambda cut: rewrite(cut, 0, lambda t, r: t.update(rows_waiting=2**39)),
    "negative rows": lambda cut: rewrite(cut, 0, lambda t, r: t.update(rows_hot=-1)),
    "dim of 2^40": lambda cut: rewrite(cut, 0, lambda t, r: t["spec"].update(dim=2**40)),
    "NaN": lambda cut: seal(cut / MANIFEST, b'{"step":NaN}'),
    "a key twice": lambda cut: seal(cut / MANIFEST, b'{"step":1,"step":2}'),
    "unknown keys": lambda cut: rewrite(cut, 0, lambda t, r: r.update(code="import os")),
    "a table twice": lambda cut: rewrite(cut, 0, lambda t, r: r["tables"].append(r["tables"][0])),
    "link for the manifest": lambda cut: link(cut / MANIFEST),
    "link for a column file": lambda cut: link(hot(cut)),
    "link for a segment": lambda cut: link(objects_in(cut)[0]),
    "link for the objects": lambda cut: link(cut.parent / OBJECTS),
    "link for a part": lambda cut: link(cut / part_folder(0, 1)),
    "pipe for a column file": lambda cut: (hot(cut).unlink(), os.mkfifo(hot(cut))),
    "folder for a segment": lambda cut: to_folder(objects_in(cut)[0]),
    "parent": lambda cut: rewrite(cut, 0, lambda t, r: r.update(parent=cut.name)),
}


def hot(cut: Path) -> Path:
    return cut / part_folder(0, 1) / "table-0-hot.safetensors"


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def seal(path: Path, content: bytes) -> None:
    rest = b'"content":' + content + b"}"
    path.write_bytes(b'{"crc32":"%08x",' % crc32(rest) + rest)


def link(path: Path) -> None:
    path.rename(path.with_name(path.name + ".real"))
    path.symlink_to(path.name + ".real")


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_snapshots_are_refused_quickly_and_in_little_memory(cut, what: str):
    target = objects_in(cut)[0]
    HOSTILE[what](cut)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.process_time()
    try:
        messages = verify(cut).messages
    except InvalidInput as error:
        messages = [str(error)]
    took_s = time.process_time() - start_s
    assert messages, what
    assert took_s < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    (job,) = list_jobs(cut.parent.parent)
    if "segment" not in what and "objects" not in what:  # `ls` reads no rows, and of segments only their live positions
        assert job.snapshots[0].status in ("damaged", "incomplete"), target


# ls ---------------------------------------------------------------------------------------------------------------


def test_ls_tells_whole_damaged_and_unfinished_ones_apart(cut):
    write_cut(cut.parent, 20, 2)
    (cut.parent / CutName(2, 30).folder).mkdir()
    (cut.parent.parent / "other").mkdir()
    (job,) = list_jobs(cut.parent.parent)
    assert list_jobs(cut.parent) == [job]
    assert (job.job, job.arm, job.path) == ("job", "main", str(cut.parent))
    first, second, third = job.snapshots
    assert (first.status, first.step, first.epoch, first.job) == ("complete", 12, 1, "job")
    assert first.segment_bytes == sum(path.stat().st_size for path in objects_in(cut)) == job.object_bytes
    assert first.bytes == sum(path.stat().st_size for path in cut.rglob("*") if path.is_file())
    assert first.tables.keys() == {spec.name for spec in SPECS}
    assert sum(table.rows_frozen for table in first.tables.values()) == first.rows_frozen
    with TableRows(read_parts(cut), "item") as rows:
        num_rows = sum(ids.shape[0] for ids in rows.row_ids())
    assert first.tables["item"].rows_hot + first.tables["item"].rows_frozen == num_rows
    assert second.status == "damaged" and "table-0-hot" in (second.what or "")  # that helper writes no column files
    assert (third.status, third.step, third.epoch, third.bytes) == ("incomplete", 30, 2, 0)


def test_a_snapshot_is_named_by_its_folder_or_that_of_its_job(cut, tmp_path):
    assert find_cut(cut) == find_cut(cut.parent) == cut
    with pytest.raises(InvalidInput, match="is no folder"):
        find_cut(tmp_path / "nothing")
    (cut / MANIFEST).unlink()
    with pytest.raises(InvalidInput, match="none of its 1 cuts has a manifest"):
        find_cut(cut.parent)
    with pytest.raises(InvalidInput, match=r"has no manifest\.json"):
        open_snapshot(cut)


def test_a_renamed_snapshot_is_refused(cut):
    other = cut.parent / CutName(1, 13).folder
    cut.rename(other)
    with pytest.raises(SegmentCorrupt, match="is that of cut-000000000012-1, and lies in cut-000000000013-1"):
        open_snapshot(other)


# Deltas -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_chain(tmp_path_factory) -> tuple[Path, dict]:
    """A delta of a delta of a full cut, and its rows as a look-up gave them."""
    return make_snapshot(tmp_path_factory.mktemp("chain"), deltas=True)


@pytest.fixture
def delta(trained_chain, tmp_path) -> Path:
    shutil.copytree(trained_chain[0].parent, tmp_path / "job")
    return tmp_path / "job" / trained_chain[0].name


def test_a_delta_is_listed_with_its_parent_and_verified_through_the_chain(trained_chain):
    cut = trained_chain[0]
    (job,) = list_jobs(cut.parent)
    steps = [6, 11, 12]
    assert [(s.status, s.sequence) for s in job.snapshots] == [("complete", number) for number in range(3)]
    assert [s.parent for s in job.snapshots] == [None, CutName(1, 6).folder, CutName(1, 11).folder]
    assert job.snapshots[2].bytes < job.snapshots[0].bytes
    findings = verify(cut)
    assert findings.messages == []
    (_, *parents), parts = ([cut.parent / CutName(1, step).folder for step in reversed(steps)], read_parts(cut))
    assert [part.folder.parent for part in parts[0].chain] == [cut, *parents]
    hot_files = [path for parent in parents for path in parent.rglob("*-hot.safetensors")]
    assert findings.bytes_read > sum(path.stat().st_size for path in hot_files) * 0.8


def test_damage_in_what_a_delta_builds_on_is_found_and_the_file_named(delta):
    rng = np.random.default_rng(0)
    needed = [delta.parent / CutName(1, step).folder for step in (6, 11)]
    for path in [
        path for cut in needed for path in files_of(cut) if "-frozen" not in path.name and "objects" not in str(path)
    ]:
        good = path.read_bytes()
        for at in [0, len(good) - 1, *rng.integers(0, len(good), 4).tolist()]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            assert any(str(path) in message for message in verify(delta).messages), (path, at)
        path.unlink()
        assert any(str(path) in message for message in verify(delta).messages), path
        (job,) = list_jobs(delta.parent)
        assert job.snapshots[-1].status == "damaged" and str(path) in (job.snapshots[-1].what or "")
        path.write_bytes(good)
    assert verify(delta).messages == []


def rows_by_id(cut: Path) -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {}
    for spec in SPECS:
        with TableRows(read_parts(cut), spec.name) as rows:
            ids = np.concatenate(list(rows.row_ids()))
            chunks = list(rows.chunks())
        assert np.array_equal(np.concatenate([chunk.row_ids for chunk in chunks]), ids)
        found[spec.name] = {
            int(i): weights.tobytes() + state.tobytes()
            for chunk in chunks
            for i, weights, state in zip(chunk.row_ids, chunk.weights, chunk.state, strict=True)
        }
        assert len(found[spec.name]) == len(ids)
    return found


def test_rows_of_a_delta_are_those_of_look_ups(trained_chain):
    cut, looked_up = trained_chain
    found = rows_by_id(cut)
    for spec in SPECS:
        weights, flags = looked_up[spec.name]
        known = dict(zip(np.sort(EVERY_ID).tolist(), zip(weights, flags, strict=True), strict=True))
        for row_id, row in found[spec.name].items():
            values, flag = known[row_id]
            assert flag & FOUND and values.tobytes() == row[: values.nbytes], (spec.name, row_id)


def test_a_compacted_snapshot_is_the_same_without_what_it_was_made_of(delta):
    before = rows_by_id(delta)
    compacted = compact(delta)
    made = Path(compacted.path)
    assert made.name == CutName(2, 12).folder and find_cut(delta.parent) == made
    assert compacted.chain == [CutName(1, step).folder for step in (12, 11, 6)]
    assert compacted.rows_hot == verify(delta).rows_hot
    removal = collect(delta.parent, 1, 0.0)
    assert sorted(removal.removed) == sorted(compacted.chain)
    assert verify(made).messages == []
    assert rows_by_id(made) == before
    assert read_manifest(made).parent is None
    store = InprocStore(memory_limit_bytes=128 << 20)
    store.create_tables(SPECS)
    epoch = store.begin_epoch("job", 1, "sync", will_restore=True).epoch
    store.restore(Identity("job", epoch, 0), str(made))
    assert sum(table.rows_hot for table in store.stats().tables.values()) == compacted.rows_hot
    store.close()


def test_compacting_reads_much_and_holds_little(delta, monkeypatch):
    """Also with chunks of few rows."""
    monkeypatch.setattr(snapshot_rewrite, "_ROWS_AT_ONCE", 3)
    before = rows_by_id(delta)
    assert rows_by_id(Path(compact(delta).path)) == before


def test_what_cannot_be_compacted_is_refused_and_nothing_is_left(delta):
    folder = delta.parent

    def refused(cut: Path, error: type[Exception], what: str) -> None:
        before = names(folder.iterdir())
        with pytest.raises(error, match=what):
            compact(cut)
        assert set(names(folder.iterdir())) <= {*before, "in-use.lock"}

    refused(folder / CutName(1, 6).folder, InvalidInput, "full snapshot")
    refused(folder / CutName(1, 11).folder, InvalidInput, "not the newest")
    with in_use(folder):
        refused(delta, InvalidInput, "is in use")
    path = folder / CutName(1, 6).folder / part_folder(0, 1) / "table-0-hot.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    refused(delta, SegmentCorrupt, str(path))
    path.unlink()
    refused(delta, SegmentCorrupt, str(path))
    path.write_bytes(good)
    digest = next(table.segments[0].digest for table in read_parts(delta)[0].record.tables if table.segments)
    path = folder / OBJECTS / segment_object(digest)  # which the new one would need as it is
    good = path.read_bytes()
    path.write_bytes(good[:-2000] + bytes([good[-2000] ^ 1]) + good[-1999:])
    refused(delta, SegmentCorrupt, str(path))


def test_gc_keeps_what_a_kept_snapshot_is_a_delta_of(tmp_path):
    folder = tmp_path / "j"
    write_chain(folder, (10, 20, 30))
    write_chain(folder, (40, 50))
    assert collect(folder, 1, 3600).removed == [CutName(1, step).folder for step in (10, 20, 30)]
    assert collect(folder, 1, 3600).removed == []
    (folder / CutName(1, 40).folder / MANIFEST).unlink()  # now the delta is damaged, and what is left of 40 is garbage
    removal = collect(folder, 1, 3600)
    assert removal.removed == [] and any("stays for whoever looks into it" in note for note in removal.notes)


# gc ---------------------------------------------------------------------------------------------------------------

A, B, C = (f"{i:064x}" for i in range(3))


def names(paths) -> list[str]:
    return sorted(path.name for path in paths)


@pytest.fixture
def job(tmp_path) -> Path:
    """Three snapshots of two runs; segment A is of the first alone, B of the first two, C of the last."""
    folder = tmp_path / "j"
    write_cut(folder, 10, 1, [A, B])
    write_cut(folder, 20, 1, [B])
    write_cut(folder, 5, 2, [C], run="r2")
    return folder


def age(path: Path, by_s: float = 7200.0) -> None:
    then = time.time() - by_s
    for at in [path, *path.rglob("*")]:
        os.utime(at, (then, then))


def test_gc_keeps_the_newest_and_what_they_name(job):
    would = collect(job, 2, 3600, dry_run=True)
    assert would.removed == [CutName(1, 10).folder] and would.objects == 1
    assert len(list(job.glob("cut-*"))) == 3
    assert collect(job, 2, 3600) == would
    assert names(job.glob("cut-*")) == sorted(would.kept) == [CutName(2, 5).folder, CutName(1, 20).folder]
    assert names((job / OBJECTS).iterdir()) == [f"{B}.segment", f"{C}.segment"]
    assert collect(job, 2, 3600).removed == []


def test_gc_removes_garbage_that_is_old_and_leaves_what_may_still_be_written(job):
    garbage = job / CutName(1, 15).folder
    (garbage / "shard-0-of-1").mkdir(parents=True)
    (garbage / "shard-0-of-1" / "table-0-hot.safetensors.partial").write_bytes(bytes(100))
    young = collect(job, 1, 3600)
    assert garbage.exists() and CutName(1, 15).folder in young.kept
    assert any("may still be written" in note for note in young.notes)
    assert young.objects == 0 and len(list((job / OBJECTS).iterdir())) == 3  # it may need any of them
    age(garbage)
    old = collect(job, 1, 3600)
    assert old.removed == [CutName(1, 15).folder] and not garbage.exists()
    assert names((job / OBJECTS).iterdir()) == [f"{C}.segment"]


def test_gc_leaves_a_job_in_use_alone(job):
    with in_use(job), pytest.raises(InvalidInput, match="is in use"):
        collect(job, 1, 0.0)
    with in_use(job), in_use(job):  # readers and trainings do not exclude one another
        assert len(list(job.glob("cut-*"))) == 3
    with alone_in(job), pytest.raises(InvalidInput, match="is in use"):
        collect(job, 1, 0.0)
    assert len(collect(job, 1, 0.0).removed) == 2


def test_gc_leaves_the_folder_of_a_training_alone(tmp_path):
    refusals = []

    class Asks(InprocStore):
        def push(self, who, step, gradients):
            with pytest.raises(InvalidInput, match="a training takes snapshots there"):
                collect(job_folder(tmp_path, "again"), 1, 0.0)
            refusals.append(step)
            return super().push(who, step, gradients)

    job = job_of(tmp_path, trainer={"max_steps": 3}, snapshots={"on_finish": True})
    run(job, Asks(memory_limit_bytes=256 << 20))
    assert refusals == [1, 2, 3]
    assert len(collect(job_folder(tmp_path, "again"), 1, 0.0).kept) == 1


def test_the_lock_of_a_process_that_was_killed_is_gone(job):
    code = (
        "import sys, time; from pathlib import Path; from trainer.snapshot_lock import in_use\n"
        f"with in_use(Path({str(job)!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(InvalidInput, match="is in use"):
            collect(job, 1, 0.0)
        process.kill()
    assert len(collect(job, 1, 0.0).removed) == 2


def test_gc_removes_no_segments_beside_a_damaged_snapshot(job):
    damaged = job / CutName(1, 20).folder / MANIFEST
    damaged.write_bytes(damaged.read_bytes()[:-5])
    removal = collect(job, 1, 0.0)
    assert removal.removed == [CutName(1, 10).folder] and damaged.exists()
    assert len(list((job / OBJECTS).iterdir())) == 3
    assert any("stays for whoever looks into it" in note for note in removal.notes)


@pytest.mark.parametrize("lost", ["shard-0-of-1/shard.json", "shard-0-of-1/table-0-hot.safetensors", "segment"])
def test_a_snapshot_that_lacks_a_file_costs_none_that_is_whole(job, lost: str):
    newest = job / CutName(2, 5).folder
    (job / OBJECTS / f"{C}.segment" if lost == "segment" else newest / lost).unlink()
    removal = collect(job, 1, 0.0)
    assert removal.removed == [CutName(1, 10).folder]
    assert sorted(removal.kept) == [CutName(2, 5).folder, CutName(1, 20).folder]
    assert any("stays for whoever looks into it" in note for note in removal.notes)
    assert f"{B}.segment" in names((job / OBJECTS).iterdir())


def test_ls_says_that_a_segment_is_missing(cut):
    lost = objects_in(cut)[0]
    lost.unlink()
    (job,) = list_jobs(cut.parent)
    assert job.snapshots[0].status == "damaged" and str(lost) in (job.snapshots[0].what or "")


def test_a_snapshot_that_gc_removes_is_never_whole_in_name_only(job, monkeypatch):
    """The manifest goes first: whoever looks on the way sees garbage."""
    seen = []
    rmtree = shutil.rmtree

    def watch(path, **options):
        seen.append((path.name, (path / MANIFEST).exists()))
        rmtree(path, **options)

    monkeypatch.setattr(snapshot_gc.remove_cut.__globals__["shutil"], "rmtree", watch)
    collect(job, 1, 0.0)
    assert seen == [(CutName(1, 20).folder, False), (CutName(1, 10).folder, False)]  # a delta before its parent


def test_real_snapshots_after_gc_are_sound(cut):
    collect(cut.parent, 1, 0.0)
    assert verify(cut).messages == []
    with pytest.raises(FrostlineError):
        find_cut(cut.parent.parent / "none")
