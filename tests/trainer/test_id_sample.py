from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import control_buckets
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS
from trainer.data.batch import Batch, Feature, Schema, make_batch
from trainer.id_sample import MAX_LEVEL, IdSample, control_group, sample_table

SCHEMA = Schema(dense=(), features=(Feature("a", "x"), Feature("b", "y"), Feature("c", "x")))


def spec_of(name: str, kind: str = "idle", control_fraction: float = 0.02) -> TableSpec:
    policy = PolicySpec(kind=kind, control_fraction=control_fraction)  # type: ignore[arg-type]
    return TableSpec(name=name, dim=4, policy=policy)


def batch_of(values: list[list[int]]) -> Batch:
    """One value per sample of each feature."""
    b = len(values[0])
    lengths = np.ones(len(values) * b, np.int32)
    return make_batch(
        SCHEMA,
        np.zeros((b, 0), np.float32),
        np.array(values, np.int64).reshape(-1),
        lengths,
        np.zeros(b, np.float32),
        b,
    )


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_whole_tables_lie_on_the_shards_of_the_job(num_shards: int) -> None:
    sample = sample_table(np.zeros(NUM_BUCKETS, bool), 0, num_shards)
    assert [s.scale for s in sample.strata] == [1.0] * num_shards
    np.testing.assert_array_equal(sample.owners, np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS)


@given(level=st.integers(1, MAX_LEVEL), control=st.sets(st.integers(0, NUM_BUCKETS - 1), max_size=200))
def test_strata_stand_for_all_buckets_of_their_group(level: int, control: set[int]) -> None:
    is_control = np.zeros(NUM_BUCKETS, bool)
    is_control[list(control)] = True
    sample = sample_table(is_control, level, 2)
    for stratum, group in zip(sample.strata, [~is_control, is_control], strict=False):
        assert group[stratum.buckets].all()
        assert len(set(stratum.buckets.tolist())) == len(stratum.buckets)
        assert stratum.scale * len(stratum.buckets) == pytest.approx(group.sum())
    assert sum(s.scale * len(s.buckets) for s in sample.strata) == pytest.approx(NUM_BUCKETS)
    assert sample.num_buckets <= 2 + 1.5 * NUM_BUCKETS / 8**level


def test_sampled_buckets_are_spread_over_all_numbers() -> None:
    buckets = sample_table(np.zeros(NUM_BUCKETS, bool), 1, 1).strata[0].buckets
    assert len(buckets) == 128
    assert set(np.diff(buckets)) == {8}


def test_a_batch_gives_each_store_the_distinct_ids_of_its_buckets() -> None:
    specs = {name: spec_of(name) for name in ("x", "y")}
    sample = IdSample(specs, SCHEMA, {"x": 1}, num_shards=2)
    random = np.random.default_rng(0)
    values = random.integers(-500, 500, (3, 4000))
    stores = sample.route(batch_of(values.tolist()))
    assert len(stores) == 2
    of_table = {"x": np.unique(values[[0, 2]]), "y": np.unique(values[1])}
    for name, row_ids in of_table.items():
        owners = sample.tables[name].owners[buckets_of(row_ids, NUM_BUCKETS)]
        for number, store in enumerate(stores):
            expected = row_ids[owners == number]
            np.testing.assert_array_equal(np.sort(store[name].row_ids) if name in store else [], expected)
    control = control_buckets(specs["x"])
    assert control[buckets_of(stores[1]["x"].row_ids, NUM_BUCKETS)].all()
    assert not control[buckets_of(stores[0]["x"].row_ids, NUM_BUCKETS)].any()
    assert not sample.is_whole


def test_jobs_that_differ_in_policy_alone_have_one_control_group() -> None:
    np.testing.assert_array_equal(control_group(spec_of("x", "off")), control_group(spec_of("x", "topk")))
    assert control_group(spec_of("x", "off")).sum() == round(0.02 * NUM_BUCKETS)
