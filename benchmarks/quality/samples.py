"""The data of a study by name, all behind one small interface: planted streams and MovieLens-100K."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from benchmarks.quality.stream import PlantedStream, Samples, StreamSpec
from trainer.data.batch import Batch, Feature, Schema, Share, make_batch
from trainer.data.movielens import MovieLensReader
from trainer.data.spec import MovieLensData, Split

_TEST_BATCH = 16_384
_SMALL_SHARE = 0.01  # a field with fewer ranks than this share of the largest field's has a small table

#: the planted streams at full size; every one but S1 at half of it, for each has one seed only
S1 = StreamSpec("S1", num_train=2_000_000, num_test=1_000_000)
_NO_TAIL = (20_000, 20_000, 10_000, 10_000, 5_000, 2_000, 1_000, 100)
STREAMS = {
    "S1": S1,
    "S0": StreamSpec("S0", 1_000_000, 500_000, exponent=0.4, cardinalities=_NO_TAIL, turnover=0.0),
    "zipf-0.9": StreamSpec("zipf-0.9", 1_000_000, 500_000, exponent=0.9, cardinalities=S1.scaled(0.5).cardinalities),
    "zipf-1.2": StreamSpec("zipf-1.2", 1_000_000, 500_000, exponent=1.2, cardinalities=S1.scaled(0.5).cardinalities),
    "rare-mute": StreamSpec(
        "rare-mute", 1_000_000, 500_000, cardinalities=S1.scaled(0.5).cardinalities, rare_visits=5.0
    ),
}
MOVIELENS = "movielens-100k"


class Data(ABC):
    """Samples of one seed: training batches of a data pass, in order, and test batches."""

    schema: Schema
    steps_per_pass: int
    #: tables that contestants differ in; the others are too small to be worth it, and stay as under `off`
    large_tables: frozenset[str]

    @abstractmethod
    def train_batches(self, data_pass: int) -> Iterator[Batch]: ...

    @abstractmethod
    def test_batches(self) -> Iterator[Batch]: ...

    def oracle_logits(self) -> np.ndarray | None:
        """The truth of the test samples, float64[n]; None where nobody knows it."""
        return None

    def hottest_ids(self, share: float) -> dict[str, np.ndarray]:
        """By large table, that share of its IDs with the most training samples, int64[k]."""
        seen: dict[str, list[np.ndarray]] = {table: [] for table in self.large_tables}
        features = [feature for feature in self.schema.features if feature.table in self.large_tables]
        for batch in self.train_batches(0):
            for feature in features:
                seen[feature.table].append(batch.sparse[feature.name].values().numpy())
        hottest = {}
        for table, parts in seen.items():
            row_ids, counts = np.unique(np.concatenate(parts), return_counts=True)
            hottest[table] = row_ids[np.argsort(-counts, kind="stable")[: round(share * row_ids.size)]]
        return hottest


class PlantedData(Data):
    """A planted stream in time order, every data pass the same."""

    def __init__(self, spec: StreamSpec, seed: int, batch_size: int) -> None:
        self._stream = PlantedStream(spec, seed)
        self._batch_size = batch_size
        self.schema = Schema((), tuple(Feature(f"field_{f}", f"field_{f}") for f in range(spec.num_fields)))
        self.steps_per_pass = -(-spec.num_train // batch_size)
        least = max(spec.cardinalities) * _SMALL_SHARE
        self.large_tables = frozenset(f"field_{f}" for f, ids in enumerate(spec.cardinalities) if ids >= least)

    def train_batches(self, data_pass: int) -> Iterator[Batch]:
        yield from map(self._batch, self._stream.train_batches(self._batch_size))

    def test_batches(self) -> Iterator[Batch]:
        yield from map(self._batch, self._test_samples())

    def oracle_logits(self) -> np.ndarray:
        return np.concatenate([samples.logits for samples in self._test_samples()])

    def _test_samples(self) -> Iterator[Samples]:
        for first in range(0, self._stream.spec.num_test, _TEST_BATCH):
            yield self._stream.test(first, first + _TEST_BATCH)

    def _batch(self, samples: Samples) -> Batch:
        n = samples.labels.size
        lengths = np.ones(samples.row_ids.size, np.int32)
        dense = np.empty((n, 0), np.float32)
        return make_batch(self.schema, dense, samples.row_ids.reshape(-1), lengths, samples.labels, n)


class MovieLens(Data):
    """MovieLens-100K, shuffled anew in every data pass; the test samples are its validation and test splits."""

    schema = MovieLensReader.schema
    large_tables = frozenset({"user_genre", "item_age_gender", "user_hour"})

    def __init__(self, seed: int, batch_size: int) -> None:
        self._seed = seed
        self._batch_size = batch_size
        steps = self._reader("train", 1).steps_per_pass
        self.steps_per_pass = steps

    def train_batches(self, data_pass: int) -> Iterator[Batch]:
        reader = self._reader("train", data_pass + 1)
        reader.data_pass = data_pass
        yield from reader

    def test_batches(self) -> Iterator[Batch]:
        yield from self._reader("validation", 1)
        yield from self._reader("test", 1)

    def _reader(self, split: Split, data_passes: int) -> MovieLensReader:
        share = Share(self._batch_size, data_passes=data_passes, seed=self._seed)
        return MovieLensReader(MovieLensData(), split, share)


def stream_spec(name: str, share: float) -> StreamSpec:
    """The planted stream `name` with that share of its samples and ranks."""
    return STREAMS[name] if share == 1.0 else STREAMS[name].scaled(share)


def open_data(name: str, seed: int, batch_size: int, share: float = 1.0) -> Data:
    """share: of a planted stream's samples; MovieLens is always whole."""
    if name == MOVIELENS:
        return MovieLens(seed, batch_size)
    return PlantedData(stream_spec(name, share), seed, batch_size)
