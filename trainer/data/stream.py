"""Readers of files too big to hold: blocks of rows in, global batches out.

A subclass lists blocks (some rows of one file, not yet parsed) and parses ranges of them. The reader cuts the blocks
into global batches and parses only the rows of its own worker; the rest it merely counts, so that every worker
knows where each global batch ends, also at the end of data whose length nobody knew.
Memory is bounded by one global batch plus one block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from embedding_server.errors import InvalidInput
from trainer.data.bad_rows import BadRows
from trainer.data.batch import Batch, Reader, Schema, Share, make_batch, share_of


class Block(Protocol):
    """Consecutive rows of one file."""

    @property
    def num_rows(self) -> int: ...


BlockT = TypeVar("BlockT", bound=Block)


@dataclass(frozen=True, slots=True)
class Part:
    """Parsed rows, bad ones left out; k of them."""

    dense: np.ndarray  # float32[k, d]
    values: np.ndarray  # int64[n], feature-major
    lengths: np.ndarray  # int32[F, k]
    labels: np.ndarray  # float32[k]


class StreamReader(Reader, Generic[BlockT]):
    """A reader over blocks, in file order, the same in every data pass."""

    def __init__(self, schema: Schema, share: Share, bad: BadRows, files: Sequence[Path]) -> None:
        super().__init__(share)
        self.schema = schema
        self.files = list(files)
        self._bad = bad

    @property
    def steps_per_pass(self) -> int | None:
        return None

    @abstractmethod
    def _blocks(self, first_position: int) -> Iterator[tuple[BlockT, int]]:
        """(block, first row of it to use), from position `first_position` of the data pass on, to its end."""

    @abstractmethod
    def _parse(self, block: BlockT, low: int, high: int) -> Part:
        """Rows low..high of a block; bad rows go to self._bad and are left out."""

    def _batches(self, data_pass: int, first_step: int) -> Iterator[Batch]:
        self._bad.begin_pass()
        skipped_before = self.rows_skipped - self._bad.skipped
        has_rows = first_step > 0
        for pieces in _global_batches(self._blocks(first_step * self.share.batch_size), self.share.batch_size):
            has_rows = True
            num_rows = sum(high - low for _, low, high in pieces)
            low, high = share_of(self.share.worker, self.share.num_workers, num_rows)
            parts = [self._parse(block, a, b) for block, a, b in _cut(pieces, low, high)]
            self.rows_skipped = skipped_before + self._bad.skipped
            yield self._batch(_join(parts, self.schema), num_rows)
        if not has_rows:
            raise InvalidInput(f"{self.files[0]} row 1: there is no row in any file of this split; check `data`")

    def _batch(self, part: Part, num_global_samples: int) -> Batch:
        lengths = part.lengths.reshape(-1)
        return make_batch(self.schema, part.dense, part.values, lengths, part.labels, num_global_samples)


def _global_batches(blocks: Iterator[tuple[BlockT, int]], size: int) -> Iterator[list[tuple[BlockT, int, int]]]:
    """Cuts blocks into lists of (block, low, high) of `size` rows together; the last list may have fewer."""
    pieces: list[tuple[BlockT, int, int]] = []
    needed = size
    for block, low in blocks:
        while low < block.num_rows:
            high = min(block.num_rows, low + needed)
            pieces.append((block, low, high))
            needed -= high - low
            low = high
            if not needed:
                yield pieces
                pieces, needed = [], size
    if pieces:
        yield pieces


def _cut(pieces: list[tuple[BlockT, int, int]], low: int, high: int) -> Iterator[tuple[BlockT, int, int]]:
    """The pieces of rows low..high of a global batch."""
    first = 0
    for block, a, b in pieces:
        cut_a, cut_b = max(a, a + low - first), min(b, a + high - first)
        if cut_a < cut_b:
            yield block, cut_a, cut_b
        first += b - a


def _join(parts: list[Part], schema: Schema) -> Part:
    """Rows of all parts; values stay feature-major."""
    num_features = len(schema.features)
    if not parts:
        return Part(
            np.empty((0, schema.num_dense), np.float32),
            np.empty(0, np.int64),
            np.empty((num_features, 0), np.int32),
            np.empty(0, np.float32),
        )
    if len(parts) == 1:
        return parts[0]
    ends = [np.cumsum(part.lengths.sum(axis=1)) for part in parts]
    by_part = [np.split(part.values, end[:-1]) for part, end in zip(parts, ends, strict=True)]
    values = [part_values[f] for f in range(num_features) for part_values in by_part]
    return Part(
        np.concatenate([part.dense for part in parts]),
        np.concatenate(values),
        np.concatenate([part.lengths for part in parts], axis=1),
        np.concatenate([part.labels for part in parts]),
    )
