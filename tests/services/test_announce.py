"""A job over gRPC that announces its batches: the shards get the hints, and the rows are the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedding_server.kernels.routing import dedup_route
from embedding_server.page_reads import PageReads
from embedding_server.shard import Shard
from embedding_server.store import RoutedIds
from services.shard_client import RemoteStore
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker

Serve = Callable[..., list[str]]


def job_of(mode: str, announces: bool) -> Job:
    return make_job(
        {
            "name": "announced",
            "seed": 3,
            "data": {
                "reader": "synthetic",
                "num_samples": 6000,
                "num_test_samples": 500,
                "num_dense": 1,
                "num_features": 2,
                "cardinalities": [3000, 40],
            },
            "model": {"kind": "deepfm", "hidden_width": 8, "fm_dim": 4},
            "embedding": {"dim": 8, "idle_samples": 640, "advanced": {"reselect_every_samples": 1280}},
            "trainer": {"batch_size": 128, "mode": mode, "prefetch_frozen": announces, "precision": "float32"},
            "servers": {"num_shards": 2},
        }
    )


def rows_of(store: RemoteStore, table: str) -> np.ndarray:
    routed = dedup_route(np.arange(3000), store.shard_of_bucket, store.num_shards)
    rows = store.lookup({table: RoutedIds(routed.unique, routed.shard_offsets.reshape(-1))})[table]
    return np.concatenate([rows.values.view(np.uint8), rows.flags[:, None]], axis=1)[np.argsort(routed.unique)]


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_job_over_grpc_is_the_same_with_and_without(mode: str, serve: Serve, tmp_path: Path, monkeypatch) -> None:
    hints: list[int] = []
    find_pages = Shard.find_pages

    def noting(self: Shard, ids) -> PageReads:
        hints.append(sum(row_ids.size for row_ids in ids.values()))
        return find_pages(self, ids)

    monkeypatch.setattr(Shard, "find_pages", noting)
    found = {}
    for announces in (False, True):
        hints.clear()
        store = RemoteStore(serve(2))
        summary = run_worker(job_of(mode, announces), "main", store, Group(), tmp_path, lambda progress: None)
        assert summary.rows_frozen > 0
        # 47 steps; a hint is dropped while four are under way to its shard, which a busy machine makes of many
        assert 10 < len(hints) <= 2 * 47 if announces else not hints
        assert all(hints)
        found[announces] = (summary.test_logloss, rows_of(store, "cat_0").tobytes(), rows_of(store, "cat_1").tobytes())
        store.close()
    assert found[True] == found[False]


def test_shards_that_refuse_every_hint_fail_nothing(serve: Serve, tmp_path: Path, monkeypatch) -> None:
    def fail(self: Shard, ids) -> None:
        raise OSError("disk")

    monkeypatch.setattr(Shard, "find_pages", fail)
    store = RemoteStore(serve(2))
    summary = run_worker(job_of("pipelined", True), "main", store, Group(), tmp_path, lambda progress: None)
    assert summary.rows_frozen > 0
    store.close()
