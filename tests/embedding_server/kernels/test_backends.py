from __future__ import annotations

import logging

import pytest

from embedding_server import kernels
from embedding_server.errors import InvalidInput
from embedding_server.hot_rows import CpuHotRows, ReferenceHotRows
from embedding_server.kernels import choose_backend
from embedding_server.spec import OptimizerSpec


def test_one_line_names_the_choice_and_why_not_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_num_cuda_devices", lambda: 0)
    with caplog.at_level(logging.INFO, logger="embedding_server.kernels"):
        backend = choose_backend("auto")
    assert backend.name == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "row kernels: cpu (numba is present; fbgemm: no CUDA device; reference: for tests)"
    ]


def test_a_gpu_is_taken_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not_fbgemm", lambda: "")
    assert choose_backend("auto").name == "fbgemm"


def test_without_numba_the_reference_is_named_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not_fbgemm", lambda: "no CUDA device")
    monkeypatch.setattr(kernels, "cpu_available", lambda: False)
    backend = choose_backend("auto")
    assert backend.name == "reference"
    assert backend.reason == "slow; fbgemm: no CUDA device; cpu: numba is not installed"
    with pytest.raises(InvalidInput, match="backend='cpu' cannot run here: numba is not installed"):
        choose_backend("cpu")
    monkeypatch.setattr(kernels, "torch_available", lambda: False)
    with pytest.raises(InvalidInput, match="no backend can run here: install numba"):
        choose_backend("auto")


def test_a_named_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_is_installed", lambda module: module != "fbgemm_gpu")
    with pytest.raises(InvalidInput, match="backend='fbgemm' cannot run here: torch and fbgemm_gpu are not both"):
        choose_backend("fbgemm")
    assert kernels.why_not_fbgemm() == "torch and fbgemm_gpu are not both installed"
    with pytest.raises(InvalidInput, match="backend='tpu' is unknown; choose one of auto, cpu, reference, fbgemm"):
        choose_backend("tpu")


def test_a_backend_makes_its_hot_rows() -> None:
    optimizer = OptimizerSpec(kind="adagrad")
    assert type(choose_backend("cpu").hot_rows(8, optimizer, 10)) is CpuHotRows
    assert type(choose_backend("reference").hot_rows(8, optimizer, 10)) is ReferenceHotRows


def test_what_is_available_here() -> None:
    assert kernels.cpu_available()
    assert kernels.torch_available()
    assert kernels._num_cuda_devices() >= 0
