"""Compaction: hot rows move out of the highest slots into free ones, and the tail of the slots goes back to the kernel.

It runs in slices of buckets (Table.maintain), so that a shard stays responsive; a small table's runs at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from embedding_server.table import Table

_ABOVE = 0.125  # share of free slots from which the tail of the hot rows is given back
#: Likewise, share of the index's bytes that the free slots must have: who sits in the tail only a scan of the whole
#: index tells, 0.3 s for 100 million rows, as long as freezing a million of them.
_WORTH_A_SCAN = 1 / 16
_SLICES = 64
_AT_ONCE = 200_000  # rows: at most 10 ms


def begin(table: Table) -> None:
    """Gives the tail of the hot rows back if enough slots are free: a small table's at once, before new rows can take
    the holes; a large one's in slices of `maintain`."""
    slots = table.slots
    if slots.num_free <= slots.high_water * _ABOVE or slots.target is not None:
        return
    if slots.num_free * table.hot_row_bytes < table.index.size_bytes * _WORTH_A_SCAN:
        return
    _start(table)
    if len(table.index) <= _AT_ONCE:
        finish(table)


def begin_anyway(table: Table) -> None:
    """As begin, however few slots are free: bytes of rows that left them are not to stay."""
    if table.slots.target is None and table.slots.num_free:
        _start(table)
    if len(table.index) <= _AT_ONCE:
        finish(table)


def finish(table: Table) -> None:
    """Gives the tail back at once: room is needed now."""
    if table.slots.target is None and table.slots.num_free:
        _start(table)
    while table.slots.target is not None:
        move_slice(table)


def _start(table: Table) -> None:
    table.slots.begin_compaction()
    table.compaction_bucket = 0


def move_slice(table: Table) -> None:
    """Moves the rows of some buckets out of slots at or above the target; entries flip after their row moved."""
    assert table.slots.target is not None
    target, first = table.slots.target, table.compaction_bucket
    slices = _SLICES if len(table.index) > _AT_ONCE else 1  # many small ones cost 0.5 ms whatever the rows
    last = min(table.index.num_buckets, first + max(1, table.index.num_buckets // slices))
    found = table.index.scan_hot(first, last, table.last_step.array.reshape(-1), least_slot=target)
    slots = found.locations.view(np.int32)
    holes = table.slots.take_free(slots.shape[0])
    if holes.shape[0] < slots.shape[0]:  # rows arrived meanwhile: the target is too low now
        table.slots.give_back(holes)
        table.slots.end_compaction(finished=False)
        return
    table.hot.move(slots, holes)
    table.generation += 1
    table.last_step.array[holes] = table.last_step.array[slots]
    table.visits.array[holes] = table.visits.array[slots]
    table.changes.move(slots, holes)
    table.index.set_locations(found.addresses, holes.astype(np.uint32))
    table.compaction_bucket = last
    if last == table.index.num_buckets:
        table.slots.end_compaction(finished=True)
        for part in (table.hot, table.last_step, table.visits):
            part.release(table.slots.high_water)
        table.record_memory()
