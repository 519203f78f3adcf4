"""A cut that is written between the calls of a random history holds one step, the history goes on as if there were no
cut, and what is restored from it, on any number of shards, equals the dictionary model at that step bit for bit.

The model and its histories are those of test_shard_model.py; the other optimizers, weight decay and several shards that
write are in test_restore.py.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import preimages, segment_file, snapshot_file, snapshot_format, snapshot_objects, table_cut
from embedding_server.errors import InvalidInput, NotReady
from embedding_server.kernels.hashing import buckets_of
from embedding_server.reserved import PAGE_BYTES
from embedding_server.shard import Shard, ShardGradients
from embedding_server.snapshot_format import OBJECTS, part_folder, read_shard_record
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, CutProgress, Identity
from tests.embedding_server.cut_shards import CutShards
from tests.embedding_server.table_model import TableModel
from tests.embedding_server.test_shard_model import DIM, HOT_ROW_BYTES, NO_CAP, POOL, Harness, policies


class CutHarness(Harness):
    """Slices of a cut come between all calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draw = None
        self.at_cut: tuple[int, TableModel, dict[int, bytes]] | None = None
        self.visited: set[tuple[int, int, int]] = set()

    def begin_cut(self, folder: Path, parent: Path | None = None) -> None:
        self.folder = folder / f"cut-{self.step:012d}-{self.epoch}"
        assert self.shard.begin_cut(self.who(0), self.step, self.folder, 0, 1, parent)
        self.at_cut = self.step, copy.deepcopy(self.model), self.frozen_bytes()

    def slices(self) -> None:
        if self.at_cut is not None and self.shard.is_cutting:
            for _ in range(self.draw(st.integers(0, 6))):
                self.shard.maintain()

    def visit(self, worker: int, ids: np.ndarray) -> None:
        self.slices()
        if (self.epoch, worker, self.step) in self.visited:  # there was no fence: a repeat reads again
            self.pull(worker, ids)
            return
        self.visited.add((self.epoch, worker, self.step))
        super().visit(worker, ids)

    def _push_one(self, worker: int, push: ShardGradients):
        self.slices()
        return super()._push_one(worker, push)

    def fence(self) -> None:
        if not hasattr(self, "at_cut") or self.at_cut is None:  # a new epoch ends a cut
            super().fence()

    def finish_cut(self) -> None:
        while self.shard.is_cutting:
            assert self.shard.maintain() or not self.shard.is_cutting


def restored(harness: CutHarness, num_shards: int, spec: TableSpec | None = None) -> list[Shard]:
    shards = []
    for s in range(num_shards):
        shard = Shard(buckets=np.arange(NUM_BUCKETS) % num_shards == s, memory_limit_bytes=1 << 20)
        shards.append(shard)
        shard.create_tables([spec or harness.spec])
        shard.begin_epoch("job", harness.num_workers, harness.mode, 100, True)
        while not shard.restore(Identity("job", 100, 0), harness.folder):
            shard.maintain()
    return shards


def check_equal(shards: list[Shard], harness: CutHarness) -> None:
    step, model, frozen_bytes = harness.at_cut
    rows, waiting, found_bytes = {}, {}, {}
    for shard in shards:
        assert shard.current_epoch("job").last_step == step
        table = shard._tables["t"]
        assert table.default_row.read().tobytes() == model.default.values.tobytes()
        assert table.frostline == model.frostline
        entries = table.index.scan(0, NUM_BUCKETS)
        assert shard.buckets[buckets_of(entries.row_ids, NUM_BUCKETS)].all()
        for row_id, location, code in zip(
            entries.row_ids.tolist(), entries.locations.tolist(), entries.heat.tolist(), strict=True
        ):
            assert row_id not in rows
            rows[row_id] = _row_of(table, location), code
        if table.waiting is not None:
            for bucket in range(64):
                ids, counts = table.waiting.scan(bucket)
                waiting |= dict(zip(ids.tolist(), counts.tolist(), strict=True))
        other = copy.copy(harness)
        other.shard = shard
        found_bytes |= other.frozen_bytes()
    assert found_bytes == frozen_bytes
    assert rows.keys() == model.rows.keys()
    counts_visits = harness.spec.policy.kind != "off"
    for row_id, ((hot, values, last_step, visits), code) in rows.items():
        row = model.rows[row_id]
        assert (hot, values, code) == (row.hot, row.values.tobytes(), row.heat), row_id
        if counts_visits:
            assert visits == row.visits, row_id
            assert last_step == (row.last_step if row.hot else 0), row_id
    if harness.spec.policy.min_count > 1:
        assert waiting == {i: n for i, n in model.counts.items() if n and i not in model.rows}


def _row_of(table, location: int) -> tuple[bool, bytes, int, int]:
    """(is hot, values, last step, visits)."""
    if location == 0xFFFFFFFF:
        return False, np.zeros(DIM, np.float32).tobytes(), 0, 0
    at = np.array([location], np.uint32)
    if location >> 31:
        return False, table.segments.read(at).tobytes(), 0, int(table.segments.visits_of(at)[0])
    weights = table.read_hot(at.astype(np.int32))[0]
    return True, weights.tobytes(), int(table.last_step.array[location, 0]), int(table.visits.array[location, 0])


def make_harness(data, *, capped: bool) -> CutHarness:
    max_hot = data.draw(st.sampled_from([3, 8, 20])) if capped else NO_CAP
    policy = data.draw(policies).model_copy(
        update={
            "frozen_bits": data.draw(st.sampled_from([32, 8, 4])),
            "freeze_rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
            "forget_below": data.draw(st.integers(0, 4)),
            "epoch_end": data.draw(st.sampled_from(["keep", "forget_rare"])),
            "control_fraction": data.draw(st.sampled_from([0.0, 0.3])),
            "hot_bytes": None if max_hot == NO_CAP else 4 * PAGE_BYTES + max_hot * HOT_ROW_BYTES,
        }
    )
    spec = TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0.0, init_max=0.0)
    mode = data.draw(st.sampled_from(["sync", "pipelined"]))
    return CutHarness(spec, data.draw(st.integers(1, 2)), mode, TableModel(spec, POOL, max_hot))


def _run(data, folder: Path, harness: CutHarness, num_shards: int) -> None:
    shards: list[Shard] = []
    harness.draw = data.draw
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            run_step(data, harness)
        harness.begin_cut(folder)
        for _ in range(data.draw(st.integers(0, 3))):
            run_step(data, harness)
        harness.finish_cut()
        progress = harness.shard.cut_progress(harness.who(0))
        step, model, _ = harness.at_cut
        assert (progress.step, progress.is_done, progress.error) == (step, True, None)
        assert progress.rows == len(model.rows)
        shards = restored(harness, num_shards)
        check_equal(shards, harness)
        if num_shards == 1:
            _go_on(data, harness, shards[0])
    finally:
        harness.shard.close()
        for shard in shards:
            shard.close()


def run_step(data, harness: CutHarness) -> None:
    harness.run_step(data.draw)
    what = data.draw(st.integers(0, 3))
    harness.slices()
    if what & 1:
        harness.reselect()
    if what & 2:
        harness.end_data_pass()
    harness.check_all()


def _go_on(data, harness: CutHarness, shard: Shard) -> None:
    """The job resumes from the cut, and is what it would have been without an end."""
    resumed = copy.copy(harness)
    resumed.shard, resumed.epoch = shard, 100
    resumed.step, resumed.model, _ = harness.at_cut
    resumed.at_cut, resumed.visited = None, set()
    for _ in range(data.draw(st.integers(1, 3))):
        run_step(data, resumed)


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_cut, "_SLICE_ROWS", 2)
        yield


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3))
def test_cut_of_a_history_equals_the_model_at_its_step(tmp_path_factory, data, num_shards: int) -> None:
    _run(data, tmp_path_factory.mktemp("cut") / "job", make_harness(data, capped=False), num_shards)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_cut_while_a_cap_freezes_rows_equals_the_model(tmp_path_factory, data) -> None:
    _run(data, tmp_path_factory.mktemp("cut") / "job", make_harness(data, capped=True), 1)


def _plain(folder: Path, *, num_rows: int = 60, policy: PolicySpec | None = None, **options) -> CutShards:
    """A shard with rows hot, frozen and waiting, at a barrier."""
    policy = policy or PolicySpec(kind="idle", idle_steps=1, min_count=2, control_fraction=0.0)
    shards = CutShards([TableSpec(name="t", dim=8, policy=policy)], folder=folder / "data", **options)
    for k in range(4):
        shards.train(np.arange(num_rows // (1 + k // 2), dtype=np.int64))
    shards.reselect()
    shards.train(np.arange(num_rows - 5, num_rows + 20, dtype=np.int64))
    return shards


def _finish(shards: CutShards) -> CutProgress:
    shard = shards.shards[0]
    for _ in range(100_000):
        if not shard.is_cutting:
            return shard.cut_progress(shards.who)
        shard.maintain()
    raise AssertionError("the cut does not end")


def test_cut_needs_the_barrier_and_a_folder_of_a_cut(tmp_path: Path) -> None:
    with _plain(tmp_path) as shards:
        shard, step = shards.shards[0], shards.step
        with pytest.raises(NotReady, match="has begun no cut"):
            shard.cut_progress(shards.who)
        with pytest.raises(NotReady, match="Advance at step"):
            shard.begin_cut(shards.who, step + 1, tmp_path / "job" / "cut-000000000005-1", 0, 1)
        for name in (
            "cut-5-1", "../cut-000000000005-1", "elsewhere", "cut-000000000004-1", "cut-000000000005-2",
            "cut-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0665-1", "\0/cut-000000000005-1",
        ):  # fmt: skip
            with pytest.raises(InvalidInput, match="must be an absolute path"):
                shard.begin_cut(shards.who, step, tmp_path / "job" / "x" / name, 0, 1)
        with pytest.raises(InvalidInput, match="must be an absolute path"):
            shard.begin_cut(shards.who, step, Path("cut-000000000005-1"), 0, 1)
        with pytest.raises(InvalidInput, match="part=1"):
            shard.begin_cut(shards.who, step, tmp_path / "job" / "cut-000000000005-1", 1, 1)
        assert not (tmp_path / "job").exists()


def test_a_cut_is_not_taken_where_no_restore_would_find_it(tmp_path: Path) -> None:
    with _plain(tmp_path) as shards:
        (tmp_path / "elsewhere").mkdir()
        name = f"cut-{shards.step:012d}-1"
        for link in (tmp_path / "a" / name, tmp_path / "b" / OBJECTS):
            link.parent.mkdir()
            link.symlink_to(tmp_path / "elsewhere")
            with pytest.raises(InvalidInput, match="is a symbolic link, which no restore follows"):
                shards.begin_cut(link.parent)
        assert not any((tmp_path / "elsewhere").iterdir())
        shards.begin_cut(tmp_path / ("x" * 300))
        assert "File name too long" in (_finish(shards).error or "")


def test_a_cut_that_is_gone_since_is_begun_anew(tmp_path: Path) -> None:
    """As when its manifest could not be written, and the trainer has removed what there was of it."""
    with _plain(tmp_path) as shards:
        first, again = shards.cut(tmp_path / "job"), shards.cut(tmp_path / "job")
        assert first == again, "a repeat does nothing"
        shutil.rmtree(first)
        assert shards.cut(tmp_path / "job") == first
        assert read_shard_record(first / part_folder(0, 1)).step == shards.step
        expected, specs = shards.state(), list(shards.specs.values())
    with CutShards(specs, will_restore=True) as restored:
        restored.restore(first)
        assert restored.state() == expected


def test_an_advance_waits_for_the_cut_and_a_second_cut_too(tmp_path: Path) -> None:
    with _plain(tmp_path) as shards:
        shard = shards.shards[0]
        first = shards.begin_cut(tmp_path / "job")
        assert shard.begin_cut(shards.who, shards.step, first, 0, 1), "a repeat does nothing"
        assert shard.reselect(shards.who, shards.step, {}) == ({}, False)
        assert shard.is_cutting
        shards.reselect()
        assert shards.tables()[0].cut is None
        shards.train(np.arange(3, dtype=np.int64))
        second = tmp_path / "job" / f"cut-{shards.step:012d}-1"
        while not shard.begin_cut(shards.who, shards.step, second, 0, 1):
            pass
        assert _finish(shards).error is None
        for folder, step in ((first, shards.step - 1), (second, shards.step)):
            assert read_shard_record(folder / part_folder(0, 1)).step == step


def test_a_new_epoch_and_abandon_end_a_cut_and_leave_nothing(tmp_path: Path) -> None:
    with _plain(tmp_path) as shards:
        shard = shards.shards[0]
        for end in (lambda: shard.abandon_cut(shards.who), lambda: shards.begin(2)):
            folder = shards.begin_cut(tmp_path / "job")
            shard.maintain()
            end()
            assert not shard.is_cutting
            assert not folder.exists()
            assert shards.tables()[0].cut is None
        with pytest.raises(NotReady, match="epoch 2 has begun no cut"):
            shard.cut_progress(shards.who)
        shards.train(np.arange(70, dtype=np.int64))
        shards.cut(tmp_path / "job")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_write_ends_the_cut_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root, failures = tmp_path / "job", 0
    with _plain(tmp_path) as shards, _plain(tmp_path / "twin") as twin:  # the twin is never cut
        earlier, at_earlier = shards.cut(root), shards.state()
        for nth in range(60):
            calls = iter(range(10_000))
            with monkeypatch.context() as patch:
                patch.setattr(segment_file, "write_bytes", _failing(segment_file.write_bytes, calls, nth, number))
                sync = _failing(os.fsync, calls, nth, number)
                for module in (segment_file, snapshot_file, snapshot_format, snapshot_objects):
                    patch.setattr(module, "sync_fd", sync)
                for each in (shards, twin):
                    each.train(np.arange(nth % 50, 70, dtype=np.int64))
                folder = shards.begin_cut(root)
                for each in (shards, twin):
                    each.train(np.arange(nth % 50, 70, dtype=np.int64))
                progress = _finish(shards)
            assert shards.state() == twin.state()
            assert shards.tables()[0].cut is None
            assert not list(root.rglob("*.partial"))
            if progress.error is None:
                break
            failures += 1
            assert os.strerror(number) in progress.error
            assert not folder.exists()
            assert "the cut of step" in shards.shards[0].stats().events[-1]
        assert progress.error is None
        assert failures > 8
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(earlier)
        assert again.state() == at_earlier


def _failing(real, calls, nth: int, number: int):
    def call(*arguments):
        if next(calls) == nth:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


def test_a_push_of_rows_that_no_pull_named_is_not_in_the_cut(tmp_path: Path) -> None:
    with _plain(tmp_path, policy=PolicySpec(kind="off")) as shards:
        shard, before = shards.shards[0], shards.state()
        folder = shards.begin_cut(tmp_path / "job")
        none, some = np.empty(0, np.int64), np.arange(9, dtype=np.int64)
        shard.pull(shards.who, shards.step + 1, {"t": none}, "float32").result(0)
        push = ShardGradients(some, np.ones((9, 8), np.float32), 0.5)
        assert shard.push(shards.who, shards.step + 1, {"t": push}, "float32").result(0).rows_applied == 9
        assert shards.state() != before
        assert _finish(shards).error is None
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(folder)
        assert again.state() == before


def test_pre_images_stay_under_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pull that needs more writes slices until there is room."""
    monkeypatch.setattr(preimages, "_LEAST_BYTES", 4096)
    row_ids = np.arange(6000, dtype=np.int64)
    with CutShards([TableSpec(name="t", dim=256, policy=PolicySpec(kind="off"))]) as shards:
        shards.train(row_ids)
        before = shards.state()
        folder = shards.begin_cut(tmp_path / "job")
        cut = shards.tables()[0].cut
        assert cut._log.limit_bytes == 6000 * 1033 * 8 // 100
        written = [cut.bucket]
        for start in range(0, 6000, 200):
            shards.train(row_ids[start : start + 200])
            assert cut._log.size_bytes <= 1.1 * cut._log.limit_bytes  # what a bucket of its index has at least
            written.append(cut.bucket)
        assert written[1] == 0
        assert 0 < written[15] < NUM_BUCKETS, "the Pulls had to write, and not all at once"
        assert _finish(shards).error is None
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(folder)
        assert again.state() == before


@pytest.mark.parametrize("kind", ["off", "idle"])
def test_a_cut_that_a_thread_writes_while_rows_change_is_that_of_its_step(tmp_path: Path, kind: str) -> None:
    policy = PolicySpec(kind=kind, idle_steps=2)
    specs = [TableSpec(name=name, dim=128, policy=policy) for name in ("t", "u")]
    row_ids = np.arange(9000, dtype=np.int64)
    with ThreadPoolExecutor(1) as writer, CutShards(specs, writer=writer, folder=tmp_path / "data") as shards:
        for start in (0, 3000, 0, 3000):
            shards.train(row_ids[start : start + 3000])
        shards.reselect()
        before = shards.state()
        folder = shards.begin_cut(tmp_path / "job")
        for start in (1000, 5000, 2000):  # rows of the cut, and new ones
            shards.train(row_ids[start : start + 3000])
            for _ in range(5):
                shards.shards[0].maintain()
        assert _finish(shards).error is None
    with CutShards(specs, will_restore=True) as again:
        again.restore(folder)
        assert again.state() == before


def test_objects_outlive_merges_and_the_shard_and_are_written_once(tmp_path: Path) -> None:
    with _plain(tmp_path) as shards:
        for table in shards.tables():
            table.segments._growth.small_bytes = 0  # each gets a file
        shards.train(np.arange(30, 60, dtype=np.int64))
        shards.reselect()
        while shards.shards[0].maintain():
            pass
        before, first = shards.state(), shards.cut(tmp_path / "job")
        objects = {p.name: p.stat() for p in (tmp_path / "job" / "objects").iterdir()}
        files = {p.stat().st_ino for p in (tmp_path / "data").rglob("*.safetensors")}
        assert {found.st_ino for found in objects.values()} & files, "linked, not copied"
        shards.train(np.arange(200, 203, dtype=np.int64))
        shards.cut(tmp_path / "job")
        again = {p.name: p.stat().st_ino for p in (tmp_path / "job" / "objects").iterdir()}
        assert again == {name: found.st_ino for name, found in objects.items()}
        shards.train(np.arange(60, dtype=np.int64))  # all thaw: their segments go
        while shards.shards[0].maintain():
            pass
        assert not {p.stat().st_ino for p in (tmp_path / "data").rglob("*.safetensors")} & files
    shutil.rmtree(tmp_path / "data")
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(first)
        assert again.state() == before


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def _damage(path: Path) -> None:
    """Flips a bit of a row, where the file lies."""
    with open(path, "r+b") as file:
        file.seek(-3000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path)


def _largest_object(folder: Path) -> Path:
    return max((folder / "job" / OBJECTS).iterdir(), key=lambda path: path.stat().st_size)


def _with_a_file(folder: Path) -> CutShards:
    """A shard with some 4,000 rows frozen, none of them in a buffer."""
    shards = _plain(folder, num_rows=4000, policy=PolicySpec(kind="idle", idle_steps=1, control_fraction=0.0))
    shards.tables()[0].segments._growth.small_bytes = 0
    shards.train(np.arange(9000, 9003, dtype=np.int64))
    shards.reselect()
    while shards.shards[0].maintain():
        pass
    return shards


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("how", ["flipped", "cut off", "a link"])
def test_a_damaged_object_is_replaced_before_a_cut_builds_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool, how: str
) -> None:
    if is_copied:
        monkeypatch.setattr(os, "link", refuse)
    with _with_a_file(tmp_path) as shards:
        shards.cut(tmp_path / "job")
        path = _largest_object(tmp_path)
        sound = path.read_bytes()
        path.unlink()
        if how == "a link":
            (tmp_path / "elsewhere").write_bytes(sound)
            path.symlink_to(tmp_path / "elsewhere")
        else:
            path.write_bytes(sound if how != "cut off" else sound[:-1])  # a file of its own, not the shard's
            if how != "cut off":
                _damage(path)
        shards.train(np.arange(9000, 9003, dtype=np.int64))
        folder, expected, specs = shards.cut(tmp_path / "job"), shards.state(), list(shards.specs.values())
        assert path.read_bytes() == sound
        assert not path.is_symlink()
        assert not list((tmp_path / "job" / OBJECTS).glob("*.partial"))
    monkeypatch.undo()
    with CutShards(specs, will_restore=True) as again:
        again.restore(folder)
        assert again.state() == expected


def test_a_cut_of_a_segment_file_that_was_damaged_under_the_shard_fails(tmp_path: Path) -> None:
    with _with_a_file(tmp_path) as shards:
        folder = shards.cut(tmp_path / "job")
        path = _largest_object(tmp_path)
        _damage(path)  # the shard's own file, linked
        shards.train(np.arange(9000, 9003, dtype=np.int64))
        again = shards.begin_cut(tmp_path / "job")
        error = _finish(shards).error or ""
        assert "does not match its checksums any more" in error and str(tmp_path / "data") in error
        assert folder.exists() and not again.exists()


@pytest.mark.parametrize("is_copied", [False, True])
def test_an_object_that_is_known_to_be_sound_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    if is_copied:
        monkeypatch.setattr(os, "link", refuse)
    with _with_a_file(tmp_path) as shards:
        reads: list[Path] = []
        real = snapshot_objects.open_segment
        monkeypatch.setattr(
            snapshot_objects, "open_segment", lambda path, **options: (reads.append(path), real(path, **options))[1]
        )
        for touched in (0, 0, 1, 0):
            if touched:
                os.utime(_largest_object(tmp_path), ns=(1, 1))
            shards.train(np.arange(9000, 9003, dtype=np.int64))
            shards.cut(tmp_path / "job")
            assert len(reads) == touched, "one that was written to since is read, once"
            reads.clear()


def test_segments_are_copied_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    with _plain(tmp_path) as shards:
        before, folder = shards.state(), shards.cut(tmp_path / "job")
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(folder)
        assert again.state() == before


def test_segments_are_held_until_the_cut_has_them(tmp_path: Path) -> None:
    """Background work of a table goes on while a cut waits for a thread: it writes files, but merges and drops none."""
    policy = PolicySpec(kind="idle", idle_steps=1, control_fraction=0.0)
    row_ids = np.arange(60, dtype=np.int64)
    with CutShards([TableSpec(name="t", dim=8, policy=policy)]) as shards:
        table = shards.tables()[0]
        table.segments._growth.small_bytes = 0  # each gets a file
        for part in (row_ids[:20], row_ids[20:40], row_ids[40:], row_ids[:9]):
            shards.train(part)
            shards.reselect()
        shards.train(row_ids[22:39])  # most of a segment is dead: a merge is due
        before = shards.state()
        folder = shards.begin_cut(tmp_path / "job")
        files = table.segments.num_segments
        assert not table.segments.needs_merge()
        shards.train(row_ids[40:])  # now all of another
        while table.maintain():
            pass
        assert table.segments.num_segments == files
        assert _finish(shards).error is None
        while table.maintain():
            pass
        assert table.segments.num_segments < files
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(folder)
        assert again.state() == before
