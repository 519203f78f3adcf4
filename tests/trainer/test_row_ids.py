from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.bags import Bags, join
from trainer.data.row_ids import cross_ids, word_id, word_ids

int64s = st.integers(-(2**63), 2**63 - 1)
bags = st.lists(st.lists(int64s, max_size=4), max_size=6)


def test_row_ids_of_words_never_change() -> None:
    assert word_id("Toy Story") == -7041566116124007712
    assert word_ids(["a", "b", "a"]).tolist() == [word_id("a"), word_id("b"), word_id("a")]
    assert word_ids([]).dtype == np.int64


def test_row_ids_of_crosses_never_change() -> None:
    assert cross_ids(np.array([1]), np.array([2]), np.array([3])).tolist() == [7041752555471512236]


@given(int64s, int64s, int64s)
def test_the_order_and_the_parts_of_a_cross_matter(a: int, b: int, c: int) -> None:
    def cross(*parts: int) -> int:
        return int(cross_ids(*(np.array([part]) for part in parts))[0])

    assert cross(a, b) == cross(a, b)
    assert a == b or cross(a, b) != cross(b, a)
    assert b == c or cross(a, b) != cross(a, c)
    assert cross(a, b, c) != cross(a, b)


@given(bags)
def test_bags_flatten_to_their_lists(lists: list[list[int]]) -> None:
    made = Bags.of_lists(lists)
    assert made.flat().tolist() == [value for one in lists for value in one]
    assert made.owners().tolist() == [i for i, one in enumerate(lists) for _ in one]
    order = np.arange(len(lists))[::-1]
    assert made.at(order).flat().tolist() == [value for one in lists[::-1] for value in one]


def test_ranges_may_overlap() -> None:
    made = Bags(np.array([5, 6, 7]), np.array([0, 1, 0, 3]), np.array([2, 2, 3, 0]))
    assert made.flat().tolist() == [5, 6, 6, 7, 5, 6, 7]


def test_join_is_feature_major() -> None:
    values, lengths = join([Bags.of_one(np.array([1, 2])), Bags.of_lists([[], [3, 4]])])
    assert values.tolist() == [1, 2, 3, 4]
    assert lengths.tolist() == [1, 1, 0, 2]
    assert lengths.dtype == np.int32
    assert [part.tolist() for part in join([])] == [[], []]
