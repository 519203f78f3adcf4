from __future__ import annotations

import numpy as np
import pytest

from trainer.data.registry import open_reader
from trainer.data.synthetic import CHUNK_SAMPLES, SyntheticReader, planted_weights, zipf_ranks
from trainer.job import Job, make_job
from trainer.metrics import compute_metrics


def job_of(batch_size: int = 1024, **data: object) -> Job:
    return make_job(
        {
            "name": "a",
            "data": {"reader": "synthetic", **data},
            "model": {"kind": "deepfm"},
            "trainer": {"batch_size": batch_size},
        }
    )


@pytest.mark.parametrize(("exponent", "cardinality"), [(0.0, 10), (1.0, 50), (1.05, 1000), (1.5, 40)])
def test_ranks_follow_the_power_law(exponent: float, cardinality: int) -> None:
    uniform = (np.arange(400_000) + 0.5) / 400_000
    ranks = zipf_ranks(uniform, cardinality, exponent)
    assert ranks.min() == 0
    assert ranks.max() == cardinality - 1
    edges = np.arange(1, cardinality + 2, dtype=np.float64)
    integral = np.log(edges) if exponent == 1.0 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(integral) / (integral[-1] - integral[0])
    np.testing.assert_allclose(np.bincount(ranks, minlength=cardinality) / len(ranks), expected, atol=1e-5)


def test_the_ends_of_the_unit_interval_stay_inside() -> None:
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    for exponent in (0.0, 0.5, 1.0, 2.0, 4.0):
        assert zipf_ranks(ends, 2**40, exponent).tolist()[0] == 0
        assert zipf_ranks(ends, 3, exponent).tolist() == [0, 2]


def test_the_planted_model_explains_the_labels() -> None:
    job = job_of(num_samples=40_000, truth_scale=0.3, positive_rate=0.5)
    reader = open_reader(job)
    assert isinstance(reader, SyntheticReader)
    parts = [(batch.labels.numpy(), reader.planted_logits(batch)) for batch in reader]
    labels, logits = np.concatenate([y for y, _ in parts]), np.concatenate([z for _, z in parts])
    metrics = compute_metrics(labels, logits)
    assert metrics.auc > 0.75
    # calibrated: the labels' mean is that of the probabilities, and no shift or stretch of the logits does better
    assert labels.mean() == pytest.approx((1 / (1 + np.exp(-logits))).mean(), abs=0.01)
    for wrong in (logits + 0.2, logits * 0.8, logits * 1.2):
        assert compute_metrics(labels, wrong).logloss > metrics.logloss


def test_weights_of_ids_are_centred_and_differ_by_feature_and_seed() -> None:
    row_ids = np.arange(100_000)
    weights = planted_weights(row_ids, 0, 0)
    assert weights.mean() == pytest.approx(0.0, abs=0.02)
    assert weights.std() == pytest.approx(1.0, abs=0.02)
    assert abs(np.corrcoef(weights, planted_weights(row_ids, 1, 0))[0, 1]) < 0.02
    assert abs(np.corrcoef(weights, planted_weights(row_ids, 0, 1))[0, 1]) < 0.02


def test_bags_have_their_size_and_ids_stay_in_their_cardinality() -> None:
    job = job_of(num_samples=3000, num_features=3, hots=[2, 0, 1], cardinalities=[5, 9, 2], zipf_exponent=0.5)
    seen: list[set[int]] = [set(), set(), set()]
    for batch in open_reader(job):
        b = batch.num_samples
        assert batch.sparse.lengths().view(3, b)[:, 0].tolist() == [2, 0, 1]
        for f, values in enumerate(np.split(batch.sparse.values().numpy(), [2 * b, 2 * b])):
            seen[f] |= set(values.tolist())
    assert [len(ids) for ids in seen] == [5, 0, 2]
    assert not seen[0] & seen[2]


def test_samples_do_not_depend_on_the_batch_size() -> None:
    sizes = (CHUNK_SAMPLES - 1, CHUNK_SAMPLES, 3 * CHUNK_SAMPLES + 7)
    made = []
    for size in sizes:
        batches = list(open_reader(job_of(size, num_samples=2000)))
        made.append(np.concatenate([batch.dense.numpy() for batch in batches]))
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[0], made[2])


def test_splits_hold_other_samples_of_the_same_truth() -> None:
    job = job_of(num_samples=600, num_test_samples=600, num_validation_samples=10)
    train, test = (next(iter(open_reader(job, split))) for split in ("train", "test"))  # type: ignore[arg-type]
    assert not np.array_equal(train.dense.numpy(), test.dense.numpy())
    shared = set(train.sparse.values().tolist()) & set(test.sparse.values().tolist())
    assert shared
