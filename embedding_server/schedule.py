"""Schedules: how a share moves from a first value to a last one over steps. Pure functions of the step.

A schedule is any callable step -> float; `constant`, `linear` and `cubic` make the usual ones. They serve the share of
a table's rows that train (PolicySpec.schedule, from 1 down to hot_fraction) and the sparsity of dense layers (from 0
up).

With p the progress, 0 up to step w = warmup_steps and 1 from step w + n on, n = steps:

    constant   first while step <= w, then last
    linear     first + (last - first) p
    cubic      last + (first - last) (1 - p)^3      Zhu, Gupta, To prune, or not to prune (2017), equation 1

p stands still between multiples of every_steps after the warm-up, so linear with every_steps is a staircase: "dense for
1,000 steps, then 5% more every 500 up to 40%" is `linear(0.0, 0.4, warmup_steps=1000, steps=4000, every_steps=500)`.

Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from embedding_server.errors import InvalidInput
from embedding_server.spec import ScheduleSpec

Schedule = Callable[[int], float]


def constant(last: float, *, first: float | None = None, warmup_steps: int = 0) -> Schedule:
    """`last` at every step; with `first`, that up to step warmup_steps."""
    _check_steps(warmup_steps, 1, 1)
    before = _finite("first", last if first is None else first)
    _finite("last", last)
    return lambda step: before if _step(step) <= warmup_steps else last


def linear(first: float, last: float, *, steps: int, warmup_steps: int = 0, every_steps: int = 1) -> Schedule:
    """From `first` to `last` in a straight line, or a staircase with every_steps > 1."""
    progress = _progress(warmup_steps, steps, every_steps)
    return _between(first, last, progress, lambda p: p)


def cubic(first: float, last: float, *, steps: int, warmup_steps: int = 0, every_steps: int = 1) -> Schedule:
    """From `first` to `last`, fast at the start, where there is most to spare, and slow at the end."""
    progress = _progress(warmup_steps, steps, every_steps)
    return _between(first, last, progress, lambda p: 1.0 - (1.0 - p) ** 3)


def of_spec(spec: ScheduleSpec, first: float, last: float) -> Schedule:
    """The schedule that `spec` names, between these two values."""
    if spec.kind == "constant":
        return constant(last, first=first, warmup_steps=spec.warmup_steps)
    make = {"linear": linear, "cubic": cubic}[spec.kind]
    return make(first, last, steps=spec.steps, warmup_steps=spec.warmup_steps, every_steps=spec.every_steps)


def value_at(schedule: Schedule, step: int, low: float, high: float) -> float:
    """schedule(step), for a schedule of the user's own. InvalidInput if it is not a number in [low, high]."""
    value = schedule(_step(step))
    if not isinstance(value, int | float) or not low <= value <= high:  # nan is in no range
        raise InvalidInput(
            f"the schedule gave {value!r} at step {step}; it must give a number in [{low:g}, {high:g}] at every step"
        )
    return float(value)


def _between(first: float, last: float, progress: Callable[[int], float], shape: Callable[[float], float]) -> Schedule:
    _finite("first", first)
    _finite("last", last)

    def at(step: int) -> float:
        p = progress(step)
        return last if p >= 1.0 else first + (last - first) * shape(p)  # exactly `last` at the end

    return at


def _progress(warmup_steps: int, steps: int, every_steps: int) -> Callable[[int], float]:
    _check_steps(warmup_steps, steps, every_steps)

    def at(step: int) -> float:
        done = max(0, _step(step) - warmup_steps)
        return min(1.0, (done - done % every_steps) / steps)

    return at


def _check_steps(warmup_steps: int, steps: int, every_steps: int) -> None:
    for name, value, least in (("warmup_steps", warmup_steps, 0), ("steps", steps, 1), ("every_steps", every_steps, 1)):
        if value < least:
            raise InvalidInput(f"schedule: {name}={value} must be at least {least}; raise it")


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidInput(f"schedule: {name}={value} must be a finite number; give a share, such as 0.4")
    return value


def _step(step: int) -> int:
    if step < 0:
        raise InvalidInput(f"schedule: step={step} must be 0 or more; steps count from 1")
    return step
