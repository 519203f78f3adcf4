"""What a full study must show: each criterion with its figure, its limit and whether it is met.

Savings are the smaller of those at the end of the run and at its peak. A criterion without its cases is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.quality.auc import over_seeds
from benchmarks.quality.comparison import Compared

_RIVALS = ("off", "min-count-2", "min-count-3", "min-count-5")


@dataclass(frozen=True, slots=True)
class Criterion:
    name: str
    figure: str
    is_met: bool


class _Study:
    def __init__(self, compared: Sequence[Compared]) -> None:
        self._by_key = {(c.stream, c.contestant, c.optimizer, c.data_pass): c for c in compared}

    def of(
        self, contestant: str, stream: str = "S1", optimizer: str = "rowwise_adagrad", data_pass: int = 1
    ) -> Compared | None:
        return self._by_key.get((stream, contestant, optimizer, data_pass))


def check(compared: Sequence[Compared]) -> list[Criterion]:
    study = _Study(compared)
    found: list[Criterion | None] = [
        _saves(study.of("idle"), 0.62, 0.05),
        _saves(study.of("idle", optimizer="adagrad"), 0.80, 0.05),
        _saves(study.of("idle", optimizer="adam"), 0.86, 0.05),
        _saves(study.of("idle-16"), 0.68, 0.1),
        _costs_at_most(study.of("compact"), 0.78, 0.2),
        _gains(study.of("compact", data_pass=2)),
        _sends_less(study.of("topk"), 0.18, 0.3),
        *(_above_frontier(study, name) for name in ("idle", "compact")),
        _unhurt(study.of("idle", "S0"), 0.1),
        *(_fails(study, name) for name in ("random", "cold")),
    ]
    return [criterion for criterion in found if criterion is not None]


def saved(c: Compared) -> float:
    return min(c.saved_end, c.saved_peak)


def shown(c: Compared) -> str:
    d = c.difference
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def frontier_at(points: Sequence[tuple[float, float]], share_saved: float) -> float:
    """AUC difference on the frontier of (share saved, AUC difference) points at that share: straight lines between
    them, and level beyond the last, which flatters whoever is on it."""
    ordered = sorted(points)
    return float(np.interp(share_saved, [p[0] for p in ordered], [p[1] for p in ordered]))


def _about(c: Compared) -> str:
    return f"{c.stream} {c.contestant} {c.optimizer} pass {c.data_pass}"


def _with(c: Compared | None, make: Callable[[Compared], Criterion]) -> Criterion | None:
    return None if c is None else make(c)


def _saves(c: Compared | None, least: float, bound: float) -> Criterion | None:
    return _with(
        c,
        lambda c: Criterion(
            f"{_about(c)}: saves >= {least:.0%}, interval inside +-{bound}",
            f"{saved(c):.1%}, {shown(c)}",
            saved(c) >= least and c.difference.is_inside(bound),
        ),
    )


def _costs_at_most(c: Compared | None, least: float, cost: float) -> Criterion | None:
    return _with(
        c,
        lambda c: Criterion(
            f"{_about(c)}: saves >= {least:.0%} at no worse than -{cost}",
            f"{saved(c):.1%}, {shown(c)}",
            saved(c) >= least and c.difference.mean >= -cost,
        ),
    )


def _gains(c: Compared | None) -> Criterion | None:
    return _with(c, lambda c: Criterion(f"{_about(c)}: interval above 0", shown(c), c.difference.low > 0.0))


def _sends_less(c: Compared | None, least: float, cost: float) -> Criterion | None:
    return _with(
        c,
        lambda c: Criterion(
            f"{_about(c)}: sends >= {least:.0%} fewer gradient rows at no worse than -{cost}",
            f"{c.gradient_rows_saved:.1%}, {shown(c)}",
            c.gradient_rows_saved >= least and c.difference.mean >= -cost,
        ),
    )


def _above_frontier(study: _Study, name: str) -> Criterion | None:
    rivals = [rival for rival in map(study.of, _RIVALS) if rival is not None]

    def compare(c: Compared) -> Criterion:
        frontier = frontier_at([(saved(rival), rival.difference.mean) for rival in rivals], saved(c))
        return Criterion(
            f"{_about(c)}: above the min-count frontier at equal bytes",
            f"{c.difference.mean:+.3f} against {frontier:+.3f} at {saved(c):.1%} saved",
            c.difference.mean > frontier,
        )

    return _with(study.of(name), compare) if len(rivals) == len(_RIVALS) else None


def _unhurt(c: Compared | None, bound: float) -> Criterion | None:
    return _with(
        c,
        lambda c: Criterion(f"{_about(c)}: interval inside +-{bound}", shown(c), c.difference.is_inside(bound)),
    )


def _fails(study: _Study, control: str) -> Criterion | None:
    idle, other = study.of("idle"), study.of(control)
    if idle is None or other is None or len(idle.by_seed) != len(other.by_seed) or len(idle.by_seed) < 2:
        return None
    worse = over_seeds([a - b for a, b in zip(other.by_seed, idle.by_seed, strict=True)])
    errors = worse.mean / worse.standard_error if worse.standard_error else float("-inf")
    return Criterion(
        f"{_about(other)}: worse than idle by more than 3 standard errors",
        f"{worse.mean:+.3f}, {errors:.1f} standard errors over {worse.num_seeds} seeds",
        worse.mean < 0.0 and errors < -3.0,
    )
