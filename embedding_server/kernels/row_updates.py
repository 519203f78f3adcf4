"""One optimizer step of one row, in numba: what cpu.py and updates.py do to every row of a Push.

Formulas and state columns: optimizers.py. row float32[D], state float32[C], gradient float32[D]; the gradient counts
`scale` times. Inner loops run from 0 to D over views, so that LLVM vectorises them without index checks.

error_model="numpy": a division that may raise keeps LLVM from vectorising: Adagrad 6 -> 52 M rows/s of 64, Adam 4 -> 40
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from embedding_server.kernels.half_rows import expand_row, round_row
from embedding_server.kernels.vectors import LANES, add16, at, load16, mul16, scale16, store16, sum16, zero16
from embedding_server.optimizers import LEAST_FTRL_RATE, MAX_GRADIENT, ROWWISE_FACTOR

#: number of each optimizer in kernels
KINDS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "ftrl": 4}
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL = range(5)
#: columns of the constants float32[NUM_CONSTANTS] of a table
EPS, BETA1, BETA2, CLIP_NORM, FTRL_L1, FTRL_L2, FTRL_BETA = range(7)
NUM_CONSTANTS = 7
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST, _MOST, _LEAST_RATE = np.finfo(np.float32).max, np.float32(MAX_GRADIENT), np.float32(LEAST_FTRL_RATE)
_MOST_SQUARED, _HARMLESS = np.float32(MAX_GRADIENT**2), np.float32(ROWWISE_FACTOR)


@njit(inline="always")
def _cut(value, most):
    """value, at most `most` in size; NaN stays."""
    return most if value > most else -most if value < -most else value


@njit(error_model="numpy", forceinline=True)
def _sgd_row(row, gradient, scale, learning_rate):
    for d in range(row.size):
        row[d] -= learning_rate * _cut(gradient[d] * scale, _MOST)


@njit(error_model="numpy", forceinline=True)
def _adagrad_row(row, state, gradient, scale, learning_rate, eps):
    for d in range(row.size):
        g = _cut(gradient[d] * scale, _MOST)
        h = state[d] + g * g
        state[d] = h
        row[d] -= learning_rate * g / (np.sqrt(h) + eps)


@njit(forceinline=True)
def _sum_of_squares(gradient, scale):
    total, d = zero16(), 0
    while d + LANES <= gradient.size:
        g = scale16(load16(gradient, at(d)), scale)
        total = add16(total, mul16(g, g))
        d += LANES
    rest = np.float32(0.0)
    while d < gradient.size:
        g = gradient[d] * scale
        rest += g * g
        d += 1
    return sum16(total) + rest


@njit(error_model="numpy", forceinline=True)
def _rowwise_adagrad_row(row, state, gradient, scale, learning_rate, eps):
    """In explicit vectors: the guards of LLVM's own vector loops took a third of the time of a row of 64."""
    squares = _sum_of_squares(gradient, scale)
    if not squares <= _MOST_SQUARED:  # two selects; cutting value by value, even in a branch apart, took 6%
        squares = _MOST_SQUARED
        scale *= _HARMLESS
    h = state[0] + squares * (_ONE / np.float32(row.size))
    state[0] = h
    multiplier, d = learning_rate / (np.sqrt(h) + eps), 0
    while d + LANES <= row.size:
        change = scale16(scale16(load16(gradient, at(d)), scale), -multiplier)
        store16(row, at(d), add16(load16(row, at(d)), change))
        d += LANES
    while d < row.size:
        row[d] -= multiplier * (gradient[d] * scale)
        d += 1


@njit(error_model="numpy", forceinline=True)
def _adam_row(row, state, gradient, scale, step_size, eps, beta1, beta2):
    """State: D columns of the first moment, then D of the second. step_size holds the bias corrections."""
    dim = row.size
    first, second = state[:dim], state[dim:]
    for d in range(dim):
        g = _cut(gradient[d] * scale, _MOST)
        m = beta1 * first[d] + (_ONE - beta1) * g
        v = beta2 * second[d] + (_ONE - beta2) * (g * g)
        first[d] = m
        second[d] = v
        row[d] = _cut(row[d] - step_size * m / (np.sqrt(v) + eps), _LARGEST)


@njit(error_model="numpy", forceinline=True)
def _ftrl_row(row, state, gradient, scale, learning_rate, constants):
    """State: D columns of n, then D of z. Everything but the stored z is times lr, so that lr = 0 divides nothing.

    Where w is not 0, z is made from it, and the formulas come to u = w - lr g / (b' + lr l2): w' = u on w's side of
    zero; beyond, where l1 counts twice, u less 2 lr l1 / (b' + lr l2), or 0. So no product of w and a root is formed,
    which could overflow, and a zero gradient leaves w exactly as it is.
    """
    dim = row.size
    squares, linear = state[:dim], state[dim:]
    beta = constants[FTRL_BETA] + constants[EPS]
    moves = learning_rate >= _LEAST_RATE
    rate = learning_rate if moves else _ZERO
    l1, l2 = rate * constants[FTRL_L1], rate * constants[FTRL_L2]
    to_stored = _ONE / learning_rate if moves else _ZERO
    for d in range(dim):
        g, w = _cut(gradient[d] * scale, _MOST), row[d]
        n = squares[d] + g * g
        divisor = beta + np.sqrt(n) + l2
        u = w - rate * g / divisor
        stays = (u > _ZERO and w > _ZERO) or (u < _ZERO and w < _ZERO)
        z = -u * divisor - np.copysign(l1, w) if w != _ZERO else linear[d] * rate + rate * g
        excess = abs(z) - l1
        beyond = -np.copysign(excess, z) / divisor if excess > _ZERO else _ZERO
        new = u if stays else beyond
        squares[d] = n
        linear[d] = (z * to_stored if moves else linear[d]) if new == _ZERO else _ZERO
        row[d] = new


@njit(error_model="numpy")
def _clipped(gradient, scale, clip_norm):
    """The scale at which the gradient's L2 norm is at most clip_norm. In float64: squares fit."""
    total = 0.0
    for d in range(gradient.size):
        g = np.float64(gradient[d]) * np.float64(scale)
        total += g * g
    norm = np.sqrt(total)
    return np.float32(scale * (clip_norm / norm)) if norm > clip_norm else scale


@njit(forceinline=True)
def scale_row(row, factor):
    for d in range(row.size):
        row[d] = _cut(row[d] * factor, _LARGEST)  # a factor above 1: weight decay that a thawed row does not owe


@njit(inline="always")
def is_plain(kind, weight_bytes, log_sums, constants):
    """Whether update_plain_row does all that a table's rows need. It is a third of the code of update_row, which shows:
    with everything in one function, updates took 10 to 15% longer."""
    return kind != FTRL and weight_bytes == 4 and log_sums == 0 and constants[CLIP_NORM] == _ZERO


@njit(error_model="numpy", forceinline=True)
def update_plain_row(kind, row, state, gradient, scale, rate, constants):
    """A step that adds to float32 weights. adam: rate = step size."""
    if kind == ROWWISE_ADAGRAD:
        _rowwise_adagrad_row(row, state, gradient, scale, rate, constants[EPS])
    elif kind == SGD:
        _sgd_row(row, gradient, scale, rate)
    elif kind == ADAGRAD:
        _adagrad_row(row, state, gradient, scale, rate, constants[EPS])
    else:
        _adam_row(row, state, gradient, scale, rate, constants[EPS], constants[BETA1], constants[BETA2])


@njit(error_model="numpy", forceinline=True)
def _update_values(kind, row, state, gradient, scale, rate, constants, pending):
    """The step on float32 values that stand for `pending` times themselves (weight_decay.py)."""
    if constants[CLIP_NORM] > _ZERO:
        scale = _clipped(gradient, scale, constants[CLIP_NORM])
    if kind != FTRL:
        update_plain_row(kind, row, state, gradient, scale, rate / pending, constants)
    else:  # its new weights are no sum of the old ones and a change
        scale_row(row, pending)
        _ftrl_row(row, state, gradient, scale, rate, constants)
        scale_row(row, _ONE / pending)


@njit(forceinline=True)
def _update_half_row(kind, row, values, state, gradient, scale, rate, constants, pending, key):
    expand_row(row, values)
    _update_values(kind, values, state, gradient, scale, rate, constants, pending)
    round_row(values, row, key)


def update_row(kind, row, values, state, gradient, scale, rate, constants, pending, key):
    """One step of optimizer KINDS[kind] on one row; constants float32[NUM_CONSTANTS]. adam: rate = step size.

    row float32[D], or int16[D] that holds float16: rounded at random by uint32 key (half_rows.rounding_key), through
    values float32[D].
    pending: what the row's weights stand for is this times what lies there; 1 but for weight decay (weight_decay.py).
    """
    raise NotImplementedError("call from numba kernels only")


@overload(update_row, jit_options={"forceinline": True})
def _update_row(kind, row, values, state, gradient, scale, rate, constants, pending, key):
    if row.dtype == types.float32:

        def update_float32(kind, row, values, state, gradient, scale, rate, constants, pending, key):
            _update_values(kind, row, state, gradient, scale, rate, constants, pending)

        return update_float32

    def update_float16(kind, row, values, state, gradient, scale, rate, constants, pending, key):
        _update_half_row(kind, row, values, state, gradient, scale, rate, constants, pending, key)

    return update_float16


def settle_row(row, values, factor, key):
    """row *= factor, a float32; rows and key as in update_row."""
    raise NotImplementedError("call from numba kernels only")


@overload(settle_row)
def _settle_row(row, values, factor, key):
    if row.dtype == types.float32:
        return lambda row, values, factor, key: scale_row(row, factor)

    def settle_float16(row, values, factor, key):
        expand_row(row, values)
        scale_row(values, factor)
        round_row(values, row, key)

    return settle_float16
