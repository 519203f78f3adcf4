from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks.memory import read_memory
from embedding_server.heap import release_free_heap


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="only glibc has malloc_trim")
def test_what_malloc_holds_free_goes_back_to_the_kernel() -> None:
    blocks = [np.ones(2_000) for _ in range(4_000)]  # 64 MB in blocks too small for maps of their own
    pin = blocks[-1]  # keeps the top of the heap in use, so that free() alone gives nothing back
    blocks.clear()
    before = read_memory().anon_bytes
    release_free_heap()
    assert before - read_memory().anon_bytes > 40_000_000
    assert pin.sum() == 2_000
