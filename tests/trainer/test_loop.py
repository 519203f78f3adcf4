"""The loop in this process, on an InprocStore and a stream whose truth is planted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.store import EmbeddingStore, Identity
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker, train
from trainer.report import ArmSummary, Progress
from trainer.run import build_run
from trainer.run_log import RunLog

BASE = {
    "name": "planted",
    "seed": 3,
    "data": {
        "reader": "synthetic",
        "num_samples": 6000,
        "num_test_samples": 2000,
        "num_features": 3,
        "num_dense": 2,
        "cardinalities": [60],
        "truth_scale": 1.5,
    },
    "model": {"kind": "dlrm", "dense_layers": [16, 8], "over_layers": [16, 1]},
    "embedding": {
        "dim": 8,
        "learning_rate": {"base": 0.2},
        "policy": "off",
        "advanced": {"reselect_every_samples": 1280},
    },
    "trainer": {
        "batch_size": 128,
        "precision": "float32",
        "dense_optimizer": {"learning_rate": {"base": 0.01}},
    },
    "servers": {"store": "inproc"},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job_with(**sections) -> Job:
    raw = dict(BASE)
    for name, values in sections.items():
        raw[name] = {**BASE.get(name, {}), **values}
    return make_job(raw)


def run(job: Job, folder, store: EmbeddingStore | None = None) -> tuple[ArmSummary, list[Progress]]:
    shown: list[Progress] = []
    own = store or InprocStore(memory_limit_bytes=256 << 20)
    try:
        return run_worker(job, "main", own, Group(), folder, shown.append), shown
    finally:
        if store is None:
            own.close()


def test_it_learns_the_planted_truth_and_sums_up(tmp_path):
    summary, shown = run(job_with(trainer={"data_passes": 4}), tmp_path)
    assert summary.test_auc is not None
    assert summary.test_auc > 0.82
    assert summary.test_logloss is not None
    assert summary.test_logloss < 0.5
    assert (summary.rows_hot, summary.rows_frozen) == (180, 0)
    assert summary.rows_pushed > 0
    assert summary.bytes_total == sum(
        (summary.bytes_hot, summary.bytes_state, summary.bytes_frozen, summary.bytes_index, summary.bytes_heat)
    )
    assert summary.samples_per_s > 0
    assert (shown[-1].step, shown[-1].total_steps) == (188, 188)
    assert shown[-1].auc > 0.75
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_run_is_a_function_of_its_seed(mode, tmp_path):
    first, _ = run(job_with(trainer={"mode": mode}), tmp_path)
    second, _ = run(job_with(trainer={"mode": mode}), tmp_path)
    assert first.test_logloss == second.test_logloss
    assert first.rows_pushed == second.rows_pushed


def test_one_step_of_staleness_costs_little(tmp_path):
    sync, _ = run(job_with(trainer={"mode": "sync", "data_passes": 2}), tmp_path)
    pipelined, _ = run(job_with(trainer={"mode": "pipelined", "data_passes": 2}), tmp_path)
    assert sync.test_auc == pytest.approx(pipelined.test_auc, abs=0.01)
    assert sync.test_auc != pipelined.test_auc


class Recorder(InprocStore):
    """Notes the steps of pulls, pushes and re-selections in the order in which they end."""

    def __init__(self) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self.log: list[tuple[str, int]] = []

    def pull(self, who: Identity, step, ids):
        rows = super().pull(who, step, ids)
        self.log.append(("pull", step))
        return rows

    def push(self, who: Identity, step, gradients):
        ack = super().push(who, step, gradients)
        self.log.append(("push", step))
        return ack

    def reselect(self, who: Identity, step, frostlines):
        moves = super().reselect(who, step, frostlines)
        self.log.append(("reselect", step))
        return moves


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_rows_are_reselected_between_a_push_and_the_next_pull(mode, tmp_path):
    job = job_with(
        data={"cardinalities": [3000]}, embedding={"policy": "idle", "idle_samples": 1280}, trainer={"mode": mode}
    )
    store = Recorder()
    summary, _ = run(job, tmp_path, store)
    reselections = [step for what, step in store.log if what == "reselect"]
    assert reselections == [10, 20, 30, 40]
    for step in reselections:
        at = store.log.index(("reselect", step))
        assert ("push", step) in store.log[:at]
        assert ("pull", step + 1) in store.log[at:]
    assert summary.rows_frozen > 0
    store.close()


def test_topk_trains_a_share_of_the_rows_and_pushes_fewer_gradients(tmp_path):
    data = {"cardinalities": [3000]}
    advanced = {"probation_visits": 0, "reselect_every_samples": 1280}
    full, _ = run(job_with(data=data), tmp_path)
    topk, _ = run(
        job_with(data=data, embedding={"policy": "topk", "hot_fraction": 0.2, "advanced": advanced}), tmp_path
    )
    assert topk.rows_frozen > topk.rows_hot
    assert topk.rows_pushed < 0.9 * full.rows_pushed
    assert topk.rows_hot + topk.rows_frozen == full.rows_hot


def test_max_steps_ends_the_run(tmp_path):
    store = Recorder()
    run(job_with(trainer={"max_steps": 5}), tmp_path, store)
    assert [step for what, step in store.log if what == "push"] == [1, 2, 3, 4, 5]
    assert max(step for _, step in store.log) == 5
    store.close()


def test_a_second_run_of_the_job_goes_on_counting_on_the_same_shards(tmp_path):
    store = Recorder()
    job = job_with(trainer={"max_steps": 3}, embedding={"policy": "idle"})
    run(job, tmp_path, store)
    run(job, tmp_path, store)
    assert [step for what, step in store.log if what == "push"] == [1, 2, 3, 4, 5, 6]
    store.close()


def test_validation_scores_go_to_tensorboard_and_not_into_the_training_clock(tmp_path, monkeypatch):
    scores = []
    monkeypatch.setattr(RunLog, "scores", lambda self, split, metrics: scores.append((split, self._step)))
    run(job_with(data={"num_validation_samples": 500}, trainer={"validate_every_samples": 2560}), tmp_path)
    assert [entry for entry in scores if entry[0] == "validation"] == [("validation", 20), ("validation", 40)]
    assert scores[-1] == ("test", 47)


def test_without_test_samples_there_are_no_test_metrics(tmp_path):
    summary, _ = run(job_with(data={"num_test_samples": 0}, trainer={"max_steps": 2}), tmp_path)
    assert (summary.test_auc, summary.test_logloss, summary.test_ne) == (None, None, None)


def test_evaluation_is_not_a_visit(tmp_path):
    """Look-ups of test samples neither make rows nor change the traffic of training."""
    with_test, _ = run(job_with(trainer={"max_steps": 4}), tmp_path)
    without, _ = run(job_with(data={"num_test_samples": 0}, trainer={"max_steps": 4}), tmp_path)
    assert with_test.rows_hot == without.rows_hot
    assert with_test.rows_pushed == without.rows_pushed


def test_schedules_move_both_learning_rates(tmp_path):
    rates = {"base": 0.1, "warmup_samples": 256, "decay": "linear"}
    job = job_with(
        embedding={"learning_rate": rates},
        trainer={"dense_optimizer": {"learning_rate": rates, "kind": "sgd"}, "max_steps": 10},
    )
    store = InprocStore(memory_limit_bytes=256 << 20)
    run_parts = build_run(job, store, Group())
    assert [round(run_parts.row_rate.at(step), 4) for step in (1, 2, 6, 10)] == [0.05, 0.1, 0.05, 0.0]
    with RunLog("main", 10, None, lambda progress: None) as log:
        train(run_parts, log)
    assert run_parts.optimizer.param_groups[0]["lr"] == 0.0
    store.close()


def test_a_decay_without_an_end_is_refused_with_its_key(tmp_path):
    path = tmp_path / "samples.tsv"
    path.write_text("1\t" + "\t".join(["3"] * 13 + ["0a1b2c3d"] * 26) + "\n")
    job = make_job(
        {
            **BASE,
            "data": {"reader": "criteo_tsv", "train": [str(path)]},
            "embedding": {"dim": 8, "learning_rate": {"base": 0.1, "decay": "linear"}},
        }
    )
    with pytest.raises(InvalidInput, match=r"embedding\.learning_rate: .*decay_samples"):
        run(job, tmp_path / "run")


def test_a_reader_error_reaches_the_caller(tmp_path):
    path = tmp_path / "broken.tsv"
    path.write_text("not a sample\n")
    job = make_job({**BASE, "data": {"reader": "criteo_tsv", "train": [str(path)]}})
    with pytest.raises(ValueError, match=r"broken.tsv"):
        run(job, tmp_path / "run")


def test_gathering_on_one_worker_is_the_identity():
    group = Group()
    values = np.array([1.0, 2.0], np.float32)
    assert group.gather(values) is values
    assert group.sums([1, 2]) == [1, 2]
    assert group.from_first(7) == 7
