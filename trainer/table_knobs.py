"""The embedding section of a job: policy, storage and optimizer of the tables, in samples; and its specs, in steps.

    embedding.table_spec("user", batch_size=512, seed=0) -> TableSpec

A user thinks in samples, shards count steps; the conversion stands here and nowhere else. Defaults and bounds of knobs
that are the same in both are those of embedding_server/spec.py. Knobs of a policy that the table does not have do
nothing, so that arms can switch between policies. Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, ValidationError, model_validator

from embedding_server.errors import InvalidInput
from embedding_server.spec import MAX_STEPS, OptimizerSpec, PolicySpec, ScheduleSpec, TableSpec
from embedding_server.store import WireDtype
from trainer.lr_schedule import LearningRate
from trainer.overlay import overlay
from trainer.section import Section, did_you_mean, explain

#: YAML 1.1 reads a bare `off` as false
PolicyName = Annotated[
    Literal["off", "idle", "topk", "compact"], BeforeValidator(lambda value: "off" if value is False else value)
]


def steps_of(samples: int, batch_size: int) -> int:
    """Samples as steps, rounded to the nearest, at least 1."""
    return max(1, (samples + batch_size // 2) // batch_size)


def _as_in(spec: type[BaseModel], name: str) -> Any:
    """The default, bounds and description of a knob that the shards know under the same name and unit."""
    return copy(spec.model_fields[name])


class ShareSchedule(Section):
    """topk: how the share of hot rows falls from 1 to hot_fraction."""

    kind: Literal["constant", "linear", "cubic"] = Field(
        "constant", description="constant: hot_fraction after the warm-up; linear, cubic: falls to it over `samples`"
    )
    warmup_samples: int = Field(0, ge=0, description="samples in which every row trains, before the schedule begins")
    samples: int | None = Field(None, ge=1, description="linear, cubic: samples from share 1 to hot_fraction")
    every_samples: int = Field(1, ge=1, description="the share changes only at multiples of these samples")

    @model_validator(mode="after")
    def _check(self) -> ShareSchedule:
        if self.kind == "constant" and self.samples is not None:
            raise ValueError(
                f"kind='constant' has no slope, and samples={self.samples}; set kind to linear or cubic, or use "
                "warmup_samples alone"
            )
        if self.kind != "constant" and self.samples is None:
            raise ValueError(f"kind={self.kind!r} needs `samples`, from share 1 to hot_fraction; set samples")
        return self

    def in_steps(self, batch_size: int) -> ScheduleSpec:
        return ScheduleSpec(
            kind=self.kind,
            warmup_steps=steps_of(self.warmup_samples, batch_size) if self.warmup_samples else 0,
            steps=steps_of(self.samples, batch_size) if self.samples else 1,
            every_steps=steps_of(self.every_samples, batch_size),
        )


class AdvancedPolicy(Section):
    """Knobs that few need."""

    select: Literal["topk", "random", "score"] = _as_in(PolicySpec, "select")
    score: str = _as_in(PolicySpec, "score")
    hot_bits: Literal[16, 32] = _as_in(PolicySpec, "hot_bits")
    freeze_rounding: Literal["nearest", "stochastic"] = _as_in(PolicySpec, "freeze_rounding")
    probation_visits: int = _as_in(PolicySpec, "probation_visits")
    half_life_samples: int = Field(500_000, ge=1, description="samples after which a visit counts half in the heat")
    schedule: ShareSchedule = ShareSchedule()
    hysteresis: float = _as_in(PolicySpec, "hysteresis")
    max_moves_fraction: float = _as_in(PolicySpec, "max_moves_fraction")
    resume: bool = _as_in(PolicySpec, "resume")
    thaw: Literal["warm", "cold"] = _as_in(PolicySpec, "thaw")
    epoch_end: Literal["keep", "forget_rare"] = _as_in(PolicySpec, "epoch_end")
    control_fraction: float = _as_in(PolicySpec, "control_fraction")
    max_loss: float = Field(
        0.002,
        ge=0.0,
        description="logloss by which rows that may freeze may be worse than the control group's of the same heat; "
        "an event is raised when the lower end of the 95% interval is above it",
    )
    initial_accumulator: float | None = Field(
        None, gt=0.0, le=1e30, description="accumulator of a new row, above 0; default: the optimizer's own"
    )
    init_min: float = Field(-0.01, description="least initial value of a new row")
    init_max: float = Field(0.01, description="bound above the initial values of a new row")


class AllTablesAdvanced(AdvancedPolicy):
    reselect_every_samples: int = Field(
        50_000, ge=1, description="samples between re-selections, which freeze, thaw and forget; one for all tables"
    )


class TableKnobs(Section):
    """Policy and optimizer of every table; `embedding.tables` overrides them table by table."""

    policy: PolicyName = Field(
        "idle",
        description="off: every row trains; idle: unvisited rows freeze; compact: idle, and rare rows are forgotten; "
        "topk: the hottest share trains",
    )
    hot_bytes: ByteSize | None = Field(
        None, ge=1, description="hard cap of the table's hot rows over all shards; bytes, or text like 2GiB"
    )
    hot_fraction: float = _as_in(PolicySpec, "hot_fraction")
    idle_samples: int = Field(
        100_000, ge=1, description="idle, compact: samples without a visit after which a row freezes"
    )
    frozen_bits: Literal[4, 8, 16, 32] = _as_in(PolicySpec, "frozen_bits")
    min_count: int = _as_in(PolicySpec, "min_count")
    forget_below: int = _as_in(PolicySpec, "forget_below")
    optimizer: OptimizerSpec = Field(OptimizerSpec(), description="sparse optimizer of the rows")
    advanced: AdvancedPolicy = AdvancedPolicy()

    @model_validator(mode="after")
    def _check(self) -> TableKnobs:
        advanced = self.advanced
        if self.policy == "topk" and advanced.select != "score" and advanced.score != "heat":
            raise ValueError(
                f"advanced.score={advanced.score!r} ranks nothing with advanced.select={advanced.select!r}; set "
                "advanced.select='score', or remove advanced.score"
            )
        own = self.optimizer.initial_accumulator
        if advanced.initial_accumulator not in (None, own) and own != OptimizerSpec().initial_accumulator:
            raise ValueError(
                f"optimizer.initial_accumulator={own} and advanced.initial_accumulator={advanced.initial_accumulator} "
                "are both given and differ; remove one"
            )
        return self

    def optimizer_spec(self) -> OptimizerSpec:
        if self.advanced.initial_accumulator is None:
            return self.optimizer
        return self.optimizer.model_copy(update={"initial_accumulator": self.advanced.initial_accumulator})

    def policy_spec(self, batch_size: int) -> PolicySpec:
        """`batch_size`: samples of a step, over all workers."""
        advanced = self.advanced
        return PolicySpec(
            kind=self.policy,
            idle_steps=min(steps_of(self.idle_samples, batch_size), MAX_STEPS),  # never, either way
            hot_fraction=self.hot_fraction,
            hot_bytes=self.hot_bytes,
            frozen_bits=self.frozen_bits,
            hot_bits=advanced.hot_bits,
            freeze_rounding=advanced.freeze_rounding,
            min_count=self.min_count,
            forget_below=self.forget_below,
            epoch_end=advanced.epoch_end,
            select=advanced.select,
            score=advanced.score,
            probation_visits=advanced.probation_visits,
            resume=advanced.resume,
            thaw=advanced.thaw,
            half_life_steps=advanced.half_life_samples / batch_size,
            schedule=advanced.schedule.in_steps(batch_size),
            hysteresis=advanced.hysteresis,
            max_moves_fraction=advanced.max_moves_fraction,
            control_fraction=advanced.control_fraction,
        )


class EmbeddingSection(TableKnobs):
    dim: int = Field(32, ge=4, le=4096, multiple_of=4, description="columns of every table")
    wire_dtype: WireDtype = Field("float32", description="type of row values and gradients between trainer and shards")
    pooling: Literal["sum", "mean"] = Field("sum", description="how the rows of a bag become one vector")
    learning_rate: LearningRate = Field(LearningRate(base=0.05), description="rate of the rows")
    advanced: AllTablesAdvanced = AllTablesAdvanced()
    tables: dict[str, dict[str, Any]] = Field({}, description="overrides by table: any of the knobs above but dim")

    def knobs_of(self, table: str) -> TableKnobs:
        """The knobs of one table: those of the section with the table's overrides on top. ValueError names the key."""
        overrides = self.tables.get(table, {})
        names = set(TableKnobs.model_fields)
        base = self.model_dump(include=names)
        del base["advanced"]["reselect_every_samples"]
        where = f"embedding.tables.{table}"
        for key in overrides:
            if key not in names:
                raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(str(key), sorted(names))}")
        advanced = overrides.get("advanced")
        if isinstance(advanced, dict) and "reselect_every_samples" in advanced:
            raise ValueError(
                f"{where}.advanced.reselect_every_samples: a re-selection is one of all tables; set "
                "embedding.advanced.reselect_every_samples"
            )
        try:
            return TableKnobs.model_validate(overlay(base, overrides, where))
        except ValidationError as error:
            text = explain(error, TableKnobs)
            raise ValueError(f"{where}." + text.replace("\n", f"\n{where}.")) from None

    def table_spec(self, table: str, batch_size: int, seed: int) -> TableSpec:
        """InvalidInput if the shards would refuse it."""
        knobs = self.knobs_of(table)
        try:
            return TableSpec(
                name=table,
                dim=self.dim,
                optimizer=knobs.optimizer_spec(),
                policy=knobs.policy_spec(batch_size),
                init_min=knobs.advanced.init_min,
                init_max=knobs.advanced.init_max,
                seed=seed,
            )
        except ValidationError as error:
            raise InvalidInput("; ".join(_refusal(fault, table, batch_size) for fault in error.errors())) from None


def _refusal(fault: Any, table: str, batch_size: int) -> str:
    """What a spec of the shards says of a value that the job's own bounds let through."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:  # a check of the whole spec, which names the table and the values
        return message
    field = ".".join(map(str, fault["loc"]))
    steps = f" (a knob in samples is divided by trainer.batch_size={batch_size})" if field.endswith("_steps") else ""
    return f"table {table!r}: {field}={fault['input']}: {message[:1].lower()}{message[1:]}{steps}"
