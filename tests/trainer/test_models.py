from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from embedding_server.errors import InvalidInput
from trainer.data.batch import Batch, Feature, Schema, make_batch
from trainer.model_spec import ModelSection
from trainer.models import build_model, logits_of

SCHEMA = Schema(("x", "y"), (Feature("a", "a"), Feature("b", "b")))


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=10, feature_names=[name])
            for name in ("a", "b")
        ]
    )


def batch_of(size: int) -> Batch:
    random = np.random.default_rng(size)
    return make_batch(
        SCHEMA,
        random.standard_normal((size, 2)).astype(np.float32),
        random.integers(0, 10, 2 * size),
        np.ones(2 * size, np.int32),
        np.zeros(size, np.float32),
        size,
    )


def section(kind: str, **more: object) -> ModelSection:
    return ModelSection.model_validate({"kind": kind, "dense_layers": [16, 8], "over_layers": [16, 1], **more})


@pytest.mark.parametrize(("kind", "expected"), [("dlrm_dcn", DLRM_DCN), ("dlrm", DLRM), ("deepfm", SimpleDeepFMNN)])
def test_built_in_models_give_logits_and_reach_every_parameter(kind: str, expected: type) -> None:
    torch.manual_seed(0)
    model = build_model(section(kind), collection(), SCHEMA.num_dense)
    assert type(model) is expected
    logits = logits_of(model, batch_of(64))
    assert logits.shape == (64,)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class EmptyBags(nn.Module):
    """Stands for a collection that takes batches without samples, as ours does and torchrec's does not."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return collection().embedding_bag_configs()

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        return KeyedTensor(["a", "b"], [8, 8], torch.zeros(sparse.stride(), 16))


@pytest.mark.parametrize("kind", ["dlrm_dcn", "dlrm", "deepfm"])
def test_an_empty_batch_gives_empty_logits_and_zero_gradients(kind: str) -> None:
    model = build_model(section(kind), EmptyBags(), SCHEMA.num_dense)  # type: ignore[arg-type]
    logits = logits_of(model, batch_of(0))
    assert logits.shape == (0,)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_deepfm_gives_logits_where_torchrec_gives_probabilities() -> None:
    torch.manual_seed(1)
    bags = collection()
    ours = build_model(section("deepfm", hidden_width=16, fm_dim=4), bags, SCHEMA.num_dense)
    torch.manual_seed(1)
    theirs = SimpleDeepFMNN(2, collection(), 16, 4)
    theirs.load_state_dict(ours.state_dict())
    batch = batch_of(32)
    torch.testing.assert_close(logits_of(ours, batch).sigmoid(), theirs(batch.dense, batch.sparse)[:, 0])


def test_dlrm_dcn_gives_what_torchrec_gives() -> None:
    ours = build_model(section("dlrm_dcn"), collection(), SCHEMA.num_dense)
    theirs = DLRM_DCN(collection(), 2, [16, 8], [16, 1], 2, 16)
    theirs.load_state_dict(ours.state_dict())
    batch = batch_of(32)
    torch.testing.assert_close(logits_of(ours, batch), theirs(batch.dense, batch.sparse)[:, 0], rtol=0, atol=0)


def test_equal_seeds_give_equal_models() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(section("dlrm_dcn"), collection(), 2).state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=0)


class Sum(nn.Module):
    def __init__(self, bags: nn.Module, num_dense: int, scale: float = 1.0) -> None:
        super().__init__()
        self.bags, self.num_dense, self.scale = bags, num_dense, scale

    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        return self.scale * self.bags(sparse).values().sum(dim=1)


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("frostline_test_models")
    module.Sum = Sum  # type: ignore[attr-defined]
    module.nothing = lambda bags, num_dense: 3  # type: ignore[attr-defined]
    module.wide = lambda bags, num_dense: _Wide()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


class _Wide(nn.Module):
    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        return dense


def test_a_factory_of_the_user_is_called_with_its_options(user_module: str) -> None:
    bags = collection()
    model = build_model(section(f"{user_module}:Sum", options={"scale": 2.0}), bags, 2)
    batch = batch_of(4)
    assert isinstance(model, Sum)
    torch.testing.assert_close(logits_of(model, batch), 2.0 * bags(batch.sparse).values().sum(dim=1))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("frostline_absent:make", {}, "No module named 'frostline_absent'"),
        ("{module}:Absent", {}, "no attribute 'Absent'"),
        ("{module}:Sum", {"colour": 1}, r"model.options \['colour'\] failed"),
        ("{module}:nothing", {}, "gave a int, and must give a torch nn.Module"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused(
    user_module: str, kind: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_model(section(kind.format(module=user_module), options=options), collection(), 2)


def test_a_model_that_gives_no_logits_is_refused(user_module: str) -> None:
    model = build_model(section(f"{user_module}:wide"), collection(), 2)
    with pytest.raises(InvalidInput, match=r"gave \(4, 2\) for 4 samples; its forward must give logits"):
        logits_of(model, batch_of(4))


def test_built_in_models_need_a_dense_feature() -> None:
    with pytest.raises(InvalidInput, match="needs at least one dense feature"):
        build_model(section("dlrm"), collection(), 0)
