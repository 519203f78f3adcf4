"""The `data` section of a job: which reader, and its settings. Importing this module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from trainer.section import Section, did_you_mean

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MAX_FEATURES = 1024


def _checked_path(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"{value!r:.80} is no path; write one, in quotes where YAML reads it otherwise")
    return value


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # ~somebody
        raise ValueError(f"{str(path)!r:.80}: {error}; write the path without '~'") from None


#: relative paths are made absolute against the directory of the command, because Ray workers run elsewhere
AbsolutePath = Annotated[Path, BeforeValidator(_checked_path), AfterValidator(_absolute)]


class _Data(Section):
    on_bad_row: Literal["fail", "skip"] = Field("fail", description="what a row that cannot be read does to the job")
    max_bad_rows: int = Field(
        100, ge=0, description="on_bad_row skip: rows that a worker may skip in one data pass before the job fails"
    )

    def has_split(self, split: Split) -> bool:
        """Whether there are samples of this split at all; a job without test samples reports no test metrics."""
        raise NotImplementedError


class MovieLensData(_Data):
    """MovieLens-100K from the recbole package; split per user by time 80/10/10; a rating of 4 or more is positive."""

    reader: Literal["movielens"] = "movielens"
    path: AbsolutePath | None = Field(
        None, description="folder with ml-100k.inter, .user and .item; default: the installed recbole package"
    )
    shuffle: bool = Field(True, description="permute the training samples in every data pass, by the job's seed")

    def has_split(self, split: Split) -> bool:
        return True


class _FileData(_Data):
    train: list[AbsolutePath] = Field(min_length=1, description="files of training samples, read in this order")
    validation: list[AbsolutePath] = Field([], description="files of validation samples")
    test: list[AbsolutePath] = Field([], description="files of test samples")

    def files(self, split: Split) -> list[Path]:
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]

    def has_split(self, split: Split) -> bool:
        return bool(self.files(split))


class CriteoTsvData(_FileData):
    """Criteo's display advertising format: label, 13 integers, 26 values of up to 8 hexadecimal digits, by tabs."""

    reader: Literal["criteo_tsv"] = "criteo_tsv"


class ParquetFeature(Section):
    column: str | None = Field(None, description="column of the file; default: the feature's name")
    table: str | None = Field(None, description="embedding table; default: the feature's name")


class ParquetData(_FileData):
    """Parquet files: a number column for the label, number columns (dense), and integer, string or list columns."""

    reader: Literal["parquet"] = "parquet"
    label: str = Field("label", description="column of labels, 0 or 1")
    dense: list[str] = Field([], max_length=MAX_FEATURES, description="columns of dense features; null reads as 0")
    features: dict[str, ParquetFeature] = Field(
        min_length=1, max_length=MAX_FEATURES, description="categorical features by name; strings are hashed to 64 bits"
    )

    @field_validator("features", mode="before")
    @classmethod
    def _names_alone(cls, value: object) -> object:
        """`features: [user, item]` is short for `features: {user: {}, item: {}}`."""
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            twice = sorted({v for v in value if value.count(v) > 1})
            if twice:
                raise ValueError(f"feature {twice[0]!r} is named twice; name it once")
            return {v: {} for v in value}
        if isinstance(value, dict):
            return {k: {} if v is None else v for k, v in value.items()}
        return value


class SyntheticData(_Data):
    """Criteo-shaped stream with Zipf row_ids and labels from a planted logistic model; nothing is read from disk."""

    reader: Literal["synthetic"] = "synthetic"
    num_samples: int = Field(1_000_000, ge=1, description="training samples of one data pass")
    num_validation_samples: int = Field(0, ge=0, description="validation samples")
    num_test_samples: int = Field(50_000, ge=0, description="test samples")
    num_dense: int = Field(13, ge=1, le=MAX_FEATURES, description="dense features")
    num_features: int = Field(26, ge=1, le=MAX_FEATURES, description="categorical features, each with its own table")
    cardinalities: list[int] = Field(
        [1_000_000], min_length=1, description="IDs of each feature; a shorter list is repeated"
    )
    hots: list[int] = Field([1], min_length=1, description="values in each feature's bag; a shorter list is repeated")
    zipf_exponent: float = Field(1.05, ge=0.0, le=4.0, description="P(rank r) ~ r^-exponent; 0 is uniform")
    truth_scale: float = Field(0.25, ge=0.0, description="spread of the planted weight of an ID, in logits")
    positive_rate: float = Field(0.25, gt=0.0, lt=1.0, description="share of positive labels, about")

    def has_split(self, split: Split) -> bool:
        return self.num_samples_of(split) > 0

    def num_samples_of(self, split: Split) -> int:
        return {"train": self.num_samples, "validation": self.num_validation_samples, "test": self.num_test_samples}[
            split
        ]

    @model_validator(mode="after")
    def _check(self) -> SyntheticData:
        for name, values, least, most in (
            ("cardinalities", self.cardinalities, 1, 2**40),
            ("hots", self.hots, 0, 1000),
        ):
            if len(values) > self.num_features:
                raise ValueError(
                    f"{name} has {len(values)} entries for num_features={self.num_features}; give at most one a feature"
                )
            for position, value in enumerate(values):
                if not least <= value <= most:
                    raise ValueError(f"{name}[{position}]={value} must be in {least}..{most}; change it")
        return self


DataSection = Annotated[MovieLensData | CriteoTsvData | ParquetData | SyntheticData, Field(discriminator="reader")]


def check_split(data: _Data, split: str) -> Split:
    """The split's name, if it is one and the job has samples of it."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one{did_you_mean(split, list(SPLITS))}")
    if not data.has_split(split):
        raise ValueError(f"data.{split}: the job names no {split} samples; add them or ask for another split")
    return split
