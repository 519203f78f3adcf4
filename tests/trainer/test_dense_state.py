"""The dense part on disk: what is restored trains on bit for bit, and nothing damaged is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from embedding_server.errors import SegmentCorrupt
from trainer.dense_state import capture, read_dense, restore, restore_rng

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
PATH = Path("cut/dense.safetensors")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)  # has buffers, one of them an integer
        self.dropout = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(4, 1)
        self.unused = torch.nn.Parameter(torch.ones(2))  # never has a gradient, so the optimizer keeps nothing of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.dropout(self.norm(self.first(x))))
        return out


def made(kind: str, seed: int, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, KINDS[kind](net.parameters(), lr=0.01, **options)


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        net(torch.randn(8, 3)).pow(2).mean().backward()
        optimizer.step()


def captured(net: Net, optimizer: torch.optim.Optimizer, kind: str):
    return capture(net, optimizer, kind, torch.get_rng_state().reshape(1, -1))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_restored_trains_on_bit_for_bit(kind: str) -> None:
    net, optimizer = made(kind, 1)
    train(net, optimizer, 5)
    data = captured(net, optimizer, kind).to_bytes()
    train(net, optimizer, 5)  # changes nothing of what was captured
    other, its_optimizer = made(kind, 2)
    state = read_dense(data, PATH)
    restore(state, other, its_optimizer, kind)
    restore_rng(state, 0, 1)
    train(other, its_optimizer, 5)
    assert equal(net.state_dict(), other.state_dict())
    before, after = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    assert before.keys() == after.keys()
    for position in before:
        assert equal(before[position], after[position])
    if kind != "sgd":
        assert {float(values["step"]) for values in after.values()} == ({10.0, 0.0} if kind == "adagrad" else {10.0})


def test_another_optimizer_begins_anew_and_hyper_parameters_are_the_jobs() -> None:
    net, optimizer = made("adam", 1, weight_decay=0.5)
    train(net, optimizer, 3)
    state = read_dense(captured(net, optimizer, "adam").to_bytes(), PATH)
    assert state.param_groups[0]["weight_decay"] == 0.5
    assert not state.param_groups[0].keys() & {"lr", "params"}
    other, adagrad = made("adagrad", 2)
    fresh = adagrad.state_dict()["state"]
    restore(state, other, adagrad, "adagrad")
    assert equal(other.state_dict(), net.state_dict())
    assert all(equal(fresh[position], values) for position, values in adagrad.state_dict()["state"].items())
    other, adam = made("adam", 2, weight_decay=0.25)
    restore(state, other, adam, "adam")
    assert adam.param_groups[0]["weight_decay"] == 0.25
    assert len(adam.state_dict()["state"]) == 6


def test_each_worker_gets_its_own_random_state_if_there_are_as_many() -> None:
    net, optimizer = made("sgd", 1)
    torch.manual_seed(7)
    first = torch.get_rng_state()
    torch.manual_seed(8)
    second = torch.get_rng_state()
    state = read_dense(capture(net, optimizer, "sgd", torch.stack([first, second])).to_bytes(), PATH)
    restore_rng(state, 1, 2)
    assert torch.equal(torch.get_rng_state(), second)
    restore_rng(state, 2, 3)
    assert torch.equal(torch.get_rng_state(), first)


def _data(change=lambda tensors, metadata: None) -> bytes:
    net, optimizer = made("adam", 1)
    train(net, optimizer, 1)
    data = captured(net, optimizer, "adam").to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors, metadata = load(data), header["__metadata__"]
    change(tensors, metadata)
    return save(tensors, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: m.update(format_version="2"), "of format '2'"),
        (lambda t, m: m.pop("optimizer"), "no dense state"),
        (lambda t, m: m.update(optimizer="lion"), "optimizer 'lion'"),
        (lambda t, m: m.update(param_groups="[" * 100_000), "no dense state"),
        (lambda t, m: t.pop("optimizer.exp_avg.last.weight"), "'exp_avg_sq', 'step'"),
        (lambda t, m: t.update({"optimizer.sum.nothing": torch.ones(1)}), "parameter 'nothing'"),
        (lambda t, m: t.update({"optimizer.exp_avg.last.weight": torch.ones(5)}), "shape"),
        (lambda t, m: t.update({"optimizer.short": torch.ones(5)}), "no dense state"),
        (lambda t, m: t.update({"rng.torch": torch.ones(5, dtype=torch.uint8)}), "rng.torch"),
        (lambda t, m: t.update({"code": torch.ones(1)}), "'code'"),
    ],
)
def test_what_is_no_dense_state_is_refused_with_the_file_named(change, message: str) -> None:
    with pytest.raises(SegmentCorrupt, match=rf"cut/dense\.safetensors.*{message}"):
        read_dense(_data(change), PATH)


def test_a_truncated_file_a_long_header_and_a_pickle_are_refused() -> None:
    data = _data()
    read_dense(data, PATH)
    hostile = [data[:length] for length in range(0, len(data), 101)]
    hostile += [(2**63).to_bytes(8, "little") + data[8:], b"\x80\x04\x95" + data, b"", data + b"x"]
    for bad in hostile:
        with pytest.raises(SegmentCorrupt, match=r"dense\.safetensors"):
            read_dense(bad, PATH)
