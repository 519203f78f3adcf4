"""The training loop of one worker of one arm.

    run_worker(job, arm, store, group, folder, show) -> ArmSummary

reads top down: build the parts (run.py), go through the steps, evaluate, sum up. Where rows come from is the store's
affair; how reading, pulling and pushing overlap with the dense step is pipeline.py's; what a cut takes, cuts.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embedding_server.store import EmbeddingStore, WireStats
from trainer import advance
from trainer.data.batch import Batch
from trainer.data.registry import open_reader
from trainer.data.spec import Split
from trainer.evaluation import evaluate
from trainer.group import Group
from trainer.job import Job
from trainer.mask_report import total_stats
from trainer.metrics import Metrics
from trainer.models import logits_of
from trainer.pipeline import Pipeline
from trainer.report import ArmSummary, Progress, summarise_arm
from trainer.resume import say_beginning, snapshot_figures
from trainer.run import Run, build_run
from trainer.run_log import RunLog


def run_worker(
    job: Job,
    arm: str,
    store: EmbeddingStore,
    group: Group,
    folder: Path,
    show: Callable[[Progress], None],
    resume_from: Path | None = None,
    epoch_above: int = 0,
) -> ArmSummary:
    """Trains and evaluates one arm; every worker of the group calls it. Figures are of the whole group.

    Worker 0 shows progress and writes TensorBoard's files into `folder`. resume_from: a cut, behind which it goes on.
    epoch_above: of worker groups that this one takes over from.
    """
    run = build_run(job, store, group, arm, resume_from, epoch_above)
    own_folder = folder if group.is_first else None
    with RunLog(arm, run.total_steps, own_folder, show, run.steps_before, run.who.epoch) as log:
        if group.is_first:
            say_beginning(job, run.snapshot, run.notes, log)
        if run.reselect_every is not None and run.steps_before >= run.reselect_every:
            run.watch.start_control_group()
        train(run, log)
        if run.reselect_every is not None and log.step < run.reselect_every:
            log.event(
                f"the run was over after {log.step} steps, before its first re-selection at step {run.reselect_every}:"
                " no row froze for idleness or rank; set embedding.advanced.reselect_every_samples and"
                " embedding.idle_samples below the samples of the run"
            )
        test = score(run, "test")
        log.scores("test", test)
        mask = run.watch.report(log.step, log, is_last=True)
    wire = WireStats(*group.sums([getattr(store.wire_stats, name) for name in WireStats.__dataclass_fields__]))
    num_samples = group.sums([log.num_samples])[0]
    rows = total_stats(mask) if mask else store.stats().total()  # asked twice, shards have written files in between
    summary = summarise_arm(rows, wire, test, num_samples, log.train_s, log.wall_s, mask)
    return replace(summary, steps=log.step, **snapshot_figures(run.cuts, run.snapshot))


def train(run: Run, log: RunLog) -> None:
    trainer = run.job.trainer
    pipeline = Pipeline(
        run.batches,
        run.rows,
        trainer.mode,
        run.is_barrier,
        run.steps_to_go,
        first_step=run.steps_before + 1,
        announces=trainer.prefetch_frozen,
    )
    position = None
    with pipeline, run.cuts or nullcontext():
        for step, batch in pipeline:
            position = batch.position
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
            if run.cuts:
                run.cuts.after(step, position, log)
            if run.is_validation(step):
                with log.pause():
                    log.scores("validation", score(run, "validation"))
        pipeline.drain()
        if run.cuts:
            with log.pause():
                run.cuts.finish(log.step, position, log)


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
