"""ArrayPool: reuse only when nobody can see the array any more."""

from __future__ import annotations

import threading

import numpy as np
import torch

from trainer.buffers import ArrayPool


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_arrays_are_aligned_and_typed() -> None:
    pool = ArrayPool()
    for size in (0, 1, 1000, 100_003):
        for dtype in (np.float32, np.int64, np.uint16):
            array = pool.take(size, dtype)
            assert array.shape == (size,)
            assert array.dtype == dtype
            assert size == 0 or address(array) % 64 == 0


def test_an_array_comes_back_when_its_last_view_is_gone() -> None:
    pool = ArrayPool()
    array = pool.take(100_000, np.float32)
    place = address(array)
    tensor = torch.from_numpy(array).view(100, 1000)
    column = tensor[:, 3]
    del array, tensor
    other = pool.take(100_000, np.float32)
    assert address(other) != place
    del column
    assert address(pool.take(100_000, np.float32)) == place


def test_what_autograd_keeps_is_not_reused() -> None:
    pool = ArrayPool()
    array = pool.take(50_000, np.float32)
    array[:] = 2
    factor = torch.ones(50_000, requires_grad=True)
    product = (torch.from_numpy(array) * factor).sum()
    del array
    pool.take(50_000, np.float32)[:] = 7
    product.backward()
    assert (factor.grad == 2).all()


def test_a_small_request_does_not_hold_a_large_array() -> None:
    pool = ArrayPool()
    large = pool.take(10_000_000, np.uint8)
    place = address(large)
    del large
    assert address(pool.take(100_000, np.uint8)) != place


def test_threads_never_share_an_array() -> None:
    pool, errors = ArrayPool(), []

    def work(mark: int) -> None:
        for _ in range(300):
            array = pool.take(20_000, np.int64)
            array[:] = mark
            if not (array == mark).all():
                errors.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
