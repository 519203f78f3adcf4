"""Criteo's display advertising format, plain or .gz: 40 fields by tabs and LF at the end of each line.

    field 0       label, 0 or 1
    fields 1-13   whole numbers, may be empty or negative   -> dense  log(1 + max(x, 0)), empty: 0
    fields 14-39  1 to 8 hexadecimal digits, may be empty   -> row_id, the number itself; empty: an empty bag

Rows are parsed by a numba kernel that takes no lock of the interpreter, so that a reading thread does not slow the
dense part. Each feature has a table of its own, so equal values of two features do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit

from trainer.data.bad_rows import BadRows
from trainer.data.batch import Feature, Schema, Share
from trainer.data.line_blocks import LineBlock, line_blocks
from trainer.data.spec import CriteoTsvData, Split
from trainer.data.stream import Part, StreamReader

NUM_DENSE = 13
NUM_FEATURES = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_FEATURES
MAX_HEX_DIGITS = 8
MAX_INTEGER_DIGITS = 18

SCHEMA = Schema(
    dense=tuple(f"int_{i}" for i in range(NUM_DENSE)),
    features=tuple(Feature(f"cat_{i}", f"cat_{i}") for i in range(NUM_FEATURES)),
)

_OK, _FIELD_COUNT, _LABEL, _INTEGER, _HEX, _CARRIAGE_RETURN, _CUT = range(7)
_TAB, _MINUS, _ZERO, _NINE, _CR = 9, 45, 48, 57, 13
_UPPER_A, _UPPER_F, _LOWER_A, _LOWER_F = 65, 70, 97, 102


class CriteoTsvReader(StreamReader[LineBlock]):
    def __init__(self, data: CriteoTsvData, split: Split, share: Share) -> None:
        super().__init__(SCHEMA, share, BadRows(data.on_bad_row, data.max_bad_rows), data.files(split))

    def _blocks(self, first_position: int) -> Iterator[tuple[LineBlock, int]]:
        return line_blocks(self.files, first_position)

    def _parse(self, block: LineBlock, low: int, high: int) -> Part:
        k = high - low
        dense = np.zeros((k, NUM_DENSE), np.float32)
        row_ids = np.zeros((NUM_FEATURES, k), np.int64)
        lengths = np.zeros((NUM_FEATURES, k), np.int32)
        labels = np.zeros(k, np.float32)
        faults = np.zeros((k, 2), np.int32)
        parse_rows(block.buffer, block.starts[low:high], block.ends[low:high], dense, row_ids, lengths, labels, faults)
        if block.is_cut and high == block.num_rows:
            faults[-1] = _CUT, 0
        if not faults[:, 0].any():
            return Part(dense, row_ids[lengths > 0], lengths, labels)
        for i in np.flatnonzero(faults[:, 0]).tolist():
            reason = _reason(int(faults[i, 0]), int(faults[i, 1]), block.line(low + i))
            self._bad.reject(block.path, block.first_row + low + i, reason)
        good = faults[:, 0] == _OK
        lengths = np.ascontiguousarray(lengths[:, good])
        return Part(dense[good], row_ids[:, good][lengths > 0], lengths, labels[good])


def _reason(fault: int, field: int, line: bytes) -> str:
    if fault == _CUT:
        return "the last line has no line end, so the file was cut short"
    if fault == _CARRIAGE_RETURN:
        return "the line ends with CR LF, and must end with LF alone; convert it, e.g. with dos2unix"
    fields = line.split(b"\t")
    if fault == _FIELD_COUNT:
        hint = "; a test file without labels cannot be used" if len(fields) == NUM_FIELDS - 1 else ""
        return f"has {len(fields)} fields by tabs and needs {NUM_FIELDS} (label, 13 numbers, 26 hexadecimal){hint}"
    value = fields[field][:40].decode("utf-8", "replace")
    rule = {
        _LABEL: "the label must be 0 or 1",
        _INTEGER: f"must be empty or a whole number of at most {MAX_INTEGER_DIGITS} digits",
        _HEX: f"must be empty or 1 to {MAX_HEX_DIGITS} hexadecimal digits",
    }[fault]
    return f"field {field} (from 0) is {value!r} and {rule}"


@njit(nogil=True, cache=True)
def parse_rows(
    buffer: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    dense: np.ndarray,
    row_ids: np.ndarray,
    lengths: np.ndarray,
    labels: np.ndarray,
    faults: np.ndarray,
) -> None:
    """Parses k lines of a uint8 buffer into dense float32[k, 13], row_ids int64[26, k], lengths int32[26, k] (0 or 1),
    labels float32[k] and faults int32[k, 2] (fault, field), all zero on entry. A row with a fault is left half filled.
    """
    for i in range(starts.size):
        start, end = starts[i], ends[i]
        if end > start and buffer[end - 1] == _CR:
            faults[i, 0] = _CARRIAGE_RETURN
            continue
        field = 0
        first = start
        for at in range(start, end + 1):
            if at < end and buffer[at] != _TAB:
                continue
            if field == 0:
                fault = _parse_label(buffer, first, at, labels, i)
            elif field <= NUM_DENSE:
                fault = _parse_integer(buffer, first, at, dense, i, field - 1)
            elif field < NUM_FIELDS:
                fault = _parse_hex(buffer, first, at, row_ids, lengths, field - 1 - NUM_DENSE, i)
            else:
                fault = _OK
            if fault != _OK and faults[i, 0] == _OK:
                faults[i, 0], faults[i, 1] = fault, field
            field += 1
            first = at + 1
        if field != NUM_FIELDS:
            # a missing tab shifts all later fields, so this is the cause and their faults are the effect
            faults[i, 0] = _FIELD_COUNT


@njit(nogil=True, cache=True)
def _parse_label(buffer: np.ndarray, first: int, end: int, labels: np.ndarray, i: int) -> int:
    if end - first != 1 or (buffer[first] != _ZERO and buffer[first] != _ZERO + 1):
        return _LABEL
    labels[i] = buffer[first] - _ZERO
    return _OK


@njit(nogil=True, cache=True)
def _parse_integer(buffer: np.ndarray, first: int, end: int, dense: np.ndarray, i: int, column: int) -> int:
    if first == end:
        return _OK
    is_negative = buffer[first] == _MINUS
    at = first + 1 if is_negative else first
    if at == end or end - at > MAX_INTEGER_DIGITS:
        return _INTEGER
    number = np.int64(0)
    while at < end:
        if buffer[at] < _ZERO or buffer[at] > _NINE:
            return _INTEGER
        number = number * 10 + np.int64(buffer[at] - _ZERO)
        at += 1
    if not is_negative:
        dense[i, column] = np.float32(np.log1p(np.float64(number)))
    return _OK


@njit(nogil=True, cache=True)
def _parse_hex(
    buffer: np.ndarray, first: int, end: int, row_ids: np.ndarray, lengths: np.ndarray, feature: int, i: int
) -> int:
    if first == end:
        return _OK
    if end - first > MAX_HEX_DIGITS:
        return _HEX
    number = np.int64(0)
    for at in range(first, end):
        c = buffer[at]
        if _ZERO <= c <= _NINE:
            digit = c - _ZERO
        elif _LOWER_A <= c <= _LOWER_F:
            digit = c - _LOWER_A + 10
        elif _UPPER_A <= c <= _UPPER_F:
            digit = c - _UPPER_A + 10
        else:
            return _HEX
        number = number * 16 + np.int64(digit)
    row_ids[feature, i] = number
    lengths[feature, i] = 1
    return _OK
