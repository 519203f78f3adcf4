"""Erasure: row_ids are deleted for good, as somebody asked who has the right to. It comes at an Advance.

    index, hot rows, IDs below min_count    at once, their bytes overwritten
    frozen rows                             dead at once; their bytes go from buffers and files in the background, and
                                            those of places where the rows were before (segment_erasure.py)
    cuts                                    one that began before has the rows, and is finished first; a later one links
                                            no segment that still holds some
    snapshots                               `frostline ckpt gc --erase`

A row_id that is visited again is a new row from its own initial value. What the default row and the dense layers have
learned from a row stays learned.

A hot row that once froze, or was moved by compaction, left its bytes in the slot that it had. So an erasure also begins
a compaction, which fills the free slots or gives them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import compaction
from embedding_server.errors import InvalidInput
from embedding_server.failpoints import failpoint
from embedding_server.forgetting import let_go
from embedding_server.index import FROZEN_BIT
from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_erasure import ErasedIds
from embedding_server.store import NUM_BUCKETS, Erased

if TYPE_CHECKING:
    from embedding_server.table import Table

#: of all tables of a call: some 15 ms on a busy machine, most of it for indices that shrink and grow
MAX_IDS_PER_CALL = 4096


class Erasures:
    """The deletions under way of a shard, of each job at most one: chunks of row_ids come one after the other.

    The bytes in segments are looked for once all chunks are here, for each file at once.
    """

    def __init__(self, buckets: np.ndarray) -> None:
        """buckets: bool[NUM_BUCKETS], those that the shard owns."""
        self._buckets = buckets
        self._collected: dict[str, dict[str, tuple[Table, ErasedIds]]] = {}  # by job and table

    def erase(self, job: str, tables: Mapping[str, tuple[Table, np.ndarray]], *, is_last: bool) -> dict[str, Erased]:
        """A chunk: tables with row_ids int64[n], in any order, repeated or not. Those of buckets of other shards are
        looked for in segments alone: a file that a restore has linked has the rows of all shards of the cut."""
        collected = self._collected.setdefault(job, {})
        erased = {}
        for name, (table, row_ids) in tables.items():
            row_ids = np.unique(row_ids)
            erased[name] = _erase(table, row_ids[self._buckets[buckets_of(row_ids, NUM_BUCKETS)]])
            collected.setdefault(name, (table, ErasedIds()))[1].add(row_ids)
            failpoint("erasure.rows")
        if is_last:
            self.end(job)
        return erased

    def end(self, job: str) -> None:
        """No more chunks come: all are here, or a new epoch has begun."""
        for table, row_ids in self._collected.pop(job, {}).values():
            failpoint("erasure.segments")
            table.segments.erase(row_ids)
            compaction.begin_anyway(table)
            table.record_memory()


def chunks_of(ids: Mapping[str, np.ndarray]) -> Iterator[tuple[dict[str, np.ndarray], bool]]:
    """row_ids int64[n] by table, in chunks that a call takes, and whether it is the last. Of several chunks the first
    names every table without a row_id, so that a call which must be refused is refused before anything is deleted."""
    parts = [
        (name, row_ids[start : start + MAX_IDS_PER_CALL])
        for name, row_ids in ids.items()
        for start in range(0, max(1, row_ids.shape[0]), MAX_IDS_PER_CALL)
    ]
    if sum(map(len, ids.values())) > MAX_IDS_PER_CALL:
        yield {name: row_ids[:0] for name, row_ids in ids.items()}, False
    chunk: dict[str, np.ndarray] = {}
    for name, row_ids in parts:
        if name in chunk or sum(map(len, chunk.values())) + row_ids.shape[0] > MAX_IDS_PER_CALL:
            yield chunk, False
            chunk = {}
        chunk[name] = row_ids
    if chunk:
        yield chunk, True


def check_ids_to_delete(ids: object) -> None:
    """What a store checks of row_ids to delete before it sends any: a conversion would delete others for good.

    InvalidInput unless it is a mapping of int64[n] arrays by table.
    """
    if not isinstance(ids, Mapping):
        raise InvalidInput(f"row_ids to delete come as a {type(ids).__name__}; give {{table: int64[n]}}")
    for name, row_ids in ids.items():
        is_plain = type(row_ids) is np.ndarray  # of a masked one, say, some are not meant
        if not is_plain or row_ids.ndim != 1 or row_ids.dtype != np.int64:
            what = f"{row_ids.dtype}{list(row_ids.shape)}" if is_plain else f"a {type(row_ids).__name__}"
            raise InvalidInput(f"table {name!r}: row_ids to delete are {what}; they must be a NumPy array int64[n]")


def check_num_ids(tables: Mapping[str, np.ndarray]) -> None:
    total = sum(row_ids.shape[0] for row_ids in tables.values())
    if total > MAX_IDS_PER_CALL:
        raise InvalidInput(f"{total} row_ids to delete in a call; send at most {MAX_IDS_PER_CALL} at a time")


def _erase(table: Table, row_ids: np.ndarray) -> Erased:
    """Distinct row_ids int64[n] in the shard's buckets."""
    entries, locations, _, _ = table.index.locate(row_ids)
    is_row, is_frozen = entries != 0, (locations & FROZEN_BIT) != 0
    slots = locations[is_row & ~is_frozen].astype(np.int32)
    frozen = locations[is_row & is_frozen]
    if slots.shape[0]:
        _overwrite(table, slots)
    let_go(table, slots, frozen)
    table.index.take_out(row_ids)
    waiting = table.waiting.erase(row_ids) if table.waiting is not None else 0
    known = slots.shape[0] + frozen.shape[0] + waiting
    table.rows_erased += known
    return Erased(slots.shape[0], frozen.shape[0], waiting, row_ids.shape[0] - known)


def _overwrite(table: Table, slots: np.ndarray) -> None:
    n = slots.shape[0]
    zeros = np.zeros((n, table.spec.dim), np.float32), np.zeros((n, table.hot.num_state_columns), np.float32)
    table.hot.write(slots, *zeros)
    table.last_step.array[slots] = 0
    table.visits.array[slots] = 0
