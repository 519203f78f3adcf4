"""Which addresses answer for which buckets, as the shards themselves say, and the tables that they have.

Addresses that answer for the same buckets are replicas of one another: a *group*. Groups must not overlap otherwise and
together they must answer for every bucket. A map is made whole and never changed, so that a call uses one throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedding_server.errors import (
    FrostlineError,
    InvalidInput,
    PermissionDenied,
    StoreUnavailable,
    Unauthenticated,
    UnknownTable,
)
from embedding_server.lookup import Version
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS
from frostline.v1 import embedding_pb2 as pb
from services.lookup_codec import version_of

#: the addresses of the shards, or a function that gives those of now (of a registry, say), asked at each learning
Addresses = Sequence[str] | Callable[[], Sequence[str]]

LIST_TABLES = "EmbeddingLookup/ListTables"
LIST_TABLES_REQUEST = pb.ListTablesRequest().SerializeToString()


def addresses_now(addresses: Addresses) -> list[str]:
    """Each once, in order. InvalidInput if there are none."""
    found = list(dict.fromkeys(addresses() if callable(addresses) else addresses))
    if not found:
        raise InvalidInput("no addresses of shards; name at least one host:port")
    return found


@dataclass(frozen=True, slots=True)
class BucketMap:
    group_of_bucket: np.ndarray  # int32[NUM_BUCKETS]
    groups: tuple[tuple[str, ...], ...]  # addresses of each group
    tables: Mapping[str, pb.Table]
    versions: Mapping[str, Version]  # of each table, the oldest that a shard has told
    tables_at: Mapping[str, frozenset[str]]  # by address
    tables_of: tuple[frozenset[str], ...]  # those that all replicas of a group have
    silent: Mapping[str, FrostlineError]  # addresses that did not answer, and why

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def routes_as(self, other: BucketMap) -> bool:
        """Whether a call would go to the same addresses, and find the same tables there."""
        same = self.groups == other.groups and self.tables_at == other.tables_at
        same = same and {n: t.dim for n, t in self.tables.items()} == {n: t.dim for n, t in other.tables.items()}
        return same and np.array_equal(self.group_of_bucket, other.group_of_bucket)

    def dim(self, table: str) -> int:
        return self._table(table).dim

    def spec(self, table: str) -> TableSpec:
        return TableSpec.model_validate_json(self._table(table).spec_json)

    def _table(self, table: str) -> pb.Table:
        found = self.tables.get(table)
        if found is None:
            known = ", ".join(sorted(self.tables)[:10]) or "none"
            raise UnknownTable(f"table {table!r} does not exist (tables: {known}); look one of these up")
        return found

    def addresses_with(self, group: int, tables: Sequence[str]) -> Sequence[str]:
        """The replicas that have all these tables. UnknownTable if none has: a failure left them on some shards alone,
        or a shard has begun anew without its rows."""
        wanted = set(tables)
        if wanted <= self.tables_of[group]:
            return self.groups[group]
        found = [address for address in self.groups[group] if wanted <= self.tables_at[address]]
        if not found:
            address = self.groups[group][0]
            missing = sorted(wanted - self.tables_at[address])
            raise UnknownTable(
                f"table {missing[0]!r} is not on shard {address}, though on others; it may be starting: wait until it "
                "has restored its rows, or create the table on all shards"
            )
        return found


def make_map(answers: Mapping[str, bytes | FrostlineError]) -> BucketMap:
    """answers: of each address a ListTablesResponse, or why there is none.

    InvalidInput if they do not fit together, StoreUnavailable if the shards of some buckets did not answer,
    Unauthenticated or PermissionDenied if they refuse.
    """
    silent = {address: answer for address, answer in answers.items() if isinstance(answer, FrostlineError)}
    replies = {
        address: pb.ListTablesResponse.FromString(answer)
        for address, answer in answers.items()
        if isinstance(answer, bytes)
    }
    group_of_bucket = np.full(NUM_BUCKETS, -1, np.int32)
    groups: dict[bytes, list[str]] = {}
    for address, reply in replies.items():
        owned = _owned(address, reply)
        key = owned.tobytes()
        if key not in groups:
            _check_free(address, owned, group_of_bucket, list(groups.values()))
            group_of_bucket[owned] = len(groups)
            groups[key] = []
        groups[key].append(address)
    refusals = [error for error in silent.values() if isinstance(error, Unauthenticated | PermissionDenied)]
    if refusals and (group_of_bucket < 0).any():
        raise refusals[0]  # to wait does not help
    _check_complete(group_of_bucket, len(replies), silent)
    tables_at = {address: frozenset(table.name for table in reply.tables) for address, reply in replies.items()}
    return BucketMap(
        group_of_bucket,
        tuple(tuple(members) for members in groups.values()),
        _tables(replies),
        _oldest(replies.values()),
        tables_at,
        tuple(frozenset.intersection(*(tables_at[address] for address in members)) for members in groups.values()),
        silent,
    )


def _tables(replies: Mapping[str, pb.ListTablesResponse]) -> dict[str, pb.Table]:
    tables: dict[str, pb.Table] = {}
    for address, reply in replies.items():
        for table in reply.tables:
            known = tables.setdefault(table.name, table)
            if known.dim != table.dim:
                raise InvalidInput(
                    f"table {table.name!r} has dim={table.dim} on shard {address} and dim={known.dim} on another; they"
                    " are not shards of one store"
                )
    return tables


def _oldest(replies: Iterable[pb.ListTablesResponse]) -> dict[str, Version]:
    versions: dict[str, Version] = {}
    for reply in replies:
        for table, message in zip(reply.tables, reply.versions, strict=True):
            versions[table.name] = older(versions.get(table.name), version_of(message))
    return versions


def older(known: Version | None, other: Version) -> Version:
    """What rows of several shards have seen: as much as the oldest of them."""
    return other if known is None or (other.epoch, other.step) < (known.epoch, known.step) else known


def _owned(address: str, reply: pb.ListTablesResponse) -> np.ndarray:
    """bool[NUM_BUCKETS]"""
    if reply.num_buckets != NUM_BUCKETS:
        raise InvalidInput(
            f"shard {address} counts {reply.num_buckets} buckets, this client {NUM_BUCKETS}; update one of them"
        )
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    for part in reply.buckets:
        owned[part.first : part.last + 1] = True
    return owned


def _check_free(address: str, owned: np.ndarray, group_of_bucket: np.ndarray, groups: Sequence[Sequence[str]]) -> None:
    taken = np.flatnonzero(owned & (group_of_bucket >= 0))
    if taken.size:
        bucket = int(taken[0])
        raise InvalidInput(
            f"shard {address} and {groups[group_of_bucket[bucket]][0]} both answer for bucket {bucket}, but not for "
            "the same buckets; replicas must have equal --shard-index and --num-shards, others no bucket in common"
        )


def _check_complete(group_of_bucket: np.ndarray, num_replies: int, silent: Mapping[str, FrostlineError]) -> None:
    missing = np.flatnonzero(group_of_bucket < 0)
    if not missing.size:
        return
    if silent:
        address, why = next(iter(silent.items()))
        raise StoreUnavailable(
            f"nobody answers for bucket {int(missing[0])}: {len(silent)} of {len(silent) + num_replies} addresses did "
            f"not answer, {address} among them: {why}"
        )
    raise InvalidInput(
        f"no shard of {num_replies} answers for bucket {int(missing[0])}; list the addresses of all shards"
    )
