from __future__ import annotations

import math

import pytest

from trainer.lr_schedule import LearningRate, Schedule, schedule_in_steps


def test_constant() -> None:
    schedule = schedule_in_steps(LearningRate(base=0.5), 100, None)
    assert [schedule.at(step) for step in (1, 2, 10**9)] == [0.5, 0.5, 0.5]


def test_warm_up_rises_from_the_first_step_and_ends_at_base() -> None:
    schedule = schedule_in_steps(LearningRate(base=1.0, warmup_samples=400), 100, None)
    assert [schedule.at(step) for step in (1, 2, 3, 4, 5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_over_the_whole_job() -> None:
    schedule = schedule_in_steps(LearningRate(base=1.0, decay="linear", final_fraction=0.2), 100, 10)
    assert schedule.at(5) == pytest.approx(0.6)
    assert schedule.at(10) == pytest.approx(0.2)
    assert schedule.at(99) == pytest.approx(0.2)


def test_cosine_after_a_warm_up() -> None:
    rate = LearningRate(base=2.0, warmup_samples=200, decay="cosine", decay_samples=1000)
    schedule = schedule_in_steps(rate, 100, 50)
    assert schedule.at(2) == 2.0
    assert schedule.at(6) == pytest.approx(1.0)
    assert schedule.at(4) == pytest.approx(1.0 + math.cos(math.pi / 4))
    assert schedule.at(10) == pytest.approx(0.0)


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(ValueError, match="decay='linear' ends with the last sample.*set decay_samples"):
        schedule_in_steps(LearningRate(base=1.0, decay="linear"), 100, None)
    assert schedule_in_steps(LearningRate(base=1.0, decay="linear", decay_samples=50), 100, None).decay_steps == 1


def test_a_warm_up_longer_than_the_decay_does_not_divide_by_zero() -> None:
    schedule = Schedule(1.0, 10, "linear", 10, 0.0)
    assert schedule.at(10) == 1.0
    assert schedule.at(11) == 0.0


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step=0"):
        Schedule(1.0, 0, "constant", 0, 0.0).at(0)
