from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.reserved import PAGE_BYTES, PackedArray, ReservedArray


def resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no Rss line")


def test_reserving_commits_nothing_and_rows_commit_as_they_are_written() -> None:
    before = resident_bytes()
    reserved = ReservedArray(1 << 30, 64, np.float32)  # 256 GiB of address space
    assert reserved.array.shape == (1 << 30, 64)
    assert resident_bytes() - before < 4 << 20
    reserved.array[:40_000] = 1.0
    grown = resident_bytes() - before
    assert grown >= 40_000 * 256 - (1 << 20)
    assert grown < 40_000 * 256 + (4 << 20)
    reserved.close()
    assert resident_bytes() - before < 4 << 20


def test_release_returns_whole_pages_and_leaves_zeros() -> None:
    reserved = ReservedArray(200_000, 64, np.float32)
    reserved.array[:100_000] = 3.0
    before = resident_bytes()
    reserved.release(1_003)
    assert before - resident_bytes() > 98_000 * 256
    assert (reserved.array[:1_003] == 3.0).all()
    assert not reserved.array[1_003:100_000].any()
    reserved.array[1_003] = 5.0
    assert reserved.array[1_003].sum() == 5.0 * 64


def test_the_address_stays_while_rows_arrive_and_after_a_release() -> None:
    reserved = ReservedArray(1 << 20, 4, np.uint8)
    address = reserved.array.ctypes.data
    assert address % PAGE_BYTES == 0
    reserved.array[:] = 1
    reserved.release(0)
    assert reserved.array.ctypes.data == address


def test_a_view_outlives_close() -> None:
    reserved = ReservedArray(100, 4, np.int64)
    view = reserved.array[:10]
    view[:] = 7
    reserved.close()
    assert (view == 7).all()
    assert reserved.array.shape == (0, 4)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0)])
def test_empty_arrays_are_allowed(shape: tuple[int, int]) -> None:
    reserved = ReservedArray(*shape, np.float32)
    assert reserved.array.shape == shape
    reserved.release(shape[0])
    assert reserved.committed_bytes(shape[0]) == 0
    reserved.close()


def test_bad_sizes_are_refused_with_the_rule() -> None:
    with pytest.raises(InvalidInput, match="max_rows=-1"):
        ReservedArray(-1, 4, np.float32)
    with pytest.raises(InvalidInput, match="memory_limit_bytes"):
        ReservedArray(1 << 60, 4096, np.float32)
    reserved = ReservedArray(10, 4, np.float32)
    with pytest.raises(InvalidInput, match=r"from_row=11 must be in \[0, 10\]"):
        reserved.release(11)


@settings(max_examples=50, deadline=None)
@given(
    columns=st.integers(1, 300),
    dtype=st.sampled_from([np.uint8, np.float32, np.int64]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 64)), max_size=12),
)
def test_writes_and_releases_equal_a_plain_array(columns: int, dtype: type, steps: list[tuple[bool, int]]) -> None:
    reserved = ReservedArray(64, columns, dtype)
    model = np.zeros((64, columns), dtype)
    for value, (is_release, row) in enumerate(steps, start=1):
        if is_release:
            reserved.release(row)
            model[row:] = 0
        else:
            reserved.array[:row] = value
            model[:row] = value
        np.testing.assert_array_equal(reserved.array, model)
    assert 0 <= reserved.committed_bytes(64) - 64 * columns * np.dtype(dtype).itemsize < PAGE_BYTES


def test_a_packed_array_takes_the_bytes_of_its_rows_and_no_pages():
    packed = PackedArray(3, 5, np.float32)
    packed.array[:] = 1.5
    assert (packed.array.shape, packed.committed_bytes(3), packed.max_rows) == ((3, 5), 60, 3)
    packed.close()
    assert packed.array.shape == (0, 5)
