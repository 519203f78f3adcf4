"""The parts of one worker's run, and how a job becomes them: `build_run`, new or from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from embedding_server.errors import InvalidInput
from embedding_server.store import EmbeddingStore, EpochInfo, Identity
from trainer.cuts import Cuts, build_cuts
from trainer.data.batch import Batch, Reader, Schema
from trainer.data.registry import open_reader
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.group import Group
from trainer.job import Job, steps_of, table_specs
from trainer.lr_schedule import LearningRate, Schedule, schedule_in_steps
from trainer.models import build_model
from trainer.pass_ends import PassEnds
from trainer.precision import Precision, choose_precision
from trainer.resume import Snapshot, begin_epoch, compare, read_snapshot
from trainer.warm_up import warm_up_rows
from trainer.watch import Watch


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of one worker's run."""

    job: Job
    group: Group
    store: EmbeddingStore
    who: Identity
    last_step: int  # of the job on these shards before this run's step 1; the shards count from there on
    reader: Reader
    rows: FrostlineEmbeddingBagCollection
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    row_rate: Schedule
    dense_rate: Schedule
    precision: Precision
    total_steps: int | None
    reselect_every: int | None  # steps; None: no table ever freezes
    validate_every: int | None
    watch: Watch
    pass_ends: PassEnds | None  # None: no table does anything at the end of a pass over the data
    cuts: Cuts | None  # None: the job leaves no snapshots
    snapshot: Snapshot | None  # that the run goes on from
    notes: list[str]  # differences from that one, which are allowed

    def is_reselection(self, step: int) -> bool:
        return self.reselect_every is not None and step % self.reselect_every == 0

    def is_validation(self, step: int) -> bool:
        return self.validate_every is not None and step % self.validate_every == 0 and step != self.total_steps

    def is_cut(self, step: int) -> bool:
        return self.cuts is not None and self.cuts.is_due(step)

    def is_barrier(self, step: int) -> bool:
        return self.is_reselection(step) or self.is_validation(step) or self.is_pass_end(step) or self.is_cut(step)

    def is_pass_end(self, step: int) -> bool:
        return self.pass_ends is not None and self.pass_ends.is_end(step)

    @property
    def steps_before(self) -> int:
        """Steps of the run that were trained before, in another process."""
        return self.snapshot.run_step if self.snapshot else 0

    @property
    def steps_to_go(self) -> int | None:
        return None if self.total_steps is None else max(0, self.total_steps - self.steps_before)

    @property
    def batches(self) -> Iterator[Batch]:
        return iter(self.reader if self.pass_ends is None else self.pass_ends)


def build_run(
    job: Job,
    store: EmbeddingStore,
    group: Group,
    arm: str = "main",
    resume_from: Path | None = None,
    epoch_above: int = 0,
) -> Run:
    precision = choose_precision(job.trainer.precision)
    precision.activate()
    reader = open_reader(job, "train", group.rank, group.size)
    snapshot = read_snapshot(resume_from) if resume_from else None
    notes = compare(snapshot, job, reader, table_configs(job, reader.schema)) if snapshot else []
    epoch = join_job(job, arm, store, group, reader, snapshot, epoch_above)
    who = Identity(job.name, epoch.epoch, group.rank)
    rows = build_rows(job, store, reader, who, epoch.last_step)
    model, optimizer = build_dense(job, rows, reader, precision, group, snapshot)
    if snapshot:
        snapshot.restore_reader(reader)
    steps_before = snapshot.run_step if snapshot else 0
    total = _total_steps(job, reader)
    if snapshot and total is not None and total <= steps_before:
        notes.append(
            f"the snapshot stands behind step {steps_before} and the job has {total} steps, so nothing is left to"
            " train; raise trainer.max_steps or trainer.data_passes"
        )
    is_forgetful = any(spec.policy.epoch_end == "forget_rare" for spec in store.table_specs().values())
    return Run(
        job=job,
        group=group,
        store=store,
        who=who,
        last_step=epoch.last_step - steps_before,
        reader=reader,
        rows=rows,
        model=DistributedDataParallel(model, broadcast_buffers=False) if group.size > 1 else model,
        optimizer=optimizer,
        row_rate=build_schedule(job, "embedding", job.embedding.learning_rate, total),
        dense_rate=build_schedule(job, "trainer.dense_optimizer", job.trainer.dense_optimizer.learning_rate, total),
        precision=precision,
        total_steps=total,
        reselect_every=_reselect_every(job, store),
        validate_every=_validate_every(job, reader),
        watch=Watch(job, store, group, list(reader.schema.tables), epoch.last_step - steps_before),
        pass_ends=PassEnds(reader, steps_before + 1) if is_forgetful else None,
        cuts=build_cuts(job, arm, store, group, model, optimizer, epoch, snapshot),
        snapshot=snapshot,
        notes=notes,
    )


def build_dense(
    job: Job,
    rows: FrostlineEmbeddingBagCollection,
    reader: Reader,
    precision: Precision,
    group: Group,
    snapshot: Snapshot | None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, not wrapped by DDP yet, and its optimizer: new, or as they were at the snapshot."""
    torch.manual_seed(job.seed)
    model = build_model(job.model, rows, reader.schema.num_dense)
    precision.prepare(model)
    optimizer = build_optimizer(job, model)
    if snapshot:
        snapshot.restore_dense(job, model, optimizer, group)
    return model, optimizer


def join_job(
    job: Job,
    arm: str,
    store: EmbeddingStore,
    group: Group,
    reader: Reader,
    snapshot: Snapshot | None,
    epoch_above: int = 0,
) -> EpochInfo:
    """Worker 0 creates the tables, begins the epoch and restores the rows of the snapshot; the others learn it."""
    info = EpochInfo(0, 0)
    if group.is_first:
        store.create_tables(table_specs(job, reader.schema.tables))
        info = begin_epoch(job, arm, store, group, snapshot, epoch_above)
    return EpochInfo(group.from_first(info.epoch), group.from_first(info.last_step))


def build_rows(
    job: Job, store: EmbeddingStore, reader: Reader, who: Identity, last_step: int
) -> FrostlineEmbeddingBagCollection:
    warm_up_rows(job.embedding.dim, store.wire_dtype, pooling_of(job))
    specs = {spec.name: spec for spec in table_specs(job, reader.schema.tables)}
    configs = table_configs(job, reader.schema)
    return FrostlineEmbeddingBagCollection(configs, store, specs=specs, identity=who, last_step=last_step)


def table_configs(job: Job, schema: Schema) -> list[EmbeddingBagConfig]:
    return [
        # row_ids are any int64: num_embeddings means nothing here, and TorchRec's config wants one
        EmbeddingBagConfig(
            name=name,
            embedding_dim=job.embedding.dim,
            num_embeddings=1,
            feature_names=features,
            pooling=pooling_of(job),
        )
        for name, features in schema.tables.items()
    ]


def pooling_of(job: Job) -> PoolingType:
    return PoolingType.MEAN if job.embedding.pooling == "mean" else PoolingType.SUM


def build_schedule(job: Job, section: str, rate: LearningRate, total_steps: int | None) -> Schedule:
    try:
        return schedule_in_steps(rate, job.trainer.batch_size, total_steps)
    except ValueError as error:
        raise InvalidInput(f"{section}.learning_rate: {error}") from None


def build_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    spec = job.trainer.dense_optimizer
    kinds = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    return kinds[spec.kind](model.parameters(), lr=spec.learning_rate.base, weight_decay=spec.weight_decay)


def _total_steps(job: Job, reader: Reader) -> int | None:
    limits = [n for n in (reader.num_steps, job.trainer.max_steps) if n is not None]
    return min(limits) if limits else None


def _reselect_every(job: Job, store: EmbeddingStore) -> int | None:
    if all(spec.policy.kind == "off" for spec in store.table_specs().values()):
        return None
    return steps_of(job.embedding.advanced.reselect_every_samples, job.trainer.batch_size)


def _validate_every(job: Job, reader: Reader) -> int | None:
    if not job.data.has_split("validation"):
        return None
    if job.trainer.validate_every_samples is not None:
        return steps_of(job.trainer.validate_every_samples, job.trainer.batch_size)
    return reader.steps_per_pass
