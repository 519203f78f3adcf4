"""Scores: what rows of policy `topk` with `select: score` are ranked by. A registry of functions by name.

    heat                   how often and how lately the row was visited; the same ranks as `select: topk`
    heat_x_grad            heat times the gradient norm of a visit
    abs_weight             mean of |w| over the columns
    abs_weight_x_grad      the same times the gradient norm of a visit

A score is a function of a ScoredRows that returns float64[n], finite and at least 0; higher is kept. A program that
starts shards may add its own before the first table is created:

    register_score("norm", lambda rows: np.linalg.norm(rows.weights, axis=1))

or `frostline shard --scores MODULE`, which imports that module at the start. A job only names a score, it never brings
code; a name that is not registered is refused when the table is created.

Scores are ranked by NUM_RANK_BINS bins of their logarithm: bin 0 holds 0, then 64 bins an octave (1.1% wide) from 2^-40
up; what lies below or above lies in the first or last of them.

Gradient norm. A row keeps the sum of its squared gradients in its optimizer state anyway, so that costs no memory; it
is the gradient as the optimizer saw it, after clipping. Root of the mean square over the row's visits:

    adagrad, ftrl       sqrt(sum_d (h_d - h_0) / visits)       h_0 = initial_accumulator
    rowwise_adagrad     sqrt(D (h - h_0) / visits)
    adam                sqrt(sum_d v_d / (1 - beta2^visits))

A frozen row keeps the mean of h - h_0, or of v, as one byte (optimizers.py), within 9%, so its norm is within 4.5%.
Visits are counted up to 255; the norm of a row with more is too large by sqrt(visits / 255) (adam: by up to 2.1), which
moves rows up that are at the top already. `sgd` keeps no such state, so scores with a gradient refuse it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.heat import heat_of_codes
from embedding_server.index import FROZEN_BIT, INITIAL, Entries
from embedding_server.kernels.cpu import initial_values
from embedding_server.optimizers import decode_accumulator, table_seed
from embedding_server.policy import BINS_PER_OCTAVE
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_RANK_BINS

if TYPE_CHECKING:
    from embedding_server.table import Table

_LOWEST_OCTAVE = -40
_HUGE = 1e38  # stands for what overflowed; products of it are finite in float64
_NAME = re.compile("[a-z][a-z0-9_]{0,63}")


class ScoredRows:
    """n rows of one table, hot and frozen, as a score sees them. What a score does not ask for is not read.

    spec, step; row_ids int64[n]; heat float64[n] at step; is_hot bool[n]. Arrays must not be changed.
    """

    def __init__(self, table: Table, entries: Entries, step: int) -> None:
        self.spec = table.spec
        self.step = step
        self.row_ids = entries.row_ids
        self.heat: np.ndarray = heat_of_codes(entries.heat, step, table.spec.policy.half_life_steps)
        self.is_hot = (entries.locations & FROZEN_BIT) == 0
        self._table = table
        self._locations = entries.locations
        self._hot = np.flatnonzero(self.is_hot)
        self._stored = np.flatnonzero(~self.is_hot & (entries.locations != INITIAL))

    @property
    def _slots(self) -> np.ndarray:
        return self._locations[self._hot].astype(np.int32)

    @cached_property
    def _hot_rows(self) -> tuple[np.ndarray, np.ndarray]:
        return self._table.read_hot(self._slots)

    @cached_property
    def weights(self) -> np.ndarray:
        """float32[n, D]; frozen rows as they would thaw, rows never trained as they start."""
        spec = self.spec
        out = np.empty((self.row_ids.shape[0], spec.dim), np.float32)
        out[self._hot] = self._hot_rows[0]
        out[self._stored] = self._table.segments.read(self._locations[self._stored])
        untouched = np.flatnonzero(self._locations == INITIAL)
        out[untouched] = initial_values(
            self.row_ids[untouched], table_seed(spec), spec.dim, spec.init_min, spec.init_max
        )
        return out

    @cached_property
    def visits(self) -> np.ndarray:
        """int64[n], up to 255; of a frozen row, those up to when it froze; 0: never trained."""
        out = np.zeros(self.row_ids.shape[0], np.int64)
        out[self._hot] = self._table.visits.array[self._slots, 0]
        out[self._stored] = self._table.segments.visits_of(self._locations[self._stored])
        return out

    @cached_property
    def gradient_norm(self) -> np.ndarray:
        """float64[n]: root mean square over the row's visits of the L2 norm of its gradient; see the module's text."""
        spec = self.spec
        _check_gradients_are_kept(spec, "gradient_norm")
        squares = np.zeros(self.row_ids.shape[0])
        squares[self._hot] = _squares_kept(spec, self._hot_rows[1])
        codes = self._table.segments.accumulators_of(self._locations[self._stored])
        squares[self._stored] = _squares_kept(spec, decode_accumulator(spec, codes, spec.dim))
        visits = np.maximum(self.visits, 1).astype(np.float64)
        divisor = 1.0 - spec.optimizer.beta2**visits if spec.optimizer.kind == "adam" else visits
        return np.sqrt(spec.dim * squares / divisor)


def _squares_kept(spec: TableSpec, state: np.ndarray) -> np.ndarray:
    """float32[n, C] state -> float64[n]: mean over the columns of the squared gradients that it holds."""
    kind = spec.optimizer.kind
    columns = state[:, spec.dim :] if kind == "adam" else state[:, : spec.dim]
    start = 0.0 if kind == "adam" else spec.optimizer.initial_accumulator
    squares = columns.mean(axis=1, dtype=np.float64) - np.float64(np.float32(start))
    return np.clip(np.nan_to_num(squares, nan=_HUGE), 0.0, _HUGE)


Score = Callable[[ScoredRows], np.ndarray]


@dataclass(frozen=True, slots=True)
class _Entry:
    score: Score
    needs_gradients: bool


def _abs_weight(rows: ScoredRows) -> np.ndarray:
    """A row that is not finite cannot freeze: it ranks at the top."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.abs(rows.weights).mean(axis=1).astype(np.float64)
    return np.nan_to_num(mean, nan=_HUGE, posinf=_HUGE)


_REGISTRY: dict[str, _Entry] = {
    "heat": _Entry(lambda rows: rows.heat, False),
    "heat_x_grad": _Entry(lambda rows: rows.heat * rows.gradient_norm, True),
    "abs_weight": _Entry(_abs_weight, False),
    "abs_weight_x_grad": _Entry(lambda rows: _abs_weight(rows) * rows.gradient_norm, True),
}


def register_score(name: str, score: Score) -> None:
    """Adds a score under a new name, for all tables created from now on. InvalidInput if the name is taken or odd."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"score {name!r}: a name is a-z, 0-9 and _, a letter first, at most 64; choose such a name")
    if name in _REGISTRY:
        raise InvalidInput(f"score {name!r} is registered already; choose another name")
    _REGISTRY[name] = _Entry(score, False)


def score_names() -> list[str]:
    return sorted(_REGISTRY)


def check_score(spec: TableSpec) -> None:
    """InvalidInput if the table ranks by a score that is not registered, or that its optimizer keeps no state for."""
    policy = spec.policy
    if policy.kind != "topk" or policy.select != "score":
        return
    entry = _REGISTRY.get(policy.score)
    if entry is None:
        near = difflib.get_close_matches(policy.score, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(
            f"table {spec.name!r}: score {policy.score!r} is not registered on this shard{hint} (registered:"
            f" {', '.join(score_names())}); register it when the shard starts: frostline shard --scores MODULE"
        )
    if entry.needs_gradients:
        _check_gradients_are_kept(spec, policy.score)


def _check_gradients_are_kept(spec: TableSpec, what: str) -> None:
    if spec.optimizer.kind == "sgd":
        raise InvalidInput(
            f"table {spec.name!r}: {what!r} needs the size of past gradients, and optimizer sgd keeps no state to tell"
            " it from; use score 'heat' or 'abs_weight', or another optimizer"
        )


def ranks_by_heat(policy: PolicySpec) -> bool:
    return policy.select == "topk" or (policy.select == "score" and policy.score == "heat")


def reads_rows(policy: PolicySpec) -> bool:
    """The table is ranked by more than its index knows."""
    return policy.kind == "topk" and policy.select == "score" and policy.score != "heat"


def score_bins(table: Table, entries: Entries, step: int) -> np.ndarray:
    """The bin that each row is ranked by, int64[n] in [0, NUM_RANK_BINS). InvalidInput if a score is unusable."""
    name = table.spec.policy.score
    rows = ScoredRows(table, entries, step)
    scores = np.asarray(_REGISTRY[name].score(rows), np.float64)
    if scores.shape != rows.row_ids.shape:
        raise InvalidInput(
            f"table {table.spec.name!r}: score {name!r} returned shape {list(scores.shape)} for"
            f" {rows.row_ids.shape[0]} rows; it must return one number a row"
        )
    bad = np.flatnonzero(~((scores >= 0.0) & np.isfinite(scores)))
    if bad.shape[0]:
        raise InvalidInput(
            f"table {table.spec.name!r}: score {name!r} of row_id {int(rows.row_ids[bad[0]])} is {scores[bad[0]]};"
            " scores must be finite and at least 0, mend the function"
        )
    return bins_of_scores(scores)


def bins_of_scores(scores: np.ndarray) -> np.ndarray:
    """float64[n], finite and >= 0, to int64[n]; rises with the score."""
    exponent = np.log2(scores, out=np.full(scores.shape, float(_LOWEST_OCTAVE)), where=scores > 0.0)
    bins = 1.0 + np.floor(BINS_PER_OCTAVE * (exponent - _LOWEST_OCTAVE))
    return np.where(scores > 0.0, np.clip(bins, 1, NUM_RANK_BINS - 1), 0).astype(np.int64)
