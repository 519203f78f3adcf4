"""TensorBoard's event file of one run.

    board = Board(folder, complain)
    board.scalar("train/loss", 0.4, step); board.flush()
    board.close()

Watching is no part of training: a file that cannot be written is complained of once, and nothing more is written.

Not torch's SummaryWriter: on a full disk its background thread ends with a trace on the terminal, and its error comes
out of whichever call is next. A report is a few kB every half second: nothing to do in the background.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_NUMBERS = itertools.count()  # of the boards of this process


class Board:
    """Opens its file at the first write. Thread safety: one thread at a time."""

    def __init__(self, folder: Path, complain: Callable[[str], None], first_step: int = 1) -> None:
        """complain: takes the reason when the file cannot be written. first_step: what files of this folder say of it
        and of later steps, TensorBoard drops: those steps are trained again."""
        self._path = folder / file_name()
        self._complain = complain
        self._first_step = first_step
        self._file: IO[bytes] | None = None
        self._is_given_up = False

    def scalar(self, name: str, value: float, step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        self._write(scalar(name, value), step)

    def text(self, name: str, text: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text as text_of

        self._write(text_of(name, text), step)

    def histogram(self, name: str, raw: dict[str, Any], step: int) -> None:
        """raw: what torch's histogram_raw takes: min, max, num, sum, sum_squares, bucket_limits, bucket_counts."""
        from torch.utils.tensorboard.summary import histogram_raw

        self._write(histogram_raw(name, **raw), step)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if self._is_given_up:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "ab")  # noqa: SIM115  until close
                self._record(Event(wall_time=time.time(), file_version="brain.Event:2"))
                start = SessionLog(status=SessionLog.START)
                self._record(Event(wall_time=time.time(), step=self._first_step, session_log=start))
            self._record(Event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:
            self._give_up(error)

    def _record(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(event.SerializeToString())

    def _give_up(self, error: OSError) -> None:
        file, self._file, self._is_given_up = self._file, None, True
        if file is not None:
            with contextlib.suppress(OSError):  # it tries once more to write what is left
                file.close()
        self._complain(
            f"{self._path}: TensorBoard's file cannot be written ({error.strerror}), so its curves end here; training "
            "goes on. Free space under trainer.output_dir before the results are due there"
        )


def file_name() -> str:
    """TensorBoard reads the files of a folder in the order of their names."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
