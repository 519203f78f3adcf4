"""The training loop of one worker of one arm, and the parts it is made of.

    run_worker(job, arm, store, group, folder, show) -> ArmSummary

reads top down: build the parts, go through the steps, evaluate, sum up. Where rows come from is the store's affair;
how reading, pulling and pushing overlap with the dense step is pipeline.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from embedding_server.errors import InvalidInput
from embedding_server.store import EmbeddingStore, EpochInfo, Identity, WireStats
from trainer import advance
from trainer.data.batch import Batch, Reader
from trainer.data.registry import open_reader
from trainer.data.spec import Split
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.evaluation import evaluate
from trainer.group import Group
from trainer.job import Job, steps_of, table_specs
from trainer.lr_schedule import LearningRate, Schedule, schedule_in_steps
from trainer.mask_report import total_stats
from trainer.metrics import Metrics
from trainer.models import build_model, logits_of
from trainer.pass_ends import PassEnds
from trainer.pipeline import Pipeline
from trainer.precision import Precision, choose_precision
from trainer.report import ArmSummary, Progress, summarise_arm
from trainer.run_log import RunLog
from trainer.warm_up import warm_up_rows
from trainer.watch import Watch


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of one worker's run."""

    job: Job
    group: Group
    store: EmbeddingStore
    who: Identity
    last_step: int  # of the job on these shards before this run; the loop counts from 1, the shards from here on
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

    def is_reselection(self, step: int) -> bool:
        return self.reselect_every is not None and step % self.reselect_every == 0

    def is_validation(self, step: int) -> bool:
        return self.validate_every is not None and step % self.validate_every == 0 and step != self.total_steps

    def is_barrier(self, step: int) -> bool:
        return self.is_reselection(step) or self.is_validation(step) or self.is_pass_end(step)

    def is_pass_end(self, step: int) -> bool:
        return self.pass_ends is not None and self.pass_ends.is_end(step)

    @property
    def batches(self) -> Iterator[Batch]:
        return iter(self.reader if self.pass_ends is None else self.pass_ends)


def run_worker(
    job: Job, arm: str, store: EmbeddingStore, group: Group, folder: Path, show: Callable[[Progress], None]
) -> ArmSummary:
    """Trains and evaluates one arm; every worker of the group calls it. Figures are of the whole group.

    Worker 0 shows progress and writes TensorBoard's files into `folder`.
    """
    run = build_run(job, store, group)
    with RunLog(arm, run.total_steps, folder if group.is_first else None, show) as log:
        train(run, log)
        if run.reselect_every is not None and log.step < run.reselect_every:
            log.event(
                f"the run was over after {log.step} steps, before its first re-selection at step {run.reselect_every}:"
                " no row froze for idleness or rank; set embedding.advanced.reselect_every_samples below the samples"
                " of the run"
            )
        test = score(run, "test")
        log.scores("test", test)
        mask = run.watch.report(log.step, log, is_last=True)
    wire = WireStats(*group.sums([getattr(store.wire_stats, name) for name in WireStats.__dataclass_fields__]))
    num_samples = group.sums([log.num_samples])[0]
    rows = total_stats(mask) if mask else store.stats().total()  # asked twice, shards have written files in between
    return summarise_arm(rows, wire, test, num_samples, log.train_s, log.wall_s, mask)


def train(run: Run, log: RunLog) -> None:
    trainer = run.job.trainer
    pipeline = Pipeline(
        run.batches, run.rows, trainer.mode, run.is_barrier, run.total_steps, announces=trainer.prefetch_frozen
    )
    with pipeline:
        for step, batch in pipeline:
            logits = train_step(run, step, batch)
            run.watch.observe(run.rows.take_lookups(), batch, logits)
            pipeline.push(run.row_rate.at(step))
            log.observe(step, batch, logits)
            if run.is_barrier(step):
                pipeline.drain()
            if run.is_pass_end(step):
                end_data_pass(run, run.last_step + step)
            if run.is_reselection(step):
                reselect(run, run.last_step + step)
                run.watch.start_control_group()
                run.watch.report(step, log)
            if run.is_validation(step):
                with log.pause():
                    log.scores("validation", score(run, "validation"))
        pipeline.drain()


def train_step(run: Run, step: int, batch: Batch) -> torch.Tensor:
    """Forward, backward and the dense update. Returns the logits, float32[B], made before the update."""
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = run.dense_rate.at(step)
    run.optimizer.zero_grad(set_to_none=True)
    with run.precision.context():
        logits = logits_of(run.model, batch)
    logits = logits.float()
    summed = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
    # DDP and the shards divide by the number of workers, so the mean over the global batch is this:
    (summed * (run.group.size / batch.num_global_samples)).backward()
    run.optimizer.step()
    return logits.detach()


def reselect(run: Run, step: int) -> None:
    """All workers wait while worker 0 moves the frostlines. Their pushes are acknowledged; nobody has pulled ahead."""
    run.group.barrier()
    if run.group.is_first:
        advance.reselect(run.store, run.who, step)
    run.group.barrier()


def end_data_pass(run: Run, step: int) -> None:
    """All workers wait while tables of `epoch_end: forget_rare` forget their rare rows."""
    run.group.barrier()
    if run.group.is_first:
        run.store.end_data_pass(run.who, step)
    run.group.barrier()


def score(run: Run, split: Split) -> Metrics | None:
    """Metrics of a split, None if the data has no samples of it."""
    if not run.job.data.has_split(split):
        return None
    run.group.barrier()
    reader = open_reader(run.job, split, run.group.rank, run.group.size)
    # look-ups and nothing else: DDP's forward would wait for gradients to average
    model: Any = run.model.module if run.group.size > 1 else run.model
    return evaluate(model, reader, run.precision, run.group)


def build_run(job: Job, store: EmbeddingStore, group: Group) -> Run:
    precision = choose_precision(job.trainer.precision)
    precision.activate()
    reader = open_reader(job, "train", group.rank, group.size)
    epoch = join_job(job, store, group, reader)
    who = Identity(job.name, epoch.epoch, group.rank)
    rows = build_rows(job, store, reader, who, epoch.last_step)
    torch.manual_seed(job.seed)
    model = build_model(job.model, rows, reader.schema.num_dense)
    precision.prepare(model)
    if group.size > 1:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    total = _total_steps(job, reader)
    is_forgetful = any(spec.policy.epoch_end == "forget_rare" for spec in store.table_specs().values())
    return Run(
        job=job,
        group=group,
        store=store,
        who=who,
        last_step=epoch.last_step,
        reader=reader,
        rows=rows,
        model=model,
        optimizer=build_optimizer(job, model),
        row_rate=build_schedule(job, "embedding", job.embedding.learning_rate, total),
        dense_rate=build_schedule(job, "trainer.dense_optimizer", job.trainer.dense_optimizer.learning_rate, total),
        precision=precision,
        total_steps=total,
        reselect_every=_reselect_every(job, store),
        validate_every=_validate_every(job, reader),
        watch=Watch(job, store, group, list(reader.schema.tables), epoch.last_step),
        pass_ends=PassEnds(reader) if is_forgetful else None,
    )


def join_job(job: Job, store: EmbeddingStore, group: Group, reader: Reader) -> EpochInfo:
    """Worker 0 creates the tables and begins the epoch; the others learn it."""
    info = EpochInfo(0, 0)
    if group.is_first:
        store.create_tables(table_specs(job, reader.schema.tables))
        info = store.begin_epoch(job.name, group.size, job.trainer.mode)
    return EpochInfo(group.from_first(info.epoch), group.from_first(info.last_step))


def build_rows(
    job: Job, store: EmbeddingStore, reader: Reader, who: Identity, last_step: int
) -> FrostlineEmbeddingBagCollection:
    pooling = PoolingType.MEAN if job.embedding.pooling == "mean" else PoolingType.SUM
    warm_up_rows(job.embedding.dim, store.wire_dtype, pooling)
    tables = reader.schema.tables
    configs = [
        # row_ids are any int64: num_embeddings means nothing here, and TorchRec's config wants one
        EmbeddingBagConfig(
            name=name, embedding_dim=job.embedding.dim, num_embeddings=1, feature_names=features, pooling=pooling
        )
        for name, features in tables.items()
    ]
    specs = {spec.name: spec for spec in table_specs(job, tables)}
    return FrostlineEmbeddingBagCollection(configs, store, specs=specs, identity=who, last_step=last_step)


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
