"""Messages with rows: equal to what the generated classes read and write, aligned, and refused when damaged."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput
from embedding_server.shard import ShardGradients
from embedding_server.store import WIRE_NUMPY, Identity, Rows
from frostline.v1 import embedding_pb2 as pb
from services import tensor_codec as codec
from services.message_frames import as_array, frame, unframe

WHO = Identity("job/ä", 3, 1)
NAMES = st.text(min_size=1, max_size=200)
TABLES = st.dictionaries(NAMES, st.tuples(st.integers(0, 9), st.sampled_from([4, 8, 12])), max_size=5)
WIRES = st.sampled_from(["float32", "float16", "bfloat16"])


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64, endpoint=True)


def random_values(rng: np.random.Generator, count: int, dim: int, wire: str) -> np.ndarray:
    raw = rng.integers(0, 256, count * dim * WIRE_NUMPY[wire].itemsize, dtype=np.uint8)
    return raw.view(WIRE_NUMPY[wire]).reshape(count, dim)


def encode_rows(wire: str, rows: dict[str, Rows]) -> bytes:
    """A reply filled as the shard fills it."""
    reply = codec.ReplyMessage(wire)
    dims = [table.values.shape[1] for table in rows.values()]
    flags, values = reply(list(rows), [len(table.flags) for table in rows.values()], dims)
    flags[:] = np.concatenate([np.empty(0, np.uint8), *(table.flags for table in rows.values())])
    values[:] = np.concatenate([values[:0], *(table.values.reshape(-1) for table in rows.values())])
    return reply.message


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(TABLES, WIRES, st.integers(0, 2**32 - 1))
def test_pull_and_generated_classes_agree(tables: dict, wire: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = {name: random_ids(rng, count) for name, (count, _) in tables.items()}
    data = codec.encode_pull(WHO, 5, wire, ids, part=1, num_parts=4)
    message = pb.PullRequest.FromString(data)
    assert (message.caller.job, message.caller.epoch, message.caller.worker) == ("job/ä", 3, 1)
    assert [(t.table, t.num_rows) for t in message.tables] == [(name, len(i)) for name, i in ids.items()]
    assert message.row_ids == b"".join(i.tobytes() for i in ids.values())
    for encoded in (data, message.SerializeToString()):
        call = codec.decode_pull(encoded)
        assert (call.who, call.step, call.part, call.num_parts, call.wire_dtype) == (WHO, 5, 1, 4, wire)
        assert list(call.ids) == list(ids)
        assert all(same_bits(call.ids[name], ids[name]) for name in ids)


@given(TABLES, WIRES, st.integers(0, 2**32 - 1))
def test_push_and_generated_classes_agree(tables: dict, wire: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradients = {
        name: ShardGradients(
            random_ids(rng, count),
            random_values(rng, count, dim, wire),
            float(rng.random()),
            rng.random(dim, np.float32) if rng.random() < 0.5 else None,
        )
        for name, (count, dim) in tables.items()
    }
    data = codec.encode_push(WHO, 9, wire, gradients, part=0, num_parts=2)
    message = pb.PushRequest.FromString(data)
    assert message.values == b"".join(g.values.tobytes() for g in gradients.values())
    for encoded in (data, message.SerializeToString()):
        call = codec.decode_push(encoded)
        assert (call.who, call.step, call.part, call.num_parts, call.wire_dtype) == (WHO, 9, 0, 2, wire)
        assert list(call.gradients) == list(gradients)
        for name, sent in gradients.items():
            got = call.gradients[name]
            assert same_bits(got.row_ids, sent.row_ids)
            assert same_bits(got.values, sent.values)
            assert got.learning_rate == sent.learning_rate
            assert (got.default_gradient is None) == (sent.default_gradient is None)
            if sent.default_gradient is not None:
                assert same_bits(got.default_gradient, sent.default_gradient)


@given(TABLES, WIRES, st.integers(0, 2**32 - 1))
def test_rows_and_generated_classes_agree(tables: dict, wire: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {
        name: Rows(random_values(rng, count, dim, wire), rng.integers(0, 8, count, dtype=np.uint8))
        for name, (count, dim) in tables.items()
    }
    data = encode_rows(wire, rows)
    message = pb.PullResponse.FromString(data)
    assert message.flags == b"".join(r.flags.tobytes() for r in rows.values())
    for encoded in (data, message.SerializeToString()):
        got = codec.decode_rows(encoded)
        assert list(got) == list(rows)
        assert all(same_bits(got[name].values, rows[name].values) for name in rows)
        assert all(same_bits(got[name].flags, rows[name].flags) for name in rows)


@given(TABLES, st.integers(0, 2**32 - 1))
def test_prefetch_and_generated_classes_agree(tables: dict, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = {name: random_ids(rng, count) for name, (count, _) in tables.items()}
    prefetched = codec.encode_prefetch(ids)
    message = pb.PrefetchRequest.FromString(prefetched)
    for encoded in (prefetched, message.SerializeToString()):
        got = codec.decode_prefetch(encoded)
        assert {name: row_ids.tolist() for name, row_ids in got.items()} == {n: i.tolist() for n, i in ids.items()}


def test_values_are_aligned_and_read_where_they_lie() -> None:
    for name_length in range(1, 20):
        rows = {"t" * name_length: Rows(np.ones((3, 4), np.float32), np.zeros(3, np.uint8))}
        data = encode_rows("float32", rows)
        _, found = unframe(data, pb.PullResponse, (3, 4))
        assert found[4][0] % 8 == 0
        values = codec.decode_rows(data)["t" * name_length].values
        assert values.flags.aligned
        assert values.flags.writeable
        assert np.shares_memory(values, as_array(data))


def test_unaligned_values_of_another_client_are_copied() -> None:
    gradients = {"t": ShardGradients(np.arange(3), np.ones((3, 4), np.float32), 0.1)}
    message = pb.PushRequest.FromString(codec.encode_push(WHO, 1, "float32", gradients))
    message.ClearField("padding")
    seen = set()
    for length in range(8):
        message.caller.job = "j" * length
        data = message.SerializeToString()
        values = codec.decode_push(data).gradients["t"].values
        assert values.flags.aligned
        assert (values == 1).all()
        seen.add(np.shares_memory(values, as_array(data)))
    assert seen == {True, False}


def test_arrays_keep_the_message_alive() -> None:
    data = codec.encode_push(
        WHO, 1, "float32", {"t": ShardGradients(np.arange(3), np.full((3, 4), 7, np.float32), 0.1)}
    )
    before = sys.getrefcount(data)
    values = codec.decode_push(data).gradients["t"].values
    assert sys.getrefcount(data) == before + 1
    del data
    assert (values == 7).all()


def test_unknown_fields_of_a_later_version_are_skipped() -> None:
    data = codec.encode_pull(WHO, 1, "float32", {"t": np.arange(2)})
    # Field 100 as a varint, field 101 as 8 bytes, field 102 as 4, field 103 as a string.
    later = b"\xa0\x06\x05" + b"\xa9\x06" + bytes(8) + b"\xb5\x06" + bytes(4) + b"\xba\x06\x02hi"
    assert list(codec.decode_pull(later + data + later).ids["t"]) == [0, 1]


def test_of_a_repeated_bulk_field_the_last_counts() -> None:
    data = codec.encode_pull(WHO, 1, "float32", {"t": np.arange(2)})
    again = frame(pb.PullRequest(), {7: [np.array([8, 9])]})
    assert list(codec.decode_pull(data + again).ids["t"]) == [8, 9]
    assert pb.PullRequest.FromString(data + again).row_ids == np.array([8, 9]).tobytes()


def test_a_cut_message_is_refused() -> None:
    gradients = {"t": ShardGradients(np.arange(2), np.ones((2, 4), np.float32), 0.5, np.ones(4, np.float32))}
    data = codec.encode_push(WHO, 1, "float32", gradients)
    for length in range(len(data)):
        # Between two fields a cut leaves a whole message; without its table list that is an empty push.
        try:
            is_whole_and_empty = not pb.PushRequest.FromString(data[:length]).tables
        except DecodeError:
            is_whole_and_empty = False
        try:
            call = codec.decode_push(data[:length])
        except InvalidInput:
            continue
        assert is_whole_and_empty
        assert call.gradients == {}


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_read_but_never_crash(data: bytes) -> None:
    for decode in (codec.decode_pull, codec.decode_push, codec.decode_prefetch):
        with contextlib.suppress(InvalidInput):
            decode(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_wrong_byte_never_crashes(position: int, value: int) -> None:
    gradients = {"t": ShardGradients(np.arange(4), np.ones((4, 4), np.float32), 0.5)}
    data = bytearray(codec.encode_push(WHO, 1, "float32", gradients))
    data[position % len(data)] = value
    try:
        call = codec.decode_push(bytes(data))
    except InvalidInput:
        return
    assert sum(len(g.row_ids) for g in call.gradients.values()) == 4


def push_message(**changes: object) -> bytes:
    gradients = {"t": ShardGradients(np.arange(2), np.ones((2, 4), np.float32), 0.5)}
    message = pb.PushRequest.FromString(codec.encode_push(WHO, 1, "float32", gradients))
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (push_message(row_ids=bytes(15)), r"Push: row_ids has 15 bytes, the table list asks for 16 \(2 rows x 8\)"),
        (
            push_message(values=bytes(28)),
            r"Push: values has 28 bytes, the table list asks for 32 \(8 values \(rows x dim\)",
        ),
        (push_message(wire_dtype=3), r"Push: values has 32 bytes, the table list asks for 16"),
        (push_message(default_gradients=bytes(4)), r"Push: default_gradients has 4 bytes, the table list asks for 0"),
        (push_message(wire_dtype=0), r"Push: wire_dtype=0 is not one of float32, float16, bfloat16"),
        (push_message(wire_dtype=77), r"Push: wire_dtype=77 is not one of"),
        (push_message(part=2, num_parts=2), r"Push: part=2 must be below num_parts=2"),
        (push_message(part=1), r"Push: part=1 must be below num_parts=1"),
        (push_message(num_parts=10_000), r"Push: num_parts=10000 is above 256"),
        (b"\xff" * 12, r"varint before byte \d+ has over 64 bits"),
        (b"\x0b", r"wire type 3 at byte 1 is not one of proto3"),
        (b"\x3a\x7f", r"2 bytes are not a whole PushRequest"),
        (b"\x0a\x02\xff\xff", r"4 bytes are not a whole PushRequest"),
    ],
)
def test_messages_that_do_not_add_up(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        codec.decode_push(data)


def test_a_table_listed_twice_is_refused() -> None:
    message = pb.PullRequest(wire_dtype=1, tables=[pb.TableIds(table="t", num_rows=1)] * 2, row_ids=bytes(16))
    with pytest.raises(InvalidInput, match=r"Pull: table 't' is listed twice"):
        codec.decode_pull(message.SerializeToString())


@pytest.mark.parametrize("dim", [0, 4097])
def test_dims_out_of_range_are_refused(dim: int) -> None:
    message = pb.PushRequest(wire_dtype=1, tables=[pb.TableGradients(table="t", num_rows=0, dim=dim)])
    with pytest.raises(InvalidInput, match=rf"Push: table 't': dim={dim} must be 1 to 4096"):
        codec.decode_push(message.SerializeToString())
