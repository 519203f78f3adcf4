"""Tables from elsewhere as the first snapshot of a job: `frostline ckpt import`; `train --resume` begins with it.

Everything is read and checked before anything is written; the manifest comes last, and what was written goes if it does
not come so far.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from embedding_server.errors import InvalidInput
from embedding_server.snapshot_build import NewTable, write_part
from embedding_server.spec import OptimizerSpec, TableSpec
from trainer.interchange import FileFormat, TableFile, check_table, open_tables
from trainer.job import NAME
from trainer.snapshot_list import size_of_tree
from trainer.snapshot_lock import LOCK_FILE, alone_in
from trainer.snapshots import (
    CutName,
    Manifest,
    cuts_in,
    frostline_version,
    is_complete,
    job_folder,
    now_text,
    remove_cut,
    shard_entries,
    write_manifest,
)

_EPOCH = 1


@dataclass(frozen=True, slots=True)
class Imported:
    path: str
    rows: dict[str, int]
    has_state: dict[str, bool]  # False: rows begin with the initial accumulator
    bytes: int


@dataclass(frozen=True, slots=True)
class ImportRequest:
    files: Sequence[Path]
    kind: FileFormat
    tables: Sequence[str]
    dim: int | None  # that every table must have; None: whatever it has
    optimizer: OptimizerSpec
    uri: Path
    job: str
    arm: str = "main"
    specs: Mapping[str, TableSpec] = field(default_factory=dict)  # of tables for which dim and optimizer are not those

    def dim_of(self, table: str) -> int | None:
        return self.specs[table].dim if table in self.specs else self.dim

    def optimizer_of(self, table: str) -> OptimizerSpec:
        return self.specs[table].optimizer if table in self.specs else self.optimizer

    def kind_of(self, table: str) -> str:
        return self.optimizer_of(table).kind


def import_tables(request: ImportRequest) -> Imported:
    """InvalidInput, naming file and rule, with nothing written; OSError, with nothing left behind."""
    for option, name in (("--job", request.job), ("--arm", request.arm)):
        if not re.fullmatch(NAME, name):
            raise InvalidInput(
                f"{option} {name[:120]!a}: no job can be called so; begin with a letter or a digit, then letters,"
                " digits, '.', '_' and '-', 100 in all at most"
            )
    with open_tables(
        request.files, request.kind, request.tables, lambda table: request.optimizer_of(table).kind
    ) as found:
        tables = [_new_table(table, request) for table in found]
        with _empty_job(job_folder(request.uri, request.job, request.arm)) as folder:
            cut = folder / CutName(_EPOCH, 0).folder
            try:
                write_part(cut, request.job, _EPOCH, tables)
                write_manifest(cut, _manifest(cut, request))
            except BaseException:
                remove_cut(cut)
                raise
            rows = {table.spec.name: table.row_ids.shape[0] for table in tables}
            has_state = {table.table: table.num_state_columns is not None for table in found}
            return Imported(str(cut), rows, has_state, size_of_tree(cut))


def _new_table(table: TableFile, request: ImportRequest) -> NewTable:
    wanted = request.dim_of(table.table)
    if wanted not in (None, table.dim):
        raise InvalidInput(f"{table.where}: table {table.table!r} has dim {table.dim}, and must have {wanted}")
    try:
        spec = TableSpec(name=table.table, dim=table.dim, optimizer=request.optimizer_of(table.table))
    except ValidationError as error:
        what = error.errors(include_url=False)[0]
        field = "".join(f"{name}: " for name in what["loc"])
        raise InvalidInput(f"{table.where}: table {table.table!r:.300}: {field}{what['msg']}") from None
    return NewTable(spec, check_table(table, spec), table)


@contextlib.contextmanager
def _empty_job(folder: Path) -> Iterator[Path]:
    """The folder of a job without snapshots, made if need be; it goes again if nothing came of it."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror}; name a --snapshot-uri that this machine can write") from None
    try:
        with alone_in(folder):
            own = folder / CutName(_EPOCH, 0).folder
            if not is_complete(own):
                remove_cut(own)  # of an import that was killed: no training takes a cut at step 0
            if cuts_in(folder):
                raise InvalidInput(
                    f"{folder} has snapshots of this job already, or what is left of some, and `train --resume` would"
                    " go on from one or the other; name another --job, or remove that folder"
                )
            yield folder
    except BaseException:
        if is_new and {path.name for path in folder.iterdir()} <= {LOCK_FILE}:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _manifest(cut: Path, request: ImportRequest) -> Manifest:
    return Manifest(
        frostline_version=frostline_version(),
        created=now_text(),
        job=request.job,
        arm=request.arm,
        run=None,
        step=0,
        run_step=0,
        epoch=_EPOCH,
        num_workers=1,
        mode="pipelined",
        shards=shard_entries(cut, 1),
        dense=[],
        reader=None,
        resolved_job=None,
    )
