"""What a worker says while it trains: Progress reports, events, TensorBoard, mask_info.json, and two clocks.

All of it is watching: a file that cannot be written is an event, once, and training goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.board import Board
from trainer.data.batch import Batch
from trainer.mask_report import MASK_FILE, board_scalars, histogram_of
from trainer.metrics import Metrics, RecentMetrics
from trainer.report import Progress, write_json

#: seconds between reports. A report costs some 3 ms, most of it for the running AUC.
REPORT_EVERY_S = 0.5
#: training samples, each scored before it was trained on, behind the running loss, NE and AUC
WINDOW_SAMPLES = 16_384
MAX_EVENTS = 100


class RunLog:
    """Log of one worker. Only worker 0 has a folder; the others count and time, and say nothing.

    Clocks: wall_s from entering the context on; train_s the same without what ran under `pause`.
    """

    def __init__(
        self,
        arm: str,
        total_steps: int | None,
        folder: Path | None,
        show: Callable[[Progress], None],
        last_step: int = 0,
        epoch: int = 0,
    ) -> None:
        """last_step: of the run that this one goes on with; curves of later steps, which are trained again, are void.
        epoch: of the job, for who watches."""
        self.num_samples = 0
        self.arm = arm
        self.events: list[str] = []  # newest last, at most MAX_EVENTS
        self._total_steps = total_steps
        self._folder = folder
        self._show = show
        self._epoch = epoch
        self._board = None if folder is None else Board(folder, self.event, first_step=last_step + 1)
        self._is_mask_failing = False
        self._recent = RecentMetrics(WINDOW_SAMPLES)
        self._step = self.since_step = last_step  # this process has trained the steps since
        self._start_s = self._train_end_s = self._last_report_s = 0.0
        self._paused_s = 0.0
        self._num_samples_at_report = 0

    def __enter__(self) -> RunLog:
        self._start_s = self._last_report_s = self._train_end_s = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._board is not None:
            self._board.close()

    @property
    def step(self) -> int:
        """The last step that was observed, or the one before the first."""
        return self._step

    @property
    def train_s(self) -> float:
        return self._train_end_s - self._start_s - self._paused_s

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._start_s

    def observe(self, step: int, batch: Batch, logits: torch.Tensor) -> None:
        """Counts a finished step, and reports if it is time or the last step."""
        self.num_samples += batch.num_samples
        self._step = step
        now = self._train_end_s = time.perf_counter()
        if self._board is None:
            return
        self._recent.add(batch.labels.numpy(), logits.numpy())
        if now - self._last_report_s >= REPORT_EVERY_S or step == self._total_steps:
            self._report(now)

    def _report(self, now: float) -> None:
        recent = self._recent.compute()
        speed = (self.num_samples - self._num_samples_at_report) / max(now - self._last_report_s, 1e-9)
        figures = (speed, recent.logloss, recent.ne, recent.auc)
        self._show(Progress(self.arm, self._step, self._total_steps, *figures, epoch=self._epoch))
        self.scores("train", recent)
        self.curves("train", {"samples_per_s": speed})
        if self._board is not None:
            self._board.flush()
        self._last_report_s, self._num_samples_at_report = now, self.num_samples

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the training clock."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            paused_s = time.perf_counter() - start_s
            self._paused_s += paused_s
            self._train_end_s += paused_s
            self._last_report_s += paused_s

    def scores(self, split: str, metrics: Metrics | None) -> None:
        if metrics is not None:
            self.curves(split, {"auc": metrics.auc, "loss": metrics.logloss, "ne": metrics.ne})

    def event(self, text: str) -> None:
        """Something that people should see at once and find again: shown, and kept in `events`."""
        self.events.append(text)
        del self.events[:-MAX_EVENTS]
        self.say(text)
        if self._board is not None:
            self._board.text("events", text, self._step)
            self._board.flush()

    def say(self, text: str) -> None:
        """A line that is shown and not kept: what goes as it should."""
        if self._board is not None:
            none = math.nan
            figures = (none, none, none, none)
            self._show(Progress(self.arm, self._step, self._total_steps, *figures, note=text, epoch=self._epoch))

    def mask(self, document: Mapping[str, Any], step: int) -> None:
        """Mask info (mask_report.py) to mask_info.json, where it replaces the one before, and to TensorBoard."""
        if self._board is None or self._folder is None:
            return
        self._write_mask(self._folder / MASK_FILE, document)
        for name, value in board_scalars(document).items():
            self._board.scalar(name, value, step)
        for table, state in document["tables"].items():
            for kind in ("hot", "frozen"):
                histogram = histogram_of(state["heat_histogram"][kind])
                if histogram:
                    self._board.histogram(f"table_{table}/log2_heat_{kind}", histogram, step)
        self._board.flush()

    def _write_mask(self, path: Path, document: Mapping[str, Any]) -> None:
        try:
            write_json(path, document)
        except OSError as error:
            if not self._is_mask_failing:
                self._is_mask_failing = True
                self.event(
                    f"{path}: cannot be written ({error.strerror}), so `frostline inspect` shows an older state or "
                    "none; training goes on. Free space under trainer.output_dir before the results are due there"
                )

    def curves(self, group: str, values: Mapping[str, float]) -> None:
        """To TensorBoard, as of this step."""
        if self._board is not None:
            for name, value in values.items():
                self._board.scalar(f"{group}/{name}", value, self._step)
