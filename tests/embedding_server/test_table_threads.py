"""How tables and parts of kernels are shared out over threads."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.table_threads import TableThreads, shared_out


def test_shares_hold_every_table_once_and_about_equal_work() -> None:
    sizes = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
    one, two = shared_out(sizes, 2)
    assert sorted([*one, *two]) == list(range(26))
    assert abs(sum(sizes[k] for k in one) - sum(sizes[k] for k in two)) <= 1
    assert [share.tolist() for share in shared_out([5], 3)] == [[0], [], []]
    assert shared_out([], 1)[0].size == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_table_and_every_part_runs_and_errors_surface(num_threads: int) -> None:
    threads = TableThreads(num_threads)
    done = np.zeros(7, np.int64)

    def work(tables: np.ndarray) -> None:
        done[tables] += 1

    threads.run(np.arange(7), work)
    assert done.tolist() == [1] * 7
    parts: list[tuple[int, int]] = []
    threads.run_parts(lambda part, n: parts.append((part, n)))
    assert sorted(parts) == [(part, num_threads) for part in range(num_threads)]

    def fail(part: int, n: int) -> None:
        if part == n - 1:
            raise ValueError("last part")

    with pytest.raises(ValueError, match="last part"):
        threads.run_parts(fail)
    threads.close()
