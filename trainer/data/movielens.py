"""MovieLens-100K: who rates which film 4 or better.

Split. Each user's ratings by time: the first 80% train, the next 10% validate, the last 10% test.

Features. Of the user: user, age bucket of five years, gender, occupation, three digits of the zip code. Of the film:
item, genres, words of the title, year. Of the moment: hour of the week. Crosses: user x genre, item x age x gender,
user x hour of the day. History: up to 30 films that the user rated well (`liked`) and badly (`disliked`), from table
`item`.
Dense: how often the user and the film were rated before, and the time.

No leak. History and counts look at training ratings alone, and only at those strictly earlier than the sample.
Over all samples that makes 42 thousand row_ids, nearly half of them in four samples or fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from embedding_server.errors import InvalidInput
from trainer.data.bad_rows import BadRows
from trainer.data.bags import Bags, join
from trainer.data.batch import Batch, Feature, Reader, Schema, Share, make_batch, share_of
from trainer.data.movielens_files import Ratings, movielens_folder, read_ratings
from trainer.data.row_ids import cross_ids, word_ids
from trainer.data.spec import SPLITS, MovieLensData, Split

LIKED_RATING = 4.0
HISTORY_LENGTH = 30
AGE_BUCKET_YEARS = 5
HOUR_S = 3600

_OWN_TABLE = (
    "user", "item", "age", "gender", "occupation", "zip", "genre", "title", "year", "hour",
    "user_genre", "item_age_gender", "user_hour",
)  # fmt: skip
SCHEMA = Schema(
    dense=("user_count", "item_count", "time"),
    features=(*(Feature(n, n) for n in _OWN_TABLE), Feature("liked", "item"), Feature("disliked", "item")),
    bias_features=("user", "item"),
)


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of all splits, n of them, sorted by user and then time."""

    dense: np.ndarray  # float32[n, 3]
    bags: dict[str, Bags]  # by feature
    labels: np.ndarray  # float32[n]
    split: np.ndarray  # uint8[n], index into SPLITS
    rows_skipped: int


class MovieLensReader(Reader):
    """Holds all samples in memory; the order of training samples is a permutation by (seed, data pass)."""

    schema = SCHEMA

    def __init__(self, data: MovieLensData, split: Split, share: Share) -> None:
        super().__init__(share)
        self.samples = load_samples(movielens_folder(data.path), data.on_bad_row, data.max_bad_rows)
        self.rows_skipped = self.samples.rows_skipped
        self._is_shuffled = data.shuffle and split == "train"
        self._positions = np.flatnonzero(self.samples.split == SPLITS.index(split))
        if not len(self._positions):
            raise InvalidInput(f"{movielens_folder(data.path)}: no {split} samples; users have too few ratings")

    @property
    def steps_per_pass(self) -> int:
        return -(-len(self._positions) // self.share.batch_size)

    def _batches(self, data_pass: int, first_step: int) -> Iterator[Batch]:
        order = self._positions
        if self._is_shuffled:
            key = np.array([self.share.seed, data_pass], np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(order)
        size = self.share.batch_size
        for first in range(first_step * size, len(order), size):
            positions = order[first : first + size]
            low, high = share_of(self.share.worker, self.share.num_workers, len(positions))
            yield self._batch(positions[low:high], len(positions))

    def _batch(self, positions: np.ndarray, num_global_samples: int) -> Batch:
        samples = self.samples
        values, lengths = join([samples.bags[name].at(positions) for name in SCHEMA.feature_names])
        return make_batch(
            SCHEMA, samples.dense[positions], values, lengths, samples.labels[positions], num_global_samples
        )


def load_samples(folder: Path, on_bad_row: str, max_bad_rows: int) -> Samples:
    """Reads the files and computes all features; kept for the next reader of the same, unchanged files."""
    paths = [folder / f"ml-100k.{kind}" for kind in ("inter", "user", "item")]
    stamps = tuple((p.stat().st_mtime_ns, p.stat().st_size) if p.exists() else None for p in paths)
    return _load_samples(folder, on_bad_row, max_bad_rows, stamps)


@lru_cache(maxsize=1)
def _load_samples(folder: Path, on_bad_row: str, max_bad_rows: int, stamps: tuple[object, ...]) -> Samples:
    bad = BadRows(on_bad_row, max_bad_rows)
    return make_samples(_by_user_and_time(read_ratings(folder, bad)), bad.skipped)


def _by_user_and_time(ratings: Ratings) -> Ratings:
    order = np.lexsort((ratings.timestamp_s, ratings.user))  # stable: equal times keep the file's order
    columns = (ratings.user, ratings.item, ratings.rating, ratings.timestamp_s)
    return Ratings(ratings.users, ratings.items, *(column[order] for column in columns))


def make_samples(ratings: Ratings, rows_skipped: int = 0) -> Samples:
    """Features, labels and splits of ratings that are sorted by user and then time."""
    split = split_by_time(ratings.user)
    is_train = split == SPLITS.index("train")
    bags = _features_of_samples(ratings) | _histories(ratings, is_train)
    labels = (ratings.rating >= LIKED_RATING).astype(np.float32)
    return Samples(_dense(ratings, is_train), bags, labels, split, rows_skipped)


def split_by_time(user: np.ndarray) -> np.ndarray:
    """uint8[n] of SPLITS indices, for samples sorted by user and time: 80%, 10% and 10% of each user's, rounded."""
    first, count = _group_first(user), np.bincount(user, minlength=1)[user]
    rank = np.arange(len(user)) - first
    return ((rank >= count * 8 // 10).astype(np.uint8) + (rank >= count * 9 // 10)).astype(np.uint8)


def _features_of_samples(ratings: Ratings) -> dict[str, Bags]:
    users, items, user, item = ratings.users, ratings.items, ratings.user, ratings.item
    of_user = {
        "user": word_ids(u.user_id for u in users)[user],
        "age": word_ids(str(u.age // AGE_BUCKET_YEARS) for u in users)[user],
        "gender": word_ids(u.gender for u in users)[user],
        "occupation": word_ids(u.occupation for u in users)[user],
        "zip": word_ids(u.zip_code[:3] for u in users)[user],
    }
    item_ids = word_ids(i.item_id for i in items)[item]
    year = word_ids(i.release_year for i in items)[item]
    genre = Bags.of_lists([word_ids(i.genres).tolist() for i in items]).at(item)
    title = Bags.of_lists([word_ids(i.title_words).tolist() for i in items]).at(item)
    hours = ratings.timestamp_s // HOUR_S
    one_per_sample = {
        **of_user,
        "item": item_ids,
        "year": year,
        "hour": hours % 168,
        "item_age_gender": cross_ids(item_ids, of_user["age"], of_user["gender"]),
        "user_hour": cross_ids(of_user["user"], hours % 24),
    }
    user_genre = cross_ids(of_user["user"][genre.owners()], genre.flat())
    starts = np.cumsum(genre.lengths) - genre.lengths
    return {
        **{name: Bags.of_one(row_ids) for name, row_ids in one_per_sample.items()},
        "genre": genre,
        "title": title,
        "user_genre": Bags(user_genre, starts, genre.lengths),
    }


def _histories(ratings: Ratings, is_train: np.ndarray) -> dict[str, Bags]:
    """The newest HISTORY_LENGTH training ratings of the user before the sample's second, good and bad ones apart."""
    item_ids = word_ids(i.item_id for i in ratings.items)[ratings.item]
    is_liked = ratings.rating >= LIKED_RATING
    result = {}
    for name, is_counted in (("liked", is_train & is_liked), ("disliked", is_train & ~is_liked)):
        count = _count_before(ratings.user, ratings.timestamp_s, is_counted)
        # the flat array holds the counted samples in (user, time) order; a sample's bag ends where its second begins
        of_earlier_users: np.ndarray = (np.cumsum(is_counted) - is_counted)[_group_first(ratings.user)]
        lengths = np.minimum(count, HISTORY_LENGTH)
        result[name] = Bags(item_ids[is_counted], of_earlier_users + count - lengths, lengths)
    return result


def _dense(ratings: Ratings, is_train: np.ndarray) -> np.ndarray:
    by_item = np.lexsort((ratings.timestamp_s, ratings.item))
    item_count = np.empty(len(by_item), np.int64)
    item_count[by_item] = _count_before(ratings.item[by_item], ratings.timestamp_s[by_item], is_train[by_item])
    user_count = _count_before(ratings.user, ratings.timestamp_s, is_train)
    train_s = ratings.timestamp_s[is_train] if is_train.any() else ratings.timestamp_s
    time = (ratings.timestamp_s - train_s.min()) / max(1, train_s.max() - train_s.min())
    # a quarter of log(1 + count) runs from 0 to about 1.6, on the scale of `time`
    return np.stack([np.log1p(user_count) / 4, np.log1p(item_count) / 4, time], axis=1).astype(np.float32)


def _group_first(*keys: np.ndarray) -> np.ndarray:
    """For rows sorted by `keys`, the position of the first row of each row's group; int64[n]."""
    n = len(keys[0])
    is_first = np.ones(n, bool)
    if n:
        is_first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.maximum.accumulate(np.where(is_first, np.arange(n), 0))


def _count_before(key: np.ndarray, time: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """For rows sorted by key and time: how many counted rows of the same key are strictly earlier; int64[n]."""
    before = np.cumsum(is_counted) - is_counted
    return before[_group_first(key, time)] - before[_group_first(key)]
