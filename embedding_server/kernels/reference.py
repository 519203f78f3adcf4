"""The row kernels once more, in plain torch: one operation after another, the oracle for cpu.py and fbgemm.py.

Arguments and shapes as in cpu.py, except that wire arrays come with the name of their dtype. Arrays in and out are
numpy; slots here are never -1. Frozen rows: frozen_reference.py.
"""

from __future__ import annotations

import numpy as np
import torch

from embedding_server.kernels.hashing import hash_row_ids, mix64
from embedding_server.optimizers import LEAST_FTRL_RATE, MAX_GRADIENT, ROWWISE_FACTOR, adam_step_size
from embedding_server.spec import OptimizerSpec

TORCH_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

LARGEST = torch.finfo(torch.float32).max


def wire_tensor(values: np.ndarray, wire_dtype: str) -> torch.Tensor:
    """Wire values -> tensor of that dtype and shape, a copy (torch takes no read-only or unaligned memory)."""
    carrier = np.int16 if values.dtype.itemsize == 2 else np.float32
    return torch.from_numpy(values.copy().view(carrier)).view(TORCH_WIRE[wire_dtype])


def to_tensor(values: np.ndarray, wire_dtype: str) -> torch.Tensor:
    """Wire values -> float32 tensor of the same shape, a copy."""
    return wire_tensor(values, wire_dtype).float()


def to_wire(values: torch.Tensor, wire_dtype: str, numpy_dtype: np.dtype) -> np.ndarray:
    """float32 tensor -> wire values held in `numpy_dtype` (store.WIRE_NUMPY)."""
    converted = values.to(TORCH_WIRE[wire_dtype])
    carrier = torch.int16 if converted.element_size() == 2 else torch.float32
    return converted.view(carrier).numpy().view(numpy_dtype)


def gather(weights: np.ndarray, slots: np.ndarray, out: np.ndarray, positions: np.ndarray, wire_dtype: str) -> None:
    is_hot = slots >= 0
    rows = torch.from_numpy(weights[slots[is_hot]]).float()
    out[positions[is_hot]] = to_wire(rows, wire_dtype, out.dtype)


def scaled_gradients(gradients: np.ndarray, positions: np.ndarray, wire_dtype: str, scale: float) -> torch.Tensor:
    """float32[n, D]: gradients[positions] * scale."""
    return to_tensor(gradients[positions], wire_dtype) * float(scale)


def apply(
    optimizer: OptimizerSpec,
    weights: np.ndarray,
    state: np.ndarray,
    gradients: torch.Tensor,
    learning_rate: float,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """One step of the formulas in optimizers.py: float32[n, D], [n, C] and [n, D] -> new weights and state."""
    w, h, g = torch.from_numpy(weights), torch.from_numpy(state), norm_clipped(gradients, optimizer.clip_norm)
    if optimizer.kind != "rowwise_adagrad":
        g = bounded(g)
    match optimizer.kind:
        case "sgd":
            w = w - learning_rate * g
        case "adagrad":
            h = h + g * g
            w = w - learning_rate * g / (h.sqrt() + optimizer.eps)
        case "rowwise_adagrad":
            squares = g.double().square().sum(dim=1, keepdim=True)
            g = torch.where(squares > MAX_GRADIENT**2, ROWWISE_FACTOR * g, g)
            h = h + (squares.clamp(max=MAX_GRADIENT**2) / g.shape[1]).float()
            w = w - learning_rate / (h.sqrt() + optimizer.eps) * g
        case "adam":
            m, v = h.chunk(2, dim=1)
            m = optimizer.beta1 * m + (1.0 - optimizer.beta1) * g
            v = optimizer.beta2 * v + (1.0 - optimizer.beta2) * g * g
            w = w - adam_step_size(optimizer, learning_rate, step) * m / (v.sqrt() + optimizer.eps)
            w = w.clamp(-LARGEST, LARGEST)
            h = torch.cat([m, v], dim=1)
        case "ftrl":
            w, h = _ftrl(optimizer, w, h, g, learning_rate)
    return w.numpy(), h.numpy()


def _ftrl(
    optimizer: OptimizerSpec, w: torch.Tensor, h: torch.Tensor, g: torch.Tensor, learning_rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """McMahan's formulas as optimizers.py has them, in float64."""
    w, h, g = w.double(), h.double(), g.double()
    n, z = h.chunk(2, dim=1)
    l1, l2, beta = optimizer.ftrl_l1, optimizer.ftrl_l2, optimizer.ftrl_beta + optimizer.eps
    grown = n + g * g
    if learning_rate < LEAST_FTRL_RATE:  # the step has no length
        return w.float(), torch.cat([grown, z], dim=1).float()
    before, after = beta + n.sqrt(), beta + grown.sqrt()
    z = torch.where(w != 0, -w * (before / learning_rate + l2) - w.sign() * l1, z)
    z = z + g - (after - before) / learning_rate * w
    w = torch.where(z.abs() <= l1, 0.0, -(z - z.sign() * l1) / (after / learning_rate + l2)).float()
    return w, torch.cat([grown, torch.where(w == 0, z, 0.0)], dim=1).float()


def norm_clipped(gradients: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """float32[n, D] with every row's L2 norm brought down to clip_norm; 0: as they are."""
    if clip_norm == 0.0:
        return gradients
    norms = gradients.double().norm(dim=1, keepdim=True)
    return (gradients * torch.where(norms > clip_norm, clip_norm / norms, 1.0)).float()


def bounded(gradients: torch.Tensor) -> torch.Tensor:
    """float32[n, D] with no value too large."""
    return gradients.clamp(-MAX_GRADIENT, MAX_GRADIENT)


def initial_values(row_ids: np.ndarray, seed: int, dim: int, low: float, high: float) -> np.ndarray:
    """int64[n] -> float32[n, dim]; torch has no uint64 arithmetic, so this one is numpy."""
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        base = (hash_row_ids(row_ids) ^ np.uint64(seed))[:, None]
        # hash_row_ids adds the golden ratio and mixes, which is one output of SplitMix64; the d-th is base + d golden
        counters = base + np.arange(dim, dtype=np.uint64) * golden
        bits = hash_row_ids(counters.reshape(-1).view(np.int64)).reshape(len(row_ids), dim)
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    first = np.float32(low)
    highest = max(first, np.nextafter(np.float32(high), np.float32(-np.inf))) if high > low else first
    return np.minimum(first + (np.float32(high) - first) * unit, highest)


def all_finite(values: np.ndarray, wire_dtype: str) -> int:
    """Flat index of the first infinity or NaN, or -1."""
    bad = torch.nonzero(~torch.isfinite(to_tensor(values, wire_dtype)).flatten())
    return int(bad[0]) if len(bad) else -1


def rounding_keys(row_ids: np.ndarray, step: int, purpose: int) -> np.ndarray:
    """int64[n] -> uint32[n]: half_rows.rounding_key."""
    with np.errstate(over="ignore"):
        count = np.uint64(2 * step + purpose) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mix64.py_func(row_ids.astype(np.uint64) + count)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def round_rows(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """float32[n, D] -> float16[n, D]: up with the probability that makes the mean right, as half_rows.py."""
    columns = np.arange(values.shape[1], dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = keys[:, None] + columns * np.uint32(0x9E3779B9)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    share = ((x ^ (x >> np.uint32(16))) >> np.uint32(19)) / 2.0**13
    size = np.minimum(np.abs(values.astype(np.float64)), 65504.0)
    size = np.where(size < 2.0**-14, np.rint(size * 2.0**37) / 2.0**37, size)
    _, exponent = np.frexp(np.maximum(size, 2.0**-14))
    distance = np.exp2(exponent - 11.0)  # between neighbouring float16 values
    rounded = np.minimum(np.floor(size / distance + share) * distance, 65504.0)
    return np.copysign(rounded, values).astype(np.float16)
