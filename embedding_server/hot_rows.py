"""HotRows: the weights and optimizer state of trainable rows, by slot, behind one interface for every backend.

CpuHotRows (numba), ReferenceHotRows (plain torch, one operation after another: the oracle of the tests) and
kernels/fbgemm.py's FbgemmHotRows (GPU). kernels/__init__.py chooses once. Importing this module imports no torch.

Who holds which slot, and which slots are free, is the table's business. Callers say the row_ids where they matter: the
initial values of a row, and the random bits by which a float16 row is rounded, must not depend on its slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from embedding_server.kernels import cpu, row_updates
from embedding_server.kernels.cut_rows import columns_of
from embedding_server.kernels.half_rows import MAX_HALF, SETTLE, UPDATE
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.optimizers import adam_step_size, initial_state, num_state_columns, table_seed
from embedding_server.reserved import ReservedArray
from embedding_server.spec import OptimizerSpec, TableSpec

ALL_ONES = np.zeros(0, np.float32)  # of `pending`: no row decays
NO_ROW_IDS = np.zeros(0, np.int64)


class HotRows(ABC):
    """Hot rows of one dimension and optimizer. D columns of weights, C = num_state_columns of float32 state.

    Thread safety: none; calls come from the shard's executor thread, one at a time.
    Invariants:
    1. Slots are int32 in [0, max_rows). No bound is checked: an index entry is the proof that a slot exists.
    2. A row is whole: `gather` after `apply` sees all of it.
    3. Weights and state are float32 in every backend, and nothing is rounded but by a wire dtype; with hot_bits 16
       weights are float16: updates round them up or down at random so that the mean is right (kernels/half_rows.py),
       `initialise` and `write` to the nearest; what is larger than 65504 becomes 65504.

    `slots` and `positions` are contiguous int32[n]. `out` and `gradients` are C-contiguous [m, D] arrays of
    store.WIRE_NUMPY[wire_dtype]; only `out` must be writable, and gradients may be unaligned.
    """

    def __init__(self, dim: int, optimizer: OptimizerSpec, max_rows: int, hot_bits: int = 32) -> None:
        self.dim = dim
        self.optimizer = optimizer
        self.max_rows = max_rows
        self.hot_bits = hot_bits
        self.num_state_columns = num_state_columns(optimizer.kind, dim)

    @abstractmethod
    def gather(self, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
        """out[positions[i]] = weights of slots[i], in the wire dtype; slot -1 leaves its position as it is."""

    @abstractmethod
    def apply(
        self,
        slots: np.ndarray,
        gradients: np.ndarray,
        positions: np.ndarray,
        wire_dtype: str,
        scale: float,
        learning_rate: float,
        step: int,
        pending: np.ndarray = ALL_ONES,
        row_ids: np.ndarray = NO_ROW_IDS,
    ) -> None:
        """One optimizer step on each of `slots` with gradients[positions[i]] * scale; slot -1 is skipped.

        slots other than -1 must be unique and gradients finite (kernels.cpu.all_finite). step counts from 1.
        pending float32[n]: what row slots[i] stands for is pending[i] times its weights (weight_decay.py).
        row_ids int64[n]: whose rows they are; needed with hot_bits 16, and of no effect otherwise.
        """

    @abstractmethod
    def scale(self, slots: np.ndarray, factors: np.ndarray, step: int, row_ids: np.ndarray = NO_ROW_IDS) -> None:
        """Multiplies the weights of slots[i], all unique and none -1, by factors[i], float32[n]: weight decay.

        row_ids as in `apply`.
        """

    @abstractmethod
    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        """Makes slots[i] (none is -1) the new row of row_ids[i] of `spec`: initial values, initial accumulator."""

    @abstractmethod
    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weights float32[n, D], state float32[n, C]), copies."""

    def read_stored(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `read`, weights as they are stored: with hot_bits 16 float16."""
        weights, state = self.read(slots)
        return (weights.astype(np.float16) if self.hot_bits == 16 else weights), state

    def stored_columns(self, weights: np.ndarray, state: np.ndarray) -> np.ndarray | None:
        """For kernels.cut_rows.copy_rows, which then does what read_stored does, into rows of these contiguous arrays.
        None: hot rows do not lie in this process's memory."""
        return None

    @abstractmethod
    def write(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        """The opposite of `read`."""

    @abstractmethod
    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies rows src[i] to slots dst[i], as if all at once. What src held stays there."""

    @abstractmethod
    def release(self, from_slot: int) -> None:
        """Returns the memory of slots >= from_slot; their rows are lost."""

    @abstractmethod
    def bytes_weights(self, slots: int) -> int:
        """Committed bytes of weights when slots [0, slots) were all written once."""

    @abstractmethod
    def bytes_state(self, slots: int) -> int:
        """Likewise of optimizer state."""

    @abstractmethod
    def close(self) -> None: ...


class ReservedHotRows(HotRows):
    """Hot rows in reserved maps of this process, a structure of arrays; subclasses add the arithmetic."""

    def __init__(self, dim: int, optimizer: OptimizerSpec, max_rows: int, hot_bits: int = 32) -> None:
        super().__init__(dim, optimizer, max_rows, hot_bits)
        self._weights = ReservedArray(max_rows, dim, np.float32 if hot_bits == 32 else np.int16)  # as kernels take it
        self._state = ReservedArray(max_rows, self.num_state_columns, np.float32)
        self.weights_address = int(self._weights.array.ctypes.data)  # [max_rows, D], for kernels of many tables
        self.state_address = int(self._state.array.ctypes.data)  # float32[max_rows, C]

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.empty((len(slots), self.dim), np.float32)
        every = np.arange(len(slots), dtype=np.int32)  # the kernel fetches ahead: 2 to 3 times as fast as an index
        cpu.gather(self._weights.array, np.ascontiguousarray(slots, np.int32), weights, every, MODES["float32"])
        return weights, self._state.array[slots]

    def read_stored(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.hot_bits == 32:
            return self.read(slots)
        return self._weights.array[slots].view(np.float16), self._state.array[slots]

    def stored_columns(self, weights: np.ndarray, state: np.ndarray) -> np.ndarray:
        return columns_of((self._weights.array, self._state.array), (weights, state))

    def write(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        self._write_weights(slots, weights)
        self._state.array[slots] = state

    def _require_ids(self, slots: np.ndarray, row_ids: np.ndarray) -> None:
        assert self.hot_bits == 32 or row_ids.shape == slots.shape, "float16 rows are rounded by their row_ids"

    def _write_weights(self, slots: np.ndarray, weights: np.ndarray) -> None:
        if self.hot_bits == 32:
            self._weights.array[slots] = weights
        else:
            values = np.ascontiguousarray(weights, np.float32)
            cpu.scatter_half(self._weights.array, np.ascontiguousarray(slots, np.int32), values)

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._weights.array[dst] = self._weights.array[src]
        self._state.array[dst] = self._state.array[src]

    def release(self, from_slot: int) -> None:
        self._weights.release(from_slot)
        self._state.release(from_slot)

    def bytes_weights(self, slots: int) -> int:
        return self._weights.committed_bytes(slots)

    def bytes_state(self, slots: int) -> int:
        return self._state.committed_bytes(slots)

    def close(self) -> None:
        self._weights.close()
        self._state.close()


def kernel_constants(optimizer: OptimizerSpec) -> np.ndarray:
    """float32[NUM_CONSTANTS] as the update kernels take them (kernels/row_updates.py)."""
    constants = np.zeros(row_updates.NUM_CONSTANTS, np.float32)
    constants[row_updates.EPS] = optimizer.eps
    constants[row_updates.BETA1], constants[row_updates.BETA2] = optimizer.beta1, optimizer.beta2
    constants[row_updates.CLIP_NORM] = optimizer.clip_norm
    constants[row_updates.FTRL_L1], constants[row_updates.FTRL_L2] = optimizer.ftrl_l1, optimizer.ftrl_l2
    constants[row_updates.FTRL_BETA] = optimizer.ftrl_beta
    return constants


def kernel_rate(optimizer: OptimizerSpec, learning_rate: float, step: int) -> np.float32:
    """What the update kernels take as rate: adam's holds the bias corrections of the step."""
    return np.float32(adam_step_size(optimizer, learning_rate, step) if optimizer.kind == "adam" else learning_rate)


class CpuHotRows(ReservedHotRows):
    """Numba kernels (kernels/cpu.py)."""

    def gather(self, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
        cpu.gather(self._weights.array, slots, wire_view(out), positions, MODES[wire_dtype])

    def apply(
        self,
        slots: np.ndarray,
        gradients: np.ndarray,
        positions: np.ndarray,
        wire_dtype: str,
        scale: float,
        learning_rate: float,
        step: int,
        pending: np.ndarray = ALL_ONES,
        row_ids: np.ndarray = NO_ROW_IDS,
    ) -> None:
        self._require_ids(slots, row_ids)
        rate = kernel_rate(self.optimizer, learning_rate, step)
        cpu.apply(
            row_updates.KINDS[self.optimizer.kind], self._weights.array, self._state.array, slots, wire_view(gradients),
            positions, MODES[wire_dtype], np.float32(scale), rate, kernel_constants(self.optimizer), pending, step,
            row_ids,
        )  # fmt: skip

    def scale(self, slots: np.ndarray, factors: np.ndarray, step: int, row_ids: np.ndarray = NO_ROW_IDS) -> None:
        self._require_ids(slots, row_ids)
        cpu.scale(self._weights.array, slots, factors, step, row_ids)

    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        seed = table_seed(spec)
        if self.hot_bits == 16 and max(-spec.init_min, spec.init_max) > MAX_HALF:
            values = cpu.initial_values(row_ids, seed, self.dim, spec.init_min, spec.init_max)
            self._write_weights(slots, values)
        else:
            value_range = cpu.initial_range(spec.init_min, spec.init_max)
            cpu.fill_initial(row_ids, np.uint64(seed), *value_range, self._weights.array, slots)
        self._state.array[slots] = initial_state(self.optimizer, self.dim)


class ReferenceHotRows(ReservedHotRows):
    """Plain torch (kernels/reference.py): slow, and short enough to check by eye."""

    def gather(self, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
        from embedding_server.kernels import reference

        weights = self._weights.array
        reference.gather(
            weights if self.hot_bits == 32 else weights.view(np.float16), slots, out, positions, wire_dtype
        )

    def apply(
        self,
        slots: np.ndarray,
        gradients: np.ndarray,
        positions: np.ndarray,
        wire_dtype: str,
        scale: float,
        learning_rate: float,
        step: int,
        pending: np.ndarray = ALL_ONES,
        row_ids: np.ndarray = NO_ROW_IDS,
    ) -> None:
        from embedding_server.kernels import reference

        self._require_ids(slots, row_ids)
        is_hot = slots >= 0
        scaled = reference.scaled_gradients(gradients, positions[is_hot], wire_dtype, scale)
        weights, state = self.read(slots[is_hot])
        factors = pending[is_hot][:, None] if pending.size else np.ones((1, 1), np.float32)
        weights, state = reference.apply(self.optimizer, weights * factors, state, scaled, learning_rate, step)
        its_ids = row_ids[is_hot] if row_ids.size else row_ids
        self._put_updated(slots[is_hot], its_ids, weights.astype(np.float64) / factors, step, UPDATE)
        self._state.array[slots[is_hot]] = state

    def scale(self, slots: np.ndarray, factors: np.ndarray, step: int, row_ids: np.ndarray = NO_ROW_IDS) -> None:
        self._require_ids(slots, row_ids)
        self._put_updated(slots, row_ids, self.read(slots)[0].astype(np.float64) * factors[:, None], step, SETTLE)

    def _put_updated(
        self, slots: np.ndarray, row_ids: np.ndarray, weights: np.ndarray, step: int, purpose: int
    ) -> None:
        """weights float64[n, D]: what exceeds float32's largest value becomes that."""
        from embedding_server.kernels import reference

        weights = weights.clip(-reference.LARGEST, reference.LARGEST).astype(np.float32)
        if self.hot_bits == 16:
            weights = reference.round_rows(weights, reference.rounding_keys(row_ids, step, purpose)).view(np.int16)
        self._weights.array[slots] = weights

    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        from embedding_server.kernels import reference

        weights = reference.initial_values(row_ids, table_seed(spec), self.dim, spec.init_min, spec.init_max)
        state = np.tile(initial_state(self.optimizer, self.dim), (len(slots), 1))
        self.write(slots, weights, state)
