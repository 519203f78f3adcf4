"""A row freezes; a row thaws. The only two functions that move a row between memory and segments.

    freeze  hot row -> quantise -> segment; its optimizer state shrinks to one byte; its slot is free again
    thaw    segment -> dequantise -> hot row with a warm accumulator (a cold one costs 0.7 to 8.5 AUC points)

A row freezes only if it survives it (`can_freeze`); otherwise it stays hot and is counted in rows_unfreezable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server.index import FROZEN_BIT, INITIAL, Entries
from embedding_server.kernels.frozen import can_freeze, quantize_8bit, read_frozen
from embedding_server.optimizers import decode_accumulator, encode_accumulator

if TYPE_CHECKING:
    from embedding_server.table import Table

_LEAST_COLDEST = 1 / 16  # at the memory limit this share of the hot rows freezes at once: the scan is paid once


def frozen_row_bytes(dim: int, frozen_bits: int) -> int:
    """Bytes of a frozen row's values: float32, or FBGEMM's fused 8-bit row (values, then float32 scale and bias)."""
    return 4 * dim if frozen_bits == 32 else dim + 8


def can_freeze_now(table: Table, rows: int) -> bool:
    """False while the disk fails (rows would only change their place in memory) or no segment is left for them.

    They stay hot then; the failing disk has its event from the writer, and a merge makes room for segments.
    """
    return not table.segments.is_write_failing and table.segments.can_append(rows)


def freeze(table: Table, entries: Entries) -> tuple[int, int]:
    """Freezes hot rows, given in bucket order. Returns (frozen, unfreezable).

    Every index entry flips only after its row lies in the segment's buffer, which serves reads at once.
    """
    if not can_freeze_now(table, entries.row_ids.shape[0]):
        return 0, 0
    slots = entries.locations.astype(np.int32)
    weights, state = table.hot.read(slots)
    survives = can_freeze(weights)
    refused = int(slots.shape[0] - survives.sum())
    if refused:
        keep = np.flatnonzero(survives)
        slots, weights, state = slots[keep], weights[keep], state[keep]
        entries = Entries(entries.row_ids[keep], entries.addresses[keep], entries.locations[keep], entries.heat[keep])
    if not slots.shape[0]:
        return 0, refused
    locations = table.segments.append(
        entries.row_ids,
        _quantise(weights, table.spec.policy.frozen_bits),
        encode_accumulator(table.spec, state),
        table.visits.array[slots, 0],
    )
    table.index.set_locations(entries.addresses, locations)
    table.slots.give_back(slots)
    table.generation += 1
    table.rows_frozen += slots.shape[0]
    table.moves_frozen += slots.shape[0]
    return int(slots.shape[0]), refused


def thaw(table: Table, addresses: np.ndarray, locations: np.ndarray, row_ids: np.ndarray, step: int) -> int:
    """Makes frozen rows hot again, their entry addresses distinct. Returns how many; fewer at the memory limit."""
    slots = table.take_slots(addresses.shape[0], step)
    n = slots.shape[0]
    addresses, locations, row_ids = addresses[:n], locations[:n], row_ids[:n]
    untouched = locations == INITIAL
    if untouched.any():
        table.hot.initialise(slots[untouched], row_ids[untouched], table.spec)
        table.visits.array[slots[untouched], 0] = 0
    stored = np.flatnonzero(~untouched)
    if stored.shape[0]:
        _read_back(table, slots[stored], locations[stored])
    table.index.set_locations(addresses, slots.astype(np.uint32))
    table.last_step.array[slots, 0] = step
    table.rows_frozen -= n
    table.moves_thawed += n
    return n


def freeze_coldest(table: Table, rows: int, step: int) -> int:
    """At the memory limit: freezes at least `rows` of the coldest hot rows. Returns how many slots came free.

    Rows visited at this step or the one before stay, since their gradients may still be on the way.
    """
    if table.spec.policy.kind == "off":
        return 0
    entries = table.index.scan(0, table.index.num_buckets)
    hot = np.flatnonzero((entries.locations & FROZEN_BIT) == 0)
    hot = hot[table.last_step.array[entries.locations[hot], 0] < step - 1]
    wanted = min(hot.shape[0], max(rows, int(hot.shape[0] * _LEAST_COLDEST)))
    if not wanted:
        return 0
    coldest = np.sort(hot[np.argpartition(entries.heat[hot], wanted - 1)[:wanted]])  # sorted: back in bucket order
    table.segments.open_builder(step)
    frozen, _ = freeze(
        table,
        Entries(
            entries.row_ids[coldest], entries.addresses[coldest], entries.locations[coldest], entries.heat[coldest]
        ),
    )
    table.segments.seal()
    return frozen


def _quantise(weights: np.ndarray, frozen_bits: int) -> np.ndarray:
    """float32[n, D] -> uint8[n, frozen_row_bytes]."""
    if frozen_bits == 32:
        return np.ascontiguousarray(weights).view(np.uint8)
    rows = np.empty((weights.shape[0], frozen_row_bytes(weights.shape[1], frozen_bits)), np.uint8)
    quantize_8bit(weights, rows)
    return rows


def _read_back(table: Table, slots: np.ndarray, locations: np.ndarray) -> None:
    spec = table.spec
    weights = read_frozen(table.segments.addresses(locations), spec.policy.frozen_bits, spec.dim)
    codes = table.segments.accumulators_of(locations)
    table.hot.write(slots, weights, decode_accumulator(spec, codes, spec.dim))
    table.visits.array[slots, 0] = table.segments.visits_of(locations)
    table.segments.mark_dead(locations)
