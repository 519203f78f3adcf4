"""ScoringModel: the model of a job as a snapshot has it, dense layers and rows of one version, that scores examples.

    snapshot = ServedSnapshot(cut)
    model = ScoringModel(cut, snapshot)
    scores = model.score(dense, bags)          float32[B], probabilities
    metrics = model.evaluate(reader)           what a training prints at the end, of the reader's split

Nothing trains and nothing is written. It scores as evaluation.py does: the same layers, precision and look-ups, so the
same numbers, but that rows are float32 here whatever embedding.wire_dtype is. What the model is comes from the resolved
job in the manifest of the snapshot; no data are needed to build it.

Thread safety: any thread; one scores at a time, for torch's own threads share the cores already.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from embedding_server.errors import InvalidInput
from embedding_server.served_snapshot import ServedSnapshot
from embedding_server.snapshot_store import SnapshotStore
from embedding_server.store import Identity
from trainer.data.batch import Batch, Reader, Schema, make_batch
from trainer.data.registry import schema_of
from trainer.dense_state import read_dense
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.evaluation import evaluate
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.metrics import Metrics
from trainer.models import build_model, logits_of
from trainer.overlay import apply_settings
from trainer.precision import choose_precision
from trainer.run import table_configs
from trainer.section import did_you_mean
from trainer.snapshots import DENSE_FILE, Manifest, read_dense_file, read_manifest


@dataclass(frozen=True, slots=True)
class Bags:
    """The values of one feature: a bag of row_ids for each example."""

    row_ids: np.ndarray  # int64[n]
    lengths: np.ndarray  # int32[B] or int64[B], that add up to n


class ScoringModel:
    def __init__(self, cut: Path, snapshot: ServedSnapshot, factories: Collection[str] = ()) -> None:
        """snapshot: of the same cut; its owner closes it after this was last used.

        factories: what model.kind may be, if it is a module:factory: code is never imported because a file says so.
        InvalidInput if the snapshot has no model that can be built; SegmentCorrupt, naming the file.
        """
        manifest = read_manifest(cut)
        self.job = _job_of(cut, manifest, factories)
        self.schema: Schema = schema_of(self.job)
        self._precision = choose_precision(self.job.trainer.precision)
        self._lock = threading.Lock()
        self._model = self._build(cut, manifest, snapshot)

    def _build(self, cut: Path, manifest: Manifest, snapshot: ServedSnapshot) -> torch.nn.Module:
        self._precision.activate()
        specs = {name: spec for name, spec in snapshot.table_specs().items() if name in self.schema.tables}
        missing = sorted(self.schema.tables.keys() - specs.keys())
        if missing:
            raise InvalidInput(f"{cut}: the model reads tables {missing}, which the snapshot has not got")
        who = Identity(self.job.name, manifest.epoch, 0)
        configs = table_configs(self.job, self.schema)
        rows = FrostlineEmbeddingBagCollection(configs, SnapshotStore(snapshot), specs=specs, identity=who)
        model = build_model(self.job.model, rows, self.schema.num_dense)
        self._precision.prepare(model)
        entry = manifest.dense[0]
        state = read_dense(read_dense_file(cut, entry), cut / DENSE_FILE)
        try:
            model.load_state_dict(state.model)
        except RuntimeError as error:
            raise InvalidInput(f"{cut / DENSE_FILE}: does not fit the model of its job: {error}") from error
        return model.eval()

    def score(self, dense: np.ndarray, bags: Mapping[str, Bags]) -> np.ndarray:
        """float32[B, num_dense] and the bags of every feature -> float32[B], probabilities.

        InvalidInput, naming the feature, if they do not fit the model.
        """
        batch = self._batch(dense, bags)
        if not batch.num_samples:
            return np.empty(0, np.float32)
        with self._lock, torch.inference_mode(), self._precision.context():
            logits = logits_of(self._model, batch)
            return torch.sigmoid(logits.float()).numpy()

    def evaluate(self, reader: Reader) -> Metrics:
        """Of all samples that the reader, of one worker, has."""
        with self._lock:
            return evaluate(self._model, reader, self._precision, Group())

    def score_batch(self, batch: Batch) -> np.ndarray:
        """float32[B] of a reader's batch."""
        with self._lock, torch.inference_mode(), self._precision.context():
            return torch.sigmoid(logits_of(self._model, batch).float()).numpy() if batch.num_samples else _NOTHING

    def _batch(self, dense: np.ndarray, bags: Mapping[str, Bags]) -> Batch:
        num = self._checked_dense(dense)
        names = self.schema.feature_names
        for name in bags:
            if name not in names:
                raise InvalidInput(f"the model has no feature {name!r}{did_you_mean(name, names)}")
        values, lengths = [], []
        for name in names:
            row_ids, of_bags = _checked_bags(name, bags.get(name), num)
            values.append(row_ids)
            lengths.append(of_bags)
        labels = np.zeros(num, np.float32)
        dense = np.require(dense, requirements=["C", "W"])  # torch takes no array that it may not write to
        no_ids, no_lengths = np.empty(0, np.int64), np.empty(0, np.int32)
        return make_batch(
            self.schema, dense, np.concatenate([no_ids, *values]), np.concatenate([no_lengths, *lengths]), labels, num
        )

    def _checked_dense(self, dense: np.ndarray) -> int:
        if dense.ndim != 2 or dense.shape[1] != self.schema.num_dense or dense.dtype != np.float32:
            raise InvalidInput(
                f"dense features are {dense.dtype}{list(dense.shape)}; the model takes float32[examples,"
                f" {self.schema.num_dense}]: {', '.join(self.schema.dense)}"
            )
        if not np.isfinite(dense).all():
            row, column = np.argwhere(~np.isfinite(dense))[0].tolist()
            raise InvalidInput(f"dense feature {self.schema.dense[column]!r} of example {row} is not finite")
        return int(dense.shape[0])


_NOTHING = np.empty(0, np.float32)


def changed_job(job: Job, settings: Sequence[str]) -> Job:
    """With `a.b=value` settings laid over it. InvalidInput."""
    return make_job(apply_settings(job.model_dump(mode="json", exclude_unset=True), settings))


def _job_of(cut: Path, manifest: Manifest, factories: Collection[str]) -> Job:
    if manifest.resolved_job is None or not manifest.dense:
        raise InvalidInput(f"{cut}: the snapshot has rows alone, and no model to score with; look rows up instead")
    job = make_job(manifest.resolved_job)
    if ":" in job.model.kind and job.model.kind not in factories:
        raise InvalidInput(
            f"{cut}: its model comes from {job.model.kind!r}, which is imported only if you say so: --factory"
            f" {job.model.kind}"
        )
    return job


def _checked_bags(name: str, bags: Bags | None, num: int) -> tuple[np.ndarray, np.ndarray]:
    if bags is None:
        raise InvalidInput(f"feature {name!r} is missing; send empty bags (lengths of 0) for examples without it")
    lengths = bags.lengths
    if lengths.shape != (num,):
        raise InvalidInput(f"feature {name!r}: {lengths.shape[0]} bags for {num} examples; send one for each")
    if int(lengths.min(initial=0)) < 0 or float(lengths.sum(dtype=np.float64)) != bags.row_ids.shape[0]:
        raise InvalidInput(
            f"feature {name!r}: lengths must be 0 or more and add up to its {bags.row_ids.shape[0]} row_ids"
        )
    return bags.row_ids, lengths.astype(np.int32)
