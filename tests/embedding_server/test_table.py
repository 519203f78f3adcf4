"""Tables of a shard: thaw is warm, memory is bounded, the tail of the hot rows is given back, default rows agree."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.errors import FencedEpoch, InvalidInput, NotReady, StepGap, TableConflict, UnknownTable
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE, Identity


def _shard(spec: TableSpec, **kwargs) -> Shard:
    shard = Shard(**kwargs)
    shard.create_tables([spec])
    shard.begin_epoch("job", 1, "sync", 1)
    return shard


WHO = Identity("job", 1, 0)


def _step(shard: Shard, step: int, ids: np.ndarray, gradient: float = 1.0, lr: float = 0.1):
    dim = shard.table_specs()["t"].dim
    rows = shard.pull(WHO, step, {"t": ids}, "float32").result(0)["t"]
    hot = (rows.flags & TRAINABLE) > 0
    default = np.full(dim, gradient, np.float32) if (rows.flags & DEFAULT).any() else None
    values = np.full((int(hot.sum()), dim), gradient, np.float32)
    ack = shard.push(WHO, step, {"t": ShardGradients(ids[hot], values, lr, default)}, "float32").result(0)
    return rows, ack


def _reselect(shard: Shard, step: int) -> int:
    frozen, done = 0, False
    while not done:
        moves, done = shard.reselect(WHO, step, {})
        frozen += sum(m.frozen for m in moves.values())
    while shard.maintain():
        pass
    return frozen


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "adam"])
def test_a_thawed_row_keeps_its_warm_accumulator(kind: str) -> None:
    spec = TableSpec(
        name="t", dim=8, optimizer=OptimizerSpec(kind=kind), policy=PolicySpec(idle_steps=1, control_fraction=0)
    )
    shard = _shard(spec)
    ids = np.arange(50, dtype=np.int64)
    _step(shard, 1, ids, 2.0)
    _step(shard, 2, np.empty(0, np.int64))
    table = shard._tables["t"]
    _, before = table.hot.read(table.index.locate(ids)[1].astype(np.int32))
    assert _reselect(shard, 2) == 50
    shard.pull(WHO, 3, {"t": ids}, "float32").result(0)
    _, after = table.hot.read(table.index.locate(ids)[1].astype(np.int32))
    second = slice(8, None) if kind == "adam" else slice(None)
    assert np.allclose(after[:, second], before[:, second], rtol=0.1)
    assert (before[:, second] > 0).all()
    assert shard.stats().tables["t"].moves_thawed == 50
    shard.close()


def test_rows_that_would_not_survive_8_bits_stay_hot() -> None:
    spec = TableSpec(
        name="t", dim=4, optimizer=OptimizerSpec(kind="sgd"), policy=PolicySpec(idle_steps=1, control_fraction=0)
    )
    shard = _shard(spec)
    ids = np.arange(10, dtype=np.int64)
    _step(shard, 1, ids)
    table = shard._tables["t"]
    slots = table.index.locate(ids[:3])[1].astype(np.int32)
    weights, state = table.hot.read(slots)
    weights[:, 0] = [np.inf, np.nan, 3e38]
    weights[2, 1] = -3e38
    table.hot.write(slots, weights, state)
    _step(shard, 2, np.empty(0, np.int64))
    assert _reselect(shard, 2) == 7
    stats = shard.stats().tables["t"]
    assert (stats.rows_hot, stats.rows_frozen, stats.rows_unfreezable) == (3, 7, 3)
    shard.close()


def test_memory_limit_freezes_the_coldest_and_never_grows_past_it() -> None:
    limit = 4 << 20
    spec = TableSpec(name="t", dim=64, policy=PolicySpec(idle_steps=10**6, control_fraction=0))
    shard = _shard(spec, memory_limit_bytes=limit)
    for step in range(1, 41):
        ids = np.arange((step - 1) * 1000, step * 1000, dtype=np.int64)
        rows, _ = _step(shard, step, ids)
        assert (rows.flags == (TRAINABLE | FOUND)).all()
        while shard.maintain():
            pass
        stats = shard.stats().tables["t"]
        assert stats.bytes_hot + stats.bytes_state + stats.bytes_index + stats.bytes_heat <= limit * 1.02
    assert stats.rows_hot + stats.rows_frozen == 40_000
    found = shard.lookup({"t": np.arange(40_000, dtype=np.int64)}, "float32")["t"].flags
    assert (found & FOUND).all()
    assert found[:1000].max() == FOUND  # the oldest are frozen
    shard.close()


def test_memory_limit_without_a_policy_that_freezes_reads_the_default_row_and_says_so() -> None:
    spec = TableSpec(name="t", dim=64, policy=PolicySpec(kind="off"))
    shard = _shard(spec, memory_limit_bytes=1 << 20)
    rows, ack = _step(shard, 1, np.arange(10_000, dtype=np.int64))
    assert set(rows.flags.tolist()) == {TRAINABLE | FOUND, DEFAULT}
    assert ack.rows_ignored == 0
    event = shard.stats().events[-1]
    assert "memory_limit_bytes=1048576" in event and "default row" in event
    again = shard.pull(WHO, 2, {"t": np.arange(9_000, 10_000, dtype=np.int64)}, "float32").result(0)["t"]
    assert again.flags[-1] == DEFAULT
    assert (again.values[-1] != 0).all()  # it trained on the gradients of the IDs that found no room
    shard.close()


def test_compaction_gives_the_tail_back_and_rows_keep_their_values() -> None:
    spec = TableSpec(name="t", dim=16, policy=PolicySpec(idle_steps=2, control_fraction=0))
    shard = _shard(spec)
    cold, warm = np.arange(30_000, dtype=np.int64), np.arange(30_000, 33_000, dtype=np.int64)
    _step(shard, 1, np.concatenate([cold, warm]))
    for step in (2, 3):
        _step(shard, step, warm)
    before = shard.lookup({"t": warm}, "float32")["t"].values
    peak = shard.stats().tables["t"].bytes_hot
    assert _reselect(shard, 3) == 30_000
    stats = shard.stats().tables["t"]
    assert stats.bytes_hot < peak / 8
    assert np.array_equal(shard.lookup({"t": warm}, "float32")["t"].values, before)
    table = shard._tables["t"]
    assert table.slots.high_water == 3_000
    _step(shard, 4, np.arange(50_000, 51_000, dtype=np.int64))
    assert table.slots.high_water == 4_000
    shard.close()


def test_default_rows_of_two_shards_stay_equal() -> None:
    spec = TableSpec(name="t", dim=4, policy=PolicySpec(min_count=3))
    halves = [np.arange(NUM_BUCKETS) < 512, np.arange(NUM_BUCKETS) >= 512]
    shards = [Shard(buckets=b) for b in halves]
    for shard in shards:
        shard.create_tables([spec])
        shard.begin_epoch("job", 2, "pipelined", 1)
    rng = np.random.default_rng(0)
    none = np.empty(0, np.int64), np.empty((0, 4), np.float32)
    for step in range(1, 20):
        gradients = [rng.normal(size=4).astype(np.float32) for _ in range(2)]
        for shard, order in zip(shards, ([0, 1], [1, 0]), strict=True):
            for worker in order:
                shard.pull(Identity("job", 1, worker), step, {}, "float32")
            for worker in order:
                push = ShardGradients(*none, 0.1, gradients[worker])
                shard.push(Identity("job", 1, worker), step, {"t": push}, "float32").result(0)
    values = [
        s._rows.read({"t": np.array([7], np.int64)}, "float32", always_default=True)["t"].values.tobytes()
        for s in shards
    ]
    assert values[0] == values[1]
    for shard in shards:
        shard.close()


def test_initial_values_do_not_depend_on_order_and_lie_in_their_range() -> None:
    spec = TableSpec(name="t", dim=8, init_min=-0.5, init_max=0.25, seed=3)
    a, b = _shard(spec), _shard(spec)
    ids = np.array([-(2**63), -1, 0, 1, 2**63 - 1], np.int64)
    one = a.pull(WHO, 1, {"t": ids}, "float32").result(0)["t"].values
    other = b.pull(WHO, 1, {"t": ids[::-1].copy()}, "float32").result(0)["t"].values
    assert np.array_equal(one, other[::-1])
    assert one.min() >= -0.5 and one.max() < 0.25 and np.unique(one).size == one.size
    a.close()
    b.close()


def _refused(error: type[Exception], *words: str):
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


IDS = np.array([1, 2], np.int64)
GOOD = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("push", "error", "words"),
    [
        (
            ShardGradients(IDS, np.array([[1, 1, 1, 1], [1, np.nan, 1, 1]], np.float32), 1.0),
            InvalidInput,
            ["'t'", "row_id 2", "position 1", "column 1"],
        ),
        (ShardGradients(IDS, np.full((2, 4), np.inf, np.float32), 1.0), InvalidInput, ["'t'", "position 0"]),
        (ShardGradients(IDS, np.ones((2, 8), np.float32), 1.0), InvalidInput, ["'t'", "dim 4"]),
        (ShardGradients(IDS, np.ones((1, 4), np.float32), 1.0), InvalidInput, ["'t'", "2 row_ids"]),
        (ShardGradients(IDS, GOOD.astype(np.float64), 1.0), InvalidInput, ["'t'", "float64"]),
        (ShardGradients(IDS.astype(np.int32), GOOD, 1.0), InvalidInput, ["'t'", "int32"]),
        (ShardGradients(IDS, GOOD, float("nan")), InvalidInput, ["'t'", "learning_rate"]),
        (ShardGradients(IDS, GOOD, -1.0), InvalidInput, ["'t'", "learning_rate=-1.0"]),
        (ShardGradients(IDS, GOOD, 1.0, np.ones(3, np.float32)), InvalidInput, ["'t'", "default_gradient", "4 values"]),
        (ShardGradients(IDS, GOOD, 1.0, np.full(4, np.nan, np.float32)), InvalidInput, ["'t'", "default row"]),
    ],
)  # fmt: skip
def test_a_bad_push_is_refused_and_changes_nothing(push, error, words) -> None:
    shard = _shard(TableSpec(name="t", dim=4, optimizer=OptimizerSpec(kind="sgd")))
    shard.pull(WHO, 1, {"t": IDS}, "float32").result(0)
    before = shard.lookup({"t": IDS}, "float32")["t"].values.tobytes()
    with _refused(error, *words):
        shard.push(WHO, 1, {"t": push}, "float32")
    with _refused(error, *words):  # also when the fault is in the last part
        shard.push(WHO, 1, {"t": ShardGradients(IDS, GOOD, 1.0)}, "float32", 0, 2)
        shard.push(WHO, 1, {"t": push}, "float32", 1, 2)
    assert shard.lookup({"t": IDS}, "float32")["t"].values.tobytes() == before
    assert shard.push(WHO, 1, {"t": ShardGradients(IDS, GOOD, 1.0)}, "float32").result(0).rows_applied == 2
    shard.close()


def test_calls_out_of_order_are_refused() -> None:
    shard = Shard()
    shard.create_tables([TableSpec(name="t", dim=4)])
    with _refused(NotReady, "no epoch"):
        shard.pull(WHO, 1, {}, "float32")
    shard.begin_epoch("job", 1, "sync", 3)
    with _refused(FencedEpoch, "epoch 1", "current epoch 3"):
        shard.pull(WHO, 1, {}, "float32")
    with _refused(FencedEpoch, "above the current epoch 3"):
        shard.begin_epoch("job", 1, "sync", 3)
    who = Identity("job", 3, 0)
    with _refused(StepGap, "step 2 skips step 1"):
        shard.pull(who, 2, {}, "float32")
    with _refused(StepGap, "step 5 skips step 1"):
        shard.push(who, 5, {}, "float32")
    with _refused(InvalidInput, "step=0"):
        shard.push(who, 0, {}, "float32")
    with _refused(InvalidInput, "worker=1"):
        shard.pull(Identity("job", 3, 1), 1, {}, "float32")
    with _refused(UnknownTable, "'u'", "tables: t"):
        shard.pull(who, 1, {"u": IDS}, "float32")
    with _refused(InvalidInput, "wire_dtype='int8'"):
        shard.pull(who, 1, {"t": IDS}, "int8")
    with _refused(InvalidInput, "part=2"):
        shard.push(who, 1, {}, "float32", 2, 2)
    with _refused(NotReady, "Advance at step 1"):
        shard.reselect(who, 1, {})
    with _refused(TableConflict, "dim: 4 != 8"):
        shard.create_tables([TableSpec(name="new", dim=4), TableSpec(name="t", dim=8)])
    assert list(shard.table_specs()) == ["t"]
    shard.close()


def test_a_row_of_another_shard_is_refused() -> None:
    shard = Shard(buckets=np.arange(NUM_BUCKETS) < 1)
    shard.create_tables([TableSpec(name="t", dim=4)])
    with _refused(InvalidInput, "row_id 1 ", "another shard"):
        shard.lookup({"t": np.array([1], np.int64)}, "float32")
    shard.close()


def test_repeated_row_ids_are_summed_in_a_push_and_read_alike_in_a_pull() -> None:
    shard = _shard(TableSpec(name="t", dim=4, optimizer=OptimizerSpec(kind="sgd"), init_min=0.0, init_max=0.0))
    ids = np.array([5, -1, 5], np.int64)
    rows = shard.pull(WHO, 1, {"t": ids}, "float32").result(0)["t"]
    assert rows.flags.tolist() == [5, 5, 5]
    values = np.array([[1] * 4, [10] * 4, [2] * 4], np.float32)
    shard.push(WHO, 1, {"t": ShardGradients(ids, values, 1.0)}, "float32").result(0)
    assert shard.lookup({"t": ids}, "float32")["t"].values[:, 0].tolist() == [-3.0, -10.0, -3.0]
    assert shard.stats().tables["t"].rows_hot == 2
    shard.close()


def test_epochs_survive_a_restart_of_the_shard(tmp_path) -> None:
    shard = Shard(data_dir=tmp_path)
    shard.begin_epoch("job", 2, "sync", 7)
    shard.close()
    again = Shard(data_dir=tmp_path)
    assert again.current_epoch("job").epoch == 7
    with _refused(FencedEpoch, "current epoch 7"):
        again.begin_epoch("job", 2, "sync", 7)
    again.close()
