from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput, NotReady
from embedding_server.inproc import InprocStore
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import Identity
from trainer.advance import usual_steps_between
from trainer.embedding import FrostlineEmbeddingBagCollection

CONFIG = EmbeddingBagConfig(name="rows", embedding_dim=4, num_embeddings=100, feature_names=["f"])


@pytest.fixture
def store() -> Iterator[InprocStore]:
    opened = InprocStore()
    yield opened
    opened.close()


def batch(*row_ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f"], values=torch.tensor(row_ids), lengths=torch.ones(len(row_ids), dtype=torch.int64)
    )


def train(collection: FrostlineEmbeddingBagCollection, *row_ids: int) -> None:
    collection(batch(*row_ids)).values().sum().backward()
    collection.step(0.1)


def test_a_loop_of_three_lines_freezes_what_is_idle(store: InprocStore) -> None:
    collection = FrostlineEmbeddingBagCollection([CONFIG], store, policy=PolicySpec(idle_steps=4, control_fraction=0))
    train(collection, 1, 2, 3)
    for _ in range(5):
        train(collection, 1)
    total = store.stats().total()
    assert (total.rows_hot, total.rows_frozen) == (1, 2)


def test_topk_takes_frostlines(store: InprocStore) -> None:
    policy = PolicySpec(kind="topk", hot_fraction=0.25, probation_visits=1, control_fraction=0)
    collection = FrostlineEmbeddingBagCollection([CONFIG], store, policy=policy, reselect_every=6)
    for _ in range(3):
        train(collection, 1)
    for _ in range(3):
        train(collection, 1, 2, 3, 4)
    assert (store.stats().total().rows_hot, store.stats().total().rows_frozen) == (1, 3)


def test_none_is_made_without_being_asked_beside_other_workers(store: InprocStore) -> None:
    policy = PolicySpec(idle_steps=1, control_fraction=0)
    store.create_tables([TableSpec(name="rows", dim=4, policy=policy, init_min=-0.1, init_max=0.1)])
    epoch = store.begin_epoch("job", 1, "sync").epoch
    collection = FrostlineEmbeddingBagCollection([CONFIG], store, policy=policy, identity=Identity("job", epoch, 0))
    for row_id in range(5):
        train(collection, row_id)
    assert store.stats().total().rows_frozen == 0
    assert collection.reselect()["rows"].frozen == 4


def test_zero_means_none(store: InprocStore) -> None:
    policy = PolicySpec(idle_steps=1, control_fraction=0)
    collection = FrostlineEmbeddingBagCollection([CONFIG], store, policy=policy, reselect_every=0)
    for row_id in range(5):
        train(collection, row_id)
    assert store.stats().total().rows_frozen == 0


def test_it_waits_while_a_step_is_prefetched(store: InprocStore) -> None:
    policy = PolicySpec(idle_steps=1, control_fraction=0)
    collection = FrostlineEmbeddingBagCollection([CONFIG], store, policy=policy, reselect_every=1, mode="pipelined")
    first, second = batch(1), batch(2)
    collection.prefetch(first)
    pooled = collection(first).values()
    collection.prefetch(second)
    pooled.sum().backward()
    collection.step(0.1)
    with pytest.raises(NotReady):
        collection.reselect()
    assert store.stats().total().rows_frozen == 0
    collection(second).values().sum().backward()
    collection.step(0.1)
    assert store.stats().total().rows_frozen == 1


@pytest.mark.parametrize("steps", [-1, 2.5, True, None])
def test_a_number_of_steps_is_asked_for(store: InprocStore, steps: object) -> None:
    with pytest.raises(InvalidInput, match="reselect_every"):
        FrostlineEmbeddingBagCollection([CONFIG], store, reselect_every=steps)  # type: ignore[arg-type]


def test_usual_steps_between() -> None:
    def spec(**policy: object) -> TableSpec:
        return TableSpec(name="rows", dim=4, policy=PolicySpec(**policy))  # type: ignore[arg-type]

    assert usual_steps_between([spec(kind="off")]) is None
    assert usual_steps_between([spec(kind="off"), spec(idle_steps=100), spec(kind="compact", idle_steps=30)]) == 15
    assert usual_steps_between([spec(idle_steps=1)]) == 1
