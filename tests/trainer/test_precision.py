from __future__ import annotations

import logging

import pytest
import torch
from torchrec.modules.mlp import MLP, Perceptron

from trainer import precision
from trainer.dense_kernels import FastPerceptron
from trainer.precision import Precision, choose_precision


@pytest.fixture(autouse=True)
def restore():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("has_units", "name"), [(True, "bfloat16"), (False, "float32")])
def test_auto_follows_the_cpu_and_says_so(has_units, name, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_units})
    with caplog.at_level(logging.INFO):
        assert choose_precision("auto") == Precision(name)
    assert [name in message for message in caplog.messages] == [True]


def test_a_named_precision_is_taken_whatever_the_cpu(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16_units", lambda: False)
    assert choose_precision("bfloat16") == Precision("bfloat16")


@pytest.mark.parametrize(
    ("name", "layer"), [("float32", FastPerceptron), ("medium", Perceptron), ("bfloat16", FastPerceptron)]
)
def test_layers_of_each_precision(name, layer):
    model = torch.nn.Sequential(MLP(4, [4, 4]))
    chosen = Precision(name)
    chosen.prepare(model)
    assert sum(type(m) is layer for m in model.modules()) == 2


def test_medium_is_left_when_another_is_activated():
    Precision("medium").activate()
    assert torch.get_float32_matmul_precision() == "medium"
    Precision("float32").activate()
    assert torch.get_float32_matmul_precision() == "highest"


def test_bfloat16_reaches_layers_and_leaves_parameters_alone():
    torch.manual_seed(0)
    model = torch.nn.Sequential(MLP(8, [16, 4]))
    chosen = Precision("bfloat16")
    chosen.prepare(model)
    with chosen.context():
        out = model(torch.randn(6, 8))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
