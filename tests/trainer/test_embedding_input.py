"""What the collections refuse: configs, batches and gradients. The message names it; nothing is pulled or pushed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.types import DataType

from embedding_server.errors import FrostlineError, InvalidInput, TableConflict
from embedding_server.inproc import InprocStore
from embedding_server.spec import TableSpec
from trainer.embedding import FrostlineEmbeddingBagCollection, FrostlineEmbeddingCollection


@pytest.fixture
def store() -> Iterator[InprocStore]:
    made = InprocStore(memory_limit_bytes=1 << 28)
    yield made
    made.close()


def bag(**changes) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **({"name": "t", "embedding_dim": 8, "num_embeddings": 10, "feature_names": ["f", "g"]} | changes)
    )


def kjt(
    values: torch.Tensor, lengths: list[int], keys: tuple[str, ...] = ("f", "g"), weights=None
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=torch.tensor(lengths), weights=weights)


BAD_CONFIGS: list[tuple[Callable[[InprocStore], object], str]] = [
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(embedding_dim=50)], s),
        "table 't': dim=50 must be a positive multiple of 4.*set dim=52",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(init_fn=torch.nn.init.ones_)], s),
        "table 't': init_fn=.* cannot be used: rows are created one by one.*weight_init_min",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(init_fn=partial(torch.nn.init.normal_, mean=0.0, std=1.0))], s),
        "table 't': init_fn=",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(data_type=DataType.FP16)], s),
        "table 't': data_type=.*is not supported",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(pooling=PoolingType.NONE)], s),
        "table 't': pooling=.* must be SUM or MEAN",
    ),
    (lambda s: FrostlineEmbeddingBagCollection([bag(), bag()], s), "table 't' is configured twice"),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag(weight_init_min=1.0, weight_init_max=0.0)], s),
        "init_min=1.0 is above init_max=0.0",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag()], s, specs={"u": TableSpec(name="u", dim=8)}),
        "specs names table 'u', which no config has",
    ),
    (
        lambda s: FrostlineEmbeddingBagCollection([bag()], s, specs={"t": TableSpec(name="t", dim=16)}),
        "table 't': its spec says name='t', dim=16, its config embedding_dim=8",
    ),
    (
        lambda s: FrostlineEmbeddingCollection(
            [
                EmbeddingConfig(name="a", embedding_dim=8, num_embeddings=1, feature_names=["f"]),
                EmbeddingConfig(name="b", embedding_dim=4, num_embeddings=1, feature_names=["g"]),
            ],
            s,
        ),
        r"dims \[4, 8\]; a sequence collection has tables of one dim",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD_CONFIGS, ids=range(len(BAD_CONFIGS)))
def test_bad_configs(store: InprocStore, make, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make(store)
    assert store.table_specs() == {}


def test_a_table_cannot_change_its_spec(store: InprocStore) -> None:
    FrostlineEmbeddingBagCollection([bag()], store)
    FrostlineEmbeddingBagCollection([bag()], store)
    with pytest.raises(TableConflict, match="'t'"):
        FrostlineEmbeddingBagCollection([bag(weight_init_max=0.25)], store)


def test_initial_range_is_torchrecs(store: InprocStore) -> None:
    configs = [
        bag(name="a"),
        bag(name="b", weight_init_min=-0.25, weight_init_max=0.5),
        bag(name="c", init_fn=partial(torch.nn.init.uniform_, a=-2.0, b=-1.0)),
    ]
    FrostlineEmbeddingBagCollection(configs, store)
    specs = store.table_specs()
    ranges = {name: (spec.init_min, spec.init_max) for name, spec in specs.items()}
    assert ranges == {"a": (-(0.1**0.5), 0.1**0.5), "b": (-0.25, 0.5), "c": (-2.0, -1.0)}


def variable_stride() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )


BAD_BATCHES: list[tuple[Callable[[], KeyedJaggedTensor], str]] = [
    (
        lambda: kjt(torch.tensor([1, 2]), [1, 1], keys=("f", "h")),
        r"the batch lacks feature 'g' \(and 0 more\); its keys are \['f', 'h'\]",
    ),
    (lambda: kjt(torch.tensor([1, 2, 3]), [1, 1]), "feature 'g', position 0 .*ends at value 2 of 3.*must add up"),
    (lambda: kjt(torch.tensor([1]), [1, 2]), "feature 'g', position 0 of the batch: its bag ends at value 3 of 1"),
    (
        lambda: kjt(torch.tensor([1, 2, 3]), [2, -1, 1, 1]),
        "feature 'f', position 1 of the batch: .*must not be negative",
    ),
    (lambda: kjt(torch.tensor([1.5, 2.0]), [1, 1]), "row_ids are torch.float32; they must be int64"),
    (variable_stride, "another number of samples for some features"),
]


@pytest.mark.parametrize(("make", "message"), BAD_BATCHES, ids=range(len(BAD_BATCHES)))
def test_bad_batches(store: InprocStore, make, message: str) -> None:
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    with pytest.raises(InvalidInput, match=message):
        ours(make())
    with pytest.raises(InvalidInput, match=message):
        ours.prefetch(make())
    assert store.stats().total().rows_hot == 0
    good = kjt(torch.tensor([1, 2]), [1, 1])
    ours(good).values().sum().backward()
    assert ours.step().step == 1  # what was refused was no step


@pytest.mark.parametrize(
    ("weights", "message"),
    [(None, "is_weighted=True and the batch has no weights"), (torch.ones(3), "3 weights for 2 values")],
)
def test_bad_weights(store: InprocStore, weights, message: str) -> None:
    ours = FrostlineEmbeddingBagCollection([bag()], store, is_weighted=True)
    with pytest.raises(InvalidInput, match=message):
        ours(kjt(torch.tensor([1, 2]), [1, 1], weights=weights))


def test_every_int64_is_a_row_id(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    edges = torch.tensor([-1, -(2**63), 2**63 - 1, 0])
    ours(kjt(edges, [2, 2])).values().sum().backward()
    assert ours.step().rows_applied == 4


def test_int32_row_ids_and_offsets(store: InprocStore) -> None:
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    features = KeyedJaggedTensor.from_offsets_sync(
        keys=["f", "g"],
        values=torch.tensor([5, -1], dtype=torch.int32),
        offsets=torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    same = kjt(torch.tensor([5, -1]), [1, 1])
    out = ours(features).values()
    ours.step()
    assert torch.equal(ours(same).values(), out)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_name(store: InprocStore, bad: float) -> None:
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    features = kjt(torch.tensor([7, 8, 9]), [1, 1, 0, 1])
    before = ours(features).values()
    factor = torch.ones_like(before)
    factor[1, 9] = bad  # sample 1 of feature g
    message = "table 't', feature 'g', position 1 of the batch: .* not finite and would train row_id 9"
    with pytest.raises(InvalidInput, match=message):
        (before * factor).sum().backward()
    assert ours.step().rows_applied == 0
    assert torch.equal(ours(features).values(), before)


def test_a_gradient_nobody_trains_on_may_be_anything(store: InprocStore) -> None:
    """An empty bag's output is a constant: its gradient goes nowhere."""
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    out = ours(kjt(torch.tensor([7, 8, 9]), [1, 1, 0, 1])).values()
    factor = torch.ones_like(out)
    factor[0, 8:] = float("nan")
    (out * factor).sum().backward()
    assert ours.step().rows_applied == 3


@pytest.mark.parametrize(("wire_dtype", "pushed"), [("float32", "float32"), ("float16", "bfloat16")])
def test_a_sum_that_overflows_is_refused(wire_dtype, pushed: str) -> None:
    store = InprocStore(wire_dtype=wire_dtype, memory_limit_bytes=1 << 28)
    ours = FrostlineEmbeddingBagCollection([bag()], store)
    out = ours(kjt(torch.tensor([7, 7]), [1, 1])).values()
    with pytest.raises(InvalidInput, match=re.escape(f"is not finite as {pushed}, though every part of it is")):
        (out * 2e38).sum().backward()
    store.close()


def test_sequence_gradients_name_the_sample(store: InprocStore) -> None:
    config = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f", "g"])
    ours = FrostlineEmbeddingCollection([config], store)
    out = ours(kjt(torch.tensor([1, 2, 3, 4, 5]), [1, 0, 1, 3]))
    factor = torch.ones(4, 8)
    factor[3, 2] = float("nan")
    with pytest.raises(FrostlineError, match="feature 'g', position 1 of the batch: .*row_id 5"):
        (out["g"].values() * factor).sum().backward()
