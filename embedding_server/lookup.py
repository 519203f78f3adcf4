"""Look-ups: what a source of rows must say, and how its rows become the reply.

    LookupSource.find_rows   row_ids -> where each row lies, in how many bits, and its state
    LookupSource.look_up     these rows as they are asked for, or pooled, into the reply (kernels/lookups.py)

Sources: LiveLookups (live_lookup.py: the tables of a shard, while they train) and whatever serves a snapshot. Both give
rows where they lie: a hot row is one of 32 or 16 bits, a frozen one of 32, 16, 8 or 4 (kernels/frozen.py). So one
kernel reads all of them, and what is sent as stored is copied byte by byte.

A look-up is not a visit: nothing is counted, admitted or thawed. All rows of a call are read at one moment.

Shapes: N row_ids of all K tables of a call, one table after another; D the dim of a table, B its bags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels import lookups as kernels
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.spec import TableSpec
from embedding_server.store import WIRE_NUMPY, TableStats

#: what a value of the reply is; stored: each row in the bits that it is stored in
Encoding = Literal["float32", "float16", "bfloat16", "stored"]
ENCODINGS: tuple[Encoding, ...] = ("float32", "float16", "bfloat16", "stored")
Pooling = Literal["sum", "mean"]

#: Bit of the flags of a look-up, beside TRAINABLE, DEFAULT and FOUND of store.py: the row still has its initial value.
#: Here bits 4 to 7 are 0: no heat bands.
INITIAL = 8


@dataclass(frozen=True, slots=True)
class Version:
    """What training the rows of a table have seen."""

    job: str = ""  # that trains the table, or trained it last; empty before the first
    epoch: int = 0
    step: int = 0  # the last one applied in full
    snapshot_id: str = ""  # which snapshot is served; empty: a shard that trains


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What is asked of one table. Row_ids int64[n], contiguous, in any order, repeated or not."""

    table: str
    row_ids: np.ndarray
    pooling: Pooling | None = None
    lengths: np.ndarray | None = None  # int64[B], with pooling: row_ids of each bag, 0 or more, n in all

    @property
    def num_vectors(self) -> int:
        """Rows of values in the reply."""
        return self.row_ids.shape[0] if self.lengths is None else self.lengths.shape[0]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Where the rows of a call lie, all tables one after another. Good until the source changes: copy at once."""

    addresses: np.ndarray  # int64[N], of a row's first byte; 0 where bits are 0
    bits: np.ndarray  # uint8[N]: 4, 8, 16 or 32, formats of kernels/frozen.py; 0: zeros, that lie nowhere
    flags: np.ndarray  # uint8[N] of TRAINABLE, DEFAULT, FOUND and INITIAL
    kept: list[object] = field(default_factory=list)  # what addresses point into and nobody else keeps


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What a reply will have, so that who sends it can make room."""

    encoding: Encoding
    queries: Sequence[TableQuery]
    dims: Sequence[int]
    versions: Sequence[Version]  # of each table
    num_rows: int  # N: bytes of flags, and with encoding stored of formats
    values_bytes: int


class LookupReply(Protocol):
    """Where a reply is to lie. Called once: returns flags uint8[N], formats uint8[N] (stored; else of any length) and
    values uint8[values_bytes], the first byte of which is at an address that is a multiple of 4 unless stored."""

    def __call__(self, shape: ReplyShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


class LookupSource(ABC):
    """Tables of some buckets, to be read.

    Thread safety: that of the implementation; look_up touches nothing but what find_rows gives.
    """

    buckets: np.ndarray  # bool[NUM_BUCKETS]: those it has, of every table

    @abstractmethod
    def spec(self, table: str) -> TableSpec:
        """Raises UnknownTable."""

    @abstractmethod
    def table_specs(self) -> dict[str, TableSpec]:
        """By name, in order of creation."""

    @abstractmethod
    def version(self, table: str) -> Version:
        """What the rows of one of its tables have seen up to now."""

    @abstractmethod
    def stats(self, table: str) -> TableStats:
        """Of the rows that it has of one of its tables."""

    @abstractmethod
    def find_rows(self, ids: Sequence[tuple[str, np.ndarray]]) -> FoundRows:
        """Tables with their row_ids int64[n], contiguous. UnknownTable, WrongShard if a row_id is in a bucket that it
        does not have, SegmentCorrupt if a frozen row among them lies in a damaged block.

        An unknown row_id reads the default row if the table's min_count is above 1, else zeros.
        """

    def look_up(self, queries: Sequence[TableQuery], encoding: Encoding, reply: LookupReply) -> None:
        """Writes the answer into `reply`. InvalidInput if a query cannot be answered, and errors of find_rows; then
        nothing was asked of `reply`."""
        _check(queries, encoding)
        found = self.find_rows([(query.table, query.row_ids) for query in queries])
        _Answer(self, queries, encoding, found).write(reply)


def _check(queries: Sequence[TableQuery], encoding: Encoding) -> None:
    if encoding not in ENCODINGS:
        raise InvalidInput(f"Lookup: encoding {encoding!r} must be one of {', '.join(ENCODINGS)}")
    for query in queries:
        if query.pooling is None:
            continue
        if encoding == "stored":
            raise InvalidInput(
                f"Lookup: table {query.table!r}: rows as stored cannot be pooled; ask for float32, float16 or bfloat16"
            )
        assert query.lengths is not None
        if int(query.lengths.min(initial=0)) < 0:
            bag = int(np.flatnonzero(query.lengths < 0)[0])
            raise InvalidInput(
                f"Lookup: table {query.table!r}: lengths[{bag}]={query.lengths[bag]} must be 0 or more; send how many"
                " row_ids each bag has"
            )
        # in float64, which cannot wrap around: below 2^53 it is exact
        total = float(query.lengths.sum(dtype=np.float64))
        if total != query.row_ids.shape[0]:
            raise InvalidInput(
                f"Lookup: table {query.table!r}: lengths of {query.lengths.shape[0]} bags add up to {total:.0f}, but it"
                f" has {query.row_ids.shape[0]} row_ids; make them add up"
            )


class _Answer:
    """One look-up whose rows were found."""

    def __init__(
        self, source: LookupSource, queries: Sequence[TableQuery], encoding: Encoding, found: FoundRows
    ) -> None:
        self._queries, self._encoding, self._found = queries, encoding, found
        self._dims = [source.spec(query.table).dim for query in queries]
        self._starts = starts_of([query.row_ids.shape[0] for query in queries])
        self._versions = [source.version(query.table) for query in queries]

    def write(self, reply: LookupReply) -> None:
        if self._encoding == "stored":
            self._write_stored(reply)
            return
        dtype = WIRE_NUMPY[self._encoding]
        sizes = [query.num_vectors * dim for query, dim in zip(self._queries, self._dims, strict=True)]
        value_starts = starts_of(sizes)
        flags, _, values = self._ask(reply, sum(sizes) * dtype.itemsize)
        flags[:] = self._found.flags
        out, mode = wire_view(values.view(dtype)), MODES[self._encoding]
        pooled = [k for k, query in enumerate(self._queries) if query.pooling is not None]
        plain = [k for k, query in enumerate(self._queries) if query.pooling is None]
        rows = self._found.addresses, self._found.bits, self._starts, np.array(self._dims, np.int64)
        if plain:
            kernels.copy_rows(*rows, value_starts, np.array(plain, np.int64), out, mode)
        for k in pooled:
            query = self._queries[k]
            kernels.pool_rows(*rows, k, query.lengths, query.pooling == "mean", out[value_starts[k] :], mode)

    def _write_stored(self, reply: LookupReply) -> None:
        offsets = np.empty(self._found.bits.shape[0] + 1, np.int64)
        kernels.stored_offsets(self._found.bits, self._starts, np.array(self._dims, np.int64), offsets)
        flags, formats, values = self._ask(reply, int(offsets[-1]))
        flags[:] = self._found.flags
        formats[:] = self._found.bits
        kernels.copy_stored(self._found.addresses, offsets, values)

    def _ask(self, reply: LookupReply, values_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_rows = self._found.flags.shape[0]
        return reply(ReplyShape(self._encoding, self._queries, self._dims, self._versions, num_rows, values_bytes))


def starts_of(sizes: Sequence[int]) -> np.ndarray:
    """int64[K+1]: where each begins, and the end of the last. In plain Python: there are few of them."""
    return np.array([0, *accumulate(sizes)], np.int64)
