"""A table as a dictionary: every rule of pulls, pushes, re-selections and ends of data passes once more, row by row.

SGD or Adagrad with lr 1, zero initial values and small-integer gradients make float32 sums exact and free of order, so
a table must equal its model bit for bit; rows frozen to 8 or 4 bits take FBGEMM's own quantise and dequantise. Used by
test_shard_model.py for one shard, and by tests/simulation for many that fail.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import fbgemm_gpu  # noqa: F401  registers the torch operators
import numpy as np
import torch

from embedding_server import heat
from embedding_server.kernels import frozen_reference
from embedding_server.kernels.hashing import buckets_of
from embedding_server.optimizers import decode_accumulator, encode_accumulator, initial_state
from embedding_server.policy import control_buckets, hot_fraction_at, is_above, may_move, rank_bins
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS

NO_CAP = 2**31 - 1


@dataclass
class Row:
    values: np.ndarray  # float32[D]
    state: np.ndarray  # float32[C], of a hot row
    hot: bool = True
    last_step: int = 0
    visits: int = 0  # while it was hot
    heat: int = 0
    stored: tuple[bytes, int] | None = (
        None  # of a frozen row: its bytes and its accumulator's; None: it takes no storage
    )


@dataclass
class TableModel:
    """row_ids: every one that will ever be named."""

    spec: TableSpec
    row_ids: Iterable[int]
    max_hot: int = NO_CAP
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    counted: set[tuple[int, int]] = field(default_factory=set)
    erased: set[int] = field(default_factory=set)  # row_ids that were deleted and have had no row since
    default: Row = field(init=False)  # the default row; its values and state alone
    num_rebases: int = 0
    frostline: object = None
    moves: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.policy = self.spec.policy
        self.counts_visits = self.policy.kind != "off"  # nothing reads them there
        self.default = self._new_row()
        all_ids = list(self.row_ids)
        control = control_buckets(self.spec)
        buckets = buckets_of(np.array(all_ids, np.int64), NUM_BUCKETS)
        self.control = {row_id for row_id, bucket in zip(all_ids, buckets.tolist(), strict=True) if control[bucket]}

    def copy(self) -> TableModel:
        """Its rows are its own; arrays are shared, for no method changes one in place."""
        other = copy.copy(self)
        other.rows = {row_id: copy.copy(row) for row_id, row in self.rows.items()}
        other.counts, other.counted, other.moves = dict(self.counts), set(self.counted), Counter(self.moves)
        other.erased = set(self.erased)
        other.default = copy.copy(self.default)
        return other

    def _new_row(self, **fields: Any) -> Row:
        dim = self.spec.dim
        return Row(np.zeros(dim, np.float32), initial_state(self.spec.optimizer, dim), **fields)

    def apply(self, row: Row, gradient: np.ndarray, scale: float) -> None:
        """One optimizer step with learning rate 1; gradient float32[D] counts `scale` times."""
        gradient = gradient * np.float32(scale)
        if self.spec.optimizer.kind == "adagrad":
            row.state = row.state + gradient * gradient
            gradient = gradient / (np.sqrt(row.state) + np.float32(self.spec.optimizer.eps))
        row.values = row.values - gradient

    def pull(self, row_ids: list[int], step: int, is_frozen: Callable[[int], bool]) -> None:
        """Hot rows first, then frozen ones, then new ones. is_frozen asks the table: among equal heat it chooses."""
        self.move_origin_of_heat(step)
        first = {row_id: (row_id, step) not in self.counted for row_id in row_ids}
        self.counted.update((row_id, step) for row_id in row_ids)
        frozen = []
        for row_id in row_ids:
            row = self.rows.get(row_id)
            if row is None:
                continue
            if not row.hot:
                frozen.append(row_id)
            elif row.last_step != step and self.counts_visits:
                row.visits, row.last_step = min(255, row.visits + 1), step
            if first[row_id]:
                row.heat = self._bump(row.heat, row_id, step)
        new = [row_id for row_id in row_ids if row_id not in self.rows]
        if self.policy.kind == "topk":  # only those on probation, which froze because nobody visited them
            frozen = [row_id for row_id in frozen if self.rows[row_id].visits < self.policy.probation_visits]
        for row_id in self._with_room(frozen, step, is_frozen):
            row = self._thaw(row_id, step)
            row.visits = min(255, row.visits + 1)
            self.moves["thawed_visit"] += 1
        for row_id in new:
            self.counts[row_id] = self.counts.get(row_id, 0) + first[row_id]
        earned = [row_id for row_id in new if self.counts[row_id] >= self.policy.min_count]
        starts_hot = {row_id: self._starts_hot(row_id, step) for row_id in earned}
        for row_id in self._with_room([i for i in earned if starts_hot[i]], step, is_frozen):
            self._insert(row_id, self._new_row(last_step=step, visits=self.policy.min_count), step)
        for row_id in earned:
            if not starts_hot[row_id]:
                self._insert(row_id, self._new_row(hot=False), step)

    def _insert(self, row_id: int, row: Row, step: int) -> None:
        row.heat = self._bump(0, row_id, step)
        self.rows[row_id] = row
        self.erased.discard(row_id)

    def _starts_hot(self, row_id: int, step: int) -> bool:
        if self.frostline is None or self.policy.probation_visits or row_id in self.control:
            return True
        return self._above(row_id, int(heat.now_code(step, self.policy.half_life_steps)))

    def _with_room(self, row_ids: list[int], step: int, is_frozen: Callable[[int], bool]) -> list[int]:
        """Those that get a hot slot, after the coldest rows froze to make room under hot_bytes."""
        num_hot = sum(row.hot for row in self.rows.values())
        short = len(row_ids) - (self.max_hot - num_hot)
        if short > 0 and self.policy.kind != "off":
            may = {i: row for i, row in self.rows.items() if row.hot and row.last_step < step - 1}
            for group in (may.keys() - self.control, may.keys() & self.control):
                frozen = self._freeze_coldest({i: may[i] for i in group}, short, step, is_frozen)
                short -= frozen
                num_hot -= frozen
        return row_ids[: max(0, self.max_hot - num_hot)]

    def _freeze_coldest(self, rows: dict[int, Row], wanted: int, step: int, is_frozen: Callable[[int], bool]) -> int:
        if wanted <= 0 or not rows:
            return 0
        coldest = sorted(rows.values(), key=lambda row: row.heat)[: max(wanted, len(rows) // 16)]
        limit = coldest[-1].heat
        ties = [i for i, row in rows.items() if row.heat == limit]
        needed = sum(row.heat == limit for row in coldest)
        chosen = [i for i in ties if len(ties) == needed or is_frozen(i)][:needed]  # others may freeze later on
        assert len(chosen) == needed
        for row_id in [*(i for i, row in rows.items() if row.heat < limit), *chosen]:
            self._freeze(row_id, "frozen_limit", step)
        return len(coldest)

    def _bump(self, code: int, row_id: int, step: int) -> int:
        if self.policy.kind == "off":
            return 0
        now = heat.now_code(step, self.policy.half_life_steps)
        return int(heat.bump(np.uint16(code), now, np.int64(row_id), step, heat.LOG_TABLE))

    def _above(self, row_id: int, code: int) -> bool:
        ids = np.array([row_id], np.int64)
        return bool(is_above(self.frostline, rank_bins(self.policy, ids, np.array([code], np.uint16)), ids)[0])

    def _may_move(self, row_id: int, code: int, step: int) -> bool:
        ids = np.array([row_id], np.int64)
        return bool(may_move(self.frostline, rank_bins(self.policy, ids, np.array([code], np.uint16)), ids, step)[0])

    def move_origin_of_heat(self, step: int) -> None:
        times = heat.num_rebases(step, self.policy.half_life_steps) - self.num_rebases
        if times > 0:
            self.num_rebases += times
            for row in self.rows.values():
                row.heat = row.heat and max(1, row.heat - times * int(heat.CODES_PER_REBASE))

    def reselect(self, step: int, frostline: object, is_frozen: Callable[[int], bool]) -> None:
        self.move_origin_of_heat(step)
        if self.policy.kind == "topk":
            self._rank(step, frostline, is_frozen)
        for row_id, row in list(self.rows.items()):
            if self.policy.kind not in ("idle", "compact") or row_id in self.control:
                continue
            is_rare = self.policy.kind == "compact" and row.visits < self.policy.forget_below
            if row.hot and row.last_step + self.policy.idle_steps <= step:
                self.forget(row_id) if is_rare else self._freeze(row_id, "frozen_idle", step)
            elif not row.hot and is_rare:  # a limit froze it: how long it has been idle shows in its heat alone
                ago = self.policy.idle_steps / self.policy.half_life_steps * heat.CODES_PER_OCTAVE
                if row.heat < heat.now_code(step, self.policy.half_life_steps) - ago:
                    self.forget(row_id)

    def _rank(self, step: int, frostline: object, is_frozen: Callable[[int], bool]) -> None:
        self.frostline = frostline
        above = {i for i, row in self.rows.items() if i in self.control or self._above(i, row.heat)}
        may = {i for i, row in self.rows.items() if self._may_move(i, row.heat, step)}
        ranked = {i for i, row in self.rows.items() if row.visits >= self.policy.probation_visits}
        warm = above & may & ranked if self.policy.resume else set()
        thaws = [i for i in warm | (self.control & self.rows.keys()) if not self.rows[i].hot]
        for row_id, row in self.rows.items():
            if row.hot and row.visits < self.policy.probation_visits:
                is_idle = row.last_step + self.policy.idle_steps <= step
                if is_idle and row_id not in self.control and hot_fraction_at(self.policy, step) < 1.0:
                    self._freeze(row_id, "frozen_idle", step)
            elif row.hot and row_id in may - above:
                self._freeze(row_id, "frozen_rank", step)
        num_thawed = len(self._with_room(thaws, step, is_frozen))
        thawed = [i for i in thaws if num_thawed == len(thaws) or not is_frozen(i)]
        assert len(thawed) == num_thawed
        for row_id in thawed:
            self._thaw(row_id, step)
            self.moves["thawed_rank"] += 1

    def end_data_pass(self) -> None:
        if self.policy.kind == "off" or self.policy.epoch_end == "keep":
            return
        for row_id in [i for i, row in self.rows.items() if row.visits < self.policy.forget_below]:
            if row_id not in self.control:
                self.forget(row_id)

    def forget(self, row_id: int) -> None:
        del self.rows[row_id]
        self.counts[row_id] = 0
        self.moves["forgotten"] += 1

    def erase(self, row_id: int) -> str:
        """Deletes it for good. What was there of it: as a field of store.Erased."""
        row, count = self.rows.pop(row_id, None), self.counts.get(row_id, 0)
        self.counts[row_id] = 0
        self.erased.add(row_id)
        if row is None:
            return "waiting" if count and self.policy.min_count > 1 else "unknown"
        return "hot" if row.hot else "frozen"

    def _freeze(self, row_id: int, reason: str, step: int) -> None:
        row = self.rows[row_id]
        row.hot = False
        self.moves[reason] += 1
        keys = frozen_reference.rounding_keys(np.array([row_id], np.int64), step)
        row.values, encoded = through_fbgemm(
            row.values, self.policy.frozen_bits, keys if self.policy.freeze_rounding == "stochastic" else None
        )
        row.stored = encoded, int(encode_accumulator(self.spec, row.state[None])[0])

    def _thaw(self, row_id: int, step: int) -> Row:
        row = self.rows[row_id]
        row.hot, row.last_step = True, step
        if row.stored is not None:
            row.state = decode_accumulator(self.spec, np.array([row.stored[1]], np.uint8), self.spec.dim)[0]
            row.stored = None
        return row


def through_fbgemm(values: np.ndarray, bits: int, keys: np.ndarray | None) -> tuple[np.ndarray, bytes]:
    """FBGEMM's quantise and dequantise of a row, float32[D], and its bytes in between.

    With keys the reference's quantise, since FBGEMM rounds to the nearest only.
    """
    if bits == 32:
        return values, values.tobytes()
    rows = torch.from_numpy(values[None].copy())
    fused = None if keys is None else torch.from_numpy(frozen_reference.quantise(values[None], bits, keys))
    if bits == 8:
        fused = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows) if fused is None else fused
        read = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(fused)
    else:
        assert bits == 4, "FBGEMM has no other"
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4) if fused is None else fused
        read = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused, 4)
    return read.numpy()[0], fused.numpy().tobytes()
