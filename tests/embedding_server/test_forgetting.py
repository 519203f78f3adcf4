"""Rows that are forgotten: what goes, what stays, what comes back as new, and that a pass is bounded and repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server import table_pass
from embedding_server.errors import NotReady
from embedding_server.hot_limit import freeze_coldest
from embedding_server.index import INITIAL
from embedding_server.inproc import InprocStore
from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import control_buckets
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE, Frostline, Identity, Moves, RoutedIds

STATE = TRAINABLE | DEFAULT | FOUND  # flags without the heat band
WHO = Identity("job", 1, 0)
NONE = np.empty(0, np.int64)


def _spec(name: str = "t", **policy: object) -> TableSpec:
    chosen = PolicySpec(**{"kind": "compact", "idle_steps": 1, "control_fraction": 0.0, "frozen_bits": 32} | policy)
    return TableSpec(name=name, dim=4, optimizer=OptimizerSpec(kind="sgd"), policy=chosen, init_min=0.0, init_max=0.0)


def _shard(*specs: TableSpec, **options: object) -> Shard:
    shard = Shard(backend="cpu", **options)
    shard.create_tables(specs)
    shard.begin_epoch("job", 1, "sync", 1)
    return shard


def _step(shard: Shard, step: int, ids: np.ndarray, table: str = "t") -> np.ndarray:
    rows = shard.pull(WHO, step, {table: ids}, "float32").result(0)[table]
    at = np.flatnonzero(rows.flags & TRAINABLE)
    ones = np.ones((at.shape[0], 4), np.float32)
    shard.push(WHO, step, {table: ShardGradients(ids[at], ones, 1.0)}, "float32").result(0)
    return rows.flags & STATE


def _all(work, *arguments: object) -> dict[str, Moves]:
    total: dict[str, Moves] = {}
    done = False
    while not done:
        moves, done = work(*arguments)
        total = {name: total.get(name, Moves()) + moves.get(name, Moves()) for name in total.keys() | moves.keys()}
    return total


def _visit(shard: Shard, times: dict[int, int], first_step: int = 1) -> int:
    """Row i is visited times[i] times. Returns the last step, in which nobody is visited."""
    step = first_step
    for turn in range(max(times.values())):
        _step(shard, step, np.array([i for i, n in times.items() if n > turn], np.int64))
        step += 1
    _step(shard, step, NONE)
    return step


def test_idle_rows_of_few_visits_are_forgotten_and_the_others_freeze() -> None:
    shard = _shard(_spec(forget_below=3))
    step = _visit(shard, {1: 1, 2: 2, 3: 3, 4: 4})
    assert _all(shard.reselect, WHO, step, {}) == {"t": Moves(frozen=2, forgotten=2)}
    flags = shard.lookup({"t": np.arange(1, 5)}, "float32")["t"].flags & STATE
    assert flags.tolist() == [0, 0, FOUND, FOUND]
    stats = shard.stats().tables["t"]
    assert (stats.rows_hot, stats.rows_frozen, stats.moves_frozen_idle, stats.moves_forgotten) == (0, 2, 2, 2)
    assert shard._tables["t"].slots.num_taken == 0
    shard.close()


def test_rows_that_are_not_idle_are_not_forgotten() -> None:
    shard = _shard(_spec(forget_below=200, idle_steps=3))
    _step(shard, 1, np.array([1]))
    _step(shard, 2, np.array([2]))
    _step(shard, 3, NONE)
    assert _all(shard.reselect, WHO, 3, {}) == {"t": Moves()}
    _step(shard, 4, NONE)
    assert _all(shard.reselect, WHO, 4, {}) == {"t": Moves(forgotten=1)}
    shard.close()


def test_a_forgotten_id_comes_back_as_a_new_row_and_is_counted_anew() -> None:
    shard = _shard(_spec(forget_below=255, min_count=2))
    ids = np.array([7], np.int64)
    assert _step(shard, 1, ids).tolist() == [DEFAULT]
    assert _step(shard, 2, ids).tolist() == [TRAINABLE | FOUND]
    _step(shard, 3, ids)
    assert shard.lookup({"t": ids}, "float32")["t"].values.tolist() == [[-2.0] * 4]
    _step(shard, 4, NONE)
    assert _all(shard.reselect, WHO, 4, {})["t"].forgotten == 1
    assert _step(shard, 5, ids).tolist() == [DEFAULT]  # below min_count again
    assert _step(shard, 6, ids).tolist() == [TRAINABLE | FOUND]
    assert shard.lookup({"t": ids}, "float32")["t"].values.tolist() == [[-1.0] * 4]  # from its initial value
    shard.close()


def test_a_pushed_gradient_of_a_forgotten_row_is_ignored() -> None:
    shard = _shard(_spec(forget_below=255))
    ids = np.array([7, 8], np.int64)
    _step(shard, 1, ids)
    _step(shard, 2, NONE)
    _all(shard.reselect, WHO, 2, {})
    shard.pull(WHO, 3, {"t": ids[:1]}, "float32").result(0)
    push = ShardGradients(ids, np.ones((2, 4), np.float32), 1.0)
    ack = shard.push(WHO, 3, {"t": push}, "float32").result(0)
    assert (ack.rows_applied, ack.rows_ignored) == (1, 1)
    shard.close()


@pytest.mark.parametrize("kind", ["idle", "compact", "topk"])
def test_the_end_of_a_data_pass_forgets_rare_rows_hot_or_frozen(kind: str) -> None:
    shard = _shard(_spec(kind=kind, forget_below=3, epoch_end="forget_rare", probation_visits=1, idle_steps=3))
    _step(shard, 1, np.array([1, 2]))
    _step(shard, 2, np.array([2]))
    _step(shard, 3, np.array([2]))
    _step(shard, 4, np.array([3, 4]))
    for step in (5, 6):
        _step(shard, step, np.array([4]))
    if kind != "compact":  # there it would be forgotten at once
        _all(shard.reselect, WHO, 6, {"t": Frostline(4095)} if kind == "topk" else {})
        assert shard.stats().tables["t"].rows_frozen > 0
    assert _all(shard.end_data_pass, WHO, 6) == {"t": Moves(forgotten=2)}
    flags = shard.lookup({"t": np.arange(1, 5)}, "float32")["t"].flags & STATE
    assert (flags & FOUND).tolist() == [0, FOUND, 0, FOUND]
    assert shard.stats().tables["t"].moves_forgotten == 2
    shard.close()


def test_policy_off_and_epoch_end_keep_forget_nothing() -> None:
    shard = _shard(_spec("off", kind="off", epoch_end="forget_rare"), _spec("keep", forget_below=255))
    shard.pull(WHO, 1, {"off": np.arange(5), "keep": np.arange(5)}, "float32").result(0)
    shard.push(WHO, 1, {}, "float32").result(0)
    assert _all(shard.end_data_pass, WHO, 1) == {}
    assert [table.rows_hot for table in shard.stats().tables.values()] == [5, 5]
    shard.close()


def test_rows_that_start_frozen_at_their_initial_value_have_had_no_visits() -> None:
    shard = _shard(_spec(kind="topk", probation_visits=0, epoch_end="forget_rare", forget_below=1, hot_fraction=0.5))
    _step(shard, 1, np.arange(10))
    _all(shard.reselect, WHO, 1, {"t": Frostline(4095)})
    _step(shard, 2, np.arange(10, 20))
    table = shard._tables["t"]
    assert (table.index.locate(np.arange(10, 20))[1] == INITIAL).all()
    assert _all(shard.end_data_pass, WHO, 2) == {"t": Moves(forgotten=10)}
    assert table.rows_frozen == 10
    shard.close()


def test_the_control_group_is_never_forgotten_nor_frozen_for_idleness() -> None:
    spec = _spec(forget_below=2, control_fraction=0.5, epoch_end="forget_rare")
    ids = np.arange(400, dtype=np.int64)
    control = control_buckets(spec)[buckets_of(ids, NUM_BUCKETS)]
    shard = _shard(spec)
    _step(shard, 1, ids)
    _step(shard, 2, ids[::2])
    _step(shard, 3, NONE)
    _all(shard.reselect, WHO, 3, {})
    _all(shard.end_data_pass, WHO, 3)
    flags = shard.lookup({"t": ids}, "float32")["t"].flags & STATE
    assert (flags[control] == TRAINABLE | FOUND).all()
    assert not (flags[~control] & TRAINABLE).any()
    assert ((flags[~control] & FOUND) > 0).tolist() == (ids[~control] % 2 == 0).tolist()
    shard.close()


def test_rows_that_a_limit_froze_early_are_forgotten_once_their_heat_shows_that_they_are_idle() -> None:
    shard = _shard(_spec(forget_below=2, idle_steps=4, half_life_steps=2.0))
    _step(shard, 1, np.array([1, 2]))
    _step(shard, 2, np.array([2]))
    _step(shard, 3, NONE)
    table = shard._tables["t"]
    assert freeze_coldest(table, 2, 3 + 1) == 2
    assert table.has_rare_frozen
    step = 3
    while table.has_rare_frozen:
        _all(shard.reselect, WHO, step, {})
        step += 1
        _step(shard, step, NONE)
    assert step - 1 == 6  # the first step at which its last visit was more than idle_steps ago
    flags = shard.lookup({"t": np.array([1, 2])}, "float32")["t"].flags & STATE
    assert flags.tolist() == [0, FOUND]
    assert (table.moves_frozen_limit, table.moves_forgotten) == (2, 1)
    shard.close()


def test_segments_and_index_give_back_what_forgotten_rows_took() -> None:
    shard = _shard(_spec(kind="idle", epoch_end="forget_rare", forget_below=2))
    ids = np.arange(20_000, dtype=np.int64)
    _step(shard, 1, ids)
    _step(shard, 2, ids[:2_000])
    _step(shard, 3, NONE)
    _all(shard.reselect, WHO, 3, {})
    while shard.maintain():
        pass
    before = shard.stats().tables["t"]
    _all(shard.end_data_pass, WHO, 3)
    while shard.maintain():
        pass
    after = shard.stats().tables["t"]
    assert (before.rows_frozen, after.rows_frozen) == (20_000, 2_000)
    assert after.bytes_index < 0.2 * before.bytes_index
    assert after.bytes_frozen < 0.6 * before.bytes_frozen  # the rest is fixed bytes of a file and its folder
    assert after.bytes_peak >= before.bytes_total > after.bytes_total
    assert (shard.lookup({"t": ids[:2_000]}, "float32")["t"].values == -2.0).all()
    shard.close()


def test_a_pass_goes_in_slices_and_a_new_epoch_ends_it_with_every_table_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_pass, "ENTRIES_PER_SLICE", 500)
    shard = _shard(_spec(epoch_end="forget_rare", forget_below=2))
    ids = np.arange(5_000, dtype=np.int64)
    _step(shard, 1, ids)
    moves, done = shard.end_data_pass(WHO, 1)
    assert not done
    assert 0 < moves["t"].forgotten < 1_500
    shard.begin_epoch("job", 1, "sync", 2)
    left = shard.stats().tables["t"].rows_hot
    assert left == 5_000 - moves["t"].forgotten
    flags = shard.lookup({"t": ids}, "float32")["t"].flags & STATE
    assert np.count_nonzero(flags == TRAINABLE | FOUND) == left
    who = Identity("job", 2, 0)
    slices, forgotten, done = 0, 0, False
    while not done:
        moves, done = shard.end_data_pass(who, 1)
        forgotten += moves["t"].forgotten if moves else 0
        slices += 1
    assert forgotten == left
    assert slices > 3
    shard.close()


def test_another_pass_ends_the_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_pass, "ENTRIES_PER_SLICE", 500)
    shard = _shard(_spec(epoch_end="forget_rare", forget_below=2))
    _step(shard, 1, np.arange(5_000, dtype=np.int64))
    _step(shard, 2, NONE)
    assert not shard.end_data_pass(WHO, 2)[1]
    first = shard.stats().tables["t"].moves_forgotten
    assert _all(shard.reselect, WHO, 2, {})["t"].forgotten == 5_000 - first
    assert len(shard._tables["t"].index) == 0
    shard.close()


def test_the_end_of_a_data_pass_needs_the_step_applied() -> None:
    shard = _shard(_spec(epoch_end="forget_rare"))
    shard.pull(WHO, 1, {"t": NONE}, "float32").result(0)
    with pytest.raises(NotReady, match="Drain"):
        shard.end_data_pass(WHO, 1)
    shard.close()


def test_a_store_sums_the_slices() -> None:
    store = InprocStore(memory_limit_bytes=64 << 20)
    store.create_tables([_spec(epoch_end="forget_rare", forget_below=2)])
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    n = 100_000
    store.pull(who, 1, {"t": RoutedIds(np.arange(n, dtype=np.int64), np.array([0, n]))})
    store.push(who, 1, {})
    assert store.end_data_pass(who, 1) == {"t": Moves(forgotten=n)}
    store.close()
