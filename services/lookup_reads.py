"""One look-up from a caller's arrays to messages for groups of shards, and from their replies to arrays.

Row_ids stay in the caller's order, repeated or not. One group of shards: one message, whose reply is handed on where it
lies. Several: each gets its row_ids, and every row lands where the caller wants it, in one pass over the replies.

Bags that more than one message has row_ids of come back as parts of sums in float32, which are added here: so a vector
may differ in its last bits from one that a single shard has pooled.

Shapes: n row_ids of one table, D its dim, B its bags, G groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from embedding_server.errors import FrostlineError, InvalidInput
from embedding_server.kernels.routing import group_rows
from embedding_server.kernels.wire import to_float32
from embedding_server.lookup import ENCODINGS, INITIAL, Encoding, FoundRows, Pooling, TableQuery, Version
from embedding_server.store import DEFAULT, FOUND, TRAINABLE, WIRE_NUMPY
from services import lookup_codec
from services.bucket_map import BucketMap, older
from services.lookup_codec import TableAnswer, expand, stored_addresses
from services.parts import Piece, split
from services.tensor_codec import MAX_PAYLOAD_BYTES

UNBOUNDED = 1 << 62  # a look-up has no parts: each message is a call of its own

#: a row's state by its name, in the order of LookedUp.states
STATES = ("absent", "default", "hot", "frozen", "initial")
_ABSENT, _DEFAULT, _HOT, _FROZEN, _INITIAL = range(len(STATES))
_STATE_OF_FLAGS = np.zeros(256, np.uint8)
for _flags in range(256):
    if _flags & DEFAULT:
        _STATE_OF_FLAGS[_flags] = _DEFAULT
    elif _flags & FOUND:
        _STATE_OF_FLAGS[_flags] = _HOT if _flags & TRAINABLE else _INITIAL if _flags & INITIAL else _FROZEN


@dataclass(frozen=True, slots=True)
class Bags:
    """Row_ids of bags one after another, whose rows become one vector a bag."""

    row_ids: Any  # integers [n]
    lengths: Any  # integers [B], 0 or more: row_ids of each bag, n in all
    pooling: Pooling = "sum"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What was looked up in one table, in the order of the request."""

    values: np.ndarray  # [n, D], of Bags [B, D]: float16 if that was asked for, else float32
    flags: np.ndarray  # uint8[n] of TRAINABLE, DEFAULT, FOUND and INITIAL
    versions: tuple[Version, ...]  # that it was read at, one of each shard that had some of it

    @property
    def found(self) -> np.ndarray:
        """bool[n]: the row_id has a row of its own."""
        return (self.flags & FOUND) != 0

    @property
    def states(self) -> np.ndarray:
        """uint8[n]: positions in STATES."""
        return _STATE_OF_FLAGS[self.flags]


def queries_of(ids: Mapping[str, Any], encoding: Encoding) -> list[TableQuery]:
    """What is asked of each table, checked. InvalidInput names the table and what is wrong."""
    if encoding not in ENCODINGS:
        raise InvalidInput(f"encoding={encoding!r} is not one of {', '.join(ENCODINGS)}")
    return [_query(name, asked, encoding) for name, asked in ids.items()]


def _query(name: str, asked: Any, encoding: Encoding) -> TableQuery:
    if not isinstance(asked, Bags):
        return TableQuery(name, _integers(name, "row_ids", asked))
    query = TableQuery(
        name, _integers(name, "row_ids", asked.row_ids), asked.pooling, _integers(name, "lengths", asked.lengths)
    )
    if asked.pooling not in ("sum", "mean"):
        raise InvalidInput(f"table {name!r}: pooling={asked.pooling!r} must be 'sum' or 'mean'")
    if encoding == "stored":
        raise InvalidInput(f"table {name!r}: rows as stored cannot be pooled; ask for another encoding")
    assert query.lengths is not None
    total = int(query.lengths.sum()) if query.lengths.min(initial=0) >= 0 else -1
    if total != len(query.row_ids):
        raise InvalidInput(
            f"table {name!r}: the lengths of {len(query.lengths)} bags must be 0 or more and add up to its "
            f"{len(query.row_ids)} row_ids"
        )
    return query


def _integers(name: str, what: str, values: Any) -> np.ndarray:
    """Contiguous int64[n]."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.ndim != 1 or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise InvalidInput(
            f"table {name!r}: {what} has dtype {array.dtype} and shape {list(array.shape)}; it must be integers "
            "[n] that int64 holds (uint64: view them as int64)"
        )
    return np.ascontiguousarray(array, np.int64)


class Message(NamedTuple):
    """What one call to one group asks for."""

    group: int
    pieces: list[Piece[int]]  # by number of the query; of its row_ids as they are routed
    queries: list[TableQuery]

    @property
    def tables(self) -> list[str]:
        return [query.table for query in self.queries]


@dataclass(slots=True)
class _Routed:
    """The row_ids of one query, those of group 0 first, then those of group 1 and so on."""

    query: TableQuery
    dim: int
    row_ids: np.ndarray  # int64[n]
    offsets: np.ndarray  # int64[G+1]
    order: np.ndarray | None  # int64[n]: its place in the caller's order; None: the same
    bags: np.ndarray | None = None  # int64[n] of the bag; None: not pooled, or in one message

    def query_of(self, piece: Piece[int]) -> TableQuery:
        name, rows = self.query.table, self.row_ids[piece.start : piece.stop]
        if self.bags is not None:
            return TableQuery(name, rows, "sum", self.runs(piece)[1])
        return self.query if rows.shape == self.query.row_ids.shape and self.order is None else TableQuery(name, rows)

    def runs(self, piece: Piece[int]) -> tuple[np.ndarray, np.ndarray]:
        """The bags that a piece has row_ids of, and how many of each; int64 both."""
        assert self.bags is not None
        return np.unique(self.bags[piece.start : piece.stop], return_counts=True)

    def places(self, piece: Piece[int]) -> slice | np.ndarray:
        return slice(piece.start, piece.stop) if self.order is None else self.order[piece.start : piece.stop]


@dataclass(slots=True)
class _Table:
    """The answer to one query while it is put together."""

    flags: np.ndarray
    values: np.ndarray
    versions: dict[Version, None] = field(default_factory=dict)


class LookupReads(ABC):
    """The messages of one look-up. What comes of their replies is up to the subclass. Owned by whoever looks up."""

    def __init__(self, queries: Sequence[TableQuery], encoding: Encoding, bucket_map: BucketMap) -> None:
        """UnknownTable if a table is nowhere. No message has more than tensor_codec.MAX_PAYLOAD_BYTES in it."""
        self._routed = [_route(query, bucket_map) for query in queries]
        self._plans = self._plan(bucket_map.num_groups, encoding)
        self._is_one_message = bucket_map.num_groups == 1 and len(self._plans[0]) == 1 and self._vectors_fit()
        # What bags give in parts is added here, so it comes in float32.
        self._adds = not self._is_one_message and _split_bags(self._routed)
        self.encoding: Encoding = "float32" if self._adds else encoding

    def _plan(self, num_groups: int, encoding: Encoding) -> list[list[list[Piece[int]]]]:
        """Messages of pieces for each group. Without rows a single group gets one all the same: bags may be empty."""
        itemsize = 4 if encoding == "stored" else WIRE_NUMPY[encoding].itemsize
        plans = []
        for group in range(num_groups):
            pieces = []
            for number, routed in enumerate(self._routed):
                piece = Piece(number, int(routed.offsets[group]), int(routed.offsets[group + 1]))
                if piece.stop > piece.start or num_groups == 1:
                    pieces.append((piece, _row_bytes(routed, itemsize)))
            plans.append(split("Lookup", pieces, max_parts=UNBOUNDED))
        return plans

    def _vectors_fit(self) -> bool:
        """Whether what bags give fits a message: there may be many bags without row_ids."""
        vectors = sum(routed.query.num_vectors * routed.dim for routed in self._routed if routed.query.pooling)
        return 4 * vectors <= MAX_PAYLOAD_BYTES // 2

    def rounds(self) -> Iterator[list[Message]]:
        """Messages that may be under way at once, one to a group."""
        for part in range(max(map(len, self._plans))):
            messages = [
                Message(group, parts[part], [self._routed[piece.table].query_of(piece) for piece in parts[part]])
                for group, parts in enumerate(self._plans)
                if part < len(parts) and parts[part]
            ]
            if messages:
                yield messages

    def encode(self, message: Message) -> bytes:
        return lookup_codec.encode_lookup(self.encoding, message.queries)

    def place(self, message: Message, reply: bytes) -> None:
        """Takes the rows of a reply. FrostlineError unless it answers just what was asked."""
        answers = lookup_codec.decode_answers(reply)
        wanted = [(query.table, query.row_ids.shape[0], query.num_vectors) for query in message.queries]
        got = [(answer.table, answer.flags.shape[0], answer.num_vectors) for answer in answers]
        if got != wanted:
            raise FrostlineError(f"Lookup: a reply of {got} answers a request for {wanted}; the server is at fault")
        for piece, answer in zip(message.pieces, answers, strict=True):
            self._place(piece, answer)

    @abstractmethod
    def _place(self, piece: Piece[int], answer: TableAnswer) -> None: ...


class ValueReads(LookupReads):
    """Rows and vectors as arrays for the caller. The tables of the queries differ."""

    def __init__(self, queries: Sequence[TableQuery], encoding: Encoding, bucket_map: BucketMap) -> None:
        super().__init__(queries, encoding, bucket_map)
        self._asked = encoding
        self._tables: dict[int, _Table] = {}

    def _place(self, piece: Piece[int], answer: TableAnswer) -> None:
        values = answer.values if answer.formats is None else expand(answer)
        if self._is_one_message:
            self._tables[piece.table] = _Table(answer.flags, values, {answer.version: None})
            return
        routed, table = self._routed[piece.table], self._table(piece.table)
        places = routed.places(piece)
        table.flags[places] = answer.flags
        table.versions[answer.version] = None
        if routed.bags is None:
            table.values[places] = values
        else:
            table.values[routed.runs(piece)[0]] += values

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            routed = self._routed[number]
            dtype = np.dtype(np.float32) if self.encoding == "stored" else WIRE_NUMPY[self.encoding]
            make = np.empty if routed.bags is None else np.zeros
            values = make((routed.query.num_vectors, routed.dim), dtype)
            self._tables[number] = _Table(np.empty(routed.row_ids.shape[0], np.uint8), values)
        return self._tables[number]

    def result(self) -> dict[str, LookedUp]:
        """Of every table, once the replies to all messages are placed."""
        return {routed.query.table: self._finished(number) for number, routed in enumerate(self._routed)}

    def _finished(self, number: int) -> LookedUp:
        routed, table = self._routed[number], self._table(number)
        values = table.values
        if routed.bags is not None and routed.query.pooling == "mean":
            assert routed.query.lengths is not None
            values /= np.maximum(routed.query.lengths, 1).astype(np.float32)[:, None]
        if self.encoding == "bfloat16":  # numpy has no such type
            values = to_float32(values, "bfloat16")
        elif self._asked == "float16" and self._adds:
            values = values.astype(np.float16)
        return LookedUp(values, table.flags, tuple(table.versions))


class StoredReads(LookupReads):
    """Rows where they lie in the replies, those of all queries one after another, for who answers others with them."""

    def __init__(self, ids: Sequence[tuple[str, np.ndarray]], bucket_map: BucketMap) -> None:
        """ids: tables with their row_ids int64[n]; a table may come more than once."""
        super().__init__([TableQuery(name, row_ids) for name, row_ids in ids], "stored", bucket_map)
        self._starts = np.cumsum([0, *(row_ids.shape[0] for _, row_ids in ids)])
        n = int(self._starts[-1])
        self.found = FoundRows(np.zeros(n, np.int64), np.zeros(n, np.uint8), np.zeros(n, np.uint8))
        self.versions: dict[str, Version] = {}

    def _place(self, piece: Piece[int], answer: TableAnswer) -> None:
        assert answer.formats is not None
        start = int(self._starts[piece.table])
        places = self._routed[piece.table].places(piece)
        if isinstance(places, slice):
            places = slice(places.start + start, places.stop + start)
        else:
            places = places + start
        self.found.addresses[places] = stored_addresses(answer)
        self.found.bits[places] = answer.formats
        self.found.flags[places] = answer.flags
        self.found.kept.append(answer.values)
        self.versions[answer.table] = older(self.versions.get(answer.table), answer.version)


def _route(query: TableQuery, bucket_map: BucketMap) -> _Routed:
    dim = bucket_map.dim(query.table)
    if bucket_map.num_groups == 1:
        return _Routed(query, dim, query.row_ids, np.array([0, query.row_ids.shape[0]]), None)
    order, offsets = group_rows(query.row_ids, bucket_map.group_of_bucket, bucket_map.num_groups)
    return _Routed(query, dim, query.row_ids[order], offsets, order)


def _row_bytes(routed: _Routed, itemsize: int) -> int:
    """Bytes that a row_id takes in request and reply, at most: itself, its flags and format, its values, its bag."""
    if routed.query.pooling is None:
        return 10 + routed.dim * itemsize
    return 18 + routed.dim * 4  # a server counts what it reads, as float32


def _split_bags(tables: Sequence[_Routed]) -> bool:
    """Notes which bag each row_id is of, so that messages may have parts of bags. False: nothing is pooled."""
    pooled = [routed for routed in tables if routed.query.lengths is not None]
    for routed in pooled:
        lengths = routed.query.lengths
        assert lengths is not None
        bags = np.repeat(np.arange(lengths.shape[0]), lengths)
        routed.bags = bags if routed.order is None else bags[routed.order]
    return bool(pooled)
