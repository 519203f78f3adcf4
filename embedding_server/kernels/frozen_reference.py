"""The kernels of frozen rows once more, in plain torch: the oracle for frozen.py.

Arguments and shapes as in frozen.py, except that frozen rows are uint8[n, row_bytes] instead of addresses.
"""

from __future__ import annotations

import numpy as np
import torch

_FBGEMM_EPSILON = 1e-8


def quantize_8bit(weights: np.ndarray) -> np.ndarray:
    """float32[n, D] -> uint8[n, D+8]: codes, float32 scale, float32 bias."""
    w = torch.from_numpy(weights)
    low, high = w.amin(dim=1, keepdim=True), w.amax(dim=1, keepdim=True)
    span = high - low
    # torch computes number / tensor as a reciprocal and a product, rounded twice; tensor / tensor is a division
    inverse = torch.full_like(span, 255.0) / (span + _FBGEMM_EPSILON)
    codes = ((w - low) * inverse).round().to(torch.uint8)
    scale_and_bias = torch.cat([span / 255.0, low], dim=1).numpy().view(np.uint8)
    return np.concatenate([codes.numpy(), scale_and_bias], axis=1)


def read_frozen(rows: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """uint8[n, row_bytes] -> float32[n, dim]."""
    if bits == 32:
        return rows.copy().view(np.float32)
    scale, bias = torch.from_numpy(rows[:, dim:].copy().view(np.float32)).double().chunk(2, dim=1)
    # double holds code * scale exactly, so that the sum is rounded once: what a fused multiply-add gives
    return (torch.from_numpy(rows[:, :dim].copy()).double() * scale + bias).float().numpy()


def can_freeze(weights: np.ndarray) -> np.ndarray:
    """float32[n, D] -> bool[n]: the row and its range are finite."""
    w = torch.from_numpy(weights)
    return (torch.isfinite(w).all(dim=1) & torch.isfinite(w.amax(dim=1) - w.amin(dim=1))).numpy()
