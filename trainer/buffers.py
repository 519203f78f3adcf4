"""Large arrays that are used again every step, so that no step pays for fresh pages.

glibc returns every array above its mmap threshold to the kernel, and the next step faults its pages in one by one:
27 MB of pooled output cost 1.4 ms that way before a value is written. A trainer that calls services.allocator at its
start does not need this; a user's own script, which we may not reconfigure, does.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

_ALIGNMENT = 64  # a cache line: what streaming stores of 16 floats need
_MIN_BYTES = 1 << 16  # smaller arrays are malloc's own to reuse
_MAX_SPARE = 64  # arrays kept
_PROBE = [np.empty(1)]
_UNUSED_REFERENCES = sys.getrefcount(_PROBE[0])  # what this interpreter counts for an array that only a list holds


class ArrayPool:
    """Hands out uninitialised 1-D arrays aligned to 64 bytes; one is free again when nothing refers to it any more.

    Every view keeps its base alive, torch tensors made by torch.from_numpy included, so the interpreter's
    reference count of the base says when the last reader (an autograd graph, a push in flight, the user) let go.

    Thread safety: any thread may take.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[np.ndarray] = []

    def take(self, size: int, dtype: np.dtype | type) -> np.ndarray:
        """An array of `size` elements, with what the last user left in it."""
        num_bytes = size * np.dtype(dtype).itemsize
        if num_bytes < _MIN_BYTES:
            return _aligned(np.empty(num_bytes + _ALIGNMENT, np.uint8), num_bytes).view(dtype)
        with self._lock:
            return _aligned(self._claim(num_bytes + _ALIGNMENT), num_bytes).view(dtype)

    def _claim(self, num_bytes: int) -> np.ndarray:
        for i in range(len(self._spare)):
            # at most twice too large: a 27 MB array must not be held by a 100 kB request
            fits = num_bytes <= self._spare[i].nbytes <= 2 * num_bytes
            if fits and sys.getrefcount(self._spare[i]) == _UNUSED_REFERENCES:
                self._spare.append(self._spare.pop(i))  # newest last: the oldest unused one is dropped first
                return self._spare[-1]
        array = np.empty(num_bytes + num_bytes // 4, np.uint8)  # room for batches that vary
        if len(self._spare) == _MAX_SPARE:
            self._spare.pop(0)  # whoever still uses it keeps it alive
        self._spare.append(array)
        return array


def _aligned(array: np.ndarray, num_bytes: int) -> np.ndarray:
    skip = -array.__array_interface__["data"][0] % _ALIGNMENT
    return array[skip : skip + num_bytes]
