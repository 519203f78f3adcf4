"""The one hash of a row_id. Bucket, index position, tie breaks and initial values all derive from it.

DO NOT CHANGE: segments and snapshots are sorted by the bucket it gives, and initial values must stay the same.
mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford, "mix13").
"""

from __future__ import annotations

import numpy as np
from numba import njit

_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(inline="always")
def mix64(x: np.uint64) -> np.uint64:
    """uint64 -> uint64, a bijection."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@njit(inline="always")
def hash_row_id(row_id: np.int64) -> np.uint64:
    """int64 (all 2^64 patterns) -> uint64. Never zero-biased: row_id 0 maps to mix64(golden ratio)."""
    return mix64(np.uint64(row_id) + _GOLDEN)


@njit(inline="always")
def bucket_of(h: np.uint64, num_buckets: np.uint64) -> np.int64:
    """Bucket of a hash; num_buckets is a power of two and the low bits are used (the index uses the high ones)."""
    return np.int64(h & (num_buckets - np.uint64(1)))


def hash_row_ids(row_ids: np.ndarray) -> np.ndarray:
    """Vectorised hash_row_id in plain numpy: int64[n] -> uint64[n]. The reference in tests."""
    with np.errstate(over="ignore"):
        x = row_ids.astype(np.int64).view(np.uint64) + _GOLDEN
        x = (x ^ (x >> _S30)) * _M1
        x = (x ^ (x >> _S27)) * _M2
        return x ^ (x >> _S31)


def buckets_of(row_ids: np.ndarray, num_buckets: int) -> np.ndarray:
    """Vectorised bucket_of: int64[n] -> int64[n] in [0, num_buckets). The reference in tests."""
    return (hash_row_ids(row_ids) & np.uint64(num_buckets - 1)).astype(np.int64)
