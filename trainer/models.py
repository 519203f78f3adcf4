"""Builds the dense part of a model around an embedding bag collection, TorchRec's or ours.

Every model here maps (dense float32[B, d], KeyedJaggedTensor) to logits [B] or [B, 1]; `logits_of` gives [B].
Weights are torch's own initial values: call torch.manual_seed(job.seed) before, on every worker.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionDCNArch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface

from embedding_server.errors import InvalidInput
from trainer.data.batch import Batch
from trainer.model_spec import ModelSection


def build_model(section: ModelSection, collection: EmbeddingBagCollectionInterface, num_dense: int) -> nn.Module:
    """InvalidInput if the data do not fit the model, or a factory cannot be used."""
    if section.kind in ("dlrm_dcn", "dlrm", "deepfm") and num_dense < 1:
        raise InvalidInput(
            f"model.kind={section.kind!r} needs at least one dense feature and the data have none; "
            "name one under data.dense, or use a module:factory"
        )
    # torchrec's annotation asks for its own class; the models use nothing but the interface
    bags = cast(EmbeddingBagCollection, collection)
    match section.kind:
        case "dlrm_dcn":
            model = DLRM_DCN(
                bags, num_dense, section.dense_layers, section.over_layers, section.dcn_layers, section.dcn_rank
            )
            model.inter_arch = _EmptyBatchInteraction(model.inter_arch.F, model.inter_arch.crossnet)
            return model
        case "dlrm":
            return DLRM(bags, num_dense, section.dense_layers, section.over_layers)
        case "deepfm":
            return _deepfm_with_logits(SimpleDeepFMNN(num_dense, bags, section.hidden_width, section.fm_dim))
        case _:
            return _from_factory(section, collection, num_dense)


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """float[B]; a batch without samples gives an empty tensor that still reaches every parameter of the model."""
    logits = model(batch.dense, batch.sparse)
    if not isinstance(logits, torch.Tensor) or logits.numel() != batch.num_samples:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InvalidInput(
            f"the model gave {shape} for {batch.num_samples} samples; its forward must give logits [B] or [B, 1]"
        )
    return logits.reshape(-1)


class _EmptyBatchInteraction(InteractionDCNArch):
    """torchrec's own, but a batch without samples passes: reshape([0, -1]) cannot tell what -1 stands for.

    Such a batch must take the usual way, so that DDP sees this worker's gradients, which are zero.
    """

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """[B, D] and [B, F, D] -> [B, F * D + D]."""
        if self.F <= 0:
            return dense_features
        crossed: torch.Tensor = self.crossnet(
            torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1).flatten(1)
        )
        return crossed


def _deepfm_with_logits(model: SimpleDeepFMNN) -> nn.Module:
    """torchrec's DeepFM ends with a sigmoid where its DLRM does not; losses here start from logits."""
    layers = model.over_arch.model
    if not (isinstance(layers, nn.Sequential) and isinstance(layers[-1], nn.Sigmoid)):
        raise InvalidInput("torchrec's SimpleDeepFMNN no longer ends with a sigmoid; this Frostline needs torchrec 1.8")
    layers[-1] = nn.Identity()
    return model


def _from_factory(section: ModelSection, collection: EmbeddingBagCollectionInterface, num_dense: int) -> nn.Module:
    module_name, _, path = section.kind.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for name in path.split("."):
            factory = getattr(factory, name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            f"model.kind={section.kind!r}: {error}; give an importable module and a function in it"
        ) from error
    try:
        model = factory(collection, num_dense, **section.options)
    except TypeError as error:
        raise InvalidInput(
            f"model.kind={section.kind!r}: calling it with the embedding bag collection, num_dense and model.options "
            f"{sorted(section.options)} failed: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            f"model.kind={section.kind!r} gave a {type(model).__name__}, and must give a torch nn.Module"
        )
    return model
