"""Dedup and routing against numpy's unique, for every shape of batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.kernels.hashing import buckets_of
from embedding_server.kernels.routing import check_lookups, dedup_route, dedup_tables
from embedding_server.store import NUM_BUCKETS

EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
row_ids = st.lists(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(EDGES), st.integers(0, 20)), max_size=300
)


def owners_of(num_shards: int) -> np.ndarray:
    return (np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS).astype(np.int32)


def check(ids: np.ndarray, num_shards: int) -> None:
    owners = owners_of(num_shards)
    routing = dedup_route(ids, owners, num_shards)
    assert np.array_equal(np.sort(routing.unique), np.unique(ids))
    assert np.array_equal(routing.unique[routing.inverse], ids)
    assert np.array_equal(routing.counts, np.bincount(routing.inverse, minlength=routing.unique.size))
    assert routing.shard_offsets[0] == 0
    assert routing.shard_offsets[-1] == routing.unique.size
    first_seen = {int(row_id): i for i, row_id in reversed(list(enumerate(ids.tolist())))}
    for shard in range(num_shards):
        mine = routing.unique[routing.shard_offsets[shard] : routing.shard_offsets[shard + 1]]
        assert (owners[buckets_of(mine, NUM_BUCKETS)] == shard).all()
        order = [first_seen[int(row_id)] for row_id in mine]
        assert order == sorted(order)


@given(row_ids, st.integers(1, 5))
def test_any_batch(ids: list[int], num_shards: int) -> None:
    check(np.array(ids, np.int64), num_shards)


def test_growth_keeps_every_row_id() -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(-(2**63), 2**63 - 1, 70_000)
    owners = owners_of(3)
    routing = dedup_route(np.concatenate([ids, ids[::-1]]), owners, 3)
    assert routing.unique.size == np.unique(ids).size > 2 * 8192
    assert np.array_equal(routing.unique[routing.inverse], np.concatenate([ids, ids[::-1]]))


def test_tables_of_several_slots_share_their_rows() -> None:
    """Two tables over three slots; slot order is not value order; a share leaves the other table untouched."""
    values = np.array([7, 7, 8, 9, -1, 7, 9], np.int64)
    slot_starts, slot_ends = np.array([4, 0, 2], np.int64), np.array([7, 2, 4], np.int64)
    slots_of_table, starts = np.array([0, 2, 3], np.int64), np.array([0, 5], np.int64)
    unique, counts, inverse = np.full(7, -5, np.int64), np.zeros(7, np.int32), np.full(7, -5, np.int32)
    num_unique, offsets = np.zeros(2, np.int64), np.zeros((2, 2), np.int64)

    def run(table: int) -> None:
        dedup_tables(
            values, slot_starts, slot_ends, slots_of_table, owners_of(1), np.array([table]),
            starts, unique, counts, inverse, num_unique, offsets,
        )  # fmt: skip

    run(1)
    assert num_unique.tolist() == [0, 2]
    assert inverse.tolist() == [-5] * 5 + [0, 1]
    run(0)
    assert num_unique.tolist() == [3, 2]
    assert unique[:3].tolist() == [-1, 7, 9]
    assert unique[5:].tolist() == [8, 9]
    assert inverse.tolist() == [0, 1, 2, 1, 1, 0, 1]
    assert counts[:3].tolist() == [1, 3, 1]
    assert offsets.tolist() == [[0, 3], [0, 2]]


def test_too_many_lookups_are_refused() -> None:
    check_lookups(2**31 - 1)
    with pytest.raises(InvalidInput, match=r"2147483648 look-ups; at most 2147483647"):
        check_lookups(2**31)
