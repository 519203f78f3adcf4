"""The contestants by name: our policies, their controls, and rivals that need no freezing.

Every contestant is what training.py needs to build its tables: a policy of ours with its knobs, the share of the
stream's dim that it uses, and, for a rival whose rows stay quantised, how many bits they have (rivals.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from embedding_server.spec import OptimizerSpec, PolicySpec, ScheduleSpec


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """What updates rows, tuned for `off` alone; and how soon rows freeze: the larger their state, the sooner."""

    spec: OptimizerSpec
    learning_rate: float
    idle: float = 0.01
    reselections: int = 122

    def as_json(self) -> dict[str, Any]:
        return {**self.spec.model_dump(), **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "spec"}}


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to keep a table. `knobs` are fields of PolicySpec; steps are set from the stream's length."""

    summary: str
    knobs: dict[str, Any] = field(default_factory=lambda: {"kind": "off"})
    dim_share: float = 1.0
    quantised_bits: int | None = None  # 4 | 8: every row is kept so, with stochastic rounding after each update
    float_share: float = 0.0  # with quantised_bits: this share of the IDs, by their true counts, stays in float32
    # shares of a data pass:
    idle: float | None = None  # without a visit for so long, a row freezes; None: what suits the optimizer
    half_life: float = 0.25  # of heat
    warm_up: float = 0.0  # before rows are ranked
    reselections: int | None = None  # in a data pass; None: likewise

    def policy(self, steps_per_pass: int, optimizer: RowOptimizer) -> PolicySpec:
        if not self.freezes:
            return PolicySpec(**self.knobs)
        return PolicySpec(
            frozen_bits=4,
            idle_steps=max(2, round((self.idle or optimizer.idle) * steps_per_pass)),
            half_life_steps=max(1.0, self.half_life * steps_per_pass),
            schedule=ScheduleSpec(warmup_steps=round(self.warm_up * steps_per_pass)),
            **self.knobs,
        )

    def reselect_every(self, steps_per_pass: int, optimizer: RowOptimizer) -> int:
        return max(1, steps_per_pass // (self.reselections or optimizer.reselections))

    @property
    def freezes(self) -> bool:
        return self.knobs["kind"] != "off"


_TOPK = {"kind": "topk", "hot_fraction": 0.1, "probation_visits": 4, "resume": False}
#: Without resuming, a rank decides once and for all, and heat of a long memory favours old IDs over new ones that are
#: visited as often: with a half-life of half a data pass the same share of gradients costs three times as much.
_RANKED: dict[str, Any] = {"half_life": 0.006, "reselections": 244}


def _rival_of_min_count(count: int) -> Contestant:
    return Contestant(
        f"an ID gets a row at its visit {count}, until then it reads a trained default row",
        {"kind": "off", "min_count": count},
    )


CONTESTANTS: dict[str, Contestant] = {
    "off": Contestant("every row trains in float32"),
    "idle": Contestant("idle rows freeze to 4 bits, a visit thaws them warm", {"kind": "idle"}),
    "idle-16": Contestant("idle, hot weights in 16 bits", {"kind": "idle", "hot_bits": 16}),
    "compact": Contestant("idle; a row of one visit is forgotten when it turns idle", {"kind": "compact"}),
    "compact-2": Contestant(
        "idle; rows below 3 visits are forgotten, IDs get a row at their 2nd visit",
        {"kind": "compact", "min_count": 2, "forget_below": 3},
    ),
    "topk": Contestant("after 4 visits only the hottest 10% train", _TOPK, **_RANKED),
    "random": Contestant("control: topk by hash", {**_TOPK, "select": "random"}, **_RANKED),
    "cold": Contestant("control: idle with cold accumulators at thaw", {"kind": "idle", "thaw": "cold"}),
    "min-count-2": _rival_of_min_count(2),
    "min-count-3": _rival_of_min_count(3),
    "min-count-5": _rival_of_min_count(5),
    "8-bit": Contestant("every row in 8 bits, stochastic rounding after each update", quantised_bits=8),
    "4-bit-hot": Contestant(
        "every row in 4 bits, stochastic rounding; the top 5% by their true counts in float32",
        quantised_bits=4,
        float_share=0.05,
    ),
    "half-dim": Contestant("every row trains in float32, half as wide", dim_share=0.5),
}

#: accumulator of a new row: gradients of single visits are smaller than the default of 0.1 by far
INITIAL_ACCUMULATOR = 0.001

OPTIMIZERS: dict[str, RowOptimizer] = {
    "rowwise_adagrad": RowOptimizer(
        OptimizerSpec(kind="rowwise_adagrad", initial_accumulator=INITIAL_ACCUMULATOR), 0.05
    ),
    "adagrad": RowOptimizer(OptimizerSpec(kind="adagrad", initial_accumulator=INITIAL_ACCUMULATOR), 0.05, 0.006, 244),
    "adam": RowOptimizer(OptimizerSpec(kind="adam"), 0.001, 0.004, 488),
}
