from __future__ import annotations

import numpy as np
import pytest

from embedding_server.heat import NUM_BINS
from embedding_server.policy import compute_frostline, control_buckets, is_above, is_idle, rank_bins
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import HeatHistogram


def _histogram(bins: np.ndarray, extra: int = 0) -> HeatHistogram:
    return HeatHistogram(np.bincount(bins, minlength=NUM_BINS), bins.shape[0] + extra, extra)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.4, 0.77, 1.0])
def test_frostline_keeps_the_fraction_and_splits_the_boundary_bin_by_hash(fraction: float) -> None:
    rng = np.random.default_rng(0)
    bins = rng.integers(1000, 1010, 20_000)
    ids = rng.integers(-(2**63), 2**63 - 1, 20_000)
    line = compute_frostline(_histogram(bins), fraction)
    above = is_above(line, bins, ids)
    assert above.mean() == pytest.approx(fraction, abs=0.005)
    if not above.all():
        assert bins[above].min() >= bins[~above].max()


def test_probation_rows_count_in_the_total_but_not_in_the_bins() -> None:
    bins = np.arange(100) + 500
    assert is_above(compute_frostline(_histogram(bins, 100), 0.25), bins, bins).sum() == 50


def test_an_empty_table_has_everything_above() -> None:
    assert compute_frostline(_histogram(np.empty(0, np.int64)), 0.4).bin == -1


def test_random_rank_does_not_depend_on_heat() -> None:
    ids = np.arange(1000, dtype=np.int64)
    policy = PolicySpec(kind="topk", select="random")
    cold, hot = np.zeros(1000, np.uint16), np.full(1000, 60_000, np.uint16)
    assert np.array_equal(rank_bins(policy, ids, cold), rank_bins(policy, ids, hot))
    assert rank_bins(policy, ids, hot).std() > NUM_BINS / 5


def test_idle_counts_from_the_last_visit() -> None:
    policy = PolicySpec(idle_steps=10)
    assert is_idle(policy, np.array([0, 90, 91, 100], np.int32), 100).tolist() == [True, True, False, False]


def test_control_buckets_are_a_share_drawn_by_name_and_seed() -> None:
    def drawn(name: str, seed: int, **policy) -> np.ndarray:
        return control_buckets(TableSpec(name=name, dim=4, seed=seed, policy=PolicySpec(**policy)))

    assert drawn("t", 0).sum() == 20
    assert drawn("t", 0, control_fraction=0.5).sum() == 512
    assert not drawn("t", 0, control_fraction=0.0).any()
    assert not drawn("t", 0, kind="off").any()
    np.testing.assert_array_equal(drawn("t", 0), drawn("t", 0, kind="topk", idle_steps=7))
    for other in (drawn("u", 0), drawn("t", 1)):
        assert (drawn("t", 0) & other).sum() < 5
