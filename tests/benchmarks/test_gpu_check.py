from __future__ import annotations

import numpy as np
import pytest

from benchmarks import gpu_check
from embedding_server.hot_rows import CpuHotRows


class TwiceTheRate(CpuHotRows):
    """A backend with a fault, to see that the comparison finds it."""

    def apply(self, slots, gradients, positions, wire_dtype, scale, learning_rate, step) -> None:  # type: ignore[no-untyped-def]
        super().apply(slots, gradients, positions, wire_dtype, scale, 2 * learning_rate, step)


def test_without_a_gpu_one_line_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "why_not_fbgemm", lambda: "no CUDA device")
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out == "gpu-check: skipped: no CUDA device\n"


@pytest.mark.parametrize("kind", gpu_check.OPTIMIZERS)
def test_the_numba_kernels_pass_the_comparison(kind: gpu_check.OptimizerKind) -> None:
    for wire_dtype in gpu_check.WIRE_DTYPES:
        gpu_check.compare_rows(CpuHotRows, kind, wire_dtype, num_rows=200)


def test_fbgemm_on_its_cpu_path_passes_the_comparison() -> None:
    from embedding_server.kernels.fbgemm import FbgemmHotRows

    gpu_check.compare_rows(FbgemmHotRows, "rowwise_adagrad", "bfloat16", num_rows=200)
    gpu_check.compare_shards("fbgemm", "rowwise_adagrad", num_rows=400)


def test_a_wrong_backend_is_found() -> None:
    with pytest.raises(AssertionError, match="sgd, float32, step 1: differs by"):
        gpu_check.compare_rows(TwiceTheRate, "sgd", "float32", num_rows=200)


def test_difference_is_relative_above_one() -> None:
    one = np.ones(3, np.float32)
    assert gpu_check.difference(100 * one + 0.5, 100 * one, 0.01, "rows") == pytest.approx(0.005)
    with pytest.raises(AssertionError, match="rows: differs by 0.5, tolerance 0.01"):
        gpu_check.difference(one / 2, one, 0.01, "rows")
