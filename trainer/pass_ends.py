"""Tells after which step a pass over the data is over, for readers of any kind."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.data.batch import Batch, Reader


class PassEnds:
    """A reader's batches as they are, read one ahead: a batch is the last of its pass if the next is of another pass,
    or if there is none. Only reading on can tell of a reader that does not know how many samples it has.

    Thread safety: one thread iterates; another may ask `is_end` of the steps whose batches it got from it.
    """

    def __init__(self, reader: Reader, first_step: int = 1) -> None:
        """first_step: the number of the next batch's step."""
        self._reader = reader
        self._batches = iter(reader)
        self._held: tuple[Batch, int] | None = None  # with its data pass
        self._step = first_step - 1
        self._ends: set[int] = set()

    def is_end(self, step: int) -> bool:
        """Steps count as `first_step` says."""
        return step in self._ends

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        held = self._held or self._read()
        if held is None:
            raise StopIteration
        self._held = self._read()
        self._step += 1
        if self._held is None or self._held[1] != held[1]:
            self._ends.add(self._step)
        return held[0]

    def _read(self) -> tuple[Batch, int] | None:
        batch = next(self._batches, None)
        return None if batch is None else (batch, self._reader.data_pass)
