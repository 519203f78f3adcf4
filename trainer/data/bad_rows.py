"""What happens to a row that cannot be read: the job fails, or the row is skipped and counted, up to a bound.

A fault of a whole file (missing, empty, not a gzip file, cut short inside the compression, wrong header) always fails:
nobody can say how many rows were lost, so no bound would hold.
"""

from __future__ import annotations

import logging
from pathlib import Path

from embedding_server.errors import InvalidInput

logger = logging.getLogger(__name__)


class BadRows:
    """Counts rejected rows of one reader.

    `skipped` goes on over all data passes; the bound holds for each data pass by itself.
    """

    def __init__(self, on_bad_row: str, max_bad_rows: int) -> None:
        self.on_bad_row = on_bad_row
        self.max_bad_rows = max_bad_rows
        self.skipped = 0
        self._skipped_in_pass = 0

    def begin_pass(self) -> None:
        self._skipped_in_pass = 0

    def reject(self, path: Path, row: int, reason: str) -> None:
        """Raises InvalidInput, or returns after counting the row. `row` counts from 1, a header line included."""
        where = f"{path} row {row}: {reason}"
        if self.on_bad_row == "fail":
            raise InvalidInput(f"{where}; mend the file, or set data.on_bad_row=skip")
        self.skipped += 1
        self._skipped_in_pass += 1
        if self._skipped_in_pass > self.max_bad_rows:
            raise InvalidInput(
                f"{where}; this is bad row {self._skipped_in_pass} of this data pass, and data.max_bad_rows="
                f"{self.max_bad_rows}; mend the file, or raise the bound"
            )
        if self._skipped_in_pass <= 3:
            logger.warning("skipped %s", where)


def check_file(path: Path) -> None:
    """InvalidInput if there is no such file or nothing in it."""
    if not path.exists():
        raise InvalidInput(f"{path}: there is no such file; check the paths under `data`")
    if not path.is_file():
        raise InvalidInput(f"{path}: is not a file; name the files themselves under `data`")
    if path.stat().st_size == 0:
        raise InvalidInput(f"{path} row 1: the file is empty; remove it from `data` or fetch it again")
