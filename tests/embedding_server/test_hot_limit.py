"""Room under hot_bytes and under the memory limit: never above the cap, the coldest first, the control group last."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import hot_limit
from embedding_server.errors import InvalidInput
from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import compute_frostline, control_buckets
from embedding_server.reserved import PAGE_BYTES
from embedding_server.segment_growth import MAX_SCATTERED
from embedding_server.shard import Shard, ShardGradients
from embedding_server.slots import Slots
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE, Identity

STATE = TRAINABLE | DEFAULT | FOUND  # flags without the heat band
WHO = Identity("job", 1, 0)
NONE = np.empty(0, np.int64)
ALL = np.ones(NUM_BUCKETS, np.bool_)


def _spec(rows: int | None, dim: int = 16, **policy: object) -> TableSpec:
    spec = TableSpec(name="t", dim=dim, policy=PolicySpec(**{"idle_steps": 10**6, "control_fraction": 0.0} | policy))
    if rows is None:
        return spec
    hot_bytes = 4 * PAGE_BYTES + rows * hot_limit.hot_row_bytes(spec)
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"hot_bytes": hot_bytes})})


def _shard(*specs: TableSpec, **options: object) -> Shard:
    shard = Shard(backend="cpu", **options)
    shard.create_tables(specs)
    shard.begin_epoch("job", 1, "sync", 1)
    return shard


def _step(shard: Shard, step: int, ids: np.ndarray) -> np.ndarray:
    """Flags of the rows pulled."""
    rows = shard.pull(WHO, step, {"t": ids}, "float32").result(0)["t"]
    at = np.flatnonzero(rows.flags & TRAINABLE)
    ones = np.ones((at.shape[0], rows.values.shape[1]), np.float32)
    shard.push(WHO, step, {"t": ShardGradients(ids[at], ones, 0.1)}, "float32").result(0)
    return rows.flags & STATE


def _hot(shard: Shard, ids: np.ndarray) -> set[int]:
    flags = shard.lookup({"t": ids}, "float32")["t"].flags & STATE
    return set(ids[(flags & TRAINABLE) > 0].tolist())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_hot_bytes_is_not_passed_at_any_moment(data) -> None:
    kind = data.draw(st.sampled_from(["off", "idle", "compact", "topk"]))
    optimizer = OptimizerSpec(kind=data.draw(st.sampled_from(["sgd", "rowwise_adagrad", "adam"])))
    spec = _spec(30, kind=kind, idle_steps=2, probation_visits=1, hot_fraction=0.9, control_fraction=0.2)
    hot_bytes = 5 * PAGE_BYTES + data.draw(st.integers(0, 20_000))
    policy = spec.policy.model_copy(update={"hot_bytes": hot_bytes})
    shard = _shard(spec.model_copy(update={"policy": policy, "optimizer": optimizer}))
    table, grow = shard._tables["t"], Slots.grow

    def checked(slots: Slots, n: int) -> np.ndarray:
        out = grow(slots, n)
        stats = table.stats()
        assert stats.bytes_hot + stats.bytes_state <= hot_bytes
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "grow", checked)
        for step in range(1, data.draw(st.integers(2, 8))):
            first, n = data.draw(st.integers(0, 400)), data.draw(st.integers(0, 300))
            _step(shard, step, np.arange(first, first + n, dtype=np.int64))
            if data.draw(st.booleans()):
                histograms = shard.heat_histograms(WHO, step)
                lines = {name: compute_frostline(h, policy.hot_fraction) for name, h in histograms.items()}
                while not shard.reselect(WHO, step, lines)[1]:
                    pass
            stats = table.stats()
            assert stats.rows_hot + stats.rows_frozen == len(table.index)
            assert stats.bytes_hot + stats.bytes_state <= hot_bytes
            assert table.slots.num_taken == stats.rows_hot
    shard.close()


def test_at_the_cap_the_coldest_freeze() -> None:
    shard = _shard(_spec(100))
    warm, cold = np.arange(40, dtype=np.int64), np.arange(40, 100, dtype=np.int64)
    _step(shard, 1, cold)
    for step in (2, 3, 4):
        _step(shard, step, warm)
    _step(shard, 5, NONE)
    _step(shard, 6, NONE)
    new = np.arange(1000, 1030, dtype=np.int64)
    assert (_step(shard, 7, new) == TRAINABLE | FOUND).all()
    hot = _hot(shard, np.arange(2000, dtype=np.int64))
    assert set(warm.tolist()) | set(new.tolist()) <= hot
    stats = shard.stats().tables["t"]
    assert (stats.rows_hot, stats.rows_frozen, stats.moves_frozen_limit) == (100, 30, 30)
    assert stats.moves_frozen == 30
    shard.close()


def test_a_frozen_row_that_is_visited_thaws_in_place_of_a_colder_one() -> None:
    shard = _shard(_spec(50))
    for step in range(1, 5):
        _step(shard, step, np.arange((step - 1) * 25, step * 25, dtype=np.int64))
    assert _hot(shard, np.arange(100, dtype=np.int64)) == set(range(50, 100))
    _step(shard, 5, NONE)
    assert (_step(shard, 6, np.arange(10, dtype=np.int64)) == TRAINABLE | FOUND).all()
    hot = _hot(shard, np.arange(100, dtype=np.int64))
    assert hot >= set(range(10)) | set(range(75, 100))
    assert len(hot) == 50
    shard.close()


def test_the_control_group_freezes_last() -> None:
    spec = _spec(200, control_fraction=0.5)
    ids = np.arange(1200, dtype=np.int64)
    control = control_buckets(spec)[buckets_of(ids, NUM_BUCKETS)]
    inside, outside = ids[control][:100], ids[~control][:200]
    shard = _shard(spec)
    _step(shard, 1, inside)
    _step(shard, 2, outside[:100])
    for step in (3, 4):
        _step(shard, step, NONE)
    _step(shard, 5, outside[100:150])
    assert _hot(shard, ids) == {*inside.tolist(), *outside[50:150].tolist()} or _hot(shard, inside) == set(inside)
    assert _hot(shard, inside) == set(inside.tolist())  # though they are the coldest
    for step in (6, 7):
        _step(shard, step, NONE)
    assert (_step(shard, 8, 10_000 + np.arange(150, dtype=np.int64)) == TRAINABLE | FOUND).all()
    assert not _hot(shard, outside)
    assert len(_hot(shard, inside)) == 50  # no other row could
    shard.close()


@pytest.mark.parametrize("kind", ["off", "idle"])
def test_where_nothing_can_freeze_new_ids_read_the_default_row_and_an_event_says_so(kind: str) -> None:
    shard = _shard(_spec(100, kind=kind))
    flags = _step(shard, 1, np.arange(150, dtype=np.int64))
    assert (flags[:100] == TRAINABLE | FOUND).all()
    assert (flags[100:] == DEFAULT).all()
    (event,) = shard.stats().events
    assert "'t'" in event
    assert "hot_bytes=" in event
    assert "default row" in event
    _step(shard, 2, np.arange(160, dtype=np.int64))
    assert len(shard.stats().events) == 1  # said once
    shard.close()


def test_a_visited_frozen_row_stays_frozen_where_nothing_can_freeze() -> None:
    shard = _shard(_spec(20))
    _step(shard, 1, np.arange(20, dtype=np.int64))
    _step(shard, 2, NONE)
    _step(shard, 3, np.arange(20, 40, dtype=np.int64))
    flags = _step(shard, 4, np.arange(40, dtype=np.int64))
    assert (flags[:20] == FOUND).all()
    assert (flags[20:] == TRAINABLE | FOUND).all()
    shard.close()


def test_the_cap_is_shared_by_buckets() -> None:
    spec = _spec(None)
    big = spec.model_copy(update={"policy": spec.policy.model_copy(update={"hot_bytes": 1 << 20})})
    rows = [hot_limit.rows_under_cap(big, np.arange(NUM_BUCKETS) < owned) for owned in (256, 768, 1024, 0)]
    row_bytes = hot_limit.hot_row_bytes(big)
    shares = [(1 << 20) * owned // NUM_BUCKETS - 4 * PAGE_BYTES for owned in (256, 768, 1024)]
    assert rows == [*(share // row_bytes for share in shares), 0]
    assert hot_limit.rows_under_cap(spec, ALL) == 2**31 - 1


def test_a_cap_below_one_row_is_refused_before_any_table_is_made() -> None:
    small = _spec(None).model_copy(update={"policy": PolicySpec(hot_bytes=10_000)})
    shard = Shard(backend="cpu")
    with pytest.raises(InvalidInput, match=r"'t': hot_bytes=10000 .* set hot_bytes=(\d+) or more") as refused:
        shard.create_tables([TableSpec(name="other", dim=4), small])
    assert shard.table_specs() == {}
    least = int(str(refused.value).split("set hot_bytes=")[1].split()[0])
    shard.create_tables([small.model_copy(update={"policy": PolicySpec(hot_bytes=least)})])
    shard.close()


@pytest.mark.parametrize("at_once", [1 << 18, 500])
def test_in_a_large_table_rows_of_the_coldest_quarter_freeze(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Rows are visited 1 to 8 times. Four rounds of 1/16 each take mostly rows of one and two visits."""
    monkeypatch.setattr(hot_limit, "_SAMPLED_ENTRIES", 2_000)
    monkeypatch.setattr(hot_limit, "_ENTRIES_AT_ONCE", at_once)
    shard = _shard(_spec(8_000, dim=4, half_life_steps=2.0))
    ids = np.arange(8_000, dtype=np.int64)
    for step in range(1, 9):
        _step(shard, step, ids[ids % 8 >= step - 1])
    _step(shard, 9, NONE)
    for number, step in enumerate((10, 11, 12, 13)):
        new = np.arange(10_000, 10_500, dtype=np.int64) + 1_000 * number
        assert (_step(shard, step, new) == TRAINABLE | FOUND).all()
        frozen = np.setdiff1d(ids, sorted(_hot(shard, ids)))
        assert 500 * (number + 1) <= frozen.shape[0] <= 600 * (number + 1)
        assert np.mean(frozen % 8 <= 1) > 0.9 - 0.03 * number
    buckets = buckets_of(frozen, NUM_BUCKETS)
    assert np.bincount(buckets // 256).min() > 0.7 * frozen.shape[0] / 4  # the rounds went on where the last had ended
    shard.close()


def test_rows_that_cannot_freeze_do_not_keep_others_from_it() -> None:
    shard = _shard(_spec(64))
    _step(shard, 1, np.arange(32, dtype=np.int64))
    table = shard._tables["t"]
    slots = table.index.locate(np.arange(32, dtype=np.int64))[1].astype(np.int32)
    weights, state = table.hot.read(slots)
    table.hot.write(slots, np.full_like(weights, np.nan), state)
    _step(shard, 2, np.arange(32, 64, dtype=np.int64))
    for step in (3, 4):
        _step(shard, step, NONE)
    assert (_step(shard, 5, np.arange(100, 116, dtype=np.int64)) == TRAINABLE | FOUND).all()
    assert _hot(shard, np.arange(32, dtype=np.int64)) == set(range(32))
    shard.close()


def test_compaction_that_was_under_way_gives_its_slots_to_new_rows_at_the_cap() -> None:
    shard = _shard(_spec(300, idle_steps=1))
    table = shard._tables["t"]
    _step(shard, 1, np.arange(300, dtype=np.int64))
    _step(shard, 2, np.arange(150, dtype=np.int64))
    while not shard.reselect(WHO, 2, {})[1]:
        pass
    _step(shard, 3, np.arange(1000, 1150, dtype=np.int64))
    for first in range(150):
        table.slots.give_back(np.empty(0, np.int32))
        assert table.slots.num_taken <= 300, first
    table.slots.begin_compaction()
    assert (_step(shard, 4, np.arange(2000, 2140, dtype=np.int64)) == TRAINABLE | FOUND).all()
    assert table.slots.high_water <= 300
    shard.close()


@pytest.mark.parametrize("num_entries", [0, 1, 5_000])
def test_a_walk_covers_every_bucket_once_from_any_start(num_entries: int) -> None:
    shard = _shard(_spec(None, kind="off"))
    _step(shard, 1, np.arange(num_entries, dtype=np.int64))
    table = shard._tables["t"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot_limit, "_ENTRIES_AT_ONCE", 100)
        for start in (0, 1, 500, 1023):
            ranges = hot_limit._walk(table, start)
            assert ranges[0][0] == start
            covered = np.concatenate([np.arange(first, last) for first, last in ranges])
            assert np.array_equal(np.sort(covered), np.arange(NUM_BUCKETS))
    shard.close()


def test_a_small_segment_at_every_step_never_uses_up_their_slots() -> None:
    """Without background work between the steps: a busy shard hardly gets to it."""
    with ThreadPoolExecutor(1) as writer:
        shard = _shard(_spec(96), writer=writer)
        table, rows_a_step = shard._tables["t"], 32
        values: dict[int, bytes] = {}
        for step in range(1, 400):
            ids = np.arange(step * rows_a_step, (step + 1) * rows_a_step, dtype=np.int64)
            assert (_step(shard, step, ids) == TRAINABLE | FOUND).all(), step
            frozen = ids[:1] - 10 * rows_a_step  # it froze some steps ago
            if step > 10:
                values[int(frozen[0])] = shard.lookup({"t": frozen}, "float32")["t"].values.tobytes()
            assert table.segments.num_segments <= 4 * MAX_SCATTERED
        ids = np.array(list(values), np.int64)
        rows = shard.lookup({"t": ids}, "float32")["t"]
        assert (rows.flags & STATE == FOUND).all()
        assert [row.tobytes() for row in rows.values] == list(values.values())
        shard.close()
