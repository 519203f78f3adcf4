"""Messages of Lookup: equal to what the generated classes read and write, aligned, and refused when damaged."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.lookup import ReplyShape, TableQuery, Version
from embedding_server.store import STATE, WIRE_NUMPY
from frostline.v1 import embedding_pb2 as pb
from services import lookup_codec as codec
from services.message_frames import as_array, unframe
from tests.embedding_server.looked_up import decode_stored

ENCODINGS = st.sampled_from(["float32", "float16", "bfloat16", "stored"])
VERSIONS = st.builds(Version, st.sampled_from(["", "job/ä"]), st.integers(0, 3), st.integers(0, 2**40), st.just(""))
#: name, dim, pooling, rows of each bag
TABLES = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=100),
        st.sampled_from([4, 8, 12]),
        st.sampled_from([None, "sum", "mean"]),
        st.lists(st.integers(0, 5), max_size=4),
        VERSIONS,
    ),
    max_size=5,
)


def queries_of(tables: list, encoding: str, rng: np.random.Generator) -> list[TableQuery]:
    queries = []
    for name, _, pooling, bags, _ in tables:
        row_ids = rng.integers(-(2**63), 2**63 - 1, sum(bags), dtype=np.int64, endpoint=True)
        if pooling is None or encoding == "stored":
            queries.append(TableQuery(name, row_ids))
        else:
            queries.append(TableQuery(name, row_ids, pooling, np.array(bags, np.int64)))
    return queries


def same(a: TableQuery, b: TableQuery) -> bool:
    lengths = [None if query.lengths is None else query.lengths.tolist() for query in (a, b)]
    return (a.table, a.pooling, a.row_ids.tolist()) == (b.table, b.pooling, b.row_ids.tolist()) and (
        lengths[0] == lengths[1]
    )


@given(TABLES, ENCODINGS, st.booleans(), st.integers(0, 2**32 - 1))
def test_requests_and_generated_classes_agree(tables: list, encoding: str, has_int32: bool, seed: int) -> None:
    queries = queries_of(tables, encoding, np.random.default_rng(seed))
    data = codec.encode_lookup(encoding, queries)
    message = pb.LookupRequest.FromString(data)
    assert message.row_ids == b"".join(query.row_ids.tobytes() for query in queries)
    assert [(t.table, t.num_rows) for t in message.tables] == [(q.table, q.row_ids.shape[0]) for q in queries]
    if has_int32:
        message.lengths = np.frombuffer(message.lengths, np.int64).astype(np.int32).tobytes()
    for encoded in (data, message.SerializeToString()):
        call = codec.decode_lookup(encoded)
        assert call.encoding == encoding
        assert all(same(a, b) for a, b in zip(call.queries, queries, strict=True))


def reply_of(tables: list, encoding: str, rng: np.random.Generator) -> tuple[bytes, np.ndarray, np.ndarray, bytes]:
    """A reply filled as a source fills it, and its flags, formats and values."""
    queries = queries_of(tables, encoding, rng)
    dims, n = [dim for _, dim, _, _, _ in tables], sum(query.row_ids.shape[0] for query in queries)
    formats = rng.choice(np.array([0, 4, 8, 16, 32], np.uint8), n if encoding == "stored" else 0)
    size, at = 0, 0
    for query, dim in zip(queries, dims, strict=True):
        if encoding == "stored":
            of_table = formats[at : at + query.row_ids.shape[0]]
            at += query.row_ids.shape[0]
            size += sum({0: 0, 4: dim // 2 + 4, 8: dim + 8, 16: 2 * dim, 32: 4 * dim}[f] for f in of_table.tolist())
        else:
            size += query.num_vectors * dim * WIRE_NUMPY[encoding].itemsize
    reply = codec.LookupReplyMessage()
    places = reply(ReplyShape(encoding, queries, dims, [version for *_, version in tables], n, size))
    flags, raw = rng.integers(0, 16, n, dtype=np.uint8), rng.integers(0, 256, size, dtype=np.uint8)
    for place, content in zip(places, (flags, formats, raw), strict=True):
        place[:] = content
    return reply.message, flags, formats, raw.tobytes()


@given(TABLES, ENCODINGS, st.integers(0, 2**32 - 1))
def test_replies_and_generated_classes_agree(tables: list, encoding: str, seed: int) -> None:
    data, flags, formats, raw = reply_of(tables, encoding, np.random.default_rng(seed))
    message = pb.LookupResponse.FromString(data)
    assert (message.flags, message.formats, message.values) == (flags.tobytes(), formats.tobytes(), raw)
    assert len(message.versions) == len({version for *_, version in tables})
    for encoded in (data, message.SerializeToString()):
        answers = codec.decode_answers(encoded)
        assert [(a.table, a.dim, a.version) for a in answers] == [(name, dim, v) for name, dim, _, _, v in tables]
        assert b"".join(a.values.tobytes() for a in answers) == raw
        assert b"".join(a.flags.tobytes() for a in answers) == flags.tobytes()
        for answer in answers:
            if encoding == "stored":
                plain, _ = decode_stored(answer.values, answer.formats, answer.dim)
                # of random bits the bias may be too small for float64 beside the rest: a last bit differs then
                assert np.allclose(codec.expand(answer), plain, rtol=2**-23, atol=0, equal_nan=True)
            elif answer.pooling is None:
                assert answer.values.shape == (len(answer.flags), answer.dim)


def test_values_are_aligned_and_read_where_they_lie() -> None:
    for length in range(1, 20):
        tables = [("t" * length, 4, None, [3], Version("job", 1, length))]
        data, *_ = reply_of(tables, "float32", np.random.default_rng(1))
        _, found = unframe(data, pb.LookupResponse, (pb.LookupResponse.VALUES_FIELD_NUMBER,))
        assert found[pb.LookupResponse.VALUES_FIELD_NUMBER][0] % 8 == 0
        (answer,) = codec.decode_answers(data)
        assert answer.values.flags.aligned
        assert np.shares_memory(answer.values, as_array(data))


def test_rows_of_a_store_have_the_bits_that_a_pull_has_too() -> None:
    tables = [("a", 4, None, [3], Version()), ("b", 8, None, [0], Version())]
    data, flags, _, raw = reply_of(tables, "float16", np.random.default_rng(3))
    rows = codec.decode_rows(data)
    assert rows["a"].flags.tolist() == (flags & STATE).tolist()
    assert rows["a"].values.tobytes() == raw
    assert rows["b"].values.shape == (0, 8)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_read_but_never_crash(data: bytes) -> None:
    for decode in (codec.decode_lookup, codec.decode_answers):
        with contextlib.suppress(InvalidInput):
            decode(data)


@given(ENCODINGS, st.integers(0, 10_000), st.integers(0, 255))
def test_one_wrong_byte_never_crashes(encoding: str, position: int, value: int) -> None:
    tables = [("t", 4, None, [2, 3], Version("job", 1, 5)), ("u", 8, "mean", [1, 0], Version())]
    reply, *_ = reply_of(tables, encoding, np.random.default_rng(4))
    request = codec.encode_lookup(encoding, queries_of(tables, encoding, np.random.default_rng(4)))
    for message, decode in ((request, codec.decode_lookup), (reply, codec.decode_answers)):
        data = bytearray(message)
        data[position % len(data)] = value
        with contextlib.suppress(InvalidInput):
            decode(bytes(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": bytes(2)}, r"flags has 2 bytes, the table list asks for 3 \(3 rows x 1\)"),
        ({"formats": bytes(1)}, r"formats has 1 bytes, the table list asks for 3"),
        ({"formats": bytes([7, 8, 8])}, r"formats has a byte that is no RowFormat"),
        ({"values": bytes(5)}, r"values has 5 bytes, the table list asks for \d+ \(rows as formats say\)"),
        ({"wire_dtype": 8}, r"wire_dtype=8 is not one of"),
    ],
)
def test_replies_that_do_not_add_up(changes: dict, message: str) -> None:
    data, *_ = reply_of([("t", 4, None, [3], Version())], "stored", np.random.default_rng(1))
    reply = pb.LookupResponse.FromString(data)
    for name, value in changes.items():
        setattr(reply, name, value)
    with pytest.raises(InvalidInput, match=message):
        codec.decode_answers(reply.SerializeToString())
