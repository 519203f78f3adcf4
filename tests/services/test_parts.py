"""Splitting one call into messages: sizes, order, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from services.parts import Piece, split


def test_one_message_when_it_fits() -> None:
    rows = [(Piece("a", 5, 9), 10), (Piece("b", 0, 6), 10)]
    assert split("Pull", rows, limit_bytes=100) == [[Piece("a", 5, 9), Piece("b", 0, 6)]]


def test_no_rows_are_one_empty_message() -> None:
    assert split("Pull", [], limit_bytes=100) == [[]]


def test_a_table_is_cut_where_the_limit_falls() -> None:
    rows = [(Piece("a", 0, 3), 10), (Piece("b", 0, 12), 10)]
    assert split("Pull", rows, limit_bytes=50) == [
        [Piece("a", 0, 3), Piece("b", 0, 2)],
        [Piece("b", 2, 7)],
        [Piece("b", 7, 12)],
    ]


def test_a_piece_without_rows_stays() -> None:
    rows = [(Piece("a", 0, 5), 10), (Piece("b", 7, 7), 10)]
    assert split("Push", rows, limit_bytes=50) == [[Piece("a", 0, 5), Piece("b", 7, 7)]]


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"Push: the batch needs 4 messages of 10 bytes .* more than 3; use a smaller"
    ):
        split("Push", [(Piece("a", 0, 4), 10)], limit_bytes=10, max_parts=3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 20)), max_size=6), st.integers(20, 200))
def test_pieces_cover_every_row_once_within_the_limit(tables: list[tuple[int, int, int]], limit_bytes: int) -> None:
    rows = [(Piece(f"t{i}", start, start + count), row_bytes) for i, (start, count, row_bytes) in enumerate(tables)]
    row_bytes_of = {piece.table: row_bytes for piece, row_bytes in rows}
    messages = split("Pull", rows, limit_bytes=limit_bytes)
    for message in messages:
        assert sum((p.stop - p.start) * row_bytes_of[p.table] for p in message) <= limit_bytes
        assert len({p.table for p in message}) == len(message)
    for piece, _ in rows:
        got = [p for message in messages for p in message if p.table == piece.table]
        assert [row for p in got for row in range(p.start, p.stop)] == list(range(piece.start, piece.stop))
        assert got
