"""Room for hot rows under two limits: the shard's memory_limit_bytes, and the table's own hot_bytes.

At a limit the coldest hot rows of the table freeze, at least 1/16 of them so that the scan is paid once. In a large
table they are rows of about the coldest quarter, whose end is estimated from a part of the buckets, taken from the next
quarter of the buckets: nobody can look at 200 million index entries each time. At memory_limit_bytes the job's other
tables are asked next. When nothing can freeze, fewer slots are handed out than were asked for: new IDs then read the
default row, visited frozen rows stay frozen, and an event says so.

Rows visited at this step or the one before stay, since their gradients may still be on the way. Rows of the control
group freeze only when no other row of their table can.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import compaction
from embedding_server.errors import InvalidInput
from embedding_server.freezing import can_freeze_now, freeze
from embedding_server.index import Entries
from embedding_server.optimizers import num_state_columns
from embedding_server.reserved import PAGE_BYTES
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS

if TYPE_CHECKING:
    from embedding_server.table import Table

_LEAST_COLDEST = 1 / 16
#: what whole pages may take beyond the rows: weights, state, last_step and visits each round up to one
BYTES_OF_PAGES = 4 * PAGE_BYTES
_ENTRIES_AT_ONCE = 1 << 18
_SAMPLED_ENTRIES = 1 << 21  # index entries from which the heat of the coldest is estimated from a part of the buckets
_REACH, _FARTHEST = 4, 0.5  # there: rows freeze up to this many times their share of the heats, at most half of them
_NUM_CODES = 1 << 16
_MAX_ROUNDS = 8


def hot_row_bytes(spec: TableSpec) -> int:
    """Bytes of a hot row: weights, optimizer state, last_step (4) and visits (1)."""
    return spec.policy.hot_bits // 8 * spec.dim + 4 * num_state_columns(spec.optimizer.kind, spec.dim) + 5


def rows_under_cap(spec: TableSpec, buckets: np.ndarray) -> int:
    """Hot rows that the table may hold on a shard that owns `buckets` (bool[NUM_BUCKETS]): its share of hot_bytes.

    InvalidInput if that is less than one row.
    """
    total = spec.policy.hot_bytes
    if total is None:
        return 2**31 - 1
    owned = int(buckets.sum())
    share = total * owned // NUM_BUCKETS
    row_bytes = hot_row_bytes(spec)
    rows = (share - BYTES_OF_PAGES) // row_bytes
    if owned and rows < 1:
        least = -(-(BYTES_OF_PAGES + row_bytes) * NUM_BUCKETS // owned)
        raise InvalidInput(
            f"table {spec.name!r}: hot_bytes={total} leaves {share} bytes to a shard with {owned} of {NUM_BUCKETS}"
            f" buckets, less than a row of {row_bytes} bytes in whole pages; set hot_bytes={least} or more"
        )
    return max(0, rows)


def take_slots(table: Table, n: int, step: int, *, entry_bytes: int = 0) -> np.ndarray:
    """Up to n free hot slots, int32; fewer only if nothing more can freeze.

    entry_bytes: what the index will grow by for each of them.
    """
    _make_room_under_cap(table, n, step)
    short = _short_of_memory(table, n, entry_bytes)
    if short > 0:
        give_back(table, short, step)
        short = _short_of_memory(table, n, entry_bytes)
    if short > 0:
        table.ask_others(table, short, step)
    slots = table.slots.take_free(n)
    more = n - slots.shape[0]
    under_cap = table.max_hot_rows - table.slots.high_water
    room = table.budget.free_bytes - slots.shape[0] * entry_bytes
    grows = min(more, max(0, under_cap), max(0, room) // (table.hot_row_bytes + entry_bytes))
    if grows:
        slots = np.concatenate([slots, table.slots.grow(grows)])
    note_limit(table, n - slots.shape[0], is_cap=under_cap < more)
    table.record_memory()
    return slots


def give_back(table: Table, size_bytes: int, step: int) -> None:
    """Freezes the coldest rows to bring the shard's memory down by size_bytes, as far as they go."""
    if not freeze_coldest(table, -(-size_bytes // table.hot_row_bytes), step):
        return
    table.segments.flush()  # a buffer counts as memory until its file is there
    compaction.finish(table)
    table.record_memory()


def give_back_others(tables: Mapping[str, Table], asking: Table, size_bytes: int, step: int) -> None:
    """As give_back, by the other tables of the asking one's job, the largest first."""
    target = asking.budget.free_bytes + size_bytes
    others = [t for t in tables.values() if t is not asking and t.job == asking.job]
    for table in sorted(others, key=lambda t: t.slots.num_taken * t.hot_row_bytes, reverse=True):
        if asking.budget.free_bytes >= target:
            return
        give_back(table, target - asking.budget.free_bytes, step)


def freeze_coldest(table: Table, rows: int, step: int) -> int:
    """Freezes at least `rows` of the coldest hot rows, or as many as can. Returns how many slots came free."""
    if table.spec.policy.kind == "off" or rows < 1:
        return 0
    before = table.moves_frozen_limit
    table.segments.open_builder(step)
    for control in (False, True):
        for number in range(_MAX_ROUNDS):  # more than one where heat was estimated too low, or rows cannot freeze
            missing = rows - (table.moves_frozen_limit - before)
            if missing <= 0 or not _freeze_round(table, missing, step, 1 << number, control=control):
                break
    table.segments.seal()
    table.record_memory()
    return table.moves_frozen_limit - before


def note_limit(table: Table, missing_slots: int, *, is_cap: bool = False) -> None:
    """Tells people once that a table is at a limit, and again after it was not."""
    if missing_slots and not table.is_at_limit:
        policy, limit = table.spec.policy, table.budget.limit_bytes
        where = f"its hot_bytes={policy.hot_bytes}" if is_cap else f"the shard is at memory_limit_bytes={limit}"
        table.on_event(
            f"table {table.spec.name!r}: {where} and nothing can freeze; new IDs read the default row."
            f" Raise {'hot_bytes, use a smaller batch,' if is_cap else 'the limit, add shards,'} or set a policy that"
            " freezes"
        )
    table.is_at_limit = missing_slots > 0


def _make_room_under_cap(table: Table, n: int, step: int) -> None:
    """Freed slots are taken again at once, so what freezes here need not be compacted away."""
    if _short_of_cap(table, n) > 0:
        table.slots.end_compaction(finished=False)  # it holds free slots back
        freeze_coldest(table, _short_of_cap(table, n), step)


def _short_of_cap(table: Table, n: int) -> int:
    return n - table.slots.num_free - (table.max_hot_rows - table.slots.high_water)


def _short_of_memory(table: Table, n: int, entry_bytes: int) -> int:
    arriving = min(n - table.slots.num_free, table.max_hot_rows - table.slots.high_water)
    return max(0, arriving) * table.hot_row_bytes + n * entry_bytes - table.budget.free_bytes


def _freeze_round(table: Table, rows: int, step: int, generosity: int, *, control: bool) -> bool:
    """Freezes the coldest rows in or outside the control group. False if there is no use in another round."""
    counts, share_counted = _count_codes(table, step, control=control)
    total = int(counts.sum() / share_counted)
    wanted = min(total, generosity * (rows if control else max(rows, int(total * _LEAST_COLDEST))))
    if not wanted:
        return False
    is_exact, coldest = share_counted == 1.0, np.cumsum(counts)
    reach = wanted if is_exact else max(wanted, min(_REACH * wanted, _FARTHEST * total)) * share_counted
    code = min(int(np.searchsorted(coldest, reach)), _NUM_CODES - 1)
    ties = reach - float(coldest[code] - counts[code])  # rows of just this heat that are to freeze
    tie_fraction = ties / max(1, int(counts[code]))
    frozen = 0
    for first, last in _walk(table, 0 if is_exact else table.limit_bucket):
        entries = _candidates(table, first, last, step, control=control)
        at = np.flatnonzero(entries.heat == code)
        num_ties = min(at.shape[0], int(ties) if is_exact else math.ceil(tie_fraction * at.shape[0]))
        ties -= num_ties
        chosen = entries.heat < code
        chosen[at[:num_ties]] = True
        frozen += _freeze(table, entries.take(np.flatnonzero(chosen)[: wanted - frozen]), step)
        table.limit_bucket = last % NUM_BUCKETS
        if frozen >= wanted or not can_freeze_now(table, 1):
            break
    return wanted < total and can_freeze_now(table, 1)


def _freeze(table: Table, entries: Entries, step: int) -> int:
    """Freezes rows before they are idle; those that policy compact would have forgotten are remembered to be there."""
    if not entries.row_ids.shape[0]:
        return 0
    policy = table.spec.policy
    visits = table.visits.array[entries.locations, 0]
    frozen, _ = freeze(table, entries, step)
    table.moves_frozen_limit += frozen
    if frozen and policy.kind == "compact" and (visits < policy.forget_below).any():
        table.has_rare_frozen = True
    return frozen


def _count_codes(table: Table, step: int, *, control: bool) -> tuple[np.ndarray, float]:
    """int64[65536]: hot rows that may freeze by heat code, and the share of the entries that they were counted in."""
    counts = np.zeros(_NUM_CODES, np.int64)
    scanned, last = 0, 0
    for first, last in _walk(table, table.limit_bucket if len(table.index) > _SAMPLED_ENTRIES else 0):
        counts += np.bincount(_candidates(table, first, last, step, control=control).heat, minlength=_NUM_CODES)
        scanned += table.index.count_in(first, last)
        if scanned >= _SAMPLED_ENTRIES and not control:
            break
    return counts, 1.0 if scanned == len(table.index) else scanned / len(table.index)


def _candidates(table: Table, first: int, last: int, step: int, *, control: bool) -> Entries:
    entries = table.index.scan_hot(first, last, table.last_step.array.reshape(-1), until=step - 2)
    return entries.take(table.is_control(entries.row_ids) == control)


def _walk(table: Table, start: int) -> list[tuple[int, int]]:
    """Bucket ranges of some _ENTRIES_AT_ONCE entries over the whole index, from `start` on and round."""
    counts = table.index.counts
    edges, held = [start], 0
    for bucket in range(start, start + NUM_BUCKETS):
        held += int(counts[bucket % NUM_BUCKETS])
        if held > _ENTRIES_AT_ONCE or (bucket + 1) % NUM_BUCKETS == 0:
            edges.append(bucket + 1)
            held = 0
    if edges[-1] != start + NUM_BUCKETS:
        edges.append(start + NUM_BUCKETS)
    return [(first % NUM_BUCKETS, first % NUM_BUCKETS + last - first) for first, last in itertools.pairwise(edges)]
