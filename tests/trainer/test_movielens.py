"""The MovieLens reader: split, features, and that nothing of the future or of other splits leaks into a sample."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.data.bags import Bags
from trainer.data.movielens import HISTORY_LENGTH, SCHEMA, Samples, load_samples, make_samples, split_by_time
from trainer.data.movielens_files import Item, Ratings, User, movielens_folder
from trainer.data.registry import open_reader
from trainer.data.row_ids import cross_ids, word_id
from trainer.job import make_job


def ratings_of(rows: list[tuple[int, int, int, int]]) -> Ratings:
    """From (user, item, rating, seconds) with users and items numbered from 0; sorted by user and time."""
    rows = sorted(rows, key=lambda row: (row[0], row[3]))
    columns = np.array(rows).T
    users = [User(f"u{u}", 20 + u, "F" if u % 2 else "M", "writer", "85711") for u in range(columns[0].max() + 1)]
    items = [Item(f"i{i}", ["toy", f"t{i}"], "1995", ["Drama", "War"][: i % 3]) for i in range(columns[1].max() + 1)]
    rating = columns[2].astype(np.float32)
    return Ratings(users, items, columns[0], columns[1], rating, columns[3])


def bag(bags: Bags, position: int) -> list[int]:
    return bags.at(np.array([position])).flat().tolist()


def random_ratings(seed: int) -> Ratings:
    random = np.random.default_rng(seed)
    n = 300
    return ratings_of(
        list(
            zip(
                random.integers(0, 6, n).tolist(),
                random.integers(0, 12, n).tolist(),
                random.integers(1, 6, n).tolist(),
                random.integers(0, 90, n).tolist(),  # many equal times
                strict=True,
            )
        )
    )


@pytest.fixture(scope="module")
def samples() -> Samples:
    return load_samples(movielens_folder(None), "fail", 0)


def test_the_split_is_per_user_and_by_time() -> None:
    user = np.array([0] * 10 + [1] * 20 + [2] * 3)
    split = split_by_time(user)
    assert split[:10].tolist() == [0] * 8 + [1, 2]
    assert split[10:30].tolist() == [0] * 16 + [1] * 2 + [2] * 2
    assert split[30:].tolist() == [0, 0, 2]


def test_features_of_a_sample() -> None:
    ratings = ratings_of([(0, 1, 5, 100), (0, 2, 2, 7200 + 168 * 3600), (1, 0, 4, 50)])
    made = make_samples(ratings)
    position = 1  # user 0, item 2
    assert made.labels.tolist() == [1.0, 0.0, 1.0]
    one = {name: bag(made.bags[name], position) for name in SCHEMA.feature_names}
    user, item = word_id("u0"), word_id("i2")
    assert one["user"] == [user]
    assert one["item"] == [item]
    assert one["age"] == [word_id("4")]
    assert one["zip"] == [word_id("857")]
    assert one["title"] == [word_id("toy"), word_id("t2")]
    assert one["genre"] == [word_id("Drama"), word_id("War")]
    assert one["hour"] == [2]
    crossed = cross_ids(np.array([user, user]), np.array([word_id("Drama"), word_id("War")]))
    assert one["user_genre"] == crossed.tolist()
    of_item = cross_ids(np.array([item]), np.array([word_id("4")]), np.array([word_id("M")]))
    assert one["item_age_gender"] == of_item.tolist()
    assert one["user_hour"] == cross_ids(np.array([user]), np.array([2])).tolist()


def test_history_and_counts_are_training_ratings_strictly_before() -> None:
    ratings = random_ratings(1)
    made = make_samples(ratings)
    is_train = made.split == 0
    n = len(ratings.user)
    for at in range(n):
        earlier = [
            j
            for j in range(n)
            if is_train[j] and ratings.user[j] == ratings.user[at] and ratings.timestamp_s[j] < ratings.timestamp_s[at]
        ]
        for name, is_wanted in (("liked", True), ("disliked", False)):
            rated = [word_id(f"i{ratings.item[j]}") for j in earlier if (ratings.rating[j] >= 4) == is_wanted]
            assert bag(made.bags[name], at) == rated[-HISTORY_LENGTH:]
        of_item = sum(
            is_train[j] and ratings.item[j] == ratings.item[at] and ratings.timestamp_s[j] < ratings.timestamp_s[at]
            for j in range(n)
        )
        assert made.dense[at, 0] == pytest.approx(np.log1p(len(earlier)) / 4, abs=1e-6)
        assert made.dense[at, 1] == pytest.approx(np.log1p(of_item) / 4, abs=1e-6)


def test_a_samples_own_rating_and_all_of_validation_and_test_change_no_feature() -> None:
    ratings = random_ratings(2)
    made = make_samples(ratings)
    flipped = ratings.rating.copy()
    flipped[made.split != 0] = 6 - flipped[made.split != 0]
    other = make_samples(
        Ratings(ratings.users, ratings.items, ratings.user, ratings.item, flipped, ratings.timestamp_s)
    )
    assert (other.labels != made.labels).any()
    np.testing.assert_array_equal(other.dense, made.dense)
    for name in SCHEMA.feature_names:
        np.testing.assert_array_equal(other.bags[name].flat(), made.bags[name].flat())
        np.testing.assert_array_equal(other.bags[name].lengths, made.bags[name].lengths)


def test_the_history_is_cut_at_its_length() -> None:
    made = make_samples(ratings_of([(0, t % 7, 5, t) for t in range(100)]))
    assert bag(made.bags["liked"], 79) == [word_id(f"i{t % 7}") for t in range(79 - HISTORY_LENGTH, 79)]
    assert made.bags["liked"].lengths.max() == HISTORY_LENGTH


def test_movielens_100k_has_the_known_size_and_a_long_tail(samples: Samples) -> None:
    assert len(samples.labels) == 100_000
    assert samples.labels.mean() == pytest.approx(0.55375)
    assert np.bincount(samples.split).tolist() == [79_619, 9_942, 10_439]
    assert len(np.unique(samples.bags["user"].flat())) == 943
    assert len(np.unique(samples.bags["item"].flat())) == 1682
    visits = np.concatenate(
        [np.unique(samples.bags[f.name].flat(), return_counts=True)[1] for f in SCHEMA.features if f.name == f.table]
    )
    assert 40_000 < len(visits) < 50_000
    assert (visits <= 4).mean() > 0.45


def test_row_ids_do_not_collide(samples: Samples) -> None:
    user, item = samples.bags["user"].flat(), samples.bags["item"].flat()
    genre = samples.bags["genre"]
    pairs = np.stack([user[genre.owners()], genre.flat()], axis=1)
    assert len(np.unique(samples.bags["user_genre"].flat())) == len(np.unique(pairs, axis=0))
    triples = np.stack([item, samples.bags["age"].flat(), samples.bags["gender"].flat()], axis=1)
    assert len(np.unique(samples.bags["item_age_gender"].flat())) == len(np.unique(triples, axis=0))


def test_every_training_sample_is_read_once_in_each_data_pass_in_another_order() -> None:
    job = make_job(
        {
            "name": "a",
            "data": {"reader": "movielens"},
            "model": {"kind": "deepfm"},
            "trainer": {"batch_size": 4096, "data_passes": 2},
        }
    )
    reader = open_reader(job)
    steps = reader.steps_per_pass
    batches = [batch.dense.numpy() for batch in reader]
    first, second = np.concatenate(batches[:steps]), np.concatenate(batches[steps:])
    assert len(batches) == 2 * steps == reader.num_steps
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    unshuffled = make_job(job.model_dump(mode="json") | {"data": {"reader": "movielens", "shuffle": False}})
    in_order = np.concatenate([batch.dense.numpy() for batch in open_reader(unshuffled)])
    np.testing.assert_array_equal(in_order[: len(in_order) // 2], in_order[len(in_order) // 2 :])
