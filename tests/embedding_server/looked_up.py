"""Look-ups as a client sees them: replies in arrays, rows as stored decoded by what embedding.proto says alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedding_server.kernels.wire import from_float32
from embedding_server.lookup import Encoding, LookupSource, Pooling, ReplyShape, TableQuery, Version
from embedding_server.store import WIRE_NUMPY


class ArrayReply:
    """A LookupReply of arrays."""

    shape: ReplyShape

    def __call__(self, shape: ReplyShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.shape = shape
        self.flags = np.full(shape.num_rows, 0xEE, np.uint8)
        self.formats = np.full(shape.num_rows if shape.encoding == "stored" else 0, 0xEE, np.uint8)
        self.values = np.full(shape.values_bytes, 0xEE, np.uint8)
        return self.flags, self.formats, self.values


class Answer:
    """Of one table: flags uint8[n] and float32[n or B, D]; with an encoding of 16 bits values as they travel."""

    def __init__(self, flags: np.ndarray, values: np.ndarray, formats: np.ndarray, version: Version) -> None:
        self.flags, self.values, self.formats, self.version = flags, values, formats, version


def look_up(source: LookupSource, queries: Sequence[TableQuery], encoding: Encoding = "float32") -> list[Answer]:
    reply = ArrayReply()
    source.look_up(queries, encoding, reply)
    answers, row, at = [], 0, 0
    for query, dim, version in zip(queries, reply.shape.dims, reply.shape.versions, strict=True):
        these = slice(row, row + query.row_ids.shape[0])
        row = these.stop
        if encoding == "stored":
            values, size = decode_stored(reply.values[at:], reply.formats[these], dim)
        else:
            dtype = WIRE_NUMPY[encoding]
            size = query.num_vectors * dim * dtype.itemsize
            values = reply.values[at : at + size].view(dtype).reshape(-1, dim)
        at += size
        answers.append(Answer(reply.flags[these], values, reply.formats[these], version))
    assert (row, at) == (reply.shape.num_rows, reply.shape.values_bytes)
    return answers


def decode_stored(data: np.ndarray, formats: np.ndarray, dim: int) -> tuple[np.ndarray, int]:
    """uint8[.] -> float32[n, dim] and the bytes that they took, row by row as embedding.proto says."""
    out, at = np.zeros((formats.shape[0], dim), np.float32), 0
    for i, bits in enumerate(formats.tolist()):
        size = {0: 0, 4: dim // 2 + 4, 8: dim + 8, 16: 2 * dim, 32: 4 * dim}[bits]
        row = data[at : at + size].tobytes()
        at += size
        if bits in (16, 32):
            out[i] = np.frombuffer(row, "<f2" if bits == 16 else "<f4")
        elif bits:
            of_half = bits == 4
            scale, bias = np.frombuffer(row[-4:] if of_half else row[-8:], "<f2" if of_half else "<f4").astype(float)
            codes = np.frombuffer(row[: dim // 2 if of_half else dim], np.uint8)
            if of_half:
                codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
            with np.errstate(all="ignore"):  # damaged rows may hold infinities
                out[i] = (codes * scale + bias).astype(np.float32)
    return out, at


def pooled(rows: np.ndarray, lengths: np.ndarray, pooling: Pooling) -> np.ndarray:
    """float32[n, D] -> float32[B, D], added one after another."""
    out, at = np.zeros((lengths.shape[0], rows.shape[1]), np.float32), 0
    for bag, length in enumerate(lengths.tolist()):
        for row in rows[at : at + length]:
            out[bag] += row
        at += length
        if pooling == "mean" and length:
            out[bag] /= np.float32(length)
    return out


def check_rows(source: LookupSource, table: str, row_ids: np.ndarray, rows: np.ndarray, flags: np.ndarray) -> None:
    """Every encoding of rows float32[n, D] and their flags, and both poolings of bags of 0, 1, 2, ... rows."""
    query = TableQuery(table, row_ids)
    for encoding in ("float32", "float16", "bfloat16", "stored"):
        answer = look_up(source, [query], encoding)[0]
        expected = rows if encoding == "stored" else from_float32(rows, encoding)
        assert answer.values.tobytes() == expected.tobytes(), encoding
        assert answer.flags.tolist() == flags.tolist(), encoding
    lengths = np.arange(row_ids.shape[0] + 1)
    lengths = lengths[np.cumsum(lengths) <= row_ids.shape[0]]
    lengths = np.append(lengths, [0, row_ids.shape[0] - lengths.sum()])
    for pooling in ("sum", "mean"):
        expected = pooled(rows, lengths, pooling)
        for encoding in ("float32", "float16", "bfloat16"):
            answer = look_up(source, [TableQuery(table, row_ids, pooling, lengths)], encoding)[0]
            assert answer.values.tobytes() == from_float32(expected, encoding).tobytes(), (pooling, encoding)
            assert answer.flags.tolist() == flags.tolist()
