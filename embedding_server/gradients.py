"""Gradients as they arrive at a shard: of one table, of one worker's push in its parts, and sums of them by row."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels.cpu import all_finite
from embedding_server.kernels.visits import add_by_inverse
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.store import PushAck, RowSums, WireDtype


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


def sum_by_row(
    row_ids: np.ndarray, values: list[tuple[np.ndarray, WireDtype]], dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sums gradients of repeated row_ids in order: int64[n] and chunks of [n_k, D] -> int64[u], float32[u, D].

    InvalidInput if a sum is not finite.
    """
    unique, inverse = np.unique(row_ids, return_inverse=True)
    out = np.zeros((unique.shape[0], dim), np.float32)
    start = 0
    for chunk, dtype in values:
        add_by_inverse(wire_view(chunk), MODES[dtype], inverse[start : start + chunk.shape[0]], out)
        start += chunk.shape[0]
    bad = all_finite(out, MODES["float32"])
    if bad >= 0:
        raise InvalidInput(
            f"the gradient of row_id {int(unique[bad // dim])}, summed over workers, parts or repeats, is not finite;"
            " nothing of this step was applied. Scale the loss down or clip"
        )
    return unique, out
