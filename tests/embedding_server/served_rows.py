"""What a source of look-ups answers, as arrays: for the tests of whatever serves."""

from __future__ import annotations

import numpy as np

from embedding_server.lookup import Encoding, LookupSource, TableQuery
from embedding_server.store import WIRE_NUMPY


def rows_of(
    source: LookupSource, table: str, row_ids: np.ndarray, encoding: Encoding = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Values [n, D] and flags uint8[n] of one table."""
    taken: list[np.ndarray] = []

    def reply(shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = np.empty(shape.values_bytes // 4 + 1, np.float32)
        taken.extend((values.view(np.uint8)[: shape.values_bytes], np.empty(shape.num_rows, np.uint8)))
        return taken[1], np.empty(shape.num_rows, np.uint8), taken[0]

    source.look_up([TableQuery(table, row_ids)], encoding, reply)
    return taken[0].view(WIRE_NUMPY[encoding]).reshape(row_ids.shape[0], -1), taken[1]
