"""`frostline`: the one command. Each subcommand imports what it needs, so that a shard loads neither torch nor ray.

Exit status: command_options.py. Results for machines go to standard output with --json; what people read goes to
standard error then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from services import ckpt_commands, lookup_commands, serve_commands, tune_commands
from services.command_options import (
    InsecureServerOption,
    JobFile,
    JsonOption,
    SettingsOption,
    TlsCertOption,
    TlsClientCaOption,
    TlsKeyOption,
    TokensOption,
    errors_to_exit_status,
    quiet_torch,
    size_bytes,
    wide_console,
)

if TYPE_CHECKING:
    from services.security_options import SecurityOptions
    from services.train_job import SummaryNotWritten
    from trainer.job import Job

app = typer.Typer(
    name="frostline",
    help="Trains recommendation models over sharded embedding servers that freeze the long tail.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"frostline {version('frostline')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """Trains recommendation models over sharded embedding servers that freeze the long tail."""


@app.command()
def train(
    job_file: JobFile,
    settings: SettingsOption = None,
    arms: Annotated[
        list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm of the job; may be repeated.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Goes on behind the newest snapshot of each arm (section `snapshots`).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Trains every arm of a job and compares them."""
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        from services.external_shards import with_environment
        from services.worker import set_environment
        from trainer.job import load_job, with_arms

        set_environment()
        quiet_torch()
        job = with_environment(with_arms(load_job(job_file, settings or []), arms or []), os.environ)
        document, unwritten = _train(job, console, resume)
        if as_json:
            print(json.dumps(document))
        if unwritten is not None:
            raise unwritten


def _train(job: Job, console: Console, resume: bool) -> tuple[dict[str, Any], SummaryNotWritten | None]:
    """(what --json prints, the error to end with after everything was printed)."""
    from dataclasses import asdict

    from services.train_job import SummaryNotWritten, bias_only, run_job
    from trainer.report import (
        ProgressShow,
        bias_only_line,
        claim_lines,
        event_lines,
        final_table,
        restart_lines,
        resume_lines,
    )

    folder = job.trainer.output_dir / job.name
    console.print(f"job {job.name!r}: arms {', '.join(job.arm_jobs())}; results in {folder}", highlight=False)
    with ProgressShow(console, job.trainer.log_every_s) as show:
        unwritten = None
        try:
            arms = run_job(job, show.update, show.say, resume)
        except SummaryNotWritten as error:
            arms, unwritten = error.arms, error
        show.say("fitting the bias-only logistic regression")
        bias = bias_only(job)
    console.print(final_table(arms))
    last_lines = [
        *event_lines(arms),
        *resume_lines(arms),
        *restart_lines(arms),
        *([bias_only_line(bias)] if bias else []),
        *claim_lines(arms),
    ]
    last_lines += _where(folder, has_summary=unwritten is None)
    for line in last_lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    document = {
        "job": job.name,
        "summary": str(folder / "summary.json") if unwritten is None else None,
        "arms": {arm: asdict(summary) for arm, summary in arms.items()},
        "bias_only": asdict(bias) if bias else None,
    }
    return document, unwritten


def _where(folder: Path, has_summary: bool) -> list[str]:
    summary = [f"summary: {folder / 'summary.json'}"] if has_summary else []
    return [*summary, f"rows, moves and heat by table: frostline inspect {folder}"]


@app.command()
def inspect(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or of one arm, or a run's name in runs/.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Shows what is hot and what is frozen in a run, by table, and what that saves and costs; also while it trains."""
    from trainer.inspection import describe, read_run

    with errors_to_exit_status(Console(stderr=True)):
        documents = read_run(run)
    if as_json:
        print(json.dumps(documents))
        return
    console = wide_console()
    for part in describe(documents):
        console.print(part)


@app.command()
def shard(
    host: Annotated[
        str, typer.Option(help="Address to bind; other than loopback it needs TLS and tokens, or --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    shard_index: Annotated[int, typer.Option(min=0, help="Which shard this is, from 0.")] = 0,
    num_shards: Annotated[int, typer.Option(min=1, help="Shards of the store.")] = 1,
    buckets: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Buckets to own; default: an even share by --shard-index.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of segments; default: a temporary one.")] = None,
    snapshot_root: Annotated[
        Path | None,
        typer.Option(
            help="Folder within which clients may have snapshots written and read; default: any on this machine while"
            " --host is loopback, else none."
        ),
    ] = None,
    memory_limit_bytes: Annotated[
        int,
        typer.Option(parser=size_bytes, metavar="SIZE", help="Bound of this shard's memory; bytes, or like 4GiB."),
    ] = 8 << 30,
    backend: Annotated[str, typer.Option(help="Row kernels: auto, cpu, reference or fbgemm.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads of libraries; the rows have one of their own.")] = 1,
    scores: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="A module to import first, which registers scores for `select: score`."),
    ] = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    token_file: TokensOption = None,
    insecure: InsecureServerOption = False,
    fanout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serves look-ups of the shards at these addresses, for clients that do not route, without rows of its"
            " own: only --host, --port, --threads and those of TLS and tokens count then. Repeated: all shards, and"
            " replicas of them. Its own credentials: FROSTLINE_TLS_CA, _TLS_CERT, _TLS_KEY, FROSTLINE_TOKEN_FILE.",
        ),
    ] = None,
) -> None:
    """Serves one shard, or with --fanout a gateway, until SIGTERM. Prints one JSON line with its address then."""
    from services.security_options import SecurityOptions

    with errors_to_exit_status(Console(stderr=True)):
        security = SecurityOptions(tls_cert, tls_key, tls_client_ca, token_file, insecure)
    if fanout:
        _gateway(tuple(fanout), host, port, threads, security)
    from services.shard_process import ShardOptions, parse_buckets, run_shard

    with errors_to_exit_status(Console(stderr=True)):
        options = ShardOptions(
            host=host,
            port=port,
            shard_index=shard_index,
            num_shards=num_shards,
            buckets=parse_buckets(buckets) if buckets else None,
            data_dir=data_dir,
            snapshot_root=snapshot_root,
            memory_limit_bytes=memory_limit_bytes,
            backend=backend,
            threads=threads,
            scores=tuple(scores or ()),
            security=security,
        )
        status = run_shard(options)
    raise typer.Exit(status)


def _gateway(addresses: tuple[str, ...], host: str, port: int, threads: int, security: SecurityOptions) -> None:
    from services.gateway_process import GatewayOptions, run_gateway
    from services.security_options import Credentials

    with errors_to_exit_status(Console(stderr=True)):
        credentials = Credentials.from_environment(os.environ)
        status = run_gateway(GatewayOptions(addresses, host, port, threads, security=security, credentials=credentials))
    raise typer.Exit(status)


lookup_commands.add_to(app)
tune_commands.add_to(app)
serve_commands.add_to(app)
app.add_typer(ckpt_commands.app, name="ckpt")


@app.command()
def schema() -> None:
    """Prints the JSON Schema of a job file."""
    from trainer.job import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Examines machine and environment, and says how to mend what is wrong."""
    from services.doctor import as_document, examine, is_healthy

    checks = examine()
    if as_json:
        print(json.dumps(as_document(checks), indent=2))
    else:
        console = Console()
        for check in checks:
            color = {"ok": "green", "warn": "yellow", "fail": "red"}[check.verdict]
            console.print(f"[{color}]{check.verdict:<4}[/{color}] [bold]{check.name}[/bold]: ", end="")
            console.print(check.found, markup=False, highlight=False, soft_wrap=True)
            if check.remedy:
                console.print(f"     -> {check.remedy}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if is_healthy(checks) else 1)


if __name__ == "__main__":
    app()
