"""Scores of a split as a Parquet file: score float32 and label float32, a row a sample, in the reader's order."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from embedding_server.segment_file import PARTIAL_SUFFIX
from trainer.data.batch import Reader
from trainer.scoring import ScoringModel
from trainer.tensor_file import refuse_existing

SCHEMA = pa.schema([pa.field("score", pa.float32(), False), pa.field("label", pa.float32(), False)])


def write_predictions(model: ScoringModel, reader: Reader, out: Path) -> int:
    """How many samples. InvalidInput if there is a file of that name; OSError, and no file, if it cannot be written."""
    refuse_existing(out)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    num_samples = 0
    try:
        with pq.ParquetWriter(partial, SCHEMA) as writer:
            for batch in reader:
                if batch.num_samples:
                    columns = [pa.array(model.score_batch(batch)), pa.array(batch.labels.numpy())]
                    writer.write_table(pa.table(columns, schema=SCHEMA))
                    num_samples += batch.num_samples
        partial.rename(out)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return num_samples
