"""Edges of a shard that were once wrong: arrays that callers reuse, calls repeated in another form, limits, jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embedding_server import segment_file, segment_writer
from embedding_server.errors import FencedEpoch, InvalidInput, NotReady, StoreUnavailable
from embedding_server.inproc import InprocStore
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, TRAINABLE, Frostline, Identity, RoutedIds, TableGradients


def _spec(name: str = "t", dim: int = 4, **policy: object) -> TableSpec:
    return TableSpec(
        name=name,
        dim=dim,
        optimizer=OptimizerSpec(kind="sgd"),
        policy=PolicySpec(**(policy or {"kind": "off"})),
        init_min=0.0,
        init_max=0.0,
    )


def _ids(*row_ids: int) -> RoutedIds:
    return RoutedIds(np.array(row_ids, np.int64), np.array([0, len(row_ids)]))


def _gradients(ids: RoutedIds, value: float = 1.0, lr: float = 1.0) -> TableGradients:
    return TableGradients(ids, np.full((ids.row_ids.shape[0], 4), value, np.float32), lr)


def _one(value: float = 1.0, lr: float = 1.0, default: np.ndarray | None = None) -> dict[str, ShardGradients]:
    return {"t": ShardGradients(np.array([1], np.int64), np.full((1, 4), value, np.float32), lr, default)}


def _begin(store: InprocStore, job: str = "job", num_workers: int = 1, mode: str = "sync") -> Identity:
    return Identity(job, store.begin_epoch(job, num_workers, mode).epoch, 0)  # type: ignore[arg-type]


@pytest.fixture
def store():
    made = InprocStore(memory_limit_bytes=64 << 20, timeout_s=5)
    yield made
    made.close()


def test_a_caller_may_reuse_its_row_id_array(store: InprocStore) -> None:
    store.create_tables([_spec()])
    who = _begin(store)
    buffer = np.array([1, 2], np.int64)
    routed = RoutedIds(buffer, np.array([0, 2]))
    for step, now in ((1, [1, 2]), (2, [7, 8])):
        buffer[:] = now
        store.pull(who, step, {"t": routed})
        store.push(who, step, {"t": _gradients(routed)})
    assert store.lookup({"t": _ids(1, 2, 7, 8)})["t"].values[:, 0].tolist() == [-1.0] * 4


def test_a_caller_may_reuse_its_default_gradient() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec(kind="off", min_count=9)])
    shard.begin_epoch("job", 2, "pipelined", 1)
    workers = [Identity("job", 1, w) for w in range(2)]
    for who in workers:
        shard.pull(who, 1, {"t": np.array([1], np.int64)}, "float32").result(0)
    default = np.ones(4, np.float32)
    none = ShardGradients(np.empty(0, np.int64), np.empty((0, 4), np.float32), 1.0, default)
    shard.push(workers[0], 1, {"t": none}, "float32").result(0)
    default[:] = 100
    shard.push(workers[1], 1, {"t": ShardGradients(none.row_ids, none.values, 1.0)}, "float32").result(0)
    assert shard.lookup({"t": np.array([1], np.int64)}, "float32")["t"].values[0].tolist() == [-0.5] * 4
    shard.close()


def test_repeated_rows_are_summed_also_when_the_pull_named_them_alike() -> None:
    optimizer = OptimizerSpec(kind="rowwise_adagrad", initial_accumulator=0.0)
    spec = TableSpec(name="t", dim=4, optimizer=optimizer, policy=PolicySpec(kind="off"), init_min=0.0, init_max=0.0)
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([spec])
    shard.begin_epoch("job", 1, "sync", 1)
    twice = np.array([5, 5], np.int64)
    shard.pull(Identity("job", 1, 0), 1, {"t": twice}, "float32").result(0)
    push = ShardGradients(twice, np.ones((2, 4), np.float32), 1.0)
    shard.push(Identity("job", 1, 0), 1, {"t": push}, "float32").result(0)
    assert shard.lookup({"t": twice}, "float32")["t"].values[0, 0] == pytest.approx(-1.0)  # 2 / sqrt(4)
    shard.close()


@pytest.mark.parametrize(
    "push",
    [
        TableGradients(_ids(1, 2), np.ones((4, 4), np.float32)[::2], 1.0),
        TableGradients(_ids(1, 2), np.ones((2, 4), np.float32), 1e39),
        TableGradients(_ids(1, 2), np.ones((2, 4), np.float32), 1.0, np.full(4, 1e39)),
    ],
    ids=["not contiguous", "learning rate beyond float32", "float64 default gradient"],
)
def test_what_would_fail_half_way_is_refused_before(store: InprocStore, push: TableGradients) -> None:
    store.create_tables([_spec("a"), _spec("t")])
    who = _begin(store)
    store.pull(who, 1, {"a": _ids(1, 2), "t": _ids(1, 2)})
    with pytest.raises(InvalidInput, match="'t'"):
        store.push(who, 1, {"a": _gradients(_ids(1, 2)), "t": push})
    store.push(who, 1, {"a": _gradients(_ids(1, 2)), "t": _gradients(_ids(1, 2))})
    assert store.lookup({"a": _ids(1)})["a"].values[0, 0] == -1.0


def test_a_sum_that_overflows_is_refused_and_nothing_applied() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec()])
    shard.begin_epoch("job", 2, "sync", 1)
    workers = [Identity("job", 1, w) for w in range(2)]
    for who in workers:
        shard.pull(who, 1, {"t": np.array([1], np.int64)}, "float32").result(0)
    first = shard.push(workers[0], 1, _one(3e38), "float32")
    second = shard.push(workers[1], 1, _one(3e38), "float32")
    for future in (first, second):
        with pytest.raises(InvalidInput, match="row_id 1, summed over workers"):
            future.result(0)
    retried = [shard.push(who, 1, _one(2.0), "float32") for who in workers]
    assert [f.result(0).rows_applied for f in retried] == [1, 1]
    assert shard.lookup({"t": np.array([1], np.int64)}, "float32")["t"].values[0, 0] == -2.0
    shard.close()


def test_a_table_belongs_to_the_job_that_trains_it(store: InprocStore) -> None:
    store.create_tables([_spec("t", kind="idle", idle_steps=5), _spec("u", kind="idle", idle_steps=5)])
    a, b = _begin(store, "a"), _begin(store, "b")
    for step in range(1, 21):
        store.pull(a, step, {"u": _ids(1)})
        store.push(a, step, {"u": _gradients(_ids(1))})
    assert store.pull(b, 1, {"t": _ids(1)})["t"].flags[0] == TRAINABLE | FOUND
    store.reselect(a, 20, {})
    assert store.push(b, 1, {"t": _gradients(_ids(1))}).rows_ignored == 0
    with pytest.raises(InvalidInput, match="table 'u' is trained by job 'a', so job 'b' cannot"):
        store.pull(b, 2, {"u": _ids(1)})


def test_a_segment_that_nobody_needs_any_more_does_not_stop_freezing(
    store: InprocStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedding_server.table.SMALL_BYTES", 0)  # two rows get a file
    store.create_tables([_spec(kind="idle", idle_steps=1)])
    who = _begin(store)

    def step(number: int, *row_ids: int) -> None:
        store.pull(who, number, {"t": _ids(*row_ids)} if row_ids else {})
        store.push(who, number, {})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_writer, "write_segment", full)
    step(1, 1, 2)
    step(2)
    step(3)
    store.reselect(who, 3, {})
    assert "No space left" in store.stats().events[-1]
    step(4, 1, 2)
    monkeypatch.setattr(segment_writer, "write_segment", segment_file.write_segment)
    store._shard.maintain()
    step(5)
    step(6)
    assert store.reselect(who, 6, {})["t"].frozen == 2


def test_a_pull_retried_in_another_number_of_parts_starts_over() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec()])
    shard.begin_epoch("job", 1, "sync", 1)
    who = Identity("job", 1, 0)
    shard.pull(who, 1, {"t": np.array([1], np.int64)}, "float32", 0, 2).result(0)
    rows = shard.pull(who, 1, {"t": np.array([1, 2, 3], np.int64)}, "float32", 0, 1).result(0)["t"]
    assert rows.flags.tolist() == [TRAINABLE | FOUND] * 3
    shard.push(who, 1, {}, "float32").result(0)
    shard.pull(who, 2, {}, "float32").result(0)
    shard.close()


def test_ids_seen_once_neither_fill_the_memory_nor_starve_new_rows() -> None:
    store = InprocStore(memory_limit_bytes=1 << 20)
    store.create_tables([_spec("t", 64, kind="idle", min_count=2, idle_steps=5)])
    who = _begin(store)
    for step in range(1, 41):
        ids = np.arange(5000, dtype=np.int64) + step * 10_000
        store.pull(who, step, {"t": RoutedIds(ids, np.array([0, 5000]))})
        store.push(who, step, {})
    assert store._shard._budget.used_bytes <= 1 << 20
    for step in range(41, 51):
        ids = np.arange(500, dtype=np.int64) + 10**7
        rows = store.pull(who, step, {"t": RoutedIds(ids, np.array([0, 500]))})["t"]
        store.push(who, step, {})
    assert (rows.flags & FOUND).all()
    store.close()


def test_rows_below_the_frostline_without_probation_are_bounded_too() -> None:
    store = InprocStore(memory_limit_bytes=1 << 20)
    store.create_tables([_spec(kind="topk", probation_visits=0)])
    who = _begin(store)
    store.pull(who, 1, {"t": _ids(1)})
    store.push(who, 1, {})
    store.reselect(who, 1, {"t": Frostline(4000)})
    for step in range(2, 42):
        ids = np.arange(5000, dtype=np.int64) + step * 10_000
        rows = store.pull(who, step, {"t": RoutedIds(ids, np.array([0, 5000]))})["t"]
        store.push(who, step, {})
    table = store._shard._tables["t"]
    buffers = table.segments.bytes_in_memory  # of what a merge made last; they go when its file is written
    assert store._shard._budget.used_bytes - buffers <= (1 << 20) * 1.01  # a bucket grows by more than one entry
    table.segments.flush()
    assert table.segments.bytes_in_memory == 0
    assert rows.flags[-1] == DEFAULT
    assert "memory_limit_bytes" in store.stats().events[-1]
    store.close()


def test_a_store_that_never_reselects_merges_its_segments() -> None:
    store = InprocStore(memory_limit_bytes=1 << 20)
    store.create_tables([_spec("t", 256, kind="idle", idle_steps=10**6)])
    who = _begin(store)
    for step in range(1, 401):
        ids = np.arange(50, dtype=np.int64) + step * 50
        rows = store.pull(who, step, {"t": RoutedIds(ids, np.array([0, 50]))})["t"]
        store.push(who, step, {})
        assert (rows.flags & FOUND).all(), step
    store.close()


def test_other_tables_give_back_what_a_table_needs() -> None:
    store = InprocStore(memory_limit_bytes=1 << 20)
    store.create_tables([_spec("a", 64, kind="idle"), _spec("b", 64, kind="idle")])
    who = _begin(store)
    many = np.arange(5000, dtype=np.int64)
    store.pull(who, 1, {"a": RoutedIds(many, np.array([0, 5000]))})
    store.push(who, 1, {})
    for step in range(2, 30):
        ids = np.arange(10, dtype=np.int64) + step * 10
        rows = store.pull(who, step, {"b": RoutedIds(ids, np.array([0, 10]))})["b"]
        store.push(who, step, {})
        if step > 3:  # the rows of the step before stay, their gradients may be on the way
            assert (rows.flags == TRAINABLE | FOUND).all(), step
    assert store.stats().tables["a"].rows_frozen > 0
    store.close()


def test_the_mode_cannot_change_while_a_step_is_applied_for_some_workers_only(store: InprocStore) -> None:
    store.create_tables([_spec()])
    a = _begin(store, num_workers=2, mode="pipelined")
    for worker in range(2):
        store.pull(Identity("job", a.epoch, worker), 1, {"t": _ids(1)})
    store.push(a, 1, {"t": _gradients(_ids(1))})
    with pytest.raises(NotReady, match="step 1 is applied for some workers only"):
        store.begin_epoch("job", 2, "sync")
    store.push(Identity("job", a.epoch, 1), 1, {"t": _gradients(_ids(1))})  # the old epoch goes on


def test_rates_of_different_steps_are_not_compared() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec()])
    shard.begin_epoch("job", 2, "pipelined", 1)
    a, b = (Identity("job", 1, w) for w in range(2))
    ids = {"t": np.array([1], np.int64)}
    shard.pull(a, 1, ids, "float32")
    shard.pull(b, 1, ids, "float32")
    shard.push(b, 1, _one(lr=0.1), "float32").result(0)
    shard.pull(a, 2, ids, "float32")
    shard.pull(b, 2, ids, "float32")
    shard.push(a, 1, _one(lr=0.1), "float32", 0, 2).result(0)
    assert shard.push(b, 2, _one(lr=0.09), "float32").result(0).rows_applied == 1
    shard.close()


def test_an_epoch_that_cannot_be_written_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(data_dir=tmp_path / "shard", memory_limit_bytes=64 << 20)
    shard.begin_epoch("job", 1, "sync", 1)

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.replace", full)
        with pytest.raises(StoreUnavailable, match="No space left.*no epoch has begun"):
            shard.begin_epoch("job", 1, "sync", 2)
    assert shard.current_epoch("job").epoch == 1
    assert shard.begin_epoch("job", 1, "sync", 2).epoch == 2
    shard.close()
    (tmp_path / "shard" / "epochs.json").write_text("")
    with pytest.raises(InvalidInput, match="epochs.json is not a file of epochs"):
        Shard(data_dir=tmp_path / "shard", memory_limit_bytes=64 << 20)


def test_a_bad_retry_leaves_the_push_that_waits() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec()])
    shard.begin_epoch("job", 2, "sync", 1)
    workers = [Identity("job", 1, w) for w in range(2)]
    for who in workers:
        shard.pull(who, 1, {"t": np.array([1], np.int64)}, "float32").result(0)
    waits = shard.push(workers[0], 1, _one(), "float32")
    with pytest.raises(InvalidInput, match="not finite"):
        shard.push(workers[0], 1, _one(float("nan")), "float32")
    shard.push(workers[1], 1, _one(), "float32").result(0)
    assert waits.result(0).rows_applied == 1
    shard.close()


def test_who_waits_when_an_epoch_ends_is_told() -> None:
    shard = Shard(memory_limit_bytes=64 << 20)
    shard.create_tables([_spec()])
    shard.begin_epoch("job", 2, "sync", 1)
    waits = shard.push(Identity("job", 1, 0), 1, _one(), "float32")
    shard.begin_epoch("job", 2, "sync", 2)
    with pytest.raises(FencedEpoch, match="epoch 2 has begun"):
        waits.result(0)
    shard.close()


@pytest.mark.parametrize("frostline", [Frostline(5000), Frostline(-7), Frostline(3, 7.0), Frostline(3, float("nan"))])
def test_nonsense_frostlines_are_refused(store: InprocStore, frostline: Frostline) -> None:
    store.create_tables([_spec(kind="topk")])
    who = _begin(store)
    store.pull(who, 1, {"t": _ids(1)})
    store.push(who, 1, {})
    with pytest.raises(InvalidInput, match="'t'.*compute_frostline"):
        store.reselect(who, 1, {"t": frostline})


@pytest.mark.parametrize("half_life", [1e-17, 5e-324, 0.0, 1e30])
def test_half_lives_that_no_step_number_can_be_divided_by_are_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life_steps"):
        PolicySpec(kind="topk", half_life_steps=half_life)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"data_dir=.*/file/segments: .*; name a folder that can be made there"):
        Shard(data_dir=tmp_path / "file" / "segments")


def test_an_epoch_that_begins_for_a_restore_takes_nothing_before_it(store: InprocStore) -> None:
    store.create_tables([_spec()])
    who = Identity("job", store.begin_epoch("job", 1, "sync", will_restore=True).epoch, 0)
    for call in (
        lambda: store.pull(who, 1, {"t": _ids(1)}),
        lambda: store.push(who, 1, {"t": _gradients(_ids(1))}),
        lambda: store.reselect(who, 0, {}),
        lambda: store.begin_cut(who, 0, "/nowhere/job/cut-000000000000-1"),
    ):
        with pytest.raises(NotReady, match="began with will_restore, and no restore is done yet"):
            call()
    assert store.stats().tables["t"].rows_hot == 0
    who = _begin(store)
    assert store.pull(who, 1, {"t": _ids(1)})["t"].flags.tolist() == [TRAINABLE | FOUND]


def test_what_a_restore_follows_may_begin_at_a_torn_step(store: InprocStore) -> None:
    store.create_tables([_spec()])
    first = _begin(store, num_workers=2, mode="pipelined")
    for worker in range(2):
        store.pull(Identity("job", first.epoch, worker), 1, {"t": _ids(1)})
    store.push(first, 1, {"t": _gradients(_ids(1))})
    with pytest.raises(NotReady, match="applied for some workers only"):
        store.begin_epoch("job", 3, "sync")
    assert store.begin_epoch("job", 3, "sync", will_restore=True).epoch == 2
