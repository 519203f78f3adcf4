"""What a worker computes on rows: pooling, its gradients, and which rows get one. numba kernels and a torch reference.

Shapes: K slots (one table's use of one feature), T tables, U_t unique rows of table t, N look-ups (numbered in slot
order), V values of the batch (a feature that two tables use is there once), D a table's dim.

Layout of a batch, the same for pooled and sequence collections: `slots` int64[K, 7], a slot a row, the columns named
below. Bag j of the batch holds the values bag_offsets[j] to bag_offsets[j+1]; a slot's values are look-ups, in the same
order, from FIRST_LOOKUP on. The slot's first bag is at element PLACE of the output, each next one `pitch` elements
further. A sequence collection has bags of one value each. What is filled about table t begins at starts[t], the number
of its first look-up, so that threads can take a range of tables each.

Rows arrive as one array per table, so kernels take their addresses (int64[T]) and an empty array `like` for the dtype;
the caller keeps the arrays alive. Values are summed in float32, in look-up order, whatever the wire dtype.
Both directions are one operation, a sum of rows picked by position: forward over the look-ups of a bag, backward over
the look-ups of a row (a CSR made by `gradient_positions`); so a gradient is written once, straight in the wire dtype,
and rows that are not trainable cost nothing.

Measured (AMD EPYC, one thread, 26 tables, Zipf 1.05 over 10^6 ids; ms, float32 / bfloat16 wire):

                                         106,496 one-hot x 64   438,272 MLPerf x 64   x 128
    dedup_tables, one shard / two              1.1 / 1.4              4.9 / 6.0         same
    gradient_positions                           0.6                    1.2              1.1
    pool_rows                                  1.5 / 1.4              2.1 / 1.7          5.1
    pick_trainable                               0.1                    0.2              0.2
    row_gradients                              2.6 / 2.4              3.9 / 3.6          7.7
    Python around them                           0.4                    0.4              0.4

pool_rows is bound by writing its output (27 MB stream in 1.1 ms). row_gradients reads 256-byte pieces 6.6 kB apart: the
same 27 MB take 0.7 ms read in order and 3.0 read by column, which is what a sum by row must do. Tried and slower: batch
order with float32 accumulators for rows looked up twice (4.1 to 5.0), the rows of all tables in lockstep (3.5 to 5.6),
streaming stores of the gradients (+0.3; the store reads them next).
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from embedding_server.kernels.row_sums import UNIT, sum_rows
from embedding_server.kernels.vectors import (
    add16,
    at,
    largest16,
    load1,
    load16,
    mul16,
    pointer_to,
    splat16,
    sum16,
    top_bits16,
    zero16,
)
from embedding_server.store import DEFAULT, TRAINABLE

#: columns of `slots`
TABLE, DIM, MEAN, FIRST_BAG, NUM_BAGS, FIRST_LOOKUP, PLACE, COLUMNS = range(8)
_ANY = 1 << 48  # length given to carray: the kernels index without bounds checks


@njit(nogil=True, forceinline=True)
def _bag_factor(is_mean, length):
    return np.float32(1) / np.float32(length) if is_mean and length > 0 else np.float32(1)


@njit(nogil=True, forceinline=True)
def _share(count, part, parts):
    """Bounds of part `part` of `parts` of range(count), so that threads can split a kernel's work."""
    return count * part // parts, count * (part + 1) // parts


@njit(nogil=True, forceinline=True)
def _pool_slot(rows, through, slot, bag_offsets, inverse, weights, out, pitch, part, parts):
    dim, first_bag, place = slot[DIM], slot[FIRST_BAG], slot[PLACE]
    first_value = bag_offsets[first_bag]
    positions = inverse[slot[FIRST_LOOKUP] :]
    scales = weights[first_value:] if weights.size else weights
    streaming = place % 16 == 0 and pitch % 16 == 0
    low, high = _share(slot[NUM_BAGS], part, parts)
    for j in range(low, high):
        first, last = bag_offsets[first_bag + j] - first_value, bag_offsets[first_bag + j + 1] - first_value
        factor = _bag_factor(slot[MEAN], last - first)
        sum_rows(
            rows, positions, through, dim, scales, first, last, dim, factor, out, place + j * pitch, streaming, zero16()
        )


@njit(nogil=True, cache=True)
def pool_rows(addresses, like, slots, bag_offsets, inverse, weights, out, pitch, part, parts):
    """Forward: every bag's sum (or mean: sum(w x) / L) into out, float32, 64-byte aligned. Empty bags are zeros.

    addresses int64[T] of rows [U_t, D] of like's dtype; bag_offsets int64; inverse int32[N] within the table's rows;
    weights float32[V], or empty for none.
    """
    for k in range(slots.shape[0]):
        rows = carray(pointer_to(addresses[slots[k, TABLE]], like), (_ANY,))
        _pool_slot(rows, None, slots[k], bag_offsets, inverse, weights, out, pitch, part, parts)


@njit(nogil=True, cache=True)
def pool_placed_rows(addresses, origin, like, slots, bag_offsets, inverse, weights, out, pitch, part, parts):
    """As pool_rows, from rows where they lie: addresses int64[T] of each table's int64[U_t] addresses of float32 rows.

    origin is 0, where these addresses count from.
    """
    rows = carray(pointer_to(origin, like), (_ANY,))
    for k in range(slots.shape[0]):
        through = carray(pointer_to(addresses[slots[k, TABLE]], addresses), (_ANY,))
        _pool_slot(rows, through, slots[k], bag_offsets, inverse, weights, out, pitch, part, parts)


@njit(nogil=True, cache=True)
def largest_bits(values, part, parts):
    """Bits of the largest |x| of a part of float32[n]; NaN is above infinity is above every number."""
    a, b, c, d = zero16(), zero16(), zero16(), zero16()
    low, high = _share(values.size // 64, part, parts)
    for i in range(64 * low, 64 * high, 64):
        a, b = largest16(a, load16(values, at(i))), largest16(b, load16(values, at(i + 16)))
        c, d = largest16(c, load16(values, at(i + 32))), largest16(d, load16(values, at(i + 48)))
    if part + 1 == parts:
        for i in range(64 * high, values.size):
            a = largest16(a, splat16(load1(values, at(i))))
    return top_bits16(largest16(largest16(a, b), largest16(c, d)))


@njit(nogil=True, cache=True)
def gradient_positions(
    slots, slots_of_table, bag_offsets, inverse, weights, pitch, tables,
    starts, counts, num_unique, positions, scales, row_starts,
):  # fmt: skip
    """CSR from unique rows to where their gradients come from, in look-up order; for the tables that `tables` names.

    Row u of table t was looked up counts[starts[t] + u] times: its gradient is the sum over j in [row_starts[r],
    row_starts[r+1]), r = starts[t] + t + u, of scales[j] * output gradient [positions[j] * UNIT :][:D]. Fills positions
    int32[N], row_starts int64[N+T], and scales float32[N] unless it is empty (no weights, no mean).
    """
    for t in tables:
        rows = row_starts[starts[t] + t :]
        rows[0] = total = starts[t]
        for u in range(num_unique[t]):  # entry u+1 is row u's cursor: it ends where row u ends
            rows[u + 1] = total
            total += counts[starts[t] + u]
        for k in range(slots_of_table[t], slots_of_table[t + 1]):
            first_bag = slots[k, FIRST_BAG]
            shift = slots[k, FIRST_LOOKUP] - bag_offsets[first_bag]
            for j in range(slots[k, NUM_BAGS]):
                first, last = bag_offsets[first_bag + j], bag_offsets[first_bag + j + 1]
                position = np.int32((slots[k, PLACE] + j * pitch) // UNIT)
                factor = _bag_factor(slots[k, MEAN], last - first)
                for i in range(first, last):
                    u = inverse[i + shift]
                    to = rows[u + 1]
                    rows[u + 1] = to + 1
                    positions[to] = position
                    if scales.size:
                        scales[to] = factor * weights[i] if weights.size else factor


@njit(nogil=True, cache=True)
def pick_trainable(flag_addresses, like, starts, unique, shard_offsets, picked, picked_ids, picked_shards, defaults):
    """Lists the rows whose Pull said TRAINABLE, in order, and counts those that said DEFAULT.

    Fills, for table t: picked int32[N] (positions among its unique rows) and picked_ids int64[N] (their row_ids) from
    starts[t] on, picked_shards int64[T, S+1] (relative to that; the last entry is how many), defaults int64[T].
    """
    for t in range(starts.size):
        flags = carray(pointer_to(flag_addresses[t], like), (_ANY,))
        base, n = starts[t], 0
        defaults[t] = picked_shards[t, 0] = 0
        for s in range(shard_offsets.shape[1] - 1):
            for u in range(shard_offsets[t, s], shard_offsets[t, s + 1]):
                picked[base + n] = u
                picked_ids[base + n] = unique[base + u]
                n += (flags[at(u)] & TRAINABLE) != 0
                defaults[t] += (flags[at(u)] & DEFAULT) != 0
            picked_shards[t, s + 1] = n


@njit(nogil=True, cache=True)
def row_gradients(
    gradient, positions, scales, row_starts, starts, picked, num_picked, dims, places, out, part, parts
):  # fmt: skip
    """Backward: the gradient of every picked row, summed over its look-ups, written once in out's wire dtype.

    gradient float32 is the output's, flat; table t's rows begin at element places[t] of out. Returns the bits of the
    largest |x| written (as float32), so that the caller finds overflow, infinity and NaN for nothing.
    """
    largest = zero16()
    for t in range(dims.size):
        dim = dims[t]
        low, high = _share(num_picked[t], part, parts)
        for n in range(low, high):
            r = starts[t] + t + picked[starts[t] + n]
            largest = sum_rows(
                gradient, positions, None, UNIT, scales, row_starts[r], row_starts[r + 1], dim, np.float32(1),
                out, places[t] + n * dim, False, largest,
            )  # fmt: skip
    return top_bits16(largest)


@njit(nogil=True, cache=True)
def default_gradient(gradient, positions, scales, row_starts, flags, out):
    """Adds to out float32[D] the gradients of all rows of one table whose Pull said DEFAULT.

    flags uint8[U]; row_starts int64[U+1] from the table's first row on.
    """
    for u in range(flags.size):
        if flags[u] & DEFAULT:
            for j in range(row_starts[u], row_starts[u + 1]):
                o, scale = np.int64(positions[j]) * UNIT, scales[j] if scales.size else np.float32(1)
                for d in range(out.size):
                    out[d] += scale * gradient[at(o + d)]


@njit(nogil=True, cache=True)
def weight_gradients(addresses, like, slots, bag_offsets, inverse, gradient, pitch, out):
    """Adds to out float32[V] the gradient of every value's weight: <output gradient, row> (/ L for mean)."""
    for k in range(slots.shape[0]):
        dim, first_bag = slots[k, DIM], slots[k, FIRST_BAG]
        rows = carray(pointer_to(addresses[slots[k, TABLE]], like), (_ANY,))
        shift = slots[k, FIRST_LOOKUP] - bag_offsets[first_bag]
        for j in range(slots[k, NUM_BAGS]):
            first, last = bag_offsets[first_bag + j], bag_offsets[first_bag + j + 1]
            factor = _bag_factor(slots[k, MEAN], last - first)
            o = slots[k, PLACE] + j * pitch
            for i in range(first, last):
                out[i] += factor * _dot(rows, np.int64(inverse[i + shift]) * dim, gradient, o, dim)


@njit(nogil=True, forceinline=True)
def _dot(a, i, b, j, dim):
    total, column = zero16(), 0
    while column + 16 <= dim:
        total = add16(total, mul16(load16(a, at(i + column)), load16(b, at(j + column))))
        column += 16
    rest = np.float32(0)
    while column < dim:
        rest += load1(a, at(i + column)) * load1(b, at(j + column))
        column += 1
    return sum16(total) + rest


def pool_rows_reference(
    rows: list[torch.Tensor],
    slots: np.ndarray,
    bag_offsets: np.ndarray,
    inverse: np.ndarray,
    weights: torch.Tensor | None,
    size: int,
    pitch: int,
) -> torch.Tensor:
    """The plain form of pool_rows, for any device: rows float32 [U_t, D] a table -> float32[size].

    Differentiable, so its autograd is the reference of row_gradients and weight_gradients too.
    """
    device = rows[0].device if rows else torch.device("cpu")
    out = torch.zeros(size, device=device)
    lengths = np.diff(bag_offsets)
    for slot in slots.tolist():
        bags = np.arange(slot[NUM_BAGS])
        num_values = lengths[slot[FIRST_BAG] + bags]
        value = bag_offsets[slot[FIRST_BAG]] + np.arange(num_values.sum())
        lookup = slot[FIRST_LOOKUP] + np.arange(num_values.sum())
        bag_of_value = np.repeat(bags, num_values)
        picked = rows[slot[TABLE]][torch.from_numpy(inverse[lookup].astype(np.int64)).to(device)]
        if weights is not None:
            picked = picked * weights[torch.from_numpy(value).to(device)].unsqueeze(1)
        if slot[MEAN]:
            picked = picked / torch.from_numpy(num_values[bag_of_value]).to(device).unsqueeze(1)
        elements = slot[PLACE] + bag_of_value[:, None] * pitch + np.arange(slot[DIM])
        out = out.index_add(0, torch.from_numpy(elements.ravel()).to(device), picked.reshape(-1))
    return out
