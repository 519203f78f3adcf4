"""What a snapshot is on disk: names, columns and shard.json. DO NOT CHANGE; a change needs a new format_version.

A cut leaves this, ROOT/JOB being the folder of a job:

    ROOT/JOB/objects/<digest>.segment       segment files (segment_file.py), linked or copied once, by `segment_digest`
    ROOT/JOB/cut-<step, 12 digits>-<epoch>/
        shard-<k>-of-<n>/                   what shard k of n owned at the cut
            table-<i>-hot.safetensors       column files (snapshot_file.py), i from 0 in the order of shard.json
            table-<i>-frozen.safetensors
            shard.json                      the last file of the shard
        ...                                 trainer/ adds the dense part and the manifest

Every name is made of numbers and digests; none is read from a file. A hot file has, for n hot rows in order of bucket:

    row_ids I64[n]          weight_decay F64[s + 1]: settled[1..s], then total (weight_decay.py); F64[0] without decay
    state F32[m, C]         last_steps I32[n]           bucket_offsets U32[1025]    written_offsets U32[1025]
    default_weights F32[D]  default_state F32[C]        weights F32[m, D], with hot_bits 16 F16[m, D]
    heat U16[n]             visits U8[n]

m of the rows are *written*: weights and state are here, in the same order, those of bucket b from written_offsets[b] to
written_offsets[b + 1]. In each bucket they come first. In a full cut every row is written (m = n). A *delta* has a
parent, the cut before it of the same shard and epoch, and writes the rows that changed since then: all others are hot
in the parent too, with the weights and state that they have, written there or in its parent, and so on to a full cut.
All else of a delta is whole, frozen rows too, so nothing of a parent that is not there can come back.

Weights are as they lie in memory: what weight decay still takes off them is told by last_steps and weight_decay. A
frozen file has the m rows that froze at their initial value, the w IDs below min_count with their visits, and the heat
of the rows of each segment, NOT_LIVE where that position is no row any more:

    initial_row_ids I64[m]  waiting_row_ids I64[w]      waiting_counts U32[w]
    initial_heat U16[m]     heat.<k> U16[rows of segment k]

shard.json is JSON of the form {"crc32":"<8 hex digits>","content":{...}}; the CRC-32 is that of every byte behind the
first comma (`sealed_json`), and the content is a ShardRecord. It has the CRC-32 of each column file's block_crcs
and each segment's digest, which cover all other bytes, and of a delta's parent step, epoch, and size and CRC-32 of the
whole shard.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from isal.isal_zlib import crc32
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from embedding_server.failpoints import failpoint
from embedding_server.optimizers import num_state_columns
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_fd, sync_folder, write_all
from embedding_server.snapshot_file import Column, ColumnWriter, corrupt, open_regular
from embedding_server.spec import MAX_INITIAL, MAX_STEPS, TableSpec
from embedding_server.store import MAX_SEQUENCE, NUM_BUCKETS, NUM_RANK_BINS, Frostline
from embedding_server.strict_json import parse_strict

MAX_JSON_BYTES = 16 << 20
MAX_JSON_VALUES = 3 << 17  # some 40 MB as Python objects, twice that while they are read
MAX_JSON_KEYS = 4096  # of an object that a model is made of: each that is wrong costs 1 KB of message
MAX_SHARDS, MAX_TABLES, MAX_SEGMENTS = 4096, 4096, 256
NOT_LIVE = 0xFFFF  # in heat.<k>; a live row of this heat, which takes 2^24 visits, is written as 0xFFFE
OBJECTS, RECORD, MANIFEST = "objects", "shard.json", "manifest.json"
_SEAL = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_SEAL_BYTES = 20
_Model = TypeVar("_Model", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class FileRecord(_Record):
    """A file: a column file, of which crc32 is that of its block_crcs; else of every byte."""

    size_bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)

    @classmethod
    def of(cls, file: ColumnWriter) -> FileRecord:
        """Of a column file that is complete."""
        return cls(size_bytes=file.size_bytes, crc32=file.crc32)


class SegmentRecord(_Record):
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)
    num_rows: int = Field(ge=1, lt=2**23)
    bits: Literal[4, 8, 16, 32]
    has_state: bool = Field(description="its accumulators are of the table's optimizer; else a thaw starts without any")


class FrostlineRecord(_Record):
    """As store.Frostline."""

    bin: int = Field(ge=-1, lt=NUM_RANK_BINS)
    tie_fraction: float = Field(ge=0.0, le=1.0)
    margin_bins: int = Field(ge=0, le=NUM_RANK_BINS)
    held_fraction: float = Field(ge=0.0, le=1.0)

    @classmethod
    def of(cls, line: Frostline) -> FrostlineRecord:
        return cls(
            bin=line.bin,
            tie_fraction=line.tie_fraction,
            margin_bins=line.margin_bins,
            held_fraction=line.held_fraction,
        )

    def frostline(self) -> Frostline:
        return Frostline(self.bin, self.tie_fraction, self.margin_bins, self.held_fraction)


class TableRecord(_Record):
    """One table of one shard."""

    spec: TableSpec
    rows_hot: int = Field(ge=0, lt=2**31)
    rows_written: int = Field(ge=0, lt=2**31, description="of the hot ones, whose weights and state are in this cut")
    rows_initial: int = Field(ge=0, lt=2**40, description="frozen at their initial value")
    rows_waiting: int = Field(ge=0, lt=2**40, description="IDs below min_count")
    segments: Annotated[list[SegmentRecord], FailFast()] = Field(max_length=MAX_SEGMENTS)
    decay_steps: int = Field(ge=0, le=MAX_STEPS, description="steps that weight_decay has sums of; 0 without decay")
    last_step_seen: int = Field(ge=0, le=MAX_STEPS)
    rate: float = Field(ge=0.0, le=MAX_INITIAL, description="of the last Push, as the update kernels take it")
    frostline: FrostlineRecord | None
    has_rare_frozen: bool
    counters: dict[str, Annotated[int, Field(ge=0, lt=2**48)]] = Field(
        max_length=64, description="of TableStats and MaskInfo; sums over all shards stay below 2^63"
    )
    hot: FileRecord
    frozen: FileRecord

    @model_validator(mode="after")
    def _check(self) -> TableRecord:
        if self.rows_written > self.rows_hot:
            raise ValueError(f"rows_written={self.rows_written} is more than rows_hot={self.rows_hot}")
        return self

    @property
    def is_whole(self) -> bool:
        """No row of it lies in a parent."""
        return self.rows_written == self.rows_hot


class ParentRecord(_Record):
    """The cut that a delta builds on, in the same folder of a job, by a file of it: where it lies is never said."""

    step: int = Field(ge=0, le=MAX_STEPS)
    epoch: int = Field(ge=0, lt=2**63)
    size_bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)


def check_lineage(parent: ParentRecord | None, sequence: int, step: int, epoch: int) -> None:
    """ValueError unless a cut of this step and epoch may be the sequence-th delta, with this parent, of a chain."""
    if (parent is None) != (sequence == 0):
        raise ValueError(f"sequence={sequence} {'without a' if parent is None else 'with a'} parent")
    if parent is not None and (parent.epoch != epoch or parent.step >= step):
        raise ValueError(
            f"its parent is of step {parent.step}, epoch {parent.epoch}; it must be of an earlier step than {step}, and"
            f" of epoch {epoch}"
        )


class ShardRecord(_Record):
    """shard.json."""

    format_version: Literal[1]
    part: int = Field(ge=0, lt=MAX_SHARDS)
    num_parts: int = Field(ge=1, le=MAX_SHARDS)
    buckets: str = Field(pattern=r"^[0-9a-f]{256}$", description="owned ones: a bit each, bucket 0 the highest of all")
    job: str = Field(min_length=1, max_length=1024)
    step: int = Field(ge=0, le=MAX_STEPS)
    epoch: int = Field(ge=0, lt=2**63)
    tables: Annotated[list[TableRecord], FailFast()] = Field(max_length=MAX_TABLES)
    parent: ParentRecord | None = Field(description="None: a full cut")
    sequence: int = Field(ge=0, le=MAX_SEQUENCE, description="deltas since the full cut of the chain")

    @model_validator(mode="after")
    def _check(self) -> ShardRecord:
        check_lineage(self.parent, self.sequence, self.step, self.epoch)
        if self.parent is None and not all(table.is_whole for table in self.tables):
            raise ValueError("it has no parent, and lacks rows")
        for table in self.tables:
            if table.decay_steps not in (0, self.step):
                raise ValueError(f"table {table.spec.name!r}: decay_steps={table.decay_steps} must be 0 or the step")
        return self

    def owned_buckets(self) -> np.ndarray:
        """bool[NUM_BUCKETS]."""
        return np.unpackbits(np.frombuffer(bytes.fromhex(self.buckets), np.uint8)).astype(np.bool_)


def bucket_text(buckets: np.ndarray) -> str:
    """ShardRecord.buckets of bool[NUM_BUCKETS]."""
    return np.packbits(buckets).tobytes().hex()


# Names --------------------------------------------------------------------------------------------------------------


def cut_folder(step: int, epoch: int) -> str:
    return f"cut-{step:012d}-{epoch}"


def part_folder(part: int, num_parts: int) -> str:
    return f"shard-{part}-of-{num_parts}"


def hot_file(table: int) -> str:
    return f"table-{table}-hot.safetensors"


def frozen_file(table: int) -> str:
    return f"table-{table}-frozen.safetensors"


def segment_object(digest: str) -> str:
    return f"{digest}.segment"


def segment_digest(header: bytes, block_crcs: np.ndarray) -> str:
    """The name of a segment by content: sha256 over its header and its block_crcs, which cover every other byte."""
    return hashlib.sha256(header + block_crcs.tobytes()).hexdigest()


# Columns ------------------------------------------------------------------------------------------------------------


def hot_columns(table: TableRecord) -> list[Column]:
    return hot_columns_of(table.spec, table.rows_hot, table.rows_written, table.decay_steps)


def hot_columns_of(spec: TableSpec, rows_hot: int, rows_written: int, decay_steps: int) -> list[Column]:
    n, m, dim, state = rows_hot, rows_written, spec.dim, num_state_columns(spec.optimizer.kind, spec.dim)
    return [
        Column("row_ids", "I64", (n,)),
        Column("weight_decay", "F64", (decay_steps + 1 if decay_steps else 0,)),
        Column("state", "F32", (m, state)),
        Column("last_steps", "I32", (n,)),
        Column("bucket_offsets", "U32", (NUM_BUCKETS + 1,)),
        Column("written_offsets", "U32", (NUM_BUCKETS + 1,)),
        Column("default_weights", "F32", (dim,)),
        Column("default_state", "F32", (state,)),
        Column("weights", "F16" if spec.policy.hot_bits == 16 else "F32", (m, dim)),
        Column("heat", "U16", (n,)),
        Column("visits", "U8", (n,)),
    ]


def frozen_columns(table: TableRecord) -> list[Column]:
    rows = [segment.num_rows for segment in table.segments]
    return frozen_columns_of(rows, table.rows_initial, table.rows_waiting)


def frozen_columns_of(segment_rows: list[int], rows_initial: int, rows_waiting: int) -> list[Column]:
    """segment_rows: the number of rows of each segment, dead ones included."""
    return [
        Column("initial_row_ids", "I64", (rows_initial,)),
        Column("waiting_row_ids", "I64", (rows_waiting,)),
        Column("waiting_counts", "U32", (rows_waiting,)),
        Column("initial_heat", "U16", (rows_initial,)),
        *(Column(f"heat.{k}", "U16", (n,)) for k, n in enumerate(segment_rows)),
    ]


# Reading and writing JSON -------------------------------------------------------------------------------------------


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """A JSON text with its CRC-32 in front. ValueError if a number is not finite."""
    rest = b'"content":' + json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"}"
    return b'{"crc32":"%08x",' % crc32(rest) + rest


def write_sealed_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Writes a whole file of sealed_json, under its name once it is on disk; OSError, and no file, if not.

    Returns its size and the CRC-32 of all of it.
    """
    data = sealed_json(content)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, memoryview(data))
            failpoint("sealed.before_sync")
            sync_fd(fd)
        finally:
            os.close(fd)
        failpoint("sealed.before_rename")
        os.rename(partial, path)
        failpoint("sealed.before_folder_sync")
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return FileRecord(size_bytes=len(data), crc32=crc32(data))


def read_sealed_json(path: Path, max_keys: int | None = None) -> dict[str, Any]:
    """The content of a file of sealed_json. SegmentCorrupt names the file and what is wrong; OSError. max_keys: as
    parse_strict has it."""
    data = read_bounded(path)
    seal = _SEAL.match(data[:_SEAL_BYTES])
    if seal is None:
        raise corrupt(path, "does not start with its CRC-32")
    if int(seal[1], 16) != crc32(data[_SEAL_BYTES:]):
        raise corrupt(path, "does not match its CRC-32")
    try:
        whole = parse_strict(data, MAX_JSON_VALUES, max_keys)
    except ValueError as error:
        raise corrupt(path, f"is no JSON ({error})") from None
    if set(whole) != {"crc32", "content"} or not isinstance(whole["content"], dict):
        raise corrupt(path, "has no content")
    return whole["content"]


def read_model(path: Path, model: type[_Model]) -> _Model:
    """read_sealed_json, checked against a model."""
    content = read_sealed_json(path, MAX_JSON_KEYS)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise corrupt(path, f"{where}: {first['msg']} ({error.error_count()} errors in all)") from None


def read_shard_record(folder: Path) -> ShardRecord:
    """shard.json of a shard's folder."""
    return read_model(folder / RECORD, ShardRecord)


def read_bounded(path: Path) -> bytes:
    """All of a file that should be JSON. SegmentCorrupt if it is too large or no plain file; OSError."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_JSON_BYTES:
            raise corrupt(path, f"has {size} bytes, more than {MAX_JSON_BYTES}")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
