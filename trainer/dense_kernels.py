"""Faster layers for torchrec's models on CPUs: same parameters, same names in state_dict, same results.

`use_fast_layers(model)` puts them in the place of torchrec's Perceptron (linear, then relu or nothing) and of DLRM's
SparseArch and InteractionArch. Under bfloat16 autocast they compute in bfloat16, step by step what autocast would; else
in float32.

What makes them faster (AMD EPYC with AVX-512 and bfloat16 units, DLRM 512-256-64 / 512-512-256-1, batch 4096):
- every product goes through oneDNN; torch hands float32 products to MKL, which picks slow kernels on AMD;
- bias and relu happen inside the product, and backward's weight gradient needs no second copy of the weights;
- pooled rows are viewed as [B, F, D]; torchrec takes them apart by feature and copies them together again, both ways;
- the interaction is a symmetric product, so its backward is one product with a symmetric matrix and not two, and the
  pairs above the diagonal are copied as runs and not gathered one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import nn
from torch.autograd.function import once_differentiable
from torchrec.models.dlrm import InteractionArch, SparseArch
from torchrec.modules.mlp import Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.kernel_threads import KernelThreads

_linear = torch.ops.mkldnn._linear_pointwise


def use_fast_layers(model: nn.Module) -> int:
    """Replaces layers in place; returns how many. Layers that are not exactly torchrec's own are left alone."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fast = _fast_layer(child)
            if fast is not None:
                setattr(parent, name, fast)
                replaced += 1
    return replaced


def _fast_layer(layer: nn.Module) -> nn.Module | None:
    if type(layer) is Perceptron and type(layer._linear) is nn.Linear and layer._linear.bias is not None:
        activation = layer._activation_fn
        if activation is torch.relu or type(activation) is nn.Identity:
            return FastPerceptron(layer._linear, activation is torch.relu)
    if type(layer) is InteractionArch:
        num_sparse: Any = layer.F  # torch types every attribute of a module as Tensor | Module
        return FastInteraction(num_sparse) if num_sparse > 0 else None
    if type(layer) is SparseArch:
        return FastSparse(layer)
    return None


class FastPerceptron(nn.Module):
    """float[B, I] -> [B, O]; float32, or bfloat16 under autocast."""

    def __init__(self, linear: nn.Linear, has_relu: bool) -> None:
        super().__init__()
        self._linear = linear
        self._has_relu = has_relu

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        out: torch.Tensor = _Perceptron.apply(values, weight, bias, self._has_relu, _compute_dtype())
        return out


class FastSparse(nn.Module):
    """KeyedJaggedTensor -> pooled rows float32 [B, F, D], a view of what the collection gave."""

    def __init__(self, layer: SparseArch) -> None:
        super().__init__()
        self.embedding_bag_collection = layer.embedding_bag_collection
        self.sparse_feature_names = layer.sparse_feature_names
        self.F, self.D = layer.F, layer.D

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embedding_bag_collection(features)
        if list(pooled.keys()) == self.sparse_feature_names:
            values = pooled.values()
        else:
            by_name = pooled.to_dict()
            values = torch.cat([by_name[name] for name in self.sparse_feature_names], dim=1)
        return values.reshape(-1, self.F, self.D)


class FastInteraction(nn.Module):
    """dense [B, D], sparse [B, F, D] -> [B, D + (F+1) F / 2]: dense, then the dot products of all pairs of vectors."""

    def __init__(self, num_sparse: int) -> None:
        super().__init__()
        self.F = num_sparse

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Interaction.apply(dense_features, sparse_features, _compute_dtype())
        return out


def _compute_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


class _Perceptron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, has_relu: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.values_dtype = values.dtype
        values, weight = values.to(dtype).contiguous(), weight.to(dtype)
        if values.shape[0]:
            out = _linear(values, weight, bias.to(dtype), "relu" if has_relu else "none", [], "")
        else:
            out = values.new_empty(0, weight.shape[0])
        ctx.save_for_backward(values, weight, out if has_relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, out = ctx.saved_tensors
        gradient = gradient.to(values.dtype).contiguous()
        if out is not None:
            gradient = torch.ops.aten.threshold_backward(gradient, out, 0)
        of_values = _product(gradient, weight).to(ctx.values_dtype) if ctx.needs_input_grad[0] else None
        of_weight = _product(gradient.t(), values).float()
        return of_values, of_weight, gradient.sum(0, dtype=torch.float32), None, None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [N, K] @ right [K, M] through oneDNN."""
    if left.dtype == torch.float32 and left.shape[0] and left.shape[1]:
        return _linear(left, right.t(), None, "none", [], "")
    return left.mm(right)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, sparse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (batch, dim), n = dense.shape, sparse.shape[1] + 1
        vectors = torch.empty(batch, n, dim, dtype=dtype)
        vectors[:, 0], vectors[:, 1:] = dense, sparse
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        out = torch.empty(batch, dim + n * (n - 1) // 2, dtype=dtype)
        out[:, :dim] = dense
        _threads().run(lambda part, parts: take_pairs(_bits(products), _bits(out), dim, part, parts))
        ctx.save_for_backward(vectors)
        ctx.dtypes = dense.dtype, sparse.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (vectors,) = ctx.saved_tensors
        batch, n, dim = vectors.shape
        gradient = gradient.to(vectors.dtype).contiguous()
        pairs = torch.empty(batch, n, n, dtype=vectors.dtype)
        _threads().run(lambda part, parts: spread_pairs(_bits(gradient), _bits(pairs), dim, part, parts))
        of_vectors = torch.bmm(pairs, vectors)
        of_dense = of_vectors[:, 0] + gradient[:, :dim]
        return of_dense.to(ctx.dtypes[0]), of_vectors[:, 1:].to(ctx.dtypes[1]), None


@njit(nogil=True, cache=True)
def take_pairs(products, out, dim, part, parts):
    """out[b, dim:] = products[b] above the diagonal, row by row. products [B, n, n], out [B, dim + n (n-1) / 2]."""
    batch, n = products.shape[0], products.shape[1]
    for b in range(batch * part // parts, batch * (part + 1) // parts):
        at = dim
        for i in range(n):
            for j in range(i + 1, n):
                out[b, at] = products[b, i, j]
                at += 1


@njit(nogil=True, cache=True)
def spread_pairs(gradient, pairs, dim, part, parts):
    """pairs[b] = the symmetric matrix with gradient[b, dim:] above its diagonal and 0 on it."""
    batch, n = pairs.shape[0], pairs.shape[1]
    for b in range(batch * part // parts, batch * (part + 1) // parts):
        at = dim
        for i in range(n):
            pairs[b, i, i] = 0
            for j in range(i + 1, n):
                pairs[b, i, j] = gradient[b, at]
                pairs[b, j, i] = gradient[b, at]
                at += 1


def _bits(values: torch.Tensor) -> np.ndarray:
    """As numba takes it: float32, or the 16 bits of a bfloat16, which kernels here only copy."""
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.int16).numpy()


_POOLS: dict[int, KernelThreads] = {}


def _threads() -> KernelThreads:
    """As many threads as torch uses, kept for the life of the process."""
    num = torch.get_num_threads()
    if num not in _POOLS:
        _POOLS[num] = KernelThreads(num)
    return _POOLS[num]
