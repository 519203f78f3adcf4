"""Pushes on their way through a shard: gradients as they arrive, the parts of one push, and what becomes of them.

A push of several parts, or of several workers, is summed by row before anything is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.hot_path import Update
from embedding_server.kernels.updates import make_sums
from embedding_server.store import WIRE_NUMPY, PushAck, RowSums, WireDtype
from embedding_server.table import Table, sum_by_row

MAX_PARTS = 4096


@dataclass(frozen=True, slots=True)
class ShardGradients:
    """Gradients of one table for one shard; as store.TableGradients, without routing."""

    row_ids: np.ndarray  # int64[n]
    values: np.ndarray  # [n, D] of WIRE_NUMPY[wire_dtype]
    learning_rate: float
    default_gradient: np.ndarray | None = None  # float32[D]
    sums: RowSums | None = None  # in place of values; never from another process


@dataclass(slots=True)
class Push:
    """The push of one worker for its next step: its parts, and who waits for the acknowledgement."""

    step: int
    num_parts: int
    parts: dict[int, Mapping[str, ShardGradients]] = field(default_factory=dict)
    wire_dtype: WireDtype = "float32"
    size_bytes: int = 0
    waiting: list[Future[PushAck]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.num_parts

    def chunks(self, table: str) -> list[ShardGradients]:
        return [self.parts[k][table] for k in sorted(self.parts) if table in self.parts[k]]


def check_parts(part: int, num_parts: int) -> None:
    if not 1 <= num_parts <= MAX_PARTS or not 0 <= part < num_parts:
        raise InvalidInput(f"part={part} of num_parts={num_parts}: parts count from 0 and are at most {MAX_PARTS}")


def check_wire_dtype(wire_dtype: str) -> None:
    if wire_dtype not in WIRE_NUMPY:
        raise InvalidInput(f"wire_dtype={wire_dtype!r} must be one of {', '.join(WIRE_NUMPY)}")


def update_of(table: Table, chunks: list[tuple[ShardGradients, WireDtype]]) -> Update:
    """Chunks of several workers or parts are summed by row, in order."""
    first, dtype = chunks[0]
    if len(chunks) == 1:
        return Update(table, first.row_ids, first.values, dtype, first.learning_rate, first.sums)
    dim = table.spec.dim
    values = [(c.values, d) if c.sums is None else (make_sums(c.sums, dim), "float32") for c, d in chunks]
    row_ids, total = sum_by_row(np.concatenate([chunk.row_ids for chunk, _ in chunks]), values, dim)
    return Update(table, row_ids, total, "float32", first.learning_rate)


def default_update(name: str, chunks: list[ShardGradients]) -> tuple[str, np.ndarray, float] | None:
    """(table, summed gradient of its default row float32[D], learning rate); None if no chunk has one."""
    if not chunks:
        return None
    total = np.zeros_like(chunks[0].default_gradient)
    for chunk in chunks:
        assert chunk.default_gradient is not None
        total += chunk.default_gradient
    if not np.isfinite(total).all():
        raise InvalidInput(f"table {name!r}: the default row's gradient, summed over the workers, is not finite")
    return name, total, chunks[0].learning_rate


def complete(future: Future[PushAck], ack: PushAck) -> None:
    """Answers who still waits."""
    if not future.cancelled():
        future.set_result(ack)


def fail(future: Future[Any], error: Exception) -> None:
    """As complete, with an error."""
    if not future.cancelled():
        future.set_exception(error)
