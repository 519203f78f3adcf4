"""The clients that look up: routing over shards, replicas, maps that change, deadlines, pushback, and clear errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from embedding_server.errors import InvalidInput, Overloaded, StoreUnavailable, UnknownTable
from embedding_server.shard import Shard
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND
from services import lookup_client, parts
from services.admission import Limits
from services.channel_access import Metadata
from services.lookup_client import AsyncLookupClient, Bags, LookedUp, LookupClient
from services.lookup_reads import STATES, ValueReads, queries_of
from services.shard_client import RemoteStore
from services.shard_process import owned_buckets
from services.shard_server import ShardServer
from services.tries import CallTimes
from tests.services.lookup_rows import DIMS, IDS, STEPS, expected_user, random_ids, train

Serve = Callable[..., list[str]]
ENCODINGS = ("float32", "float16", "bfloat16", "stored")
#: seconds, generous: a busy machine may be slow to do what takes milliseconds
PATIENT = CallTimes(deadline_s=30.0, try_s=10.0, reconnect_s=0.2)


@pytest.fixture
def connect(serve: Serve) -> Iterator[Callable[..., LookupClient]]:
    """connect(num_shards, **options of LookupClient) -> a client of trained shards."""
    clients: list[LookupClient] = []

    def make(num_shards: int = 2, limits: Limits | None = None, **options: Any) -> LookupClient:
        addresses = serve(num_shards, limits=limits)
        train(addresses)
        clients.append(LookupClient(addresses, **{"times": PATIENT} | options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def shard_server(buckets: np.ndarray, limits: Limits | None = None) -> ShardServer:
    return ShardServer(Shard(buckets=buckets, memory_limit_bytes=64 << 20, backend="cpu"), limits)


def equal(mine: dict[str, LookedUp], theirs: dict[str, LookedUp]) -> bool:
    return mine.keys() == theirs.keys() and all(
        np.array_equal(mine[name].values, theirs[name].values) and np.array_equal(mine[name].flags, theirs[name].flags)
        for name in mine
    )


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_rows_come_in_the_order_that_was_asked_repeated_or_not(connect: Callable, num_shards: int) -> None:
    client = connect(num_shards)
    ids = random_ids(1, 300)
    rows = client.lookup(ids)
    assert list(rows) == list(ids)
    for name, row_ids in ids.items():
        assert rows[name].values.shape == (300, DIMS[name])
        assert rows[name].values.dtype == np.float32
        assert np.array_equal(
            rows[name].found, np.isin(row_ids, IDS) if name != "rare" else np.isin(row_ids, IDS[1:10])
        )
    assert np.array_equal(rows["user"].values, expected_user(ids["user"]))
    # one by one, they are the same rows
    for position in (0, 150, 299):
        one = client.lookup({name: row_ids[position : position + 1] for name, row_ids in ids.items()})
        for name in ids:
            assert np.array_equal(one[name].values[0], rows[name].values[position])
            assert one[name].flags[0] == rows[name].flags[position]


def test_states_and_versions(connect: Callable) -> None:
    rows = connect(2).lookup({"user": IDS, "item": IDS, "rare": np.append(IDS, 10**6)})
    assert set(rows["user"].states) == {STATES.index("hot")}
    frozen = rows["item"].states == STATES.index("frozen")
    assert frozen[20:].any()
    assert not frozen[:20].any()
    assert set(rows["rare"].states[1:10]) == {STATES.index("hot")}
    assert rows["rare"].states[-1] == STATES.index("default")
    assert rows["rare"].flags[-1] & (DEFAULT | FOUND) == DEFAULT
    assert (rows["rare"].values[-1] == 0.5).all()
    for table in rows.values():
        assert {(version.job, version.epoch, version.step) for version in table.versions} == {("job", 1, STEPS)}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_encodings_give_the_same_rows(connect: Callable, num_shards: int) -> None:
    client, ids = connect(num_shards), random_ids(2, 200)
    exact = client.lookup(ids)
    for encoding in ENCODINGS:
        rows = client.lookup(ids, encoding=encoding)
        for name in ids:
            assert rows[name].values.dtype == (np.float16 if encoding == "float16" else np.float32)
            assert np.array_equal(rows[name].flags, exact[name].flags)
            error = {"float32": 0, "stored": 0, "float16": 2**-11, "bfloat16": 2**-8}[encoding]
            assert np.allclose(rows[name].values, exact[name].values, rtol=error, atol=error / 100)


@pytest.mark.parametrize("encoding", ["float32", "float16"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_bags_are_pooled(connect: Callable, num_shards: int, pooling: str, encoding: str) -> None:
    client, random = connect(num_shards), np.random.default_rng(3)
    lengths = np.array([0, 1, 5, 0, 60, 134, 0])
    ids = random_ids(3, int(lengths.sum()))
    bags = {name: Bags(row_ids, lengths, pooling) for name, row_ids in ids.items()}
    bags["user"] = Bags(random.permutation(ids["user"]), lengths.astype(np.int32), pooling)
    pooled = client.lookup(bags, encoding=encoding)
    rows = client.lookup({name: bag.row_ids for name, bag in bags.items()})
    for name in ids:
        vectors = np.array([part.sum(axis=0) for part in np.split(rows[name].values, np.cumsum(lengths)[:-1])])
        if pooling == "mean":
            vectors /= np.maximum(lengths, 1)[:, None]
        assert pooled[name].values.dtype == np.dtype(encoding)
        assert np.allclose(pooled[name].values, vectors, rtol=2e-3 if encoding == "float16" else 1e-5, atol=1e-5)
        assert np.array_equal(pooled[name].flags, rows[name].flags)


def test_rows_and_bags_in_one_call_and_nothing_at_all(connect: Callable) -> None:
    client = connect(2)
    rows = client.lookup({"user": IDS[:0], "item": Bags([], [0, 0], "mean"), "rare": [5, -7]}, encoding="bfloat16")
    assert rows["user"].values.shape == (0, 8)
    assert rows["user"].versions == ()
    assert np.array_equal(rows["item"].values, np.zeros((2, 16), np.float32))
    assert rows["rare"].values.shape == (2, 4)
    assert client.lookup({}) == {}


def test_what_does_not_fit_a_message_goes_in_several(connect: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    client, ids = connect(2), random_ids(4, 400)
    bags = {name: Bags(row_ids, [150, 0, 250], "mean") for name, row_ids in ids.items()}
    whole, pooled = client.lookup(ids), client.lookup(bags)
    monkeypatch.setattr(parts.split, "__defaults__", (2000, parts.MAX_PARTS))
    reads = ValueReads(queries_of(ids, "float32"), "float32", client._router.map)
    assert sum(len(messages) for messages in reads.rounds()) > 10
    assert equal(client.lookup(ids), whole)
    for name, table in client.lookup(bags).items():
        assert np.allclose(table.values, pooled[name].values, rtol=1e-5, atol=1e-6)


def test_lists_and_small_integers_are_row_ids_and_others_are_not(connect: Callable) -> None:
    client = connect(1)
    expected = client.lookup({"user": IDS[:3]})
    for ids in (IDS[:3].tolist(), IDS[:3].astype(np.uint8), IDS[:6:2] // 2):
        assert equal(client.lookup({"user": ids}), expected)
    for wrong in ([0.5], IDS.astype(np.uint64), [[1, 2]], ["1"], [2**63], [True]):
        with pytest.raises(InvalidInput, match="table 'user': row_ids has dtype"):
            client.lookup({"user": wrong})
    for lengths in ([1, 1], [4, -1], [2.0, 1.0]):
        with pytest.raises(InvalidInput, match="lengths"):
            client.lookup({"user": Bags(IDS[:3], lengths)})
    with pytest.raises(InvalidInput, match="encoding='int8' is not one of float32"):
        client.lookup({"user": IDS}, encoding="int8")
    with pytest.raises(InvalidInput, match="cannot be pooled"):
        client.lookup({"user": Bags([1], [1])}, encoding="stored")
    with pytest.raises(UnknownTable, match="table 'nope' does not exist .tables: item, rare, user"):
        client.lookup({"nope": [1]})


@pytest.mark.parametrize("num_shards", [1, 2])
def test_asyncio_gives_the_same(connect: Callable, num_shards: int) -> None:
    client, ids = connect(num_shards), random_ids(5, 100)
    bags = {name: Bags(row_ids, [40, 60]) for name, row_ids in ids.items()}

    async def look_up() -> list[dict[str, LookedUp]]:
        async with AsyncLookupClient(client._router.addresses, times=PATIENT) as other:
            assert (await other.table_specs()).keys() == DIMS.keys()
            asked = [(ids, "float32"), (ids, "stored"), (bags, "float16")]
            return await asyncio.gather(*(other.lookup(what, encoding=encoding) for what, encoding in asked))

    plain, stored, pooled = asyncio.run(look_up())
    assert equal(plain, client.lookup(ids))
    assert equal(stored, client.lookup(ids, encoding="stored"))
    assert equal(pooled, client.lookup(bags, encoding="float16"))


# --- replicas, and buckets that move ---------------------------------------------------------------------------------


@pytest.fixture
def replicas() -> Iterator[list[ShardServer]]:
    """Two servers with the same rows of all buckets; `address` of each."""
    servers = [shard_server(owned_buckets(0, 1)) for _ in range(2)]
    for server in servers:
        server.address = server.start()  # type: ignore[attr-defined]
        train([server.address])  # type: ignore[attr-defined]
    yield servers
    for server in servers:
        server.stop(grace_s=0.5)


def test_one_of_two_replicas_dies_and_no_look_up_fails(replicas: list[ShardServer]) -> None:
    addresses = [server.address for server in replicas]  # type: ignore[attr-defined]
    failures: list[BaseException] = []
    counts, is_over = [0] * 3, threading.Event()
    with LookupClient(addresses, times=PATIENT) as client:
        expected = client.lookup({"user": IDS})["user"].values

        def look_up(number: int) -> None:
            while not is_over.is_set():
                try:
                    assert np.array_equal(client.lookup({"user": IDS})["user"].values, expected)
                    counts[number] += 1
                except BaseException as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=look_up, args=(number,)) for number in range(len(counts))]
        for thread in threads:
            thread.start()
        wait_for(lambda: all(count > 20 for count in counts))
        replicas[0].stop(grace_s=0.0)
        after = list(counts)
        wait_for(lambda: bool(failures) or all(now > then + 50 for now, then in zip(counts, after, strict=True)))
        is_over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        wait_for(lambda: client._router.map is not None and addresses[0] in client._router.map.silent, client)


def test_a_replica_that_comes_back_is_used_again(replicas: list[ShardServer]) -> None:
    addresses = [server.address for server in replicas]  # type: ignore[attr-defined]
    with LookupClient(addresses, times=PATIENT) as client:
        replicas[0].stop(grace_s=0.0)
        wait_for(lambda: client._router.map.groups == ((addresses[1],),), client)  # type: ignore[union-attr]
        again = shard_server(owned_buckets(0, 1))
        again.start(int(addresses[0].rpartition(":")[2]))
        try:
            train([addresses[0]])
            wait_for(lambda: len(client._router.map.groups[0]) == 2, client)  # type: ignore[union-attr]
            replicas[1].stop(grace_s=0.0)
            assert client.lookup({"user": IDS})["user"].found.all()
        finally:
            again.stop(grace_s=0.5)


def test_asyncio_survives_a_replica_too(replicas: list[ShardServer]) -> None:
    addresses = [server.address for server in replicas]  # type: ignore[attr-defined]

    async def look_up() -> None:
        async with AsyncLookupClient(addresses, times=PATIENT) as client:
            expected = (await client.lookup({"user": IDS}))["user"].values
            for number in range(60):
                if number == 20:
                    threading.Thread(target=replicas[1].stop, args=(0.0,)).start()
                rows = await asyncio.gather(*(client.lookup({"user": IDS}) for _ in range(3)))
                assert all(np.array_equal(each["user"].values, expected) for each in rows)

    asyncio.run(look_up())


def wait_for(is_reached: Callable[[], bool], client: LookupClient | None = None, timeout_s: float = 60.0) -> None:
    """Until it holds; with a client, which looks up meanwhile: only then does it learn beside."""
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < deadline_s, "not reached in time"
        if client is not None:
            client.lookup({"user": IDS})
        time.sleep(0.01)


def test_shards_that_swap_their_buckets_are_learned_again() -> None:
    servers = [shard_server(owned_buckets(index, 2)) for index in range(2)]
    ports = [int(server.start().rpartition(":")[2]) for server in servers]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    train(addresses)
    with LookupClient(addresses, times=PATIENT) as client:
        expected = client.lookup({"user": IDS, "item": IDS})
        for server in servers:
            server.stop(grace_s=0.0)
        servers = [shard_server(owned_buckets(1 - index, 2)) for index in range(2)]
        try:
            for server, port in zip(servers, ports, strict=True):
                server.start(port)
            train(addresses)
            assert equal(client.lookup({"user": IDS, "item": IDS}), expected)
        finally:
            for server in servers:
                server.stop(grace_s=0.5)


def test_addresses_may_be_a_function_that_follows_the_shards(serve: Serve) -> None:
    first = serve(1)
    train(first)
    known = list(first)
    with LookupClient(lambda: known, times=PATIENT) as client:
        expected = client.lookup({"user": IDS})
        second = serve(2)
        train(second)
        known[:] = second
        serve.servers[0].stop(grace_s=0.0)  # type: ignore[attr-defined]
        assert equal(client.lookup({"user": IDS}), expected)


def test_a_table_that_is_created_later_is_found(connect: Callable) -> None:
    client = connect(2)
    store = RemoteStore(client._router.addresses)
    store.create_tables([TableSpec(name="late", dim=4, policy=PolicySpec(kind="off"))])
    store.close()
    assert not client.lookup({"late": [1, 2, 3]})["late"].found.any()
    assert client.spec("late").dim == 4


def test_addresses_that_do_not_fit_together(serve: Serve) -> None:
    halves, whole = serve(2), serve(1)
    with pytest.raises(InvalidInput, match="no addresses"):
        LookupClient([])
    with pytest.raises(InvalidInput, match="has no port; write host:port"):
        LookupClient(["localhost"])
    with pytest.raises(InvalidInput, match="no shard of 1 answers for bucket 0; list the addresses of all shards"):
        LookupClient(halves[1:])
    with pytest.raises(InvalidInput, match="both answer for bucket 0, but not for the same buckets"):
        LookupClient([halves[0], whole[0]])
    serve.servers[1].stop(grace_s=0.0)  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match=f"1 of 2 addresses did not answer, {halves[1]} among them"):
        LookupClient(halves, times=CallTimes(deadline_s=0.5, try_s=0.5, reconnect_s=0.1))


# --- time and room ---------------------------------------------------------------------------------------------------


def test_a_look_up_ends_at_its_deadline(connect: Callable, serve: Serve) -> None:
    client = connect(1)
    release = threading.Event()
    serve.servers[0]._state.executor.run(lambda shard: release.wait(30.0))  # type: ignore[attr-defined]
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"EmbeddingLookup/Lookup did not finish within .* s \(\d tries\)"):
        client.lookup({"user": IDS}, timeout_s=0.3)
    assert time.monotonic() - started_s < 10.0
    release.set()
    assert client.lookup({"user": IDS})["user"].found.all()


def test_a_replica_that_hangs_is_left_for_the_other(replicas: list[ShardServer]) -> None:
    addresses = [server.address for server in replicas]  # type: ignore[attr-defined]
    release = threading.Event()
    with LookupClient(addresses, times=CallTimes(deadline_s=30.0, try_s=0.3, reconnect_s=0.2)) as client:
        replicas[0]._state.executor.run(lambda shard: release.wait(30.0))
        try:
            for _ in range(5):
                assert client.lookup({"user": IDS})["user"].found.all()
        finally:
            release.set()


def test_a_full_shard_is_tried_again_after_its_pushback(connect: Callable, serve: Serve) -> None:
    client = connect(1, limits=Limits(max_calls=1, retry_after_ms=20))
    queries, rows = queries_of({"user": IDS}, "float32"), []
    threads = [threading.Thread(target=lambda: rows.append(client.lookup({"user": IDS}))) for _ in range(3)]
    with serve.servers[0]._state.admission.call():  # type: ignore[attr-defined]
        with pytest.raises(Overloaded, match="max_calls=1 calls are in the server; try again in 20 ms"):
            client.read(lambda used: ValueReads(queries, "float32", used), waits_for_room=False)
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert rows == []
    for thread in threads:
        thread.join()
    assert len(rows) == 3


def test_a_closed_client_says_so(connect: Callable) -> None:
    client = connect(1)
    client.close()
    with pytest.raises(StoreUnavailable, match="was closed"):
        client.lookup({"user": IDS})


def test_deadlines_by_default(connect: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(1)
    assert lookup_client.LOOKUP_TIMES.deadline_s == 5.0
    assert client._router.times is PATIENT
    asked: list[float] = []
    call = client._channels[client._router.addresses[0]].call

    def noted(method: str, request: bytes, timeout_s: float, metadata: Metadata | None) -> bytes:
        asked.append(timeout_s)
        return call(method, request, timeout_s, metadata)

    monkeypatch.setattr(client._channels[client._router.addresses[0]], "call", noted)
    client.lookup({"user": IDS})
    client.lookup({"user": IDS}, timeout_s=7.0)
    assert 29.0 < asked[0] <= 30.0
    assert 6.0 < asked[1] <= 7.0
