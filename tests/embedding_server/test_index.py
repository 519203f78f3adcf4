from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_server import heat
from embedding_server.index import BYTES_PER_SLOT, FROZEN_BIT, Index
from embedding_server.kernels.hashing import buckets_of

int64s = st.integers(-(2**63), 2**63 - 1)


def _insert(index: Index, ids: np.ndarray, first: int) -> None:
    index.insert(ids, np.arange(first, first + ids.shape[0], dtype=np.uint32))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(int64s, max_size=60), max_size=6))
def test_equals_a_dictionary(batches: list[list[int]]) -> None:
    index, model = Index(4), {}
    for batch in batches:
        ids = np.array(batch, np.int64)
        _, locations, missing, _ = index.locate(ids)
        assert missing == sum(i not in model for i in batch)
        fresh = np.array(sorted({i for i in batch if i not in model}), np.int64)
        _insert(index, fresh, len(model))
        model.update({row_id: len(model) + k for k, row_id in enumerate(fresh.tolist())})
        _, locations, missing, frozen = index.locate(ids)
        assert (missing, frozen) == (0, 0)
        assert locations.tolist() == [model[i] for i in batch]
        assert len(index) == len(model)


def test_repeated_ids_take_one_location_each() -> None:
    index = Index(8)
    _, locations, used = index.insert(np.array([5, -1, 5, -1, 5], np.int64), np.arange(5, dtype=np.uint32))
    assert used == 2
    assert locations.tolist() == [0, 1, 0, 1, 0]


def test_growth_stays_within_its_load_and_scan_is_in_bucket_order() -> None:
    index = Index(16)
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 20_000))
    for start in range(0, ids.shape[0], 700):
        _insert(index, ids[start : start + 700], start)
    assert 0.7 <= len(index) / index.num_slots <= 0.875
    assert index.size_bytes == index.num_slots * BYTES_PER_SLOT == int(index._capacities.sum()) * BYTES_PER_SLOT
    entries = index.scan(0, 16)
    assert np.array_equal(np.sort(entries.row_ids), ids)
    assert (np.diff(buckets_of(entries.row_ids, 16)) >= 0).all()
    assert np.array_equal(index.scan(3, 5).row_ids, entries.row_ids[np.isin(buckets_of(entries.row_ids, 16), [3, 4])])


def test_one_bucket_grows_at_a_time_so_memory_never_doubles() -> None:
    index = Index(1024)
    rng = np.random.default_rng(2)
    _insert(index, np.unique(rng.integers(-(2**63), 2**63 - 1, 200_000)), 0)
    largest = 1.0
    for _ in range(40):
        before = index.size_bytes
        _insert(index, np.unique(rng.integers(-(2**63), 2**63 - 1, 5_000)), 0)
        largest = max(largest, index.size_bytes / before)
    assert largest < 1.15


@pytest.mark.parametrize("takes_out", [False, True])
@settings(max_examples=100, deadline=None)
@given(rounds=st.lists(st.tuples(st.lists(int64s, max_size=60), st.integers(0, 2**32)), max_size=8))
def test_removed_entries_are_gone_and_the_others_keep_location_and_heat(
    takes_out: bool, rounds: list[tuple[list[int], int]]
) -> None:
    index, model = Index(4), {}
    for batch, seed in rounds:
        fresh = np.array(sorted(set(batch) - model.keys()), np.int64)
        _insert(index, fresh, len(model))
        entries, locations, _, _ = index.locate(fresh)
        index.bump_heat(entries, np.ones(fresh.shape[0], np.bool_), 20_000.0, 1, heat.LOG_TABLE)
        codes = dict(zip(*(a.tolist() for a in (index.scan(0, 4).row_ids, index.scan(0, 4).heat)), strict=True))
        model |= {i: (loc, codes[i]) for i, loc in zip(fresh.tolist(), locations.tolist(), strict=True)}
        known = np.array(sorted(model), np.int64)
        gone = known[np.random.default_rng(seed).random(known.shape[0]) < seed % 5 / 4]
        if takes_out:
            assert index.take_out(np.concatenate([gone, gone[:3], [12345]])) == gone.shape[0] + (12345 in model)
            model.pop(12345, None)
        else:
            index.remove(gone, index.locate(gone)[0])
        for row_id in gone.tolist():
            model.pop(row_id, None)
        left = index.scan(0, 4)
        found = zip(left.row_ids.tolist(), zip(left.locations.tolist(), left.heat.tolist(), strict=True), strict=True)
        assert dict(found) == model
        assert len(index) == len(model)
        ids = np.array(list(model), np.int64)
        assert index.locate(ids)[1].tolist() == [location for location, _ in model.values()]
        assert index.locate(gone)[2] == gone.shape[0]


def test_removing_gives_memory_back_and_a_small_loss_keeps_the_buffers() -> None:
    index = Index(16)
    ids = np.unique(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 50_000))
    _insert(index, ids, 0)
    full = index.size_bytes
    index.remove(ids[:500], index.locate(ids[:500])[0])
    assert index.size_bytes == full
    index.remove(ids[500:40_000], index.locate(ids[500:40_000])[0])
    assert 0.6 <= len(index) / index.num_slots <= 0.875
    index.remove(ids[40_000:], index.locate(ids[40_000:])[0])
    assert (len(index), index.size_bytes) == (0, 0)
    _insert(index, ids[:100], 7)
    assert np.array_equal(np.sort(index.locate(ids[:100])[1]), np.arange(7, 107))


def test_what_is_taken_out_leaves_no_bytes_and_gives_memory_back() -> None:
    index = Index(16)
    ids = np.unique(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 50_000))
    _insert(index, ids, 0)
    gone = np.random.default_rng(6).permutation(ids)[:5_000]
    assert index.take_out(gone) == 5_000
    words = np.concatenate(
        [buffer[: 14 * c].reshape(c, 14)[:, :8].copy().view(np.int64).reshape(-1) for buffer, c in _buffers(index)]
    )
    assert not np.isin(words, gone).any()
    assert index.take_out(ids) == 45_000
    assert (len(index), index.size_bytes) == (0, 0)


def _buffers(index: Index) -> list[tuple[np.ndarray, int]]:
    return [(b, int(c)) for b, c in zip(index._buffers, index._capacities, strict=True) if b is not None]


def test_scan_hot_is_what_a_scan_and_a_comparison_give() -> None:
    index = Index(8)
    ids = np.unique(np.random.default_rng(6).integers(-(2**63), 2**63 - 1, 3_000))
    _insert(index, ids, 0)
    index.set_locations(index.locate(ids[:900])[0], np.arange(900, dtype=np.uint32) | FROZEN_BIT)
    last_step = np.random.default_rng(7).integers(0, 20, ids.shape[0]).astype(np.int32)
    everything = index.scan(2, 6)
    hot = (everything.locations & FROZEN_BIT) == 0
    hot[hot] = last_step[everything.locations[hot]] <= 9
    assert 0 < hot.sum() < hot.shape[0]
    got, expected = index.scan_hot(2, 6, last_step, until=9), everything.take(hot)
    for part in ("row_ids", "addresses", "locations", "heat"):
        assert np.array_equal(getattr(got, part), getattr(expected, part)), part


@pytest.mark.parametrize("seed", range(5))
def test_scan_hot_finds_the_hot_rows_however_rows_came_moved_and_went(seed: int) -> None:
    random = np.random.default_rng(seed)
    index, ids = Index(4), np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 6_000))
    frozen_share, last_step = 0.9, np.zeros(1 << 20, np.int32)
    for _ in range(60):
        some = random.choice(ids, random.integers(1, 400), replace=False)
        locations = random.integers(0, 1 << 20, some.shape[0]).astype(np.uint32)
        locations[random.random(some.shape[0]) < frozen_share] |= FROZEN_BIT
        entries = index.locate(some)[0]
        action = random.integers(4)
        if action <= 1:
            index.insert(some, locations)
        elif action == 2:
            index.set_locations(entries[entries != 0], locations[entries != 0])
        elif random.random() < 0.5:
            index.take_out(some)
        else:
            index.remove(some[entries != 0], entries[entries != 0])
        everything = index.scan(0, 4)
        found = index.scan_hot(0, 4, last_step)
        assert np.array_equal(found.addresses, everything.addresses[(everything.locations & FROZEN_BIT) == 0])
        is_in = np.isin(some, everything.row_ids)
        assert np.array_equal(index.locate(some)[0] != 0, is_in)
    assert 0 < len(found.addresses) < len(index)


def test_set_locations_and_frozen_count() -> None:
    index = Index(4)
    ids = np.array([1, 2, 3], np.int64)
    _insert(index, ids, 0)
    entries, _, _, _ = index.locate(ids)
    index.set_locations(entries[1:2], np.array([FROZEN_BIT | np.uint32(77)], np.uint32))
    _, locations, missing, frozen = index.locate(ids)
    assert locations.tolist() == [0, int(FROZEN_BIT) | 77, 2]
    assert (missing, frozen) == (0, 1)


def test_heat_equals_brute_force_to_one_percent() -> None:
    """Visits at random steps over many half-lives, the origin moving several times."""
    half_life, steps, rows = 40.0, 3000, 200
    rng = np.random.default_rng(3)
    index = Index(4)
    ids = np.arange(rows, dtype=np.int64)
    _insert(index, ids, 0)
    rates = np.concatenate([np.full(100, 0.5), rng.uniform(0.05, 1.0, 100)])
    exact, rebases = np.zeros(rows), 0
    for step in range(1, steps + 1):
        times = heat.num_rebases(step, half_life) - rebases
        if times:
            index.lower_heat(int(heat.CODES_PER_REBASE) * times)
            rebases += times
        visited = rng.random(rows) < rates
        exact = exact * 2 ** (-1 / half_life) + visited
        entries, _, _, _ = index.locate(ids)
        index.bump_heat(entries, visited, heat.now_code(step, half_life), step, heat.LOG_TABLE)
    assert rebases >= 3
    entries = index.scan(0, 4)
    got = heat.heat_of_codes(entries.heat, steps, half_life)[np.argsort(entries.row_ids)]
    assert np.abs(got / exact - 1).max() < 0.01


def test_lowered_heat_of_visited_rows_stays_above_zero() -> None:
    index = Index(2)
    _insert(index, np.array([1, 2, 3], np.int64), 0)
    entries, _, _, _ = index.locate(np.array([1, 2], np.int64))
    index.bump_heat(entries, np.ones(2, np.bool_), 30_000.0, 7, heat.LOG_TABLE)
    before = index.scan(0, 2).heat
    index.lower_heat(int(heat.CODES_PER_REBASE))
    lowered = np.maximum(before.astype(np.int64) - int(heat.CODES_PER_REBASE), 1)
    assert np.array_equal(index.scan(0, 2).heat, np.where(before == 0, 0, lowered))
    assert sorted(before.tolist())[0] == 0


@pytest.mark.parametrize("least", [0, 1500, 2999, 3000])
def test_scan_hot_from_a_slot_on_is_what_a_scan_and_a_comparison_give(least: int) -> None:
    index = Index(8)
    ids = np.unique(np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 3_000))
    _insert(index, ids, 0)
    frozen = np.ascontiguousarray(ids[::3])
    index.set_locations(index.locate(frozen)[0], np.arange(frozen.shape[0], dtype=np.uint32) | FROZEN_BIT)
    entries = index.scan(2, 7)
    at = np.flatnonzero(((entries.locations & FROZEN_BIT) == 0) & (entries.locations >= least))
    found = index.scan_hot(2, 7, np.zeros(ids.shape[0], np.int32), least_slot=least)
    assert np.array_equal(found.addresses, entries.addresses[at])
    assert np.array_equal(found.locations, entries.locations[at])


def test_an_index_with_room_is_as_one_without_and_loses_buckets_at_once() -> None:
    rng = np.random.default_rng(0)
    row_ids = rng.choice(10**9, 5000, replace=False)
    locations = np.arange(5000, dtype=np.uint32)
    plain, reserved, grown = Index(64), Index(64), Index(64)
    buffer = reserved.reserve(3000)  # fewer than come
    assert reserved.num_slots * BYTES_PER_SLOT == buffer.nbytes > 3000 * BYTES_PER_SLOT
    grown.grow_to(200, np.arange(64))
    slots = grown.num_slots
    for index in (plain, reserved, grown):
        for start in range(0, 5000, 500):
            index.insert(row_ids[start : start + 500], locations[start : start + 500])
        entries, found, missing, _ = index.locate(row_ids)
        assert missing == 0 and np.array_equal(found, locations) and len(np.unique(entries)) == 5000
    assert grown.num_slots == slots, "nothing had to grow"
    reserved.clear(10, 30)
    is_gone = (buckets_of(row_ids, 64) >= 10) & (buckets_of(row_ids, 64) < 30)
    assert np.array_equal(reserved.locate(row_ids)[0] == 0, is_gone)
    assert len(reserved) == 5000 - is_gone.sum()
    assert reserved.num_slots < 1.1 * plain.num_slots * 44 / 64
    reserved.insert(row_ids[is_gone], locations[is_gone])
    assert np.array_equal(reserved.locate(row_ids)[1], locations)
