"""One batch on its way through the tables: routed row_ids -> pooled output -> gradients of rows and of weights.

    lookups = plan.route(features, for_training)        checked, deduplicated, grouped by shard (lookup_plan.py)
    lookups.attach(store.pull(..., lookups.ids))        the rows are there
    lookups.pool()                                      float32, what forward gives
    lookups.row_gradients(output_gradient)              what a Push takes, by table

Shapes and the meaning of `slots`, `starts`, `positions`: trainer/kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels.vectors import kernel_view
from embedding_server.store import DEFAULT, TRAINABLE, WIRE_NUMPY, PlacedRows, RoutedIds, Rows, RowSums, push_dtype
from trainer import kernels

if TYPE_CHECKING:
    from trainer.lookup_plan import LookupPlan

NO_FLOATS = np.empty(0, np.float32)
_NO_FLAGS = np.empty(0, np.uint8)
_PAD = 64  # bytes; every table's gradients begin at a cache line
#: bits of the smallest |x| that is not a finite value of the dtype (bfloat16: the first that rounds to infinity)
_NOT_FINITE = {"float32": 0x7F800000, "bfloat16": 0x7F7F8000}
_SURELY_FINITE = 1e38  # float32 reaches 3.4e38


@dataclass(frozen=True, slots=True)
class Table:
    """What look-ups need to know of a table."""

    name: str
    dim: int
    feature_names: Sequence[str]
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of one table's trainable rows, summed over the batch."""

    ids: RoutedIds
    values: np.ndarray  # [n, D] in the push dtype; [0, D] if there are sums
    default_gradient: np.ndarray | None  # float32[D]; sum over the rows whose Pull said DEFAULT, None if none did
    sums: RowSums | None = None  # for a store that is_in_place


@dataclass(frozen=True, slots=True)
class _Picked:
    """The rows that get a gradient, table t's from starts[t] on."""

    rows: np.ndarray  # int32[N], positions among the table's unique rows
    row_ids: np.ndarray  # int64[N]
    shards: np.ndarray  # int64[T, S+1]; the last column is how many
    num_defaults: np.ndarray  # int64[T]


@dataclass(slots=True)
class Lookups:
    """One batch: N look-ups of T tables. Arrays of N are buffers of the plan's ArrayPool."""

    plan: LookupPlan
    keys: np.ndarray  # int64[K], the batch's key that each slot reads
    num_samples: int
    sample_offsets: np.ndarray  # int64[F*B+1], the batch's own offsets
    slots: np.ndarray
    bag_offsets: np.ndarray
    weights: np.ndarray  # float32[V], or empty
    num_lookups: int
    pitch: int
    size: int  # elements of the output
    starts: np.ndarray  # int64[T]
    inverse: np.ndarray
    unique: np.ndarray
    counts: np.ndarray
    num_unique: np.ndarray
    shard_offsets: np.ndarray
    positions: np.ndarray
    scales: np.ndarray
    row_starts: np.ndarray
    ids: dict[str, RoutedIds] = field(default_factory=dict)  # tables without look-ups are left out
    rows: Mapping[str, Rows | PlacedRows] = field(default_factory=dict)
    row_addresses: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pooled: np.ndarray | None = None  # what pool_in_place made

    def attach(self, rows: Mapping[str, Rows]) -> None:
        """Takes what the store answered to `ids`."""
        self.rows = rows
        self.row_addresses = np.zeros(len(self.plan.tables), np.int64)
        value_dtype = WIRE_NUMPY[self.plan.wire_dtype]
        for t, table in enumerate(self.plan.tables):
            n = int(self.num_unique[t])
            if not n:
                continue
            values, flags = rows[table.name].values, rows[table.name].flags
            # the kernels read by address: a wrong shape would read someone else's memory
            if values.shape != (n, table.dim) or values.dtype != value_dtype or not values.flags.c_contiguous:
                raise AssertionError(f"store gave {values.shape} {values.dtype} for {n} rows of table {table.name!r}")
            if flags.shape != (n,) or flags.dtype != np.uint8 or not flags.flags.c_contiguous:
                raise AssertionError(f"store gave {flags.shape} {flags.dtype} flags for {n} rows of {table.name!r}")
            self.row_addresses[t] = values.__array_interface__["data"][0]

    def pool_in_place(self, rows: Mapping[str, PlacedRows]) -> None:
        """Takes rows whose addresses mean nothing after this call, and makes the output of them at once."""
        self.rows = rows
        addresses = np.zeros(len(self.plan.tables), np.int64)
        for t, table in enumerate(self.plan.tables):
            n = int(self.num_unique[t])
            if not n:
                continue
            of_table = rows[table.name]
            if of_table.addresses.shape != (n,) or of_table.flags.shape != (n,) or of_table.dim != table.dim:
                raise AssertionError(f"store gave {of_table.addresses.shape} for {n} rows of table {table.name!r}")
            addresses[t] = of_table.addresses.__array_interface__["data"][0]
        out = self.plan.arrays.take(self.size, np.float32)
        self.plan.threads.run(
            lambda part, parts: kernels.pool_placed_rows(
                addresses, 0, NO_FLOATS, self.slots, self.bag_offsets, self.inverse, self.weights,
                out, self.pitch, part, parts,
            )
        )  # fmt: skip
        self.pooled = out

    def pool(self) -> np.ndarray:
        """Output float32[size]: pooled [B, sum of dims], or a sequence collection's [N, D]."""
        if self.pooled is not None:
            return self.pooled
        out = self.plan.arrays.take(self.size, np.float32)
        like = self.plan.wire_like
        self.plan.threads.run(
            lambda part, parts: kernels.pool_rows(
                self.row_addresses, like, self.slots, self.bag_offsets, self.inverse, self.weights,
                out, self.pitch, part, parts,
            )
        )  # fmt: skip
        return out

    def weight_gradients(self, gradient: np.ndarray) -> np.ndarray:
        """float32[V]: gradient of every value's weight; gradient is the output's, float32[size]."""
        out = np.zeros(self.weights.size, np.float32)
        kernels.weight_gradients(
            self.row_addresses,
            self.plan.wire_like,
            self.slots,
            self.bag_offsets,
            self.inverse,
            gradient,
            self.pitch,
            out,
        )
        return out

    def row_gradients(self, gradient: np.ndarray) -> dict[str, RowGradients]:
        """Gradients of the trainable rows, by table, from the output's float32[size]. Tables without any are left out.

        For a store that is_in_place they stay sums over `gradient`, which must not change until they are pushed.
        InvalidInput if one is not finite in the push dtype; it names the table, the feature and the sample.
        """
        picked = self._pick_trainable()
        num_picked = picked.shards[:, -1]
        if self.plan.is_in_place and self._every_sum_is_finite(gradient):
            return self._by_table(gradient, picked, None)
        pushed = push_dtype(self.plan.wire_dtype)
        out, places = self._gradient_buffer(num_picked, pushed)
        view = kernel_view(out, pushed)
        largest = self.plan.threads.run(
            lambda part, parts: kernels.row_gradients(
                gradient, self.positions, self.scales, self.row_starts, self.starts, picked.rows, num_picked,
                self.plan.dims, places, view, part, parts,
            )
        )  # fmt: skip
        if max(largest) >= _NOT_FINITE[pushed]:
            self._refuse(gradient, pushed)
        return self._by_table(gradient, picked, (out, places))

    def _every_sum_is_finite(self, gradient: np.ndarray) -> bool:
        """Whether no sum of pieces of the output's gradient can overflow; cheap, and False where it is not sure."""
        parts = self.plan.threads.run(lambda part, parts: kernels.largest_bits(gradient, part, parts))
        largest = float(np.array(max(parts), np.uint32).view(np.float32))
        if self.scales.size:
            largest *= float(np.abs(self.scales).max(initial=0.0))
        return largest * max(1, self.num_lookups) < _SURELY_FINITE  # False if NaN

    def _pick_trainable(self) -> _Picked:
        num_tables, take = len(self.plan.tables), self.plan.arrays.take
        addresses = np.zeros(num_tables, np.int64)
        for t, table in enumerate(self.plan.tables):
            if self.num_unique[t]:
                addresses[t] = self.rows[table.name].flags.__array_interface__["data"][0]
        picked = _Picked(
            rows=take(self.num_lookups, np.int32),
            row_ids=take(self.num_lookups, np.int64),
            shards=np.empty_like(self.shard_offsets),
            num_defaults=np.empty(num_tables, np.int64),
        )
        kernels.pick_trainable(
            addresses, _NO_FLAGS, self.starts, self.unique, self.shard_offsets,
            picked.rows, picked.row_ids, picked.shards, picked.num_defaults,
        )  # fmt: skip
        return picked

    def _gradient_buffer(self, num_picked: np.ndarray, pushed: str) -> tuple[np.ndarray, np.ndarray]:
        """(values of all tables, int64[T] where each table's begin)."""
        dtype = WIRE_NUMPY[pushed]
        pad = _PAD // dtype.itemsize
        sizes = (num_picked * self.plan.dims + pad - 1) // pad * pad
        ends = np.cumsum(sizes)
        return self.plan.arrays.take(int(ends[-1]) if ends.size else 0, dtype), ends - sizes

    def _by_table(
        self, gradient: np.ndarray, picked: _Picked, made: tuple[np.ndarray, np.ndarray] | None
    ) -> dict[str, RowGradients]:
        """made: what _gradient_buffer gave, filled; None: the gradients stay sums."""
        gradients = {}
        for t, table in enumerate(self.plan.tables):
            n, start = int(picked.shards[t, -1]), int(self.starts[t])
            default = self._default_gradient(t, gradient) if picked.num_defaults[t] else None
            if n or default is not None:
                is_whole = n == self.num_unique[t]  # the very ids of the Pull: the store knows them again
                ids = (
                    self.ids[table.name] if is_whole else RoutedIds(picked.row_ids[start : start + n], picked.shards[t])
                )
                if made is None:
                    values, sums = np.empty((0, table.dim), np.float32), self._sums(t, n, gradient, picked)
                else:
                    place, sums = int(made[1][t]), None
                    values = made[0][place : place + n * table.dim].reshape(n, table.dim)
                gradients[table.name] = RowGradients(ids, values, default, sums)
        return gradients

    def _sums(self, t: int, num_rows: int, gradient: np.ndarray, picked: _Picked) -> RowSums:
        start, num_unique = int(self.starts[t]), int(self.num_unique[t])
        return RowSums(
            source=gradient,
            positions=self.positions,
            scales=self.scales,
            starts=self.row_starts[start + t : start + t + num_unique + 1],
            rows=picked.rows[start : start + num_rows],
        )

    def _default_gradient(self, t: int, gradient: np.ndarray) -> np.ndarray:
        table = self.plan.tables[t]
        total = np.zeros(table.dim, np.float32)
        row_starts = self.row_starts[int(self.starts[t]) + t :]
        flags = self.rows[
            table.name
        ].flags.copy()  # a network store's flags may be read-only: one compiled form serves all
        kernels.default_gradient(gradient, self.positions, self.scales, row_starts, flags, total)
        if not np.isfinite(total).all():
            self._refuse(gradient, "float32")
        return total

    def _refuse(self, gradient: np.ndarray, pushed: str) -> None:
        """Finds what made a row's gradient not finite, and raises. Slow, and only ever run once before an error."""
        for k, (table, feature) in enumerate(self.plan.slot_names):
            slot = self.slots[k]
            elements = slot[kernels.PLACE] + np.arange(slot[kernels.NUM_BAGS])[:, None] * self.pitch
            bad = ~np.isfinite(gradient[elements + np.arange(slot[kernels.DIM])]).all(axis=1)
            for bag in np.flatnonzero(bad).tolist():
                row_id = self._a_trained_row_id(k, bag)
                if row_id is not None:
                    sample = bag if self.plan.is_pooled else self._sample_of(k, bag)
                    raise InvalidInput(
                        f"table {table!r}, feature {feature!r}, position {sample} of the batch: the output gradient is "
                        f"not finite and would train row_id {row_id}; nothing was pushed for this step. Look at the "
                        "loss and the learning rate; .step() now pushes no gradient and goes on"
                    )
        raise InvalidInput(
            f"the gradient of a row, summed over the batch, is not finite as {pushed}, though every part of it is; "
            "nothing was pushed for this step. Scale the loss down; .step() now pushes no gradient and goes on"
        )

    def _a_trained_row_id(self, k: int, bag: int) -> int | None:
        slot = self.slots[k]
        t, first_bag = int(slot[kernels.TABLE]), int(slot[kernels.FIRST_BAG])
        shift = int(slot[kernels.FIRST_LOOKUP]) - int(self.bag_offsets[first_bag])
        low, high = self.bag_offsets[first_bag + bag] + shift, self.bag_offsets[first_bag + bag + 1] + shift
        rows = self.inverse[low:high]
        flags = self.rows[self.plan.tables[t].name].flags
        trained = rows[(flags[rows] & (TRAINABLE | DEFAULT)) != 0]
        return int(self.unique[self.starts[t] + trained[0]]) if trained.size else None

    def _sample_of(self, k: int, value: int) -> int:
        """Sample that a sequence slot's value belongs to; value counts within the slot."""
        first = int(self.keys[k]) * self.num_samples
        offsets = self.sample_offsets[first : first + self.num_samples + 1]
        return int(np.searchsorted(offsets, offsets[0] + value, side="right")) - 1
