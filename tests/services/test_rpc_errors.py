"""Every error class goes to its status and comes back as itself, with what it carries."""

from __future__ import annotations

import logging
from urllib.parse import quote

import grpc
import pytest

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
from services import rpc_errors


class FakeRpcError(grpc.RpcError):
    """What a stub raises, without a channel."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple = ()) -> None:
        super().__init__(details)
        self._status = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]

    def trailing_metadata(self) -> tuple:
        return self._status[2]


CASES = [
    (InvalidInput("m"), grpc.StatusCode.INVALID_ARGUMENT, {}),
    (UnknownTable("m"), grpc.StatusCode.NOT_FOUND, {}),
    (WrongShard("m"), grpc.StatusCode.INVALID_ARGUMENT, {}),
    (TableConflict("m"), grpc.StatusCode.ALREADY_EXISTS, {}),
    (StepGap("m", 7), grpc.StatusCode.FAILED_PRECONDITION, {"expected_step": 7}),
    (NotReady("m"), grpc.StatusCode.FAILED_PRECONDITION, {}),
    (FencedEpoch("m", 3), grpc.StatusCode.ABORTED, {"current_epoch": 3}),
    (Overloaded("m", 250), grpc.StatusCode.RESOURCE_EXHAUSTED, {"retry_after_ms": 250}),
    (SegmentCorrupt("m", "/data/seg-ä"), grpc.StatusCode.DATA_LOSS, {"path": "/data/seg-ä"}),
    (StoreUnavailable("m"), grpc.StatusCode.UNAVAILABLE, {}),
    (Unauthenticated("m"), grpc.StatusCode.UNAUTHENTICATED, {}),
    (PermissionDenied("m"), grpc.StatusCode.PERMISSION_DENIED, {}),
]


@pytest.mark.parametrize(("error", "status", "carried"), CASES, ids=lambda case: type(case).__name__)
def test_round_trip(error: FrostlineError, status: grpc.StatusCode, carried: dict) -> None:
    code, message, trailing = rpc_errors.to_status(error)
    assert (code, message) == (status, "m")
    back = rpc_errors.from_rpc_error(FakeRpcError(code, message, trailing), "shard 0")
    assert type(back) is type(error)
    assert str(back) == "m"
    assert {name: getattr(back, name) for name in carried} == carried


def test_every_class_of_the_tree_has_a_case() -> None:
    def below(cls: type) -> set[type]:
        return {cls} | {name for child in cls.__subclasses__() for name in below(child)}

    ours = {cls for cls in below(FrostlineError) if cls.__module__ == "embedding_server.errors"}
    assert ours - {FrostlineError} == {type(error) for error, _, _ in CASES}


def test_pushback_follows_grpcs_convention() -> None:
    _, _, trailing = rpc_errors.to_status(Overloaded("full", 250))
    assert ("grpc-retry-pushback-ms", "250") in trailing


def test_other_errors_are_internal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        code, message, _ = rpc_errors.to_status(ZeroDivisionError("division by zero"))
    assert code == grpc.StatusCode.INTERNAL
    assert message == "internal error: ZeroDivisionError: division by zero; see the shard's log"
    assert caplog.records[0].exc_info is not None


def test_long_messages_fit_a_header() -> None:
    _, message, _ = rpc_errors.to_status(InvalidInput("x" * 100_000))
    assert len(message) == rpc_errors.MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", StoreUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", StoreUnavailable),
        (grpc.StatusCode.CANCELLED, "gone", StoreUnavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", Overloaded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (70 vs. 66)", InvalidInput),
        (grpc.StatusCode.INVALID_ARGUMENT, "no", InvalidInput),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", FrostlineError),
        (grpc.StatusCode.INTERNAL, "boom", FrostlineError),
    ],
)
def test_statuses_that_others_set(code: grpc.StatusCode, details: str, expected: type) -> None:
    error = rpc_errors.from_rpc_error(FakeRpcError(code, details), "shard 1 (10.0.0.7:5000)")
    assert type(error) is expected
    assert "shard 1 (10.0.0.7:5000)" in str(error)
    assert details in str(error)


def test_a_message_of_wide_characters_fits_a_header() -> None:
    _, message, _ = rpc_errors.to_status(InvalidInput("table '" + "日本語" * 700))
    assert rpc_errors.MAX_ENCODED_BYTES - 9 <= len(quote(message, safe=" '")) <= rpc_errors.MAX_ENCODED_BYTES
