"""Which cases a study runs.

full    S1 with off, idle, compact, topk, random and cold thaw over five seeds; everything else, there and on the other
        streams, with one. Pass 2 where it is asked about: off, idle and compact on S1; everything on MovieLens-100K.
smoke   S1 at a fiftieth: enough to see every contestant train, freeze and be compared, in two minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.contestants import CONTESTANTS
from benchmarks.quality.samples import MOVIELENS
from benchmarks.quality.training import Case

SEEDED = ("off", "idle", "compact", "topk", "random", "cold")
_TWO_PASSES = ("off", "idle", "compact")
#: what the acceptance figures ask of other optimizers
_OPTIMIZERS = ("adagrad", "adam")
_NUM_SEEDS = 5
_MOVIELENS_SEEDS = 3
_MOVIELENS_DIM, _MOVIELENS_BATCH = 32, 256


def full_cases() -> list[Case]:
    """Most important first, so that a study that is cut short has said most."""
    cases = [_s1(name, seed) for seed in range(_NUM_SEEDS) for name in SEEDED]
    cases += [_s1(name, 0) for name in CONTESTANTS if name not in SEEDED]
    cases += [Case("S1", name, optimizer) for optimizer in _OPTIMIZERS for name in ("off", "idle")]
    cases += [Case("S0", name) for name in CONTESTANTS]
    cases += [
        Case(MOVIELENS, name, seed=seed, data_passes=2, dim=_MOVIELENS_DIM, batch_size=_MOVIELENS_BATCH)
        for seed in range(_MOVIELENS_SEEDS)
        for name in CONTESTANTS
    ]
    cases += [Case(stream, name) for stream in ("zipf-0.9", "zipf-1.2", "rare-mute") for name in CONTESTANTS]
    return cases


def smoke_cases(names: Sequence[str] = tuple(CONTESTANTS), share: float = 0.02) -> list[Case]:
    return [
        Case("S1", name, data_passes=2 if name in _TWO_PASSES else 1, share=share, batch_size=256) for name in names
    ]


def _s1(name: str, seed: int) -> Case:
    return Case("S1", name, seed=seed, data_passes=2 if name in _TWO_PASSES else 1)
