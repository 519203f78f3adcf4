"""`frostline ckpt`: snapshots on disk, offline: listed, verified, tidied up, compacted, exported, imported.

No shard runs for any of them, and all but gc, compact and import leave the snapshots as they are. Exit status:
command_options.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.command_options import JsonOption, errors_to_exit_status, wide_console

if TYPE_CHECKING:
    from embedding_server.snapshot_erasure import Erased
    from trainer.snapshot_gc import Removal
    from trainer.snapshot_list import JobFigures

app = typer.Typer(
    no_args_is_help=True, help="Snapshots on disk: lists, verifies, tidies up, compacts, exports, imports."
)


class Format(StrEnum):
    safetensors = "safetensors"
    parquet = "parquet"
    torchrec = "torchrec"


class Optimizer(StrEnum):
    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"
    adam = "adam"
    ftrl = "ftrl"


@contextmanager
def _errors_to_exit_status(console: Console, place: Path) -> Iterator[None]:
    """As errors_to_exit_status; and what the file system refuses (a full disk, no permission) is no bug of ours.
    place: what the command reads or writes, for errors of the file system that name no file."""
    from embedding_server.errors import FrostlineError

    with errors_to_exit_status(console):
        try:
            yield
        except OSError as error:
            raise FrostlineError(_text_of(error, place)) from error


def _text_of(error: Exception, place: Path) -> str:
    return f"{place}: {error}" if isinstance(error, OSError) and error.filename is None else str(error)


Uri = Annotated[Path, typer.Argument(metavar="URI", help="snapshots.uri of jobs, or the folder of one job in it.")]
SnapshotArgument = Annotated[
    Path, typer.Argument(metavar="SNAPSHOT", help="Folder of a snapshot; or of a job: the newest complete one there.")
]


@app.command("ls")
def list_(uri: Uri, as_json: JsonOption = False) -> None:
    """Lists jobs and their snapshots: step, epoch, rows, bytes, and whether they are complete."""
    with _errors_to_exit_status(Console(stderr=True), uri):
        from trainer.snapshot_list import list_jobs

        jobs = list_jobs(uri)
    if as_json:
        print(json.dumps([asdict(job) for job in jobs]))
        return
    console = wide_console()
    if not jobs:
        _say(console, f"{uri}: no snapshots")
    for job in jobs:
        _print_job(console, job)


def _print_job(console: Console, job: JobFigures) -> None:
    name = "snapshots of an unknown job" if job.job is None else f"job {job.job!r}, arm {job.arm!r}"
    _say(console, f"{name}: {job.path}")
    table = Table(
        "snapshot", "status", "step", "epoch", "hot rows", "frozen rows", "bytes", "+ segments", "created", "delta of"
    )
    for column in table.columns[2:8]:
        column.justify = "right"
    for snapshot in job.snapshots:
        is_whole = snapshot.status == "complete"
        figures = [snapshot.rows_hot, snapshot.rows_frozen] if is_whole else ["", ""]
        table.add_row(
            Path(snapshot.path).name, snapshot.status, str(snapshot.step), str(snapshot.epoch), *map(str, figures),
            str(snapshot.bytes), str(snapshot.segment_bytes) if is_whole else "", snapshot.created or "",
            snapshot.parent or "",
        )  # fmt: skip
    console.print(table)
    console.print(f"segments of all of them, each once: {job.object_bytes} bytes", highlight=False)
    for snapshot in job.snapshots:
        if snapshot.what:
            _say(console, f"damaged: {snapshot.what}")


@app.command()
def verify(snapshot: SnapshotArgument, as_json: JsonOption = False) -> None:
    """Reads every byte of a snapshot and checks it. Exit status 0: it is sound; 1: damaged; 2: there is none."""
    console = Console(stderr=as_json)
    with _errors_to_exit_status(console, snapshot):
        from trainer.snapshot_list import find_cut
        from trainer.snapshot_list import verify as check
        from trainer.snapshot_lock import in_use

        cut = find_cut(snapshot)
        with in_use(cut.parent):
            findings = check(cut)
    if as_json:
        print(json.dumps({"path": str(cut), "is_sound": not findings.messages, **asdict(findings)}))
    for message in findings.messages:
        _say(console, f"damaged: {message}")
    verdict = f"{len(findings.messages)} findings" if findings.messages else "sound"
    _say(
        console,
        f"{cut}: {verdict}; {findings.rows_hot} hot and {findings.rows_frozen} frozen rows, {findings.bytes_read} bytes"
        " read",
    )
    raise typer.Exit(1 if findings.messages else 0)


@app.command()
def gc(
    uri: Uri,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Complete snapshots of each job that stay.")],
    min_age_s: Annotated[
        float,
        typer.Option(min=0.0, help="What has no manifest stays if something in it was written more lately than that."),
    ] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Says what would go, and removes nothing.")] = False,
    erase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE:FILE",
            help="Also erases these row_ids, one a line or an int64 .npy file, from every snapshot that stays; repeated"
            " for other tables.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Removes old snapshots, what unfinished ones left, and segment files that no snapshot names. What one that stays
    is a delta of stays too.

    Whatever may be being written stays: jobs whose folder a training or another command uses are left alone, and so are
    snapshots without a manifest that were written to lately. Exit status 1 if a job was left alone, or if with --erase
    a snapshot stays that may still hold some of the rows.
    """
    console = Console(stderr=as_json)
    with _errors_to_exit_status(console, uri):
        from trainer.row_id_files import read_erasures
        from trainer.snapshot_erase import check_erased_tables
        from trainer.snapshot_list import job_folders

        erased, folders = read_erasures(erase or []), job_folders(uri)
        check_erased_tables(uri, folders, erased)
    outcomes = [_collect(folder, keep, min_age_s, erased, dry_run=dry_run) for folder in folders]
    removals = [outcome for outcome in outcomes if not isinstance(outcome, _Failure)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
    if not folders:
        _say(console, f"{uri}: no snapshots")
    for removal in removals:
        _print_removal(console, removal, dry_run=dry_run)
    if erase and removals and not any(removal.rewritten or removal.unerased for removal in removals):
        _say(console, "no snapshot that stays there holds any of the rows")
    for failure in failures:
        _say(console, f"{'left alone' if failure.is_untouched else 'failed'}: {failure.text}")
    if as_json:
        texts = {kind: [f.text for f in failures if f.is_untouched == kind] for kind in (True, False)}
        result = {"jobs": [asdict(removal) for removal in removals], "left_alone": texts[True], "failed": texts[False]}
        print(json.dumps(result))
    raise typer.Exit(1 if failures or any(removal.unerased for removal in removals) else 0)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of one job's folder; the others are looked after all the same."""

    text: str
    is_untouched: bool


def _collect(folder: Path, keep: int, min_age_s: float, erased: Erased, *, dry_run: bool) -> Removal | _Failure:
    from embedding_server.errors import FrostlineError, InvalidInput
    from trainer.snapshot_erase import collect_and_erase
    from trainer.snapshot_gc import collect

    try:
        if erased:
            return collect_and_erase(folder, keep, min_age_s, erased, dry_run=dry_run)
        return collect(folder, keep, min_age_s, dry_run=dry_run)
    except (FrostlineError, OSError) as error:
        return _Failure(_text_of(error, folder), isinstance(error, InvalidInput))


def _print_removal(console: Console, removal: Removal, *, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    _say(
        console,
        f"{removal.path}: {verb} {', '.join(removal.removed) or 'no snapshot'}, {removal.objects} segment files,"
        f" {removal.bytes} bytes; snapshots that stay: {len(removal.kept)}",
    )
    if removal.rewritten:
        verb = "would be written" if dry_run else "written"
        _say(console, f"{verb} anew without the erased rows: {', '.join(removal.rewritten)}")
    for text in removal.unerased:
        _say(console, f"may still hold erased rows: {text}")
    for note in removal.notes:
        _say(console, f"note: {note}")


@app.command()
def compact(snapshot: SnapshotArgument, as_json: JsonOption = False) -> None:
    """Writes a delta and what it builds on as one full snapshot beside it, from which `--resume` then goes on.

    It must be the newest of its job. The others stay; `ckpt gc` removes them.
    """
    console = Console(stderr=as_json)
    with _errors_to_exit_status(console, snapshot):
        from trainer.snapshot_compact import compact as write
        from trainer.snapshot_list import find_cut

        compacted = write(find_cut(snapshot))
    _say(
        console,
        f"{compacted.path}: {compacted.rows_hot} hot rows of {len(compacted.chain)} snapshots"
        f" ({', '.join(compacted.chain)}), {compacted.bytes} bytes",
    )
    if as_json:
        print(json.dumps(asdict(compacted)))


@app.command("export")
def export_(
    snapshot: SnapshotArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; there must be none of that name.")],
    table: Annotated[list[str], typer.Option("--table", metavar="T", help="Table; torchrec: may be repeated.")],
    format_: Annotated[Format, typer.Option("--format", help="How the file is to be written.")],
    num_embeddings: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=2**48,
            metavar="N",
            help="torchrec: rows of each table, ids 0 to N-1; one number, or one a table.",
        ),
    ] = None,
    drop_outside: Annotated[
        bool, typer.Option("--drop-outside", help="torchrec: leaves out rows whose row_id is not in 0 to N-1.")
    ] = False,
    with_state: Annotated[bool, typer.Option("--state", help="With the optimizer's state of each row.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Writes a table of a snapshot as one file, rows as look-ups give them."""
    console = Console(stderr=as_json)
    with _errors_to_exit_status(console, out):
        from trainer.export import export_table, export_torchrec
        from trainer.snapshot_list import find_cut, open_snapshot
        from trainer.snapshot_lock import in_use

        cut = find_cut(snapshot)
        with in_use(cut.parent):
            _, parts = open_snapshot(cut)
            if format_ is Format.torchrec:
                sizes = _sizes_of(table, num_embeddings or [])
                exported = export_torchrec(parts, sizes, out, with_state=with_state, drop_outside=drop_outside)
            else:
                _refuse(len(table) > 1, f"--format {format_.value} has one --table; export each to a file of its own")
                _refuse(
                    bool(num_embeddings) or drop_outside, "--num-embeddings and --drop-outside are of torchrec alone"
                )
                is_parquet = format_ is Format.parquet
                exported = export_table(parts, table[0], out, is_parquet=is_parquet, with_state=with_state)
    for name, rows in exported.rows.items():
        text = f"table {name!r}: {rows} rows"
        if format_ is Format.torchrec:
            text += f", {exported.initial[name]} ids at their initial value, {exported.dropped[name]} row_ids left out"
        _say(console, f"{text}; {exported.path}, {exported.bytes} bytes")
    if as_json:
        print(json.dumps(asdict(exported)))


def _sizes_of(tables: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    _refuse(not sizes, "--format torchrec needs --num-embeddings N, the rows of the TorchRec table")
    every = list(sizes) * len(tables) if len(sizes) == 1 else list(sizes)
    _refuse(
        len(every) != len(tables), f"{len(tables)} --table and {len(sizes)} --num-embeddings; give one, or one a table"
    )
    _refuse(len(set(tables)) != len(tables), "a --table is named twice")
    return dict(zip(tables, every, strict=True))


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files to read, all of one format.")],
    format_: Annotated[Format, typer.Option("--format", help="How the files are written.")],
    snapshot_uri: Annotated[Path, typer.Option(help="snapshots.uri of the job that will train on.")],
    job: Annotated[str, typer.Option(help="Name of the job that will train on.")],
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="T", help="Table of each file, in order; torchrec: which ones, default all."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="Columns that every table must have; default: whatever it has.")
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose state the rows have, or begin with.")] = (
        Optimizer.rowwise_adagrad
    ),
    initial_accumulator: Annotated[
        float, typer.Option(min=0.0, max=1e30, help="Of rows without state: adagrad, rowwise_adagrad, ftrl.")
    ] = 0.1,
    arm: Annotated[str, typer.Option(help="Arm of the job, if it has arms.")] = "main",
    as_json: JsonOption = False,
) -> None:
    """Makes a job's first snapshot from tables of other programs; `frostline train JOB.yaml --resume` begins with it.

    Everything is checked before anything is written.
    """
    console = Console(stderr=as_json)
    with _errors_to_exit_status(console, snapshot_uri):
        from embedding_server.spec import OptimizerSpec
        from trainer.import_tables import ImportRequest, import_tables

        request = ImportRequest(
            files=files,
            kind=format_.value,
            tables=table or [],
            dim=dim,
            optimizer=OptimizerSpec(kind=optimizer.value, initial_accumulator=initial_accumulator),
            uri=snapshot_uri,
            job=job,
            arm=arm,
        )
        imported = import_tables(request)
    for name, rows in imported.rows.items():
        state = "its optimizer state" if imported.has_state[name] else "new optimizer state"
        _say(console, f"table {name!r}: {rows} rows with {state}")
    _say(console, f"{imported.path}, {imported.bytes} bytes")
    _say(
        console,
        f"`frostline train JOB.yaml --resume` begins with it, in a job with name: {job} and"
        f" snapshots: {{uri: {snapshot_uri}}}" + ("" if arm == "main" else f", in arm {arm}"),
    )
    if as_json:
        print(json.dumps(asdict(imported)))


def _refuse(is_wrong: bool, message: str) -> None:
    from embedding_server.errors import InvalidInput

    if is_wrong:
        raise InvalidInput(message)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
