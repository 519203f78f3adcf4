"""A row freezes; a row thaws. The only two functions that move a row between memory and segments.

    freeze  hot row -> quantise -> segment; its optimizer state shrinks to one byte; its slot is free again
            (adam: what its first moment would still do is done first, optimizers.py)
    thaw    segment -> dequantise -> hot row with a warm accumulator (a cold one costs 0.7 to 8.5 AUC points)

A row freezes only if it survives it, if need be in 8 bits instead of 4 (kernels/frozen.py, `choose_bits`); otherwise it
stays hot and is counted in rows_unfreezable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.index import INITIAL, Entries
from embedding_server.kernels.frozen import NEAREST, choose_bits, quantise, rounding_keys
from embedding_server.optimizers import decode_accumulator, encode_accumulator, step_at_freeze

if TYPE_CHECKING:
    from embedding_server.table import Table

_ROWS_AT_ONCE = 8192  # rows that freeze at once: 2 MB of weights, which stay in cache from reading to quantising


def can_freeze_now(table: Table, rows: int) -> bool:
    """False while the disk fails (rows would only change their place in memory) or no segment is left for them.

    They stay hot then; the failing disk has its event from the writer, and a merge makes room for segments.
    """
    return not table.segments.is_write_failing and table.segments.can_append(rows)


def freeze(table: Table, entries: Entries, step: int) -> tuple[int, int]:
    """Freezes hot rows, given in bucket order. Returns (frozen, unfreezable).

    Every index entry flips only after its row lies in the segment's buffer, which serves reads at once.
    """
    if not can_freeze_now(table, entries.row_ids.shape[0]):
        return 0, 0
    table.preserve(entries.row_ids)  # not at a thaw: those who thaw rows have named them before
    bits = np.zeros(entries.row_ids.shape[0], np.uint8)
    for start in range(0, bits.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        slots = entries.locations[part].astype(np.int32)
        bits[part] = _freeze_part(table, entries.row_ids[part], entries.addresses[part], slots, step)
        failpoint("freeze.after_flip")
        table.slots.give_back(slots[bits[part] != 0])
    frozen = int(np.count_nonzero(bits))
    table.generation += 1
    table.rows_frozen += frozen
    table.moves_frozen += frozen
    return frozen, bits.shape[0] - frozen


def _freeze_part(
    table: Table, row_ids: np.ndarray, entry_addresses: np.ndarray, slots: np.ndarray, step: int
) -> np.ndarray:
    """Copies rows into segments and flips their entries. Returns uint8[n]: the bits that each took, 0: it stays hot."""
    weights, state = table.read_hot(slots)
    visits = table.visits.array[slots, 0]
    if table.spec.optimizer.kind == "adam":
        weights -= step_at_freeze(table.spec.optimizer, state, visits, table.rate)
    accumulators = encode_accumulator(table.spec, state)
    bits = choose_bits(weights, table.spec.policy.frozen_bits)
    is_at_random = table.spec.policy.freeze_rounding == "stochastic"
    for wanted in table.segments.formats:
        rows = np.flatnonzero(bits == wanted)
        if not rows.shape[0]:
            continue
        at = slice(None) if rows.shape[0] == bits.shape[0] else rows  # most often all take the same: nothing is copied
        keys = rounding_keys(row_ids[at], step) if is_at_random else NEAREST
        stored = quantise(weights[at], wanted, keys)
        locations = table.segments.append(row_ids[at], stored, accumulators[at], visits[at], bits=wanted)
        failpoint("freeze.before_flip")
        table.index.set_locations(entry_addresses[at], locations)
    return bits


def thaw(table: Table, addresses: np.ndarray, locations: np.ndarray, row_ids: np.ndarray, step: int) -> np.ndarray:
    """Makes frozen rows hot again, their entry addresses distinct. Returns the slots int32[m] that the first m rows
    took; not all did if the memory limit was reached."""
    slots = table.take_slots(addresses.shape[0], step)
    n = slots.shape[0]
    addresses, locations, row_ids = addresses[:n], locations[:n], row_ids[:n]
    table.changes.note(slots)
    untouched = locations == INITIAL
    if untouched.any():
        table.hot.initialise(slots[untouched], row_ids[untouched], table.spec)
        table.visits.array[slots[untouched], 0] = 0
    stored = np.flatnonzero(~untouched)
    if stored.shape[0]:
        try:
            _read_back(table, slots[stored], locations[stored])
        except SegmentCorrupt:
            table.slots.give_back(slots)
            raise
    failpoint("thaw.before_flip")
    table.index.set_locations(addresses, slots.astype(np.uint32))
    table.last_step.array[slots, 0] = step
    table.undo_decay(slots, row_ids, step)
    table.rows_frozen -= n
    table.moves_thawed += n
    return slots


def _read_back(table: Table, slots: np.ndarray, locations: np.ndarray) -> None:
    """Reads everything first: what cannot be read leaves the table as it was."""
    spec = table.spec
    weights, codes, visits = table.segments.read_all(locations)
    if spec.policy.thaw == "cold":
        codes = np.zeros_like(codes)  # no gain on the accumulator of a new row
    table.hot.write(slots, weights, decode_accumulator(spec, codes, spec.dim))
    table.visits.array[slots, 0] = visits
    table.segments.mark_dead(locations)
