"""EmbeddingLookup, of whatever has rows: decode, ask the source, map errors, encode. No logic here.

A shard's source is read on the shard's executor thread; one that does not change can be read where the call is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from embedding_server.lookup import LookupSource
from frostline.v1 import embedding_pb2 as pb
from services import lookup_calls, lookup_codec
from services.admission import Admission
from services.rpc_calls import answered

#: run(context, work): what work(source) returns, once it has run where the source may be read
Run = Callable[[grpc.ServicerContext, Callable[[LookupSource], Any]], Any]


class LookupServicer:
    """Lookup takes and returns the bytes of its messages."""

    def __init__(
        self,
        run: Run,
        dims: Callable[[], Mapping[str, int]],
        admission: Admission,
        places: Sequence[pb.LookupPlace] = (),
    ) -> None:
        """dims(): of the source's tables by name, from any thread. places: what ListTables tells of other processes."""
        self._run, self._dims, self._admission, self._places = run, dims, admission, places

    @answered
    def ListTables(self, request: pb.ListTablesRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda source: lookup_calls.list_tables(source, self._places))

    @answered
    def GetTable(self, request: pb.GetTableRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda source: lookup_calls.get_table(source, request))

    @answered
    def Lookup(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._admission.call():
            call = lookup_codec.decode_lookup(request)
            with self._admission.bytes(len(request) + lookup_calls.check_size(call, self._dims())):
                reply = lookup_codec.LookupReplyMessage()
                self._run(context, lambda source: source.look_up(call.queries, call.encoding, reply))
                return reply.message
