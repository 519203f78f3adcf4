"""The sparse optimizers: what each keeps per row, and the one byte of it that a frozen row keeps.

Symbols: w weights of a row, g its gradient (summed over the batch of all workers, divided by their number), D columns,
lr the learning rate of the Push, t the step (global, from 1), the rest from OptimizerSpec. Only rows named by a Push
change. The update kernels are kernels/row_updates.py (numba), kernels/reference.py (torch) and kernels/fbgemm.py.

sgd                 w <- w - lr g
adagrad             h <- h + g^2                        (D values; h = initial_accumulator in a new row)
                    w <- w - lr g / (sqrt(h) + eps)
    Duchi, Hazan, Singer 2011; FBGEMM OptimType.EXACT_ADAGRAD, torch.optim.Adagrad.
rowwise_adagrad     h <- h + mean_d(g_d^2)              (1 value; likewise)
                    w <- w - lr g / (sqrt(h) + eps)
    FBGEMM OptimType.EXACT_ROWWISE_ADAGRAD.
adam                m <- beta1 m + (1 - beta1) g        (D values, 0 in a new row)
                    v <- beta2 v + (1 - beta2) g^2      (D values, 0 in a new row)
                    w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)
    Kingma, Ba 2015, section 2's order of operations; torch.optim.SparseAdam: moments of rows without a gradient rest,
    the bias correction counts global steps.

ftrl                b <- ftrl_beta + eps + sqrt(n)      (n: D values, initial_accumulator in a new row)
                    z <- -w (b / lr + ftrl_l2) - sign(w) ftrl_l1     where w is not 0; elsewhere z is kept (D values)
                    n' = n + g^2, b' = ftrl_beta + eps + sqrt(n')
                    z <- z + g - (b' - b) / lr w
                    w <- 0 if |z| <= ftrl_l1 else -(z - sign(z) ftrl_l1) / (b' / lr + ftrl_l2)
    McMahan et al. 2013, "Ad click prediction", algorithm 1, with its alpha = lr; lr < LEAST_FTRL_RATE does nothing but
    n <- n'. Where w is not 0 it tells z, so the
    second line changes nothing while lr stays; thanks to it w also goes on from where it is when lr changes, when the
    row is new or thaws, and after weight decay. w is stored, not made from z, so that every read is one of w.

clip_norm > 0       g <- g min(1, clip_norm / |g|_2)    first, for every optimizer
                    g <- min(max(g, -MAX_GRADIENT), MAX_GRADIENT)   then, but for rowwise_adagrad: where the sum of its
                    squares exceeds MAX_GRADIENT^2, the sum counts as that and g as ROWWISE_FACTOR g

Thanks to the last line finite gradients keep a row finite. Squares are at most 2^100, and a float32 sum of them stops
growing at 2^25 times the largest, so h and n do not overflow, nor do m and v, which are means. A step changes w by at
most lr / pending 2^50 (sgd; the others divide by the gradient's own size), and lr is at most MAX_LEARNING_RATE, pending
(weight_decay.py) at least 1e-9: less than 2^103, half the distance between the two largest float32, so that w plus the
change rounds to a finite value. Only adam with beta1^2 > beta2 has no such bound: its w is cut to the largest float32.

State columns: sgd none; adagrad h; rowwise_adagrad h; adam m, then v; ftrl n, then z (0 where w is not 0).

A frozen row keeps, as one byte, how much the mean of h (adagrad, rowwise_adagrad) or of n (ftrl, whose z starts from w
again) has gained on initial_accumulator, or the mean of v (adam), on a log scale: quarter octaves from 2^-40 to 2^23.5,
at most 2^(1/8), 9%, off, which is 4.5% of a step or less. The gain and not the sum, because gradients that are means
over a batch add little to an initial accumulator, which would drown them. A thaw that starts from a cold accumulator
instead loses 0.7 to 8.5 AUC points. Code 0 is no gain. DO NOT CHANGE: segments hold these codes.

adam's m is not kept. In a hot row it would still move w at later visits: nine tenths of a gradient come so at beta1 =
0.9, and rows that freeze between visits would lose them. So a freeze takes at once what is to come (`step_at_freeze`):
after n visits, were the gradients equal in size, v would grow as 1 - beta2^n, hence
                    w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) c_n m / (sqrt(v) + eps)
                    c_n = sum over k >= 1 of beta1^k sqrt((1 - beta2^n) / (1 - beta2^(n+k)))
3.5 for n = 1, 9 for many, at the defaults; lr and t of the table's last Push. Without it policy idle (0.4% of a data
pass, 4 bits rounded at random) loses 0.50 AUC points x 100 on S1 at a quarter of its size, with it 0.00 +- 0.04.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from embedding_server.spec import OptimizerKind, OptimizerSpec, TableSpec

#: A larger value of a gradient counts as this; a loss that brings it has diverged long before.
MAX_GRADIENT = 2.0**50
ROWWISE_FACTOR = 2.0**-80
#: ftrl: below, 1 / lr would leave float32.
LEAST_FTRL_RATE = 1e-30
_CODES_PER_OCTAVE = 4
_LOWEST_EXPONENT = -40
_MAX_CODE = 255
_LAST_VISIT = 4096  # from where on v is taken to grow no more


def num_state_columns(kind: OptimizerKind, dim: int) -> int:
    """float32 columns of optimizer state per hot row."""
    return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1, "adam": 2 * dim, "ftrl": 2 * dim}[kind]


def initial_state(optimizer: OptimizerSpec, dim: int) -> np.ndarray:
    """float32[C]: the state of a new row."""
    state = np.zeros(num_state_columns(optimizer.kind, dim), np.float32)
    if optimizer.kind in ("adagrad", "rowwise_adagrad", "ftrl"):
        state[:dim] = optimizer.initial_accumulator
    return state


def _start(optimizer: OptimizerSpec) -> np.float32:
    """What the accumulator of a new row holds."""
    return np.float32(0.0 if optimizer.kind == "adam" else optimizer.initial_accumulator)


def adam_step_size(optimizer: OptimizerSpec, learning_rate: float, step: int) -> float:
    """lr sqrt(1 - beta2^t) / (1 - beta1^t): adam's learning rate with both bias corrections; step counts from 1."""
    return learning_rate * (1.0 - optimizer.beta2**step) ** 0.5 / (1.0 - optimizer.beta1**step)


def step_at_freeze(optimizer: OptimizerSpec, state: np.ndarray, visits: np.ndarray, rate: np.float32) -> np.ndarray:
    """float32[n, D]: what a freeze takes off the weights of adam rows of this state and as many visits, uint8[n].

    rate: the adam_step_size of the table's last Push.
    """
    m, v = np.split(state, 2, axis=1)
    to_come = _moves_to_come(optimizer.beta1, optimizer.beta2)[visits, None]
    return rate * to_come * m / (np.sqrt(v) + np.float32(optimizer.eps))


@lru_cache
def _moves_to_come(beta1: float, beta2: float) -> np.ndarray:
    """float32[256]: c_n of the module's text by visits n; 0 without any."""
    root = np.sqrt(1.0 - beta2 ** np.arange(_LAST_VISIT + 1.0))
    sums = np.zeros(_LAST_VISIT + 1)
    sums[_LAST_VISIT] = beta1 / (1.0 - beta1) / root[_LAST_VISIT]
    for n in range(_LAST_VISIT, 1, -1):
        sums[n - 1] = beta1 * (1.0 / root[n] + sums[n])
    return (root * sums)[:256].astype(np.float32)


def table_seed(spec: TableSpec) -> int:
    """64 bits that make the initial values of this table its own: blake2b over its name and seed.

    DO NOT CHANGE: a row that was never trained is recomputed from it.
    """
    name = spec.name.encode("utf-8")
    digest = hashlib.blake2b(spec.seed.to_bytes(8, "little") + name, digest_size=8, person=b"frostline-init")
    return int.from_bytes(digest.digest(), "little")


def encode_accumulator(spec: TableSpec, state: np.ndarray) -> np.ndarray:
    """float32[n, C] state of hot rows -> uint8[n] codes; infinity and what exceeds 2^23.5 take the highest code."""
    kind = spec.optimizer.kind
    if kind == "sgd":
        return np.zeros(len(state), np.uint8)
    mean_of = {"adam": state[:, spec.dim :], "ftrl": state[:, : spec.dim]}
    columns = mean_of.get(kind, state)
    mean = columns.mean(axis=1, dtype=np.float64) - _start(spec.optimizer)
    is_positive = mean > 0.0
    exponent = np.log2(mean, out=np.full(len(mean), float(_LOWEST_EXPONENT)), where=is_positive)
    codes = 1.0 + np.rint(_CODES_PER_OCTAVE * (exponent - _LOWEST_EXPONENT))
    return np.where(is_positive, np.clip(codes, 1, _MAX_CODE), 0).astype(np.uint8)


def decode_accumulator(spec: TableSpec, codes: np.ndarray, dim: int) -> np.ndarray:
    """uint8[n] -> float32[n, C]: the mean in every column; adam: m = 0, v the mean; ftrl: n the mean, z = 0."""
    kind = spec.optimizer.kind
    state = np.zeros((len(codes), num_state_columns(kind, dim)), np.float32)
    if kind != "sgd":
        target = state[:, dim:] if kind == "adam" else state[:, :dim]
        target[:] = (_start(spec.optimizer) + _VALUE_OF_CODE[codes])[:, None]
    return state


def _values_of_codes() -> np.ndarray:
    codes = np.arange(_MAX_CODE + 1, dtype=np.float64)
    values = 2.0 ** (_LOWEST_EXPONENT + (codes - 1.0) / _CODES_PER_OCTAVE)
    values[0] = 0.0
    return values.astype(np.float32)


_VALUE_OF_CODE = _values_of_codes()
