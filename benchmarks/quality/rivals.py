"""A rival that needs no freezing: every row is kept quantised, with stochastic rounding after each update.

The rows live in our store under policy `off`; after each push, the rows it updated are quantised and written back, so
training and look-ups see no bit more than a quantised table has. Rounding is unbiased: E[kept] = updated. Weights of a
row share a scale and a bias, the row's own range after the update (8 bits: float32; 4 bits: float16, as in FBGEMM's
fused rows). Two things favour the rival: a new row is read once in float32 before its first update, and the rows that
stay in float32 are chosen by the true counts of the whole stream, which nobody has online.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numba import njit

from embedding_server.inproc import InprocStore
from embedding_server.kernels.hashing import hash_row_id, mix64
from embedding_server.kernels.wire import f16_to_f32, f32_to_f16
from embedding_server.store import Identity, PushAck, TableGradients, TableStats

_TO_UNIT = np.float32(2.0**-24)


class QuantisedStore(InprocStore):
    """InprocStore whose rows hold what `bits` bits can hold, in the tables that `float_ids` names."""

    def __init__(self, bits: int, float_ids: Mapping[str, np.ndarray], seed: int, *, memory_limit_bytes: int) -> None:
        """float_ids: by table, the row_ids int64[k] that stay in float32; tables without an entry are not quantised."""
        super().__init__(memory_limit_bytes=memory_limit_bytes)
        self._bits = bits
        self._float_ids = {name: np.sort(ids) for name, ids in float_ids.items()}
        self._seed = np.uint64(seed)

    def push(self, who: Identity, step: int, gradients: Mapping[str, TableGradients]) -> PushAck:
        ack = super().push(who, step, gradients)
        with self._lock:
            for name in gradients.keys() & self._float_ids.keys():
                self._quantise(name, gradients[name].ids.row_ids, step)
        return ack

    def _quantise(self, name: str, row_ids: np.ndarray, step: int) -> None:
        table = self._shard._tables[name]
        floats = self._float_ids[name]
        if floats.size:
            at = np.minimum(np.searchsorted(floats, row_ids), floats.size - 1)
            row_ids = row_ids[floats[at] != row_ids]
        entries, slots, _, _ = table.index.locate(row_ids)
        slots = slots[entries != 0].astype(np.int32)
        weights, state = table.hot.read(slots)
        round_rows(weights, row_ids[entries != 0], self._bits, self._seed + np.uint64(step))
        table.hot.write(slots, weights, state)


def rival_bytes(stats: TableStats, dim: int, state_columns: int, bits: int, num_float: int) -> int:
    """Bytes of a quantised table at its leanest: rows, optimizer state and index; no visits, heat or last steps."""
    row_bytes = dim * bits // 8 + (8 if bits == 8 else 4)
    floats = min(num_float, stats.rows_hot)
    return (
        (stats.rows_hot - floats) * row_bytes
        + floats * 4 * dim
        + stats.rows_hot * 4 * state_columns
        + stats.bytes_index
    )


@njit(nogil=True, cache=True)
def round_rows(weights, row_ids, bits, seed):
    """Rounds rows float32[n, D] to `bits` bits in place, up or down at random so that the mean stays.

    Values end on the grid bias + scale * k of their row, k = 0 to 2^bits - 1.
    """
    levels = np.float32((1 << bits) - 1)
    for i in range(weights.shape[0]):
        row = weights[i]
        low = high = row[0]
        for d in range(row.size):
            low, high = min(low, row[d]), max(high, row[d])
        scale = (high - low) / levels
        if bits == 4:
            low, scale = f16_to_f32(f32_to_f16(low)), f16_to_f32(f32_to_f16(scale))
        if scale <= 0.0:
            row[:] = low
            continue
        key = mix64(hash_row_id(row_ids[i]) ^ mix64(seed))
        for d in range(row.size):
            unit = np.float32(np.int32(mix64(key + np.uint64(d)) >> np.uint64(40))) * _TO_UNIT
            k = np.floor((row[d] - low) / scale + unit)
            row[d] = low + scale * min(max(k, np.float32(0.0)), levels)
