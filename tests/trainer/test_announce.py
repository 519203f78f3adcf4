"""Batches that are announced before they are pulled: same results, routed once, never an error of their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import RoutedIds
from tests.trainer.test_loop import job_with, run
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.lookup_plan import LookupPlan
from trainer.training_steps import MAX_ANNOUNCED

TABLES = [EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=1, feature_names=["item"])]
IDLE = PolicySpec(kind="idle", idle_steps=2, control_fraction=0.0)


class Noting(InprocStore):
    """Notes the row_ids of every announcement and pull."""

    def __init__(self) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self.log: list[tuple[str, dict[str, list[int]]]] = []

    def prefetch(self, ids):
        self.log.append(("announce", {name: routed.row_ids.tolist() for name, routed in ids.items()}))
        super().prefetch(ids)

    def pull(self, who, step, ids):
        self.log.append(("pull", {name: routed.row_ids.tolist() for name, routed in ids.items()}))
        return super().pull(who, step, ids)

    def of(self, what: str) -> list[dict[str, list[int]]]:
        return [ids for kind, ids in self.log if kind == what]


@pytest.fixture
def store() -> Iterator[Noting]:
    made = Noting()
    yield made
    made.close()


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[KeyedJaggedTensor]:
    """The batches that were routed for training."""
    routed: list[KeyedJaggedTensor] = []
    route = LookupPlan.route

    def noting(self: LookupPlan, features: KeyedJaggedTensor, for_training: bool):
        if for_training:
            routed.append(features)
        return route(self, features, for_training)

    monkeypatch.setattr(LookupPlan, "route", noting)
    return routed


def batch(seed: int, num_samples: int = 50, num_ids: int = 200) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (num_samples,), generator=generator)
    values = torch.randint(0, num_ids, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["item"], values=values, lengths=lengths)


def collection(store: InprocStore, **options) -> FrostlineEmbeddingBagCollection:
    return FrostlineEmbeddingBagCollection(
        TABLES, store, optimizer=OptimizerSpec(kind="adagrad"), policy=IDLE, **options
    )


def rows_of(store: InprocStore, table: str, num_ids: int) -> np.ndarray:
    routed = dedup_route(np.arange(num_ids), store.shard_of_bucket, store.num_shards)
    rows = store.lookup({table: RoutedIds(routed.unique, routed.shard_offsets.reshape(-1))})[table]
    return np.concatenate([rows.values.view(np.uint8), rows.flags[:, None]], axis=1)[np.argsort(routed.unique)]


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_job_gives_the_same_rows_bit_for_bit_and_routes_each_batch_once(mode, tmp_path: Path, routings) -> None:
    found = {}
    for announces in (False, True):
        job = job_with(
            data={"cardinalities": [3000]},
            embedding={"policy": "compact", "idle_samples": 640, "advanced": {
                "reselect_every_samples": 1280, "epoch_end": "forget_rare"}},
            trainer={"mode": mode, "data_passes": 2, "prefetch_frozen": announces},
        )  # fmt: skip
        routings.clear()
        store = Noting()
        summary, shown = run(job, tmp_path, store)
        num_steps = shown[-1].step
        assert summary.rows_frozen > 0
        assert len(routings) == len({id(of) for of in routings}) == num_steps + 1  # warm_up_rows has one of its own
        assert len(store.of("pull")) == num_steps
        num_announced = {"sync": num_steps, "pipelined": num_steps - 2}[mode] if announces else 0
        assert len(store.of("announce")) == num_announced
        assert store.of("announce") == store.of("pull")[num_steps - num_announced :]
        found[announces] = (summary.test_logloss, *(rows_of(store, f"cat_{i}", 3000).tobytes() for i in range(3)))
        store.close()
    assert found[True] == found[False]


def test_max_steps_announces_nothing_beyond_it(tmp_path: Path) -> None:
    store = Noting()
    run(job_with(trainer={"max_steps": 4, "prefetch_frozen": True, "mode": "pipelined"}), tmp_path, store)
    assert len(store.of("announce")) == 2
    assert store.of("announce") == store.of("pull")[2:]
    store.close()


def test_a_loop_of_ones_own_announces_the_next_batch(store: Noting, routings) -> None:
    """In place: no copies of rows, and the announced look-ups serve the pull."""
    batches = [batch(seed) for seed in range(8)]
    announced, plain = collection(store), InprocStore(memory_limit_bytes=64 << 20)
    for features, following in zip(batches, [*batches[1:], None], strict=True):
        if following is not None:
            announced.announce(following)
        announced(features).values().sum().backward()
        announced.step(0.1)
    assert [id(of) for of in routings] == [id(batches[i]) for i in (1, 0, 2, 3, 4, 5, 6, 7)]
    other = collection(plain)
    for features in batches:
        other(features).values().sum().backward()
        other.step(0.1)
    np.testing.assert_array_equal(rows_of(store, "item", 200), rows_of(plain, "item", 200))
    plain.close()


def test_a_batch_that_is_announced_and_never_pulled_changes_nothing(store: Noting) -> None:
    ours = collection(store)
    for seed in range(4):
        ours(batch(seed)).values().sum().backward()
        ours.step(0.1)
    rows, stats, wire = rows_of(store, "item", 10_000), store.stats().tables["item"], store.wire_stats
    ours.announce(batch(9, num_ids=10_000))
    assert len(store.of("announce")) == 1
    np.testing.assert_array_equal(rows_of(store, "item", 10_000), rows)
    assert (store.stats().tables["item"], store.wire_stats) == (stats, wire)
    ours.reselect()  # no step is open
    ours(batch(5)).values().sum().backward()
    assert ours.step(0.1).step == 5


def test_announced_batches_may_come_in_any_order_or_twice(store: Noting, routings) -> None:
    ours = collection(store)
    a, b = batch(1), batch(2)
    ours.announce(a)
    ours.announce(a)
    ours.announce(b)
    assert len(store.of("announce")) == 2
    for features in (b, a, b):  # a was passed over, and b is routed anew the second time
        ours(features).values().sum().backward()
        ours.step(0.1)
    assert [id(of) for of in routings] == [id(of) for of in (a, b, a, b)]


def test_only_so_many_announced_batches_are_kept(store: Noting) -> None:
    ours = collection(store)
    kept = []
    for seed in range(3 * MAX_ANNOUNCED):
        features = batch(seed)
        ours.announce(features)
        kept.append(weakref.ref(features.values()))
        del features
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= MAX_ANNOUNCED


@pytest.mark.parametrize("error", [StoreUnavailable("shard 1 is away"), FrostlineError("x"), OSError("disk")])
def test_a_store_that_fails_an_announcement_fails_nothing(store: Noting, monkeypatch, error: Exception) -> None:
    def fail(ids: object) -> None:
        raise error

    monkeypatch.setattr(store, "prefetch", fail)
    ours = collection(store)
    features = batch(1)
    ours.announce(features)
    ours(features).values().sum().backward()
    assert ours.step(0.1).rows_applied > 0


def test_a_bad_batch_is_refused_where_it_is_pulled_and_not_where_it_is_announced(store: Noting) -> None:
    ours = collection(store)
    bad = KeyedJaggedTensor(keys=["other"], values=torch.tensor([1]), lengths=torch.tensor([1]))
    ours.announce(bad)
    ours.announce(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="lacks feature 'item'"):
        ours(bad)
    ours(batch(1)).values().sum().backward()
    assert ours.step(0.1).step == 1


def test_a_pull_that_failed_may_be_repeated_after_an_announcement(store: Noting, monkeypatch) -> None:
    ours = collection(store, mode="pipelined")
    features = batch(1)
    ours.announce(features)

    def fail(*args: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "pull", fail)
        with pytest.raises(StoreUnavailable):
            ours.prefetch(features)
    ours.prefetch(features)
    ours(features).values().sum().backward()
    assert ours.step(0.1).step == 1
