"""Going on from a snapshot: found, compared with the job, and put back: rows, dense layers, reader, random state.

    snapshot = read_snapshot(cut)                       the trainer's part, checked
    notes = compare(snapshot, job, reader, ...)         before anything is touched
    snapshot.restore_dense(...), reader.load_state_dict(snapshot.reader_state(rank))

Every worker reads the files itself and so comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from embedding_server.errors import InvalidInput
from embedding_server.snapshot_format import ShardRecord
from embedding_server.snapshot_parts import tables_in
from embedding_server.store import EmbeddingStore, EpochInfo, Identity
from trainer.data.batch import Reader
from trainer.dense_state import DenseState, read_dense, restore, restore_rng
from trainer.group import Group
from trainer.job import Job, table_specs
from trainer.models import build_model
from trainer.preflight import SavedTable, Shapes, preflight
from trainer.run_log import RunLog
from trainer.snapshot_search import newest_epoch
from trainer.snapshots import (
    DENSE_FILE,
    Manifest,
    job_folder,
    newest_complete,
    read_dense_file,
    read_manifest,
    read_records,
)

if TYPE_CHECKING:
    from trainer.cuts import Cuts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trainer's part of a cut. dense None: it holds rows alone."""

    cut: Path
    manifest: Manifest
    tables: Mapping[str, SavedTable]
    dense: DenseState | None

    @property
    def run_step(self) -> int:
        return self.manifest.run_step

    def restore_reader(self, reader: Reader) -> None:
        if self.manifest.reader is not None:
            reader.load_state_dict(self.manifest.reader)

    def restore_dense(self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
        """Layers, their optimizer, torch's random state. `model`: not wrapped by DDP."""
        if self.dense is not None:
            restore(self.dense, model, optimizer, job.trainer.dense_optimizer.kind)
            restore_rng(self.dense, group.rank, group.size)


def read_snapshot(cut: Path) -> Snapshot:
    """SegmentCorrupt, naming the file, if a part is missing or damaged. The shards check theirs when they restore."""
    manifest = read_manifest(cut)
    dense = None
    if manifest.dense:
        dense = read_dense(read_dense_file(cut, manifest.dense[0]), cut / DENSE_FILE)
    return Snapshot(cut, manifest, _tables(read_records(cut, manifest)), dense)


def _tables(records: list[ShardRecord]) -> dict[str, SavedTable]:
    """By name."""
    tables: dict[str, SavedTable] = {}
    names = tables_in(records)
    for table in (table for record in records for table in record.tables if table.spec.name in names):
        known = tables.get(table.spec.name)
        has_initial_rows = table.rows_initial > 0 or (known is not None and known.has_initial_rows)
        tables[table.spec.name] = SavedTable(table.spec, has_initial_rows)
    return tables


def compare(snapshot: Snapshot, job: Job, reader: Reader, configs: list[EmbeddingBagConfig]) -> list[str]:
    """preflight.py with the snapshot, the job and the model that it would build; notes for people."""
    saved = snapshot.dense
    return preflight(
        str(snapshot.cut),
        snapshot.manifest.resolved_job,
        snapshot.tables,
        None if saved is None else Shapes.of(saved.model, saved.optimizer_kind),
        job,
        {spec.name: spec for spec in table_specs(job, reader.schema.tables)},
        Shapes.of(_dense_tensors(job, reader, configs), job.trainer.dense_optimizer.kind),
    )


def _dense_tensors(job: Job, reader: Reader, configs: list[EmbeddingBagConfig]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the job's model without its tables, for which it gets TorchRec's, without memory."""
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    model = build_model(job.model, tables, reader.schema.num_dense)
    of_tables = {id(tensor) for tensor in (*tables.parameters(), *tables.buffers())}
    named = model.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in named if id(tensor) not in of_tables}


def begin_epoch(
    job: Job, arm: str, store: EmbeddingStore, group: Group, snapshot: Snapshot | None, epoch_above: int = 0
) -> EpochInfo:
    """Worker 0 begins an epoch that is above that of every cut in the job's folder, so that no two are called the same,
    and above `epoch_above`, so that shards without memory of it fence it too; then they take the snapshot's rows."""
    last = max(epoch_above, last_epoch(job, arm))
    will_restore = snapshot is not None
    workers, mode = group.size, job.trainer.mode
    info = store.begin_epoch(job.name, workers, mode, will_restore=will_restore)
    if last >= info.epoch:
        info = store.begin_epoch(job.name, workers, mode, last + 1, will_restore=will_restore)
    if snapshot is None:
        return info
    store.restore(Identity(job.name, info.epoch, group.rank), str(snapshot.cut))
    return EpochInfo(info.epoch, snapshot.manifest.step)


def last_epoch(job: Job, arm: str) -> int:
    """Of the cuts in the job's folder, which is made; 0 without any. InvalidInput if no cut could be taken there."""
    if job.snapshots is None:
        return 0
    try:
        job_folder(job.snapshots.uri, job.name, arm).mkdir(parents=True, exist_ok=True)
        return newest_epoch(job, arm)
    except OSError as error:
        raise InvalidInput(
            f"snapshots.uri={job.snapshots.uri}: {error}; name a folder that this machine and all shards can write"
        ) from None


def say_beginning(job: Job, snapshot: Snapshot | None, notes: list[str], log: RunLog) -> None:
    """Where the run begins, and what it leaves lying. Before its first cut; worker 0 alone."""
    if snapshot is not None:
        anew = "" if snapshot.dense else "; it holds rows alone, all else begins anew"
        log.event(f"resumed from {snapshot.cut}, behind step {snapshot.run_step}{anew}")
        for note in notes:
            log.event(f"resumed with a difference: {note}")
    elif job.snapshots is not None:
        former = newest_complete(job_folder(job.snapshots.uri, job.name, log.arm))
        if former is not None:
            log.event(f"snapshots of an earlier run stay, the newest in {former}; --resume would have gone on from it")


def snapshot_figures(cuts: Cuts | None, snapshot: Snapshot | None) -> dict[str, Any]:
    """Fields of ArmSummary."""
    figures: dict[str, Any] = {}
    if cuts is not None:
        counts = cuts.counts
        figures = {
            "snapshots": counts.taken,
            "snapshots_delta": counts.deltas,
            "snapshots_failed": counts.failed,
            "snapshots_skipped": counts.skipped,
            "snapshot_pause_s_max": round(counts.pause_s_max, 4),
            "snapshot_bytes": counts.last_bytes,
            "snapshot_s": round(counts.last_s, 4),
            "snapshot_last_error": counts.last_error,
        }
    if snapshot is not None:
        figures |= {"resumed_from": str(snapshot.cut), "resumed_step": snapshot.run_step}
    return figures
