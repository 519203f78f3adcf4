"""The control group: what is summed, and what the interval says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.inproc import InprocStore
from embedding_server.kernels.hashing import buckets_of
from embedding_server.spec import PolicySpec
from embedding_server.store import BAND_SHIFT, FOUND, NUM_BUCKETS, Rows
from trainer.control_group import (
    LABEL,
    LOOKUPS,
    LOSS,
    NOTHING_FORGOTTEN,
    NUM_BANDS,
    NUM_SUMS,
    UNKNOWN,
    ControlGroup,
    judge,
    merged_band,
    t_probability,
    t_quantile,
)
from trainer.lookup_plan import LookupPlan
from trainer.lookups import Table


def mask_of(*buckets: int) -> np.ndarray:
    mask = np.zeros(NUM_BUCKETS, np.bool_)
    mask[list(buckets)] = True
    return mask


def test_every_look_up_that_counts_does_so_once_with_its_samples_loss():
    rng = np.random.default_rng(3)
    tables = [Table("a", 4, ["x", "y"]), Table("b", 4, ["y"]), Table("c", 4, ["z"])]
    store = InprocStore(memory_limit_bytes=64 << 20)
    plan = LookupPlan(tables, store, is_pooled=True, is_weighted=False, num_threads=1)
    merged = {"a": NOTHING_FORGOTTEN, "c": 6}
    group = ControlGroup(["a", "b", "c"], {"a": mask_of(1), "c": mask_of(2, 3)}, merged)
    expected = {name: np.zeros((NUM_BANDS, NUM_BUCKETS, NUM_SUMS)) for name in ("a", "c")}
    features = {"a": ["x", "y"], "c": ["z"]}
    for _ in range(3):
        lengths = rng.integers(0, 4, (3, 20)).astype(np.int32)
        values = rng.integers(0, 40, lengths.sum()) - 7
        batch = KeyedJaggedTensor(
            ["z", "x", "y"], values=torch.from_numpy(values), lengths=torch.from_numpy(lengths.reshape(-1))
        )
        losses, labels = rng.random(20, np.float32), rng.integers(0, 2, 20).astype(np.float32)
        lookups = plan.route(batch, for_training=True)
        flags = {name: rng.integers(0, 256, ids.row_ids.size).astype(np.uint8) for name, ids in lookups.ids.items()}
        lookups.rows = {name: Rows(np.empty((f.size, 4), np.float32), f) for name, f in flags.items()}
        group.observe(lookups, losses, labels)
        bags = dict(zip(batch.keys(), batch.to_dict().values(), strict=True))
        for name, sums in expected.items():
            flag_of = dict(zip(lookups.ids[name].row_ids.tolist(), flags[name].tolist(), strict=True))
            for feature in features[name]:
                for sample, bag in enumerate(bags[feature].to_dense()):
                    for row_id in bag.tolist():
                        found, band = flag_of[row_id] & FOUND, flag_of[row_id] >> BAND_SHIFT
                        if name == "c" and (not found or band <= 6):
                            band = 0
                        elif not found:
                            continue
                        bucket = int(buckets_of(np.array([row_id]), NUM_BUCKETS)[0])
                        sums[band, bucket] += (losses[sample], labels[sample], 1.0)
    store.close()
    assert sum(sums[..., LOOKUPS].sum() for sums in expected.values()) > 50
    np.testing.assert_allclose(group.all_sums, np.stack([expected["a"], expected["c"]]), rtol=1e-6)


def test_tables_without_a_control_group_cost_nothing():
    group = ControlGroup(["a", "b"], {"a": mask_of(), "b": np.ones(NUM_BUCKETS, np.bool_)})
    assert group.all_sums.size == 0
    assert group.differences(group.all_sums) == {}


@pytest.mark.parametrize(
    ("policy", "band"),
    [
        (PolicySpec(kind="compact", forget_below=3), 6),  # heat 3: 4 log2 3 = 6.3
        (PolicySpec(kind="compact", forget_below=1), 0),
        (PolicySpec(kind="compact", forget_below=0), NOTHING_FORGOTTEN),
        (PolicySpec(kind="idle", epoch_end="forget_rare", forget_below=255), 31),
        (PolicySpec(kind="off", epoch_end="forget_rare"), NOTHING_FORGOTTEN),
        (PolicySpec(kind="idle"), NOTHING_FORGOTTEN),
    ],
)
def test_bands_that_forgotten_rows_could_be_in_are_one(policy, band):
    assert merged_band(policy) == band


def planted(is_control: np.ndarray, effect: float, seed: int, num_ids: int = 3000) -> np.ndarray:
    """Sums of row_ids that differ in their share of positives and in how many look-ups they have, in four bands.

    Their loss is that of a model that knows the share, and noise of their own; treated ones lose `effect` more.
    """
    rng = np.random.default_rng(seed)
    bucket = buckets_of(rng.integers(0, 2**62, num_ids), NUM_BUCKETS)
    share, skill = rng.beta(1.0, 4.0, num_ids), rng.normal(0.0, 0.1, num_ids)
    sums = np.zeros((NUM_BANDS, NUM_BUCKETS, NUM_SUMS))
    for band in (0, 3, 9, 30):
        lookups = rng.poisson(rng.pareto(1.5, num_ids) + 0.2)
        positives = rng.binomial(lookups, share)
        p = np.clip(share, 0.02, 0.98)
        loss = -positives * np.log(p) - (lookups - positives) * np.log(1.0 - p) + lookups * skill
        loss = loss + np.where(is_control[bucket], 0.0, effect) * lookups
        np.add.at(sums[band, :, LOSS], bucket, loss)
        np.add.at(sums[band, :, LABEL], bucket, positives)
        np.add.at(sums[band, :, LOOKUPS], bucket, lookups)
    return sums


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_the_interval_holds_the_truth_nineteen_times_of_twenty(effect):
    runs, held, widths = 150, 0, []
    for seed in range(runs):
        is_control = mask_of(*np.random.default_rng(1000 + seed).choice(NUM_BUCKETS, 20, replace=False))
        found = judge(planted(is_control, effect, seed), is_control)
        held += found.low <= effect <= found.high
        widths.append(found.high - found.low)
        assert found.mean == pytest.approx((found.low + found.high) / 2)
    assert 0.92 <= held / runs <= 0.99
    assert np.median(widths) < 0.12


def test_what_labels_explain_is_no_difference():
    """Control rows have twice the positives; the loss is a function of the label alone, and treated lose 0.01 more."""
    is_control = mask_of(*range(20))
    rng = np.random.default_rng(0)
    sums = np.zeros((NUM_BANDS, NUM_BUCKETS, NUM_SUMS))
    sums[4, :, LOOKUPS] = rng.integers(5, 50, NUM_BUCKETS)
    sums[4, :, LABEL] = rng.binomial(sums[4, :, LOOKUPS].astype(int), np.where(is_control, 0.4, 0.2))
    sums[4, :, LOSS] = 1.5 * sums[4, :, LABEL] + (0.2 + np.where(is_control, 0.0, 0.01)) * sums[4, :, LOOKUPS]
    found = judge(sums, is_control)
    assert found.mean == pytest.approx(0.01, abs=1e-9)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-7)
    assert found.lookups_control == sums[4, :20, LOOKUPS].sum()
    assert found.lookups_treated == sums[4, 20:, LOOKUPS].sum()


def test_heat_explains_nothing_either_because_bands_are_compared_by_themselves():
    """Treated rows are rarer, and rare rows lose more: no difference within a band."""
    is_control = mask_of(*range(30))
    sums = np.zeros((NUM_BANDS, NUM_BUCKETS, NUM_SUMS))
    sums[0, :, LOOKUPS] = np.where(is_control, 10.0, 90.0)
    sums[20, :, LOOKUPS] = np.where(is_control, 90.0, 10.0)
    sums[..., LOSS] = sums[..., LOOKUPS] * np.linspace(0.9, 0.1, NUM_BANDS)[:, None]
    assert judge(sums, is_control).mean == pytest.approx(0.0, abs=1e-9)


def test_a_band_of_few_look_ups_or_few_buckets_says_nothing():
    is_control = mask_of(*range(20))
    sums = np.zeros((NUM_BANDS, NUM_BUCKETS, NUM_SUMS))
    assert judge(sums, is_control) == UNKNOWN
    sums[1, 4:24, LOOKUPS] = 3.0  # 48 look-ups of control rows
    sums[2, 16:, LOOKUPS] = 1000.0  # of four buckets only
    assert judge(sums, is_control) == UNKNOWN
    sums[1, 4:24, LOOKUPS] = 4.0
    assert judge(sums, is_control).lookups_control == 64


@pytest.mark.parametrize("mask", [mask_of(), mask_of(1), ~mask_of(), ~mask_of(1)], ids=["0", "1", "all", "all but 1"])
def test_a_group_of_less_than_two_buckets_says_nothing(mask):
    assert math.isnan(judge(np.ones((NUM_BANDS, NUM_BUCKETS, NUM_SUMS)), mask).mean)


# Abramowitz and Stegun, table 26.10
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (30, 2.042), (120, 1.980)],
)
def test_quantiles_of_t(degrees, quantile):
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=6e-4)
    assert t_probability(t_quantile(0.975, degrees), degrees) == pytest.approx(0.975, abs=1e-9)
    assert t_probability(0.0, degrees) == 0.5
