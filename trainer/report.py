"""What a training run shows and leaves behind: progress, the final table, summary.json.

    Progress      one report of a running arm, sent from worker 0 to whoever shows it
    ArmSummary    the figures of a finished arm; its fields are the keys of summary.json
    ProgressShow  a bar on a terminal, one plain line every few seconds without one

Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from embedding_server.store import TableStats, WireStats

if TYPE_CHECKING:
    from trainer.metrics import Metrics

#: of the classic recipe "train only the most frequent 40% of rows", printed beside arm `topk`
PUBLISHED_CLAIM = "published for the top-40% recipe: memory -58%, speed 1.88x, AUC -0.6%"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a running arm stands. loss, ne and auc are those of the last few thousand training samples, each scored
    before it was trained on; nan before there are enough of them. An event has a note, and its figures are nan. epoch:
    of the job, which tells the reports of a run that began anew from those before."""

    arm: str
    step: int
    total_steps: int | None
    samples_per_s: float
    loss: float
    ne: float
    auc: float
    note: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm of summary.json. Bytes are of all shards; bytes_pulled, bytes_pushed and rows_pushed of all workers.

    snapshots counts the cuts that are complete. resumed_from is the folder of the one that the run went on from, behind
    resumed_step: rates, traffic and counts of cuts are then those of the steps since. None if it began with step 1.
    restarts: how often it lost a process and went back to a cut (failures.py), the last of which is resumed_from.

    bytes_peak is the highest bytes_total of the run, rows_push_saved and bytes_push_saved the gradient rows, and their
    bytes, that were not sent because their rows are frozen. mask_info: what `frostline inspect` shows (mask_report.py).

    samples_per_s counts the training alone; wall_s the training and the evaluations, without starting processes.
    Test metrics are None when the data has no test samples.
    """

    test_auc: float | None
    test_logloss: float | None
    test_ne: float | None
    bytes_total: int
    bytes_hot: int
    bytes_state: int
    bytes_frozen: int
    bytes_index: int
    bytes_heat: int
    rows_hot: int
    rows_frozen: int
    rows_probation: int
    bytes_pulled: int
    bytes_pushed: int
    rows_pushed: int
    samples_per_s: float
    wall_s: float
    bytes_peak: int = 0
    rows_push_saved: int = 0
    bytes_push_saved: int = 0
    mask_info: dict[str, Any] = field(default_factory=dict)
    steps: int = 0  # from the first, whenever that was
    snapshots: int = 0
    snapshots_delta: int = 0  # of these, the ones that hold what changed since the one before
    snapshots_failed: int = 0
    snapshots_skipped: int = 0  # the cut before was still being written
    snapshot_pause_s_max: float = 0.0  # longest that training stood still for a cut
    snapshot_bytes: int = 0  # newly written by the last one that is complete
    snapshot_s: float = 0.0  # from its barrier to its manifest, beside the training
    snapshot_last_error: str | None = None  # of the last one that failed, with its step
    resumed_from: str | None = None
    resumed_step: int = 0
    restarts: int = 0


def summarise_arm(
    rows: TableStats,
    wire: WireStats,
    test: Metrics | None,
    num_samples: int,
    train_s: float,
    wall_s: float,
    mask: Mapping[str, Any] | None = None,
) -> ArmSummary:
    """`test`: of the test split; None if there is none. `mask`: the last mask document, on worker 0."""
    traffic = mask["total"]["traffic"] if mask else {}
    return ArmSummary(
        test_auc=_finite(test.auc) if test else None,
        test_logloss=_finite(test.logloss) if test else None,
        test_ne=_finite(test.ne) if test else None,
        bytes_total=rows.bytes_total,
        bytes_hot=rows.bytes_hot,
        bytes_state=rows.bytes_state,
        bytes_frozen=rows.bytes_frozen,
        bytes_index=rows.bytes_index,
        bytes_heat=rows.bytes_heat,
        rows_hot=rows.rows_hot,
        rows_frozen=rows.rows_frozen,
        rows_probation=rows.rows_probation,
        bytes_pulled=wire.bytes_pulled,
        bytes_pushed=wire.bytes_pushed,
        rows_pushed=wire.rows_pushed,
        samples_per_s=round(num_samples / train_s, 1) if train_s > 0 else 0.0,
        wall_s=round(wall_s, 3),
        bytes_peak=max(rows.bytes_peak, rows.bytes_total),
        rows_push_saved=traffic.get("gradient_rows_saved", 0),
        bytes_push_saved=traffic.get("bytes_push_saved", 0),
        mask_info=dict(mask or {}),
    )


def write_json(path: Path, document: Any) -> None:
    """Writes by temporary name and rename, so that a reader never sees half a file. nan is refused: it is not JSON.

    An OSError leaves what was there before, and no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_summary(path: Path, arms: Mapping[str, ArmSummary]) -> None:
    write_json(path, {arm: asdict(summary) for arm, summary in arms.items()})


class ProgressShow:
    """Shows Progress reports: a rich bar on a terminal, else a line at most every `log_every_s` seconds.

    Thread safety: one thread at a time. Use as a context manager; `update` outside of it prints lines.
    """

    def __init__(self, console: Console, log_every_s: float) -> None:
        self._console = console
        self._log_every_s = log_every_s
        self._last_line_s = -math.inf
        self._last_shown: Progress | None = None
        self._bar: RichProgress | None = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> ProgressShow:
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        (self._bar.console if self._bar else self._console).print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        if progress.note:
            self.say(f"{progress.arm}: step {progress.step}: {progress.note}")
            return
        if self._bar is not None:
            self._update_bar(self._bar, progress)
            return
        now = time.monotonic()
        is_last = progress.step == progress.total_steps
        if progress != self._last_shown and (is_last or now - self._last_line_s >= self._log_every_s):
            self._last_line_s, self._last_shown = now, progress
            of = f"/{progress.total_steps}" if progress.total_steps else ""
            self.say(f"{progress.arm}: step {progress.step}{of}, {figures(progress)}")

    def _update_bar(self, bar: RichProgress, progress: Progress) -> None:
        task = self._tasks.get(progress.arm)
        if task is None:
            task = self._tasks[progress.arm] = bar.add_task(progress.arm, total=progress.total_steps, figures="")
        bar.update(task, completed=progress.step, total=progress.total_steps, figures=figures(progress))


def figures(progress: Progress) -> str:
    return (
        f"{progress.samples_per_s:,.0f} samples/s, loss {progress.loss:.4f}, NE {progress.ne:.4f}, "
        f"AUC {progress.auc:.4f}"
    )


def final_table(arms: Mapping[str, ArmSummary]) -> Table:
    """One column per arm, and from the second arm on what it is against the first."""
    table = Table(title="test metrics, resident embedding bytes, rows and traffic", title_justify="left")
    table.add_column("")
    first = next(iter(arms.values()))
    for arm in arms:
        table.add_column(arm, justify="right")
    for label, name, kind in _LINES:
        cells = [
            _cell(getattr(summary, name), getattr(first, name), kind, summary is first) for summary in arms.values()
        ]
        table.add_row(label, *cells, end_section=name in _SECTION_ENDS)
    return table


_LINES = (
    ("test AUC", "test_auc", "metric"),
    ("test logloss", "test_logloss", "metric"),
    ("test NE", "test_ne", "metric"),
    ("bytes, peak", "bytes_peak", "bytes"),
    ("bytes, end", "bytes_total", "bytes"),
    ("  hot weights", "bytes_hot", "bytes"),
    ("  optimizer state", "bytes_state", "bytes"),
    ("  frozen", "bytes_frozen", "bytes"),
    ("  index", "bytes_index", "bytes"),
    ("  heat", "bytes_heat", "bytes"),
    ("rows hot", "rows_hot", "count"),
    ("  of them in probation", "rows_probation", "count"),
    ("rows frozen", "rows_frozen", "count"),
    ("bytes pulled", "bytes_pulled", "bytes"),
    ("bytes pushed", "bytes_pushed", "bytes"),
    ("gradient rows sent", "rows_pushed", "count"),
    ("  not sent (frozen)", "rows_push_saved", "count"),
    ("samples/s", "samples_per_s", "count"),
    ("seconds", "wall_s", "seconds"),
)
_SECTION_ENDS = ("test_ne", "bytes_heat", "rows_frozen", "rows_push_saved")


def claim_lines(arms: Mapping[str, ArmSummary], name: str = "topk") -> list[str]:
    """Our figures for the top-k recipe beside the published ones; empty without another arm to compare with."""
    if name not in arms or next(iter(arms)) == name:
        return []
    base, ours = next(iter(arms.values())), arms[name]
    parts = []
    if base.bytes_total:
        parts.append(f"memory {ours.bytes_total / base.bytes_total - 1:+.0%}")
    if base.samples_per_s:
        parts.append(f"speed {ours.samples_per_s / base.samples_per_s:.2f}x")
    if base.test_auc and ours.test_auc:
        parts.append(f"AUC {ours.test_auc / base.test_auc - 1:+.1%} (relative)")
    return [
        f"{name} against {next(iter(arms))} here: {', '.join(parts)}",
        PUBLISHED_CLAIM,
        "arms train one after another: their samples/s compare on an idle machine only",
    ]


def event_lines(arms: Mapping[str, ArmSummary]) -> list[str]:
    """What an arm's shards and control group complained of, each text once, with the look-ups that had no own row."""
    lines = []
    for arm, summary in arms.items():
        events = Counter(summary.mask_info.get("events", ()))
        for event, times in events.items():
            lines.append(f"{arm}: event: {event}" + (f" ({times} times)" if times > 1 else ""))
        traffic = summary.mask_info.get("total", {}).get("traffic", {})
        if events and traffic.get("rows_default"):
            share = traffic["rows_default"] / traffic["rows_pulled"]
            lines.append(f"{arm}: {traffic['rows_default']:,} rows pulled ({share:.0%}) were the default row")
    return lines


def resume_lines(arms: Mapping[str, ArmSummary]) -> list[str]:
    """Which of the figures above are not those of the whole run."""
    return [
        f"{arm}: went on from the snapshot of step {summary.resumed_step:,}: peak bytes, traffic, gradient rows,"
        " samples/s, seconds and counts of snapshots are those of the steps since"
        for arm, summary in arms.items()
        if summary.resumed_from is not None
    ]


def restart_lines(arms: Mapping[str, ArmSummary]) -> list[str]:
    return [
        f"{arm}: lost a process and went back to a snapshot {summary.restarts} time{'s' * (summary.restarts > 1)}; "
        "why is in failures.json beside its logs"
        for arm, summary in arms.items()
        if summary.restarts
    ]


def bias_only_line(metrics: Metrics) -> str:
    """`metrics`: of the bias-only logistic regression on the test split."""
    return (
        "bias-only logistic regression on the same split: "
        f"test AUC {metrics.auc:.4f}, logloss {metrics.logloss:.4f}, NE {metrics.ne:.4f}"
    )


def _cell(value: float | None, first: float | None, kind: str, is_first: bool) -> str:
    if value is None:
        return "-"
    if kind == "metric":
        against = "" if is_first or first is None else f" ({value - first:+.4f})"
        return f"{value:.4f}{against}"
    text = {"bytes": bytes_text, "count": lambda v: f"{v:,.0f}", "seconds": lambda v: f"{v:.1f}"}[kind](value)
    against = "" if is_first or not first else f" ({value / first - 1:+.0%})"
    return f"{text}{against}"


def bytes_text(value: float) -> str:
    """In a unit of powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:.0f} B"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
