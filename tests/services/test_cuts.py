"""Cuts and restores over gRPC: equal to the in-process store, on any number of shards, and what goes wrong is told."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from embedding_server import failpoints
from embedding_server.errors import (
    FencedEpoch,
    FrostlineError,
    InvalidInput,
    NotReady,
    SegmentCorrupt,
    StepGap,
    StoreUnavailable,
)
from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.kernels.wire import from_float32
from embedding_server.shard import Shard
from embedding_server.snapshot_format import MANIFEST, RECORD, cut_folder, part_folder, read_shard_record
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import (
    CutProgress,
    EmbeddingStore,
    Frostline,
    Identity,
    RoutedIds,
    TableGradients,
    TableStats,
    UpdateMode,
)
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore

Serve = Callable[..., list[str]]
Connect = Callable[..., RemoteStore]
SPECS = [
    TableSpec(name="user", dim=8, optimizer=OptimizerSpec(kind="adam"), policy=PolicySpec(kind="off")),
    TableSpec(name="item", dim=16, policy=PolicySpec(kind="topk", probation_visits=1)),
    TableSpec(name="rare", dim=4, policy=PolicySpec(kind="idle", idle_steps=2, min_count=2)),
    TableSpec(
        name="tail",
        dim=8,
        optimizer=OptimizerSpec(kind="adagrad", weight_decay=0.01),
        policy=PolicySpec(kind="compact", idle_steps=2, frozen_bits=8, epoch_end="forget_rare"),
    ),
]
JOB = "job"
TIMEOUT_S = 60.0


@pytest.fixture
def connect(serve: Serve) -> Iterator[Connect]:
    """connect(num_shards, **options of serve and RemoteStore) -> a store with the tables."""
    stores: list[RemoteStore] = []

    def make(num_shards: int, *, times: CallTimes | None = None, **options: object) -> RemoteStore:
        stores.append(RemoteStore(serve(num_shards, **options), times=times))
        stores[-1].create_tables(SPECS)
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def begin(store: EmbeddingStore, *, will_restore: bool = False) -> Identity:
    return Identity(JOB, store.begin_epoch(JOB, 1, "sync", will_restore=will_restore).epoch, 0)


def route(store: EmbeddingStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def ids_of(store: EmbeddingStore, step: int) -> dict[str, RoutedIds]:
    rng = np.random.default_rng(step)
    return {spec.name: route(store, rng.zipf(1.3, 300) % 900 - 450) for spec in SPECS}


def push(store: EmbeddingStore, who: Identity, step: int, ids: dict[str, RoutedIds]) -> None:
    """Gradients that depend on table, row_id and step alone, so that every routing order gives the same."""
    gradients = {}
    for spec in SPECS:
        row_ids = ids[spec.name].row_ids
        base = np.random.default_rng(step).normal(size=spec.dim)
        values = from_float32(np.sin(row_ids[:, None] % 1000 + base[None, :]).astype(np.float32), "float32")
        default = np.full(spec.dim, 0.5, np.float32) if spec.policy.min_count > 1 else None
        gradients[spec.name] = TableGradients(ids[spec.name], values, 0.1, default)
    store.push(who, step, gradients)


def run(store: EmbeddingStore, who: Identity, first: int, last: int) -> None:
    """Steps first to last, with a re-selection after every third."""
    for step in range(first, last + 1):
        ids = ids_of(store, step)
        store.pull(who, step, ids)
        push(store, who, step, ids)
        if step % 3 == 0:
            occupied = np.flatnonzero(store.heat_histograms(who, step)["item"].counts)
            store.reselect(who, step, {"item": Frostline(int(occupied[len(occupied) // 2]))})


def contents(store: EmbeddingStore) -> dict[str, bytes]:
    """Values and flags of all rows by table, in the order of row_ids."""
    every = {spec.name: route(store, np.arange(-460, 460)) for spec in SPECS}
    rows = store.lookup(every)
    return {
        name: b"".join(
            part[np.argsort(every[name].row_ids)].tobytes() for part in (rows[name].values, rows[name].flags)
        )
        for name in every
    }


def assert_same(mine: EmbeddingStore, theirs: EmbeddingStore) -> None:
    assert contents(mine) == contents(theirs)
    left, right = mine.mask_info(), theirs.mask_info()
    for name, info in right.items():
        assert left[name].frostline == info.frostline, name
        assert np.array_equal(left[name].heat_counts_hot, info.heat_counts_hot), name
        assert np.array_equal(left[name].heat_counts_frozen, info.heat_counts_frozen), name
        for figure in TableStats.__dataclass_fields__:
            if not figure.startswith("bytes_"):
                assert getattr(left[name].stats, figure) == getattr(info.stats, figure), (name, figure)


def folder_of(root: Path, who: Identity, step: int) -> str:
    return str(root / JOB / cut_folder(step, who.epoch))


def wait_for_cut(store: EmbeddingStore, who: Identity) -> list[CutProgress]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        progress = store.cut_progress(who)
        if all(part.is_done for part in progress):
            return progress
        assert time.monotonic() < deadline_s, progress
        time.sleep(0.01)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def cut(store: EmbeddingStore, who: Identity, step: int, root: Path, parent: str | None = None) -> str:
    """A whole cut; its folder."""
    folder = folder_of(root, who, step)
    store.begin_cut(who, step, folder, parent)
    for part in wait_for_cut(store, who):
        assert (part.step, part.error) == (step, None)
    return folder


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (2, 1), (1, 3), (3, 2)])
def test_a_run_restored_on_any_number_of_shards_goes_on_as_if_nothing_had_happened(
    connect: Connect, tmp_path: Path, before: int, after: int
) -> None:
    model = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    model.create_tables(SPECS)
    of_model = begin(model)
    run(model, of_model, 1, 7)

    first = connect(before)
    who = begin(first)
    run(first, who, 1, 7)
    folder = folder_of(tmp_path, who, 7)
    first.begin_cut(who, 7, folder)
    run(first, who, 8, 11)  # the cut holds step 7 whatever comes after
    assert len(wait_for_cut(first, who)) == before

    second = connect(after, snapshot_root=tmp_path)
    who = begin(second, will_restore=True)
    second.restore(who, folder)
    assert_same(second, model)
    run(second, who, 8, 13)
    run(model, of_model, 8, 13)
    assert_same(second, model)
    model.close()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_restored_from_deltas_goes_on_as_if_nothing_had_happened(
    connect: Connect, tmp_path: Path, before: int, after: int
) -> None:
    model = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    model.create_tables(SPECS)
    of_model = begin(model)
    run(model, of_model, 1, 9)

    first = connect(before)
    who = begin(first)
    parent = None
    for begins, ends in ((1, 3), (4, 5), (6, 9)):
        run(first, who, begins, ends)
        parent = cut(first, who, ends, tmp_path, parent)
    second = connect(after, snapshot_root=tmp_path)
    who = begin(second, will_restore=True)
    assert parent is not None
    second.restore(who, parent)
    assert_same(second, model)
    run(second, who, 10, 12)
    run(model, of_model, 10, 12)
    assert_same(second, model)
    model.close()


def test_where_one_shard_knows_no_parent_none_begins(connect: Connect, tmp_path: Path) -> None:
    store = connect(2, snapshot_root=tmp_path)
    who = begin(store)
    run(store, who, 1, 4)
    full = cut(store, who, 4, tmp_path)
    run(store, who, 5, 5)
    for parent in (folder_of(tmp_path, who, 3), folder_of(tmp_path / "other", who, 4)):
        with pytest.raises(InvalidInput, match=r"shard 0 \(127.*is no earlier cut.*take a full cut"):
            store.begin_cut(who, 5, folder_of(tmp_path, who, 5), parent)
    with pytest.raises(InvalidInput, match="does not lie within"):
        store.begin_cut(who, 5, folder_of(tmp_path, who, 5), folder_of(tmp_path.parent, who, 4))
    delta = cut(store, who, 5, tmp_path, full)
    parts = [read_shard_record(Path(delta) / part_folder(part, 2)) for part in range(2)]
    assert [(part.sequence, part.parent.step if part.parent else None) for part in parts] == [(1, 4), (1, 4)]
    who = begin(store)
    with pytest.raises(InvalidInput, match="in epoch 2 since its last full one began"):
        store.begin_cut(who, 5, folder_of(tmp_path, who, 5), full)


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_workers_go_on_while_a_cut_is_written_and_may_be_more_after_a_restore(
    connect: Connect, tmp_path: Path, mode: UpdateMode
) -> None:
    def step_of_all(store: RemoteStore, workers: list[Identity], step: int) -> None:
        """All pulls before all pushes; in mode sync a push waits for the others', so each has a thread."""
        ids = [ids_of(store, 100 * step + who.worker) for who in workers]
        for who, mine in zip(workers, ids, strict=True):
            store.pull(who, step, mine)
        with ThreadPoolExecutor(len(workers)) as threads:
            list(threads.map(lambda who: push(store, who, step, ids[who.worker]), workers))

    def workers_of(store: RemoteStore, count: int, *, will_restore: bool = False) -> list[Identity]:
        epoch = store.begin_epoch(JOB, count, mode, will_restore=will_restore).epoch
        return [Identity(JOB, epoch, worker) for worker in range(count)]

    first, second = connect(2), connect(1)
    workers = workers_of(first, 2)
    for step in range(1, 5):
        step_of_all(first, workers, step)
    at_the_cut = contents(first)
    folder = folder_of(tmp_path, workers[0], 4)
    first.begin_cut(workers[0], 4, folder)
    for step in range(5, 8):
        step_of_all(first, workers, step)
    assert [part.error for part in wait_for_cut(first, workers[1])] == [None, None]
    workers = workers_of(second, 3, will_restore=True)
    second.restore(workers[0], folder)
    assert contents(second) == at_the_cut
    step_of_all(second, workers, 5)
    with pytest.raises(StepGap, match="skips step 6"):
        second.pull(workers[2], 7, {})


@pytest.mark.parametrize("writes_in_background", [True, False])
def test_the_in_process_store_cuts_and_restores_alike(
    connect: Connect, tmp_path: Path, writes_in_background: bool
) -> None:
    def make() -> InprocStore:
        store = InprocStore(memory_limit_bytes=64 << 20, backend="cpu", writes_in_background=writes_in_background)
        store.create_tables(SPECS)
        return store

    first, second, remote = make(), make(), connect(2)
    who = begin(first)
    run(first, who, 1, 7)
    folder = folder_of(tmp_path, who, 7)
    first.begin_cut(who, 7, folder)
    assert first.cut_progress(who)[0].is_done or writes_in_background
    run(first, who, 8, 9)
    (progress,) = wait_for_cut(first, who)
    assert (progress.step, progress.error) == (7, None)
    for store in (second, remote):
        again = begin(store, will_restore=True)
        store.restore(again, folder)
        run(store, again, 8, 9)
        assert_same(store, first)
    first.close()
    second.close()


def test_a_shard_finishes_its_cut_without_further_calls(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = Path(folder_of(tmp_path, who, 4))
    store.begin_cut(who, 4, str(folder))
    wait_until(lambda: all((folder / part_folder(part, 2) / RECORD).exists() for part in range(2)))
    assert sum(part.rows for part in wait_for_cut(store, who)) == sum(
        table.rows_hot + table.rows_frozen for table in store.stats().tables.values()
    )


def test_where_one_shard_cannot_begin_none_has_and_the_error_names_it(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = Path(folder_of(tmp_path, who, 4))
    folder.mkdir(parents=True)
    obstacle = folder / part_folder(1, 2)
    obstacle.write_text("not a folder")
    with pytest.raises(
        StoreUnavailable, match=rf"shard 1 \(127[^)]*\): the cut of step 4 cannot begin.*{obstacle.name}"
    ):
        store.begin_cut(who, 4, str(folder))
    # shard 0 wrote all of its little part before it was told, or nothing is left of it
    part = folder / part_folder(0, 2)
    assert not part.exists() or (part / RECORD).exists()
    obstacle.unlink()
    # the same cut may be begun again, and the training goes on
    store.begin_cut(who, 4, str(folder))
    run(store, who, 5, 6)
    assert [part.error for part in wait_for_cut(store, who)] == [None, None]
    other = connect(1)
    again = begin(other, will_restore=True)
    other.restore(again, str(folder))
    run(other, again, 5, 6)
    assert_same(other, store)


def test_a_cut_without_a_manifest_or_that_failed_is_begun_again_at_its_step(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = Path(folder_of(tmp_path, who, 4))
    cut(store, who, 4, tmp_path)
    shutil.rmtree(folder)  # as the trainer does where the manifest cannot be written
    cut(store, who, 4, tmp_path)
    (folder / part_folder(1, 2) / RECORD).unlink()  # of one shard alone
    cut(store, who, 4, tmp_path)
    other = connect(1)
    again = begin(other, will_restore=True)
    other.restore(again, str(folder))
    assert_same(other, store)


def test_a_shard_that_gave_a_cut_up_begins_it_again_without_being_told_to_abandon_it(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = folder_of(tmp_path, who, 4)
    fails = failpoints.on_hit(1, failpoints.fail_with(errno.ENOSPC))
    with failpoints.set_to({"cut.before_record": fails}):
        store.begin_cut(who, 4, folder)
        wait_until(lambda: all(part.is_done for part in store.cut_progress(who)))
    assert sorted(part.error is None for part in store.cut_progress(who)) == [False, True]
    store.begin_cut(who, 4, folder)
    assert [part.error for part in wait_for_cut(store, who)] == [None, None]


def test_paths_that_no_message_carries_are_refused_before_anything_is_sent(connect: Connect, tmp_path: Path) -> None:
    store = connect(1)
    who = begin(store)
    folder = Path(folder_of(tmp_path, who, 0))
    for wrong in ("", str(tmp_path / "\udce4" / folder.name)):
        for call in (
            lambda wrong=wrong: store.begin_cut(who, 0, wrong),
            lambda wrong=wrong: store.begin_cut(who, 0, str(folder), wrong),
            lambda wrong=wrong: store.restore(who, wrong),
        ):
            with pytest.raises(InvalidInput, match="is no path that a message can carry"):
                call()
    assert not folder.exists()
    local = InprocStore(memory_limit_bytes=64 << 20)
    local.create_tables(SPECS)
    again = begin(local, will_restore=True)
    with pytest.raises(InvalidInput, match="no path has a NUL"):
        local.restore(again, f"/a\0b/{folder.name}")
    local.close()


def test_a_whole_snapshot_is_not_replaced(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = Path(cut(store, who, 4, tmp_path))
    (folder / MANIFEST).write_text("{}")
    fresh = connect(2)  # which count epochs from 1 again
    who = begin(fresh)
    run(fresh, who, 1, 4)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InvalidInput, match=r"shard 0 \(127.*has a whole snapshot.*begin an epoch above"):
        fresh.begin_cut(who, 4, str(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files


def test_a_new_epoch_abandons_a_cut_and_an_old_one_can_do_nothing(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    old = begin(store)
    run(store, old, 1, 4)
    cut(store, old, 4, tmp_path)
    new = begin(store)
    for call in (
        lambda: store.begin_cut(old, 4, folder_of(tmp_path, old, 4)),
        lambda: store.cut_progress(old),
        lambda: store.abandon_cut(old),
        lambda: store.restore(old, folder_of(tmp_path, old, 4)),
    ):
        with pytest.raises(FencedEpoch, match="epoch 1 is not the current epoch 2"):
            call()
    with pytest.raises(NotReady, match="no cut"):
        store.cut_progress(new)
    cut(store, new, 4, tmp_path)


def test_an_abandoned_cut_leaves_no_files_and_a_done_one_stays(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    whole = Path(cut(store, who, 4, tmp_path))
    store.abandon_cut(who)
    run(store, who, 5, 5)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    store.begin_cut(who, 5, folder_of(tmp_path, who, 5))
    store.abandon_cut(who)
    for part in store.cut_progress(who):
        assert (part.step, part.is_done) == (5, True)
    assert (whole / part_folder(0, 2) / RECORD).exists()
    assert [path for path in files if not path.exists()] == []


def errors_of_a_cut(store: EmbeddingStore, who: Identity, step: int, root: Path) -> list[str]:
    """Why a cut fails: it may do so before begin_cut has returned."""
    try:
        store.begin_cut(who, step, folder_of(root, who, step))
    except StoreUnavailable as error:
        return [str(error)]
    return [str(part.error) for part in wait_for_cut(store, who)]


@pytest.mark.parametrize("calls", [("write", "pwrite", "writev", "pwritev"), ("fsync", "fdatasync"), ("rename",)])
def test_a_full_disk_ends_the_cut_and_neither_the_training_nor_the_former_snapshot(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]
) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = cut(store, who, 4, tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, full)
        run(store, who, 5, 5)
        for error in errors_of_a_cut(store, who, 5, tmp_path):
            assert "No space left" in error
        run(store, who, 6, 6)
    assert not (Path(folder_of(tmp_path, who, 5)) / part_folder(0, 2)).exists()
    assert any("No space left" in event for event in store.stats().events)

    other = connect(1)
    again = begin(other, will_restore=True)
    other.restore(again, folder)
    run(other, again, 5, 6)
    assert_same(other, store)
    cut(store, who, 6, tmp_path)


def test_a_damaged_part_is_named_with_the_shard_that_read_it(connect: Connect, tmp_path: Path) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = Path(cut(store, who, 4, tmp_path))
    run(store, who, 5, 5)
    broken = Path(cut(store, who, 5, tmp_path))
    record = broken / part_folder(1, 2) / RECORD
    text = record.read_bytes()
    record.write_bytes(text[:-20] + b"x" + text[-19:])

    other = connect(3)
    again = begin(other, will_restore=True)
    with pytest.raises(SegmentCorrupt, match=rf"shard 0 \(127.*{record}"):
        other.restore(again, str(broken))
    with pytest.raises(NotReady, match="no restore is done yet"):
        other.pull(again, 1, ids_of(other, 1))
    again = begin(other, will_restore=True)
    other.restore(again, str(folder))
    run(other, again, 5, 5)
    assert_same(other, store)

    shutil.rmtree(broken)
    again = begin(other, will_restore=True)
    with pytest.raises(InvalidInput, match=rf"shard 0 \(127.*{broken.name}"):
        other.restore(again, str(broken))


def test_shards_that_lost_rows_go_on_after_a_restore(connect: Connect, tmp_path: Path, serve: Serve) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = cut(store, who, 4, tmp_path)
    run(store, who, 5, 6)
    # shard 0 goes on at step 6, shard 1 is new
    mixed = RemoteStore([store._channels[0].name.split("(")[1][:-1], serve(2)[1]])
    mixed.create_tables(SPECS)
    with pytest.raises(NotReady, match="it restarted without its rows.*restore a snapshot"):
        mixed.begin_epoch(JOB, 1, "sync")
    again = begin(mixed, will_restore=True)
    mixed.restore(again, folder)
    run(mixed, again, 5, 6)
    single = connect(1)
    who = begin(single, will_restore=True)
    single.restore(who, folder)
    run(single, who, 5, 6)
    assert_same(mixed, single)
    mixed.close()


def test_slices_go_to_the_shards_that_are_not_done_and_are_not_repeated(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    def begin_cut(
        shard: Shard, who: Identity, step: int, folder: Path, part: int, num_parts: int, parent: Path | None
    ) -> bool:
        calls.append(("begin_cut", part))
        return calls.count(("begin_cut", part)) > 2 * part

    def restore(shard: Shard, who: Identity, folder: Path, anew: object) -> bool:
        part = int(shard.buckets[0] == 0)
        calls.append(("restore", part))
        return calls.count(("restore", part)) > 2 * part

    monkeypatch.setattr(Shard, "begin_cut", begin_cut)
    monkeypatch.setattr(Shard, "cut_progress", lambda shard, who: CutProgress(0, False))
    monkeypatch.setattr(Shard, "restore", restore)
    store = connect(2)
    who = begin(store)
    store.begin_cut(who, 0, folder_of(tmp_path, who, 0))
    store.restore(who, folder_of(tmp_path, who, 0))
    for call in ("begin_cut", "restore"):
        assert [calls.count((call, part)) for part in range(2)] == [1, 3]


def test_the_others_abandon_what_one_shard_cannot_begin_whatever_the_reason(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[int] = []

    def begin_cut(
        shard: Shard, who: Identity, step: int, folder: Path, part: int, num_parts: int, parent: Path | None
    ) -> bool:
        if part == 1:
            raise ZeroDivisionError("a bug")
        return True

    monkeypatch.setattr(Shard, "begin_cut", begin_cut)
    monkeypatch.setattr(Shard, "abandon_cut", lambda shard, who: abandoned.append(int(np.argmax(shard.buckets))))
    store = connect(3)
    who = begin(store)
    with pytest.raises(FrostlineError, match=r"shard 1 \(127.*INTERNAL.*ZeroDivisionError: a bug"):
        store.begin_cut(who, 0, folder_of(tmp_path, who, 0))
    assert sorted(abandoned) == [0, 342, 683]
    # a shard that is gone
    abandoned.clear()
    store = connect(2, times=CallTimes(deadline_s=5.0, try_s=5.0, reconnect_s=0.2))
    who = begin(store)
    monkeypatch.setattr(Shard, "begin_cut", lambda *_: True)
    store._channels[1].close()
    with pytest.raises(StoreUnavailable, match=r"shard 1 \(127"):
        store.begin_cut(who, 0, folder_of(tmp_path, who, 0))
    assert abandoned == [0]


def test_a_repeated_slice_gets_the_same_answer_and_restores_nothing_twice(
    connect: Connect, serve: Serve, tmp_path: Path
) -> None:
    store = connect(2)
    who = begin(store)
    run(store, who, 1, 4)
    folder = cut(store, who, 4, tmp_path)
    with grpc.insecure_channel(serve(1)[0]) as channel:
        stub = pb_grpc.EmbeddingShardStub(channel)
        stub.CreateTables(pb.CreateTablesRequest(spec_json=[spec.model_dump_json() for spec in SPECS]))
        begin_request = pb.BeginEpochRequest(
            job=JOB, num_workers=1, mode=pb.UPDATE_MODE_SYNC, epoch=7, token="x", will_restore=True
        )
        stub.BeginEpoch(begin_request)
        caller = pb.Caller(job=JOB, epoch=7)
        number, done = 0, False
        while not done:
            request = pb.RestoreRequest(caller=caller, folder=folder, slice=number)
            first, second = stub.Restore(request), stub.Restore(request)
            assert first == second
            number, done = number + 1, first.done
        assert stub.GetEpoch(pb.GetEpochRequest(job=JOB)).last_step == 4
        rows = sum(table.rows_hot + table.rows_frozen for table in stub.GetMaskInfo(pb.GetMaskInfoRequest()).tables)
        assert rows == sum(t.rows_hot + t.rows_frozen for t in store.stats().tables.values())
        with pytest.raises(grpc.RpcError) as refused:
            stub.Restore(pb.RestoreRequest(caller=caller, folder=folder, slice=number))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
