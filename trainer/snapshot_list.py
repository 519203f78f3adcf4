"""What snapshots there are below a folder, and whether one is sound: `frostline ckpt ls` and `verify`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from embedding_server.errors import FrostlineError, InvalidInput, SegmentCorrupt
from embedding_server.snapshot_check import Findings, check_part
from embedding_server.snapshot_format import OBJECTS
from embedding_server.snapshot_parts import Part, read_part, read_parts
from embedding_server.snapshot_rows import PartTable
from trainer.snapshots import (
    CutName,
    Manifest,
    chain_of,
    check_dense_file,
    check_files,
    cuts_in,
    is_complete,
    newest_complete,
    read_manifest,
    read_record,
)


@dataclass(frozen=True, slots=True)
class TableFigures:
    dim: int
    optimizer: str
    rows_hot: int
    rows_frozen: int


@dataclass(frozen=True, slots=True)
class SnapshotFigures:
    """status: complete; damaged (`what` says how); incomplete: being written, or garbage of a cut that never ended."""

    path: str
    status: str
    step: int
    epoch: int
    bytes: int  # of its own files
    what: str | None = None
    parent: str | None = None  # name of the snapshot that it is a delta of, and is of no use without
    sequence: int = 0  # deltas since a full one
    job: str | None = None
    arm: str | None = None
    created: str | None = None
    rows_hot: int = 0
    rows_frozen: int = 0
    segment_bytes: int = 0  # of objects that it names, which it may share with other snapshots
    tables: dict[str, TableFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobFigures:
    path: str
    job: str | None  # None: no snapshot here says
    arm: str | None
    snapshots: list[SnapshotFigures]
    object_bytes: int  # of all segments, shared or not


def job_folders(uri: Path) -> list[Path]:
    """The folders of jobs in `uri`, or `uri` itself if it is one. InvalidInput if it is no folder."""
    if not uri.is_dir():
        raise InvalidInput(f"{uri} is no folder; name the snapshots.uri of jobs, or the folder of one of them")
    if _is_job(uri):
        return [uri]
    return [path for path in sorted(uri.iterdir()) if path.is_dir() and not path.is_symlink() and _is_job(path)]


def _is_job(folder: Path) -> bool:
    return bool(cuts_in(folder)) or (folder / OBJECTS).is_dir()


def list_jobs(uri: Path) -> list[JobFigures]:
    return [_job(folder) for folder in job_folders(uri)]


def _job(folder: Path) -> JobFigures:
    snapshots = [_snapshot(folder, cut) for cut in cuts_in(folder)]
    named = next((snapshot for snapshot in reversed(snapshots) if snapshot.job is not None), None)
    job, arm = (named.job, named.arm) if named else (None, None)
    return JobFigures(str(folder), job, arm, snapshots, size_of_tree(folder / OBJECTS))


def _snapshot(folder: Path, cut: CutName) -> SnapshotFigures:
    path = folder / cut.folder
    size = size_of_tree(path)
    if not is_complete(path):
        return SnapshotFigures(str(path), "incomplete", cut.step, cut.epoch, size)
    try:
        check_files(path)
        manifest, parts = open_snapshot(path)
        tables: dict[str, TableFigures] = {}
        segments: dict[str, int] = {}
        for part in parts:
            for number, record in enumerate(part.record.tables):
                with closing(PartTable(part, number)) as table:
                    counts = table.counts()
                spec, known = record.spec, tables.get(record.spec.name)
                hot, frozen = (known.rows_hot, known.rows_frozen) if known else (0, 0)
                tables[spec.name] = TableFigures(
                    spec.dim, spec.optimizer.kind, hot + counts.hot, frozen + counts.frozen
                )
                segments |= {segment.digest: segment.size_bytes for segment in record.segments}
    except (FrostlineError, OSError) as error:
        return SnapshotFigures(str(path), "damaged", cut.step, cut.epoch, size, str(error))
    return SnapshotFigures(
        path=str(path),
        status="complete",
        step=cut.step,
        epoch=cut.epoch,
        bytes=size,
        job=manifest.job,
        arm=manifest.arm,
        parent=None if manifest.parent is None else CutName(manifest.parent.epoch, manifest.parent.step).folder,
        sequence=manifest.sequence,
        created=manifest.created,
        rows_hot=sum(table.rows_hot for table in tables.values()),
        rows_frozen=sum(table.rows_frozen for table in tables.values()),
        segment_bytes=sum(segments.values()),
        tables=tables,
    )


def size_of_tree(folder: Path) -> int:
    """Bytes of the files below a folder; what goes meanwhile counts nothing."""
    return sum(stat.st_size for stat in _files(folder))


def newest_change(folder: Path) -> float:
    """When something below a folder was last written, seconds since 1970; 0 if it is gone."""
    try:
        own = folder.stat().st_mtime
    except OSError:
        return 0.0
    return max([own, *(stat.st_mtime for stat in _files(folder))])


def _files(folder: Path) -> Iterator[os.stat_result]:
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(where) / name).lstat()
            except OSError:
                continue


# One snapshot -------------------------------------------------------------------------------------------------------


def find_cut(path: Path) -> Path:
    """The snapshot at `path`, or the newest complete one if that is a job's folder. InvalidInput if there is none."""
    if path.is_symlink() or not path.is_dir():
        raise InvalidInput(f"{path} is no folder; name a snapshot, URI/JOB/cut-<step>-<epoch>, or the folder of a job")
    if not cuts_in(path) and not (path / OBJECTS).is_dir():
        return path.absolute()
    newest = newest_complete(path)
    if newest is None:
        raise InvalidInput(
            f"{path}: none of its {len(cuts_in(path))} cuts has a manifest; `frostline ckpt ls` shows them"
        )
    return newest.absolute()


def open_snapshot(cut: Path) -> tuple[Manifest, list[Part]]:
    """A snapshot's manifest and parts, checked against one another. SegmentCorrupt, InvalidInput, OSError."""
    manifest = _manifest(cut)
    for part in range(len(manifest.shards)):
        read_record(cut, manifest, part)
    return manifest, read_parts(cut)


def _manifest(cut: Path) -> Manifest:
    if not is_complete(cut):
        raise InvalidInput(
            f"{cut} has no manifest.json: it is no snapshot, is still being written, or was never finished; name one"
            " that `frostline ckpt ls` calls complete"
        )
    return read_manifest(cut)


def verify(cut: Path) -> Findings:
    """Reads and checks every byte, of a delta also what it needs of its parents. InvalidInput if it is no snapshot;
    what is damaged is a finding."""
    findings = Findings()
    try:
        manifest = _manifest(cut)
    except SegmentCorrupt as error:
        findings.messages.append(str(error))
        return findings
    for entry in manifest.dense:
        if findings.gather(partial(check_dense_file, cut, entry)):
            findings.bytes_read += entry.size_bytes
    findings.gather(lambda: list(chain_of(cut)))
    parts: list[Part] = []
    for number in range(len(manifest.shards)):
        findings.gather(partial(_add_part, parts, cut, manifest, number))
    if len(parts) == len(manifest.shards):
        findings.gather(partial(read_parts, cut))  # that they belong together
    for part in parts:
        check_part(part, findings)
    return findings


def _add_part(parts: list[Part], cut: Path, manifest: Manifest, number: int) -> None:
    read_record(cut, manifest, number)
    parts.append(read_part(cut, number, len(manifest.shards)))
