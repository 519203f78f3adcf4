"""What does not depend on the damaged byte is worked out once: what a sound JSON file says, what a header must be.

Only results of pure functions are kept, by all that goes into them. So a damaged JSON file, whose bytes are others, is
read by the real function each time, and every column file's header is still compared with what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from embedding_server import snapshot_file, snapshot_format
from embedding_server.snapshot_file import Column
from trainer import snapshots

_MOST = 256  # results of a function


@contextmanager
def once() -> Iterator[None]:
    read_model = _by_content(snapshot_format.read_model)
    with (
        mock.patch.object(snapshot_format, "read_model", read_model),
        mock.patch.object(snapshots, "read_model", read_model),
        mock.patch.object(snapshot_file, "header_bytes", _by_columns(snapshot_file.header_bytes)),
    ):
        yield


def _by_content(real: Callable[[Path, Any], Any]) -> Callable[[Path, Any], Any]:
    known: dict[tuple[bytes, Any], Any] = {}

    def read_model(path: Path, model: Any) -> Any:
        key = snapshot_format.read_bounded(path), model
        if key not in known:
            found = real(path, model)
            if len(known) >= _MOST:
                return found
            known[key] = found
        return known[key]

    return read_model


def _by_columns(real: Callable[[Sequence[Column]], bytes]) -> Callable[[Sequence[Column]], bytes]:
    cached = lru_cache(maxsize=_MOST)(real)
    return lambda columns: cached(tuple(columns))
