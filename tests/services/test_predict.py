"""A snapshot scores examples as the training that left it does: in process, over gRPC, and by the commands; dense
layers and rows of one version, also while versions are swapped."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.served_snapshot import ServedSnapshot
from embedding_server.served_versions import Versions
from services.cli import app
from services.following import Follower
from services.model_client import ModelClient
from services.served_model import ServedModel, ServeWhat
from services.snapshot_server import SnapshotServer
from tests.services.served_cuts import wait_until
from trainer.data.batch import Batch
from trainer.data.registry import open_reader, schema_of
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker
from trainer.metrics import Metrics
from trainer.scoring import Bags, ScoringModel
from trainer.snapshots import cuts_in, job_folder, newest_complete

KINDS: dict[str, dict[str, Any]] = {
    "dlrm": {"kind": "dlrm", "dense_layers": [16, 8], "over_layers": [16, 1]},
    "dlrm_dcn": {"kind": "dlrm_dcn", "dense_layers": [16, 8], "over_layers": [16, 1], "dcn_layers": 2, "dcn_rank": 4},
    "deepfm": {"kind": "deepfm", "hidden_width": 8, "fm_dim": 4},
}
BATCH = 50


def job_of(uri: Path, kind: str, **more: Any) -> Job:
    return make_job(
        {
            "name": "scored",
            "seed": 5,
            "data": {
                "reader": "synthetic",
                "num_samples": 60 * BATCH,
                "num_test_samples": 301,
                "num_features": 3,
                "num_dense": 2,
                "cardinalities": [2000],
                "truth_scale": 1.5,
            },
            "model": KINDS[kind],
            "embedding": {
                "dim": 8,
                "learning_rate": {"base": 0.1},
                "policy": "idle",
                "idle_samples": 15 * BATCH,
                "frozen_bits": 8,
                "min_count": 2,
                "advanced": {"reselect_every_samples": 7 * BATCH},
            },
            "trainer": {"batch_size": BATCH, "threads": 1, "precision": "float32", "mode": "sync"},
            "servers": {"store": "inproc"},
            "snapshots": {"uri": str(uri), "every_samples": 15 * BATCH, "keep": 9, "on_finish": True},
            **more,
        }
    )


def train(job: Job, folder: Path) -> tuple[Path, Metrics]:
    """(the cut at the end, what the training says of the test split)."""
    store = InprocStore(memory_limit_bytes=256 << 20)
    try:
        summary = run_worker(job, "main", store, Group(), folder, lambda progress: None)
    finally:
        store.close()
    assert job.snapshots is not None and summary.test_auc is not None
    cut = newest_complete(job_folder(job.snapshots.uri, job.name))
    assert cut is not None
    return cut, Metrics(summary.test_auc, summary.test_logloss, summary.test_ne, 301)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Job, Path, Metrics]:
    folder = tmp_path_factory.mktemp("scored")
    job = job_of(folder / "uri", "dlrm")
    return job, *train(job, folder / "run")


def bags_of(batch: Batch) -> dict[str, Bags]:
    return {
        name: Bags(of_key.values().numpy(), of_key.lengths().numpy()) for name, of_key in batch.sparse.to_dict().items()
    }


def batches_of_test(job: Job) -> list[Batch]:
    return list(open_reader(job, "test"))


def offline_scores(cut: Path, batch: Batch) -> np.ndarray:
    rows = ServedSnapshot(cut)
    try:
        return ScoringModel(cut, rows).score(batch.dense.numpy(), bags_of(batch))
    finally:
        rows.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_evaluates_to_what_its_training_said(kind: str, tmp_path: Path) -> None:
    cut, expected = train(job_of(tmp_path / "uri", kind), tmp_path / "run")
    rows = ServedSnapshot(cut)
    model = ScoringModel(cut, rows)
    assert model.evaluate(open_reader(model.job, "test")) == expected
    assert np.isfinite(expected.auc)
    rows.close()


def test_predict_over_grpc_equals_the_model_and_names_its_version(trained) -> None:
    job, cut, _ = trained
    server = SnapshotServer(Versions(ServedModel(cut, ServeWhat())))
    client = ModelClient(server.start())
    try:
        described = client.describe()
        schema = schema_of(job)
        assert list(described.dense) == list(schema.dense) and not described.no_model
        assert [(f.name, f.table) for f in described.features] == [(f.name, f.table) for f in schema.features]
        for batch in batches_of_test(job):
            bags = {name: (of.row_ids, of.lengths) for name, of in bags_of(batch).items()}
            got = client.predict(batch.dense.numpy(), dict(reversed(bags.items())))
            assert np.array_equal(got.scores, offline_scores(cut, batch))
            assert got.version.snapshot_id == cut.name
        assert ((got.scores > 0) & (got.scores < 1)).all()
        _unknown_empty_and_wrong(client, schema.feature_names)
    finally:
        client.close()
        server.stop(0.5)


def _unknown_empty_and_wrong(client: ModelClient, names: list[str]) -> None:
    no_bags = {name: (np.empty(0, np.int64), np.zeros(1, np.int32)) for name in names}
    dense = np.zeros((1, 2), np.float32)
    unknown = {name: (np.array([-(2**63)]), np.ones(1, np.int32)) for name in names}
    assert client.predict(dense, no_bags).scores.shape == client.predict(dense, unknown).scores.shape == (1,)
    none = {name: (np.empty(0, np.int64), np.empty(0, np.int32)) for name in names}
    assert client.predict(np.zeros((0, 2), np.float32), none).scores.shape == (0,)
    wrong: list[tuple[np.ndarray, dict, str]] = [
        (np.zeros((1, 3), np.float32), no_bags, "dense has 12 bytes, and must have 8"),
        (np.full((1, 2), np.nan, np.float32), no_bags, "is not finite"),
        (dense, {names[0]: no_bags[names[0]]}, "is missing"),
        (dense, {**no_bags, "cat_O": no_bags[names[0]]}, "has no feature 'cat_O'"),
        (dense, {**no_bags, names[1]: (np.arange(3), np.array([2], np.int32))}, "add up to its 3"),
        (dense, {**no_bags, names[1]: (np.arange(3), np.array([-3], np.int32))}, "must be 0 or more"),
        (dense, {**no_bags, names[1]: (np.arange(3), np.array([1, 2], np.int32))}, "lengths has 16 bytes"),
    ]
    for of_dense, bags, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            client.predict(of_dense, bags)


def test_the_commands_evaluate_and_write_scores(trained, tmp_path: Path) -> None:
    job, cut, expected = trained
    done = CliRunner().invoke(app, ["evaluate", str(cut.parent), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["snapshot"], found["auc"], found["logloss"]) == (cut.name, expected.auc, expected.logloss)
    out = tmp_path / "scores.parquet"
    done = CliRunner().invoke(app, ["predict", str(cut), str(out), "--json"])
    assert done.exit_code == 0, done.output
    table = pq.read_table(out)
    batches = batches_of_test(job)
    assert np.array_equal(table["label"].to_numpy(), np.concatenate([b.labels.numpy() for b in batches]))
    assert np.array_equal(table["score"].to_numpy(), np.concatenate([offline_scores(cut, b) for b in batches]))
    assert CliRunner().invoke(app, ["predict", str(cut), str(out)]).exit_code == 2  # it is there
    assert CliRunner().invoke(app, ["evaluate", str(cut), "validation"]).exit_code == 2  # the job has none
    more = ["evaluate", str(cut), "--set", "data.num_test_samples=100", "--json"]
    assert json.loads(CliRunner().invoke(app, more).stdout)["num_samples"] == 100


def test_scores_are_of_one_version_while_versions_are_swapped(trained, tmp_path: Path) -> None:
    """Each reply equals what the snapshot that it names scores offline."""
    _, last, _ = trained
    names = [name.folder for name in cuts_in(last.parent)]
    assert len(names) >= 3
    batch = batches_of_test(trained[0])[0]
    expected = {name: offline_scores(last.parent / name, batch) for name in names}
    assert len({scores.tobytes() for scores in expected.values()}) == len(names)
    job = tmp_path / "job"
    job.mkdir()
    shutil.copytree(last.parent / "objects", job / "objects")
    shutil.copytree(last.parent / names[0], job / names[0])
    follower = Follower(job, ServeWhat(), poll_s=0.02)
    versions = follower.begin(threading.Event())
    assert versions is not None
    server = SnapshotServer(versions, follower)
    client = ModelClient(server.start())
    bags = {name: (of.row_ids, of.lengths) for name, of in bags_of(batch).items()}
    seen: list[str] = []

    def check() -> None:
        got = client.predict(batch.dense.numpy(), bags)
        seen.append(got.version.snapshot_id)
        assert np.array_equal(got.scores, expected[got.version.snapshot_id]), seen[-1]

    try:
        check()
        for name in names[1:]:
            shutil.copytree(last.parent / name, tmp_path / name)
            (tmp_path / name).rename(job / name)
            wait_until(lambda name=name: check() or follower.state.served_id == name)
            check()
        assert list(dict.fromkeys(seen)) == names
        assert client.choose(names[0]).snapshot_id == names[0]
        check()
        assert seen[-1] == names[0]
    finally:
        client.close()
        server.stop(0.5)


def test_a_factory_is_imported_only_if_it_was_named(tmp_path: Path) -> None:
    kind = "tests.trainer.test_resume:with_dropout"
    cut, expected = train(job_of(tmp_path / "uri", "dlrm", model={"kind": kind}), tmp_path / "run")
    rows = ServedSnapshot(cut)
    with pytest.raises(InvalidInput, match=f"--factory {kind}"):
        ScoringModel(cut, rows)
    model = ScoringModel(cut, rows, [kind])
    assert model.evaluate(open_reader(model.job, "test")) == expected
    rows.close()
    served = ServedModel(cut, ServeWhat())
    assert not served.has_model and "--factory" in served.no_model and served.snapshot.num_rows > 0
    served.close()
