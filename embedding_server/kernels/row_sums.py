"""A sum of rows picked by position, in vectors: what pooling, its backward and the update of rows by sums are made of.

Forward: a bag is the sum of its look-ups' rows. Backward: a row's gradient is the sum of the output gradient's pieces
at its look-ups. Values are summed in float32, in the order of the positions, whatever the dtypes, so that every caller
gets the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from embedding_server.kernels.vectors import (
    add16,
    at,
    fetch,
    largest16,
    load1,
    load16,
    scale16,
    splat16,
    store1,
    store16,
    stream16,
    zero16,
)

#: look-ups fetched ahead. Backward over 27 MB of output gradients: 4.0 ms without, 2.6 with 8 or 16. Forward from rows
#: that lie scattered (MLPerf x 64): 5.9 ms with 8, 5.4 with 16, 5.2 with 24, where the update of rows loses 0.4 again.
AHEAD = 16
UNIT = 4  # gradient positions count 4 floats (dims are multiples of 4), so int32 reaches outputs of 34 GB


@njit(nogil=True, forceinline=True)
def _offset(positions, through, stride, j):
    """Element of source at which row j of a sum begins. `through` is known at compile time: None, or addresses."""
    if through is None:
        return np.int64(positions[j]) * stride
    return through[positions[j]] >> 2


@njit(nogil=True, forceinline=True)
def _sum16(source, positions, through, stride, scales, first, last, column):
    """Sum over j of source[positions[j] * stride + column :][:16] * scales[j], j in [first, last)."""
    total = zero16()
    for j in range(first, last):
        x = load16(source, at(_offset(positions, through, stride, j) + column))
        total = add16(total, scale16(x, scales[j]) if scales.size else x)
    return total


@njit(nogil=True, forceinline=True)
def _sum64(source, positions, through, stride, scales, first, last, column):
    """As _sum16 for four vectors at once: one pass over the positions and four sums in registers."""
    a, b, c, d = zero16(), zero16(), zero16(), zero16()
    for j in range(first, last):
        ahead = _offset(positions, through, stride, min(j + AHEAD, positions.size - 1)) + column
        for line in range(0, 64, 16):
            fetch(source, at(ahead + line))
        o = _offset(positions, through, stride, j) + column
        p, q, r, s = (
            load16(source, at(o)),
            load16(source, at(o + 16)),
            load16(source, at(o + 32)),
            load16(source, at(o + 48)),
        )
        if scales.size:
            p, q, r, s = scale16(p, scales[j]), scale16(q, scales[j]), scale16(r, scales[j]), scale16(s, scales[j])
        a, b, c, d = add16(a, p), add16(b, q), add16(c, r), add16(d, s)
    return a, b, c, d


@njit(nogil=True, forceinline=True)
def _sum1(source, positions, through, stride, scales, first, last, column):
    total = np.float32(0)
    for j in range(first, last):
        x = load1(source, at(_offset(positions, through, stride, j) + column))
        total += x * scales[j] if scales.size else x
    return total


@njit(nogil=True, forceinline=True)
def _put16(out, o, x, streaming):
    if streaming:
        stream16(out, at(o), x)
    else:
        store16(out, at(o), x)


@njit(nogil=True, forceinline=True)
def sum_rows(source, positions, through, stride, scales, first, last, dim, factor, out, o, streaming, largest):
    """out[o : o+dim] = factor * sum of rows first to last-1, each times its scale unless scales is empty.

    Returns `largest` (vectors.largest16) updated with what was written.

    Row j begins at element positions[j] * stride of source; or, with through int64, at address through[positions[j]],
    and source is then float32 from address 0 on.
    """
    column = 0
    while column + 64 <= dim:
        a, b, c, d = _sum64(source, positions, through, stride, scales, first, last, column)
        if factor != 1:
            a, b, c, d = scale16(a, factor), scale16(b, factor), scale16(c, factor), scale16(d, factor)
        _put16(out, o + column, a, streaming)
        _put16(out, o + column + 16, b, streaming)
        _put16(out, o + column + 32, c, streaming)
        _put16(out, o + column + 48, d, streaming)
        largest = largest16(largest16(largest16(largest16(largest, a), b), c), d)
        column += 64
    while column + 16 <= dim:
        a = scale16(_sum16(source, positions, through, stride, scales, first, last, column), factor)
        _put16(out, o + column, a, streaming)
        largest = largest16(largest, a)
        column += 16
    while column < dim:
        x = _sum1(source, positions, through, stride, scales, first, last, column) * factor
        store1(out, at(o + column), x)
        largest = largest16(largest, splat16(x))
        column += 1
    return largest
