"""Cuts while a job trains: when they are due, what is copied while training pauses, what is written beside it.

    with Cuts(...) as cuts:
        cuts.after(step, position, log)    each step; if cuts.is_due(step), at a barrier: nothing is pulled ahead
        cuts.finish(step, position, log)   after the last step: a last cut, and the end of what is being written

Most cuts are deltas (delta_chain.py). A cut that fails, or is due while the one before is still being written, is an
event and a count; training goes on.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embedding_server.errors import FrostlineError, InvalidInput
from embedding_server.failpoints import failpoint
from embedding_server.segment_file import make_folder
from embedding_server.store import EmbeddingStore, EpochInfo, Identity
from trainer.delta_chain import DeltaChain, ParentCut
from trainer.dense_state import DenseState, capture
from trainer.group import Group
from trainer.job import Job, steps_of
from trainer.report import bytes_text
from trainer.resume import Snapshot
from trainer.run_log import RunLog
from trainer.snapshot_gc import keep_newest
from trainer.snapshot_lock import in_use, only_training
from trainer.snapshots import (
    CutName,
    Manifest,
    error_of_shards,
    frostline_version,
    job_folder,
    now_text,
    remove_cut,
    shard_entries,
    write_dense,
    write_manifest,
)

_LOG = logging.getLogger(__name__)
#: between two questions how far the shards are
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CutCounts:
    """For summary.json, and as curves snapshots/... in TensorBoard."""

    taken: int = 0
    deltas: int = 0  # of those taken
    failed: int = 0
    skipped: int = 0
    pause_s_max: float = 0.0
    last_bytes: int = 0  # written by the last one that was taken
    last_s: float = 0.0  # from its barrier to its manifest
    last_error: str | None = None  # of the last one that failed

    def curves(self) -> dict[str, float]:
        names = ("taken", "deltas", "failed", "skipped", "last_bytes", "last_s")
        return {name: float(getattr(self, name)) for name in names}


class Cuts:
    """One worker's part in the cuts of a run; worker 0 begins them, and writes what is not a shard's.

    Thread safety: one thread, that of the training loop.
    """

    def __init__(
        self,
        job: Job,
        store: EmbeddingStore,
        group: Group,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        template: Manifest,
    ) -> None:
        """model: not wrapped by DDP; template: what is the same in every manifest of this run, with the step at which
        it begins."""
        assert job.snapshots is not None
        self._section = job.snapshots
        self._every_steps = (
            None
            if self._section.every_samples is None
            else steps_of(self._section.every_samples, job.trainer.batch_size)
        )
        self._folder = job_folder(self._section.uri, job.name, template.arm)
        self._optimizer_kind = job.trainer.dense_optimizer.kind
        self._store = store
        self._who = Identity(job.name, template.epoch, group.rank)
        self._group = group
        self._model = model
        self._optimizer = optimizer
        self._template = template
        self._last_step = template.run_step  # that has a cut
        self._chain = DeltaChain(self._section.max_deltas)  # worker 0 alone
        self._writing: _Writing | None = None  # worker 0 alone
        self._in_use = ExitStack()
        self._is_only_one = True  # or it was said that it is not
        self.counts = CutCounts()

    def __enter__(self) -> Cuts:
        if self._group.is_first:
            self._in_use.enter_context(in_use(self._folder))  # `frostline ckpt gc` leaves the folder alone
            self._is_only_one = self._in_use.enter_context(only_training(self._folder))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._writing is not None:
            self._writing.stop()
        self._in_use.close()

    def is_due(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def after(self, step: int, position: Mapping[str, Any] | None, log: RunLog) -> None:
        """All workers, after each step, and at a barrier if `is_due`: takes the cut, or tells of the last."""
        if self.is_due(step):
            self.take(step, position, log)
        else:
            self.report(log)

    def take(self, step: int, position: Mapping[str, Any] | None, log: RunLog) -> None:
        """All workers, at a barrier. Training pauses for a copy of the dense part."""
        start_s = time.perf_counter()
        self._group.barrier()  # every worker's push is acknowledged
        self.report(log)
        begun = self._begin(step, log) if self._group.is_first else None
        if not self._group.from_first(int(begun is not None)):
            return
        rng_states = self._rng_states()
        if begun is not None:
            try:
                self._writing = self._write(begun, position, rng_states)
            except Exception as error:  # what a custom model keeps may be no tensor
                _abandon(self._store, self._who, self._folder / CutName(begun.epoch, begun.step).folder)
                self._fail(step, error, log)
        self._last_step = step
        pause_s = time.perf_counter() - start_s
        self.counts = replace(self.counts, pause_s_max=max(self.counts.pause_s_max, pause_s))

    def _begin(self, step: int, log: RunLog) -> Manifest | None:
        """The manifest to be, without shards and dense files; None if there will be none."""
        if self._writing is not None:
            self._count(log, skipped=self.counts.skipped + 1)
            log.event(
                f"snapshot of step {step} skipped: that of step {self._writing.run_step} is still being written; set "
                "snapshots.every_samples higher"
            )
            return None
        template = self._template
        manifest = template.model_copy(
            update={"created": now_text(), "step": step + template.step - template.run_step, "run_step": step}
        )
        cut = self._folder / CutName(manifest.epoch, manifest.step).folder
        try:
            make_folder(self._folder)
            cut.mkdir()
        except OSError as error:
            self._fail(step, error, log)
            return None
        try:
            return self._begin_on_shards(manifest, cut, log)
        except FrostlineError as error:
            remove_cut(cut)
            self._fail(step, error, log)
            return None

    def _begin_on_shards(self, manifest: Manifest, cut: Path, log: RunLog) -> Manifest:
        """A delta if there is a parent, else a full cut; the manifest says which."""
        parent = self._chain.parent()
        if parent is not None:
            try:
                self._store.begin_cut(self._who, manifest.step, str(cut), str(parent.cut))
                return manifest.model_copy(update={"parent": parent.entry, "sequence": parent.sequence + 1})
            except InvalidInput as error:  # a shard may have seen another end of the last cut than worker 0 has
                log.event(f"snapshot of step {manifest.run_step} is a full one, no delta: {error}")
        self._chain.begin_full()
        self._store.begin_cut(self._who, manifest.step, str(cut))
        return manifest

    def _write(self, manifest: Manifest, position: Mapping[str, Any] | None, rng_states: torch.Tensor) -> _Writing:
        """position: of this worker's reader, and of every other: readers go through global batches in step."""
        assert position is not None, "Reader.__iter__ gives every batch its position"
        dense = capture(self._model, self._optimizer, self._optimizer_kind, rng_states)
        manifest = manifest.model_copy(update={"reader": dict(position)})
        writing = _Writing(self._store, self._who, self._folder, manifest, dense, self._section.keep)
        writing.start()
        return writing

    def _rng_states(self) -> torch.Tensor:
        """uint8[workers, n]; every worker takes part."""
        state = torch.get_rng_state().numpy()
        states = self._group.gather(state.astype(np.float32))
        return torch.from_numpy(states.astype(np.uint8).reshape(self._group.size, -1))

    def report(self, log: RunLog) -> None:
        """Says what became of a cut that is not being written any more. Cheap: once a step is fine."""
        if not self._is_only_one:
            self._is_only_one = True
            log.event(
                f"another training takes snapshots in {self._folder}, and each removes what the other is writing; end"
                " one of them, or give it another name or snapshots.uri"
            )
        writing = self._writing
        if writing is None or writing.is_alive():
            return
        self._writing = None
        if writing.completed is not None:
            self._chain.add(writing.completed, writing.shard_bytes)
            is_delta = int(writing.completed.sequence > 0)
            self._count(
                log,
                taken=self.counts.taken + 1,
                deltas=self.counts.deltas + is_delta,
                last_bytes=writing.bytes_written,
                last_s=writing.took_s,
            )
            kind = "delta" if is_delta else "full"
            log.say(
                f"snapshot of step {writing.run_step}: {writing.cut}, {kind}, {bytes_text(writing.bytes_written)},"
                f" {writing.took_s:.1f} s"
            )
        elif writing.error is not None:
            self._fail(writing.run_step, writing.error, log)

    def _fail(self, step: int, error: Exception, log: RunLog) -> None:
        what = f"{error or type(error).__name__}"
        self._count(log, failed=self.counts.failed + 1, last_error=f"step {step}: {what}")
        log.event(f"snapshot of step {step} failed, training goes on: {what}")

    def _count(self, log: RunLog, **changes: Any) -> None:
        self.counts = replace(self.counts, **changes)
        log.curves("snapshots", self.counts.curves())

    def finish(self, step: int, position: Mapping[str, Any] | None, log: RunLog) -> None:
        """All workers, after the last step. Waits for what is being written; then a last cut, which is waited for."""
        self._wait(log)
        if self._section.on_finish and step != self._last_step:
            self.take(step, position, log)
            self._wait(log)

    def _wait(self, log: RunLog) -> None:
        if self._writing is not None:
            self._writing.join()
            self.report(log)


def build_cuts(
    job: Job,
    arm: str,
    store: EmbeddingStore,
    group: Group,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: EpochInfo,
    snapshot: Snapshot | None,
) -> Cuts | None:
    """None if the job has no section `snapshots`. epoch: as it began; snapshot: that the run goes on from."""
    if job.snapshots is None:
        return None
    template = Manifest(
        frostline_version=frostline_version(),
        created=now_text(),
        job=job.name,
        arm=arm,
        run=(snapshot.manifest.run if snapshot else None) or secrets.token_hex(8),
        step=epoch.last_step,
        run_step=snapshot.run_step if snapshot else 0,
        epoch=epoch.epoch,
        num_workers=group.size,
        mode=job.trainer.mode,
        shards=[],
        dense=[],
        reader=None,
        resolved_job=job.model_dump(mode="json"),
    )
    return Cuts(job, store, group, model, optimizer, template)


class _Writing(threading.Thread):
    """Writes the dense part of a cut, waits for the shards, then writes the manifest and removes old cuts."""

    def __init__(
        self, store: EmbeddingStore, who: Identity, folder: Path, manifest: Manifest, dense: DenseState, keep: int
    ) -> None:
        super().__init__(name="frostline-cut", daemon=True)
        self._store = store
        self._who = who
        self._folder = folder
        self._manifest = manifest
        self._dense = dense
        self._keep = keep
        self._stopped = threading.Event()
        self.cut = folder / CutName(manifest.epoch, manifest.step).folder
        self.error: Exception | None = None
        self.completed: ParentCut | None = None
        self.bytes_written = self.shard_bytes = 0
        self._start_s, self.took_s = time.perf_counter(), 0.0

    @property
    def run_step(self) -> int:
        return self._manifest.run_step

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:  # a bug too must not end a training of days; its trace is in the log
            if self._stopped.is_set():
                return
            if not isinstance(error, FrostlineError | OSError):
                _LOG.exception("snapshot of step %d", self.run_step)
            self.error = self._cause_of(error)
            _abandon(self._store, self._who, self.cut)

    def _cause_of(self, error: Exception) -> Exception:
        """Where the folder is gone, a shard has given up before, and cleaned up behind it: what it says."""
        if isinstance(error, FileNotFoundError):
            with suppress(FrostlineError):
                if reason := error_of_shards(self._store.cut_progress(self._who)):
                    return OSError(reason)
        return error

    def stop(self) -> None:
        """The run is over before this cut is: what there is of it has no manifest, and the next run removes it."""
        self._stopped.set()
        self.join(10 * POLL_S)

    def _write(self) -> None:
        failpoint("manifest.before_dense")
        dense = write_dense(self.cut, self._dense.to_bytes())
        failpoint("manifest.before_shards")
        self.bytes_written = dense.size_bytes
        if not self._wait_for_shards():
            return
        shards = shard_entries(self.cut, self._store.num_shards)
        failpoint("manifest.before_write")
        entry = write_manifest(self.cut, self._manifest.model_copy(update={"shards": shards, "dense": [dense]}))
        try:
            failpoint("manifest.before_gc")
            keep_newest(self._folder, self._keep, self._manifest.run, self._manifest.epoch)
        except OSError as error:  # the cut is whole all the same
            _LOG.warning("%s: old snapshots are not removed: %s", self._folder, error)
        self.took_s = time.perf_counter() - self._start_s
        self.completed = ParentCut(self.cut, entry, self._manifest.sequence)

    def _wait_for_shards(self) -> bool:
        """Whether all are done; False if the run is over. StoreUnavailable, InvalidInput if one gave up."""
        while not self._stopped.is_set():
            progress = self._store.cut_progress(self._who)
            if reason := error_of_shards(progress):
                raise OSError(reason)
            if all(of_shard.is_done for of_shard in progress):
                self.shard_bytes = sum(of_shard.bytes_written for of_shard in progress)
                self.bytes_written += self.shard_bytes
                return True
            self._stopped.wait(POLL_S)
        return False


def _abandon(store: EmbeddingStore, who: Identity, cut: Path) -> None:
    with suppress(FrostlineError):  # a shard that cannot be reached has its part removed with the folder, or never
        store.abandon_cut(who)
    remove_cut(cut)
