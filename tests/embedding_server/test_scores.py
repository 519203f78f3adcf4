from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server import scores
from embedding_server.errors import InvalidInput
from embedding_server.heat import heat_of_codes
from embedding_server.index import Entries
from embedding_server.kernels.cpu import initial_values
from embedding_server.optimizers import table_seed
from embedding_server.scores import ScoredRows, bins_of_scores, check_score, register_score, score_names
from embedding_server.shard import Shard
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, NUM_RANK_BINS
from tests.embedding_server.ranked_shards import RankedShards

DIM = 8
IDS = np.arange(-20, 40, dtype=np.int64)


def _spec(score: str = "heat_x_grad", kind: str = "adagrad", **policy) -> TableSpec:
    knobs = {"probation_visits": 0, "half_life_steps": 10.0, "frozen_bits": 32, "control_fraction": 0.0, **policy}
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=OptimizerSpec(kind=kind, initial_accumulator=0.1),
        policy=PolicySpec(kind="topk", select="score", score=score, **knobs),
    )


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that a test registers are gone after it."""
    monkeypatch.setattr(scores, "_REGISTRY", dict(scores._REGISTRY))


def _scored(shards: RankedShards) -> ScoredRows:
    table = shards.tables[0]
    return ScoredRows(table, table.index.scan(0, NUM_BUCKETS), shards.step)


def _train(shards: RankedShards, num_steps: int, scale: float = 1e-3) -> dict[int, list[np.ndarray]]:
    """Gradients by row, as the optimizer saw them; small ones, as means over a batch are."""
    seen: dict[int, list[np.ndarray]] = {}
    rng = np.random.default_rng(3)
    for _ in range(num_steps):
        batch = np.sort(rng.choice(IDS, 25, replace=False))
        size = scale * np.exp2(np.abs(batch) % 7)[:, None]  # differs from row to row
        gradients = (size * rng.normal(size=(batch.shape[0], DIM))).astype(np.float32)
        trained = shards.train(batch, gradients)
        for i in np.flatnonzero(trained):
            seen.setdefault(int(batch[i]), []).append(gradients[i].astype(np.float64))
    return seen


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "adam", "ftrl"])
def test_gradient_norm_is_the_root_mean_square_over_visits_hot_or_frozen(kind: str) -> None:
    with RankedShards(_spec(kind=kind, hot_fraction=0.4, resume=False)) as shards:
        seen = _train(shards, 60)
        expected = {r: np.sqrt(np.mean([g @ g for g in gradients])) for r, gradients in seen.items()}
        if kind == "adam":  # a weighted mean, later visits more, corrected for the zero that it starts from
            beta2 = shards.spec.optimizer.beta2
            for row_id, gradients in seen.items():
                weight = beta2 ** np.arange(len(gradients) - 1, -1, -1)
                expected[row_id] = np.sqrt(weight @ [g @ g for g in gradients] / weight.sum())
        hot = _scored(shards)
        assert hot.is_hot.all()
        wanted = np.array([expected[r] for r in hot.row_ids.tolist()])
        np.testing.assert_allclose(hot.gradient_norm, wanted, rtol=0.01)
        shards.reselect()
        now = _scored(shards)
        assert 0.3 < now.is_hot.mean() < 0.5
        np.testing.assert_allclose(now.gradient_norm[now.is_hot], wanted[now.is_hot], rtol=0.01)
        np.testing.assert_allclose(now.gradient_norm, wanted, rtol=0.055)  # 4.5% of the byte, 1% of float32 sums
        assert wanted.max() / wanted.min() > 30


def test_heat_weights_and_visits_are_those_of_the_row_hot_frozen_or_never_trained() -> None:
    spec = _spec("abs_weight", hot_fraction=0.3, frozen_bits=8)
    with RankedShards(spec) as shards:
        _train(shards, 30, scale=1.0)
        shards.reselect()
        entries = shards.entries()
        rows = _scored(shards)
        assert rows.is_hot.tolist() == [entries[r][0] for r in rows.row_ids.tolist()]
        codes = np.array([entries[r][1] for r in rows.row_ids.tolist()], np.uint16)
        np.testing.assert_allclose(rows.heat, heat_of_codes(codes, shards.step, 10.0))
        assert np.array_equal(rows.weights, shards.values(rows.row_ids))
        assert rows.visits.sum() == 30 * 25
    by_hash = spec.model_copy(
        update={"policy": spec.policy.model_copy(update={"select": "random", "hot_fraction": 0.01})}
    )
    with RankedShards(by_hash) as shards:
        shards.train(IDS)
        shards.reselect()
        fresh = np.arange(1000, 1050)
        assert not shards.train(fresh).all()  # without probation a new row below the frostline starts frozen
        rows = _scored(shards)
        new = np.flatnonzero((rows.row_ids >= 1000) & ~rows.is_hot)
        start = initial_values(rows.row_ids[new], table_seed(by_hash), DIM, by_hash.init_min, by_hash.init_max)
        assert np.array_equal(rows.weights[new], start)
        assert not rows.visits[new].any()
        assert not rows.gradient_norm[new].any()


@pytest.mark.parametrize("hot_bits", [16, 32])
def test_weights_are_those_that_a_look_up_reads_with_decay_that_is_still_owed(hot_bits: int) -> None:
    spec = _spec("abs_weight", hot_fraction=0.5, hot_bits=hot_bits)
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"weight_decay": 0.5})})
    with RankedShards(spec) as shards:
        _train(shards, 30, scale=1.0)
        rows = _scored(shards)
        np.testing.assert_allclose(rows.weights, shards.values(rows.row_ids), rtol=2e-3, atol=1e-7)
        assert not np.allclose(rows.weights, shards.tables[0].hot.read(rows._slots)[0], rtol=2e-3)
        shards.reselect()
        after = _scored(shards)
        np.testing.assert_allclose(after.weights, shards.values(rows.row_ids), rtol=2e-3, atol=1e-7)
        size = np.abs(rows.weights).mean(axis=1)
        assert size[after.is_hot].min() > 0.98 * size[~after.is_hot].max()


def test_scores_are_the_products_of_their_names() -> None:
    with RankedShards(_spec(hot_fraction=0.5)) as shards:
        _train(shards, 30)
        shards.reselect()
        rows = _scored(shards)
        abs_weight = np.abs(rows.weights).mean(axis=1)
        wanted = {
            "heat": rows.heat,
            "heat_x_grad": rows.heat * rows.gradient_norm,
            "abs_weight": abs_weight,
            "abs_weight_x_grad": abs_weight * rows.gradient_norm,
        }
        assert score_names() == sorted(wanted)
        for name, expected in wanted.items():
            np.testing.assert_allclose(scores._REGISTRY[name].score(rows), expected, rtol=1e-6)


@pytest.mark.parametrize("score", ["heat_x_grad", "abs_weight", "abs_weight_x_grad"])
def test_the_rows_that_stay_hot_are_those_of_the_highest_scores(score: str) -> None:
    with RankedShards(_spec(score, hot_fraction=0.3)) as shards:
        _train(shards, 40)
        rows = _scored(shards)
        values = scores._REGISTRY[score].score(rows)
        shards.reselect()
        hot = np.isin(rows.row_ids, list(shards.hot()))
        assert hot.sum() == pytest.approx(0.3 * hot.shape[0], abs=1)
        assert values[hot].min() > values[~hot].max() / 1.02  # rows of one bin are told apart by hash


def test_score_heat_ranks_as_select_topk_does() -> None:
    spec = _spec("heat", hot_fraction=0.3)
    plain = spec.model_copy(update={"policy": spec.policy.model_copy(update={"select": "topk"})})
    with RankedShards(spec) as scored, RankedShards(plain) as ranked:
        _train(scored, 20)
        _train(ranked, 20)
        assert scored.reselect() == ranked.reselect()
        assert scored.entries() == ranked.entries()


def test_a_score_of_the_users_own_ranks_by_its_name() -> None:
    register_score("newest_id", lambda rows: 1.0 + np.maximum(rows.row_ids, 0))
    with RankedShards(_spec("newest_id", kind="sgd", hot_fraction=0.25), 2) as shards:
        _train(shards, 20)
        shards.reselect()
        # bins are 1.1% wide, so each of these numbers has its own
        assert shards.hot() == set(range(25, 40))


@pytest.mark.parametrize("score", ["heat_x_grad", "abs_weight_x_grad"])
def test_a_score_with_gradients_refuses_sgd_and_says_why(score: str) -> None:
    shard = Shard()
    with pytest.raises(InvalidInput, match=f"table 't': '{score}' needs the size of past gradients, and optimizer sgd"):
        shard.create_tables([_spec(score, kind="sgd")])
    assert shard.table_specs() == {}
    shard.create_tables([_spec("abs_weight", kind="sgd")])
    shard.close()


def test_gradient_norm_of_a_users_score_refuses_sgd_too() -> None:
    register_score("norms", lambda rows: rows.gradient_norm)
    with RankedShards(_spec("norms", kind="sgd")) as shards:
        shards.train(IDS)
        with pytest.raises(InvalidInput, match="'gradient_norm' needs the size of past gradients"):
            shards.histogram()


def test_an_unknown_name_is_refused_at_create_tables_with_the_nearest_one() -> None:
    shard = Shard()
    with pytest.raises(InvalidInput, match=r"score 'heat_x_gard' is not registered.*did you mean 'heat_x_grad'\?"):
        shard.create_tables([_spec("heat_x_gard")])
    with pytest.raises(InvalidInput, match=r"score 'qqq' is not registered on this shard \(registered: abs_weight, "):
        shard.create_tables([_spec("qqq")])
    assert shard.table_specs() == {}
    shard.close()
    # a name that nothing asks for is nobody's error
    unused = PolicySpec(kind="idle", score="qqq")
    check_score(TableSpec(name="t", dim=4, policy=unused))


@pytest.mark.parametrize("name", ["", "Heat", "a-b", "9lives", "x" * 65])
def test_odd_names_are_not_registered(name: str) -> None:
    with pytest.raises(InvalidInput, match="choose such a name"):
        register_score(name, lambda rows: rows.heat)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(InvalidInput, match="'heat' is registered already"):
        register_score("heat", lambda rows: rows.heat)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda rows: np.where(rows.row_ids == 7, np.nan, 1.0), r"score 'bad' of row_id 7 is nan; .* at least 0"),
        (lambda rows: np.where(rows.row_ids == 7, -1.0, 1.0), r"score 'bad' of row_id 7 is -1.0"),
        (lambda rows: np.where(rows.row_ids == 7, np.inf, 1.0), r"score 'bad' of row_id 7 is inf"),
        (lambda rows: rows.weights, r"returned shape \[60, 8\] for 60 rows"),
        (lambda rows: 1.0, r"returned shape \[\] for 60 rows"),
    ],
)
def test_a_score_that_cannot_rank_is_an_error_that_names_table_and_row(
    score: Callable[[ScoredRows], np.ndarray], message: str
) -> None:
    register_score("bad", score)
    with RankedShards(_spec("bad")) as shards:
        shards.train(IDS)
        before = shards.entries()
        with pytest.raises(InvalidInput, match=r"table 't': " + message if message.startswith("score") else message):
            shards.reselect()
        assert shards.entries() == before
        assert shards.train(IDS).all()


@pytest.mark.parametrize("score", ["abs_weight", "abs_weight_x_grad", "heat_x_grad"])
def test_rows_that_are_not_finite_rank_at_the_top_and_break_nothing(score: str) -> None:
    with RankedShards(_spec(score, hot_fraction=0.2)) as shards:
        _train(shards, 30)
        table = shards.tables[0]
        broken = np.array([1, 2, 3], np.int64)
        slots = table.index.locate(broken)[1].astype(np.int32)
        weights, state = table.hot.read(slots)
        weights[:, 0] = [np.nan, np.inf, -3e38]
        state[:, 0] = [np.nan, np.inf, 3e38]
        table.hot.write(slots, weights, state)
        shards.reselect()
        assert set(broken.tolist()) <= shards.hot()
        assert len(shards.hot()) == pytest.approx(0.2 * len(shards.entries()), abs=1)


@given(st.lists(st.floats(0.0, 1e38), min_size=1, max_size=50))
def test_bins_rise_with_the_score_and_are_at_most_2_percent_wide(values: list[float]) -> None:
    ordered = np.sort(np.array(values))
    bins = bins_of_scores(ordered)
    assert (np.diff(bins) >= 0).all()
    assert bins.min() >= 0
    assert bins.max() < NUM_RANK_BINS
    assert ((bins == 0) == (ordered == 0.0)).all()
    inside = (ordered > 2.0**-39.9) & (ordered < 2.0**23.9)
    if inside.any():
        assert (bins_of_scores(ordered[inside] * 1.02) > bins[inside]).all()


def test_ranks_cover_what_scores_can_be() -> None:
    assert bins_of_scores(np.array([0.0, 5e-324, 2.0**-40, 2.0**-39, 1.0, 1e38])).tolist() == [
        0, 1, 1, 65, 2561, NUM_RANK_BINS - 1,
    ]  # fmt: skip


def test_no_rows_have_no_scores() -> None:
    with RankedShards(_spec()) as shards:
        shards.train(np.empty(0, np.int64))
        empty = np.empty(0, np.int64)
        entries = Entries(empty, empty, empty.astype(np.uint32), empty.astype(np.uint16))
        assert scores.score_bins(shards.tables[0], entries, 1).shape == (0,)
        assert shards.reselect().bin == -1
