"""Figures of a table against what was done to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embedding_server import heat
from embedding_server.inproc import InprocStore
from embedding_server.policy import compute_frostline
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_HEAT_BANDS, Identity, MaskInfo, RoutedIds
from embedding_server.table_stats import heat_bands


def _ids(*ranges: range) -> RoutedIds:
    row_ids = np.concatenate([np.array(r, np.int64) for r in ranges])
    return RoutedIds(row_ids, np.array([0, row_ids.shape[0]]))


class Store:
    """A store of one table, step by step."""

    def __init__(self, **policy: object) -> None:
        self.store = InprocStore(memory_limit_bytes=64 << 20, writes_in_background=False)
        chosen = PolicySpec(**{"control_fraction": 0.0} | policy)
        self.store.create_tables([TableSpec(name="t", dim=8, policy=chosen)])
        self.who = Identity("job", self.store.begin_epoch("job", 1, "sync").epoch, 0)
        self.step = 0

    def visit(self, *ranges: range) -> None:
        self.step += 1
        self.store.pull(self.who, self.step, {"t": _ids(*ranges)} if ranges else {})
        self.store.push(self.who, self.step, {})

    def reselect(self, hot_fraction: float | None = None) -> None:
        histograms = self.store.heat_histograms(self.who, self.step)
        lines = {name: compute_frostline(h, hot_fraction or 1.0) for name, h in histograms.items()}
        self.store.reselect(self.who, self.step, lines)

    def mask(self) -> MaskInfo:
        return self.store.mask_info()["t"]


@pytest.mark.parametrize("step", [0, 7, 5_000])
def test_bands_are_half_octaves_around_one(step: int) -> None:
    heats = np.array([2.0**-20, 2.0**-8.6, 2.0**-8, 0.5, 0.72, 1.0, 1.4, 1.45, 2.0, 3.0, 2.0**20])
    now = heat.now_code(step, 100.0)
    codes = np.clip(np.floor(now + np.log2(heats) * heat.CODES_PER_OCTAVE), 1, 65535).astype(np.uint16)
    expected = [min(63, max(0, math.floor(2 * math.log2(h)) + 16)) for h in heats]
    if step == 5_000:  # after a rebase little history is left: what is colder has code 1
        expected[0] = max(expected[0], int(heat_bands(np.array([1], np.uint16), step, 100.0)[0]))
    assert heat_bands(codes, step, 100.0).tolist() == expected
    assert heat_bands(np.zeros(1, np.uint16), step, 100.0).tolist() == [0]


def test_rows_by_heat_tell_hot_from_frozen() -> None:
    t = Store(idle_steps=3, half_life_steps=1e6)
    for n in range(4):
        t.visit(range(100) if n < 2 else range(100, 130))
    t.visit(range(100, 130))
    t.reselect()
    info = t.mask()
    assert (info.stats.rows_hot, info.stats.rows_frozen) == (30, 100)
    assert {i: n for i, n in enumerate(info.heat_counts_frozen.tolist()) if n} == {18: 100}  # two visits
    assert {i: n for i, n in enumerate(info.heat_counts_hot.tolist()) if n} == {19: 30}  # three
    assert info.frostline is None
    assert math.isnan(info.topk_overlap)
    t.store.close()


def test_overlap_is_the_share_of_the_rows_hot_by_rank_that_were_hot_before() -> None:
    t = Store(kind="topk", probation_visits=1, half_life_steps=2.0, idle_steps=10**6)
    for _ in range(4):
        t.visit(range(40), range(40, 100))
    t.visit(range(40))
    t.reselect(0.4)
    assert t.mask().topk_overlap == 1.0  # nothing was frozen before
    assert t.mask().stats.moves_frozen_rank == 60
    for _ in range(12):
        t.visit(range(30), range(90, 100))
    t.reselect(0.4)
    info = t.mask()
    assert info.frostline is not None
    assert (info.rows_ranked, info.rows_ranked_before, info.topk_overlap) == (40, 30, 0.75)
    assert (info.stats.moves_thawed_rank, info.stats.moves_frozen_rank) == (10, 70)
    t.store.close()


def test_rows_on_probation_are_counted_over_slots_as_over_the_index() -> None:
    t = Store(kind="topk", probation_visits=3, idle_steps=10**6)
    table = t.store._shard._tables["t"]
    rng = np.random.default_rng(0)
    for n in range(12):
        first = int(rng.integers(0, 300))
        t.visit(range(first, first + 100))
        if n % 3 == 2:
            t.reselect(0.3)
        on = table.probation_mask(table.index.scan(0, table.index.num_buckets).locations)
        assert t.store.stats().tables["t"].rows_probation == int(on.sum())
    t.store.close()


def test_the_peak_is_the_highest_sum_of_bytes_so_far() -> None:
    t = Store(idle_steps=1)
    highest = 0
    for n in range(6):
        t.visit(range(1000 * n, 1000 * n + (3000 if n == 2 else 500)))
        highest = max(highest, t.store.stats().tables["t"].bytes_total)
        t.reselect()
        now = t.store.stats().tables["t"]
        highest = max(highest, now.bytes_total)
        assert now.bytes_peak >= highest
    assert now.bytes_peak < 2 * highest
    t.store.close()


def test_mask_infos_add_up() -> None:
    t = Store(idle_steps=1)
    t.visit(range(10))
    info = t.mask()
    both = info + info
    assert both.stats.rows_hot == 20
    assert both.heat_counts_hot.sum() == 20
    assert both.heat_counts_hot.shape == both.heat_counts_frozen.shape == (NUM_HEAT_BANDS,)
    t.store.close()
