from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import InteractionArch, SparseArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.sparse.jagged_tensor import KeyedTensor

from trainer.dense_kernels import FastInteraction, FastPerceptron, use_fast_layers


class Tower(nn.Module):
    """What a DLRM does with its dense side and its pooled rows."""

    def __init__(self, num_sparse: int = 5, dim: int = 8) -> None:
        super().__init__()
        pairs = (num_sparse + 1) * num_sparse // 2
        self.bottom = MLP(3, [16, dim])
        self.interaction = InteractionArch(num_sparse)
        self.top = MLP(dim + pairs, [16, 4])
        self.last = nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return self.last(self.top(self.interaction(self.bottom(dense), sparse)))


def gradients(model: nn.Module, batch: int, use_bfloat16: bool) -> list[torch.Tensor]:
    """Output, gradient of the rows, gradients of the parameters."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(batch, 3, generator=generator)
    sparse = torch.randn(batch, 5, 8, generator=generator).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_bfloat16):
        out = model(dense, sparse)
    weights = torch.randn(batch, 1, generator=generator)
    (out.float() * weights).sum().backward()
    assert sparse.grad is not None
    return [out.float(), sparse.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def pair_of_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Tower()
    fast = copy.deepcopy(plain)
    assert use_fast_layers(fast) == 5
    return plain, fast


@pytest.mark.parametrize("batch", [1, 2, 33])
def test_float32_layers_equal_torchrecs(batch):
    plain, fast = pair_of_models()
    for ours, theirs in zip(gradients(fast, batch, False), gradients(plain, batch, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 33])
def test_bfloat16_layers_are_as_near_to_float32_as_autocast_is(batch):
    plain, fast = pair_of_models()
    exact = gradients(copy.deepcopy(plain), batch, False)
    for ours, theirs, true in zip(gradients(fast, batch, True), gradients(plain, batch, True), exact, strict=True):
        scale = true.abs().max().item() + 1e-6
        autocast_error = (theirs - true).abs().max().item()
        assert (ours - true).abs().max().item() <= 2 * autocast_error + 0.01 * scale


def test_an_empty_batch_gives_zero_gradients():
    _, fast = pair_of_models()
    out, of_rows, *of_parameters = gradients(fast, 0, False)
    assert out.shape == (0, 1)
    assert of_rows.shape == (0, 5, 8)
    assert all(gradient.abs().sum() == 0 for gradient in of_parameters)


def test_parameters_keep_their_names_and_are_the_same_objects():
    torch.manual_seed(0)
    model = Tower()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    use_fast_layers(model)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model.interaction, FastInteraction)
    assert sum(isinstance(m, FastPerceptron) for m in model.modules()) == 4


def test_what_is_not_torchrecs_own_stays():
    class Custom(Perceptron):
        pass

    model = nn.Sequential(Custom(3, 4), Perceptron(4, 4, activation=torch.sigmoid), Perceptron(4, 4, bias=False))
    assert use_fast_layers(model) == 0


def test_inference_mode_needs_no_gradient():
    plain, fast = pair_of_models()
    dense, sparse = torch.randn(4, 3), torch.randn(4, 5, 8)
    with torch.inference_mode():
        torch.testing.assert_close(fast(dense, sparse), plain(dense, sparse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a", "b"]])
def test_pooled_rows_come_in_the_order_of_the_features(names):
    """A sharded collection may give its features in another order than its configs."""

    class Pooled(nn.Module):
        def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
            return [EmbeddingBagConfig(name=n, embedding_dim=4, num_embeddings=1, feature_names=[n]) for n in "abc"]

        def forward(self, features: object) -> KeyedTensor:
            values = torch.stack([torch.full((2, 4), float(ord(n))) for n in names], dim=1).reshape(2, 12)
            return KeyedTensor(names, [4, 4, 4], values)

    model = nn.Sequential(SparseArch(Pooled()))  # type: ignore[arg-type]
    expected = model(None)
    assert use_fast_layers(model) == 1
    torch.testing.assert_close(model(None), expected)
    assert expected[0, :, 0].tolist() == [97.0, 98.0, 99.0]
