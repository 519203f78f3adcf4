"""A snapshot that is served reads, bit for bit, what the shards read that wrote it, and a dictionary of their rows; its
files may be removed meanwhile, and damage is found before a wrong row is read."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import table_cut
from embedding_server.errors import InvalidInput, SegmentCorrupt, UnknownTable
from embedding_server.kernels.hashing import buckets_of
from embedding_server.lookup import INITIAL
from embedding_server.served_snapshot import ServedSnapshot
from embedding_server.spec import PolicySpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE
from tests.embedding_server.cut_shards import CutShards
from tests.embedding_server.served_rows import rows_of
from tests.embedding_server.test_restore import DIM, POOL, optimizers, policies, spec_of

_UNKNOWN = np.array([5_000_001, -5_000_001], np.int64)
EVERY_ID = np.concatenate([POOL, _UNKNOWN, np.arange(1000, 1010)]).astype(np.int64)


def of_shards(shards: CutShards, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the shards themselves answer: float32[n, D], flags uint8[n]."""
    values, flags = np.empty((row_ids.shape[0], DIM), np.float32), np.empty(row_ids.shape[0], np.uint8)
    owner = shards.owner[buckets_of(row_ids, NUM_BUCKETS)]
    for s, shard in enumerate(shards.shards):
        at = np.flatnonzero(owner == s)
        values[at], flags[at] = rows_of(shard.lookups, "t", row_ids[at])
    return values, flags


def check_served(cut: Path, values: np.ndarray, flags: np.ndarray) -> None:
    snapshot = ServedSnapshot(cut)
    try:
        served, its_flags = rows_of(snapshot, "t", EVERY_ID)
        assert np.array_equal(its_flags, flags)
        assert np.array_equal(served.view(np.uint32), values.view(np.uint32))
        stats = snapshot.stats("t")
        distinct = np.unique(EVERY_ID, return_index=True)[1]
        assert stats.rows_hot == np.count_nonzero(flags[distinct] & TRAINABLE)
        assert stats.rows_hot + stats.rows_frozen == np.count_nonzero(flags[distinct] & FOUND) == snapshot.num_rows
    finally:
        snapshot.close()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3))
def test_any_chain_reads_as_its_shards_did(tmp_path_factory, data, writes: int) -> None:
    """All optimizers, weight decay, both widths, deltas on deltas, rows that change while a cut is written."""
    root = tmp_path_factory.mktemp("served") / "job"
    spec = spec_of(data.draw(policies), data.draw(optimizers))
    some_ids = st.sets(st.sampled_from(POOL.tolist()), max_size=30)
    with pytest.MonkeyPatch.context() as patch, CutShards([spec], writes) as shards:
        patch.setattr(table_cut, "_SLICE_ROWS", 2)
        for table in shards.tables():
            table.segments._small_rows = dict.fromkeys(table.segments.formats, data.draw(st.sampled_from([0, 1 << 20])))
        parent, expected = None, []
        for number in range(data.draw(st.integers(1, 4))):
            for k in range(data.draw(st.integers(1, 2))):
                shards.train(np.array(sorted(data.draw(some_ids)), np.int64), seed=k + number)
            if data.draw(st.booleans()):
                shards.reselect()
            parent = shards.begin_cut(root, parent)
            expected.append((parent, *of_shards(shards, EVERY_ID)))
            if data.draw(st.booleans()):
                shards.train(np.array(sorted(data.draw(some_ids)), np.int64), seed=9)
            shards.finish_cut()
    for each in expected:
        check_served(*each)


def trained(root: Path, num_shards: int = 2) -> tuple[Path, dict[int, tuple[bytes, int]]]:
    """(a delta with rows hot here and in its parent, frozen, at their initial value and waiting; a row by row_id)."""
    policy = PolicySpec(kind="topk", idle_steps=1, min_count=2, hot_fraction=0.3, probation_visits=0, frozen_bits=8)
    spec = spec_of(policy.model_copy(update={"control_fraction": 0.0}))
    with CutShards([spec], num_shards) as shards:
        for k in range(4):
            shards.train(POOL[k::2])
            shards.reselect()
        parent = shards.cut(root)
        shards.train(POOL[:6])
        shards.train(np.arange(1000, 1010, dtype=np.int64))
        cut = shards.cut(root, parent)
        values, flags = of_shards(shards, EVERY_ID)
    rows = {int(r): (v.tobytes(), int(f)) for r, v, f in zip(EVERY_ID, values, flags, strict=True)}
    return cut, rows


def test_every_row_equals_a_dictionary_in_any_order_repeated_and_unknown(tmp_path: Path) -> None:
    cut, rows = trained(tmp_path / "job")
    snapshot = ServedSnapshot(cut)
    asked = np.random.default_rng(3).choice(EVERY_ID, 5000)
    values, flags = rows_of(snapshot, "t", asked)
    assert [(v.tobytes(), f) for v, f in zip(values, flags.tolist(), strict=True)] == [rows[r] for r in asked]
    kinds = {f for _, f in rows.values()}
    assert kinds == {FOUND | TRAINABLE, FOUND, FOUND | INITIAL, DEFAULT}
    with pytest.raises(UnknownTable, match="'other' is not in snapshot cut-"):
        snapshot.find_rows([("other", asked)])
    version = snapshot.version("t")
    assert (version.job, version.epoch, version.snapshot_id) == ("job", 1, cut.name)
    assert cut.name == f"cut-{version.step:012d}-1"
    snapshot.close()


def test_rows_at_their_initial_value_say_so(tmp_path: Path) -> None:
    policy = PolicySpec(kind="topk", idle_steps=1, hot_fraction=0.1, probation_visits=0, control_fraction=0.0)
    with CutShards([spec_of(policy)], 2) as shards:
        for _ in range(3):
            shards.train(POOL[::2])
            shards.reselect()
        shards.train(POOL)  # the others are below the frostline
        cut = shards.cut(tmp_path / "job")
        values, flags = of_shards(shards, POOL)
    assert np.count_nonzero(flags == FOUND | INITIAL) > 10
    snapshot = ServedSnapshot(cut)
    served, its_flags = rows_of(snapshot, "t", POOL)
    assert np.array_equal(served, values) and np.array_equal(its_flags, flags)
    snapshot.close()


def test_files_may_be_removed_while_they_are_served(tmp_path: Path) -> None:
    cut, rows = trained(tmp_path / "job")
    snapshot = ServedSnapshot(cut)
    shutil.rmtree(tmp_path / "job")
    values, _ = rows_of(snapshot, "t", EVERY_ID)
    assert [v.tobytes() for v in values] == [rows[r][0] for r in EVERY_ID.tolist()]
    snapshot.close()


def test_nothing_in_the_folder_changes(tmp_path: Path) -> None:
    cut, _ = trained(tmp_path / "job")

    def state() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted((tmp_path / "job").rglob("*"))}

    before = state()
    for path in before:
        path.chmod(0o500 if path.is_dir() else 0o400)
    snapshot = ServedSnapshot(cut)
    rows_of(snapshot, "t", EVERY_ID)
    snapshot.close()
    assert state() == before
    for path in before:
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_damage_is_found_by_name_before_a_wrong_row_is_read(tmp_path: Path) -> None:
    """One byte in 97 of every file, one at a time: refused when it is opened, refused by a look-up, or in a byte that
    no look-up needs (state, heat, counts); never another row."""
    cut, rows = trained(tmp_path / "job", num_shards=1)
    expected = [rows[r][0] for r in EVERY_ID.tolist()]
    found = {"opened": 0, "read": 0, "unneeded": 0}
    files = [p for p in sorted((tmp_path / "job").rglob("*")) if p.is_file()]
    for path in files:
        sound = path.read_bytes()
        for at in range(0, len(sound), 97):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
            what = _read_damaged(cut, expected)
            found[what] += 1
        path.write_bytes(sound)
    assert found["opened"] > 50 and found["read"] >= 2, found


def _read_damaged(cut: Path, expected: list[bytes]) -> str:
    try:
        snapshot = ServedSnapshot(cut)
    except SegmentCorrupt:
        return "opened"
    try:
        values, _ = rows_of(snapshot, "t", EVERY_ID)
    except SegmentCorrupt:
        with pytest.raises(SegmentCorrupt):  # every time
            rows_of(snapshot, "t", EVERY_ID)
        return "read"
    finally:
        snapshot.close()
    assert [v.tobytes() for v in values] == expected
    return "unneeded"


def test_a_file_that_is_cut_off_within_its_last_page_is_refused(tmp_path: Path) -> None:
    cut, _ = trained(tmp_path / "job", num_shards=1)
    for path in [*cut.rglob("table-0-hot.safetensors"), *(cut.parent / "objects").iterdir()]:
        snapshot = ServedSnapshot(cut)
        sound = path.read_bytes()
        os.truncate(path, len(sound) - 2)
        with pytest.raises(SegmentCorrupt, match=path.name):
            rows_of(snapshot, "t", EVERY_ID)
        path.write_bytes(sound)
        snapshot.close()


def test_what_is_no_cut_is_refused(tmp_path: Path) -> None:
    cut, _ = trained(tmp_path / "job")
    with pytest.raises(InvalidInput, match="name the folder of one cut"):
        ServedSnapshot(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="name the folder of one cut"):
        ServedSnapshot(cut.parent)
    shutil.rmtree(cut.parent / "cut-000000000004-1")  # its parent
    with pytest.raises(SegmentCorrupt, match="is a delta of it"):
        ServedSnapshot(cut)


def test_threads_read_at_once(tmp_path: Path) -> None:
    cut, rows = trained(tmp_path / "job")
    snapshot = ServedSnapshot(cut)
    expected = [rows[r][0] for r in EVERY_ID.tolist()]
    wrong: list[object] = []

    def read() -> None:
        for _ in range(50):
            values, _ = rows_of(snapshot, "t", EVERY_ID)
            if [v.tobytes() for v in values] != expected:
                wrong.append(values)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    snapshot.close()


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    cut, _ = trained(tmp_path / "job")

    def open_and_close() -> int:
        snapshot = ServedSnapshot(cut)
        rows_of(snapshot, "t", EVERY_ID)
        snapshot.close()
        del snapshot
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())) + len(Path("/proc/self/maps").read_text().splitlines())

    open_and_close()
    before = open_and_close()
    after = [open_and_close() for _ in range(6)]
    assert max(after) <= before + 3
