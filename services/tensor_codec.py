"""Messages with rows in them, between numpy arrays and bytes, with one copy of the payload.

row_ids, flags and values are framed by hand (message_frames.py says why); every message stays one that the generated
classes read and write. `values` is placed at a multiple of 8 bytes with the help of `padding` and read where it lies.

Sizes: n rows of a table, D its dim, W bytes of a wire value (4 or 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.shard import ShardGradients
from embedding_server.spec import MAX_DIM
from embedding_server.store import WIRE_NUMPY, Identity, Rows, WireDtype
from frostline.v1 import embedding_pb2 as pb
from services.message_frames import as_array, frame, reserve, unframe, view

#: most bytes of row_ids, flags and values in one message; larger calls go in parts
MAX_PAYLOAD_BYTES = 64 << 20
#: limit that both sides give to grpc: payload, table names and framing
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + (2 << 20)
#: most parts of one Pull or Push: bounds what a shard stages for a worker at 16 GiB
MAX_PARTS = 256
ROW_ID_BYTES = 8

WIRE_ENUM: dict[WireDtype, pb.WireDtype] = {
    "float32": pb.WIRE_DTYPE_FLOAT32,
    "float16": pb.WIRE_DTYPE_FLOAT16,
    "bfloat16": pb.WIRE_DTYPE_BFLOAT16,
}
_WIRE_NAME: dict[int, WireDtype] = {number: name for name, number in WIRE_ENUM.items()}

_ABSENT = (0, 0)
_PULL_ROW_IDS = pb.PullRequest.ROW_IDS_FIELD_NUMBER
_PREFETCH_ROW_IDS = pb.PrefetchRequest.ROW_IDS_FIELD_NUMBER
_PUSH_ROW_IDS = pb.PushRequest.ROW_IDS_FIELD_NUMBER
_PUSH_DEFAULTS = pb.PushRequest.DEFAULT_GRADIENTS_FIELD_NUMBER
_PUSH_VALUES = pb.PushRequest.VALUES_FIELD_NUMBER
_REPLY_FLAGS = pb.PullResponse.FLAGS_FIELD_NUMBER
_REPLY_VALUES = pb.PullResponse.VALUES_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class PullCall:
    """A decoded PullRequest."""

    who: Identity
    step: int
    part: int
    num_parts: int
    wire_dtype: WireDtype
    ids: dict[str, np.ndarray]  # int64[n] of each table


@dataclass(frozen=True, slots=True)
class PushCall:
    """A decoded PushRequest. The arrays are views of the message."""

    who: Identity
    step: int
    part: int
    num_parts: int
    wire_dtype: WireDtype
    gradients: dict[str, ShardGradients]


# --- checks ----------------------------------------------------------------------------------------------------------


def check_size(call: str, field: str, size: int, expected: int, rule: str) -> None:
    """Raises InvalidInput unless a field has as many bytes as the table list asks for."""
    if size != expected:
        raise InvalidInput(
            f"{call}: {field} has {size} bytes, the table list asks for {expected} ({rule}); make them add up"
        )


def _check_part(call: str, part: int, num_parts: int) -> int:
    """The number of parts, at least 1."""
    num_parts = max(num_parts, 1)
    if num_parts > MAX_PARTS:
        raise InvalidInput(f"{call}: num_parts={num_parts} is above {MAX_PARTS}; send a smaller batch")
    if part >= num_parts:
        raise InvalidInput(f"{call}: part={part} must be below num_parts={num_parts}; parts count from 0")
    return num_parts


def wire_name(call: str, number: int) -> WireDtype:
    """Name of a WireDtype number. Raises InvalidInput for a number that is none."""
    if number not in _WIRE_NAME:
        raise InvalidInput(f"{call}: wire_dtype={number} is not one of {', '.join(WIRE_ENUM)}; set it in the request")
    return _WIRE_NAME[number]


def _check_unique(call: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidInput(f"{call}: table {twice!r} is listed twice; send one entry with all its rows")


def _identity(caller: pb.Caller) -> Identity:
    return Identity(caller.job, caller.epoch, caller.worker)


# --- requests --------------------------------------------------------------------------------------------------------


def encode_pull(
    who: Identity, step: int, wire_dtype: WireDtype, ids: Mapping[str, np.ndarray], part: int = 0, num_parts: int = 1
) -> bytes:
    """A PullRequest; ids: contiguous int64[n] of each table."""
    header = pb.PullRequest(
        caller=pb.Caller(job=who.job, epoch=who.epoch, worker=who.worker),
        step=step,
        part=part,
        num_parts=num_parts,
        wire_dtype=WIRE_ENUM[wire_dtype],
        tables=[pb.TableIds(table=name, num_rows=len(row_ids)) for name, row_ids in ids.items()],
    )
    return frame(header, {_PULL_ROW_IDS: list(ids.values())})


def decode_pull(data: bytes) -> PullCall:
    """Raises InvalidInput when lengths do not add up."""
    header, found = unframe(data, pb.PullRequest, (_PULL_ROW_IDS,))
    num_parts = _check_part("Pull", header.part, header.num_parts)
    ids = _decode_ids("Pull", data, header.tables, found.get(_PULL_ROW_IDS, _ABSENT))
    wire = wire_name("Pull", header.wire_dtype)
    return PullCall(_identity(header.caller), header.step, header.part, num_parts, wire, ids)


def encode_prefetch(ids: Mapping[str, np.ndarray]) -> bytes:
    """A PrefetchRequest; ids: contiguous int64[n] of each table."""
    tables = [pb.TableIds(table=name, num_rows=len(row_ids)) for name, row_ids in ids.items()]
    return frame(pb.PrefetchRequest(tables=tables), {_PREFETCH_ROW_IDS: list(ids.values())})


def decode_prefetch(data: bytes) -> dict[str, np.ndarray]:
    """int64[n] of each table. Raises InvalidInput when lengths do not add up."""
    header, found = unframe(data, pb.PrefetchRequest, (_PREFETCH_ROW_IDS,))
    return _decode_ids("Prefetch", data, header.tables, found.get(_PREFETCH_ROW_IDS, _ABSENT))


def _decode_ids(call: str, data: bytes, tables: Sequence[pb.TableIds], place: tuple[int, int]) -> dict[str, np.ndarray]:
    """int64[n] of each table. Copies: 8 bytes a row, against rows of hundreds."""
    offset, size = place
    _check_unique(call, [entry.table for entry in tables])
    total = sum(entry.num_rows for entry in tables)
    check_size(call, "row_ids", size, total * ROW_ID_BYTES, f"{total} rows x 8")
    row_ids = np.frombuffer(data, np.int64, total, offset).copy() if total else np.empty(0, np.int64)
    ids: dict[str, np.ndarray] = {}
    at = 0
    for entry in tables:
        ids[entry.table] = row_ids[at : at + entry.num_rows]
        at += entry.num_rows
    return ids


def encode_push(
    who: Identity,
    step: int,
    wire_dtype: WireDtype,
    gradients: Mapping[str, ShardGradients],
    part: int = 0,
    num_parts: int = 1,
) -> bytes:
    """A PushRequest. Arrays are contiguous; values are of WIRE_NUMPY[wire_dtype]."""
    header = pb.PushRequest(
        caller=pb.Caller(job=who.job, epoch=who.epoch, worker=who.worker),
        step=step,
        part=part,
        num_parts=num_parts,
        wire_dtype=WIRE_ENUM[wire_dtype],
        tables=[
            pb.TableGradients(
                table=name,
                num_rows=len(table.row_ids),
                dim=table.values.shape[1],
                learning_rate=table.learning_rate,
                has_default_gradient=table.default_gradient is not None,
            )
            for name, table in gradients.items()
        ],
    )
    tables = gradients.values()
    defaults = [table.default_gradient for table in tables if table.default_gradient is not None]
    bulk = {
        _PUSH_ROW_IDS: [table.row_ids for table in tables],
        _PUSH_DEFAULTS: defaults,
        _PUSH_VALUES: [table.values for table in tables],
    }
    return frame(header, bulk, aligned=_PUSH_VALUES)


def decode_push(data: bytes) -> PushCall:
    """Raises InvalidInput when lengths do not add up."""
    header, found = unframe(data, pb.PushRequest, (_PUSH_ROW_IDS, _PUSH_DEFAULTS, _PUSH_VALUES))
    num_parts = _check_part("Push", header.part, header.num_parts)
    wire = wire_name("Push", header.wire_dtype)
    ids = _decode_ids("Push", data, header.tables, found.get(_PUSH_ROW_IDS, _ABSENT))
    values = _decode_values("Push", data, header.tables, found.get(_PUSH_VALUES, _ABSENT), WIRE_NUMPY[wire])
    defaults_at, defaults_size = found.get(_PUSH_DEFAULTS, _ABSENT)
    num_defaults = sum(entry.dim for entry in header.tables if entry.has_default_gradient)
    check_size("Push", "default_gradients", defaults_size, 4 * num_defaults, "dim x 4 for each table that has one")
    gradients: dict[str, ShardGradients] = {}
    for entry, of_table in zip(header.tables, values, strict=True):
        default = None
        if entry.has_default_gradient:
            default = np.frombuffer(data, np.float32, entry.dim, defaults_at).copy()
            defaults_at += default.nbytes
        gradients[entry.table] = ShardGradients(ids[entry.table], of_table, entry.learning_rate, default)
    return PushCall(_identity(header.caller), header.step, header.part, num_parts, wire, gradients)


def _decode_values(
    call: str,
    data: bytes,
    tables: Sequence[pb.TableGradients] | Sequence[pb.TableRows],
    place: tuple[int, int],
    dtype: np.dtype,
) -> list[np.ndarray]:
    """[n, D] of each table."""
    offset, size = place
    for entry in tables:
        if not 0 < entry.dim <= MAX_DIM:
            name = entry.table
            raise InvalidInput(f"{call}: table {name!r}: dim={entry.dim} must be 1 to {MAX_DIM}; send the table's dim")
    total = sum(entry.num_rows * entry.dim for entry in tables)
    check_size(call, "values", size, total * dtype.itemsize, f"{total} values (rows x dim) x {dtype.itemsize}")
    values = view(as_array(data), offset, total, dtype)
    arrays, at = [], 0
    for entry in tables:
        rows, dim = entry.num_rows, entry.dim
        arrays.append(values[at : at + rows * dim].reshape(rows, dim))
        at += rows * dim
    return arrays


# --- replies ---------------------------------------------------------------------------------------------------------


class ReplyMessage:
    """A PullResponse that the shard writes its rows into: a ReplyBuffers of store.py."""

    def __init__(self, wire_dtype: WireDtype) -> None:
        self._wire_dtype = wire_dtype
        self._message = b""

    def __call__(
        self, names: Sequence[str], num_rows: Sequence[int], dims: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        header = pb.PullResponse(
            wire_dtype=WIRE_ENUM[self._wire_dtype],
            tables=[
                pb.TableRows(table=name, num_rows=rows, dim=dim)
                for name, rows, dim in zip(names, num_rows, dims, strict=True)
            ],
        )
        dtype = WIRE_NUMPY[self._wire_dtype]
        num_values = sum(rows * dim for rows, dim in zip(num_rows, dims, strict=True))
        sizes = {_REPLY_FLAGS: sum(num_rows), _REPLY_VALUES: num_values * dtype.itemsize}
        self._message, fields = reserve(header, sizes, aligned=_REPLY_VALUES)
        return fields[_REPLY_FLAGS], fields[_REPLY_VALUES].view(dtype)

    @property
    def message(self) -> bytes:
        """The whole message, once the shard has written the rows."""
        return self._message


def decode_rows(data: bytes) -> dict[str, Rows]:
    """A PullResponse: rows of each table, as views of it. Raises InvalidInput when lengths do not add up."""
    header, found = unframe(data, pb.PullResponse, (_REPLY_FLAGS, _REPLY_VALUES))
    call = "PullResponse"
    dtype = WIRE_NUMPY[wire_name(call, header.wire_dtype)]
    total = sum(entry.num_rows for entry in header.tables)
    flags_at, flags_size = found.get(_REPLY_FLAGS, _ABSENT)
    check_size(call, "flags", flags_size, total, f"{total} rows x 1")
    values = _decode_values(call, data, header.tables, found.get(_REPLY_VALUES, _ABSENT), dtype)
    base = as_array(data)
    rows: dict[str, Rows] = {}
    for entry, of_table in zip(header.tables, values, strict=True):
        rows[entry.table] = Rows(of_table, base[flags_at : flags_at + entry.num_rows])
        flags_at += entry.num_rows
    return rows
