"""The gRPC server of one shard: decode, run on the shard's executor thread, map errors, encode. No logic here.

    grpc pool thread                      executor thread
    admission -> decode -> queue  ----->  Shard.pull / push / ...
    encode <- wait for its Future <-----  (now, or when the other workers' calls have come)

Limits are those of admission.Limits and tensor_codec.MAX_MESSAGE_BYTES. EmbeddingLookup is in lookup_service.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from embedding_server.hints import Hint
from embedding_server.lookup import LookupSource
from embedding_server.shard import Shard
from embedding_server.store import WIRE_NUMPY, WireDtype
from frostline.v1 import embedding_pb2 as pb
from services import rpc_errors, shard_calls, tensor_codec
from services.admission import Admission, Limits
from services.lookup_service import LookupServicer
from services.rpc_calls import answered, result_in_time, result_or_cancel
from services.security import ServerSecurity
from services.security_options import SecurityOptions
from services.shard_executor import NOT_NOW, ShardExecutor
from services.snapshot_paths import SnapshotPaths

#: threads beyond Limits.max_calls, for health, reflection and the small calls
SPARE_THREADS = 16

SHARD_SERVICE = pb.DESCRIPTOR.services_by_name["EmbeddingShard"].full_name
LOOKUP_SERVICE = pb.DESCRIPTOR.services_by_name["EmbeddingLookup"].full_name

#: calls whose messages tensor_codec frames
_FRAMED = ("Pull", "Push", "Prefetch", "Lookup")

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", tensor_codec.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", tensor_codec.MAX_MESSAGE_BYTES),
    # Without it a second shard on the same port would silently share it.
    ("grpc.so_reuseport", 0),
)


class WaitingCalls:
    """Waits for Futures on behalf of calls, and lets go of them when the caller goes away or the server drains.

    Thread safety: every method may be called from any thread; `_lock` guards the set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future] = set()
        self._refusal: FrostlineError | None = None

    def wait(self, context: grpc.ServicerContext, future: Future) -> Any:
        """The result of `future`. Raises its error, DeadlineExceeded, or StoreUnavailable while draining."""
        if future.done():
            return future.result()
        answer: Future = Future()
        with self._lock:
            if self._refusal:
                raise self._refusal
            self._waiting.add(answer)
        try:
            future.add_done_callback(lambda done: _copy_outcome(done, answer))
            if not context.add_callback(answer.cancel):
                raise CancelledError
            return result_in_time(context, answer)
        finally:
            with self._lock:
                self._waiting.discard(answer)

    def refuse_all(self, error: FrostlineError) -> None:
        """Ends every wait, now and from now on, with `error`."""
        with self._lock:
            self._refusal = error
            waiting = list(self._waiting)
        for answer in waiting:
            _set_quietly(answer.set_exception, error)


def _set_quietly(setter: Callable[[Any], None], value: Any) -> None:
    # Invalid state: it was cancelled or refused in the meantime, and nobody waits for it.
    with contextlib.suppress(InvalidStateError):
        setter(value)


def _copy_outcome(done: Future, answer: Future) -> None:
    error = done.exception()
    if error is not None:
        _set_quietly(answer.set_exception, error)
    else:
        _set_quietly(answer.set_result, done.result())


class ShardServicer:
    """EmbeddingShard. Pull, Push and Prefetch take and return the bytes of their messages."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def _run(self, context: grpc.ServicerContext, work: Callable[[Shard], Any]) -> Any:
        return self._state.run(context, work)

    @answered
    def DescribeTables(self, request: pb.DescribeTablesRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, shard_calls.describe_tables)

    @answered
    def CreateTables(self, request: pb.CreateTablesRequest, context: grpc.ServicerContext) -> Message:
        def work(shard: Shard) -> Message:
            answer = shard_calls.create_tables(shard, request)
            self._state.dims = _dims(shard)
            return answer

        return self._run(context, work)

    @answered
    def GetEpoch(self, request: pb.GetEpochRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda shard: shard_calls.get_epoch(shard, request))

    @answered
    def BeginEpoch(self, request: pb.BeginEpochRequest, context: grpc.ServicerContext) -> Message:
        max_workers = self._state.admission.limits.max_workers
        answers = self._state.answers
        return self._run(context, lambda shard: shard_calls.begin_epoch(shard, answers, request, max_workers))

    @answered
    def Advance(self, request: pb.AdvanceRequest, context: grpc.ServicerContext) -> Message:
        state = self._state

        def work(shard: Shard) -> Message:
            answer = shard_calls.advance(shard, state.answers, state.paths, request)
            if request.HasField("drop_tables"):
                state.dims = _dims(shard)
            return answer

        return self._run(context, work)

    @answered
    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> Message:
        state = self._state
        with state.admission.call():
            later = self._run(context, lambda shard: shard_calls.meet(shard, request))
            return pb.MeetResponse(words=state.waiting.wait(context, later))

    @answered
    def GetCutProgress(self, request: pb.GetCutProgressRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda shard: shard_calls.cut_progress(shard, request))

    @answered
    def AbandonCut(self, request: pb.AbandonCutRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda shard: shard_calls.abandon_cut(shard, request))

    @answered
    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> Message:
        state = self._state
        return self._run(context, lambda shard: shard_calls.restore(shard, state.answers, state.paths, request))

    @answered
    def GetMaskInfo(self, request: pb.GetMaskInfoRequest, context: grpc.ServicerContext) -> Message:
        return self._run(context, lambda shard: shard_calls.mask_info(shard, request))

    @answered
    def Pull(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        state = self._state
        with state.admission.call():
            call = tensor_codec.decode_pull(request)
            size = len(request) + state.check_reply("Pull", call.ids, call.wire_dtype)
            with state.admission.bytes(size) as held:
                reply = tensor_codec.ReplyMessage(call.wire_dtype)
                later = self._run(
                    context,
                    lambda shard: shard.pull(
                        call.who, call.step, call.ids, call.wire_dtype, call.part, call.num_parts, reply
                    ),
                )
                if not later.done():
                    held.release()
                state.waiting.wait(context, later)
                return reply.message

    @answered
    def Prefetch(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        state = self._state
        with state.admission.call():
            ids = tensor_codec.decode_prefetch(request)
            with state.admission.bytes(len(request)):
                Hint(ids).run(lambda advance: self._run(context, advance))
                return pb.PrefetchResponse().SerializeToString()

    @answered
    def Push(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        state = self._state
        with state.admission.call():
            call = tensor_codec.decode_push(request)
            with state.admission.bytes(len(request)) as held:
                later = self._run(
                    context,
                    lambda shard: shard.push(
                        call.who, call.step, call.gradients, call.wire_dtype, call.part, call.num_parts
                    ),
                )
                if not later.done():
                    held.release()
                ack = state.waiting.wait(context, later)
                return pb.PushResponse(
                    step=ack.step,
                    rows_applied=ack.rows_applied,
                    rows_ignored=ack.rows_ignored,
                    duplicate=ack.duplicate,
                ).SerializeToString()


def _dims(shard: Shard) -> dict[str, int]:
    return {name: spec.dim for name, spec in shard.table_specs().items()}


class ServerState:
    """What the servicers of one server share."""

    def __init__(self, shard: Shard, limits: Limits, paths: SnapshotPaths) -> None:
        self.dims = _dims(shard)  # replaced whole by the executor thread, read by any
        self.executor = ShardExecutor(shard)
        self.admission = Admission(limits)
        self.waiting = WaitingCalls()
        self.answers = shard_calls.LastAnswers()  # executor thread only
        self.paths = paths

    def run(self, context: grpc.ServicerContext, work: Callable[[Shard], Any]) -> Any:
        """What `work` returns on the executor thread. Skipped there if the caller has gone by then."""
        return result_or_cancel(context, self.executor.run(work))

    def run_lookup(self, context: grpc.ServicerContext, work: Callable[[LookupSource], Any]) -> Any:
        """On the caller's thread if the shard has nothing else to do, else as run."""

        def look_up(shard: Shard) -> Any:
            return work(shard.lookups)

        answer = self.executor.run_now(look_up)
        return self.run(context, look_up) if answer is NOT_NOW else answer

    def check_reply(self, call: str, ids: Mapping[str, np.ndarray], wire_dtype: WireDtype) -> int:
        """Size of the reply in bytes, unknown tables left out. Raises InvalidInput if it passes the limit."""
        itemsize = WIRE_NUMPY[wire_dtype].itemsize
        size = sum(len(row_ids) * (self.dims.get(name, 0) * itemsize + 1) for name, row_ids in ids.items())
        if size > tensor_codec.MAX_PAYLOAD_BYTES:
            num_rows = sum(len(row_ids) for row_ids in ids.values())
            raise InvalidInput(
                f"{call}: {num_rows} rows in {len(ids)} tables are {size} bytes, above the limit of "
                f"{tensor_codec.MAX_PAYLOAD_BYTES} bytes a message; send the request in parts"
            )
        return size


def _parsed(
    method: Callable[[Message, grpc.ServicerContext], Message], cls: type[Message]
) -> Callable[[bytes, grpc.ServicerContext], Message]:
    """The method for the bytes of a `cls`. gRPC's own parsing would answer INTERNAL to what is the caller's fault."""

    def parse_and_call(data: bytes, context: grpc.ServicerContext) -> Message:
        try:
            request = cls.FromString(data)
        except DecodeError:
            text = f"message: {len(data)} bytes are not a whole {cls.DESCRIPTOR.name}; it was cut or is of another API"
            return rpc_errors.abort(context, InvalidInput(text))
        return method(request, context)

    return parse_and_call


def handlers_of(service: str, servicer: Any) -> grpc.GenericRpcHandler:
    """Method handlers of a service; those of _FRAMED pass bytes through."""
    methods = {}
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        if method.name in _FRAMED:
            methods[method.name] = grpc.unary_unary_rpc_method_handler(getattr(servicer, method.name))
        else:
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _parsed(getattr(servicer, method.name), getattr(pb, method.input_type.name)),
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(f"{pb.DESCRIPTOR.package}.{service}", methods)


class ShardServer:
    """A shard behind a port. Takes ownership of the shard.

    Life: created (health NOT_SERVING), `start`, `serving` (health SERVING), `stop`.
    """

    def __init__(
        self,
        shard: Shard,
        limits: Limits | None = None,
        *,
        host: str = "127.0.0.1",
        snapshot_root: Path | None = None,
        security: ServerSecurity | None = None,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
    ) -> None:
        """host: the address to bind. snapshot_root: where clients may have snapshots lie; see snapshot_paths.py.

        security: who may call, made for `host`; None: anybody on this machine, InvalidInput if host is not loopback.
        interceptors: they see the calls that security lets pass.
        """
        limits = limits or Limits()
        self._security = security or ServerSecurity(SecurityOptions(), host)
        assert self._security.host == host, f"security for {self._security.host}, and the server binds {host}"
        max_rpcs = limits.max_calls + SPARE_THREADS
        self._host = host
        self._state = ServerState(shard, limits, SnapshotPaths(snapshot_root, host))
        self._health = health.HealthServicer()
        self._pool = ThreadPoolExecutor(max_rpcs, thread_name_prefix="shard-rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=(*self._security.interceptors, *interceptors),  # strangers take no place among calls
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_rpcs,
        )
        state = self._state
        lookups = LookupServicer(state.run_lookup, lambda: state.dims, state.admission)
        self._server.add_generic_rpc_handlers(
            (handlers_of("EmbeddingShard", ShardServicer(state)), handlers_of("EmbeddingLookup", lookups))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SHARD_SERVICE, LOOKUP_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _set_health(self, status: int) -> None:
        for service in ("", SHARD_SERVICE, LOOKUP_SERVICE):
            self._health.set(service, status)

    def start(self, port: int = 0) -> str:
        """Binds and serves; port 0 takes a free one. Returns "host:port". Raises StoreUnavailable if it cannot bind."""
        host = self._host
        try:
            bound = self._security.add_port(self._server, port)
        except RuntimeError as error:
            raise StoreUnavailable(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{bound}"

    def stop(self, grace_s: float = 5.0) -> None:
        """Drains: no new calls, running ones finish within `grace_s`, waiting ones are told to try elsewhere."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace_s)
        self._state.waiting.refuse_all(StoreUnavailable("the shard is shutting down; try again when it is back"))
        stopped.wait(grace_s + 1.0)
        self._state.executor.close()
        self._pool.shutdown(wait=False)
