"""What a table is: TableSpec and its parts, as pydantic models that travel as JSON.

Units are steps here. The job speaks of samples (`idle_samples`, `half_life_samples`); trainer/job.py divides by the
global batch size once, when it makes the specs. Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_DIM = 4096
#: Bound of initial values, accumulators and constants of optimizers: their sums and differences stay finite in float32.
MAX_INITIAL = 1e30
#: Smallest eps: with 0, a zero gradient on a zero accumulator is 0 / 0, which would make the row NaN.
MIN_EPS = 1e-20
#: A row's last step is an int32.
MAX_STEPS = 2**31 - 1
OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
PolicyKind = Literal["off", "idle", "topk", "compact"]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OptimizerSpec(_Spec):
    """The sparse optimizer of a table; formulas in optimizers.py. The learning rate travels in each Push."""

    kind: OptimizerKind = "rowwise_adagrad"
    eps: float = Field(1e-8, ge=MIN_EPS, le=1.0, description="added to the root of the accumulator")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="adam: decay of the first moment")
    beta2: float = Field(0.999, ge=0.0, lt=1.0, description="adam: decay of the second moment")
    initial_accumulator: float = Field(
        0.1,
        ge=0.0,
        le=MAX_INITIAL,
        description="adagrad, rowwise_adagrad, ftrl: accumulator of a new row; 0 costs 0.5 to 0.9 AUC points",
    )
    weight_decay: float = Field(
        0.0, ge=0.0, le=1.0, description="decoupled: each step w <- w (1 - lr * weight_decay) while the row is hot"
    )
    clip_norm: float = Field(
        0.0, ge=0.0, le=MAX_INITIAL, description="a row's gradient is scaled down to this L2 norm; 0: not clipped"
    )
    ftrl_l1: float = Field(
        0.0, ge=0.0, le=MAX_INITIAL, description="ftrl: L1 strength; weights at or below it are exactly 0"
    )
    ftrl_l2: float = Field(0.0, ge=0.0, le=MAX_INITIAL, description="ftrl: L2 strength")
    ftrl_beta: float = Field(1.0, ge=0.0, le=MAX_INITIAL, description="ftrl: added to the root of the accumulator")


class ScheduleSpec(_Spec):
    """How a share moves from 1 (dense) to its final value over steps; see schedule.py."""

    kind: Literal["constant", "linear", "cubic"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="steps at share 1 before the schedule begins")
    steps: int = Field(1, ge=1, description="linear, cubic: steps from share 1 to the final share")
    every_steps: int = Field(
        1, ge=1, description="the share changes only at multiples of this many steps after warm-up"
    )


class PolicySpec(_Spec):
    """Which rows of a table are hot, and how rows are stored."""

    kind: PolicyKind = "idle"
    idle_steps: int = Field(
        200,
        ge=1,
        le=MAX_STEPS,
        description="a row without a visit in this many steps freezes; topk: if it is on probation",
    )
    hot_fraction: float = Field(
        0.4, gt=0.0, le=1.0, description="topk: share of the table's rows that train, of small tables one row at least"
    )
    hot_bytes: int | None = Field(
        None, ge=1, description="hard cap of the table's hot rows, weights and state, over all shards; None: no cap"
    )
    frozen_bits: Literal[4, 8, 16, 32] = Field(
        4, description="bits per value of a frozen row; 8 where 4 would damage it"
    )
    freeze_rounding: Literal["nearest", "stochastic"] = Field(
        "stochastic",
        description="how a row is rounded to frozen_bits; stochastic: up or down at random, right on average, so that "
        "small updates between two freezes are not lost",
    )
    hot_bits: Literal[16, 32] = Field(32, description="bits per weight of a hot row; 16: float16, stochastic rounding")
    min_count: int = Field(1, ge=1, le=255, description="visits after which an ID gets a row of its own")
    forget_below: int = Field(
        2, ge=0, le=255, description="compact, forget_rare: rows with fewer visits are forgotten and not frozen"
    )
    epoch_end: Literal["keep", "forget_rare"] = Field(
        "keep", description="after a pass over the data; forget_rare: rows with fewer than forget_below visits go"
    )
    select: Literal["topk", "random", "score"] = Field(
        "topk", description="topk: rank by heat, by hash (the control that must do worse), or by `score`"
    )
    score: str = Field("heat", min_length=1, max_length=64, description="select score: a name registered in scores.py")
    probation_visits: int = Field(4, ge=0, le=255, description="topk: visits that a new row trains whatever its rank")
    resume: bool = Field(True, description="topk: frozen rows above the frostline thaw at a re-selection")
    thaw: Literal["warm", "cold"] = Field(
        "warm", description="cold: the accumulator starts anew (a control that loses 0.7 to 8.5 AUC points)"
    )
    half_life_steps: float = Field(
        1000.0, ge=1e-3, le=1e9, description="steps after which a visit counts half in the heat"
    )
    schedule: ScheduleSpec = Field(ScheduleSpec(), description="topk: from 1 to hot_fraction")
    hysteresis: float = Field(
        0.0, ge=0.0, le=10.0, description="topk: rows move only if their heat is beyond the frostline by this share"
    )
    max_moves_fraction: float = Field(
        1.0, gt=0.0, le=1.0, description="topk: at most this share of the table's rows moves at a re-selection"
    )
    control_fraction: float = Field(
        0.02, ge=0.0, le=0.5, description="share of the buckets whose rows are never frozen, ranked out or forgotten"
    )


class TableSpec(_Spec):
    """A named set of rows of one dimension, one optimizer and one policy.

    A new row's values are uniform in [init_min, init_max), a pure function of (name, row_id, seed).
    """

    name: str = Field(min_length=1, max_length=255)
    dim: int = Field(description="columns; a multiple of 4, as FBGEMM's kernels need")
    optimizer: OptimizerSpec = OptimizerSpec()
    policy: PolicySpec = PolicySpec()
    init_min: float = Field(-0.01, ge=-MAX_INITIAL, le=MAX_INITIAL)
    init_max: float = Field(0.01, ge=-MAX_INITIAL, le=MAX_INITIAL)
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _check(self) -> TableSpec:
        if self.dim <= 0 or self.dim % 4 or self.dim > MAX_DIM:
            up = min(MAX_DIM, max(4, -(-self.dim // 4) * 4))
            raise ValueError(
                f"table {self.name!r}: dim={self.dim} must be a positive multiple of 4, at most {MAX_DIM}, "
                f"for the FBGEMM kernels; set dim={up}"
            )
        if self.init_min > self.init_max:
            raise ValueError(
                f"table {self.name!r}: init_min={self.init_min} is above init_max={self.init_max}; swap them"
            )
        return self


def differing_fields(known: TableSpec, wanted: TableSpec) -> str:
    """The fields that differ, as `field: known != wanted`."""
    a, b = known.model_dump(), wanted.model_dump()
    return ", ".join(f"{key}: {a[key]} != {b[key]}" for key in a if a[key] != b[key])
