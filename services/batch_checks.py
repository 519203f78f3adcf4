"""What a client can find wrong with a batch before it sends anything, so that a faulty batch reaches no shard."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels.cpu import all_finite
from embedding_server.kernels.wire import MODES
from embedding_server.store import WIRE_NUMPY, RoutedIds, TableGradients, WireDtype


def check_ids(name: str, routed: RoutedIds, num_shards: int) -> None:
    """Raises InvalidInput unless row_ids are contiguous int64[n] and shard_offsets cut them into num_shards groups."""
    row_ids, offsets = routed.row_ids, routed.shard_offsets
    if row_ids.ndim != 1 or row_ids.dtype != np.int64:
        raise InvalidInput(
            f"table {name!r}: row_ids has dtype {row_ids.dtype} and shape {list(row_ids.shape)}; it must be int64[n]"
        )
    if not row_ids.flags.c_contiguous:
        raise InvalidInput(f"table {name!r}: row_ids must be contiguous; copy them with np.ascontiguousarray")
    bounds = offsets.tolist()
    fits = len(bounds) == num_shards + 1 and bounds[0] == 0 and bounds[-1] == len(row_ids)
    if not fits or any(a > b for a, b in pairwise(bounds)):
        raise InvalidInput(
            f"table {name!r}: shard_offsets={bounds[:8]} must be {num_shards + 1} rising numbers from 0 to "
            f"{len(row_ids)}, the number of row_ids; make them with dedup_route"
        )


def check_gradients(name: str, dim: int, gradients: TableGradients, wire: WireDtype, num_shards: int) -> None:
    """Raises InvalidInput unless the gradients fit the table and are finite. Values: contiguous [n, dim] in `wire`."""
    check_ids(name, gradients.ids, num_shards)
    values, row_ids = gradients.values, gradients.ids.row_ids
    if values.dtype != WIRE_NUMPY[wire]:
        raise InvalidInput(f"table {name!r}: gradients have dtype {values.dtype}; {wire} travels as {WIRE_NUMPY[wire]}")
    if values.shape != (len(row_ids), dim):
        raise InvalidInput(
            f"table {name!r}: gradients of shape {list(values.shape)} do not fit {len(row_ids)} row_ids of dim {dim}; "
            f"send one row of {dim} values per row_id"
        )
    if not values.flags.c_contiguous:
        raise InvalidInput(f"table {name!r}: gradients must be contiguous; copy them with np.ascontiguousarray")
    bad = all_finite(values, MODES[wire]) if values.size else -1
    if bad >= 0:
        position = bad // dim
        raise InvalidInput(
            f"table {name!r}: the gradient of row_id {int(row_ids[position])} (position {position}, column "
            f"{bad % dim}) is not finite; nothing of this push was sent. Check the loss, lower the rate or clip"
        )
    if not (math.isfinite(gradients.learning_rate) and gradients.learning_rate >= 0.0):
        raise InvalidInput(f"table {name!r}: learning_rate={gradients.learning_rate} must be finite and not negative")
    if gradients.default_gradient is not None:
        _check_default(name, dim, gradients.default_gradient)


def _check_default(name: str, dim: int, default: np.ndarray) -> None:
    if default.shape != (dim,) or default.dtype != np.float32:
        raise InvalidInput(
            f"table {name!r}: default_gradient has dtype {default.dtype} and shape {list(default.shape)}; it must be "
            f"float32[{dim}]"
        )
    if not np.isfinite(default).all():
        raise InvalidInput(f"table {name!r}: the default row's gradient is not finite; nothing of this push was sent")
