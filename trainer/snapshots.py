"""Snapshots on disk as the trainer sees them: the folder of a job, the manifest of a cut, which cuts there are.

    URI/JOB/objects/<digest>.segment       files of frozen rows, shared by all cuts of the job
    URI/JOB/cut-<step:012>-<epoch>/
        shard-<k>-of-<n>/...               written by the shards (embedding_server/snapshot_format.py)
        dense.safetensors                  dense layers, their optimizer and torch's random state (dense_state.py)
        manifest.json                      sealed JSON, written last of all; a cut without it is garbage

JOB is a name made safe for file systems, of the job and, if it has arms, the arm. A manifest holds sizes and CRC-32s of
what it names; file names are never taken from it, only numbers. `run` tells the cuts of one training, resumed or not,
from those of another under the same job name. A delta (snapshot_format.py) names its parent by step and epoch, and by
the size and CRC-32 of its manifest: `chain_of`. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from isal.isal_zlib import crc32
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from embedding_server.errors import InvalidInput
from embedding_server.safe_name import safe_name
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_fd, sync_folder, write_all
from embedding_server.snapshot_file import corrupt, open_regular
from embedding_server.snapshot_format import (
    MANIFEST,
    MAX_JSON_BYTES,
    MAX_SHARDS,
    OBJECTS,
    RECORD,
    ParentRecord,
    ShardRecord,
    check_lineage,
    cut_folder,
    frozen_file,
    hot_file,
    part_folder,
    read_bounded,
    read_model,
    read_shard_record,
    segment_object,
    write_sealed_json,
)
from embedding_server.snapshot_parts import check_none_is_partly_dropped
from embedding_server.store import MAX_SEQUENCE, CutProgress, UpdateMode
from trainer.tensor_file import TensorFile

DENSE_FILE = "dense.safetensors"
DENSE_METADATA = frozenset({"format_version", "optimizer", "param_groups"})  # dense_state.py
_READ_BYTES = 4 << 20
_CUT = re.compile(r"cut-([0-9]{12})-([0-9]{1,18})", re.ASCII)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class FileEntry(_Entry):
    """dense.safetensors: its CRC-32 covers every byte."""

    name: Literal["dense.safetensors"]
    size_bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=1 << 32)


class ShardEntry(_Entry):
    """A shard's part, by its shard.json, which covers the rest."""

    part: int = Field(ge=0)
    size_bytes: int = Field(ge=0, le=MAX_JSON_BYTES)
    crc32: int = Field(ge=0, lt=1 << 32)


class Manifest(_Entry):
    """manifest.json. `dense` empty and `reader` None: rows alone, from which a training begins with step 1."""

    format_version: Literal[1] = 1
    frostline_version: str
    created: str  # ISO 8601, UTC
    job: str
    arm: str
    run: str | None  # of all cuts of one training, through its resumptions
    step: int = Field(ge=0)  # as the shards count: what is applied
    run_step: int = Field(ge=0)  # as schedules count; less than step if the shards had trained this job before
    epoch: int = Field(ge=0)
    num_workers: int = Field(ge=1)
    mode: UpdateMode
    shards: Annotated[list[ShardEntry], FailFast()] = Field(max_length=MAX_SHARDS)  # part k of len(shards) each
    dense: list[FileEntry] = Field(max_length=1)
    reader: dict[str, Any] | None  # Reader.state_dict, of all workers: a global position
    resolved_job: dict[str, Any] | None
    parent: ParentRecord | None = None  # of a delta, by its manifest.json
    sequence: int = Field(0, ge=0, le=MAX_SEQUENCE)  # deltas since the full cut of the chain

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        check_lineage(self.parent, self.sequence, self.step, self.epoch)
        return self


@dataclass(frozen=True, slots=True, order=True)
class CutName:
    """In the order in which cuts were taken: an epoch of a job comes after all cuts of the epochs before it."""

    epoch: int
    step: int

    @property
    def folder(self) -> str:
        return cut_folder(self.step, self.epoch)


def job_folder(uri: Path, job: str, arm: str = "main") -> Path:
    """Where the cuts of a job's arm lie; a job without arms has the arm `main`."""
    name = job if arm == "main" else f"{job}@{arm}"
    return uri / safe_name(name)


def cuts_in(folder: Path) -> list[CutName]:
    """Every cut in a job's folder, complete or not, oldest first; none if there is no such folder."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _CUT.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(CutName(int(match[2]), int(match[1])))
    return sorted(found)


def cut_name(cut: Path) -> CutName:
    """Of the folder of a cut. InvalidInput if it is called otherwise."""
    match = _CUT.fullmatch(cut.name)
    if match is None:
        raise InvalidInput(f"{cut} is not the folder of a cut, which is called cut-<step, 12 digits>-<epoch>")
    return CutName(int(match[2]), int(match[1]))


def is_complete(cut: Path) -> bool:
    """Whether it has a manifest; read_manifest tells if that is sound."""
    return (cut / MANIFEST).is_file()


def newest_complete(folder: Path) -> Path | None:
    complete = [folder / cut.folder for cut in cuts_in(folder) if is_complete(folder / cut.folder)]
    return complete[-1] if complete else None


def read_manifest(cut: Path) -> Manifest:
    """SegmentCorrupt, naming the file, if it is not sound or not the manifest of this folder."""
    path = cut / MANIFEST
    try:
        manifest = read_model(path, Manifest)
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror})") from None
    own = CutName(manifest.epoch, manifest.step).folder
    if cut.name != own:
        raise corrupt(path, f"is that of {own}, and lies in {cut.name}")
    if not manifest.shards or [shard.part for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise corrupt(path, "does not name every shard once")
    return manifest


def read_parent(cut: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    """The cut that a delta builds on, and its manifest. SegmentCorrupt, naming the file, if it is not the one."""
    parent = manifest.parent
    assert parent is not None
    folder = cut.parent / CutName(parent.epoch, parent.step).folder
    path = folder / MANIFEST
    try:
        data = read_bounded(path)
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror}), and {cut.name} is a delta of it") from None
    if (len(data), crc32(data)) != (parent.size_bytes, parent.crc32):
        raise corrupt(path, f"is not the one that it was when {cut.name} was written as a delta of it")
    found = read_manifest(folder)
    said = (found.job, found.arm, found.sequence, len(found.shards))
    if said != (manifest.job, manifest.arm, manifest.sequence - 1, len(manifest.shards)):
        raise corrupt(path, f"job, arm, sequence or number of shards are not those of a parent of {cut.name}")
    return folder, found


def chain_of(cut: Path) -> Iterator[tuple[Path, Manifest]]:
    """A cut and, if it is a delta, its parents to the full cut. SegmentCorrupt, naming the file, where one is missing
    or not the one; as steps fall from one to the next, it ends."""
    manifest = read_manifest(cut)
    yield cut, manifest
    while manifest.parent is not None:
        cut, manifest = read_parent(cut, manifest)
        yield cut, manifest


def write_manifest(cut: Path, manifest: Manifest) -> ParentRecord:
    """The last file of a cut; from here on it counts. Returns how a delta names it. OSError if it cannot be written."""
    sync_folder(cut)
    sync_folder(cut.parent)  # the cut's own name, before the manifest stands for it
    file = write_sealed_json(cut / MANIFEST, manifest.model_dump(mode="json"))
    return ParentRecord(step=manifest.step, epoch=manifest.epoch, size_bytes=file.size_bytes, crc32=file.crc32)


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def frostline_version() -> str:
    return version("frostline")


def write_dense(cut: Path, data: bytes) -> FileEntry:
    """Whole or not at all: a temporary name, fsync, rename. OSError."""
    path = cut / DENSE_FILE
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(data))
        sync_fd(fd)
    finally:
        os.close(fd)
    partial.replace(path)
    return FileEntry(name="dense.safetensors", size_bytes=len(data), crc32=crc32(data))


def read_dense_file(cut: Path, entry: FileEntry) -> bytes:
    """Against its size and CRC-32. SegmentCorrupt, naming it."""
    path = cut / DENSE_FILE
    _check_dense_header(path)
    return _read_checked(path, entry.size_bytes, entry.crc32)


def check_dense_file(cut: Path, entry: FileEntry) -> None:
    """As read_dense_file, in pieces."""
    path, crc = cut / DENSE_FILE, 0
    _check_dense_header(path)
    with _opened(path, entry.size_bytes) as file:
        while piece := file.read(_READ_BYTES):
            crc = crc32(piece, crc)
    if crc != entry.crc32:
        raise corrupt(path, "does not match the CRC-32 in the manifest")


def _check_dense_header(path: Path) -> None:
    """Before anything else is read, however much that is."""
    try:
        with closing(TensorFile(path)) as file:
            missing = DENSE_METADATA - file.metadata.keys()
    except InvalidInput as error:
        raise corrupt(path, f"is no safetensors file ({error})") from None
    if missing:
        raise corrupt(path, f"is no dense state: its metadata lacks {', '.join(sorted(missing))}")


def _read_checked(path: Path, size_bytes: int, crc: int) -> bytes:
    data = _read(path, size_bytes)
    if crc32(data) != crc:
        raise corrupt(path, "does not match the CRC-32 in the manifest")
    return data


def _read(path: Path, size_bytes: int | None = None) -> bytes:
    with _opened(path, size_bytes) as file:
        return file.read()


@contextmanager
def _opened(path: Path, size_bytes: int | None) -> Iterator[IO[bytes]]:
    """SegmentCorrupt if it is not there, has another size, or cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size_bytes is not None and size != size_bytes:
                raise corrupt(path, f"has {size} bytes, and {size_bytes} in the manifest")
            yield file
    except OSError as error:
        raise corrupt(path, f"cannot be read ({error.strerror})") from None


def error_of_shards(progress: Sequence[CutProgress]) -> str | None:
    """Of the first shard that gave the cut up."""
    return next((f"shard {shard}: {of_shard.error}" for shard, of_shard in enumerate(progress) if of_shard.error), None)


def shard_entries(cut: Path, num_shards: int) -> list[ShardEntry]:
    """What the shards have left in a cut. SegmentCorrupt if the part of one is missing, InvalidInput if a table is."""
    paths = [record_path(cut, part, num_shards) for part in range(num_shards)]
    found = [_read(path) for path in paths]
    check_none_is_partly_dropped(cut, [read_shard_record(path.parent) for path in paths])
    return [ShardEntry(part=part, size_bytes=len(data), crc32=crc32(data)) for part, data in enumerate(found)]


def record_path(cut: Path, part: int, num_parts: int) -> Path:
    return cut / part_folder(part, num_parts) / RECORD


def read_record(cut: Path, manifest: Manifest, part: int) -> ShardRecord:
    """shard.json of one shard, against the manifest. SegmentCorrupt, naming it."""
    entry, path = manifest.shards[part], record_path(cut, part, len(manifest.shards))
    _read_checked(path, entry.size_bytes, entry.crc32)
    record = read_shard_record(path.parent)
    if (record.step, record.epoch, record.job) != (manifest.step, manifest.epoch, manifest.job):
        raise corrupt(path, f"is of step {record.step}, epoch {record.epoch} of job {record.job!r}")
    of_parent, its_parent = manifest.parent, record.parent
    if (of_parent and (of_parent.step, of_parent.epoch)) != (its_parent and (its_parent.step, its_parent.epoch)):
        raise corrupt(path, "is a delta of another cut than its manifest.json says")
    return record


def read_records(cut: Path, manifest: Manifest) -> list[ShardRecord]:
    return [read_record(cut, manifest, part) for part in range(len(manifest.shards))]


def digests_in(cut: Path) -> set[str]:
    """Of the segment files that a cut names. SegmentCorrupt if it is not complete, or damaged."""
    records = read_records(cut, read_manifest(cut))
    return {segment.digest for record in records for table in record.tables for segment in table.segments}


def check_files(cut: Path) -> None:
    """SegmentCorrupt, naming the file, unless every file that a cut needs is there, of its size: of its parents those
    that a restore reads. Reads JSON alone."""
    chain = list(chain_of(cut))
    sizes = {cut / entry.name: entry.size_bytes for entry in chain[0][1].dense}
    for each, manifest in chain:
        for part, record in enumerate(read_records(each, manifest)):
            folder = record_path(each, part, len(manifest.shards)).parent
            for number, table in enumerate(record.tables):
                sizes[folder / hot_file(number)] = table.hot.size_bytes
                if each == cut:
                    sizes[folder / frozen_file(number)] = table.frozen.size_bytes
                    sizes |= {cut.parent / OBJECTS / segment_object(s.digest): s.size_bytes for s in table.segments}
    for path, size_bytes in sizes.items():
        try:
            found = path.lstat().st_size
        except OSError as error:
            raise corrupt(path, f"cannot be read ({error.strerror})") from None
        if found != size_bytes:
            raise corrupt(path, f"has {found} bytes, not {size_bytes}")


def remove_cut(cut: Path) -> None:
    """Its manifest first, so that what is half removed is garbage. Leaves what cannot be removed."""
    with suppress(OSError):
        (cut / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(cut)


def no_snapshot(folder: Path, job: str, arm: str) -> InvalidInput:
    """What to say where newest_complete finds nothing."""
    cuts = cuts_in(folder)
    what = f"{len(cuts)} cuts there, and none has a manifest" if cuts else "no cut there"
    return InvalidInput(
        f"{folder}: no complete snapshot of job {job!r}, arm {arm!r} ({what}); check name and snapshots.uri, or train "
        "without --resume"
    )
