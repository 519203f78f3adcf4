"""Heat: how often and how lately a row was visited, in two bytes.

    heat(now) = sum over visits of 2^((visit step - now) / half_life)

Stored is the logarithm at a fixed origin, L = log2(sum 2^(visit step / half_life)), which does not change while a row
is not visited: decay costs nothing and rows of any age compare directly. A visit at step t turns L into
max(L, t') + log2(1 + 2^-|L - t'|) with t' = t / half_life.

Code (uint16): 0 = never visited, else CODES_PER_OCTAVE * L - base, one code being 0.07% of heat. Rounding is stochastic
(seeded by row and step, so that all replicas of a run agree), hence unbiased over many visits. `base` is a pure
function of the step, so that histograms of all shards taken at one step share it; when it moves, every code is lowered
once (`rebase`), rows 16 half-lives idle ending at code 1.

Histogram bins are CODES_PER_BIN codes: 1.1% of heat wide.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from embedding_server.kernels.hashing import hash_row_id, mix64

CODES_PER_OCTAVE = 1024
CODES_PER_BIN = 16
_ORIGIN = 16384.0  # code of "one visit now" right after a rebase: 16 octaves of history below it
CODES_PER_REBASE = 24576.0  # codes between rebases; "now" stays under 40960, so sums of 2^24 visits fit above it
_TO_UNIT = 1.0 / 16777216.0
_BAND_BITS, _MAX_BAND = 8, 31  # CODES_PER_OCTAVE / 4 = 2^8 codes are a band


def _log_table() -> np.ndarray:
    d = np.arange(20 * CODES_PER_OCTAVE, dtype=np.float64) / CODES_PER_OCTAVE
    return (CODES_PER_OCTAVE * np.log2(1.0 + np.exp2(-d))).astype(np.float32)


#: CODES_PER_OCTAVE * log2(1 + 2^(-d / CODES_PER_OCTAVE)); 80 KiB, so that a visit costs no exp and no log
LOG_TABLE = _log_table()


def num_rebases(step: int, half_life_steps: float) -> int:
    """How often the origin has moved by `step`."""
    return int(step / half_life_steps * CODES_PER_OCTAVE // CODES_PER_REBASE)


def now_code(step: int, half_life_steps: float) -> float:
    """Code, not rounded, of a single visit at `step`; in [16384, 40960)."""
    return _ORIGIN + step / half_life_steps * CODES_PER_OCTAVE - CODES_PER_REBASE * num_rebases(step, half_life_steps)


def now_codes(step: int | np.ndarray, half_lives: np.ndarray) -> np.ndarray:
    """now_code for many half-lives at once: float64[n], and one step or int64[n] -> float64[n]."""
    codes = step / half_lives * CODES_PER_OCTAVE
    return _ORIGIN + codes - CODES_PER_REBASE * np.floor(codes / CODES_PER_REBASE)


@njit(inline="always")
def bump(code, now, row_id, step, log_table):
    """Code after one more visit. `now` is now_code(step)."""
    if code == 0:
        x = now
    else:
        d = code - now
        distance = np.int64(abs(d))
        x = max(np.float64(code), now)
        if distance < log_table.shape[0]:
            x += log_table[distance]
    u = np.float64(mix64(hash_row_id(row_id) ^ np.uint64(step)) >> np.uint64(40)) * _TO_UNIT
    return np.uint16(min(65535.0, max(1.0, math.floor(x + u))))


@njit(inline="always")
def whole_code(now):
    """now_code as `band` takes it: codes are whole, so it may be rounded up before it is taken from one."""
    return np.int64(math.ceil(now))


@njit(inline="always")
def band(code, now):
    """uint8 in [0, 31]: min(31, floor(4 log2 heat)) for heat >= 1, 0 below 1: bits of store.Rows. now: whole_code."""
    return np.uint8(min(_MAX_BAND, max(0, (np.int64(code) - now) >> _BAND_BITS)))


def heat_of_codes(codes: np.ndarray, step: int, half_life_steps: float) -> np.ndarray:
    """Heat at `step` as float64, for people and tests; zero for rows never visited."""
    relative = codes.astype(np.float64) - now_code(step, half_life_steps)
    return np.where(codes == 0, 0.0, np.exp2(relative / CODES_PER_OCTAVE))
