"""Every optimizer end to end through the collection: against FBGEMM and torch, and over one or two workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import Identity, RoutedIds
from trainer.embedding import FrostlineEmbeddingBagCollection

NUM_ROWS, DIM, STEPS = 50, 16, 60
LEARNING_RATE = 0.1
OFF = PolicySpec(kind="off")


def config() -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=["f"])


def batch(num_samples: int, seed: int) -> KeyedJaggedTensor:
    """Skewed row_ids, so that some rows are looked up often in a batch and some are not for many steps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (num_samples,), generator=generator)
    values = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * NUM_ROWS).long()
    return KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths)


def target(num_samples: int, seed: int) -> torch.Tensor:
    return torch.randn(num_samples, DIM, generator=torch.Generator().manual_seed(1000 + seed))


def loss_of(out: torch.Tensor, wanted: torch.Tensor, num_global_samples: int) -> torch.Tensor:
    return ((out - wanted) ** 2).sum() / num_global_samples


def all_rows(store: InprocStore) -> torch.Tensor:
    routing = dedup_route(np.arange(NUM_ROWS), store.shard_of_bucket, store.num_shards)
    rows = store.lookup({"t": RoutedIds(routing.unique, routing.shard_offsets)})["t"]
    return torch.from_numpy(rows.values[routing.inverse].copy())


def visit_all(ours: FrostlineEmbeddingBagCollection) -> None:
    ours(KeyedJaggedTensor(keys=["f"], values=torch.arange(NUM_ROWS), lengths=torch.tensor([NUM_ROWS])))
    ours.step(0.0)


def make(optimizer: OptimizerSpec) -> tuple[InprocStore, FrostlineEmbeddingBagCollection]:
    store = InprocStore(memory_limit_bytes=1 << 28)
    return store, FrostlineEmbeddingBagCollection([config()], store, optimizer=optimizer, policy=OFF)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("sgd", EmbOptimType.EXACT_SGD),
        ("adagrad", EmbOptimType.EXACT_ADAGRAD),
        ("rowwise_adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_equals_fbgemm(kind, theirs: EmbOptimType) -> None:
    store, ours = make(OptimizerSpec(kind=kind, initial_accumulator=0.0, eps=1e-8))
    visit_all(ours)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=theirs,
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        weights_precision=SparseType.FP32,
    )
    tbe.split_embedding_weights()[0].copy_(all_rows(store))
    for seed in range(STEPS):
        features = batch(12, seed)
        out = ours(features).values()
        expected = tbe(indices=features.values(), offsets=features.offsets())
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        loss_of(out, target(12, seed), 12).backward()
        loss_of(expected, target(12, seed), 12).backward()
        ours.step(LEARNING_RATE)
    torch.testing.assert_close(all_rows(store), tbe.split_embedding_weights()[0], rtol=0, atol=1e-5)
    store.close()


def test_adam_equals_torchs_sparse_adam() -> None:
    store, ours = make(OptimizerSpec(kind="adam", eps=1e-8, beta1=0.9, beta2=0.999))
    theirs = torch.nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, include_last_offset=True)
    optimizer = torch.optim.SparseAdam(theirs.parameters(), lr=0.01, eps=1e-8, betas=(0.9, 0.999))
    for seed in range(STEPS):
        features = batch(12, seed)
        out = ours(features).values()
        if seed == 0:
            unseen = torch.ones(NUM_ROWS, dtype=torch.bool)
        with torch.no_grad():  # rows seen for the first time begin with our initial values
            seen_now = torch.unique(features.values())
            new = seen_now[unseen[seen_now]]
            theirs.weight[new] = all_rows(store)[new]
            unseen[new] = False
        expected = theirs(features.values(), features.offsets())
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        loss_of(out, target(12, seed), 12).backward()
        optimizer.zero_grad()
        loss_of(expected, target(12, seed), 12).backward()
        optimizer.step()
        ours.step(0.01)
    seen = ~unseen
    torch.testing.assert_close(all_rows(store)[seen], theirs.weight.data[seen], rtol=0, atol=1e-5)
    store.close()


def halves(features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    lengths = features.lengths()
    middle = lengths.numel() // 2
    cut = int(lengths[:middle].sum())
    parts = [(features.values()[:cut], lengths[:middle]), (features.values()[cut:], lengths[middle:])]
    return [KeyedJaggedTensor(keys=["f"], values=values, lengths=part) for values, part in parts]


def test_rows_decay_at_every_step_also_of_tables_without_look_ups() -> None:
    store = InprocStore(memory_limit_bytes=1 << 28)
    idle = EmbeddingBagConfig(name="idle", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=["g"])
    optimizer = OptimizerSpec(kind="sgd", weight_decay=0.2)
    ours = FrostlineEmbeddingBagCollection([config(), idle], store, optimizer=optimizer, policy=OFF)
    every = torch.arange(NUM_ROWS).repeat(2)
    ours(KeyedJaggedTensor(keys=["f", "g"], values=every, lengths=torch.tensor([NUM_ROWS, NUM_ROWS])))
    ours.step(0.0)
    weights, ids = all_rows(store), RoutedIds(np.arange(NUM_ROWS), np.array([0, NUM_ROWS]))
    idle_start = store.lookup({"idle": ids})["idle"].values.copy()
    for seed in range(STEPS):
        features, rate = batch(12, seed), 0.01 * (1 + seed % 3)
        lengths = torch.cat([features.lengths(), torch.zeros(12, dtype=features.lengths().dtype)])
        out = ours(KeyedJaggedTensor(keys=["f", "g"], values=features.values(), lengths=lengths)).values()
        if seed % 5:  # a step without a backward decays too
            loss_of(out[:, :DIM], target(12, seed), 12).backward()
        ours.step(rate)
        model = torch.nn.Parameter(weights)
        bags = torch.nn.functional.embedding_bag(features.values(), model, features.offsets(), mode="sum",
                                                 include_last_offset=True)  # fmt: skip
        loss_of(bags, target(12, seed), 12).backward()
        weights = weights * (1 - rate * 0.2) - (rate * model.grad if seed % 5 else 0)
        idle_start *= 1 - rate * 0.2
    torch.testing.assert_close(all_rows(store), weights, rtol=0, atol=1e-5)
    np.testing.assert_allclose(store.lookup({"idle": ids})["idle"].values, idle_start, rtol=1e-4)
    store.close()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"])
def test_one_worker_with_two_b_equals_two_workers_with_b(kind, weight_decay: float) -> None:
    """DDP and the shards average over workers, so each worker's loss is the mean over its own half."""
    optimizer = OptimizerSpec(kind=kind, weight_decay=weight_decay, clip_norm=0.5)
    store, ours = make(optimizer)
    for seed in range(STEPS):
        loss_of(ours(batch(16, seed)).values(), target(16, seed), 16).backward()
        ours.step(LEARNING_RATE)
    expected = all_rows(store)
    store.close()

    shared = InprocStore(memory_limit_bytes=1 << 28, timeout_s=60)
    epoch = shared.begin_epoch("two", 2, "sync").epoch
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            mine = FrostlineEmbeddingBagCollection(
                [config()], shared, optimizer=optimizer, policy=OFF, identity=Identity("two", epoch, worker)
            )
            for seed in range(STEPS):
                part, wanted = halves(batch(16, seed))[worker], target(16, seed)[8 * worker : 8 * worker + 8]
                loss_of(mine(part).values(), wanted, 8).backward()
                mine.step(LEARNING_RATE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    torch.testing.assert_close(all_rows(shared), expected, rtol=0, atol=1e-5)
    shared.close()
