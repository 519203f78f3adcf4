"""The reports of a run, through the real loop and an in-process store."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from embedding_server.inproc import InprocStore
from embedding_server.store import Frostline, Identity
from trainer.control_group import Difference
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker, train
from trainer.run import build_run
from trainer.run_log import RunLog
from trainer.watch import Watch, frostline_heat

MEMORY_BYTES = 256 << 20


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job_with(policy: str, **advanced: object) -> Job:
    return make_job(
        {
            "name": "watched",
            "seed": 3,
            "data": {
                "reader": "synthetic",
                "num_samples": 3000,
                "num_test_samples": 0,
                "num_features": 2,
                "num_dense": 2,
                "cardinalities": [500],
            },
            "model": {"kind": "dlrm", "dense_layers": [8, 4], "over_layers": [8, 1]},
            "embedding": {
                "dim": 4,
                "policy": policy,
                "hot_fraction": 0.2,
                "idle_samples": 200,
                "advanced": {"reselect_every_samples": 500, "control_fraction": 0.1, "probation_visits": 0, **advanced},
            },
            "trainer": {"batch_size": 100, "precision": "float32"},
            "servers": {"store": "inproc"},
        }
    )


class Store(InprocStore):
    """Notes the ends of data passes."""

    def __init__(self) -> None:
        super().__init__(memory_limit_bytes=MEMORY_BYTES)
        self.ends: list[int] = []
        self.pulled = 0

    def pull(self, who, step, ids):
        self.pulled = step
        return super().pull(who, step, ids)

    def end_data_pass(self, who: Identity, step: int):
        assert self.pulled == step  # nobody has pulled ahead
        self.ends.append(step)
        return super().end_data_pass(who, step)


def test_mask_info_says_what_the_store_holds_and_what_was_sent(tmp_path):
    store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
    summary = run_worker(job_with("topk"), "main", store, Group(), tmp_path, lambda progress: None)
    document = json.loads((tmp_path / "mask_info.json").read_text())
    stats, wire = store.stats(), store.wire_stats
    store.close()
    assert (document["job"], document["arm"], document["step"], document["samples"]) == ("watched", "main", 30, 3000)
    assert set(document["tables"]) == set(stats.tables)
    for name, table in stats.tables.items():
        assert document["tables"][name]["rows"]["hot"] == table.rows_hot
        assert document["tables"][name]["rows"]["frozen"] == table.rows_frozen > 0
        assert document["tables"][name]["moves"]["frozen"] == table.moves_frozen
        assert document["tables"][name]["policy"]["hot_fraction"] == 0.2
    traffic = document["total"]["traffic"]
    assert traffic["gradient_rows"] == wire.rows_pushed
    assert traffic["rows_pulled"] == wire.rows_pulled
    assert traffic["gradient_rows_saved"] == wire.rows_pulled - wire.rows_pushed > 0
    assert traffic["bytes_push_saved"] == traffic["gradient_rows_saved"] * (8 + 4 * 4)
    assert summary.mask_info == document
    assert summary.rows_push_saved == traffic["gradient_rows_saved"]


def test_the_board_has_scalars_and_histograms_of_the_mask(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
    run_worker(job_with("idle"), "main", store, Group(), tmp_path, lambda progress: None)
    table = next(iter(store.table_specs()))
    rows_hot, counted = store.stats().tables[table].rows_hot, store.mask_info()[table].heat_counts_hot.sum()
    store.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    scalars = board.Tags()["scalars"]
    for tag in ("rows/hot", "bytes/peak", "moves/frozen_idle", "traffic/gradient_rows_saved"):
        assert tag in scalars
    assert board.Scalars(f"table_{table}/rows_hot")[-1].value == rows_hot
    assert board.Scalars("rows/hot")[-1].step == 30
    if counted:
        assert f"table_{table}/log2_heat_hot" in board.Tags()["histograms"]


def test_nothing_is_reported_of_the_control_group_before_the_first_reselection(tmp_path):
    store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
    run_parts = build_run(job_with("off"), store, Group())
    with RunLog("main", 30, tmp_path, lambda progress: None) as log:
        train(run_parts, log)
        document = run_parts.watch.report(30, log, is_last=True)
    store.close()
    assert document is not None
    assert all(table["control"] is None for table in document["tables"].values())


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_the_store_is_told_the_end_of_every_pass(mode, tmp_path):
    store = Store()
    job = job_with("idle", epoch_end="forget_rare")
    job = make_job({**job.model_dump(mode="json"), "trainer": {"batch_size": 128, "data_passes": 3, "mode": mode}})
    run_worker(job, "main", store, Group(), tmp_path, lambda progress: None)
    store.close()
    assert store.ends == [24, 48, 72]


def test_rare_rows_are_forgotten_at_the_end_of_a_pass_but_for_the_control_group(tmp_path):
    found = {}
    for epoch_end in ("keep", "forget_rare"):
        store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
        job = job_with("idle", epoch_end=epoch_end)
        found[epoch_end] = run_worker(job, epoch_end, store, Group(), tmp_path, lambda progress: None)
        store.close()
    kept, left = found["keep"], found["forget_rare"]
    before, after = (summary.mask_info["total"]["rows"] for summary in (kept, left))
    moves = left.mask_info["total"]["moves"]
    assert moves["forgotten"] > 100
    assert after["hot"] + after["frozen"] == before["hot"] + before["frozen"] - moves["forgotten"]
    assert left.bytes_peak >= left.bytes_total > 0


def test_a_pass_that_is_cut_short_has_no_end(tmp_path):
    store = Store()
    job = job_with("idle", epoch_end="forget_rare")
    job = make_job({**job.model_dump(mode="json"), "trainer": {"batch_size": 100, "data_passes": 2, "max_steps": 40}})
    run_worker(job, "main", store, Group(), tmp_path, lambda progress: None)
    store.close()
    assert store.ends == [30]


def test_without_tables_that_forget_no_pass_ends(tmp_path):
    store = Store()
    run_worker(job_with("idle"), "main", store, Group(), tmp_path, lambda progress: None)
    store.close()
    assert store.ends == []


@pytest.fixture
def watch():
    store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
    run_parts = build_run(job_with("idle", max_loss=0.01), store, Group())
    yield run_parts.watch
    store.close()


def test_an_event_is_raised_when_the_lower_bound_passes_max_loss_and_not_again_until_it_fell(
    watch: Watch, tmp_path, monkeypatch
):
    table = next(iter(watch._specs))
    bad = Difference(0.03, 0.02, 0.04, 100, 5000)
    fine = replace(bad, low=0.005)
    shown = []
    with RunLog("main", 30, tmp_path, shown.append) as log:
        for difference, events in [(fine, 0), (bad, 1), (bad, 1), (fine, 1), (bad, 2)]:
            monkeypatch.setattr(watch, "_differences", lambda difference=difference: {table: difference})
            document = watch.report(7, log, is_last=True)
            assert document is not None
            assert len(log.events) == events == len(document["events"])
            assert document["tables"][table]["control"]["is_alarm"] is (difference is bad)
    assert [bool(progress.note) for progress in shown] == [True, True]
    for part in (repr(table), "0.0300", "0.0200 to 0.0400", "max_loss is 0.01", "raise idle_samples"):
        assert part in shown[0].note


def test_reports_take_at_most_a_hundredth_of_the_time(watch: Watch, tmp_path, monkeypatch):
    clock = iter(np.arange(0.0, 1000.0, 1.0))  # a report asks twice, so it takes a second
    monkeypatch.setattr("trainer.watch.time.perf_counter", lambda: float(next(clock)))
    with RunLog("main", 30, tmp_path, lambda progress: None) as log:
        made = [watch.report(step, log) is not None for step in range(1, 220)]
    assert made[0]
    assert np.flatnonzero(made).tolist() == [0, 100, 200]


def test_the_control_group_counts_look_ups_after_the_first_reselection(tmp_path):
    store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
    run_parts = build_run(job_with("idle"), store, Group())
    with RunLog("main", 30, tmp_path, lambda progress: None) as log:
        train(run_parts, log)
    control = run_parts.watch._control
    store.close()
    assert control is not None
    assert control.all_sums[..., 2].sum() == 2 * 100 * (30 - 5)  # two tables, a look-up a sample, all rows are found
    share = control.all_sums[0, :, control.is_control[next(iter(control.is_control))], 2].sum() / (100 * 25)
    assert 0.01 < share < 0.4


def test_a_frostline_as_heat():
    assert frostline_heat(Frostline(-1), 100, 10.0) == 0.0
    assert frostline_heat(Frostline(1024), 0, 10.0) == pytest.approx(1.0)  # code 16384: one visit now
    assert frostline_heat(Frostline(1024 + 64), 0, 10.0) == pytest.approx(2.0)


def rows_that_matter(policy: str, **advanced: object) -> Job:
    """Labels follow from the row_ids, and rows learn fast: one that does not train costs much."""
    return make_job(
        {
            **job_with(policy).model_dump(mode="json"),
            "data": {
                "reader": "synthetic",
                "num_samples": 20_000,
                "num_test_samples": 0,
                "num_features": 1,
                "num_dense": 1,
                "cardinalities": [1500],
                "truth_scale": 2.5,
            },
            "embedding": {
                "dim": 8,
                "policy": policy,
                "hot_fraction": 0.05,
                "idle_samples": 2000,
                "learning_rate": {"base": 0.1},
                "advanced": {
                    "reselect_every_samples": 1000,
                    "control_fraction": 0.2,
                    "initial_accumulator": 1e-5,
                    **advanced,
                },
            },
            "model": {"kind": "dlrm", "dense_layers": [8, 8], "over_layers": [8, 1]},
            "trainer": {
                "batch_size": 100,
                "precision": "float32",
                "dense_optimizer": {"learning_rate": {"base": 0.01}},
            },
        }
    )


def test_freezing_rows_that_are_needed_raises_an_event_and_freezing_idle_rows_does_not(tmp_path):
    found = {}
    for policy in ("topk", "idle"):
        store = InprocStore(memory_limit_bytes=MEMORY_BYTES)
        job = rows_that_matter(policy, probation_visits=0, resume=False)
        found[policy] = run_worker(job, policy, store, Group(), tmp_path, lambda progress: None).mask_info
        store.close()
    hurt, spared = (found[policy]["tables"]["cat_0"] for policy in ("topk", "idle"))
    assert hurt["control"]["is_alarm"]
    assert hurt["control"]["low"] > 0.03
    assert [event for event in found["topk"]["events"] if "max_loss" in event]
    assert spared["rows"]["frozen"] > 300
    assert spared["control"]["low"] < 0.002 < spared["control"]["high"]
    assert not [event for event in found["idle"]["events"] if "max_loss" in event]
