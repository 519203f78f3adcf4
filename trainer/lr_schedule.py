"""Learning rates as a function of the step: warm-up, then constant, linear or cosine decay.

    warm-up   step s of w:  base * s / w                                   (the first step is base / w, never 0)
    constant                base
    linear    p done:       base * (1 - p * (1 - final_fraction))
    cosine    p done:       base * (f + (1 - f) * (1 + cos(pi p)) / 2),  f = final_fraction
              p = (s - w) / (d - w) clipped to 0..1, d = steps of the decay

The cosine is that of Loshchilov and Hutter, SGDR (2017), without restarts. The rows' rate travels in each Push, so that
shards need no schedule. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trainer.section import Section


class LearningRate(Section):
    """A schedule in samples, as the job writes it."""

    base: float = Field(gt=0.0, le=1e4, description="learning rate after the warm-up")
    warmup_samples: int = Field(0, ge=0, description="samples over which the rate rises from 0 to base")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    decay_samples: int | None = Field(
        None, ge=1, description="samples at which the decay ends; default: all samples of the job"
    )
    final_fraction: float = Field(0.0, ge=0.0, le=1.0, description="rate at the end of the decay, as a share of base")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A LearningRate in steps. `at(step)` gives the rate of a step, counted from 1."""

    base: float
    warmup_steps: int
    decay: str
    decay_steps: int
    final_fraction: float

    def at(self, step: int) -> float:
        if step < 1:
            raise ValueError(f"step={step}: steps count from 1")
        if step <= self.warmup_steps:
            return self.base * step / self.warmup_steps
        if self.decay == "constant":
            return self.base
        length = max(1, self.decay_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / length)
        remaining = 1.0 - progress if self.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.base * (self.final_fraction + (1.0 - self.final_fraction) * remaining)


def schedule_in_steps(rate: LearningRate, batch_size: int, total_steps: int | None) -> Schedule:
    """`total_steps`: steps of the whole job, None when the reader cannot know it (then a decay needs decay_samples)."""
    if rate.decay != "constant" and rate.decay_samples is None and total_steps is None:
        raise ValueError(
            f"decay={rate.decay!r} ends with the last sample, but this reader does not know how many there are; "
            "set decay_samples"
        )
    warmup = -(-rate.warmup_samples // batch_size)
    if rate.decay_samples is not None:
        decay_steps = -(-rate.decay_samples // batch_size)
    else:
        decay_steps = total_steps or 0
    return Schedule(rate.base, warmup, rate.decay, decay_steps, rate.final_fraction)
