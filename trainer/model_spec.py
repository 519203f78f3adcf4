"""The `model` section of a job. Importing this module does not import torch; models.py builds what it says."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from trainer.section import Section, did_you_mean

BUILT_IN_MODELS = ("dlrm_dcn", "dlrm", "deepfm")
Width = Annotated[int, Field(ge=1, le=65536)]


class ModelSection(Section):
    """The dense part: one of torchrec.models, or a factory of the user's own."""

    kind: str = Field(
        "dlrm_dcn",
        description="dlrm_dcn | dlrm | deepfm (torchrec's DLRM_DCN, DLRM, SimpleDeepFMNN), or module:factory, used as "
        "factory(embedding_bag_collection, num_dense, **options); forward(dense, kjt) gives logits [B] or [B, 1]",
    )
    dense_layers: list[Width] = Field(
        [64, 32], min_length=1, description="dlrm, dlrm_dcn: widths of the bottom MLP; the last must be embedding.dim"
    )
    over_layers: list[Width] = Field(
        [64, 1], min_length=2, description="dlrm, dlrm_dcn: widths of the top MLP; the last must be 1"
    )
    dcn_layers: int = Field(2, ge=1, le=64, description="dlrm_dcn: cross layers")
    dcn_rank: int = Field(16, ge=1, le=4096, description="dlrm_dcn: rank of a cross layer")
    hidden_width: Width = Field(64, description="deepfm: width of the hidden layer")
    fm_dim: Width = Field(16, description="deepfm: outputs of the deep part of the interaction")
    options: dict[str, Any] = Field({}, description="module:factory only: its keyword arguments")

    @field_validator("kind")
    @classmethod
    def _kind(cls, kind: str) -> str:
        if kind in BUILT_IN_MODELS:
            return kind
        module, colon, factory = kind.partition(":")
        if colon and all(part.isidentifier() for part in [*module.split("."), *factory.split(".")]):
            return kind
        raise ValueError(
            f"{kind!r} is neither a built-in model ({', '.join(BUILT_IN_MODELS)}) nor module:factory"
            f"{did_you_mean(kind, list(BUILT_IN_MODELS))}"
        )

    @field_validator("over_layers")
    @classmethod
    def _one_logit(cls, widths: list[int]) -> list[int]:
        if widths[-1] != 1:
            raise ValueError(f"the last width is {widths[-1]} and must be 1, the logit; append 1")
        return widths

    @property
    def is_dlrm(self) -> bool:
        return self.kind in ("dlrm_dcn", "dlrm")
