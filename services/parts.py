"""Splits the rows of one call to one shard into messages that stay within the size limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from embedding_server.errors import InvalidInput
from services.tensor_codec import MAX_PARTS, MAX_PAYLOAD_BYTES

K = TypeVar("K")  # what tells the tables of a call apart: their names, or their numbers


class Piece(NamedTuple, Generic[K]):
    """Rows start to stop of a table, as positions in the caller's arrays."""

    table: K
    start: int
    stop: int


def split(
    call: str, rows: Iterable[tuple[Piece[K], int]], limit_bytes: int = MAX_PAYLOAD_BYTES, max_parts: int = MAX_PARTS
) -> list[list[Piece[K]]]:
    """Messages of pieces, at least one message; `rows` gives each table's rows and the bytes of one of them.

    A piece without rows stays. Raises InvalidInput beyond `max_parts` messages.
    """
    rows = list(rows)
    if sum((piece.stop - piece.start) * row_bytes for piece, row_bytes in rows) <= limit_bytes:
        return [[piece for piece, _ in rows]]
    messages: list[list[Piece[K]]] = [[]]
    room = limit_bytes
    for piece, row_bytes in rows:
        start = piece.start
        while True:
            stop = min(piece.stop, start + room // row_bytes)
            if stop > start or piece.start == piece.stop:
                messages[-1].append(Piece(piece.table, start, stop))
                room -= (stop - start) * row_bytes
            if stop == piece.stop:
                break
            messages.append([])
            room = limit_bytes
            start = stop
    if len(messages) > max_parts:
        raise InvalidInput(
            f"{call}: the batch needs {len(messages)} messages of {limit_bytes} bytes to one shard, more than "
            f"{max_parts}; use a smaller batch or more shards"
        )
    return messages
