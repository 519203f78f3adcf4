"""The steps of one worker between its collection and the store: pull ahead, forward, backward, push. No torch in here.

    announce(features)      a hint ahead of the pull: shards read the batch's frozen rows from disk beside what they do
    prefetch(features)      pull of step t, in any one thread, ahead of its forward
    begin(features)         forward of step t: the prefetched look-ups, or a pull now
    OpenStep.receive(...)   backward: the output's gradient becomes gradients of rows
    step(learning_rate)     push of step t

Each step is pulled once and pushed once, in order. In mode pipelined the forward of t+1 may run before the push of t.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput, NotReady
from embedding_server.store import (
    WIRE_NUMPY,
    EmbeddingStore,
    Identity,
    PushAck,
    RoutedIds,
    TableGradients,
    push_dtype,
)
from trainer.lookup_plan import LookupPlan
from trainer.lookups import Lookups, RowGradients

log = logging.getLogger(__name__)


#: batches that are announced and not pulled yet; of more, the oldest are forgotten, and routed anew if they do come
MAX_ANNOUNCED = 8


class OpenStep:
    """A step whose rows are here and whose gradients are not pushed yet."""

    def __init__(self, step: int, lookups: Lookups) -> None:
        self.step = step
        self.lookups = lookups
        self.row_gradients: dict[str, RowGradients] = {}
        self._output_gradient: np.ndarray | None = None

    def receive(self, output_gradient: np.ndarray) -> None:
        """Takes the output's gradient, float32[size], which nobody changes until the step is pushed.

        A second backward through the same forward (two losses) adds to the first. It is kept for that: gradients in a
        16-bit wire dtype must not be added up.
        """
        if self._output_gradient is not None:
            output_gradient = self._output_gradient + output_gradient
        self.row_gradients = {}  # if the next line refuses, the step has no gradient rather than half of one
        self.row_gradients = self.lookups.row_gradients(output_gradient)
        self._output_gradient = output_gradient


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a Push takes."""

    step: int
    tables: Mapping[str, TableGradients]


class TrainingSteps:
    """Thread safety: one thread may prefetch and push while another runs forward and backward.

    Invariants:
    1. Steps are pulled in order, 1 apart, and a step is counted only when its pull returned.
    2. `_open` holds the steps between forward and push, oldest first.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        plan: LookupPlan,
        who: Identity,
        last_step: int,
        decaying: Mapping[str, int] | None = None,
    ) -> None:
        """decaying: dim of each table with weight decay, whose learning rate every Push carries to every shard."""
        self.who = who
        self._store = store
        self._lock = threading.Lock()  # guards the four below
        self._announced: deque[tuple[KeyedJaggedTensor, Lookups]] = deque(maxlen=MAX_ANNOUNCED)
        self._pulled_step = last_step
        self._ahead: deque[tuple[KeyedJaggedTensor, OpenStep]] = deque()
        self._open: deque[OpenStep] = deque()
        self.use(plan, decaying or {})

    def use(self, plan: LookupPlan, decaying: Mapping[str, int]) -> None:
        """From here on, between two steps, batches go by this plan; what was announced is routed anew."""
        self._no_gradients = {name: _no_gradients(self._store, dim) for name, dim in decaying.items()}
        self._plan = plan
        with self._lock:
            self._announced.clear()

    @property
    def last_pulled_step(self) -> int:
        return self._pulled_step

    @property
    def is_between_steps(self) -> bool:
        """No step is prefetched, and none waits for its push."""
        with self._lock:
            return not self._ahead and not self._open

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Tells the store that `features` will be pulled soon, and keeps its routed look-ups for that pull.

        Never raises: what is wrong with the batch or the store, the pull says. Announcing a batch again does nothing.
        """
        with self._lock:
            if any(of is features for of, _ in self._announced):
                return
        try:
            lookups = self._plan.route(features, for_training=True)
            self._store.prefetch(lookups.ids)
        except Exception as error:
            log.debug("a batch could not be announced: %s", error)
            return
        with self._lock:
            self._announced.append((features, lookups))

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Pulls the rows of the next training forward, which must get the same `features` object."""
        opened = self._pull(features)
        with self._lock:
            self._ahead.append((features, opened))

    def begin(self, features: KeyedJaggedTensor) -> OpenStep:
        with self._lock:
            if self._ahead:
                expected, opened = self._ahead[0]
                if expected is not features:
                    raise InvalidInput(
                        f"step {opened.step} was prefetched with another batch than forward got; run forward on the "
                        "batches, the same objects, in the order in which they were prefetched"
                    )
                self._ahead.popleft()
                self._open.append(opened)
                return opened
            if self._open:
                raise NotReady(
                    f"a training forward came while step {self._open[0].step} has no .step() yet; call .step() after "
                    "loss.backward(), once per training forward (for other forwards use eval() or torch.no_grad())"
                )
        opened = self._pull(features, in_place=self._plan.is_in_place and not self._plan.is_weighted)
        with self._lock:
            self._open.append(opened)
        return opened

    def look_up(self, features: KeyedJaggedTensor) -> Lookups:
        """A read that is not a visit, for evaluation."""
        lookups = self._plan.route(features, for_training=False)
        lookups.attach(self._store.lookup(lookups.ids))
        return lookups

    def take_gradients(self, learning_rate: float) -> StepGradients:
        """Ends the oldest open step and gives what `push` sends; empty if there was no backward."""
        if not math.isfinite(learning_rate):
            raise InvalidInput(f"learning_rate={learning_rate} must be finite; look at the schedule")
        return self._gradients(self._pop_open(), learning_rate)

    def push(self, gradients: StepGradients) -> PushAck:
        return self._store.push(self.who, gradients.step, gradients.tables)

    def step(self, learning_rate: float) -> PushAck:
        """take_gradients and push; after an error the step is still open and step() may be called again."""
        if not math.isfinite(learning_rate):
            raise InvalidInput(f"learning_rate={learning_rate} must be finite; look at the schedule")
        opened = self._pop_open()
        try:
            return self.push(self._gradients(opened, learning_rate))
        except BaseException:
            with self._lock:
                self._open.appendleft(opened)
            raise

    def _pull(self, features: KeyedJaggedTensor, in_place: bool = False) -> OpenStep:
        """in_place: pools within the Pull, as long as the rows cannot move. Gradients of weights need rows later."""
        lookups = self._take_announced(features) or self._plan.route(features, for_training=True)
        step = self._pulled_step + 1
        if in_place:
            self._store.pull_in_place(self.who, step, lookups.ids, lookups.pool_in_place)
        else:
            lookups.attach(self._store.pull(self.who, step, lookups.ids))
        self._pulled_step = step
        return OpenStep(step, lookups)

    def _take_announced(self, features: KeyedJaggedTensor) -> Lookups | None:
        with self._lock:
            if not any(of is features for of, _ in self._announced):
                return None
            while True:
                of, lookups = self._announced.popleft()
                if of is features:  # those before it were skipped, and will hardly come any more
                    return lookups

    def _pop_open(self) -> OpenStep:
        with self._lock:
            if not self._open:
                raise NotReady(
                    ".step() came before a training forward; call it once after each forward and loss.backward()"
                )
            return self._open.popleft()

    def _gradients(self, opened: OpenStep, learning_rate: float) -> StepGradients:
        tables = {
            name: TableGradients(g.ids, g.values, learning_rate, g.default_gradient, g.sums)
            for name, g in opened.row_gradients.items()
        }
        for name, empty in self._no_gradients.items():
            tables.setdefault(name, replace(empty, learning_rate=learning_rate))
        return StepGradients(opened.step, tables)


def _no_gradients(store: EmbeddingStore, dim: int) -> TableGradients:
    """The block of a table in a Push that names none of its rows."""
    ids = RoutedIds(np.empty(0, np.int64), np.zeros(store.num_shards + 1, np.int64))
    return TableGradients(ids, np.empty((0, dim), WIRE_NUMPY[push_dtype(store.wire_dtype)]), 0.0)
