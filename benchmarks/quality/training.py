"""Trains and scores one case: a contestant on a stream with one seed, through our collection and the in-process store.

The model is the smallest that uses whole rows: rows of all fields side by side (and the dense features), one hidden
layer, one logit. Its loss is summed over the batch, so that a row's gradient does not depend on the batch size; the
hidden layer learns by Adam, which does not care.

Bytes are the store's own count (TableStats.bytes_total): committed hot slots at high water with their state, index,
heat, and segments with their dead rows. `bytes_peak` is the largest count seen before and after each re-selection.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.quality.auc import auc_of
from benchmarks.quality.contestants import CONTESTANTS, OPTIMIZERS
from benchmarks.quality.rivals import QuantisedStore, rival_bytes
from benchmarks.quality.samples import MOVIELENS, Data, open_data
from embedding_server.inproc import InprocStore
from embedding_server.optimizers import num_state_columns
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import Identity
from trainer.advance import reselect
from trainer.data.batch import Batch
from trainer.embedding import FrostlineEmbeddingBagCollection

_JOB = "quality"
_MEMORY_LIMIT_BYTES = 10 << 30
_INITIAL_RANGE = 0.05
_DENSE_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained. `share` of the stream's samples; figures come from as many data passes as there are."""

    stream: str
    contestant: str
    optimizer: str = "rowwise_adagrad"  # of OPTIMIZERS
    seed: int = 0
    data_passes: int = 1
    dim: int = 64
    batch_size: int = 4096
    share: float = 1.0

    @property
    def key(self) -> str:
        """Names the case in result lines and files."""
        optimizer = "" if self.optimizer == "rowwise_adagrad" else f"-{self.optimizer}"
        return f"{self.stream}-{self.contestant}{optimizer}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a case after each data pass, and the test scores behind them."""

    passes: list[dict[str, Any]]
    labels: np.ndarray  # uint8[n]
    scores: list[np.ndarray]  # float32[n] after each data pass
    oracle_auc: float | None


class Tower(nn.Module):
    """Batch -> logits float32[B]."""

    def __init__(self, rows: FrostlineEmbeddingBagCollection, width: int, num_dense: int, hidden: int = 64) -> None:
        super().__init__()
        self.rows = rows
        self.layers = nn.Sequential(nn.Linear(width + num_dense, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        values = self.rows(batch.sparse).values()
        if batch.dense.shape[1]:
            values = torch.cat([values, batch.dense], dim=1)
        logits: torch.Tensor = self.layers(values).squeeze(1)
        return logits


class CaseRun:
    """One case under way: store, model, and what was measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.contestant = CONTESTANTS[case.contestant]
        self.optimizer = OPTIMIZERS[case.optimizer]
        self.data: Data = open_data(case.stream, case.seed, case.batch_size, case.share)
        self.dim = max(4, round(case.dim * self.contestant.dim_share) // 4 * 4)
        self.float_ids = self._float_ids()
        self._folder = tempfile.TemporaryDirectory(prefix="frostline-quality-", dir=_memory_folder())
        self.store = self._store()
        info = self.store.begin_epoch(_JOB, 1, "sync")
        self.who = Identity(_JOB, info.epoch, 0)
        torch.manual_seed(case.seed)
        self.model = self._model()
        self.dense_optimizer = torch.optim.Adam(self.model.layers.parameters(), lr=_DENSE_LEARNING_RATE)
        self.reselect_every = self.contestant.reselect_every(self.data.steps_per_pass, self.optimizer)
        self.step = 0
        self.bytes_peak = 0

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()

    def train_pass(self, data_pass: int) -> None:
        rate = self.optimizer.learning_rate
        self.model.train()
        for batch in self.data.train_batches(data_pass):
            self.step += 1
            self.dense_optimizer.zero_grad(set_to_none=True)
            logits = self.model(batch)
            binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum").backward()
            self.dense_optimizer.step()
            self.model.rows.step(rate)
            if self.contestant.freezes and self.step % self.reselect_every == 0:
                self._reselect()
        self._note_bytes()

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """(labels uint8[n], logits float32[n]) of the test samples."""
        self.model.eval()
        labels, logits = [], []
        with torch.inference_mode():
            for batch in self.data.test_batches():
                logits.append(self.model(batch).numpy())
                labels.append(batch.labels.numpy().astype(np.uint8))
        return np.concatenate(labels), np.concatenate(logits)

    def figures(self) -> dict[str, Any]:
        """Of the state right now."""
        stats, wire = self.store.stats().total(), self.store.wire_stats
        return {
            **asdict(stats),
            "bytes_end": self._bytes(),
            "bytes_peak": self.bytes_peak,
            "rows_pulled": wire.rows_pulled,
            "rows_pushed": wire.rows_pushed,
        }

    def _reselect(self) -> None:
        self._note_bytes()
        reselect(self.store, self.who, self.step)
        self._note_bytes()

    def _note_bytes(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self._bytes())

    def _bytes(self) -> int:
        bits = self.contestant.quantised_bits
        columns = num_state_columns(self.optimizer.spec.kind, self.dim)
        total = 0
        for name, stats in self.store.stats().tables.items():
            if bits is None or name not in self.data.large_tables:
                total += stats.bytes_total
            else:
                total += rival_bytes(stats, self.dim, columns, bits, self.float_ids[name].size)
        return total

    def _float_ids(self) -> dict[str, np.ndarray]:
        """Of a quantised rival, by large table, the row_ids that stay in float32."""
        if self.contestant.quantised_bits is None:
            return {}
        share = self.contestant.float_share
        return self.data.hottest_ids(share) if share else dict.fromkeys(self.data.large_tables, np.empty(0, np.int64))

    def _store(self) -> InprocStore:
        if self.contestant.quantised_bits is None:
            return InprocStore(memory_limit_bytes=_MEMORY_LIMIT_BYTES, data_dir=Path(self._folder.name))
        return QuantisedStore(
            self.contestant.quantised_bits, self.float_ids, self.case.seed, memory_limit_bytes=_MEMORY_LIMIT_BYTES
        )

    def _model(self) -> Tower:
        policy = self.contestant.policy(self.data.steps_per_pass, self.optimizer)
        tables, large = self.data.schema.tables, self.data.large_tables
        specs = {
            name: TableSpec(
                name=name,
                dim=self.dim,
                optimizer=self.optimizer.spec,
                policy=policy if name in large else PolicySpec(kind="off"),
                init_min=-_INITIAL_RANGE,
                init_max=_INITIAL_RANGE,
                seed=self.case.seed,
            )
            for name in tables
        }
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=self.dim, num_embeddings=1, feature_names=features)
            for name, features in tables.items()
        ]
        rows = FrostlineEmbeddingBagCollection(configs, self.store, specs=specs, identity=self.who)
        return Tower(rows, self.dim * len(self.data.schema.features), self.data.schema.num_dense)


def _memory_folder() -> Path | None:
    """Where segment files go: a memory file system, if there is one, since a run waits 10 s for the disk otherwise."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else None


def run_case(case: Case) -> Outcome:
    """Trains a case through its data passes and scores it after each."""
    torch.set_num_threads(1)
    run = CaseRun(case)
    try:
        passes, scores = [], []
        labels = np.empty(0, np.uint8)
        for data_pass in range(case.data_passes):
            start = time.perf_counter()
            run.train_pass(data_pass)
            trained = time.perf_counter()
            figures = run.figures()
            labels, logits = run.scores()
            timing = {"train_s": round(trained - start, 1), "score_s": round(time.perf_counter() - trained, 1)}
            passes.append({"auc": auc_of(labels, logits), **figures, **timing})
            scores.append(logits)
        truth = None if case.stream == MOVIELENS else run.data.oracle_logits()
        return Outcome(passes, labels, scores, None if truth is None else auc_of(labels, truth))
    finally:
        run.close()
