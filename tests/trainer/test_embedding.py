"""The collections against TorchRec's own, on the in-process store: outputs, training, steps, DDP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput, NotReady
from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import RoutedIds
from trainer.embedding import FrostlineEmbeddingBagCollection, FrostlineEmbeddingCollection

ROWS = {"user": 60, "item": 40, "hour": 24}
KEYS = ["spare", "hour", "viewer", "author", "item"]
SGD, OFF = OptimizerSpec(kind="sgd"), PolicySpec(kind="off")


@pytest.fixture
def store() -> Iterator[InprocStore]:
    made = InprocStore(memory_limit_bytes=1 << 28)
    yield made
    made.close()


def bag_configs(dims: tuple[int, int, int] = (16, 16, 16)) -> list[EmbeddingBagConfig]:
    """One table of two features, one of a mean, one plain."""
    return [
        EmbeddingBagConfig(name="user", embedding_dim=dims[0], num_embeddings=60, feature_names=["viewer", "author"]),
        EmbeddingBagConfig(
            name="item", embedding_dim=dims[1], num_embeddings=40, feature_names=["item"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(name="hour", embedding_dim=dims[2], num_embeddings=24, feature_names=["hour"]),
    ]


def batch(num_samples: int, seed: int, longest: int = 4, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (len(KEYS) * num_samples,), generator=generator)
    limits = {"spare": 9, "hour": 24, "viewer": 60, "author": 60, "item": 40}
    per_key = lengths.view(len(KEYS), num_samples).sum(dim=1).tolist()
    values = [torch.randint(0, limits[key], (n,), generator=generator) for key, n in zip(KEYS, per_key, strict=True)]
    weights = torch.rand(int(lengths.sum()), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=torch.cat(values), lengths=lengths, weights=weights)


def read_rows(store: InprocStore, table: str, num_rows: int) -> torch.Tensor:
    routing = dedup_route(np.arange(num_rows), store.shard_of_bucket, store.num_shards)
    rows = store.lookup({table: RoutedIds(routing.unique, routing.shard_offsets)})[table]
    return torch.from_numpy(rows.values[routing.inverse].copy())


def visit_all(collection: FrostlineEmbeddingBagCollection | FrostlineEmbeddingCollection) -> None:
    """One step that names every row and trains none, so that all rows exist."""
    counts = torch.tensor([ROWS["user"], ROWS["item"], ROWS["hour"]])
    values = torch.cat([torch.arange(int(n)) for n in counts])
    every = KeyedJaggedTensor(keys=["viewer", "item", "hour"], values=values, lengths=counts)
    empty = KeyedJaggedTensor(
        keys=["author", "spare"], values=torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int64)
    )
    collection(KeyedJaggedTensor.concat([every, empty]))
    collection.step(0.0)


def copy_rows(store: InprocStore, bags: torch.nn.ModuleDict) -> None:
    for table, num_rows in ROWS.items():
        bags[table].weight.data.copy_(read_rows(store, table, num_rows))


def test_dlrm_trains_as_with_torchrecs_collection(store: InprocStore) -> None:
    """Acceptance 2: our rows copied into TorchRec's tables; forward to 1e-6, 100 SGD steps, weights to 1e-5."""
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store, optimizer=SGD, policy=OFF)
    visit_all(ours)
    theirs = EmbeddingBagCollection(tables=bag_configs())
    copy_rows(store, theirs.embedding_bags)
    torch.manual_seed(0)
    models = []
    for collection in (ours, theirs):
        models.append(
            DLRM(collection, dense_in_features=5, dense_arch_layer_sizes=[16, 16], over_arch_layer_sizes=[16, 1])
        )
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        features, dense = batch(32, seed=step), torch.rand(32, 5, generator=generator)
        labels = torch.randint(0, 2, (32, 1), generator=generator).float()
        outputs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(model(dense, features))
            torch.nn.functional.binary_cross_entropy_with_logits(outputs[-1], labels).backward()
            optimizer.step()
        assert ours.step(0.5).step == step + 2
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6 if step == 0 else 1e-5)
    for table, num_rows in ROWS.items():
        trained = theirs.embedding_bags[table].weight.data
        torch.testing.assert_close(read_rows(store, table, num_rows), trained, rtol=0, atol=1e-5)
    for a, b in zip(models[0].over_arch.parameters(), models[1].over_arch.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_output_is_torchrecs_keyed_tensor(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection(bag_configs((16, 20, 8)), store, policy=OFF)
    visit_all(ours)
    theirs = EmbeddingBagCollection(tables=bag_configs((16, 20, 8)))
    copy_rows(store, theirs.embedding_bags)
    ours.eval()
    features = batch(7, seed=3)
    got, expected = ours(features), theirs(features)
    assert got.keys() == expected.keys() == ["viewer", "author", "item", "hour"]
    assert got.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(got.values(), expected.values(), rtol=0, atol=1e-6)
    assert ours.embedding_bag_configs()[1].name == "item"
    assert not ours.is_weighted()
    assert list(ours.parameters()) == []
    assert ours.state_dict() == {}


def test_weighted_sum_and_the_gradient_of_weights(store: InprocStore) -> None:
    configs = [bag_configs()[0]]
    ours = FrostlineEmbeddingBagCollection(configs, store, is_weighted=True, policy=OFF, optimizer=SGD)
    theirs = EmbeddingBagCollection(tables=[bag_configs()[0]], is_weighted=True)
    first = batch(9, seed=1, weighted=True)
    ours(first)
    ours.step(0.0)
    theirs.embedding_bags["user"].weight.data.copy_(read_rows(store, "user", 60))
    gradients, losses = [], []
    for collection in (ours, theirs):
        weights = first.weights().clone().requires_grad_()
        features = KeyedJaggedTensor(keys=KEYS, values=first.values(), lengths=first.lengths(), weights=weights)
        out = collection(features).values()
        losses.append((out * torch.arange(out.numel()).view_as(out)).sum())
        losses[-1].backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0].count_nonzero() > 0
    ours.step(0.1)
    theirs.embedding_bags["user"].weight.data.sub_(theirs.embedding_bags["user"].weight.grad, alpha=0.1)
    torch.testing.assert_close(ours.eval()(first).values(), theirs(first).values().detach(), rtol=1e-5, atol=1e-5)


def test_weighted_mean_divides_by_the_length(store: InprocStore) -> None:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=1, feature_names=["f"], pooling=PoolingType.MEAN,
        weight_init_min=2.0, weight_init_max=2.0,
    )  # fmt: skip
    ours = FrostlineEmbeddingBagCollection([config], store, is_weighted=True)
    features = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([5, 6, 7]), lengths=torch.tensor([3, 0]), weights=torch.tensor([1.0, 2.0, 6.0])
    )
    assert ours(features).values().tolist() == [[6.0] * 4, [0.0] * 4]  # 2 * (1 + 2 + 6) / 3


def test_a_feature_in_two_tables_is_named_after_both(store: InprocStore) -> None:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=10, feature_names=["f"]) for name in ("a", "b")
    ]
    ours = FrostlineEmbeddingBagCollection(configs, store)
    out = ours(KeyedJaggedTensor(keys=["f"], values=torch.tensor([3]), lengths=torch.tensor([1])))
    assert out.keys() == ["f@a", "f@b"]
    assert not torch.equal(out["f@a"], out["f@b"])


def test_sequence_collection_gives_torchrecs_jagged_tensors(store: InprocStore) -> None:
    def configs() -> list[EmbeddingConfig]:
        return [
            EmbeddingConfig(name="user", embedding_dim=8, num_embeddings=60, feature_names=["viewer", "author"]),
            EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=40, feature_names=["item"]),
            EmbeddingConfig(name="hour", embedding_dim=8, num_embeddings=24, feature_names=["hour"]),
        ]

    ours = FrostlineEmbeddingCollection(configs(), store, need_indices=True, policy=OFF, optimizer=SGD)
    visit_all(ours)
    theirs = EmbeddingCollection(tables=configs(), need_indices=True)
    copy_rows(store, theirs.embeddings)
    features = batch(6, seed=8)
    got, expected = ours(features), theirs(features)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name].values(), expected[name].values())
        assert torch.equal(got[name].lengths(), expected[name].lengths())
        assert torch.equal(got[name].weights(), expected[name].weights())
    for result in (got, expected):
        sum((jagged.values() ** 2).sum() * (i + 1) for i, jagged in enumerate(result.values())).backward()
    ours.step(0.1)
    for table, num_rows in ROWS.items():
        weight = theirs.embeddings[table].weight
        torch.testing.assert_close(read_rows(store, table, num_rows), weight.data - 0.1 * weight.grad)
    assert ours.embedding_dim() == 8
    assert ours.embedding_names_by_table() == [["viewer", "author"], ["item"], ["hour"]]


def test_evaluation_changes_nothing(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store)
    ours.eval()
    assert (ours(batch(5, seed=1)).values() == 0).all()  # unknown row_ids read zeros
    ours.train()
    with torch.no_grad():
        assert (ours(batch(5, seed=1)).values() == 0).all()
    with torch.inference_mode():
        ours(batch(5, seed=2))
    assert store.stats().total().rows_hot == 0
    ours(batch(5, seed=1)).values().sum().backward()
    assert ours.step().step == 1
    assert store.stats().total().rows_hot > 0


def test_two_backwards_through_one_forward_add_up(store: InprocStore) -> None:
    configs = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])]
    ours = FrostlineEmbeddingBagCollection(configs, store, optimizer=SGD)
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    out = ours(features).values()
    (3 * out.sum()).backward(retain_graph=True)
    (out[0] * 5).sum().backward()
    ours.step(1.0)
    torch.testing.assert_close(ours.eval()(features).values(), out.detach() - torch.tensor([[8.0] * 4, [3.0] * 4]))


def test_each_training_forward_needs_its_step(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store)
    with pytest.raises(NotReady, match=r"\.step\(\) came before a training forward"):
        ours.step()
    ours(batch(4, seed=1))
    with pytest.raises(NotReady, match=r"a training forward came while step 1 has no \.step\(\) yet"):
        ours(batch(4, seed=2))
    ack = ours.step()  # no backward: nothing to apply
    assert (ack.step, ack.rows_applied, ack.rows_ignored) == (1, 0, 0)
    ours(batch(4, seed=2)).values().sum().backward()
    with pytest.raises(InvalidInput, match="learning_rate=nan must be finite"):
        ours.step(float("nan"))
    ack = ours.step()
    assert ack.step == 2
    assert ack.rows_applied > 0


def test_prefetched_batches_come_in_order(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store, mode="pipelined")
    first, second = batch(4, seed=1), batch(4, seed=2)
    ours.prefetch(first)
    with pytest.raises(InvalidInput, match="step 1 was prefetched with another batch"):
        ours(second)
    out = ours(first).values()
    thread = threading.Thread(target=ours.prefetch, args=(second,))
    thread.start()
    out.sum().backward()
    thread.join()
    gradients = ours.take_gradients(0.1)
    ours(second).values().sum().backward()  # before the push of step 1
    assert ours.push(gradients).step == 1
    assert ours.push(gradients).duplicate
    assert ours.step().step == 2


def test_an_error_of_the_store_leaves_the_step_open(store: InprocStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store)
    ours(batch(4, seed=1)).values().sum().backward()

    def fail(*args: object) -> None:
        raise NotReady("the shard is away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "push", fail)
        with pytest.raises(NotReady, match="away"):
            ours.step()
    assert ours.step().rows_applied > 0


def test_two_workers_share_one_store(store: InprocStore) -> None:
    """The second worker joins with the identity that the first one's begin_epoch gave."""
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store, job="j")
    again = FrostlineEmbeddingBagCollection(bag_configs(), store, job="j", identity=ours.identity, last_step=0)
    assert again.identity == ours.identity
    assert ours.identity.epoch == 1
    other = FrostlineEmbeddingBagCollection(bag_configs(), store, job="j")
    assert other.identity.epoch == 2


def test_works_under_ddp(store: InprocStore, tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        ours = FrostlineEmbeddingBagCollection(bag_configs(), store, optimizer=SGD)
        model = DLRM(ours, dense_in_features=5, dense_arch_layer_sizes=[16, 16], over_arch_layer_sizes=[16, 1])
        wrapped = DistributedDataParallel(model)
        for step in (1, 2):
            wrapped(torch.rand(8, 5), batch(8, seed=step)).sum().backward()
            assert ours.step(0.1).rows_applied > 0
        for parameter in wrapped.parameters():
            assert parameter.grad is not None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_sixteen_bit_wire(wire_dtype) -> None:
    store = InprocStore(wire_dtype=wire_dtype, memory_limit_bytes=1 << 28)
    ours = FrostlineEmbeddingBagCollection(bag_configs(), store, optimizer=SGD)
    features = batch(6, seed=4)
    before = ours(features).values()
    before.sum().backward()
    ours.step(0.5)
    after = ours.eval()(features).values()
    assert 0.4 < float((before.detach() - after).max()) < 20
    store.close()
