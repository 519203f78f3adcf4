"""What a collection knows before it sees a batch, and the routing of each batch: KeyedJaggedTensor -> Lookups.

Everything over all tables is one kernel call, split over the threads by table. Bad batches are refused here, before
anything reaches a store: what kernels read by address must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from embedding_server.errors import InvalidInput
from embedding_server.kernels.routing import check_lookups, dedup_tables
from embedding_server.kernels.vectors import kernel_view
from embedding_server.store import WIRE_NUMPY, EmbeddingStore, RoutedIds
from embedding_server.table_threads import shared_out
from trainer import kernels
from trainer.buffers import ArrayPool
from trainer.kernel_threads import KernelThreads
from trainer.lookups import NO_FLOATS, Lookups, Table

_MAX_OUTPUT = kernels.UNIT * (2**31 - 1)  # elements; gradient positions are int32 in units of 4


@dataclass(frozen=True, slots=True)
class _Values:
    """A checked batch: V values, F keys, B samples."""

    row_ids: np.ndarray  # int64[V]
    offsets: np.ndarray  # int64[F*B+1]
    weights: np.ndarray  # float32[V], or empty
    num_samples: int


class LookupPlan:
    """The slots of a collection: every (table, feature) pair in output order.

    Thread safety: any thread may route; batches share nothing but the array pool, which locks.
    """

    def __init__(
        self, tables: Sequence[Table], store: EmbeddingStore, is_pooled: bool, is_weighted: bool, num_threads: int
    ) -> None:
        self.tables = tables
        self.is_pooled = is_pooled
        self.is_weighted = is_weighted
        self.wire_dtype = store.wire_dtype
        self.is_in_place = store.is_in_place
        self.arrays = ArrayPool()
        self.threads = KernelThreads(num_threads)
        #: tells kernels the dtype of rows
        self.wire_like = kernel_view(np.empty(0, WIRE_NUMPY[store.wire_dtype]), store.wire_dtype)
        self.slot_names = [(table.name, feature) for table in tables for feature in table.feature_names]
        self.dims = np.array([table.dim for table in tables], np.int64)
        num_slots = [len(table.feature_names) for table in tables]
        self.slots_of_table = np.concatenate([[0], np.cumsum(num_slots)]).astype(np.int64)
        self.width = int((self.dims * num_slots).sum())
        self._store = store
        self._slots = self._fixed_slots()
        self._has_scales = is_weighted or any(table.is_mean for table in tables)
        self._keys_of_slots: dict[tuple[str, ...], np.ndarray] = {}

    def route(self, features: KeyedJaggedTensor, for_training: bool) -> Lookups:
        """Checks, deduplicates and routes a batch. for_training also lists where each row's gradient comes from."""
        features = maybe_td_to_kjt(features, None)
        keys = self._keys(features)
        batch = self._checked(features)
        slot_starts = batch.offsets[keys * batch.num_samples]
        slot_ends = batch.offsets[(keys + 1) * batch.num_samples]
        lookups = self._laid_out(batch, keys, slot_starts, slot_ends, for_training)
        owners, arrays = self._store.shard_of_bucket, lookups
        shares = shared_out(np.diff(np.append(lookups.starts, lookups.num_lookups)), self.threads.num_threads)

        def route_tables(part: int, parts: int) -> None:
            dedup_tables(
                batch.row_ids, slot_starts, slot_ends, self.slots_of_table, owners, shares[part],
                arrays.starts, arrays.unique, arrays.counts, arrays.inverse, arrays.num_unique, arrays.shard_offsets,
            )  # fmt: skip
            if for_training:
                kernels.gradient_positions(
                    arrays.slots, self.slots_of_table, arrays.bag_offsets, arrays.inverse, arrays.weights, arrays.pitch,
                    shares[part], arrays.starts, arrays.counts, arrays.num_unique,
                    arrays.positions, arrays.scales, arrays.row_starts,
                )  # fmt: skip

        self.threads.run(route_tables)
        starts, counts = lookups.starts.tolist(), lookups.num_unique.tolist()
        for t, table in enumerate(self.tables):
            if counts[t]:
                row_ids = lookups.unique[starts[t] : starts[t] + counts[t]]
                lookups.ids[table.name] = RoutedIds(row_ids, lookups.shard_offsets[t])
        return lookups

    def _laid_out(
        self, batch: _Values, keys: np.ndarray, slot_starts: np.ndarray, slot_ends: np.ndarray, for_training: bool
    ) -> Lookups:
        """The batch with its slots and its arrays, still to be filled."""
        lengths = slot_ends - slot_starts
        ends = np.cumsum(lengths)
        num_lookups = int(ends[-1]) if ends.size else 0
        check_lookups(num_lookups)
        slots = self._slots.copy()
        slots[:, kernels.FIRST_LOOKUP] = ends - lengths
        if self.is_pooled:
            bag_offsets, pitch, size = batch.offsets, self.width, batch.num_samples * self.width
            slots[:, kernels.FIRST_BAG] = keys * batch.num_samples
            slots[:, kernels.NUM_BAGS] = batch.num_samples
        else:
            pitch = int(self.dims[0]) if self.dims.size else 0
            bag_offsets, size = np.arange(batch.row_ids.size + 1), num_lookups * pitch
            slots[:, kernels.FIRST_BAG] = slot_starts
            slots[:, kernels.NUM_BAGS] = lengths
            slots[:, kernels.PLACE] = (ends - lengths) * pitch
        if size > _MAX_OUTPUT:
            raise InvalidInput(f"the batch's output has {size} values; at most {_MAX_OUTPUT} fit; use a smaller batch")
        num_tables, take = len(self.tables), self.arrays.take
        num_trained = num_lookups if for_training else 0
        return Lookups(
            plan=self,
            keys=keys,
            num_samples=batch.num_samples,
            sample_offsets=batch.offsets,
            slots=slots,
            bag_offsets=bag_offsets,
            weights=batch.weights,
            num_lookups=num_lookups,
            pitch=pitch,
            size=size,
            starts=np.append(ends - lengths, num_lookups)[self.slots_of_table[:-1]],
            inverse=take(num_lookups, np.int32),
            unique=take(num_lookups, np.int64),
            counts=take(num_lookups, np.int32),
            num_unique=np.zeros(num_tables, np.int64),
            shard_offsets=np.zeros((num_tables, self._store.num_shards + 1), np.int64),
            positions=take(num_trained, np.int32),
            scales=take(num_trained, np.float32) if self._has_scales else NO_FLOATS,
            row_starts=take(num_trained + num_tables, np.int64),
        )

    def _fixed_slots(self) -> np.ndarray:
        slots = np.zeros((len(self.slot_names), kernels.COLUMNS), np.int64)
        column = 0
        for t, table in enumerate(self.tables):
            for k in range(self.slots_of_table[t], self.slots_of_table[t + 1]):
                slots[k, kernels.TABLE], slots[k, kernels.DIM] = t, table.dim
                slots[k, kernels.MEAN], slots[k, kernels.PLACE] = table.is_mean, column
                column += table.dim
        return slots

    def _keys(self, features: KeyedJaggedTensor) -> np.ndarray:
        """int64[K]: which key of the batch each slot reads."""
        keys = tuple(features.keys())
        found = self._keys_of_slots.get(keys)
        if found is None:
            place = {key: i for i, key in enumerate(keys)}
            missing = sorted({feature for _, feature in self.slot_names} - place.keys())
            if missing:
                raise InvalidInput(
                    f"the batch lacks feature {missing[0]!r} (and {len(missing) - 1} more); its keys are {list(keys)}; "
                    "every feature of every table must be a key of the KeyedJaggedTensor"
                )
            found = np.array([place[feature] for _, feature in self.slot_names], np.int64)
            self._keys_of_slots[keys] = found
        return found

    def _checked(self, features: KeyedJaggedTensor) -> _Values:
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise InvalidInput(
                "the batch has another number of samples for some features (variable stride, or inverse_indices); "
                "give every feature the same number of bags"
            )
        row_ids, offsets = features.values(), features.offsets()
        if row_ids.dtype not in (torch.int64, torch.int32):
            raise InvalidInput(
                f"row_ids are {row_ids.dtype}; they must be int64 (or int32): hash other values to int64"
            )
        batch = _Values(
            np.ascontiguousarray(row_ids.detach().cpu().numpy(), np.int64),
            np.ascontiguousarray(offsets.detach().cpu().numpy(), np.int64),
            self._checked_weights(features, row_ids.numel()),
            features.stride(),
        )
        names = features.keys()
        if batch.offsets.size != len(names) * batch.num_samples + 1:
            raise InvalidInput(
                f"the batch has {batch.offsets.size - 1} lengths for {len(names)} features of {batch.num_samples} "
                "samples; give one length per feature and sample"
            )
        bad = first_bad_offset(batch.offsets, batch.row_ids.size)
        if bad >= 0:
            feature, position = divmod(max(bad - 1, 0), max(batch.num_samples, 1))
            raise InvalidInput(
                f"feature {names[min(feature, len(names) - 1)]!r}, position {position} of the batch: its bag ends at "
                f"value {batch.offsets[bad]} of {batch.row_ids.size}; lengths must not be negative and must add up to "
                "the number of values"
            )
        return batch

    def _checked_weights(self, features: KeyedJaggedTensor, num_values: int) -> np.ndarray:
        if not self.is_weighted:
            return NO_FLOATS
        weights = features.weights_or_none()
        if weights is None:
            raise InvalidInput("the collection has is_weighted=True and the batch has no weights; give one per value")
        if weights.numel() != num_values:
            raise InvalidInput(f"the batch has {weights.numel()} weights for {num_values} values; give one per value")
        return np.ascontiguousarray(weights.detach().cpu().numpy().reshape(-1), np.float32)


@njit(nogil=True, cache=True)
def first_bad_offset(offsets, num_values):
    """First position at which offsets int64[n] fall, or do not begin at 0 or end at num_values; -1 if there is none."""
    if offsets.size == 0 or offsets[0] != 0:
        return 0
    for i in range(1, offsets.size):
        if offsets[i] < offsets[i - 1] or offsets[i] > num_values:
            return i
    return -1 if offsets[offsets.size - 1] == num_values else offsets.size - 1
