"""Rows and tables that go, on all shards of a store, and the meetings of its workers: for RemoteStore.

Thread safety: any thread; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from embedding_server.erasure import chunks_of
from embedding_server.errors import UnknownTable
from embedding_server.store import Erased, Identity
from embedding_server.table_drop import check_names
from frostline.v1 import embedding_pb2 as pb
from services.advance_messages import caller_message, delete_rows_message, erased_of
from services.shard_channel import ShardChannel, call_all
from services.sliced_calls import Channels, in_slices


def delete_rows(channels: Channels, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
    """Every shard gets every row_id: one that it does not own it may have in a file that a restore has linked."""
    total: dict[str, Erased] = {}
    number = 0
    for chunk, is_last in chunks_of(ids):

        def request(
            channel: ShardChannel,
            number: int,
            chunk: Mapping[str, np.ndarray] = chunk,
            is_last: bool = is_last,
        ) -> pb.AdvanceRequest:
            action = delete_rows_message(chunk, is_last, number)
            return pb.AdvanceRequest(caller=caller_message(who), step=step, delete_rows=action)

        answers, number = in_slices("EmbeddingShard/Advance", channels, request, pb.AdvanceResponse, number)
        for rows in (rows for answer in answers for rows in answer.erased):
            total[rows.table] = total.get(rows.table, Erased()) + erased_of(rows)
    return total


def drop_tables(
    channels: Channels, who: Identity, step: int, names: Sequence[str], existing: Sequence[Collection[str]]
) -> None:
    """existing: tables of each shard. A shard may lack one that an earlier call, which failed, has dropped there."""
    check_names(names)
    unknown = sorted(set(names) - set().union(*existing))
    if unknown:
        known = ", ".join(sorted(set().union(*existing))[:10]) or "none"
        raise UnknownTable(f"table {unknown[0]!r} cannot be dropped: it does not exist (tables: {known})")

    def request(channel: ShardChannel, number: int) -> pb.AdvanceRequest:
        present = [name for name in dict.fromkeys(names) if name in existing[channel.index]]
        action = pb.DropTables(tables=present, slice=number)
        return pb.AdvanceRequest(caller=caller_message(who), step=step, drop_tables=action)

    in_slices("EmbeddingShard/Advance", channels, request, pb.AdvanceResponse)


def meet(channels: Channels, who: Identity, step: int, number: int, topic: str, words: str) -> list[str]:
    """On the first shard: every worker pulls every step from each of them."""
    request = pb.MeetRequest(caller=caller_message(who), step=step, number=number, topic=topic, words=words)
    reply = call_all("EmbeddingShard/Meet", [(channels[0], request.SerializeToString())])[0]
    return list(pb.MeetResponse.FromString(reply).words)
