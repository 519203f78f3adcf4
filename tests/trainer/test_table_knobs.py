"""The knobs of tables: every one reaches the shards' spec, in steps."""

from __future__ import annotations

from typing import Any

import pytest

from embedding_server.errors import InvalidInput
from embedding_server.spec import MAX_STEPS, PolicySpec, ScheduleSpec
from trainer.table_knobs import EmbeddingSection, ShareSchedule, steps_of

BATCH = 100
#: knob path in the job -> (value in the job, field of PolicySpec, value there)
EVERY_KNOB: dict[str, tuple[Any, str, Any]] = {
    "policy": ("compact", "kind", "compact"),
    "hot_bytes": ("2MiB", "hot_bytes", 2 << 20),
    "hot_fraction": (0.25, "hot_fraction", 0.25),
    "idle_samples": (1234, "idle_steps", 12),
    "frozen_bits": (16, "frozen_bits", 16),
    "min_count": (5, "min_count", 5),
    "forget_below": (7, "forget_below", 7),
    "advanced.select": ("random", "select", "random"),
    "advanced.score": ("abs_weight", "score", "abs_weight"),
    "advanced.hot_bits": (16, "hot_bits", 16),
    "advanced.freeze_rounding": ("nearest", "freeze_rounding", "nearest"),
    "advanced.probation_visits": (9, "probation_visits", 9),
    "advanced.half_life_samples": (450, "half_life_steps", 4.5),
    "advanced.schedule": (
        {"kind": "cubic", "warmup_samples": 1000, "samples": 5000, "every_samples": 250},
        "schedule",
        ScheduleSpec(kind="cubic", warmup_steps=10, steps=50, every_steps=3),
    ),
    "advanced.hysteresis": (0.1, "hysteresis", 0.1),
    "advanced.max_moves_fraction": (0.05, "max_moves_fraction", 0.05),
    "advanced.resume": (False, "resume", False),
    "advanced.thaw": ("cold", "thaw", "cold"),
    "advanced.epoch_end": ("forget_rare", "epoch_end", "forget_rare"),
    "advanced.control_fraction": (0.1, "control_fraction", 0.1),
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("path", EVERY_KNOB)
def test_a_knob_reaches_the_spec_of_every_table(path: str) -> None:
    value, field, expected = EVERY_KNOB[path]
    untouched = EmbeddingSection().table_spec("user", BATCH, 0).policy
    for section in (
        EmbeddingSection.model_validate(nested(path, value)),
        EmbeddingSection.model_validate({"tables": {"user": nested(path, value)}}),
    ):
        policy = section.table_spec("user", BATCH, 0).policy
        assert getattr(policy, field) == expected != getattr(untouched, field)
        changed = {name for name in PolicySpec.model_fields if getattr(policy, name) != getattr(untouched, name)}
        assert changed == {field}


def test_every_knob_of_the_shards_can_be_set_in_a_job() -> None:
    assert {field for _, field, _ in EVERY_KNOB.values()} == set(PolicySpec.model_fields)


def test_defaults_and_bounds_are_those_of_the_shards() -> None:
    policy = EmbeddingSection().table_spec("user", BATCH, 0).policy
    steps = {"idle_steps": policy.idle_steps, "half_life_steps": policy.half_life_steps}
    assert policy == PolicySpec(**steps)


def test_the_initial_accumulator_of_the_advanced_section_wins_over_the_default() -> None:
    section = EmbeddingSection.model_validate(
        {"optimizer": {"kind": "adagrad"}, "advanced": {"initial_accumulator": 0.5}, "tables": {"b": {}}}
    )
    for table in ("a", "b"):
        optimizer = section.table_spec(table, BATCH, 0).optimizer
        assert (optimizer.kind, optimizer.initial_accumulator) == ("adagrad", 0.5)


def test_a_warm_up_alone_needs_no_slope() -> None:
    schedule = ShareSchedule(warmup_samples=30).in_steps(BATCH)
    assert schedule == ScheduleSpec(kind="constant", warmup_steps=1, steps=1, every_steps=1)
    assert ShareSchedule().in_steps(BATCH) == ScheduleSpec()


def test_the_score_may_wait_for_a_policy_that_uses_it() -> None:
    idle = EmbeddingSection.model_validate({"policy": "idle", "advanced": {"score": "heat_x_grad"}})
    assert idle.policy_spec(BATCH).score == "heat_x_grad"


def test_steps_of_is_exact_for_large_counts() -> None:
    assert steps_of(10**15 + 1, 10**5) == 10**10


def test_an_idle_time_beyond_all_steps_is_never() -> None:
    policy = EmbeddingSection(idle_samples=10**24).table_spec("user", BATCH, 0).policy
    assert policy.idle_steps == MAX_STEPS


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("half_life_samples", 1, r"table 'user': half_life_steps=1e-06: .*0\.001.*trainer\.batch_size=1000000"),
        ("half_life_samples", 10**20, r"table 'user': half_life_steps=1.*: input should be less"),
        ("init_min", -1e35, r"table 'user': init_min=-1e\+35: input should be greater"),
    ],
)
def test_what_the_shards_refuse_is_named(path: str, value: float, expected: str) -> None:
    section = EmbeddingSection.model_validate({"advanced": {path: value}})
    with pytest.raises(InvalidInput, match=expected):
        section.table_spec("user", 1_000_000, 0)
