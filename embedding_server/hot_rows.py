"""HotRows: the weights and optimizer state of trainable rows, by slot, behind one interface for every backend.

CpuHotRows (numba), ReferenceHotRows (plain torch, one operation after another: the oracle of the tests) and
kernels/fbgemm.py's FbgemmHotRows (GPU). kernels/__init__.py chooses once. Importing this module imports no torch.

Who holds which slot, and which slots are free, is the table's business; nothing here knows a row_id after `initialise`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from embedding_server.kernels import cpu, row_updates
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.optimizers import adam_step_size, initial_state, num_state_columns, table_seed
from embedding_server.reserved import ReservedArray
from embedding_server.spec import OptimizerSpec, TableSpec


class HotRows(ABC):
    """Hot rows of one dimension and optimizer. D columns of weights, C = num_state_columns of state, both float32.

    Thread safety: none; calls come from the shard's executor thread, one at a time.
    Invariants:
    1. Slots are int32 in [0, max_rows). No bound is checked: an index entry is the proof that a slot exists.
    2. A row is whole: `gather` after `apply` sees all of it.
    3. Nothing is rounded but by a wire dtype: weights and state are float32 in every backend.

    `slots` and `positions` are contiguous int32[n]. `out` and `gradients` are C-contiguous [m, D] arrays of
    store.WIRE_NUMPY[wire_dtype]; only `out` must be writable, and gradients may be unaligned.
    """

    def __init__(self, dim: int, optimizer: OptimizerSpec, max_rows: int) -> None:
        self.dim = dim
        self.optimizer = optimizer
        self.max_rows = max_rows
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
    ) -> None:
        """One optimizer step on each of `slots` with gradients[positions[i]] * scale; slot -1 is skipped.

        slots other than -1 must be unique and gradients finite (kernels.cpu.all_finite). step counts from 1.
        """

    @abstractmethod
    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        """Makes slots[i] (none is -1) the new row of row_ids[i] of `spec`: initial values, initial accumulator."""

    @abstractmethod
    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weights float32[n, D], state float32[n, C]), copies."""

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

    def __init__(self, dim: int, optimizer: OptimizerSpec, max_rows: int) -> None:
        super().__init__(dim, optimizer, max_rows)
        self._weights = ReservedArray(max_rows, dim, np.float32)
        self._state = ReservedArray(max_rows, self.num_state_columns, np.float32)
        self.weights_address = int(self._weights.array.ctypes.data)  # float32[max_rows, D], for kernels of many tables
        self.state_address = int(self._state.array.ctypes.data)  # float32[max_rows, C]

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._weights.array[slots], self._state.array[slots]

    def write(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        self._weights.array[slots] = weights
        self._state.array[slots] = state

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.write(dst, *self.read(src))

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
    ) -> None:
        rate = kernel_rate(self.optimizer, learning_rate, step)
        cpu.apply(
            row_updates.KINDS[self.optimizer.kind], self._weights.array, self._state.array, slots, wire_view(gradients),
            positions, MODES[wire_dtype], np.float32(scale), rate, kernel_constants(self.optimizer),
        )  # fmt: skip

    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        seed, value_range = np.uint64(table_seed(spec)), cpu.initial_range(spec.init_min, spec.init_max)
        cpu.fill_initial(row_ids, seed, *value_range, self._weights.array, slots)
        self._state.array[slots] = initial_state(self.optimizer, self.dim)


class ReferenceHotRows(ReservedHotRows):
    """Plain torch (kernels/reference.py): slow, and short enough to check by eye."""

    def gather(self, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
        from embedding_server.kernels import reference

        reference.gather(self._weights.array, slots, out, positions, wire_dtype)

    def apply(
        self,
        slots: np.ndarray,
        gradients: np.ndarray,
        positions: np.ndarray,
        wire_dtype: str,
        scale: float,
        learning_rate: float,
        step: int,
    ) -> None:
        from embedding_server.kernels import reference

        is_hot = slots >= 0
        slots = slots[is_hot]
        scaled = reference.scaled_gradients(gradients, positions[is_hot], wire_dtype, scale)
        weights, state = reference.apply(self.optimizer, *self.read(slots), scaled, learning_rate, step)
        self.write(slots, weights, state)

    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        from embedding_server.kernels import reference

        weights = reference.initial_values(row_ids, table_seed(spec), self.dim, spec.init_min, spec.init_max)
        state = np.tile(initial_state(self.optimizer, self.dim), (len(slots), 1))
        self.write(slots, weights, state)
