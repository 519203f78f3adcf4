"""The settings that `frostline tune` tries: a grid over policies and the knobs that decide what they save.

A candidate is a few `--set` lines on top of the job, so that the one picked can be used as it is printed. Knobs of
single tables (`embedding.tables`) stay as the job has them.

Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.job import Job, make_job
from trainer.overlay import overlay

#: idle_samples as parts of the prefix: a run must see rows freeze and come back several times
IDLE_PARTS = (32, 8, 3)
#: compact: (min_count, forget_below)
RARE_ROWS = ((1, 2), (1, 3), (2, 3))
HOT_FRACTIONS = (0.1, 0.2, 0.4)
PROBATIONS = (4, 8)
_RESELECTIONS_IN_IDLE = 2  # so that a row freezes at most half of idle_samples late
_LEAST_STEPS_BETWEEN = 4  # steps between re-selections, which take time too
_RESELECTIONS_IN_PREFIX = 20


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    policy: str
    settings: Mapping[str, Any]  # by path in the job

    def set_lines(self) -> list[str]:
        """What `--set` takes: JSON, which is YAML; `off` stays bare, as people write it."""
        texts = {path: v if isinstance(v, str) else json.dumps(v) for path, v in self.settings.items()}
        return [f"{path}={text}" for path, text in texts.items()]

    def job(self, base: Job) -> Job:
        """The base job, without arms, with the settings laid over it."""
        raw = base.model_dump(mode="json", exclude_unset=True)
        raw.pop("arms", None)
        for path, value in self.settings.items():
            laid: Any = value
            for key in reversed(path.split(".")):
                laid = {key: laid}
            raw = overlay(raw, laid, self.name)
        return make_job(raw)


def baseline() -> Candidate:
    """Every row trains: what the others are compared with."""
    return Candidate("off", "off", {"embedding.policy": "off"})


def grid(base: Job, prefix_samples: int) -> list[Candidate]:
    """All candidates but the baseline: the job as it is, and the grid. prefix_samples: what a run will read."""
    own = base.embedding.policy
    as_it_is = [] if own == "off" else [Candidate("job", own, {})]
    return [*as_it_is, *_idle(base, prefix_samples), *_compact(base, prefix_samples), *_topk(base, prefix_samples)]


def _idle_samples(base: Job, prefix_samples: int) -> Iterator[tuple[int, dict[str, Any]]]:
    batch_size = base.trainer.batch_size
    least = _LEAST_STEPS_BETWEEN * _RESELECTIONS_IN_IDLE * batch_size
    values = (max(least, prefix_samples // part // batch_size * batch_size) for part in IDLE_PARTS)
    for idle in sorted(set(values)):
        between = min(base.embedding.advanced.reselect_every_samples, idle // _RESELECTIONS_IN_IDLE)
        yield idle, {"embedding.idle_samples": idle, "embedding.advanced.reselect_every_samples": between}


def _storage(frozen_bits: int, hot_bits: int) -> dict[str, Any]:
    return {"embedding.frozen_bits": frozen_bits, "embedding.advanced.hot_bits": hot_bits}


def _idle(base: Job, prefix_samples: int) -> Iterator[Candidate]:
    for idle, times in _idle_samples(base, prefix_samples):
        for frozen_bits in (4, 8):
            for hot_bits in (16, 32):
                settings = {"embedding.policy": "idle", **times, **_storage(frozen_bits, hot_bits)}
                settings |= {"embedding.min_count": 1}
                yield Candidate(f"idle {idle}, bits {frozen_bits}/{hot_bits}", "idle", settings)


def _compact(base: Job, prefix_samples: int) -> Iterator[Candidate]:
    for idle, times in _idle_samples(base, prefix_samples):
        for min_count, forget_below in RARE_ROWS:
            for hot_bits in (16, 32):
                settings = {"embedding.policy": "compact", **times, **_storage(4, hot_bits)}
                settings |= {"embedding.min_count": min_count, "embedding.forget_below": forget_below}
                name = f"compact {idle}, admit {min_count}, forget {forget_below}, bits 4/{hot_bits}"
                yield Candidate(name, "compact", settings)


def _topk(base: Job, prefix_samples: int) -> Iterator[Candidate]:
    least = max(_LEAST_STEPS_BETWEEN * base.trainer.batch_size, prefix_samples // _RESELECTIONS_IN_PREFIX)
    between = min(base.embedding.advanced.reselect_every_samples, least)
    for hot_fraction in HOT_FRACTIONS:
        for probation in PROBATIONS:
            settings = {
                "embedding.policy": "topk",
                "embedding.hot_fraction": hot_fraction,
                "embedding.advanced.probation_visits": probation,
                "embedding.advanced.reselect_every_samples": between,
                "embedding.min_count": 1,
                **_storage(4, 32),
            }
            yield Candidate(f"topk {hot_fraction}, probation {probation}, bits 4/32", "topk", settings)
