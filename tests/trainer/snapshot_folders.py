"""Cuts and parts of shards in them, without shards: for tests of what the trainer does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from embedding_server.snapshot_format import (
    OBJECTS,
    RECORD,
    ShardRecord,
    frozen_file,
    hot_file,
    part_folder,
    read_shard_record,
    segment_object,
    write_sealed_json,
)
from embedding_server.spec import TableSpec
from trainer.snapshots import CutName, Manifest, shard_entries, write_manifest


def write_part(
    cut: Path,
    part: int,
    num_parts: int,
    job: str,
    step: int,
    epoch: int,
    digests: list[str],
    parent: Path | None = None,
    **spec: Any,
) -> None:
    """One shard's folder with a table `f` of no rows, whose segments have these digests and lie in objects/.
    Files have the size that shard.json says, and nothing in them. parent: the cut that it is a delta of."""
    folder = cut / part_folder(part, num_parts)
    folder.mkdir(parents=True)
    objects = cut.parent / OBJECTS
    objects.mkdir(exist_ok=True)
    for digest in digests:
        (objects / segment_object(digest)).write_bytes(b"s")
    for name in (hot_file(0), frozen_file(0)):
        (folder / name).touch()
    file = {"size_bytes": 0, "crc32": 0}
    table = {
        "spec": TableSpec(**{"name": "f", "dim": 4, **spec}).model_dump(mode="json"),
        "rows_hot": 0,
        "rows_written": 0,
        "rows_initial": 0,
        "rows_waiting": 0,
        "segments": [
            {"digest": digest, "size_bytes": 1, "num_rows": 1, "bits": 8, "has_state": True} for digest in digests
        ],
        "decay_steps": 0,
        "last_step_seen": step,
        "rate": 0.1,
        "frostline": None,
        "has_rare_frozen": False,
        "counters": {},
        "hot": file,
        "frozen": file,
    }
    record = {
        "format_version": 1,
        "part": part,
        "num_parts": num_parts,
        "buckets": "f" * 256,
        "job": job,
        "step": step,
        "epoch": epoch,
        "tables": [table],
        "parent": None,
        "sequence": 0,
    }
    if parent is not None:
        path = parent / part_folder(part, num_parts) / RECORD
        before = read_shard_record(path.parent)
        record["parent"] = file_of(path) | {"step": before.step, "epoch": before.epoch}
        record["sequence"] = before.sequence + 1
    ShardRecord.model_validate(record)  # or the tests would not see that the format has changed
    write_sealed_json(folder / RECORD, record)


def file_of(path: Path) -> dict[str, int]:
    """How a delta names a file of its parent, but for step and epoch."""
    data = path.read_bytes()
    return {"size_bytes": len(data), "crc32": crc32(data)}


def manifest_of(step: int, epoch: int, **changes) -> Manifest:
    fields = {
        "frostline_version": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "job": "j",
        "arm": "main",
        "run": "r1",
        "step": step,
        "run_step": step,
        "epoch": epoch,
        "num_workers": 2,
        "mode": "sync",
        "shards": [],
        "dense": [],
        "reader": {"data_pass": 0},
        "resolved_job": {"seed": 1},
    }
    return Manifest(**{**fields, **changes})


def write_cut(folder: Path, step: int, epoch: int, digests: list[str] = (), num_shards: int = 1, **changes) -> Path:
    cut = folder / CutName(epoch, step).folder
    for part in range(num_shards):
        write_part(cut, part, num_shards, "j", step, epoch, list(digests))
    shards = shard_entries(cut, num_shards)
    write_manifest(cut, manifest_of(step, epoch, shards=shards, **changes))
    return cut
