"""A table of one shard: its state, which is index + hot rows + segments + heat, and what keeps the parts in step.

What requests do to it is elsewhere: hot_path.py (Pull, Push and look-up of hot rows), cold_path.py (of the others).
So is where rows move: admission.py (an ID gets a row), freezing.py (a row freezes, a row thaws), forgetting.py (a row
goes), erasure.py (a row goes, with every byte of it), hot_limit.py (room under the limits of bytes), compaction.py
(slots); reselection.py decides.

Thread safety: none; the thread that owns the shard owns its tables.
Invariants:
1. Every index entry is hot (its slot is taken), frozen (its segment position is live) or INITIAL.
2. last_step[slot] is the last step whose training Pull named the row, so a visit is counted once a step whatever the
   number of workers, because no worker pulls step t+1 before all pulled step t (steps.py).
3. A row that leaves its hot slot raises `generation`, so that no slots found before are used after.
4. Whoever writes weights or state of a hot slot has called `changes.note` for it, or a delta would lack the row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedding_server import compaction, heat
from embedding_server.admission import VisitCounts
from embedding_server.changes import Changes
from embedding_server.cold_path import ColdVisits
from embedding_server.default_row import DefaultRow
from embedding_server.hot_limit import hot_row_bytes, rows_under_cap, take_slots
from embedding_server.hot_rows import ALL_ONES, ReservedHotRows
from embedding_server.index import FROZEN_BIT, Index
from embedding_server.kernels import Backend, tables
from embedding_server.kernels.row_updates import KINDS
from embedding_server.kernels.visits import hot_slots, in_buckets
from embedding_server.kernels.wire import from_float32
from embedding_server.optimizers import table_seed
from embedding_server.policy import control_buckets
from embedding_server.reserved import ReservedArray
from embedding_server.safe_name import safe_name
from embedding_server.segment_builder import MAX_SEGMENT_BYTES
from embedding_server.segment_growth import SMALL_BYTES
from embedding_server.segments import SegmentSet
from embedding_server.slots import MemoryBudget, Slots
from embedding_server.spec import TableSpec
from embedding_server.store import BAND_SHIFT, FOUND, NUM_BUCKETS, TRAINABLE, Frostline, TableStats, WireDtype
from embedding_server.table_stats import bytes_of, stats_of
from embedding_server.weight_decay import WeightDecay

if TYPE_CHECKING:
    from embedding_server.table_cut import TableCut

_LEAST_SEGMENT_BYTES = 1 << 20
_SMALL_SHARE = 1 / 1024  # of the memory limit, that a table's small segments of a format take at most
_PULLS_KEPT = 4  # a pipelined worker pushes step t after its Pull of t+1


class Table:
    def __init__(
        self,
        spec: TableSpec,
        *,
        backend: Backend,
        data_dir: Path,
        budget: MemoryBudget,
        buckets: np.ndarray,
        on_event: Callable[[str], None],
        writer: Executor | None = None,
        ask_others: Callable[[Table, int, int], None] = lambda table, size_bytes, step: None,
    ) -> None:
        """`budget` bounds the bytes in memory of all tables of the shard, which owns `buckets` (bool[NUM_BUCKETS]).

        on_event takes lines for people.

        ask_others(table, size_bytes, step) makes the shard's other tables give back memory that this one needs.
        """
        self.spec = spec
        self.seed = table_seed(spec)
        self.control = control_buckets(spec)
        self.budget = budget
        self.hot_row_bytes = hot_row_bytes(spec)
        self.max_hot_rows = rows_under_cap(spec, buckets)
        self.on_event = on_event
        self.ask_others = ask_others

        max_slots = min(budget.limit_bytes // self.hot_row_bytes + 1, 2**31 - 1)
        self.index = Index(NUM_BUCKETS)
        self.slots = Slots(max_slots)
        self.hot = backend.hot_rows(spec.dim, spec.optimizer, max_slots, spec.policy.hot_bits)
        self.last_step = ReservedArray(max_slots, 1, np.int32)
        self.visits = ReservedArray(max_slots, 1, np.uint8)
        self.changes = Changes(max_slots)
        self.decay = WeightDecay(spec.optimizer.weight_decay) if spec.optimizer.weight_decay else None
        self.segments = _new_segments(spec, data_dir, budget, writer, on_event)
        self.default_row = DefaultRow(spec, self.decay)
        self.waiting = VisitCounts() if spec.policy.min_count > 1 else None  # IDs below min_count

        self.cut: TableCut | None = None  # being written: it is told of rows before they change

        self.is_at_limit = False
        self.limit_bucket = 0  # where freeze_coldest goes on in a large table
        self.compaction_bucket = 0
        self.generation = 0  # rises whenever a row leaves its hot slot
        self.cold_visits = ColdVisits()
        self._pulled: deque[tuple[np.ndarray, np.ndarray, int]] = deque(maxlen=_PULLS_KEPT)
        self._start_history()
        self._start_counts()
        self.record_memory()

    def _start_history(self) -> None:
        """What training has left in a table beside its rows and their heat."""
        self.job: str | None = None  # whose steps the table's visits count in; set by the first training Pull
        self.last_step_seen = 0
        self.rate = np.float32(0.0)  # of the last Push, as kernels take it
        self.frostline: Frostline | None = None
        self.has_rare_frozen = False  # policy compact: rows that a limit froze before they were idle; see forgetting.py
        self._num_rebases = 0

    def _start_counts(self) -> None:
        """What happens to the table's rows, counted as it happens, for TableStats and MaskInfo."""
        self.rows_frozen = self.rows_ignored = self.rows_unfreezable = self.rows_default_reads = 0
        self.moves_frozen = self.moves_frozen_idle = self.moves_frozen_rank = self.moves_frozen_limit = 0
        self.moves_thawed = self.moves_thawed_visit = self.moves_thawed_rank = self.moves_forgotten = 0
        self.rows_erased = 0
        self.rows_ranked = self.rows_ranked_before = 0  # of the last re-selection, as in MaskInfo
        self.bytes_peak = 0

    # What hot_path.py asks of a table -----------------------------------------------------------------------------

    def directory_row(self) -> np.ndarray:
        """int64[COLUMNS] of kernels/tables.py. These arrays never move while the table lives."""
        row = np.zeros(tables.COLUMNS, np.int64)
        row[tables.BUCKETS], row[tables.CAPACITIES] = self.index.directory_addresses()
        row[tables.LAST_STEP] = self.last_step.array.ctypes.data
        row[tables.VISITS] = self.visits.array.ctypes.data
        if isinstance(self.hot, ReservedHotRows):
            row[tables.WEIGHTS], row[tables.STATE] = self.hot.weights_address, self.hot.state_address
        row[tables.DIM] = self.spec.dim
        row[tables.STATE_COLUMNS] = self.hot.num_state_columns
        row[tables.KIND] = KINDS[self.spec.optimizer.kind]
        row[tables.COUNTS_VISITS] = tables.ALL_VISITS
        if self.spec.policy.kind == "off":  # nothing reads them there
            row[tables.COUNTS_VISITS] = tables.STEPS_ONLY if self.decay else tables.NO_VISITS
        row[tables.WEIGHT_BYTES] = self.spec.policy.hot_bits // 8
        if self.decay is not None and isinstance(self.hot, ReservedHotRows):
            row[tables.LOG_SUMS] = self.decay.settled_address
        return row

    def bands(self, entries: np.ndarray) -> np.ndarray:
        """Heat bands (store.Rows) of the rows of index entries, int64[n] -> uint8[n]: 0 without entry or heat."""
        out = np.zeros(entries.shape[0], np.uint8)
        if self.spec.policy.kind != "off":
            now = heat.now_code(self.last_step_seen, self.spec.policy.half_life_steps)
            tables.bands_of_entries(entries, now, out)
        return out

    def gather_hot(
        self, slots: np.ndarray, bands: np.ndarray, values: np.ndarray, flags: np.ndarray, wire_dtype: WireDtype
    ) -> None:
        """Hot rows of a backend whose rows do not lie in this process's memory; slot -1 is left out."""
        positions = np.flatnonzero(slots >= 0).astype(np.int32)
        if self.decay is None:
            self.hot.gather(slots[positions], values, positions, wire_dtype)
        else:
            values[positions] = from_float32(self.read_hot(slots[positions])[0], wire_dtype)
        flags[positions] = np.uint8(TRAINABLE | FOUND) | bands[positions] << np.uint8(BAND_SHIFT)

    # Weight decay ---------------------------------------------------------------------------------------------------

    def read_hot(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As HotRows.read, with the weight decay that the rows still owe."""
        weights, state = self.hot.read(slots)
        return (weights, state) if self.decay is None else (weights * self.pending(slots)[:, None], state)

    def pending(self, slots: np.ndarray) -> np.ndarray:
        """float32[n], or empty without weight decay; see weight_decay.py. Any value for slot -1."""
        return ALL_ONES if self.decay is None else self.decay.pending(self.last_step.array[slots, 0])

    def settle(self, row_ids: np.ndarray, step: int) -> None:
        """Weight decay at a Pull of `step` for rows that find_and_visit does not reach; before it sets last_step."""
        assert self.decay is not None
        slots = np.empty(row_ids.shape[0], np.int32)
        hot_slots(*self.index.locate(row_ids)[:2], slots)
        slots, first = np.unique(slots, return_index=True)
        last_steps = self.last_step.array[slots, 0]
        late = (slots >= 0) & (last_steps < step)
        if late.any():
            self.changes.note(slots[late])
            self.hot.scale(slots[late], self.decay.to_settle(last_steps[late], step), step, row_ids[first[late]])

    def undo_decay(self, slots: np.ndarray, row_ids: np.ndarray, step: int) -> None:
        """Rows that were frozen at `step` and now have last_step = step owe nothing of what it decayed."""
        if self.decay is None:
            return
        self.decay.begin_step(step)
        factors = 1 / self.pending(slots)
        if (factors != 1.0).any():
            self.hot.scale(slots, factors, step, row_ids)

    # Slots of a Push ----------------------------------------------------------------------------------------------

    def remember(self, row_ids: np.ndarray, slots: np.ndarray) -> None:
        """The rows of a Pull, all of them hot: the Push of the step will most likely name the same."""
        self._pulled.append((row_ids, slots, self.generation))

    def slots_of_pull(self, row_ids: np.ndarray) -> np.ndarray | None:
        """The slots that a recent Pull of just these row_ids found, if no row has left its slot since.

        A Push mostly names what its Pull named; comparing is 20 times cheaper than finding and checking again.
        """
        for pulled, slots, generation in reversed(self._pulled):
            if generation == self.generation and (pulled is row_ids or np.array_equal(pulled, row_ids)):
                return slots
        return None

    def find_slots(self, row_ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Slots of the rows of a Push, int32[n], -1 for those that are not hot, and how many these are."""
        entries, locations, _, _ = self.index.locate(row_ids)
        slots = np.empty(row_ids.shape[0], np.int32)
        ignored = hot_slots(entries, locations, slots)
        self.rows_ignored += ignored
        return slots, ignored

    def take_slots(self, n: int, step: int) -> np.ndarray:
        """hot_limit.take_slots for rows that have an index entry."""
        return take_slots(self, n, step)

    def preserve(self, row_ids: np.ndarray) -> None:
        """Called before rows int64[n] change, come or go, except by an Advance, which waits for the cut."""
        if self.cut is not None:
            self.cut.preserve(row_ids)

    # Heat, memory, statistics ---------------------------------------------------------------------------------------

    def bump_heat(self, entries: np.ndarray, counted: np.ndarray, step: int) -> None:
        """One visit for each entry with counted[i]; address 0 is skipped."""
        if self.spec.policy.kind != "off":  # nothing reads it there
            now = heat.now_code(step, self.spec.policy.half_life_steps)
            self.index.bump_heat(entries, counted, now, step, heat.LOG_TABLE)

    def move_origin_of_heat(self, step: int) -> None:
        self.last_step_seen = max(self.last_step_seen, step)
        times = heat.num_rebases(step, self.spec.policy.half_life_steps) - self._num_rebases
        if times > 0:
            if self.cut is not None and self.spec.policy.kind != "off":  # nothing counts heat there
                self.cut.write_rows()
            self.index.lower_heat(int(heat.CODES_PER_REBASE) * times)
            self._num_rebases += times

    def record_memory(self) -> None:
        """Tells the budget what the table holds now, and notes the peak of its bytes."""
        held = self.slots.high_water * self.hot_row_bytes + self.index.size_bytes + self.segments.bytes_in_memory
        held += self.changes.size_bytes(self.slots.high_water)
        self.budget.record(self.spec.name, held + (self.waiting.size_bytes if self.waiting else 0))
        self.bytes_peak = max(self.bytes_peak, sum(bytes_of(self).values()))

    def probation_mask(self, locations: np.ndarray) -> np.ndarray:
        """bool[n]: hot rows that have not yet had probation_visits visits; policy topk only."""
        if self.spec.policy.kind != "topk":
            return np.zeros(locations.shape[0], np.bool_)
        on = (locations & FROZEN_BIT) == 0
        on[on] = self.visits.array[locations[on], 0] < self.spec.policy.probation_visits
        return on

    def is_control(self, row_ids: np.ndarray) -> np.ndarray:
        """bool[n]: rows of the control group (policy.control_buckets)."""
        out = np.empty(row_ids.shape[0], np.bool_)
        in_buckets(row_ids, self.control, out)
        return out

    # Background work ------------------------------------------------------------------------------------------------

    def maintain(self) -> bool:
        """One bounded slice of compaction, erasure, segment writing or merging. True if more is waiting."""
        if self.slots.target is not None:
            compaction.move_slice(self)
        elif self.segments.erase_slice() or self._unite_scattered() or self.segments.write_pending():
            self.record_memory()
        elif self.segments.needs_merge():
            self.segments.merge_slice(self._is_live, self._moved)
            self.record_memory()
        else:
            return False
        return True

    def catch_up(self) -> None:
        """Does the background work of segments now if it fell far behind, as it does where every step freezes some
        rows: each time makes a small segment, and when their slots are used up nothing more can freeze. A cut holds the
        segments as they are, and is finished first in that case alone."""
        if self.cut is not None:
            if not self.segments.is_crowded:
                return
            self.cut.finish()
        if self._unite_scattered():
            self.record_memory()
        if self.segments.is_crowded:
            self.settle_segments(None)

    def _unite_scattered(self) -> bool:
        return self.segments.is_scattered and self.segments.unite_small(self._is_live, self._moved)

    def settle_segments(self, max_bytes: int | None) -> None:
        """Brings the segments to where the background work would bring them in time, unless that is more than
        max_bytes of writing, or of merging, at a time. So the bytes of a small table do not depend on timing."""
        while self.segments.settle_slice(self._is_live, self._moved, max_bytes):
            self.record_memory()

    def _is_live(self, row_ids: np.ndarray, locations: np.ndarray) -> np.ndarray:
        entries, now, _, _ = self.index.locate(row_ids)
        return (entries != 0) & (now == locations)

    def _moved(self, row_ids: np.ndarray, old_locations: np.ndarray, new_locations: np.ndarray) -> None:
        self.index.set_locations(self.index.locate(row_ids)[0], new_locations)

    def stats(self) -> TableStats:
        return stats_of(self)

    def fixed_bytes(self) -> tuple[int, int]:
        """(of hot rows and state, of segments): what stats() counts beyond the rows' own bytes, i.e. the unused part of
        last pages, headers of files. An estimate from a sample of the rows must not scale them."""
        high_water, now = self.slots.high_water, self.stats()
        return now.bytes_hot + now.bytes_state - high_water * self.hot_row_bytes, self.segments.fixed_bytes

    def close(self) -> None:
        self.hot.close()
        self.default_row.close()
        if self.decay is not None:
            self.decay.close()
        self.last_step.close()
        self.visits.close()
        self.changes.close()
        self.segments.close()


def _new_segments(
    spec: TableSpec,
    data_dir: Path,
    budget: MemoryBudget,
    writer: Executor | None,
    on_event: Callable[[str], None],
) -> SegmentSet:
    return SegmentSet(
        data_dir / "segments" / safe_name(spec.name),
        spec.name,
        NUM_BUCKETS,
        dim=spec.dim,
        bits=spec.policy.frozen_bits,
        executor=writer,
        segment_bytes=max(_LEAST_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, budget.limit_bytes // 16)),
        small_bytes=min(SMALL_BYTES, int(budget.limit_bytes * _SMALL_SHARE)),
        on_event=on_event,
    )
