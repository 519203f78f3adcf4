"""Opens the reader that a job names, or says what its batches hold without opening any data."""

from __future__ import annotations

from embedding_server.errors import InvalidInput
from trainer.data.batch import Reader, Schema, Share
from trainer.data.spec import CriteoTsvData, MovieLensData, ParquetData, Split, SyntheticData, check_split
from trainer.job import Job


def open_reader(job: Job, split: Split = "train", worker: int = 0, num_workers: int = 1) -> Reader:
    """The reader of one worker. Training goes through all data passes, other splits once.

    `num_workers` may differ from trainer.workers, e.g. 1 to evaluate on one worker.
    """
    if not 0 <= worker < num_workers:
        raise InvalidInput(f"worker={worker} must be in 0..{num_workers - 1}, for num_workers={num_workers}")
    try:
        check_split(job.data, split)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    passes = job.trainer.data_passes if split == "train" else 1
    share = Share(job.trainer.batch_size, worker, num_workers, passes, job.seed)
    # each reader is imported when it is asked for: a Criteo job needs no pyarrow
    match job.data:
        case MovieLensData() as data:
            from trainer.data.movielens import MovieLensReader

            return MovieLensReader(data, split, share)
        case CriteoTsvData() as data:
            from trainer.data.criteo_tsv import CriteoTsvReader

            return CriteoTsvReader(data, split, share)
        case ParquetData() as data:
            from trainer.data.parquet import ParquetReader

            return ParquetReader(data, split, share)
        case SyntheticData() as data:
            from trainer.data.synthetic import SyntheticReader

            return SyntheticReader(data, split, share)


def schema_of(job: Job) -> Schema:
    """That of the job's readers; no file is looked at."""
    match job.data:
        case MovieLensData():
            from trainer.data import movielens

            return movielens.SCHEMA
        case CriteoTsvData():
            from trainer.data import criteo_tsv

            return criteo_tsv.SCHEMA
        case ParquetData() as data:
            from trainer.data import parquet

            return parquet.schema_of(data)
        case SyntheticData() as data:
            from trainer.data import synthetic

            return synthetic.schema_of(data)
