"""Pooling rows where they lie and pushing sums, against the same store made to copy rows and gradients."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import Identity
from trainer.embedding import FrostlineEmbeddingBagCollection, FrostlineEmbeddingCollection

KEYS = ["a", "b", "c"]
POLICIES = {
    "off": PolicySpec(kind="off"),
    "default rows": PolicySpec(kind="off", min_count=3),
    "frozen rows": PolicySpec(kind="topk", hot_fraction=0.3, half_life_steps=4, probation_visits=1),
}


class CopyingStore(InprocStore):
    """The path of every other store."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.is_in_place = False


def bags() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="x", embedding_dim=64, num_embeddings=100, feature_names=["a", "b"]),
        EmbeddingBagConfig(
            name="y", embedding_dim=20, num_embeddings=100, feature_names=["c"], pooling=PoolingType.MEAN
        ),
    ]


def batch(seed: int, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3 * 16,), generator=generator)
    total = int(lengths.sum())
    values = (torch.rand(total, generator=generator) ** 3 * 60).long()
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths, weights=weights)


def train(store: InprocStore, policy: PolicySpec, weighted: bool, steps: int = 8) -> list[torch.Tensor]:
    """Outputs of every step and of a look-up afterwards."""
    ebc = FrostlineEmbeddingBagCollection(
        bags(), store, is_weighted=weighted, policy=policy, optimizer=OptimizerSpec(kind="rowwise_adagrad")
    )
    outputs = []
    for step in range(1, steps + 1):
        features = batch(step, weighted)
        if step % 3 == 0:
            ebc.prefetch(features)
        out = ebc(features).values()
        outputs.append(out.detach().clone())
        (out * torch.sin(torch.arange(out.numel()).view_as(out) + step)).sum().backward()
        ebc.step(0.1)
        if policy.kind == "topk" and step == 4:
            store.reselect(ebc.identity, step, _frostlines(store, ebc.identity, step))
    ebc.eval()
    return [*outputs, ebc(batch(99, weighted)).values().detach()]


def _frostlines(store: InprocStore, who: Identity, step: int):
    from embedding_server.policy import compute_frostline

    return {name: compute_frostline(h, 0.3) for name, h in store.heat_histograms(who, step).items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_equals_copying(policy: str, weighted: bool, threads: int) -> None:
    stores = InprocStore(threads=threads, writes_in_background=False), CopyingStore(writes_in_background=False)
    assert stores[0].is_in_place
    ours, theirs = (train(store, POLICIES[policy], weighted) for store in stores)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert stores[0].wire_stats == stores[1].wire_stats
    assert stores[0].stats().total() == stores[1].stats().total()
    for store in stores:
        store.close()


def test_a_sequence_collection_in_place_equals_copying() -> None:
    results = []
    for store in (InprocStore(), CopyingStore()):
        configs = [EmbeddingConfig(name="x", embedding_dim=36, num_embeddings=9, feature_names=KEYS)]
        collection = FrostlineEmbeddingCollection(configs, store)
        for step in range(3):
            out = collection(batch(step))
            torch.cat([value.values() for value in out.values()]).square().sum().backward()
            collection.step(0.1)
        results.append(collection(batch(7))["a"].values().detach().numpy().copy())
        store.close()
    np.testing.assert_array_equal(*results)


def test_large_but_finite_gradients_are_summed_before_they_are_pushed() -> None:
    """Sums that might overflow are made in the backward, so that a bad one is refused there."""
    store = InprocStore()
    ebc = FrostlineEmbeddingBagCollection(bags(), store)
    features = batch(1)
    out = ebc(features).values()
    before = ebc._steps._open[0].lookups.rows
    with pytest.raises(InvalidInput, match="summed over the batch, is not finite"):
        out.backward(torch.full_like(out, 3e38))
    assert before
    assert ebc.step(0.1).rows_applied == 0
    out = ebc(features).values()
    out.backward(torch.full_like(out, 1e37))  # 1e37 * look-ups is beyond what is surely finite; the sums are not
    assert all(g.sums is None for g in ebc._steps._open[0].row_gradients.values())
    assert ebc.step(0.1).rows_applied > 0
    store.close()


def test_two_workers_of_one_store_in_place_equal_copying() -> None:
    results = []
    for store in (InprocStore(), CopyingStore()):
        epoch = 0
        outputs: dict[int, list[np.ndarray]] = {0: [], 1: []}
        first = FrostlineEmbeddingBagCollection(bags(), store, identity=Identity("j", 1, 0))
        epoch = store.begin_epoch("j", 2, "sync").epoch
        assert epoch == 1
        second = FrostlineEmbeddingBagCollection(bags(), store, identity=Identity("j", 1, 1))

        def work(worker: int, ebc: FrostlineEmbeddingBagCollection, outputs=outputs) -> None:
            for step in range(4):
                out = ebc(batch(10 * step + worker)).values()
                outputs[worker].append(out.detach().numpy().copy())
                out.square().sum().backward()
                ebc.step(0.1)

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results.append(outputs)
        store.close()
    for worker in (0, 1):
        assert len(results[0][worker]) == 4
        for one, other in zip(results[0][worker], results[1][worker], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
