from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.schedule import constant, cubic, linear, of_spec, value_at
from embedding_server.spec import ScheduleSpec

shares = st.floats(0.0, 1.0)
steps = st.integers(0, 10_000)


def test_a_staircase_of_five_percent_every_500_steps_after_a_dense_thousand() -> None:
    at = linear(0.0, 0.4, warmup_steps=1000, steps=4000, every_steps=500)
    assert [at(step) for step in (0, 1, 1000, 1499)] == [0.0] * 4
    assert [round(at(1000 + 500 * k), 12) for k in range(1, 9)] == [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]
    assert at(2499) == at(2000)
    assert at(10**9) == 0.4


def test_cubic_is_the_formula_of_zhu_and_gupta() -> None:
    at = cubic(0.0, 0.8, warmup_steps=100, steps=400)
    for step in (100, 101, 200, 450, 499):
        progress = (step - 100) / 400
        assert at(step) == pytest.approx(0.8 + (0.0 - 0.8) * (1 - progress) ** 3, abs=1e-12)
    assert (at(100), at(500), at(501)) == (0.0, 0.8, 0.8)


def test_constant_is_the_first_value_in_the_warm_up_and_then_the_last() -> None:
    assert [constant(0.3)(step) for step in (0, 1, 99)] == [0.3] * 3
    at = constant(0.3, first=1.0, warmup_steps=5)
    assert [at(step) for step in (0, 1, 5, 6, 7)] == [1.0, 1.0, 1.0, 0.3, 0.3]


@given(shares, shares, st.integers(0, 500), st.integers(1, 3000), st.integers(1, 700), steps, st.integers(0, 500))
def test_every_kind_moves_one_way_from_first_to_last(
    first: float, last: float, warmup: int, length: int, every: int, step: int, later: int
) -> None:
    for make in (linear, cubic):
        at = make(first, last, warmup_steps=warmup, steps=length, every_steps=every)
        low, high = min(first, last), max(first, last)
        assert low - 1e-12 <= at(step) <= high + 1e-12
        change = at(step + later) - at(step)
        assert math.copysign(1.0, change) * (last - first) >= -1e-12 or abs(change) < 1e-12
        assert at(warmup) == first
        assert at(warmup + length + every) == last
        assert at(step) == at(step)
        if step > warmup:  # stands still between multiples of every_steps
            begun = warmup + (step - warmup) // every * every
            assert at(step) == at(begun)


@given(
    st.sampled_from(["constant", "linear", "cubic"]), st.integers(0, 50), st.integers(1, 50), st.integers(1, 9), steps
)
def test_a_spec_names_the_same_functions(kind: str, warmup: int, length: int, every: int, step: int) -> None:
    spec = ScheduleSpec(kind=kind, warmup_steps=warmup, steps=length, every_steps=every)
    at = of_spec(spec, 1.0, 0.4)
    if kind == "constant":
        assert at(step) == (1.0 if step <= warmup else 0.4)
    else:
        make = {"linear": linear, "cubic": cubic}[kind]
        assert at(step) == make(1.0, 0.4, warmup_steps=warmup, steps=length, every_steps=every)(step)


def test_a_callable_of_the_users_own_is_checked_where_it_is_used() -> None:
    assert value_at(lambda step: 1.0 / step, 4, 0.0, 1.0) == 0.25
    assert value_at(lambda step: 1, 4, 0.0, 1.0) == 1.0
    for bad in (math.nan, -0.1, 1.1, math.inf, "0.5", None):
        with pytest.raises(InvalidInput, match=r"gave .* at step 4; it must give a number in \[0, 1\]"):
            value_at(lambda step, bad=bad: bad, 4, 0.0, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(0.0, 1.0, steps=0), "steps=0 must be at least 1"),
        (lambda: cubic(0.0, 1.0, steps=1, warmup_steps=-1), "warmup_steps=-1 must be at least 0"),
        (lambda: linear(0.0, 1.0, steps=1, every_steps=0), "every_steps=0 must be at least 1"),
        (lambda: linear(math.nan, 1.0, steps=1), "first=nan must be a finite number"),
        (lambda: constant(math.inf), "=inf must be a finite number"),
        (lambda: constant(0.5)(-1), "step=-1 must be 0 or more"),
        (lambda: linear(0.0, 1.0, steps=1)(-1), "step=-1 must be 0 or more"),
    ],
)
def test_what_can_never_be_a_schedule_is_refused(make, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_schedules_need_neither_torch_nor_numba() -> None:
    code = "import sys, embedding_server.schedule; assert not {'torch', 'numba'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
