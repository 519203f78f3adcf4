"""What a reader gives: batches of one worker, as many on every worker, in an order that only the seed decides.

Positions. A reader walks *global batches* of `trainer.batch_size` samples. Worker w of N takes the samples of positions
w*G//N .. (w+1)*G//N of each, G being the samples in it. So N workers together see, step by step, exactly what one
worker would see, and all take the same number of steps; in a short last batch a worker's part may be empty. A row that
is skipped as bad keeps its position: it only makes its worker's part smaller.

A loss that averages over the global batch must divide the sum over a worker's samples by `num_global_samples / N`,
since DDP and the shards divide by N once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Feature:
    """A categorical feature: a bag of row_ids per sample, read from `table`."""

    name: str
    table: str


@dataclass(frozen=True, slots=True)
class Schema:
    """What a reader's batches hold. Order is that of `Batch.dense` columns and of the KeyedJaggedTensor's keys."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    #: features of the bias-only logistic regression that a model is compared with; empty: all of them
    bias_features: tuple[str, ...] = ()

    @property
    def num_dense(self) -> int:
        return len(self.dense)

    @property
    def feature_names(self) -> list[str]:
        return [feature.name for feature in self.features]

    @property
    def tables(self) -> dict[str, list[str]]:
        """Names of the features that read each table, by table, in order of first use."""
        result: dict[str, list[str]] = {}
        for feature in self.features:
            result.setdefault(feature.table, []).append(feature.name)
        return result


@dataclass(frozen=True, slots=True)
class Batch:
    """One worker's part of a global batch; B samples, possibly 0."""

    dense: torch.Tensor  # float32[B, num_dense]
    sparse: KeyedJaggedTensor  # values int64, lengths int32; keys in the schema's order
    labels: torch.Tensor  # float32[B], 0 or 1
    num_global_samples: int  # positions in the global batch, over all workers
    #: state_dict of the reader right behind this batch, wherever it has read on to since; None if no reader gave it
    position: Mapping[str, Any] | None = None

    @property
    def num_samples(self) -> int:
        return self.labels.numel()


def make_batch(
    schema: Schema,
    dense: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    labels: np.ndarray,
    num_global_samples: int,
) -> Batch:
    """Wraps numpy arrays without copying: dense float32[B, d], values int64[n], lengths int32[F*B], feature-major."""
    sparse = KeyedJaggedTensor(
        keys=schema.feature_names, values=torch.from_numpy(values), lengths=torch.from_numpy(lengths)
    )
    return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), num_global_samples)


def share_of(worker: int, num_workers: int, num_samples: int) -> tuple[int, int]:
    """First and end position that a worker takes of a global batch of `num_samples`."""
    return worker * num_samples // num_workers, (worker + 1) * num_samples // num_workers


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of which global batches a reader gives."""

    batch_size: int  # samples of a global batch
    worker: int = 0
    num_workers: int = 1
    data_passes: int = 1
    seed: int = 0


class Reader(ABC):
    """Iterates over one worker's batches of one split, through all data passes.

    Iterating goes on from where the reader stands; `batch.position` is the `state_dict()` right behind that batch, so
    whoever reads ahead has it beside each batch. Equal constructor arguments and equal state give equal batches.

    Thread safety: one thread at a time.
    Errors: InvalidInput, naming file and row, for input that cannot be read.
    """

    schema: Schema

    def __init__(self, share: Share) -> None:
        self.share = share
        self.data_pass = 0
        self.step_in_pass = 0
        self.rows_skipped = 0

    @property
    def num_steps(self) -> int | None:
        """Steps of all data passes, the same on every worker; None if only reading to the end can tell."""
        per_pass = self.steps_per_pass
        return None if per_pass is None else per_pass * self.share.data_passes

    @property
    @abstractmethod
    def steps_per_pass(self) -> int | None: ...

    @abstractmethod
    def _batches(self, data_pass: int, first_step: int) -> Iterator[Batch]:
        """This worker's batches of one data pass, from step `first_step` (0-based) on."""

    def __iter__(self) -> Iterator[Batch]:
        while self.data_pass < self.share.data_passes:
            for batch in self._batches(self.data_pass, self.step_in_pass):
                self.step_in_pass += 1
                yield replace(batch, position=self.state_dict())
            self.data_pass += 1
            self.step_in_pass = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "data_pass": self.data_pass,
            "step_in_pass": self.step_in_pass,
            "rows_skipped": self.rows_skipped,
            "batch_size": self.share.batch_size,
            "seed": self.share.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position. The number of workers may differ from then; batch size and seed may not.

        Must come before iterating; an iterator that runs already does not follow.
        """
        for key, now in (("batch_size", self.share.batch_size), ("seed", self.share.seed)):
            if state.get(key) != now:
                raise InvalidInput(
                    f"reader state: {key}={state.get(key)!r} when it was saved and {now!r} now, so its position means "
                    f"other samples; set {key} as it was"
                )
        for key in ("data_pass", "step_in_pass", "rows_skipped"):
            value = state.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidInput(f"reader state: {key}={value!r} must be a count; this is not a reader's state")
        self.data_pass = state["data_pass"]
        self.step_in_pass = state["step_in_pass"]
        self.rows_skipped = state["rows_skipped"]
