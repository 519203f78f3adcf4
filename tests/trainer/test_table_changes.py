"""Rows deleted, tables added and dropped, features added: between two steps of a collection, by every worker alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import FrostlineError, InvalidInput, NotReady, TableConflict, UnknownTable
from embedding_server.inproc import InprocStore
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, Erased, Identity, RoutedIds
from trainer.embedding import FrostlineEmbeddingBagCollection, FrostlineEmbeddingCollection

SGD, IDLE = OptimizerSpec(kind="sgd"), PolicySpec(kind="idle", idle_steps=100)


@pytest.fixture
def store() -> Iterator[InprocStore]:
    made = InprocStore(memory_limit_bytes=1 << 28, timeout_s=20.0)
    yield made
    made.close()


def bag(name: str, *features: str, dim: int = 4) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=9, feature_names=list(features))


def batch(**ids: list[int]) -> KeyedJaggedTensor:
    """One sample."""
    values = torch.tensor([i for of_key in ids.values() for i in of_key], dtype=torch.int64)
    return KeyedJaggedTensor(list(ids), values, lengths=torch.tensor([len(of_key) for of_key in ids.values()]))


def collection(store: InprocStore, *configs: EmbeddingBagConfig, **options) -> FrostlineEmbeddingBagCollection:
    return FrostlineEmbeddingBagCollection(list(configs), store, optimizer=SGD, policy=IDLE, **options)


def train(ebc: FrostlineEmbeddingBagCollection, **ids: list[int]) -> dict[str, np.ndarray]:
    """One step of SGD with lr 1 on the sum of all outputs; the outputs before it."""
    out = ebc(batch(**ids))
    out.values().sum().backward()
    ebc.step(1.0)
    return {key: value.detach().numpy().copy() for key, value in out.to_dict().items()}


def row(store: InprocStore, table: str, row_id: int) -> tuple[np.ndarray, bool]:
    rows = store.lookup({table: RoutedIds(np.array([row_id], np.int64), np.array([0, 1]))})[table]
    return rows.values[0], bool(rows.flags[0] & FOUND)


def test_rows_are_deleted_and_begin_anew(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"))
    first = train(ebc, a=[7])["a"]
    assert not np.array_equal(row(store, "t", 7)[0], first[0])
    assert ebc.delete_rows({"t": torch.tensor([7, 8, 7])}) == {"t": Erased(hot=1, unknown=1)}
    assert ebc.delete_rows({"t": [7]}) == {"t": Erased(unknown=1)}
    assert ebc.delete_rows({"t": []}) == {"t": Erased()}
    assert not row(store, "t", 7)[1]
    assert np.array_equal(train(ebc, a=[7])["a"], first)
    with pytest.raises(InvalidInput, match=r"float64\[1\]; they must be int64"):
        ebc.delete_rows({"t": [0.5]})


def test_a_table_is_added_and_trains_beside_the_others(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"))
    for _ in range(3):
        train(ebc, a=[1])
    ebc.add_table(bag("new", "b", dim=8))
    out = train(ebc, a=[1], b=[5])
    assert list(out) == ["a", "b"]
    assert out["b"].shape == (1, 8)
    assert np.allclose(row(store, "new", 5)[0], out["b"][0] - 1)
    assert store.stats().tables["new"].rows_hot == 1
    assert [config.name for config in ebc.embedding_bag_configs()] == ["t", "new"]
    store.reselect(ebc.identity, 4, {})


def test_the_new_table_takes_a_spec_of_its_own_and_decays(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"))
    train(ebc, a=[1])
    spec = TableSpec(name="new", dim=4, optimizer=OptimizerSpec(kind="sgd", weight_decay=0.5), init_min=1, init_max=2)
    ebc.add_table(bag("new", "b"), spec)
    before = train(ebc, a=[1], b=[5])["b"][0]
    after = row(store, "new", 5)[0]
    assert np.allclose(after, 0.5 * before - 1)
    train(ebc, a=[1], b=[])  # its learning rate goes with a push that names none of its rows
    assert np.allclose(row(store, "new", 5)[0], 0.5 * after)


def test_a_table_is_dropped_and_may_come_anew_with_another_dim(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"), bag("old", "b"))
    train(ebc, a=[1], b=[5])
    ebc.drop_table("old")
    assert list(store.table_specs()) == list(store.stats().tables) == ["t"]
    assert list(train(ebc, a=[1], b=[5])) == ["a"]
    ebc.add_table(bag("old", "b", dim=8))
    assert train(ebc, a=[1], b=[5])["b"].shape == (1, 8)


def test_an_added_feature_shares_rows_one_visit_and_the_sum_of_gradients(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"), bag("u", "b"))
    train(ebc, a=[1], b=[1])
    config = ebc.embedding_bag_configs()[0]
    ebc.add_feature("t", "c")
    assert config.feature_names == ["a"]
    before, visits = row(store, "t", 1)[0], visits_of(store, "t", 1)
    out = train(ebc, a=[1, 1], b=[1], c=[1])
    assert np.array_equal(out["c"][0], before)
    assert np.allclose(row(store, "t", 1)[0], before - 3)  # named twice by a, once by c
    assert visits_of(store, "t", 1) == visits + 1
    ebc.add_feature("t", "b")  # of another table, too: TorchRec's names
    assert list(train(ebc, a=[1], b=[1], c=[1])) == ["a", "c", "b@t", "b@u"]


def visits_of(store: InprocStore, table: str, row_id: int) -> int:
    of_table = store._shard._tables[table]
    slot = of_table.index.locate(np.array([row_id], np.int64))[1][0]
    return int(of_table.visits.array[slot, 0])


def test_a_sequence_collection_changes_too(store: InprocStore) -> None:
    configs = [EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])]
    collection = FrostlineEmbeddingCollection(configs, store, optimizer=SGD, policy=IDLE)
    collection.add_table(EmbeddingConfig(name="new", embedding_dim=4, num_embeddings=9, feature_names=["b"]))
    collection.add_feature("t", "c")
    out = collection(batch(a=[1, 2], b=[3], c=[1]))
    assert {name: tuple(jagged.values().shape) for name, jagged in out.items()} == {
        "a": (2, 4), "c": (1, 4), "b": (1, 4),
    }  # fmt: skip
    sum(jagged.values().sum() for jagged in out.values()).backward()
    collection.step(1.0)
    with pytest.raises(InvalidInput, match=r"dims \[4, 8\]"):
        collection.add_table(EmbeddingConfig(name="x", embedding_dim=8, num_embeddings=9, feature_names=["d"]))


def test_what_is_refused_changes_nothing(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"), bag("u", "b"))
    train(ebc, a=[1], b=[1])
    store.create_tables([TableSpec(name="taken", dim=16)])
    with pytest.raises(TableConflict, match="exists with another spec"):
        ebc.add_table(bag("taken", "c"))
    for wrong, message in [
        (lambda: ebc.add_table(bag("t", "c")), "in the collection already"),
        (lambda: ebc.drop_table("none"), "cannot be dropped"),
        (lambda: ebc.add_feature("none", "c"), "not in the collection"),
        (lambda: ebc.add_feature("t", "a"), "has feature 'a' already"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            wrong()
    out = ebc(batch(a=[1], b=[1]))
    with pytest.raises(NotReady, match="a step is open or prefetched"):
        ebc.drop_table("u")
    out.values().sum().backward()
    ebc.step(1.0)
    assert list(train(ebc, a=[1], b=[1])) == ["a", "b"]
    ebc.drop_table("u")
    with pytest.raises(InvalidInput, match="one table must stay"):
        ebc.drop_table("t")


Work = Callable[[FrostlineEmbeddingBagCollection], object]


def two_workers(store: InprocStore, mode: str, *works: Work) -> list[object]:
    """What each worker's work gave, or raised."""
    epoch = store.begin_epoch("job", 2, mode).epoch
    configs = [bag("t", "a"), bag("u", "b")]

    def run(worker: int) -> object:
        ebc = collection(store, *configs, identity=Identity("job", epoch, worker))
        train(ebc, a=[1], b=[worker])
        try:
            return works[worker](ebc)
        except FrostlineError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return [future.result(60) for future in [pool.submit(run, 0), pool.submit(run, 1)]]


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_all_workers_do_the_same(store: InprocStore, mode: str) -> None:
    def work(ebc: FrostlineEmbeddingBagCollection) -> object:
        erased = ebc.delete_rows({"t": [1, 2]})
        ebc.add_table(bag("new", "c"))
        ebc.drop_table("u")
        ebc.add_feature("t", "d")
        return erased, list(train(ebc, a=[1], c=[1], d=[1]))

    assert two_workers(store, mode, work, work) == [({"t": Erased(hot=1, unknown=1)}, ["a", "d", "c"])] * 2
    assert sorted(store.table_specs()) == ["new", "t"]


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_workers_that_differ_get_an_error_and_do_not_hang(store: InprocStore, mode: str) -> None:
    outcomes = two_workers(store, mode, lambda ebc: ebc.drop_table("t"), lambda ebc: ebc.drop_table("u"))
    assert [type(outcome) for outcome in outcomes] == [InvalidInput, InvalidInput]
    assert all("worker 0 wants" in str(outcome) for outcome in outcomes)
    assert sorted(store.table_specs()) == ["t", "u"]
    outcomes = two_workers(
        store, mode, lambda ebc: ebc.delete_rows({"t": [1]}), lambda ebc: ebc.delete_rows({"t": [2]})
    )
    assert [type(outcome) for outcome in outcomes] == [InvalidInput, InvalidInput]
    assert store.stats().total().rows_erased == 0


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_worker_that_goes_on_without_the_others_is_an_error_for_them(store: InprocStore, mode: str) -> None:
    def alone(ebc: FrostlineEmbeddingBagCollection) -> object:
        with pytest.raises(NotReady, match="worker 1 has pulled step 2"):
            ebc.drop_table("u")
        return train(ebc, a=[1], b=[1])

    outcomes = two_workers(store, mode, alone, lambda ebc: train(ebc, a=[1], b=[1]))
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    assert sorted(store.table_specs()) == ["t", "u"]


def test_what_worker_0_cannot_do_is_an_error_for_all(store: InprocStore) -> None:
    def work(ebc: FrostlineEmbeddingBagCollection) -> object:
        return ebc.delete_rows({"none": [1]})

    first, second = two_workers(store, "sync", work, work)
    assert "'none' does not exist" in str(first)
    assert "worker 0 could not do it" in str(second)
    assert "'none' does not exist" in str(second)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"t": [[1], [2, 3]]}, "are no array"),
        ({"t": [[1, 2], [3, 4]]}, r"int64\[2, 2\]; they must be int64\[n\]"),
        ({"t": np.empty((0, 3), np.int64)}, r"int64\[0, 3\]"),
        ({"t": 1}, r"int64\[\]"),
        ({"t": torch.ones(1, dtype=torch.int64).to_sparse()}, "are no array"),
        ({"t": torch.ones(1, dtype=torch.bfloat16)}, "are no array"),
        ({"t": np.ma.array([1, 2], mask=[False, True])}, r"masked int64\[2\]"),
        ({"t": [True]}, "bool"),
        ({"t": ["1"]}, "<U1"),
        ({"t": [2**63]}, "uint64"),
        ({"t": [None]}, "object"),
        ([("t", [1])], "come as a list; give {table: row_ids}"),
        (None, "come as a NoneType"),
        ({1: [1]}, "of table 1; a table's name is text"),
        ({f"t{k}": [1] for k in range(1025)}, "row_ids of 1025 tables to delete; give at most 1024"),
    ],
)
def test_row_ids_to_delete_are_never_guessed(store: InprocStore, ids: object, message: str) -> None:
    ebc = collection(store, bag("t", "a"))
    train(ebc, a=[1, 2, 3])
    with pytest.raises(InvalidInput, match=message):
        ebc.delete_rows(ids)
    assert store.stats().total().rows_erased == 0
    assert ebc.delete_rows({"t": np.array([1, -(2**63), 2**63 - 1], ">i8")}) == {"t": Erased(hot=1, unknown=2)}


def test_rows_of_as_many_tables_are_deleted_as_a_call_takes(store: InprocStore) -> None:
    """What was there of them must fit the meeting at which all workers hear of it: the rows are gone by then."""
    names = [f"table {k} " + "\N{SNOWMAN}" * 200 for k in range(100)]
    store.create_tables([TableSpec(name=name, dim=4) for name in names])
    ebc = collection(store, bag("t", "a"))
    train(ebc, a=[1])
    assert ebc.delete_rows({"t": [1], **{name: [1] for name in names}}) == {
        "t": Erased(hot=1), **{name: Erased(unknown=1) for name in names}
    }  # fmt: skip


def test_an_error_that_is_long_reaches_all_workers(store: InprocStore) -> None:
    outcomes = two_workers(store, "sync", *[lambda ebc: ebc.delete_rows({"\N{SNOWMAN}" * 50_000: [1]})] * 2)
    assert [type(outcome) for outcome in outcomes] == [UnknownTable, FrostlineError], outcomes


@pytest.mark.parametrize("feature", [5, None, "", "x" * 256, "\udce4", ["b"]])
def test_what_is_no_name_of_a_feature_changes_nothing(store: InprocStore, feature: object) -> None:
    ebc = collection(store, bag("t", "a"), bag("u", "b"))
    train(ebc, a=[1], b=[1])
    with pytest.raises(InvalidInput, match="is no name"):
        ebc.add_feature("t", feature)
    with pytest.raises(InvalidInput, match="is no name"):
        ebc.add_table(bag("new", "c", feature))
    assert list(train(ebc, a=[1], b=[1])) == ["a", "b"]
    assert sorted(store.table_specs()) == ["t", "u"]


def test_a_table_has_a_list_of_features_each_once(store: InprocStore) -> None:
    ebc = collection(store, bag("t", "a"))
    with pytest.raises(InvalidInput, match="feature 'c' is named twice"):
        ebc.add_table(bag("new", "c", "c"))
    config = EmbeddingBagConfig(name="new", embedding_dim=4, num_embeddings=9, feature_names="abc")
    with pytest.raises(InvalidInput, match="its features are 'abc'; give a list"):
        ebc.add_table(config)
    for wrong in (None, "new", {"name": "new"}, [bag("new", "c")]):
        with pytest.raises(InvalidInput, match="takes a TorchRec config"):
            ebc.add_table(wrong)
    with pytest.raises(InvalidInput, match="takes a TorchRec config and perhaps a TableSpec"):
        ebc.add_table(bag("new", "c"), {"name": "new"})
    for wrong in (None, ["t"]):
        with pytest.raises(InvalidInput, match="cannot be dropped"):
            ebc.drop_table(wrong)
    ebc.add_table(bag("new", *[f"feature number {k}" for k in range(5000)]))  # more than a meeting's text
