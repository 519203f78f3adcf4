"""Erasure: after rows are deleted and the background work is done, no byte of them is left, wherever they lay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from embedding_server import segment_file
from embedding_server.erasure import MAX_IDS_PER_CALL, chunks_of
from embedding_server.errors import InvalidInput, NotReady, UnknownTable
from embedding_server.inproc import InprocStore
from embedding_server.kernels.hashing import buckets_of
from embedding_server.shard import ShardGradients
from embedding_server.snapshot_format import OBJECTS
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, NUM_BUCKETS, Erased, Identity, RoutedIds
from tests.embedding_server.cut_shards import CutShards

DIM = 8
#: row_ids, and values of rows, whose bytes hardly come about by chance
FIRST_ID, VALUE = 0x3A5C_7E91_0000_0000, 1.2345678


def spec(**changes) -> TableSpec:
    policy = PolicySpec(kind="idle", idle_steps=2, frozen_bits=32, control_fraction=0.0, **changes)
    return TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0, init_max=0)


def ids_of(count: int, first: int = 0) -> np.ndarray:
    return FIRST_ID + 1000 * np.arange(first, first + count, dtype=np.int64)


def values_of(row_ids: np.ndarray) -> np.ndarray:
    """float32[n, D]; each row's are its own."""
    own = (row_ids - FIRST_ID).astype(np.float32)
    return np.float32(VALUE) + own[:, None] * np.linspace(1, 2, DIM, dtype=np.float32)


class Trained(CutShards):
    """SGD with lr 1 from zero: a row that was trained once is its values_of."""

    def train(self, row_ids: np.ndarray, seed: int = 0, lr: float = 1.0) -> dict[int, tuple[int, bytes]]:
        self.step += 1
        of_shard = self.owner[buckets_of(row_ids, NUM_BUCKETS)]
        parts = [{"t": row_ids[of_shard == s]} for s in range(len(self.shards))]
        for shard, ids in zip(self.shards, parts, strict=True):
            shard.pull(self.who, self.step, ids, "float32").result(0)
        for shard, ids in zip(self.shards, parts, strict=True):
            new = ids["t"][(shard.lookup(ids, "float32")["t"].values == 0).all(axis=1)]
            pushed = ShardGradients(new, -values_of(new), lr)
            shard.push(self.who, self.step, {"t": pushed}, "float32").result(0)
        return {}

    def idle(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.train(ids_of(0))

    def delete(self, row_ids: np.ndarray) -> Erased:
        total = Erased()
        for shard in self.shards:
            for chunk, is_last in chunks_of({"t": row_ids}):
                done = False
                while not done:
                    erased, done = shard.delete_rows(self.who, self.step, chunk, is_last=is_last)
                    total += erased.get("t", Erased())
        return total

    def work(self) -> None:
        """All that is to be done in the background."""
        for shard in self.shards:
            while shard.maintain() or shard.is_being_written:
                pass
            assert shard.stats().tables["t"].bytes_erasure_pending == 0


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def make(num_shards: int = 1, name: str = "data", will_restore: bool = False, **changes) -> Trained:
        options = {"memory_limit_bytes": 64 << 20, "writer": changes.pop("writer", None)}
        shards = Trained([spec(**changes)], num_shards, folder=tmp_path / name, will_restore=will_restore, **options)
        made.append(shards)
        return shards

    yield make
    for shards in made:
        shards.__exit__()


def traces(row_ids: np.ndarray, *folders: Path) -> list[tuple[Path, int]]:
    """Files below the folders, and row_ids whose id or values they have, byte by byte."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for row_id, row in zip(row_ids.tolist(), values_of(row_ids), strict=True):
            if row_id.to_bytes(8, "little", signed=True) in data or row[:4].tobytes() in data:
                found.append((path, row_id))
    return found


def in_memory(shards: Trained, row_ids: np.ndarray) -> int:
    """Slots of hot rows, taken or not, and places in buffers that have values of these rows."""
    wanted = values_of(row_ids)[:, 0]
    found = 0
    for table in shards.tables():
        slots = np.arange(table.slots.high_water, dtype=np.int32)
        found += int(np.isin(table.hot.read(slots)[0][:, 0], wanted).sum())
        for builder in table.segments._slots.builders.values():
            found += int(np.isin(builder.arrays().row_ids, row_ids).sum())
            found += int(np.isin(builder.arrays().rows[:, :4].copy().view(np.float32), wanted).sum())
    return found


def assert_gone(shards: Trained, gone: np.ndarray, left: np.ndarray, *folders: Path) -> None:
    assert traces(gone, *folders) == []
    assert in_memory(shards, gone) == 0
    of_shard = shards.owner[buckets_of(gone, NUM_BUCKETS)]
    for s, shard in enumerate(shards.shards):
        rows = shard.lookup({"t": gone[of_shard == s]}, "float32")["t"]
        assert not (rows.flags & FOUND).any()
        assert (rows.values == 0).all()
    of_shard = shards.owner[buckets_of(left, NUM_BUCKETS)]
    for s, shard in enumerate(shards.shards):
        mine = left[of_shard == s]
        rows = shard.lookup({"t": mine}, "float32")["t"]
        assert (rows.flags & FOUND).all()
        assert np.array_equal(rows.values, values_of(mine))


def test_hot_rows(trained: Callable[..., Trained], tmp_path: Path) -> None:
    shards = trained()
    shards.train(ids_of(500))
    gone, left = ids_of(500)[::7], np.setdiff1d(ids_of(500), ids_of(500)[::7])
    assert in_memory(shards, gone) == gone.shape[0]
    assert shards.delete(np.concatenate([gone, gone[:5], ids_of(3, 9000)])) == Erased(hot=gone.shape[0], unknown=3)
    assert_gone(shards, gone, left, tmp_path)
    assert shards.delete(gone) == Erased(unknown=gone.shape[0])
    stats = shards.shards[0].stats().tables["t"]
    assert (stats.rows_hot, stats.rows_erased, stats.bytes_erasure_pending) == (left.shape[0], gone.shape[0], 0)


def test_small_segments_in_memory_and_their_files_in_a_later_cut(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    shards = trained()
    shards.train(ids_of(500))
    shards.idle()
    shards.reselect()
    gone, left = ids_of(500)[::7], np.setdiff1d(ids_of(500), ids_of(500)[::7])
    assert shards.delete(gone) == Erased(frozen=gone.shape[0])
    cut = shards.cut(tmp_path / "cuts")
    assert_gone(shards, gone, left, cut, tmp_path / "cuts" / OBJECTS)
    assert traces(left[:1], tmp_path / "cuts" / OBJECTS) != []


def frozen_in_files(shards: Trained, count: int = 20_000) -> np.ndarray:
    """row_ids that froze and lie in a file."""
    shards.train(ids_of(count))
    shards.idle()
    shards.reselect()
    shards.work()
    assert all(table.segments.has_files for table in shards.tables())
    return ids_of(count)


def test_files(trained: Callable[..., Trained], tmp_path: Path) -> None:
    shards = trained(2)
    every = frozen_in_files(shards)
    gone, left = every[::1009], np.setdiff1d(every, every[::1009])
    assert len(traces(gone, tmp_path)) == gone.shape[0]
    assert shards.delete(gone) == Erased(frozen=gone.shape[0], unknown=0)
    pending = sum(table.stats().bytes_erasure_pending for table in shards.tables())
    assert pending == sum(table.segments.rows_total * 42 for table in shards.tables())
    shards.work()
    assert_gone(shards, gone, left, tmp_path)


def test_the_copy_that_a_thawed_row_left_in_its_old_file(trained: Callable[..., Trained], tmp_path: Path) -> None:
    shards = trained()
    every = frozen_in_files(shards)
    shards.train(every[:10])
    gone = every[:5]
    assert len(traces(gone, tmp_path)) == 5
    assert shards.delete(gone) == Erased(hot=5)
    shards.work()
    assert_gone(shards, gone, every[5:], tmp_path)


def test_a_file_that_waits_for_the_disk_and_a_merge_under_way(trained: Callable[..., Trained], tmp_path: Path) -> None:
    shards = trained()
    table = shards.tables()[0]
    every = frozen_in_files(shards)
    shards.train(every[::3])  # a third of the file is dead: a merge is due
    while (output := table.segments._merges.output) is None or output.num_rows == 0:
        assert shards.shards[0].maintain()
    shards.idle()
    shards.reselect()  # a second segment, which waits for its file
    assert table.segments._writer.has_pending
    gone, left = every[::50], np.setdiff1d(every, every[::50])
    assert shards.delete(gone).frozen == gone.shape[0]
    shards.work()
    assert_gone(shards, gone, left, tmp_path)


def test_a_file_that_is_being_written_in_another_thread(
    trained: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = segment_file.write_bytes

    def wait_and_write(fd: int, data: memoryview) -> int:
        assert may_write.wait(30)
        return write(fd, data)

    monkeypatch.setattr(segment_file, "write_bytes", wait_and_write)
    with ThreadPoolExecutor(1) as writer:
        shards = trained(writer=writer)
        shards.train(ids_of(20_000))
        shards.idle()
        shards.reselect()
        while shards.shards[0].maintain():
            pass
        assert shards.tables()[0].segments.is_being_written
        gone, left = ids_of(20_000)[::600], np.setdiff1d(ids_of(20_000), ids_of(20_000)[::600])
        assert shards.delete(gone).frozen == gone.shape[0]
        may_write.set()
        shards.work()
        assert_gone(shards, gone, left, tmp_path)


def test_rows_of_other_shards_in_files_that_a_restore_has_linked(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    before = trained(1)
    every = frozen_in_files(before)
    cut = before.cut(tmp_path / "cuts")
    after = trained(2, "restored", will_restore=True)
    after.restore(cut)
    gone, left = every[::1009], np.setdiff1d(every, every[::1009])
    assert len(traces(gone, tmp_path / "restored")) == 2 * gone.shape[0]
    assert after.delete(gone) == Erased(frozen=gone.shape[0])
    after.work()
    assert_gone(after, gone, left, tmp_path / "restored")


def test_ids_below_min_count(trained: Callable[..., Trained], tmp_path: Path) -> None:
    shards = trained(min_count=2)
    shards.train(ids_of(100))
    gone = ids_of(10)
    assert shards.delete(gone) == Erased(waiting=10)
    cut = shards.cut(tmp_path / "cuts")
    assert traces(gone, cut) == []
    assert traces(ids_of(1, 50), cut) != []
    shards.train(ids_of(100))
    flags = shards.shards[0].lookup({"t": ids_of(100)}, "float32")["t"].flags & FOUND
    assert flags.astype(bool).tolist() == [False] * 10 + [True] * 90  # their count began anew


def test_a_row_id_that_comes_again_is_a_new_row(trained: Callable[..., Trained]) -> None:
    shards = trained()
    shards.train(ids_of(10))
    shards.delete(ids_of(5))
    shards.step += 1
    rows = shards.shards[0].pull(shards.who, shards.step, {"t": ids_of(10)}, "float32").result(0)["t"]
    assert (rows.values[:5] == 0).all()
    assert np.array_equal(rows.values[5:], values_of(ids_of(5, 5)))


def test_a_cut_that_began_before_has_the_rows_and_a_later_one_has_none(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as writer:
        shards = trained(writer=writer)
        every = frozen_in_files(shards)
        shards.train(ids_of(50, 30_000))
        gone = np.concatenate([every[::1009], ids_of(5, 30_000)])
        first = shards.begin_cut(tmp_path / "cuts")
        shards.delete(gone)  # finishes the cut first
        shards.finish_cut()
        assert {row_id for _, row_id in traces(gone, tmp_path / "cuts")} == set(gone.tolist())
        before = set((tmp_path / "cuts" / OBJECTS).iterdir())
        shards.idle(1)
        second = shards.begin_cut(tmp_path / "cuts")  # at once: the files are not written again yet
        shards.finish_cut()
        assert first != second
        new = [path for path in (tmp_path / "cuts" / OBJECTS).iterdir() if path not in before]
        assert new
        for path in new:
            assert traces(gone, path.parent.parent / "none", second) == []
            assert not any(row_id.to_bytes(8, "little") in path.read_bytes() for row_id in gone.tolist())
        restored = trained(2, "restored", will_restore=True)
        restored.restore(second)
        restored.work()
        assert_gone(restored, gone, np.setdiff1d(every, gone), tmp_path / "restored", second)


def test_a_damaged_file_is_not_written_again_and_no_cut_links_it(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    shards = trained()
    every = frozen_in_files(shards)
    (path,) = (tmp_path / "data" / "0" / "segments").rglob("*.safetensors")
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x5a\xa5\x5a")
    shards.delete(every[::1009])
    while shards.shards[0].maintain():
        pass
    stats = shards.shards[0].stats()
    assert stats.tables["t"].bytes_erasure_pending > 0
    assert any("erased stay in it" in event for event in stats.events)
    shards.begin_cut(tmp_path / "cuts")
    while shards.shards[0].is_cutting:
        shards.shards[0].maintain()
    assert "rows that were erased cannot be taken out" in str(shards.shards[0].cut_progress(shards.who).error)


def test_a_full_disk_is_tried_again(
    trained: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = trained()
    table = shards.tables()[0]
    now = [0.0]
    every = frozen_in_files(shards)
    table.segments._erasure._clock = lambda: now[0]
    shards.delete(every[::1009])

    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(segment_file, "write_bytes", full)
        while shards.shards[0].maintain():
            pass
        assert table.stats().bytes_erasure_pending > 0
        assert any("without the rows that were erased" in event for event in shards.shards[0].stats().events)
    now[0] = 10.0
    shards.work()
    assert_gone(shards, every[::1009], np.setdiff1d(every, every[::1009]), tmp_path)


def test_what_is_refused(trained: Callable[..., Trained]) -> None:
    shards = trained()
    shards.train(ids_of(3))
    shard = shards.shards[0]
    with pytest.raises(UnknownTable, match="'none' does not exist"):
        shard.delete_rows(shards.who, 1, {"none": ids_of(1)}, is_last=True)
    with pytest.raises(InvalidInput, match="must be int64"):
        shard.delete_rows(shards.who, 1, {"t": np.zeros(3, np.int32)}, is_last=True)
    with pytest.raises(InvalidInput, match="at most 4096 at a time"):
        shard.delete_rows(shards.who, 1, {"t": ids_of(MAX_IDS_PER_CALL + 1)}, is_last=True)
    with pytest.raises(NotReady, match="Advance at step 2"):
        shard.delete_rows(shards.who, 2, {"t": ids_of(1)}, is_last=True)
    shard.begin_epoch("other", 1, "sync", 1)
    with pytest.raises(InvalidInput, match="trained by job 'job'"):
        shard.delete_rows(Identity("other", 1, 0), 0, {"t": ids_of(1)}, is_last=True)
    assert shard.stats().tables["t"].rows_hot == 3


def test_an_epoch_that_begins_between_two_chunks_ends_the_deletion(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    shards = trained()
    every = frozen_in_files(shards)
    shards.shards[0].delete_rows(shards.who, shards.step, {"t": every[:5]}, is_last=False)
    shards.begin(2)
    shards.work()
    assert_gone(shards, every[:5], every[5:], tmp_path)


def test_chunks_hold_every_table_and_are_bounded() -> None:
    ids = {"a": np.arange(20_000), "b": np.arange(0), "c": np.arange(3)}
    chunks = list(chunks_of(ids))
    assert [is_last for _, is_last in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(sum(map(len, chunk.values())) <= MAX_IDS_PER_CALL for chunk, _ in chunks)
    for name, row_ids in ids.items():
        found = [chunk[name] for chunk, _ in chunks if name in chunk]
        assert found
        assert np.array_equal(np.concatenate(found), row_ids)


def test_a_table_that_does_not_exist_is_refused_before_any_row_of_another_goes() -> None:
    store = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    store.create_tables([TableSpec(name="t", dim=8)])
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    row_ids = np.arange(2 * MAX_IDS_PER_CALL, dtype=np.int64)
    ids = {"t": RoutedIds(row_ids, np.array([0, row_ids.shape[0]], np.int64))}
    store.pull(who, 1, ids)
    store.push(who, 1, {})
    with pytest.raises(UnknownTable):
        store.delete_rows(who, 1, {"t": row_ids, "missing": row_ids[:1]})
    assert store.stats().tables["t"].rows_hot == row_ids.shape[0]
    assert store.delete_rows(who, 1, {"t": row_ids})["t"].hot == row_ids.shape[0]
    store.close()
