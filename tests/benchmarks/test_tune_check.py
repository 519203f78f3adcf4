from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality.samples import stream_spec
from benchmarks.quality.stream import PlantedStream
from benchmarks.tune_check import job_of, missed, write_stream
from trainer.data.registry import open_reader

SHARE = 0.005


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "s1.parquet"
    return job_of(path, write_stream(path, SHARE, seed=3), dim=8, seed=3)


def test_the_file_holds_the_stream_in_its_order(job):
    spec = stream_spec("S1", SHARE)
    samples = PlantedStream(spec, 3).train(0, spec.num_train)
    batches = list(open_reader(job))
    np.testing.assert_array_equal(np.concatenate([b.labels.numpy() for b in batches]), samples.labels)
    first = batches[0].sparse.to_dict()["field_2"].values().numpy()
    np.testing.assert_array_equal(first, samples.row_ids[2, : len(first)])


def test_broken_promises_are_named():
    good = {"bytes_total_error": 0.1, "bytes_peak_error": -0.1}
    document = {
        "tune": {"bytes_over_best": 0.04},
        "estimate": {"idle": {"whole": good, "sampled": good}, "off": {"whole": good, "sampled": good}},
    }
    assert missed(document) == []
    document["tune"]["bytes_over_best"] = 0.2
    document["estimate"]["off"]["sampled"] = {**good, "bytes_peak_error": -0.3}
    assert missed(document) == ["tune: +20.0% over the best", "estimate (sampled) of off: bytes_peak -30.0%"]
