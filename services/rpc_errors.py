"""The one place where Frostline's errors become gRPC statuses and come back as the same classes.

| class            | status              | carried beside the message            |
|------------------|---------------------|---------------------------------------|
| InvalidInput     | INVALID_ARGUMENT    |                                       |
| UnknownTable     | NOT_FOUND           |                                       |
| WrongShard       | INVALID_ARGUMENT    |                                       |
| TableConflict    | ALREADY_EXISTS      |                                       |
| StepGap          | FAILED_PRECONDITION | expected_step                         |
| NotReady         | FAILED_PRECONDITION |                                       |
| FencedEpoch      | ABORTED             | current_epoch                         |
| Overloaded       | RESOURCE_EXHAUSTED  | retry_after_ms, grpc-retry-pushback-ms|
| Unauthenticated  | UNAUTHENTICATED     | (nothing: the status alone says it)   |
| PermissionDenied | PERMISSION_DENIED   | (likewise)                            |
| SegmentCorrupt   | DATA_LOSS           | path                                  |
| StoreUnavailable | UNAVAILABLE         |                                       |
| anything else    | INTERNAL            | (our own bug; the trace is in the shard's log) |

The class travels as an ErrorDetail in the trailing metadata `frostline-error-bin`, because several share a status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from embedding_server.errors import (
    FencedEpoch,
    FrostlineError,
    InvalidInput,
    NotReady,
    Overloaded,
    PermissionDenied,
    SegmentCorrupt,
    StepGap,
    StoreUnavailable,
    TableConflict,
    Unauthenticated,
    UnknownTable,
    WrongShard,
)
from frostline.v1 import embedding_pb2 as pb

log = logging.getLogger(__name__)

DETAIL_KEY = "frostline-error-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
#: HTTP/2 headers are bounded at 8 KiB by default and the message is percent-encoded there.
MAX_MESSAGE_CHARS, MAX_ENCODED_BYTES = 2000, 4000
DEFAULT_RETRY_AFTER_MS = 100

# A subclass stands before its base: the first match wins.
_RULES: tuple[tuple[type[FrostlineError], grpc.StatusCode, pb.ErrorKind], ...] = (
    (UnknownTable, grpc.StatusCode.NOT_FOUND, pb.ERROR_KIND_UNKNOWN_TABLE),
    (WrongShard, grpc.StatusCode.INVALID_ARGUMENT, pb.ERROR_KIND_WRONG_SHARD),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT, pb.ERROR_KIND_INVALID_INPUT),
    (TableConflict, grpc.StatusCode.ALREADY_EXISTS, pb.ERROR_KIND_TABLE_CONFLICT),
    (StepGap, grpc.StatusCode.FAILED_PRECONDITION, pb.ERROR_KIND_STEP_GAP),
    (NotReady, grpc.StatusCode.FAILED_PRECONDITION, pb.ERROR_KIND_NOT_READY),
    (FencedEpoch, grpc.StatusCode.ABORTED, pb.ERROR_KIND_FENCED_EPOCH),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, pb.ERROR_KIND_OVERLOADED),
    (SegmentCorrupt, grpc.StatusCode.DATA_LOSS, pb.ERROR_KIND_SEGMENT_CORRUPT),
    (StoreUnavailable, grpc.StatusCode.UNAVAILABLE, pb.ERROR_KIND_STORE_UNAVAILABLE),
)

#: no other error has these statuses, and what refuses calls (security.py, or a proxy on the way) need send no detail
_FROM_STATUS: dict[grpc.StatusCode, type[FrostlineError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

_FROM_DETAIL: dict[int, Callable[[str, pb.ErrorDetail], FrostlineError]] = {
    pb.ERROR_KIND_INVALID_INPUT: lambda message, detail: InvalidInput(message),
    pb.ERROR_KIND_UNKNOWN_TABLE: lambda message, detail: UnknownTable(message),
    pb.ERROR_KIND_WRONG_SHARD: lambda message, detail: WrongShard(message),
    pb.ERROR_KIND_TABLE_CONFLICT: lambda message, detail: TableConflict(message),
    pb.ERROR_KIND_STEP_GAP: lambda message, detail: StepGap(message, detail.expected_step),
    pb.ERROR_KIND_NOT_READY: lambda message, detail: NotReady(message),
    pb.ERROR_KIND_FENCED_EPOCH: lambda message, detail: FencedEpoch(message, detail.current_epoch),
    pb.ERROR_KIND_OVERLOADED: lambda message, detail: Overloaded(message, detail.retry_after_ms),
    pb.ERROR_KIND_SEGMENT_CORRUPT: lambda message, detail: SegmentCorrupt(message, detail.path),
    pb.ERROR_KIND_STORE_UNAVAILABLE: lambda message, detail: StoreUnavailable(message),
}


def _rule_of(error: BaseException) -> tuple[grpc.StatusCode, pb.ErrorKind] | None:
    for cls, status, kind in _RULES:
        if isinstance(error, cls):
            return status, kind
    return None


def _detail_of(error: BaseException, kind: pb.ErrorKind) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        kind=kind,
        expected_step=getattr(error, "expected_step", 0),
        current_epoch=getattr(error, "current_epoch", 0),
        retry_after_ms=getattr(error, "retry_after_ms", 0),
        path=str(getattr(error, "path", ""))[:MAX_MESSAGE_CHARS],
    )


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Status code, message and trailing metadata of an error. Unknown classes are INTERNAL and logged."""
    for status, cls in _FROM_STATUS.items():
        if isinstance(error, cls):
            return status, str(error)[:MAX_MESSAGE_CHARS], ()
    rule = _rule_of(error)
    if rule is None:
        log.error("a call failed for a reason that is not the caller's", exc_info=error)
        message = f"internal error: {type(error).__name__}: {error}; see the shard's log"
        return grpc.StatusCode.INTERNAL, _fitting(message), ()
    status, kind = rule
    trailing: list[tuple[str, str | bytes]] = [(DETAIL_KEY, _detail_of(error, kind).SerializeToString())]
    if isinstance(error, Overloaded):
        trailing.append((PUSHBACK_KEY, str(error.retry_after_ms)))
    return status, _fitting(str(error)), tuple(trailing)


def _fitting(message: str) -> str:
    """As much of it as fits a header: names that callers send may be of characters that take 12 bytes there."""
    size = 0
    for i, character in enumerate(message[:MAX_MESSAGE_CHARS]):
        is_plain = " " <= character <= "~" and character != "%"
        size += 1 if is_plain else 3 * len(character.encode("utf-8", "replace"))
        if size > MAX_ENCODED_BYTES:
            return message[:i]
    return message[:MAX_MESSAGE_CHARS]


def abort(context: grpc.ServicerContext, error: BaseException) -> None:
    """Ends the call with the status of `error`. Does not return: grpc raises inside."""
    status, message, trailing = to_status(error)
    context.set_trailing_metadata(trailing)
    context.abort(status, message)


def _read_detail(error: grpc.RpcError) -> pb.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return pb.ErrorDetail.FromString(value)
    return None


def from_rpc_error(error: grpc.RpcError, shard: str) -> FrostlineError:
    """The Frostline error that a failed call stands for; `shard` names the shard in messages about reaching it."""
    status, message = error.code(), error.details() or ""
    detail = _read_detail(error)
    if detail is not None and detail.kind in _FROM_DETAIL:
        return _FROM_DETAIL[detail.kind](message, detail)
    if status in _FROM_STATUS:
        return _FROM_STATUS[status](message)
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in message:
        # grpc's own limit on concurrent calls; it sends no detail.
        return Overloaded(f"{shard}: {message}", DEFAULT_RETRY_AFTER_MS)
    if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return InvalidInput(f"{shard}: {message}")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return StoreUnavailable(f"{shard} did not answer ({status.name}: {message}); see its log")
    return FrostlineError(f"{shard}: {status.name}: {message}")
