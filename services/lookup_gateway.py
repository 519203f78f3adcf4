"""A gateway: EmbeddingLookup for clients that do not route, answered by the shards behind it.

    client --Lookup--> gateway --Lookup (rows as stored)--> each shard that has some of the row_ids, all at once

`frostline shard --fanout ADDRESS ...` runs it (gateway_process.py). It keeps no rows: a FannedOut is a LookupSource
whose rows lie in the replies of the shards, fetched as they are stored, in the fewest bytes, and expanded or pooled
here as a shard would have done it. So an answer equals, bit for bit, that of one shard that has all the rows. It adds
one hop to a look-up.

A full shard's RESOURCE_EXHAUSTED goes on to the caller with its pushback, if no replica has room: a call that waited
here would hold memory and a thread. Deadlines are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from embedding_server.errors import PermissionDenied, StoreUnavailable, Unauthenticated
from embedding_server.lookup import FoundRows, LookupSource, Version
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, TableStats
from frostline.v1 import embedding_pb2 as pb
from services.admission import Admission, Limits
from services.advance_messages import stats_of
from services.bucket_map import older
from services.lookup_client import LOOKUP_TIMES, LookupClient
from services.lookup_codec import version_of
from services.lookup_reads import StoredReads
from services.lookup_service import LookupServicer
from services.rpc_server import RpcServer
from services.security import ServerSecurity
from services.security_options import Credentials, SecurityOptions
from services.shard_server import LOOKUP_SERVICE, handlers_of

GET_TABLE = "EmbeddingLookup/GetTable"
#: of a call without a deadline
MAX_WAIT_S = LOOKUP_TIMES.deadline_s


class FannedOut(LookupSource):
    """The tables of all shards, for one call. Owned by the call's thread."""

    def __init__(self, client: LookupClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._versions: dict[str, Version] = {}
        self.buckets = np.ones(NUM_BUCKETS, np.bool_)

    def table_specs(self) -> dict[str, TableSpec]:
        return self._client.table_specs(self._timeout_s)

    def spec(self, table: str) -> TableSpec:
        return self._client.spec(table, self._timeout_s)

    def version(self, table: str) -> Version:
        """Of the rows that were read; before that, what the shards told when they were last asked for their tables."""
        return self._versions.get(table) or self._client.version(table)

    def stats(self, table: str) -> TableStats:
        """The sum over the shards."""
        request = pb.GetTableRequest(name=table).SerializeToString()
        total = TableStats()
        for reply in self._client.ask_all(GET_TABLE, request, table, self._timeout_s):
            answer = pb.GetTableResponse.FromString(reply)
            total = total + stats_of(answer.mask_info)
            self._versions[table] = older(self._versions.get(table), version_of(answer.version))
        return total

    def find_rows(self, ids: Sequence[tuple[str, np.ndarray]]) -> FoundRows:
        """Raises Overloaded and StoreUnavailable too."""
        reads = self._client.read(lambda used: StoredReads(ids, used), self._timeout_s, waits_for_room=False)
        self._versions.update(reads.versions)
        return reads.found


class LookupGateway:
    """The server. Life: created, `start`, serving (health SERVING), `stop`."""

    def __init__(
        self,
        addresses: Sequence[str],
        limits: Limits | None = None,
        *,
        host: str = "127.0.0.1",
        security: ServerSecurity | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises StoreUnavailable if the shards of some buckets do not answer, InvalidInput if they do not fit.

        security: who may call the gateway, as of ShardServer. credentials: of the gateway, at the shards.
        """
        limits = limits or Limits()
        security = security or ServerSecurity(SecurityOptions(), host)
        self._client = LookupClient(addresses, credentials=credentials)
        servicer = LookupServicer(self._run, self._client.dims, Admission(limits))
        services = {LOOKUP_SERVICE: handlers_of("EmbeddingLookup", servicer)}
        self._server = RpcServer(services, limits, security, thread_name="gateway-rpc")

    def _run(self, context: grpc.ServicerContext, work: Callable[[LookupSource], Any]) -> Any:
        remaining_s = context.time_remaining()
        timeout_s = MAX_WAIT_S if remaining_s is None else min(remaining_s, MAX_WAIT_S)
        try:
            return work(FannedOut(self._client, timeout_s))
        except (Unauthenticated, PermissionDenied) as error:  # of the gateway's own token, not of the caller's
            raise StoreUnavailable(f"the shards refuse this gateway: {error}") from error

    def start(self, port: int = 0) -> str:
        """Binds and serves; port 0 takes a free one. Returns "host:port". StoreUnavailable if it cannot bind."""
        return self._server.start(port)

    def stop(self, grace_s: float = 5.0) -> None:
        """Drains: no new calls, running ones finish within `grace_s`."""
        self._server.stop(grace_s)
        self._client.close()
