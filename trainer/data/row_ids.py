"""row_ids from words and from other row_ids: 64-bit hashes, so that no vocabulary has to be built or shipped.

With n IDs in a table two of them share a row_id with probability about n^2 / 2^65: 3e-6 for ten million.
DO NOT CHANGE: trained rows are found again by these numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from embedding_server.kernels.hashing import hash_row_ids

_ODD = np.uint64(0x9E3779B97F4A7C15)


def word_id(word: str) -> int:
    """int64 of a word: the first 8 bytes of its UTF-8's BLAKE2b, little-endian."""
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "little", signed=True)


def word_ids(words: Iterable[str]) -> np.ndarray:
    """word_id of each word, int64[n]; every distinct word is hashed once."""
    seen: dict[str, int] = {}
    return np.fromiter((seen[w] if w in seen else seen.setdefault(w, word_id(w)) for w in words), np.int64)


def cross_ids(first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """row_ids of a crossed feature, int64[n], from the int64[n] of its parts; the order of the parts matters."""
    h = hash_row_ids(np.ascontiguousarray(first, np.int64))
    with np.errstate(over="ignore"):
        for other in others:
            h = hash_row_ids((h * _ODD + np.ascontiguousarray(other, np.int64).view(np.uint64)).view(np.int64))
    return h.view(np.int64)
