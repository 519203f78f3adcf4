"""Messages of Lookup, between numpy arrays and bytes, with one copy of the payload; both sides use it.

    request   encode_lookup -> decode_lookup: TableQuery of each table
    reply     LookupReplyMessage, which the source writes its rows into -> decode_answers: TableAnswer of each table

row_ids, lengths, flags, formats and values are framed by hand as in tensor_codec.py, and so the messages stay those of
embedding.proto, which says how to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels import frozen
from embedding_server.kernels import lookups as kernels
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.lookup import Encoding, Pooling, ReplyShape, TableQuery, Version
from embedding_server.spec import MAX_DIM
from embedding_server.store import STATE, WIRE_NUMPY, Rows, WireDtype
from frostline.v1 import embedding_pb2 as pb
from services.message_frames import as_array, frame, reserve, unframe, view
from services.tensor_codec import ROW_ID_BYTES, check_size

ENCODING_ENUM: dict[Encoding, pb.WireDtype] = {
    "float32": pb.WIRE_DTYPE_FLOAT32,
    "float16": pb.WIRE_DTYPE_FLOAT16,
    "bfloat16": pb.WIRE_DTYPE_BFLOAT16,
    "stored": pb.WIRE_DTYPE_STORED,
}
_ENCODING_NAME: dict[int, Encoding] = {number: name for name, number in ENCODING_ENUM.items()}
_POOLING_ENUM: dict[Pooling | None, pb.Pooling] = {
    None: pb.POOLING_UNSPECIFIED,
    "sum": pb.POOLING_SUM,
    "mean": pb.POOLING_MEAN,
}
_POOLING_NAME: dict[int, Pooling | None] = {number: name for name, number in _POOLING_ENUM.items()}

_ABSENT = (0, 0)
_ROW_IDS = pb.LookupRequest.ROW_IDS_FIELD_NUMBER
_LENGTHS = pb.LookupRequest.LENGTHS_FIELD_NUMBER
_FLAGS = pb.LookupResponse.FLAGS_FIELD_NUMBER
_FORMATS = pb.LookupResponse.FORMATS_FIELD_NUMBER
_VALUES = pb.LookupResponse.VALUES_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class LookupCall:
    """A decoded LookupRequest. What lengths add up to is not checked yet."""

    encoding: Encoding
    queries: list[TableQuery]


@dataclass(frozen=True, slots=True)
class TableAnswer:
    """What a LookupResponse has of one table, as views of it."""

    table: str
    dim: int
    flags: np.ndarray  # uint8[n]
    values: np.ndarray  # [n or B, D] of WIRE_NUMPY[encoding]; stored: uint8[.], the rows one after another
    formats: np.ndarray | None  # uint8[n] of values as stored
    pooling: Pooling | None
    version: Version

    @property
    def num_vectors(self) -> int:
        """Rows of values."""
        return self.values.shape[0] if self.formats is None else self.formats.shape[0]


# --- request ---------------------------------------------------------------------------------------------------------


def encode_lookup(encoding: Encoding, queries: Sequence[TableQuery]) -> bytes:
    """A LookupRequest."""
    header = pb.LookupRequest(
        wire_dtype=ENCODING_ENUM[encoding],
        tables=[
            pb.TableLookup(
                table=query.table,
                num_rows=query.row_ids.shape[0],
                pooling=_POOLING_ENUM[query.pooling],
                num_bags=0 if query.lengths is None else query.lengths.shape[0],
            )
            for query in queries
        ],
    )
    lengths = [query.lengths for query in queries if query.lengths is not None]
    return frame(header, {_ROW_IDS: [query.row_ids for query in queries], _LENGTHS: lengths})


def decode_lookup(data: bytes) -> LookupCall:
    """Raises InvalidInput when sizes do not add up or a number is none that embedding.proto has."""
    header, found = unframe(data, pb.LookupRequest, (_ROW_IDS, _LENGTHS))
    encoding = _encoding("Lookup", header.wire_dtype)
    total = sum(entry.num_rows for entry in header.tables)
    offset, size = found.get(_ROW_IDS, _ABSENT)
    check_size("Lookup", "row_ids", size, total * ROW_ID_BYTES, f"{total} rows x 8")
    row_ids = np.frombuffer(data, np.int64, total, offset).copy() if total else np.empty(0, np.int64)
    lengths = _decode_lengths(data, header.tables, found.get(_LENGTHS, _ABSENT))
    queries, at, bag = [], 0, 0
    for entry in header.tables:
        its_ids = row_ids[at : at + entry.num_rows]
        at += entry.num_rows
        if entry.pooling or entry.num_bags:
            pooling, last = _pooling(entry), bag + entry.num_bags
            queries.append(TableQuery(entry.table, its_ids, pooling, lengths[bag:last]))
            bag = last
        else:
            queries.append(TableQuery(entry.table, its_ids))
    return LookupCall(encoding, queries)


def _pooling(entry: pb.TableLookup) -> Pooling | None:
    if entry.pooling not in _POOLING_NAME:
        raise InvalidInput(
            f"Lookup: table {entry.table!r}: pooling={entry.pooling} must be 0 (none), 1 (sum) or 2 (mean)"
        )
    if entry.pooling == pb.POOLING_UNSPECIFIED and entry.num_bags:
        raise InvalidInput(
            f"Lookup: table {entry.table!r}: num_bags={entry.num_bags} without pooling; set pooling to 1 (sum) or"
            " 2 (mean), or send no bags"
        )
    return _POOLING_NAME[entry.pooling]


def _decode_lengths(data: bytes, tables: Sequence[pb.TableLookup], place: tuple[int, int]) -> np.ndarray:
    """int64[B] of the bags of all tables; the size of the field tells whether they came as int32 or int64."""
    offset, size = place
    total = sum(entry.num_bags for entry in tables)
    if not total and not size:
        return np.empty(0, np.int64)
    if size not in (4 * total, 8 * total):
        raise InvalidInput(
            f"Lookup: lengths has {size} bytes, the table list asks for {4 * total} or {8 * total} ({total} bags x 4 or"
            " 8); make them add up"
        )
    return np.frombuffer(data, np.int32 if size == 4 * total else np.int64, total, offset).astype(np.int64)


def _encoding(call: str, number: int) -> Encoding:
    if number not in _ENCODING_NAME:
        names = ", ".join(f"{number} ({name})" for number, name in _ENCODING_NAME.items())
        raise InvalidInput(f"{call}: wire_dtype={number} is not one of {names}; set it in the request")
    return _ENCODING_NAME[number]


# --- reply -----------------------------------------------------------------------------------------------------------


class LookupReplyMessage:
    """A LookupResponse that the source writes its rows into: a LookupReply of lookup.py."""

    def __init__(self) -> None:
        self._message = b""
        self.flags = np.empty(0, np.uint8)  # of every row, once the source has written them

    def __call__(self, shape: ReplyShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        number_of = {version: i for i, version in enumerate(dict.fromkeys(shape.versions))}
        tables = [
            pb.TableVectors(
                table=query.table,
                num_rows=query.row_ids.shape[0],
                dim=dim,
                pooling=_POOLING_ENUM[query.pooling],
                num_bags=0 if query.lengths is None else query.lengths.shape[0],
                version=number_of[version],
            )
            for query, dim, version in zip(shape.queries, shape.dims, shape.versions, strict=True)
        ]
        wire_dtype = ENCODING_ENUM[shape.encoding]
        versions = [version_message(version) for version in number_of]
        header = pb.LookupResponse(wire_dtype=wire_dtype, tables=tables, versions=versions)
        sizes = {
            _FLAGS: shape.num_rows,
            _FORMATS: shape.num_rows if shape.encoding == "stored" else 0,
            _VALUES: shape.values_bytes,
        }
        self._message, fields = reserve(header, sizes, aligned=_VALUES)
        self.flags = fields[_FLAGS]
        return self.flags, fields[_FORMATS], fields[_VALUES]

    @property
    def message(self) -> bytes:
        """The whole message, once the source has written the rows."""
        return self._message


def version_message(version: Version) -> pb.Version:
    return pb.Version(job=version.job, epoch=version.epoch, step=version.step, snapshot_id=version.snapshot_id)


def version_of(message: pb.Version) -> Version:
    return Version(message.job, message.epoch, message.step, message.snapshot_id)


def decode_answers(data: bytes) -> list[TableAnswer]:
    """A LookupResponse, table by table in its order. Raises InvalidInput when sizes do not add up."""
    header, found = unframe(data, pb.LookupResponse, (_FLAGS, _FORMATS, _VALUES))
    encoding = _encoding("LookupResponse", header.wire_dtype)
    tables, versions = header.tables, [version_of(version) for version in header.versions]
    for entry in tables:
        if not 0 < entry.dim <= MAX_DIM or entry.version >= len(versions):
            raise InvalidInput(
                f"LookupResponse: table {entry.table!r}: dim={entry.dim} must be 1 to {MAX_DIM} and version="
                f"{entry.version} below {len(versions)}; the message is damaged"
            )
    base, total = as_array(data), sum(entry.num_rows for entry in tables)
    flags = _bytes_of_rows(base, found, _FLAGS, total, "flags")
    formats = _bytes_of_rows(base, found, _FORMATS, total if encoding == "stored" else 0, "formats")
    values = _values(base, tables, encoding, formats, found.get(_VALUES, _ABSENT))
    answers, at = [], 0
    for entry, of_table in zip(tables, values, strict=True):
        these = slice(at, at + entry.num_rows)
        at = these.stop
        answers.append(
            TableAnswer(
                entry.table,
                entry.dim,
                flags[these],
                of_table,
                formats[these] if encoding == "stored" else None,
                _POOLING_NAME.get(entry.pooling),
                versions[entry.version],
            )
        )
    return answers


def decode_rows(data: bytes) -> dict[str, Rows]:
    """Rows of each table, for who asked for no pooling and each table once: what EmbeddingStore.lookup gives."""
    return {answer.table: Rows(answer.values, answer.flags & STATE) for answer in decode_answers(data)}


def _bytes_of_rows(
    base: np.ndarray, found: dict[int, tuple[int, int]], number: int, expected: int, name: str
) -> np.ndarray:
    offset, size = found.get(number, _ABSENT)
    check_size("LookupResponse", name, size, expected, f"{expected} rows x 1")
    return base[offset : offset + size]


def _values(
    base: np.ndarray, tables: Sequence[pb.TableVectors], encoding: Encoding, formats: np.ndarray, place: tuple[int, int]
) -> list[np.ndarray]:
    """Values of each table."""
    offset, size = place
    if encoding == "stored":
        return _stored_values(base[offset : offset + size], tables, formats)
    dtype = WIRE_NUMPY[encoding]
    counts = [entry.num_bags if entry.pooling else entry.num_rows for entry in tables]
    total = sum(count * entry.dim for count, entry in zip(counts, tables, strict=True))
    rule = f"{total} values (vectors x dim) x {dtype.itemsize}"
    check_size("LookupResponse", "values", size, total * dtype.itemsize, rule)
    values = view(base, offset, total, dtype)
    arrays, at = [], 0
    for count, entry in zip(counts, tables, strict=True):
        arrays.append(values[at : at + count * entry.dim].reshape(count, entry.dim))
        at += count * entry.dim
    return arrays


def _stored_values(values: np.ndarray, tables: Sequence[pb.TableVectors], formats: np.ndarray) -> list[np.ndarray]:
    if not np.isin(formats, (0, 4, 8, 16, 32)).all():
        raise InvalidInput("LookupResponse: formats has a byte that is no RowFormat; the message is of a later version")
    starts = np.cumsum([0, *(entry.num_rows for entry in tables)])
    offsets = np.empty(formats.shape[0] + 1, np.int64)
    kernels.stored_offsets(formats, starts, np.array([entry.dim for entry in tables], np.int64), offsets)
    check_size("LookupResponse", "values", values.shape[0], int(offsets[-1]), "rows as formats say")
    ends = offsets[starts].tolist()
    return [values[a:b] for a, b in pairwise(ends)]


def stored_addresses(answer: TableAnswer) -> np.ndarray:
    """int64[n]: where each of the rows as stored begins, in the memory of the reply; 0 of those of format 0."""
    assert answer.formats is not None, "these rows are no stored ones"
    n = answer.formats.shape[0]
    offsets = np.empty(n + 1, np.int64)
    kernels.stored_offsets(answer.formats, np.array([0, n], np.int64), np.array([answer.dim], np.int64), offsets)
    return np.where(answer.formats == 0, 0, offsets[:-1] + answer.values.__array_interface__["data"][0])


def expand(answer: TableAnswer, wire_dtype: WireDtype = "float32") -> np.ndarray:
    """Rows as stored -> [n, D] of WIRE_NUMPY[wire_dtype], a copy."""
    assert answer.formats is not None, "these rows are no stored ones"
    n = answer.formats.shape[0]
    out = np.empty((n, answer.dim), WIRE_NUMPY[wire_dtype])
    every = np.arange(n, dtype=np.int32)
    out[answer.formats == 0] = 0
    frozen.gather_frozen(stored_addresses(answer), answer.formats, answer.dim, wire_view(out), every, MODES[wire_dtype])
    return out
