"""The kernels of frozen rows once more, in plain torch: the oracle for frozen.py.

Arguments and shapes as in frozen.py, except that frozen rows are uint8[n, row_bytes] of one format, not addresses.
"""

from __future__ import annotations

import numpy as np
import torch

from embedding_server.kernels.hashing import hash_row_ids, mix64
from embedding_server.kernels.reference import round_rows

_FBGEMM_EPSILON = 1e-8
_MAX_4BIT, _LEAST_4BIT_SCALE, _MAX_16BIT = 60_000.0, 2.0**-14, 65_504.0


def choose_bits(weights: np.ndarray, wanted: int) -> np.ndarray:
    """float32[n, D] -> uint8[n]: 0, or the bits that hold the row."""
    w = torch.from_numpy(weights)
    size, span = w.abs().amax(dim=1), w.amax(dim=1) - w.amin(dim=1)
    holds = torch.isfinite(w).all(dim=1)
    if wanted == 16:
        holds &= size <= _MAX_16BIT
    elif wanted != 32:
        holds &= torch.isfinite(span)
    bits = torch.where(holds, wanted, 0)
    if wanted == 4:
        too_fine = (span > 0) & (span / torch.full_like(span, 15.0) < _LEAST_4BIT_SCALE)
        bits[holds & ((size > _MAX_4BIT) | too_fine)] = 8
    return bits.to(torch.uint8).numpy()


def rounding_keys(row_ids: np.ndarray, step: int) -> np.ndarray:
    """int64[n] -> uint32[n]."""
    with np.errstate(over="ignore"):
        mixed = mix64.py_func(hash_row_ids(row_ids) + np.uint64(step))
    return (mixed >> np.uint64(32)).astype(np.uint32)


def _random_units(keys: np.ndarray, dim: int) -> torch.Tensor:
    """uint32[n] -> float32[n, D]: u of every value, in [0, 1)."""
    pairs = np.arange(dim // 2, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = keys[:, None] + pairs * np.uint32(0x9E3779B9)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x = x ^ (x >> np.uint32(16))
    halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], axis=2).reshape(-1, dim)
    return torch.from_numpy((halves / 2.0**16).astype(np.float32))


def _codes(scaled: torch.Tensor, last: int, keys: np.ndarray | None) -> np.ndarray:
    """float32[n, D] in units of the scale -> uint8[n, D], to the nearest, or at random with keys."""
    if keys is None:
        return scaled.round().clamp(0, last).to(torch.uint8).numpy()
    return (scaled.clamp(0, last) + _random_units(keys, scaled.shape[1])).floor().to(torch.uint8).numpy()


def quantise(weights: np.ndarray, bits: int, keys: np.ndarray | None = None) -> np.ndarray:
    """float32[n, D] -> uint8[n, row_bytes]."""
    if bits == 32:
        return weights.copy().view(np.uint8)
    if bits == 16:
        halves = torch.from_numpy(weights).half().numpy() if keys is None else round_rows(weights, keys)
        return halves.view(np.uint8)
    return _quantise_4bit(weights, keys) if bits == 4 else _quantise_8bit(weights, keys)


def _quantise_4bit(weights: np.ndarray, keys: np.ndarray | None) -> np.ndarray:
    w = torch.from_numpy(weights)
    low = w.amin(dim=1, keepdim=True).half()
    span = w.amax(dim=1, keepdim=True) - low.float()
    scale = (span / torch.full_like(span, 15.0)).half()
    inverse = torch.ones_like(span) / scale.float()
    one = (span == 0) | (scale == 0) | torch.isinf(inverse)
    scale, inverse = torch.where(one, 1.0, scale.float()).half(), torch.where(one, 1.0, inverse)
    codes = _codes((w - low.float()) * inverse, 15, keys)
    scale_and_bias = torch.cat([scale, low], dim=1).numpy().view(np.uint8)
    return np.concatenate([codes[:, 0::2] | codes[:, 1::2] << 4, scale_and_bias], axis=1)


def _quantise_8bit(weights: np.ndarray, keys: np.ndarray | None) -> np.ndarray:
    w = torch.from_numpy(weights)
    low, high = w.amin(dim=1, keepdim=True), w.amax(dim=1, keepdim=True)
    span = high - low
    # torch computes number / tensor as a reciprocal and a product, rounded twice; tensor / tensor is a division
    inverse = torch.full_like(span, 255.0) / (span + _FBGEMM_EPSILON)
    codes = _codes((w - low) * inverse, 255, keys)
    scale_and_bias = torch.cat([span / 255.0, low], dim=1).numpy().view(np.uint8)
    return np.concatenate([codes, scale_and_bias], axis=1)


def read_frozen(rows: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """uint8[n, row_bytes] -> float32[n, dim]."""
    if bits == 32:
        return rows.copy().view(np.float32)
    if bits == 16:
        return torch.from_numpy(rows.copy().view(np.float16)).float().numpy()
    code_bytes, dtype = (dim // 2, np.float16) if bits == 4 else (dim, np.float32)
    scale, bias = torch.from_numpy(rows[:, code_bytes:].copy().view(dtype)).double().chunk(2, dim=1)
    codes = rows[:, :code_bytes]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(-1, dim)
    # double holds code * scale exactly, so that the sum is rounded once: what a fused multiply-add gives
    return (torch.from_numpy(codes.copy()).double() * scale + bias).float().numpy()


def error_bound(weights: np.ndarray, bits: int, *, at_random: bool = False) -> np.ndarray:
    """float32[n, D] that `bits` hold -> float64[n, 1 or D]: how far a value may be off; frozen.py derives it."""
    steps = 1.0 if at_random else 0.5
    w = weights.astype(np.float64)
    low, high = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
    if bits == 32:
        return np.zeros_like(low)
    if bits == 16:
        return steps * np.maximum(2.0**-10 * np.abs(w), 2.0**-24)
    if bits == 8:
        size = np.maximum(np.abs(low), np.abs(high))
        return steps * (high - low) / 255 + np.minimum(high - low, 1e-8) + 2.0**-22 * size
    bias_error = np.maximum(2.0**-11 * np.abs(low), 2.0**-25)
    scale = (high - low + bias_error) / 15 * (1 + 2.0**-11)
    return steps * scale + 15 * 2.0**-11 * scale + bias_error + 2.0**-20
