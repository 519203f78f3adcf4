"""What the methods of every servicer share: errors become statuses, waits end at the caller's deadline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import grpc

from services import rpc_errors

MAX_WAIT_S = 600.0  # of a call without a deadline


class DeadlineExceeded(Exception):
    """The caller's deadline passed while the call waited."""


def answered(method: Callable[[Any, Any, grpc.ServicerContext], Any]) -> Callable[..., Any]:
    """A servicer method whose errors become the call's status."""

    @functools.wraps(method)
    def answer(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request, context)
        except DeadlineExceeded:
            message = "the call's deadline passed before the shard could answer; another worker may be late"
            return context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        except CancelledError:
            return context.abort(grpc.StatusCode.CANCELLED, "the caller went away")
        except Exception as error:
            return rpc_errors.abort(context, error)

    return answer


def result_in_time(context: grpc.ServicerContext, future: Future) -> Any:
    """The result of `future`. Raises its error, or DeadlineExceeded."""
    remaining_s = context.time_remaining()
    try:
        return future.result(MAX_WAIT_S if remaining_s is None else min(remaining_s, MAX_WAIT_S))
    except TimeoutError as error:
        if future.done() and not future.cancelled():
            raise  # the shard's own
        raise DeadlineExceeded from error


def result_or_cancel(context: grpc.ServicerContext, future: Future) -> Any:
    """As result_in_time of work that nobody else waits for: cancelled when the caller goes away or gives up."""
    if not context.add_callback(future.cancel):
        future.cancel()
    try:
        return result_in_time(context, future)
    except DeadlineExceeded:
        future.cancel()
        raise
