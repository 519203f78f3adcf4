"""Rows deleted, tables dropped and workers that meet, over gRPC: as in process, on all shards, and once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from embedding_server.errors import FencedEpoch, InvalidInput, NotReady, StoreUnavailable, UnknownTable
from embedding_server.inproc import InprocStore
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import EmbeddingStore, Erased, Identity
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore
from tests.services.test_cuts import SPECS, assert_same, begin, route, run

Serve = Callable[..., list[str]]


@pytest.fixture
def stores(serve: Serve) -> Iterator[Callable[..., list[EmbeddingStore]]]:
    """stores(num_shards) -> [over gRPC, in process], with the tables of test_cuts."""
    made: list[EmbeddingStore] = []

    def make(num_shards: int) -> list[EmbeddingStore]:
        made.extend([RemoteStore(serve(num_shards)), InprocStore(memory_limit_bytes=64 << 20, backend="cpu")])
        for store in made:
            store.create_tables(SPECS)
        return made

    yield make
    for store in made:
        store.close()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_both_stores_delete_the_same(stores: Callable[..., list[EmbeddingStore]], num_shards: int) -> None:
    remote, local = stores(num_shards)
    outcomes = []
    for store in (remote, local):
        who = begin(store)
        run(store, who, 1, 6)
        ids = {"user": np.arange(-450, 0), "rare": np.arange(-450, 450, 3), "tail": np.arange(20_000) - 10_000}
        outcomes.append(store.delete_rows(who, 6, ids))
        assert store.stats().total().bytes_erasure_pending == 0
        assert {name: e.unknown for name, e in store.delete_rows(who, 6, ids).items()} == {
            name: row_ids.shape[0] for name, row_ids in ids.items()
        }
    assert outcomes[0] == outcomes[1]
    total = sum(outcomes[0].values(), Erased())
    assert min(total.hot, total.frozen, total.waiting, total.unknown) > 0
    assert remote.stats().total().rows_erased == total.hot + total.frozen + total.waiting
    assert_same(remote, local)
    for store in (remote, local):
        run(store, Identity("job", 1, 0), 7, 10)
    assert_same(remote, local)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_both_stores_drop_the_same_and_may_create_it_anew(
    stores: Callable[..., list[EmbeddingStore]], num_shards: int
) -> None:
    for store in stores(num_shards):
        who = begin(store)
        run(store, who, 1, 3)
        with pytest.raises(UnknownTable, match="'none'"):
            store.drop_tables(who, 3, ["user", "none"])
        assert "user" in store.table_specs()
        with pytest.raises(NotReady, match="step 4"):
            store.drop_tables(who, 4, ["user"])
        store.drop_tables(who, 3, ["user", "tail"])
        assert sorted(store.table_specs()) == sorted(store.stats().tables) == ["item", "rare"]
        with pytest.raises(UnknownTable, match="'user'"):
            store.drop_tables(who, 3, ["user"])
        with pytest.raises(UnknownTable, match="'user'"):
            store.lookup({"user": route(store, np.arange(5))})
        store.create_tables(SPECS)
        assert store.stats().tables["user"].rows_hot == 0
        run(store, who, 4, 6)
        assert store.stats().tables["user"].rows_hot > 0


def test_a_table_of_another_job_is_not_dropped_nor_its_rows_deleted(
    stores: Callable[..., list[EmbeddingStore]],
) -> None:
    for store in stores(2):
        run(store, begin(store), 1, 1)
        other = Identity("other", store.begin_epoch("other", 1, "sync").epoch, 0)
        with pytest.raises(InvalidInput, match="trained by job 'job'"):
            store.drop_tables(other, 0, ["user"])
        with pytest.raises(InvalidInput, match="trained by job 'job'"):
            store.delete_rows(other, 0, {"user": np.arange(3)})
        assert store.stats().tables["user"].rows_hot > 0


def test_a_request_that_is_sent_again_has_no_second_effect(serve: Serve) -> None:
    (address,) = serve(1)
    store = RemoteStore([address])
    spec = TableSpec(name="t", dim=4, optimizer=OptimizerSpec(kind="sgd"), policy=PolicySpec(kind="off"))
    store.create_tables([spec])
    who = begin(store)
    store.pull(who, 1, {"t": route(store, np.arange(10))})
    store.push(who, 1, {})
    channel = grpc.insecure_channel(address)
    shard = pb_grpc.EmbeddingShardStub(channel)
    caller = pb.Caller(job=who.job, epoch=who.epoch, worker=0)
    delete = pb.DeleteRows(
        tables=[pb.TableIds(table="t", num_rows=3)], row_ids=np.array([1, 2, 77]).tobytes(), is_last=True
    )
    request = pb.AdvanceRequest(caller=caller, step=1, delete_rows=delete)
    first = shard.Advance(request)
    assert (first.erased[0].hot, first.erased[0].unknown, first.done) == (2, 1, True)
    assert shard.Advance(request) == first
    assert store.stats().tables["t"].rows_erased == 2
    store.pull(who, 2, {"t": route(store, np.arange(10))})
    assert shard.Advance(request) == first  # a copy that the network kept: its step is over
    delete.slice = 5
    with pytest.raises(grpc.RpcError) as late:
        shard.Advance(pb.AdvanceRequest(caller=caller, step=1, delete_rows=delete))
    assert late.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert store.stats().tables["t"].rows_hot == 10
    store.push(who, 2, {})
    done = False
    for number in range(100):
        drop = pb.AdvanceRequest(caller=caller, step=2, drop_tables=pb.DropTables(tables=["t"], slice=number))
        done = shard.Advance(drop).done
        assert shard.Advance(drop).done == done
        if done:
            break
    assert done
    channel.close()
    store.close()


def test_workers_meet_and_learn_what_each_said(serve: Serve) -> None:
    addresses = serve(2)
    remotes = [RemoteStore(addresses, times=CallTimes(20.0, 0.3, 1.0)) for _ in range(2)]  # a try ends before they meet
    epoch = remotes[0].begin_epoch("job", 2, "sync").epoch

    def come(worker: int, number: int, topic: str, pause_s: float = 0.0) -> list[str]:
        time.sleep(pause_s)
        return remotes[worker].meet(Identity("job", epoch, worker), 0, number, topic, f"I am {worker}")

    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(come, 0, 0, "a"), pool.submit(come, 1, 0, "a", 1.0)]
        assert [future.result(30) for future in met] == [["I am 0", "I am 1"]] * 2
        assert come(0, 0, "a") == ["I am 0", "I am 1"]  # as after a lost answer
        differing = [pool.submit(come, 0, 1, "drop a"), pool.submit(come, 1, 1, "drop b")]
        for future in differing:
            with pytest.raises(InvalidInput, match="worker 0 wants 'drop a' and worker 1 'drop b'"):
                future.result(30)
        with pytest.raises(InvalidInput, match="count the meetings"):
            come(0, 1, "another")
        alone = pool.submit(come, 0, 2, "a")
        time.sleep(0.5)
        remotes[1].begin_epoch("job", 2, "sync")
        with pytest.raises(FencedEpoch):
            alone.result(30)
    for remote in remotes:
        remote.close()


def test_who_waits_for_a_worker_that_never_comes_is_told(serve: Serve) -> None:
    store = RemoteStore(serve(1), times=CallTimes(1.0, 0.3, 1.0))
    who = Identity("job", store.begin_epoch("job", 2, "sync").epoch, 0)
    with pytest.raises(StoreUnavailable, match="Meet did not finish within 1 s"):
        store.meet(who, 0, 0, "a")
    store.close()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"user": np.array([1.7])}, r"float64\[1\]; they must be a NumPy array int64\[n\]"),
        ({"user": np.array([True])}, "bool"),
        ({"user": np.array([2**63 + 1], np.uint64)}, "uint64"),
        ({"user": np.array([[1], [2]])}, r"int64\[2, 1\]"),
        ({"user": np.array(["1"])}, "<U1"),
        ({"user": np.int64(1)}, "are a int64"),
        ({"user": [1]}, "are a list"),
        ({"user": None}, "are a NoneType"),
        ({"user": np.ma.array([1, 2], mask=[False, True])}, "are a MaskedArray"),
        ([("user", np.array([1]))], "come as a list"),
        (None, "come as a NoneType"),
    ],
)
def test_no_store_guesses_which_rows_to_delete(
    stores: Callable[..., list[EmbeddingStore]], ids: object, message: str
) -> None:
    for store in stores(1):
        who = begin(store)
        run(store, who, 1, 1)
        with pytest.raises(InvalidInput, match=message):
            store.delete_rows(who, 1, ids)
        assert store.stats().total().rows_erased == 0


def test_a_text_is_no_list_of_tables_to_drop(stores: Callable[..., list[EmbeddingStore]]) -> None:
    for store in stores(1):
        store.create_tables([TableSpec(name="u", dim=4), TableSpec(name="s", dim=4)])
        who = begin(store)
        for wrong in ("us", None, [None]):
            with pytest.raises(InvalidInput, match="give a list of names"):
                store.drop_tables(who, 0, wrong)
        assert {"u", "s"} <= set(store.table_specs())
