"""EmbeddingLookup of shards over real gRPC, called as another language would: with the generated classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from embedding_server.errors import StoreUnavailable, WrongShard
from embedding_server.kernels.hashing import buckets_of
from embedding_server.kernels.wire import from_float32
from embedding_server.lookup import TableQuery
from embedding_server.restore import Restore
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, Frostline, Identity, RoutedIds, TableGradients
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services import lookup_codec, rpc_errors
from services.shard_client import RemoteStore
from tests.embedding_server.looked_up import decode_stored

Serve = Callable[..., list[str]]
IDS = np.array([-(2**63), 2**63 - 1, -1, 0, *range(1, 200)], np.int64)
UNKNOWN = np.array([-(2**62), 10**15, 777], np.int64)
BITS = {"a": 4, "b": 8, "c": 32}
HOT, FROZEN = pb.FLAG_FOUND | pb.FLAG_TRAINABLE, pb.FLAG_FOUND


def spec_of(name: str) -> TableSpec:
    policy = PolicySpec(
        kind="topk", frozen_bits=BITS[name], probation_visits=0, control_fraction=0.0, min_count=2 if name == "b" else 1
    )
    return TableSpec(name=name, dim=8, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0.0, init_max=0.0)


def routed(store: RemoteStore, ids: np.ndarray) -> RoutedIds:
    shards = store.shard_of_bucket[buckets_of(ids, NUM_BUCKETS)]
    order = np.argsort(shards, kind="stable")
    return RoutedIds(ids[order], np.searchsorted(shards[order], np.arange(store.num_shards + 1)))


def train(addresses: list[str]) -> dict[str, dict[int, np.ndarray]]:
    """Three steps and a re-selection that freezes the ids visited twice. What each table then holds, by row_id."""
    store = RemoteStore(addresses)
    store.create_tables([spec_of(name) for name in BITS])
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    rng = np.random.default_rng(7)
    for step in range(1, 7):
        ids = {name: routed(store, IDS if step <= 2 else IDS[::2]) for name in BITS}
        rows = store.pull(who, step, ids)
        gradients = {}
        for name, of_table in ids.items():
            trainable = of_table.row_ids[(rows[name].flags & 1) != 0]
            values = rng.normal(0, 1, (len(trainable), 8)).astype(np.float32)
            default = rng.normal(0, 1, 8).astype(np.float32) if name == "b" else None
            gradients[name] = TableGradients(routed_again(store, trainable), values, 0.5, default)
        store.push(who, step, gradients)
    lines = {}
    for name, heat in store.heat_histograms(who, 6).items():
        occupied = np.flatnonzero(heat.counts)
        gap = int(np.argmax(np.diff(occupied)))
        lines[name] = Frostline(int(occupied[gap] + occupied[gap + 1]) // 2)
    store.reselect(who, 6, lines)
    every = routed(store, np.concatenate([IDS, UNKNOWN]))
    rows = store.lookup(dict.fromkeys(BITS, every))
    assert {int(flags) for flags in rows["a"].flags} == {0, HOT, FROZEN}
    store.close()
    return {name: dict(zip(every.row_ids.tolist(), rows[name].values, strict=True)) for name in BITS}


def routed_again(store: RemoteStore, ids: np.ndarray) -> RoutedIds:
    """Ids that are in order of their shards."""
    shards = store.shard_of_bucket[buckets_of(ids, NUM_BUCKETS)]
    return RoutedIds(ids, np.searchsorted(shards, np.arange(store.num_shards + 1)))


@pytest.fixture
def one(serve: Serve) -> Iterator[tuple[pb_grpc.EmbeddingLookupStub, dict[str, dict[int, np.ndarray]]]]:
    """A shard that has trained: a stub, and what its tables hold."""
    addresses = serve()
    rows = train(addresses)
    with grpc.insecure_channel(addresses[0]) as channel:
        yield pb_grpc.EmbeddingLookupStub(channel), rows


def request(wire_dtype: int, ids: dict[str, np.ndarray]) -> pb.LookupRequest:
    return pb.LookupRequest(
        wire_dtype=wire_dtype,
        tables=[pb.TableLookup(table=name, num_rows=len(of_table)) for name, of_table in ids.items()],
        row_ids=b"".join(of_table.astype("<i8").tobytes() for of_table in ids.values()),
    )


def test_every_value_encoding_of_many_tables_in_one_call(one: tuple) -> None:
    stub, rows = one
    ids = {name: np.concatenate([UNKNOWN, IDS[i:], IDS[:5]]) for i, name in enumerate(BITS)}
    expected = np.stack([rows[name][i] for name in ids for i in ids[name].tolist()])
    for name, wire_dtype in (("float32", 1), ("float16", 2), ("bfloat16", 3)):
        reply = stub.Lookup(request(wire_dtype, ids))
        assert reply.values == from_float32(expected, name).tobytes()
        assert [(t.table, t.num_rows, t.dim) for t in reply.tables] == [(n, len(i), 8) for n, i in ids.items()]
    stored = stub.Lookup(request(pb.WIRE_DTYPE_STORED, ids))
    formats = np.frombuffer(stored.formats, np.uint8)
    assert decode_stored(np.frombuffer(stored.values, np.uint8), formats, 8)[0].tobytes() == expected.tobytes()
    assert len(stored.values) < len(expected.tobytes())
    assert stored.flags == reply.flags
    of_a = formats[: len(ids["a"])]
    flags = np.frombuffer(stored.flags, np.uint8)[: len(ids["a"])]
    assert set(zip(flags.tolist(), of_a.tolist(), strict=True)) == {(0, 0), (HOT, 32), (FROZEN, 4)}


def test_flags_tell_the_state_of_each_row(one: tuple) -> None:
    stub, rows = one
    ids = np.array([IDS[0], IDS[1], UNKNOWN[0]])
    for name, absent in (("a", 0), ("b", pb.FLAG_DEFAULT)):
        reply = stub.Lookup(request(1, {name: ids}))
        assert list(reply.flags) == [HOT, FROZEN, absent]
        default = np.frombuffer(reply.values, np.float32).reshape(3, 8)[2]
        assert default.any() == (name == "b")
        assert default.tobytes() == rows[name][int(UNKNOWN[1])].tobytes()


def test_pooled_and_plain_tables_in_one_call(one: tuple) -> None:
    stub, rows = one
    bags = [[], [0, 1, 2], [777], [5, 5, -1, -(2**63)]]
    flat = np.array([i for bag in bags for i in bag], np.int64)
    tables = [
        pb.TableLookup(table="a", num_rows=len(flat), pooling=pb.POOLING_SUM, num_bags=4),
        pb.TableLookup(table="c", num_rows=2),
        pb.TableLookup(table="a", num_rows=len(flat), pooling=pb.POOLING_MEAN, num_bags=4),
    ]
    lengths = [len(bag) for bag in bags] * 2
    for dtype in (np.int32, np.int64):
        reply = stub.Lookup(
            pb.LookupRequest(
                wire_dtype=pb.WIRE_DTYPE_FLOAT32,
                tables=tables,
                row_ids=np.concatenate([flat, [7, 8], flat]).tobytes(),
                lengths=np.array(lengths, dtype).tobytes(),
            )
        )
        values = np.frombuffer(reply.values, np.float32).reshape(-1, 8)
        sums = np.zeros((4, 8), np.float32)
        for bag, of_bag in enumerate(bags):
            for i in of_bag:
                sums[bag] += rows["a"][i]
        means = sums / np.array([[1], [3], [1], [4]], np.float32)
        plain = np.stack([rows["c"][7], rows["c"][8]])
        assert values.tobytes() == np.concatenate([sums, plain, means]).tobytes()
        assert len(reply.flags) == 2 * len(flat) + 2
        assert [(t.table, t.num_rows, t.num_bags, t.pooling) for t in reply.tables] == [
            ("a", len(flat), 4, pb.POOLING_SUM), ("c", 2, 0, 0), ("a", len(flat), 4, pb.POOLING_MEAN)
        ]  # fmt: skip


def test_empty_calls_and_tables_without_rows(one: tuple) -> None:
    stub, _ = one
    none = np.empty(0, np.int64)
    for wire_dtype in (1, 2, 3, 4):
        empty = stub.Lookup(pb.LookupRequest(wire_dtype=wire_dtype))
        assert (len(empty.tables), empty.flags, empty.values) == (0, b"", b"")
        reply = stub.Lookup(request(wire_dtype, {"a": none, "c": none}))
        assert [(t.table, t.num_rows, t.dim) for t in reply.tables] == [("a", 0, 8), ("c", 0, 8)]


def test_every_reply_carries_the_version_that_it_was_read_at(one: tuple) -> None:
    stub, _ = one
    version = pb.Version(job="job", epoch=1, step=6)
    reply = stub.Lookup(request(1, {"a": IDS, "b": IDS}))
    assert list(reply.versions) == [version]
    assert [t.version for t in reply.tables] == [0, 0]
    listed = stub.ListTables(pb.ListTablesRequest())
    assert list(listed.versions) == [version] * 3
    assert stub.GetTable(pb.GetTableRequest(name="a")).version == version


def test_tables_and_buckets_can_be_learned(serve: Serve) -> None:
    addresses = serve(num_shards=3)
    train(addresses)
    owners = np.zeros(NUM_BUCKETS, np.int64)
    rows = 0
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.EmbeddingLookupStub(channel)
            listed = stub.ListTables(pb.ListTablesRequest())
            assert {t.name: t.dim for t in listed.tables} == dict.fromkeys(BITS, 8)
            assert TableSpec.model_validate_json(listed.tables[0].spec_json) == spec_of("a")
            assert listed.num_buckets == NUM_BUCKETS
            for part in listed.buckets:
                owners[part.first : part.last + 1] += 1
            table = stub.GetTable(pb.GetTableRequest(name="a"))
            assert (table.table.name, table.num_buckets) == ("a", NUM_BUCKETS)
            assert list(table.buckets) == list(listed.buckets)
            rows += table.mask_info.rows_hot + table.mask_info.rows_frozen
    assert (owners == 1).all()
    assert rows == len(IDS)


def test_buckets_follow_from_the_arithmetic_in_the_proto() -> None:
    """What embedding.proto tells clients, in plain integers."""
    mask = 2**64 - 1
    for row_id in [*IDS.tolist(), *UNKNOWN.tolist()]:
        x = (row_id + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        assert (x ^ (x >> 31)) % NUM_BUCKETS == buckets_of(np.array([row_id], np.int64), NUM_BUCKETS)[0]


def test_a_row_id_of_another_shard_is_told_apart_from_other_faults(serve: Serve) -> None:
    addresses = serve(num_shards=2)
    train(addresses)
    with grpc.insecure_channel(addresses[0]) as channel:
        stub = pb_grpc.EmbeddingLookupStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Lookup(request(1, {"a": IDS}))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(rpc_errors.from_rpc_error(refused.value, "shard 0"), WrongShard)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Lookup(request(1, {"nope": IDS}))
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_table_that_is_being_restored_is_not_read(one: tuple, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, _ = one
    restore = object.__new__(Restore)
    restore.names = frozenset({"b"})
    shard = serve.servers[0]._state.executor._shard  # type: ignore[attr-defined]
    monkeypatch.setitem(shard._restores, "job", restore)
    stub.Lookup(request(1, {"a": IDS}))
    with pytest.raises(grpc.RpcError) as refused:
        stub.Lookup(request(1, {"a": IDS, "b": IDS}))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert isinstance(rpc_errors.from_rpc_error(refused.value, "shard 0"), StoreUnavailable)
    assert "'b' is being restored by job 'job'" in refused.value.details()


def test_our_own_messages_get_the_same_answer(serve: Serve) -> None:
    addresses = serve()
    train(addresses)
    queries = [TableQuery("a", IDS), TableQuery("c", IDS[:9], "mean", np.array([4, 0, 5]))]
    with grpc.insecure_channel(addresses[0]) as channel:
        raw = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        answers = lookup_codec.decode_answers(raw(lookup_codec.encode_lookup("float16", queries), timeout=20))
        stub = pb_grpc.EmbeddingLookupStub(channel)
        plain = stub.Lookup(request(2, {"a": IDS}))
        bags = np.frombuffer(stub.Lookup(request(1, {"c": IDS[:9]})).values, np.float32).reshape(9, 8)
    assert answers[0].values.tobytes() == plain.values
    assert answers[0].flags.tobytes() == plain.flags
    expected = np.stack([sum(bags[1:4], bags[0]) / np.float32(4), np.zeros(8, np.float32), sum(bags[5:], bags[4]) / 5])
    assert answers[1].values.tobytes() == from_float32(expected.astype(np.float32), "float16").tobytes()
