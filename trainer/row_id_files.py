"""Files of row_ids that somebody wants erased: text, one a line, or a NumPy file of an int64 array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.segment_erasure import ErasedIds

_LINES_AT_ONCE = 1 << 16
_LONGEST_LINE = 64  # characters: a row_id has at most 20


def read_erasures(texts: Sequence[str]) -> dict[str, ErasedIds]:
    """Of `TABLE:FILE` each: row_ids by table. InvalidInput, naming the file and the line."""
    erased: dict[str, ErasedIds] = {}
    for text in texts:
        table, colon, file = text.partition(":")
        if not (table and colon and file):
            raise InvalidInput(f"--erase {text!r}: write TABLE:FILE, e.g. user:deleted.txt")
        of_table = erased.setdefault(table, ErasedIds())
        for row_ids in _row_ids(Path(file)):
            of_table.add(row_ids)
    return erased


def _row_ids(path: Path) -> Iterator[np.ndarray]:
    """int64[n] at a time."""
    try:
        if path.suffix == ".npy":
            yield from _from_numpy(path)
        else:
            yield from _from_text(path)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); name a file of row_ids") from None


def _from_numpy(path: Path) -> Iterator[np.ndarray]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # it takes no array of Python objects
    except OSError:
        raise
    except Exception as error:  # a header can make NumPy fail in more ways than it says
        raise InvalidInput(f"{path}: is no NumPy file of numbers ({error}); save an int64 array") from None
    if array.ndim != 1 or array.dtype != np.int64:
        raise InvalidInput(f"{path}: has {array.dtype}{list(array.shape)}; row_ids are int64[n]")
    for start in range(0, array.shape[0], _LINES_AT_ONCE):
        yield np.array(array[start : start + _LINES_AT_ONCE])


def _from_text(path: Path) -> Iterator[np.ndarray]:
    """Empty lines count nothing."""
    found: list[int] = []
    with open(path, encoding="ascii", errors="replace") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE and not line.endswith("\n"):  # its rest would pass for another row_id
                raise InvalidInput(
                    f"{path}, line {number}: has {_LONGEST_LINE} characters or more; write one int64 a line"
                )
            if line.strip():
                found.append(_row_id(path, number, line.strip()))
            if len(found) == _LINES_AT_ONCE:
                yield np.array(found, np.int64)
                found = []
    yield np.array(found, np.int64)


def _row_id(path: Path, number: int, text: str) -> int:
    try:
        row_id = int(text)
    except ValueError:
        row_id = 2**63
    if not -(2**63) <= row_id < 2**63 or "_" in text:
        raise InvalidInput(f"{path}, line {number}: {text!r} is no row_id; write one int64 a line")
    return row_id
