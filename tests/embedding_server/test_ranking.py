"""Re-selection by rank through real shards: the same on any number of them, and what a dictionary of heat says."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server import ranking
from embedding_server.hot_limit import give_back
from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import compute_frostline, control_buckets, is_above, may_move, rank_bins
from embedding_server.spec import OptimizerSpec, PolicySpec, ScheduleSpec, TableSpec
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS, Frostline
from tests.embedding_server.ranked_shards import WHO, RankedShards

DIM = 4


def _spec(**policy) -> TableSpec:
    knobs = {"kind": "topk", "hot_fraction": 0.3, "probation_visits": 2, "half_life_steps": 20.0, "frozen_bits": 32}
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=OptimizerSpec(kind="adagrad"),
        policy=PolicySpec(**{**knobs, **policy}),
    )


def _batches(seed: int, num_steps: int, num_ids: int = 600, size: int = 80) -> list[np.ndarray]:
    """Skewed visits, so that heat and visits differ; row_ids of both signs."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(2**62, num_ids, replace=False) - 2**61
    weight = 1.0 / np.arange(1, num_ids + 1)
    return [np.sort(rng.choice(ids, size, replace=False, p=weight / weight.sum())) for _ in range(num_steps)]


KNOBS = [
    {},
    {"select": "random"},
    {"select": "score", "score": "heat"},
    {"select": "score", "score": "heat_x_grad"},
    {"select": "score", "score": "abs_weight"},
    {"select": "score", "score": "abs_weight_x_grad", "frozen_bits": 8},
    {"hysteresis": 0.5, "max_moves_fraction": 0.1},
    {"resume": False, "probation_visits": 0},
    {"schedule": ScheduleSpec(kind="cubic", warmup_steps=5, steps=30), "control_fraction": 0.3},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs)) or "plain")
def test_three_shards_do_what_one_does(knobs: dict) -> None:
    spec = _spec(**knobs)
    with RankedShards(spec) as one, RankedShards(spec, 3) as three:
        for step, batch in enumerate(_batches(1, 40), 1):
            gradients = np.random.default_rng(step).normal(size=(batch.shape[0], DIM)).astype(np.float32)
            assert np.array_equal(one.train(batch, gradients), three.train(batch, gradients))
            if step % 8 == 0:
                assert one.reselect() == three.reselect()
                assert one.entries() == three.entries()
        assert 0 < len(one.hot()) < len(one.entries())
        frozen = np.array(sorted(one.entries().keys() - one.hot()))
        assert np.array_equal(one.values(frozen), three.values(frozen))


def _expected_hot(shards: RankedShards, before: dict, visits: dict[int, int], frostline: Frostline) -> set[int]:
    """Row by row, from the heat codes and visits before the re-selection."""
    policy = shards.spec.policy
    hot = set()
    control = control_buckets(shards.spec)
    for row_id, (was_hot, code) in before.items():
        ids = np.array([row_id])
        bins = rank_bins(policy, ids, np.array([code], np.uint16))
        above = bool(is_above(frostline, bins, ids)[0])
        may = bool(may_move(frostline, bins, ids, shards.step)[0]) and (was_hot or policy.resume)
        is_control = control[buckets_of(ids, NUM_BUCKETS)[0]]
        on_probation = was_hot and visits[row_id] < policy.probation_visits
        if is_control or on_probation or (above if may else was_hot):
            hot.add(row_id)
    return hot


@pytest.mark.parametrize("knobs", [k for k in KNOBS if k.get("select") != "score"], ids=str)
def test_a_reselection_is_what_the_rules_say_row_by_row(knobs: dict) -> None:
    shards = RankedShards(_spec(**knobs), 2)
    visits: dict[int, int] = {}
    with shards:
        for step, batch in enumerate(_batches(2, 60), 1):
            before = shards.entries()
            trainable = shards.train(batch)
            for row_id, trained in zip(batch.tolist(), trainable.tolist(), strict=True):
                if row_id not in before:
                    visits[row_id] = 1 if trained else 0
                elif before[row_id][0]:
                    visits[row_id] += 1
            if step % 10:
                continue
            before = shards.entries()
            histogram = shards.histogram()
            frostline = shards.reselect()
            assert shards.hot() == _expected_hot(shards, before, visits, frostline)
            _check_histogram(shards, before, visits, histogram)
        assert 0 < len(shards.hot()) < len(shards.entries())


def _check_histogram(shards: RankedShards, before: dict, visits: dict[int, int], histogram) -> None:
    control = control_buckets(shards.spec)
    counts, counts_hot = np.zeros((2, NUM_RANK_BINS), np.int64)
    total = probation = 0
    for row_id, (is_hot, code) in before.items():
        if control[buckets_of(np.array([row_id]), NUM_BUCKETS)[0]]:
            continue
        total += 1
        if is_hot and visits[row_id] < shards.spec.policy.probation_visits:
            probation += 1
            continue
        ranked = rank_bins(shards.spec.policy, np.array([row_id]), np.array([code], np.uint16))[0]
        counts[ranked] += 1
        counts_hot[ranked] += is_hot
    assert np.array_equal(histogram.counts, counts)
    assert np.array_equal(histogram.counts_hot, counts_hot)
    assert (histogram.rows_total, histogram.rows_probation) == (total, probation)


def test_hot_rows_past_probation_are_the_fraction_whatever_the_number_of_shards() -> None:
    for num_shards in (1, 4):
        with RankedShards(_spec(probation_visits=0, control_fraction=0.0, hot_fraction=0.25), num_shards) as shards:
            for batch in _batches(3, 60, num_ids=2000, size=300):
                shards.train(batch)
            shards.reselect()
            rows = len(shards.entries())
            assert len(shards.hot()) == pytest.approx(0.25 * rows, abs=5)


def test_without_resuming_a_frozen_row_stays_as_it_is_for_good() -> None:
    with RankedShards(_spec(resume=False, probation_visits=1, control_fraction=0.0, frozen_bits=8)) as shards:
        batches = _batches(4, 30)
        for batch in batches:
            shards.train(batch)
        shards.reselect()
        frozen = np.array(sorted(shards.entries().keys() - shards.hot()))
        values = shards.values(frozen)
        for _ in range(12):  # the frozen rows are now the hottest by far
            assert not shards.train(frozen).any()
            shards.reselect()
        assert not shards.hot() & set(frozen.tolist())
        assert np.array_equal(shards.values(frozen), values)
        stats = shards.shards[0].stats().tables["t"]
        assert stats.moves_thawed == 0
        assert stats.rows_ignored == 0


def test_with_resuming_the_same_rows_thaw_at_the_next_reselection_and_not_before() -> None:
    with RankedShards(_spec(probation_visits=1, control_fraction=0.0)) as shards:
        for batch in _batches(4, 30):
            shards.train(batch)
        shards.reselect()
        frozen = np.array(sorted(shards.entries().keys() - shards.hot()))[:100]
        assert not shards.train(frozen).any()
        for _ in range(12):
            shards.train(frozen)
        assert not shards.hot() & set(frozen.tolist())
        shards.reselect()
        assert set(frozen.tolist()) <= shards.hot()


def test_rows_on_probation_freeze_when_idle_and_train_again_at_a_visit() -> None:
    spec = _spec(probation_visits=3, idle_steps=5, resume=False, control_fraction=0.0, hot_fraction=0.1, frozen_bits=8)
    rare, often = np.arange(50, dtype=np.int64), np.arange(100, 150, dtype=np.int64)
    with RankedShards(spec) as shards:
        stats = lambda: shards.shards[0].stats().tables["t"]  # noqa: E731
        shards.train(rare)
        for _ in range(4):
            shards.train(often)
        shards.reselect()  # one visit, four steps ago: on probation, and not idle yet
        assert set(rare.tolist()) <= shards.hot()
        assert len(shards.hot()) == pytest.approx(60, abs=5)
        shards.train(often[:0])
        shards.reselect()
        assert not shards.hot() & set(rare.tolist())
        assert stats().moves_frozen_idle == 50
        for visits in (2, 3):
            assert shards.train(rare).all(), "a visit on probation trains"
            assert stats().moves_thawed_visit == 50 * (visits - 1)
            for _ in range(5):
                shards.train(often[:0])
            shards.reselect()  # idle at 2 visits; at 3 ranked, among the 100 rows with as many or more
            assert stats().moves_frozen_idle == 100
        late = shards.train(rare)
        assert late.sum() <= 15, "past probation, a visit thaws nothing"
        assert stats().moves_thawed_visit == 100
        assert stats().moves_thawed_rank == 0
        assert stats().rows_ignored == 0


def test_while_the_schedule_keeps_all_rows_hot_idle_rows_on_probation_stay_too() -> None:
    spec = _spec(probation_visits=3, idle_steps=2, control_fraction=0.0, schedule=ScheduleSpec(warmup_steps=10))
    ids = np.arange(40, dtype=np.int64)
    with RankedShards(spec) as shards:
        shards.train(ids)
        for _ in range(9):
            shards.train(ids[:0])
        shards.reselect()
        assert len(shards.hot()) == 40  # step 10: the share is 1 still
        shards.train(ids[:0])
        shards.reselect()
        stats = shards.shards[0].stats().tables["t"]
        assert not shards.hot()
        assert stats.moves_frozen_idle == stats.moves_frozen == 40
        for _ in range(3):  # the frostline is below all rows that are ranked, which are none
            shards.train(ids[:0])
            assert shards.reselect().bin == -1
        assert not shards.hot()
        assert shards.histogram().rows_probation == 40


def test_rows_under_control_never_freeze_by_rank_and_thaw_if_a_limit_froze_them() -> None:
    spec = _spec(probation_visits=0, hot_fraction=0.01, control_fraction=0.25)
    with RankedShards(spec, 2) as shards:
        for batch in _batches(5, 40):
            shards.train(batch)
        shards.reselect()
        ids = np.array(sorted(shards.entries()))
        control = ids[control_buckets(spec)[buckets_of(ids, NUM_BUCKETS)]]
        assert 0.15 * ids.shape[0] < control.shape[0]
        assert set(control.tolist()) <= shards.hot()
        assert len(shards.hot()) == pytest.approx(control.shape[0] + 0.01 * (ids.shape[0] - control.shape[0]), abs=3)
        for shard, table in zip(shards.shards, shards.tables, strict=True):
            give_back(table, 10**9, shards.step + 10)  # as at the memory limit
            assert shard.stats().tables["t"].rows_hot < control.shape[0]
        shards.reselect()
        assert set(control.tolist()) <= shards.hot()


def test_collecting_heat_in_many_small_slices_gives_the_same_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankedShards(_spec()) as shards:
        for batch in _batches(6, 30):
            shards.train(batch)
        whole = shards.histogram()
        monkeypatch.setattr(ranking, "HISTOGRAM_ENTRIES", 40)
        shard, bucket, total, calls = shards.shards[0], 0, None, 0
        while bucket < NUM_BUCKETS:
            parts, last = shard.heat_slice(WHO, shards.step, bucket)
            assert parts["t"].rows_total <= 40
            assert last > bucket
            total = parts["t"] if total is None else total + parts["t"]
            bucket, calls = last, calls + 1
        assert calls >= len(shards.entries()) / 40
        assert np.array_equal(total.counts, whole.counts)
        assert np.array_equal(total.counts_hot, whole.counts_hot)
        assert (total.rows_total, total.rows_probation) == (whole.rows_total, whole.rows_probation)
        assert compute_frostline(total, 0.3) == compute_frostline(whole, 0.3)


def test_the_slices_of_a_score_that_reads_rows_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_SCORED_VALUES", 64 * DIM)
    sizes: list[int] = []
    split = ranking.split_at_frostline

    def recorded(table, entries, step):
        sizes.append(entries.row_ids.shape[0])
        return split(table, entries, step)

    monkeypatch.setattr("embedding_server.reselection.split_at_frostline", recorded)
    with RankedShards(_spec(select="score", score="abs_weight")) as shards:
        for batch in _batches(7, 30):
            shards.train(batch)
        assert ranking.entries_per_slice(shards.tables[0]) == 64
        shards.reselect()
        assert sum(sizes) == len(shards.entries())
        assert max(sizes) <= 64
    with RankedShards(_spec()) as shards:
        assert ranking.entries_per_slice(shards.tables[0]) == ranking.ENTRIES_PER_SLICE


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("hotter", [0, 1, None])
def test_of_a_table_of_two_rows_the_hotter_trains_on(num_shards: int, hotter: int | None) -> None:
    """None: both are as hot, so both do."""
    policy = PolicySpec(kind="topk", hot_fraction=0.4, probation_visits=1, half_life_steps=100, control_fraction=0.0)
    row_ids = np.array([3, 8], np.int64)
    with RankedShards(TableSpec(name="t", dim=4, policy=policy), num_shards) as shards:
        shards.train(row_ids)
        for _ in range(3):
            shards.train(row_ids if hotter is None else row_ids[[hotter]])
        shards.reselect()
        assert shards.hot() == ({3, 8} if hotter is None else {int(row_ids[hotter])})
