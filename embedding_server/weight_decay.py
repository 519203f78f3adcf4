"""Decoupled weight decay of the hot rows of a table, settled when a row is next touched.

Each step t takes w <- w (1 - lr_t weight_decay) before its update, of every hot row, also of those that the step does
not name (Loshchilov, Hutter 2019). Rows in the millions that nobody names are not visited for that: the product over
the steps that a row missed is applied later at once. Kept is its logarithm for the table,

    total      = sum over the steps pushed so far of log(1 - lr_t weight_decay)
    settled[s] = total at the first Pull of step s

and a row's last_step, which it has anyway, says what lies in its slot: a row with last_step s stands for

    its values times exp(total - settled[s])        (`pending`)

- A training Pull of step t multiplies the row by exp(settled[t] - settled[s]) and sets last_step to t.
- A Push adds to a row that still has decay pending, that of its own step in any case. The change is divided by
  exp(total - settled[s]), so that what decays later is the old weights and not the update: AdamW's order.
- A look-up and a freeze read values times pending and store nothing. A frozen row does not decay; thawed at
  step t, it is written divided by exp(total - settled[t]).

So it does not matter how many workers pull or push a step, or whether Pull t+1 comes before Push t (pipelined).
The learning rate of a step comes with the table's Push, which trainers send for decaying tables also when it names no
row; a step without a Push decays nothing. The default row is no hot row: it decays at the steps that train it.

8 bytes a step and table: 8 MB in a million steps.

Thread safety: none; it belongs to the table.
"""

from __future__ import annotations

import math

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.reserved import ReservedArray

_MAX_STEPS = 2**31  # last_step is int32
_MOST_AT_ONCE = 0.999  # three steps may be pending at a Push of mode pipelined: 1e-9 is left
_STEPS_KEPT = 64  # a pipelined worker is one step ahead of another at most


class WeightDecay:
    """Invariant: settled[s] is set for every s up to the newest step begun, and never changes."""

    def __init__(self, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        self._settled = ReservedArray(_MAX_STEPS, 1, np.float64)
        self._newest = 0  # step begun
        self._noted: set[int] = set()
        self.total = 0.0
        self.settled_address = int(self._settled.array.ctypes.data)  # float64[steps], for kernels

    @property
    def size_bytes(self) -> int:
        return self._settled.committed_bytes(self._newest + 1)

    def check(self, table: str, learning_rate: float) -> None:
        """InvalidInput if a step of this learning rate would leave next to nothing of a row, or turn its sign."""
        if learning_rate * self._weight_decay > _MOST_AT_ONCE:
            raise InvalidInput(
                f"table {table!r}: learning_rate={learning_rate} times weight_decay={self._weight_decay} must be at"
                f" most {_MOST_AT_ONCE}, for each step takes that share of a row; lower one of them"
            )

    def begin_step(self, step: int) -> None:
        """A Pull of `step`, or the first thaw at it: fixes settled[step] unless an earlier call did."""
        if step > self._newest:
            self._settled.array[self._newest + 1 : step + 1] = self.total
            self._newest = step

    def note(self, step: int, learning_rate: float) -> None:
        """A Push of `step` is about to be applied; the first one of a step counts."""
        if step not in self._noted:
            self._noted = {known for known in self._noted if known > step - _STEPS_KEPT} | {step}
            self.total += math.log1p(-learning_rate * self._weight_decay)

    def factor(self, learning_rate: float) -> float:
        """What one step leaves of a row."""
        return 1.0 - learning_rate * self._weight_decay

    def pending(self, last_steps: np.ndarray) -> np.ndarray:
        """int32[n] -> float32[n]: what rows of these last_steps stand for is this times their values."""
        return np.exp(self.total - self._settled.array[last_steps, 0]).astype(np.float32)

    def owed(self, last_steps: np.ndarray) -> np.ndarray:
        """int32[n] -> float64[n]: the logarithm of `pending`."""
        return self.total - self._settled.array[last_steps, 0]

    def to_settle(self, last_steps: np.ndarray, step: int) -> np.ndarray:
        """int32[n] -> float32[n]: what a Pull of `step` multiplies rows of these last_steps with."""
        settled = self._settled.array
        return np.exp(settled[step, 0] - settled[last_steps, 0]).astype(np.float32)

    def sums(self, step: int) -> np.ndarray:
        """float64[step + 1]: settled[1..step], then total: what the rows of a cut at `step` owe."""
        self.begin_step(step)
        return np.append(self._settled.array[1 : step + 1, 0], self.total)

    def restore(self, sums: np.ndarray) -> None:
        """What `sums` gave."""
        self._newest = sums.shape[0] - 1
        self._settled.array[1 : self._newest + 1, 0] = sums[:-1]
        self.total = float(sums[-1])

    def close(self) -> None:
        self._settled.close()
