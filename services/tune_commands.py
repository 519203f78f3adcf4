"""`frostline estimate` and `frostline tune`: what a job will take, and which setting takes least.

Neither leaves anything behind: rows live in this process and are gone when the command ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from services.command_options import (
    NO_SETTING_STATUS,
    JobFile,
    JsonOption,
    SettingsOption,
    errors_to_exit_status,
    quiet_torch,
    size_bytes,
    wide_console,
)

if TYPE_CHECKING:
    from trainer.estimate import Estimate
    from trainer.job import Job
    from trainer.tune import TuneResult

_MAX_TABLES_SHOWN = 20

#: Below, a model in which every row trains has found next to nothing that freezing could cost.
LEARNED_AUC = 0.52


def add_to(app: typer.Typer) -> None:
    for command in (estimate, tune):
        paragraphs = (command.__doc__ or "").split("\n\n")
        app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)


def estimate(job_file: JobFile, settings: SettingsOption = None, as_json: JsonOption = False) -> None:
    """Predicts the bytes of a job by tier, at its end and peak, before anything is trained.

    Reads the IDs of all training samples once, sends them through real shards without gradients and applies the job's
    re-selections: what comes out is what the run will hold. When the tables do not fit 1 GiB, a hash-sample of the IDs
    stands for all. Every arm is predicted. To look at a part of the data: --set trainer.max_steps=N.

    Hot rows, their optimizer state, index and heat are memory; frozen rows are files, dead rows included. Where those
    will not fit the memory of this machine, a line recommends trainer.prefetch_frozen.
    """
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        job = _load(job_file, settings)
        from services.doctor import usable_memory_bytes
        from trainer.estimate import estimate_jobs

        jobs = job.arm_jobs()
        arms = estimate_jobs(jobs, lambda text: console.print(text, highlight=False))
        for arm, estimated in arms.items():
            estimated.notes.extend(disk_notes(jobs[arm], estimated, usable_memory_bytes()))
    _show_estimates(console, arms)
    if as_json:
        print(json.dumps({"job": job.name, "arms": {arm: estimate_document(e) for arm, e in arms.items()}}))


def disk_notes(job: Job, estimated: Estimate, machine_bytes: int) -> list[str]:
    """A line if frozen rows of shards on this machine, of so much memory, must be read from disk again and again."""
    is_elsewhere = job.servers.store == "remote" and job.servers.launch == "external"
    room = max(0, machine_bytes - estimated.memory_peak)
    if is_elsewhere or job.trainer.prefetch_frozen or estimated.frozen_peak <= room:
        return []
    sizes = f"frozen rows reach {_mb(estimated.frozen_peak)} MB and this machine has {_mb(room)} MB beside the hot ones"
    return [f"{sizes}: many will be read from disk; set trainer.prefetch_frozen=true, so that steps wait less for it"]


def tune(
    job_file: JobFile,
    settings: SettingsOption = None,
    max_auc_drop: Annotated[
        float, typer.Option(min=0.0, help="Points of AUC (x100) that may be lost against every row training.")
    ] = 0.05,
    budget_bytes: Annotated[
        int | None,
        typer.Option(parser=size_bytes, metavar="SIZE", help="Bound of all bytes at their peak, like 8GiB."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training samples of a run; default: a quarter of a data pass, 200,000 to 1,000,000 of them."
        ),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Runs every setting to the end, to check the search.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Finds the policy and knobs that take the fewest bytes for a loss of AUC that you accept.

    The bytes of all settings are estimated over the whole job (see `frostline estimate`). Then short runs in this
    process, over the first samples of the data, measure what each setting loses against `policy: off`, from the fewest
    bytes up until the 95% interval of a loss lies below --max-auc-drop. Each sample is scored before it is trained on,
    and the second half of a run counts, so that no test sample is touched.

    Prints the frontier of AUC against bytes, the pick, and the --set lines that use it. The job's arms are left out,
    and knobs of single tables stay as they are. If no setting surely keeps --max-auc-drop within --budget-bytes, it
    names the nearest one and ends with exit status 3.
    """
    console = wide_console(stderr=as_json)
    with errors_to_exit_status(console):
        job = _load(job_file, settings)
        from services.allocator import set_allocator
        from services.worker import set_threads
        from trainer.tune import tune as search

        set_allocator()
        set_threads(job.trainer.threads, local_workers=1)
        result = search(
            job,
            max_auc_drop=max_auc_drop,
            budget_bytes=budget_bytes,
            samples=samples,
            exhaustive=exhaustive,
            say=lambda text: console.print(text, highlight=False),
        )
    _show_tuning(console, result)
    if as_json:
        print(json.dumps({"job": job.name, **tuning_document(result)}))
    if not result.keeps_both:
        raise typer.Exit(NO_SETTING_STATUS)


def _load(job_file: Any, settings: list[str] | None) -> Job:
    from services.worker import set_environment
    from trainer.job import load_job

    set_environment()
    quiet_torch()
    return load_job(job_file, settings or [])


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """Plain data for --json."""
    return {
        "num_steps": estimate.num_steps,
        "num_samples": estimate.num_samples,
        "bytes_total": estimate.total().bytes_total,
        "bytes_peak": estimate.bytes_peak,
        "memory_peak": estimate.memory_peak,
        "frozen_peak": estimate.frozen_peak,
        "tables": {
            name: {**asdict(stats), "bytes_total": stats.bytes_total, "sampled": estimate.sampled[name]}
            for name, stats in estimate.tables.items()
        },
        "notes": estimate.notes,
    }


def tuning_document(result: TuneResult) -> dict[str, Any]:
    """Plain data for --json."""
    frontier = [point.candidate.name for point in result.frontier()]
    return {
        "max_auc_drop": result.max_auc_drop,
        "budget_bytes": result.budget_bytes,
        "num_samples": result.num_samples,
        "num_candidates": result.num_candidates,
        "pick": result.pick.candidate.name,
        "set": result.pick.candidate.set_lines(),
        "meets_drop": result.meets_drop,
        "meets_budget": result.meets_budget,
        "points": [
            {
                "name": point.candidate.name,
                "policy": point.candidate.policy,
                "set": point.candidate.set_lines(),
                "bytes_peak": point.bytes_peak,
                "bytes_total": point.estimate.total().bytes_total,
                "memory_peak": point.estimate.memory_peak,
                "auc": point.auc,
                "auc_drop": point.auc_drop,
                "auc_drop_low": point.low,
                "auc_drop_high": point.high,
                "num_samples": point.num_samples,
                "is_complete": point.is_complete,
                "is_on_frontier": point.candidate.name in frontier,
            }
            for point in result.points
        ],
    }


def _show_estimates(console: Console, arms: Mapping[str, Estimate]) -> None:
    for line in estimate_lines(arms):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def estimate_lines(arms: Mapping[str, Estimate]) -> list[str]:
    """Rows and megabytes by arm and tier, then what each arm's figures come from."""
    titles = ("arm", "rows hot", "rows frozen", "hot MB", "state MB", "index MB", "frozen MB", "total MB", "peak MB",
              "memory peak MB")  # fmt: skip
    rows = []
    for arm, estimated in arms.items():
        total = estimated.total()
        sizes = (total.bytes_hot, total.bytes_state, total.bytes_index + total.bytes_heat, total.bytes_frozen,
                 total.bytes_total, estimated.bytes_peak, estimated.memory_peak)  # fmt: skip
        rows.append([arm, f"{total.rows_hot:,}", f"{total.rows_frozen:,}", *map(_mb, sizes)])
    lines = _columns(titles, rows)
    for arm, estimated in arms.items():
        largest = sorted(estimated.tables.items(), key=lambda item: item[1].bytes_total, reverse=True)
        text = ", ".join(f"{name} {_mb(stats.bytes_total)}" for name, stats in largest[:_MAX_TABLES_SHOWN])
        read = min(estimated.sampled.values())
        sampled = "" if read == 1.0 else f"; from {read:.1%} of the IDs of the largest tables"
        size = f"{estimated.num_samples:,} samples, {estimated.num_steps:,} steps{sampled}"
        lines += [f"{arm}: {size}; MB by table: {text}", *(f"{arm}: {note}" for note in estimated.notes)]
    return lines


def _show_tuning(console: Console, result: TuneResult) -> None:
    for line in [*frontier_lines(result), *pick_lines(result)]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def frontier_lines(result: TuneResult) -> list[str]:
    """Every setting that was measured, the fewest bytes first."""
    frontier, rows = result.frontier(), []
    for point in result.points:
        marks = ["frontier"] if point in frontier else []
        marks += [_pick_word(result).upper()] if point is result.pick else []
        marks += [] if point.is_complete else [f"stopped after {point.num_samples:,} samples"]
        drop = f"{point.auc_drop:+.3f} [{point.low:+.3f}, {point.high:+.3f}]"
        rows.append([point.candidate.name, _mb(point.bytes_peak), f"{point.auc:.4f}", drop, ", ".join(marks)])
    return _columns(("setting", "peak MB", "AUC", "drop x100 [95%]", ""), rows)


def pick_lines(result: TuneResult) -> list[str]:
    """What the pick is, how sure it is, and how to use it."""
    pick, full = result.pick, next(point for point in result.points if point.candidate.policy == "off")
    saved = 1.0 - pick.bytes_peak / full.bytes_peak if full.bytes_peak else 0.0
    size = f"{pick.bytes_peak / 1e6:,.1f} MB at the peak, {saved:.0%} less than with every row training"
    lines = [f"{_pick_word(result)}: {pick.candidate.name}; {size}; AUC drop {pick.auc_drop:+.3f} points"]
    if full.auc < LEARNED_AUC:
        lines.append(
            f"the model has hardly learned in {full.num_samples} samples (AUC {full.auc:.4f} with every row training; "
            "chance is 0.5), so its drops say little; give more --samples, or look at the job's learning rates"
        )
    if not result.meets_budget:
        lines.append(f"no setting fits --budget-bytes={result.budget_bytes}; raise it, or lower embedding.dim")
    if not result.meets_drop:
        surely = "it may lose" if pick.auc_drop <= result.max_auc_drop else "it loses"
        lines.append(f"{surely} more than --max-auc-drop={result.max_auc_drop}; no setting in the budget loses less")
    for point in result.may_do()[:1]:
        lines.append(
            f"{point.candidate.name} takes {point.bytes_peak / 1e6:,.1f} MB and may do too: its drop is "
            f"{point.auc_drop:+.3f} [{point.low:+.3f}, {point.high:+.3f}]; more --samples would tell"
        )
    settings = pick.candidate.set_lines()
    use = "use it" if result.keeps_both else "use it all the same"
    lines.append(f"{use}: " + (" ".join(f"--set {line}" for line in settings) if settings else "the job as it is"))
    return lines


def _pick_word(result: TuneResult) -> str:
    """The pick keeps what was asked for; where none does, it is the one that comes nearest (TuneResult.pick)."""
    return "pick" if result.keeps_both else "nearest"


def _columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose columns stand below each other: the first and the last to the left, figures to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    last = len(titles) - 1
    return [
        "  ".join(
            cell.ljust(width) if number in (0, last) and not _is_figure(cell) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *rows)
    ]


def _is_figure(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
