"""Kernels of a cut against plain numpy and dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.index import FROZEN_BIT, Index
from embedding_server.kernels.cut_rows import ABSENT, columns_of, copy_rows, order_rows, survey
from embedding_server.kernels.hashing import buckets_of
from embedding_server.store import NUM_BUCKETS


def index_of(row_ids: np.ndarray, locations: np.ndarray, heat: np.ndarray) -> Index:
    index = Index(NUM_BUCKETS)
    entries, _, _ = index.insert(row_ids, locations)
    index.set_heat(entries, heat)
    return index


@pytest.mark.parametrize("first", [0, 300, NUM_BUCKETS])
def test_survey_names_what_has_no_pre_image_and_what_the_table_says_of_it(first: int) -> None:
    rng = np.random.default_rng(first)
    known = rng.choice(10_000, 800, replace=False) - 5_000
    locations = rng.integers(0, 1000, 800).astype(np.uint32)
    locations[::3] |= FROZEN_BIT
    heat = rng.integers(0, 60_000, 800).astype(np.uint16)
    logged = np.concatenate([known[:200], np.array([99_999])])
    table, log = index_of(known, locations, heat), index_of(logged, np.zeros(201, np.uint32), np.zeros(201, np.uint16))
    asked = np.concatenate([rng.permutation(known), np.array([99_999, -(2**63), 2**63 - 1, 123_456])])
    out = np.empty(804, np.int64), np.empty(804, np.uint32), np.empty(804, np.uint16), np.empty(804, np.int32)
    n, hot = survey(*table.directory(), *log.directory(), asked, first, *out)
    says = dict(zip(known.tolist(), zip(locations.tolist(), heat.tolist(), strict=True), strict=True))
    wanted = [
        (row_id, *says.get(row_id, (int(ABSENT), 0)))
        for row_id, bucket in zip(asked.tolist(), buckets_of(asked, NUM_BUCKETS).tolist(), strict=True)
        if bucket >= first and row_id not in set(logged.tolist())
    ]
    assert list(zip(*(array[:n].tolist() for array in out[:3]), strict=True)) == wanted
    of_hot = [location for _, location, _ in wanted if location != ABSENT and not location & FROZEN_BIT]
    assert out[3][:hot].tolist() == of_hot


def test_copied_rows_are_what_indices_copy() -> None:
    rng = np.random.default_rng(0)
    shapes = [((50, 12), np.float32), ((50, 4), np.float16), ((50, 1), np.float32), ((50, 0), np.float32)]
    shapes += [((50, 1), np.int32), ((50, 1), np.uint8), ((50, 200), np.float32)]
    sources = [rng.integers(0, 200, shape).astype(dtype) for shape, dtype in shapes]
    targets = [rng.integers(0, 200, (70, *source.shape[1:])).astype(source.dtype) for source in sources]
    wanted = [target.copy() for target in targets]
    slots = rng.integers(0, 50, 40).astype(np.int32)
    positions = rng.choice(70, 40, replace=False).astype(np.int32)
    copy_rows(columns_of(sources, targets), slots, positions)
    for target, expected, source in zip(targets, wanted, sources, strict=True):
        expected[positions] = source[slots]
        assert target.tobytes() == expected.tobytes()


def test_rows_are_ordered_by_bucket_and_the_written_ones_first() -> None:
    rng = np.random.default_rng(0)
    row_ids = rng.integers(-(2**62), 2**62, 20_000)
    buckets = buckets_of(row_ids, NUM_BUCKETS)
    row_ids, buckets = row_ids[(buckets >= 100) & (buckets < 300)], buckets[(buckets >= 100) & (buckets < 300)]
    is_written = rng.random(row_ids.shape[0]) < 0.3
    order, of_ordered = np.empty((2, row_ids.shape[0]), np.int64)
    order_rows(row_ids, is_written, 100, 300, order, of_ordered)
    assert np.array_equal(order, np.argsort(2 * buckets + ~is_written, kind="stable"))
    assert np.array_equal(of_ordered, buckets[order])
