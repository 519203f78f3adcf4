"""Lines of plain and .gz files, a few MiB at a time, with the number of every row.

Faults that end the reading (InvalidInput, naming file and row): no such file, an empty one, compressed data that is
damaged or cut short, a line longer than MAX_LINE_BYTES. A last line without a line end is given with `is_cut`: the
file may have been cut inside it, and the reader decides.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from embedding_server.errors import InvalidInput
from trainer.data.bad_rows import check_file

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_LINE_END = 10


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines of one file; line i is buffer[starts[i] : ends[i]], its line end left out."""

    path: Path
    first_row: int  # number of line 0 in its file, from 1
    buffer: np.ndarray  # uint8[n]
    starts: np.ndarray  # int64[m]
    ends: np.ndarray  # int64[m]
    is_cut: bool = False  # the last line has no line end

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def line(self, position: int) -> bytes:
        return self.buffer[self.starts[position] : self.ends[position]].tobytes()


def line_blocks(files: Sequence[Path], skip_lines: int = 0) -> Iterator[tuple[LineBlock, int]]:
    """(block, first line to use) over all files in order; the first `skip_lines` lines of all are left out."""
    for path in files:
        for block in _blocks_of(path):
            first = min(skip_lines, block.num_rows)
            skip_lines -= first
            if first < block.num_rows:
                yield block, first


def _blocks_of(path: Path) -> Iterator[LineBlock]:
    check_file(path)
    row, rest = 1, b""
    with _open(path) as file:
        while chunk := _read(file, path, row):
            data = rest + chunk if rest else chunk
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if len(rest) > MAX_LINE_BYTES:
                lines = data.count(b"\n", 0, end)
                raise InvalidInput(
                    f"{path} row {row + lines}: is longer than {MAX_LINE_BYTES} bytes; this is no file of rows by lines"
                )
            if end:
                block = _block(path, row, data, end)
                row += block.num_rows
                yield block
    if rest:
        whole = np.frombuffer(rest, np.uint8)
        yield LineBlock(path, row, whole, np.zeros(1, np.int64), np.array([len(rest)]), is_cut=True)
    elif row == 1:
        raise InvalidInput(f"{path} row 1: there is no row in the file; remove it from `data` or fetch it again")


def _block(path: Path, row: int, data: bytes, end: int) -> LineBlock:
    buffer = np.frombuffer(data, np.uint8, end)
    ends = np.flatnonzero(buffer == _LINE_END)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    return LineBlock(path, row, buffer, starts, ends)


def _open(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if path.suffix == ".gz":
        file.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    magic = file.read(2)
    file.seek(0)
    if magic == _GZIP_MAGIC:
        file.close()
        raise InvalidInput(f"{path} row 1: the file is compressed with gzip; let its name end with .gz")
    return file


def _read(file: BinaryIO, path: Path, row: int) -> bytes:
    try:
        return file.read(BLOCK_BYTES)
    except EOFError:
        raise InvalidInput(
            f"{path} row {row} or later: the compressed data is cut short; fetch the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInput(
            f"{path} row {row} or later: the compressed data is damaged ({error}); fetch the file again"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{path} row {row} or later: cannot be read ({error.strerror})") from error
