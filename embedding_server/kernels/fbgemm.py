"""Hot rows in GPU memory: one FBGEMM SplitTableBatchedEmbeddingBagsCodegen ("TBE") as an array of rows by slot.

A slot is an index of the TBE's one table; a gradient row is a bag of one look-up, so that FBGEMM's fused backward is
the optimizer step. With hot_bits 16 the TBE's weights are float16 and FBGEMM's own random rounding is on (GPU only),
whose bits come from a generator and not from the row_ids: runs then differ in last bits.
Sum pooling over bags of one gives what PoolingMode.NONE gives and avoids its slow CPU path
(0.8 M rows/s). Without a GPU the TBE runs on FBGEMM's CPU path, which has no adam: that is for the tests.

A TBE cannot grow in place. It is built anew with a quarter more rows and the old rows are copied, so while it grows the
old and the new one coexist: leave room for that in memory_limit_bytes. Rows given back by `release` are returned the
same way once they are a quarter of the capacity.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  loads the operators that the TBE calls
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from embedding_server.errors import InvalidInput
from embedding_server.hot_rows import ALL_ONES, NO_ROW_IDS, HotRows
from embedding_server.kernels import cpu, reference
from embedding_server.kernels.half_rows import MAX_HALF
from embedding_server.optimizers import initial_state, table_seed
from embedding_server.spec import OptimizerSpec, TableSpec

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
MIN_CAPACITY = 4096
_GROWTH = 1.25


class FbgemmHotRows(HotRows):
    """HotRows on `device`: the current CUDA device, or the CPU path where there is none."""

    def __init__(
        self, dim: int, optimizer: OptimizerSpec, max_rows: int, hot_bits: int = 32, device: str | None = None
    ) -> None:
        """InvalidInput: what FBGEMM cannot do on that device."""
        super().__init__(dim, optimizer, max_rows, hot_bits)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if optimizer.kind == "ftrl":
            raise InvalidInput(
                "optimizer.kind='ftrl' cannot run with backend='fbgemm', for FBGEMM has no FTRL; set backend='cpu', or"
                " kind='adagrad' or 'rowwise_adagrad'"
            )
        if optimizer.kind == "adam" and self.device.type == "cpu":
            raise InvalidInput(
                "optimizer.kind='adam' with backend='fbgemm' needs a GPU, for FBGEMM has no adam on CPUs; "
                "set backend='cpu', or kind='adagrad' or 'rowwise_adagrad'"
            )
        if hot_bits == 16 and self.device.type == "cpu":
            raise InvalidInput(
                "hot_bits=16 with backend='fbgemm' needs a GPU, for FBGEMM rounds at random only there and would lose"
                " small updates; set backend='cpu', or hot_bits=32"
            )
        if hot_bits == 16 and optimizer.weight_decay:
            raise InvalidInput(
                f"hot_bits=16 and weight_decay={optimizer.weight_decay} cannot both be with backend='fbgemm', which has"
                " no random rounding for decay; set backend='cpu', hot_bits=32 or weight_decay=0"
            )
        self._build(min(MIN_CAPACITY, max_rows), ())

    def gather(self, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
        is_hot = slots >= 0
        self._require(slots)
        rows = self._weights.index_select(0, self._indices(slots[is_hot]))
        # converted before the copy: 16-bit values cross the bus as 16 bits
        narrow = rows.to(reference.TORCH_WIRE[wire_dtype]).cpu()
        out[positions[is_hot]] = reference.to_wire(narrow, wire_dtype, out.dtype)

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
        is_hot = slots >= 0
        self._require(slots)
        # A change divided by what the rows still owe is one at a higher rate; a step has one to three such factors.
        for factor in np.unique(pending[is_hot]) if pending.size else np.ones(1, np.float32):
            at = np.flatnonzero(is_hot & (pending == factor) if pending.size else is_hot)
            self._apply_at(slots[at], gradients, positions[at], wire_dtype, scale, learning_rate / float(factor), step)

    def _apply_at(
        self,
        slots: np.ndarray,
        gradients: np.ndarray,
        positions: np.ndarray,
        wire_dtype: str,
        scale: float,
        learning_rate: float,
        step: int,
    ) -> None:
        if not slots.size:
            return  # FBGEMM's backward does not take an empty batch on every path
        indices = self._indices(slots)
        self._set_step(learning_rate, step)
        pooled = self._table(indices, torch.arange(len(indices) + 1, device=self.device))
        sent = reference.wire_tensor(gradients[positions], wire_dtype).to(self.device)
        clipped = reference.norm_clipped(sent.float() * float(scale), self.optimizer.clip_norm)
        pooled.backward(reference.bounded(clipped))
        if self.hot_bits == 16:  # FBGEMM does not say what it rounds beyond 65504 to
            self._weights[indices] = self._weights.index_select(0, indices).clamp(-MAX_HALF, MAX_HALF)

    def scale(self, slots: np.ndarray, factors: np.ndarray, step: int, row_ids: np.ndarray = NO_ROW_IDS) -> None:
        self._require(slots)
        indices = self._indices(slots)
        self._weights[indices] = self._weights.index_select(0, indices) * self._tensor(factors)[:, None]

    def initialise(self, slots: np.ndarray, row_ids: np.ndarray, spec: TableSpec) -> None:
        weights = cpu.initial_values(row_ids, table_seed(spec), self.dim, spec.init_min, spec.init_max)
        state = np.tile(initial_state(self.optimizer, self.dim), (len(slots), 1))
        self.write(slots, weights, state)

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._require(slots)
        indices = self._indices(slots)
        weights = self._weights.index_select(0, indices).float().cpu().numpy()
        if not self._state:
            return weights, np.zeros((len(slots), 0), np.float32)
        columns = [part.index_select(0, indices) for part in self._state]
        return weights, torch.cat(columns, dim=1).cpu().numpy()

    def write(self, slots: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        self._require(slots)
        indices = self._indices(slots)
        values = self._tensor(weights)
        self._weights[indices] = values if self.hot_bits == 32 else values.clamp(-MAX_HALF, MAX_HALF).half()
        if self._state:
            widths = [part.shape[1] for part in self._state]
            for part, values in zip(self._state, self._tensor(state).split(widths, dim=1), strict=True):
                part[indices] = values

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._require(src)
        self._require(dst)
        source, target = self._indices(src), self._indices(dst)
        for rows in (self._weights, *self._state):
            rows[target] = rows.index_select(0, source)

    def release(self, from_slot: int) -> None:
        target = max(from_slot, min(MIN_CAPACITY, self.max_rows))
        if target * _GROWTH <= self._capacity:
            self._build(target, (self._weights, *self._state))

    def bytes_weights(self, slots: int) -> int:
        return max(slots, self._capacity) * self.dim * self.hot_bits // 8

    def bytes_state(self, slots: int) -> int:
        return max(slots, self._capacity) * self.num_state_columns * 4

    def close(self) -> None:
        self._build(0, ())

    def _build(self, capacity: int, before: tuple[torch.Tensor, ...]) -> None:
        """Makes a TBE of `capacity` rows that holds what fits of `before` (weights, state parts), else zeros."""
        self._table = self._new_table(max(capacity, 1))
        self._capacity = capacity
        self._weights: torch.Tensor = self._table.split_embedding_weights()[0]
        self._state: list[torch.Tensor] = []  # adam: m and v; adagrad and rowwise_adagrad: h, [rows, columns] each
        if self.num_state_columns:
            self._state = [part.view(len(part), -1) for part in self._table.split_optimizer_states()[0]]
        for rows in (self._weights, *self._state):
            rows.zero_()
        for rows, old in zip((self._weights, *self._state), before, strict=bool(before)):
            kept = min(capacity, len(old))
            rows[:kept] = old[:kept]

    def _new_table(self, capacity: int) -> SplitTableBatchedEmbeddingBagsCodegen:
        on_gpu = self.device.type == "cuda"
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(capacity, self.dim, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU)],
            optimizer=_OPTIMIZERS[self.optimizer.kind],
            eps=self.optimizer.eps,
            beta1=self.optimizer.beta1,
            beta2=self.optimizer.beta2,
            weights_precision=SparseType.FP32 if self.hot_bits == 32 else SparseType.FP16,
            stochastic_rounding=self.hot_bits == 16,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,  # slots are ours; the default mode would train row 0 for a bad one
            device=self.device,
        )

    def _require(self, slots: np.ndarray) -> None:
        """Grows the TBE until it holds every one of `slots`."""
        needed = int(slots.max()) + 1 if len(slots) else 0
        if needed <= self._capacity:
            return
        if needed > self.max_rows:
            raise InvalidInput(f"slot {needed - 1} must be below max_rows={self.max_rows} of these hot rows")
        capacity = min(self.max_rows, max(needed, int(self._capacity * _GROWTH)))
        self._build(capacity, (self._weights, *self._state))

    def _set_step(self, learning_rate: float, step: int) -> None:
        self._table.set_learning_rate(learning_rate)
        if self.optimizer.kind != "adam":
            return
        # FBGEMM corrects v before it adds eps to the root; ours, as torch.optim.SparseAdam, adds eps to the root of the
        # uncorrected v. With eps divided by the root of v's correction the two are the same update.
        self._table.update_hyper_parameters({"eps": self.optimizer.eps / (1.0 - self.optimizer.beta2**step) ** 0.5})
        for counter in (self._table.iter, self._table.iter_cpu):
            counter.fill_(step - 1)  # the forward adds one

    def _indices(self, slots: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)
