"""`frostline serve` and what asks it: `frostline served`; and offline, on a snapshot, `evaluate` and `predict`.

None of them trains, or writes into a folder of snapshots.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from services.command_options import (
    ClientCertOption,
    ClientKeyOption,
    InsecureClientOption,
    InsecureServerOption,
    JsonOption,
    SettingsOption,
    TlsCaOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TlsOption,
    TlsServerNameOption,
    TokenOption,
    TokensOption,
    errors_to_exit_status,
    quiet_torch,
    wide_console,
)

if TYPE_CHECKING:
    from embedding_server.served_snapshot import ServedSnapshot
    from trainer.data.batch import Reader
    from trainer.scoring import ScoringModel

FactoryOption = Annotated[
    list[str] | None,
    typer.Option("--factory", metavar="MODULE:FUNCTION", help="A model.kind of this name may be imported."),
]
SnapshotArgument = Annotated[
    Path, typer.Argument(metavar="SNAPSHOT", help="Folder of a snapshot; or of a job: the newest complete one there.")
]
SplitArgument = Annotated[str, typer.Argument(metavar="SPLIT", help="train, validation or test of the job's data.")]


def add_to(app: typer.Typer) -> None:
    for command in (serve, served, evaluate, predict):
        paragraphs = (command.__doc__ or "").split("\n\n")
        app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


def serve(
    snapshot: Annotated[
        Path,
        typer.Argument(metavar="SNAPSHOT", help="A snapshot, or a job's folder; with --follow also snapshots.uri."),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Takes up each new snapshot of the job.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to bind. Beyond this machine it takes TLS and tokens, or --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    rows_only: Annotated[
        bool, typer.Option("--rows-only", help="Look-ups alone: loads neither torch nor the dense layers.")
    ] = False,
    factory: FactoryOption = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch for one Predict.")] = 1,
    poll_s: Annotated[
        float, typer.Option(min=0.01, help="With --follow: seconds between looks for a new snapshot.")
    ] = 0.5,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    token_file: TokensOption = None,
    insecure: InsecureServerOption = False,
) -> None:
    """Serves the rows of a snapshot, and Predict with its model, read-only, until SIGTERM. Prints one JSON line with
    its address when it serves.

    The files are mapped, so several processes on one machine share their pages; each has an index of its own, some 7
    bytes a row.
    """
    from services.security_options import SecurityOptions
    from services.serve_process import ServeOptions, run_serve

    with errors_to_exit_status(Console(stderr=True)):
        quiet_torch()
        options = ServeOptions(
            snapshot=snapshot,
            follow=follow,
            host=host,
            port=port,
            rows_only=rows_only,
            factories=tuple(factory or ()),
            threads=threads,
            poll_s=poll_s,
            security=SecurityOptions(tls_cert, tls_key, tls_client_ca, token_file, insecure),
        )
        status = run_serve(options)
    raise typer.Exit(status)


def served(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of a `frostline serve`.")],
    choose: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Goes to this snapshot and stays there; or `previous`, or `newest`."),
    ] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: ClientCertOption = None,
    tls_key: ClientKeyOption = None,
    tls_server_name: TlsServerNameOption = None,
    token_file: TokenOption = None,
    insecure: InsecureClientOption = False,
    as_json: JsonOption = False,
) -> None:
    """Shows which snapshot a server serves and how far it is behind, or has it serve another."""
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        from services.model_client import ModelClient
        from services.security_options import Credentials

        credentials = Credentials(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, insecure)
        client = ModelClient(address, 600.0 if choose is not None else 10.0, credentials=credentials)
        try:
            if choose is not None:
                client.choose("" if choose == "newest" else choose)
            answer = client.describe()
        finally:
            client.close()
    document: dict[str, Any] = {
        "snapshot": answer.version.snapshot_id,
        "job": answer.version.job,
        "epoch": answer.version.epoch,
        "step": answer.version.step,
        "predicts": not answer.no_model,
    }
    if answer.HasField("follow"):
        follow = answer.follow
        document["follow"] = {
            "newest": follow.newest_id,
            "steps_behind": follow.steps_behind,
            "seconds_behind": follow.seconds_behind,
            "is_held": follow.is_held,
            "refusal": follow.refusal,
            "swaps": follow.num_swaps,
        }
    if as_json:
        print(json.dumps(document))
        return
    for name, value in {**document, **document.pop("follow", {})}.items():
        if name != "follow":
            console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)


def evaluate(
    snapshot: SnapshotArgument,
    split: SplitArgument = "test",
    settings: SettingsOption = None,
    factory: FactoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Scores a split of the job's data with the model of a snapshot: AUC, logloss, NE.

    The job is the one in the snapshot; --set changes keys of it, such as where the data lie.
    """
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        cut, model, reader, rows = _open(snapshot, split, settings, factory)
        try:
            metrics = model.evaluate(reader)
        finally:
            rows.close()
    document = {"snapshot": cut.name, "split": split, **asdict(metrics)}
    if as_json:
        print(json.dumps(document))
    else:
        console.print(
            f"{cut.name}, {split}: AUC {metrics.auc:.6f}, logloss {metrics.logloss:.6f}, NE {metrics.ne:.6f},"
            f" {metrics.num_samples} samples",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def predict(
    snapshot: SnapshotArgument,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT.parquet", help="Written whole, or not at all.")],
    split: SplitArgument = "test",
    settings: SettingsOption = None,
    factory: FactoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes the score and label of every sample of a split, in its order, to a Parquet file.

    Columns: score float32, the probability of a label of 1, and label float32.
    """
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        cut, model, reader, rows = _open(snapshot, split, settings, factory)
        try:
            from trainer.prediction_file import write_predictions

            num_samples = write_predictions(model, reader, output)
        finally:
            rows.close()
    if as_json:
        print(json.dumps({"snapshot": cut.name, "split": split, "samples": num_samples, "output": str(output)}))
    else:
        console.print(f"{output}: {num_samples} samples scored with {cut.name}", markup=False, highlight=False)


def _open(
    snapshot: Path, split: str, settings: list[str] | None, factory: list[str] | None
) -> tuple[Path, ScoringModel, Reader, ServedSnapshot]:
    """(cut, model, reader of the split, the rows that the model reads, to be closed)."""
    from services.worker import set_environment

    set_environment()  # before torch loads
    quiet_torch()
    from embedding_server.errors import InvalidInput
    from embedding_server.served_snapshot import ServedSnapshot
    from trainer.data.registry import open_reader
    from trainer.data.spec import SPLITS
    from trainer.scoring import ScoringModel, changed_job
    from trainer.snapshot_list import find_cut

    if split not in SPLITS:
        raise InvalidInput(f"split {split!r} must be one of {', '.join(SPLITS)}")
    cut = find_cut(snapshot)
    rows = ServedSnapshot(cut)
    try:
        model = ScoringModel(cut, rows, factory or ())
        return cut, model, open_reader(changed_job(model.job, settings or []), split), rows
    except BaseException:
        rows.close()
        raise
