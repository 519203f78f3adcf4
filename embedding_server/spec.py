"""What a table is: TableSpec and its parts, as pydantic models that travel as JSON.

Units are steps here. The job speaks of samples (`idle_samples`, `half_life_samples`); trainer/job.py divides by the
global batch size once, when it makes the specs. Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_DIM = 4096
#: Bound of initial values and accumulators: their sums and differences stay finite in float32.
MAX_INITIAL = 1e30
#: Smallest eps: with 0, a zero gradient on a zero accumulator is 0 / 0, which would make the row NaN.
MIN_EPS = 1e-20
OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
PolicyKind = Literal["off", "idle", "topk"]


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
        description="adagrad, rowwise_adagrad: accumulator of a new row; 0 costs 0.5 to 0.9 AUC points",
    )


class PolicySpec(_Spec):
    """Which rows of a table are hot, and how frozen ones are stored."""

    kind: PolicyKind = "idle"
    idle_steps: int = Field(200, ge=1, description="idle: a hot row without a visit in this many steps freezes")
    hot_fraction: float = Field(0.4, gt=0.0, le=1.0, description="topk: share of the table's rows that train")
    select: Literal["topk", "random"] = Field("topk", description="topk: rank by heat, or by hash (the control)")
    probation_visits: int = Field(4, ge=0, le=255, description="topk: visits that a new row trains whatever its rank")
    half_life_steps: float = Field(
        1000.0, ge=1e-3, le=1e9, description="steps after which a visit counts half in the heat"
    )
    frozen_bits: Literal[8, 32] = Field(8, description="bits per value of a frozen row")
    min_count: int = Field(1, ge=1, le=255, description="visits after which an ID gets a row of its own")


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
