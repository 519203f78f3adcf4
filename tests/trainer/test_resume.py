"""A run that ends anywhere and is resumed from its last cut ends as if it had never stopped: dense and sparse, bit for
bit."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embedding_server.errors import InvalidInput, SegmentCorrupt, StoreUnavailable
from embedding_server.inproc import InprocStore
from embedding_server.store import EmbeddingStore, Identity, RoutedIds, TableStats
from trainer.data.registry import open_reader
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker, train
from trainer.report import ArmSummary
from trainer.run import build_run
from trainer.run_log import RunLog
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import CutName, chain_of, cuts_in, job_folder, read_manifest

STEPS = 200


class WithDropout(nn.Module):
    """A model whose steps draw random numbers."""

    def __init__(self, rows, num_dense: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        dim = sum(config.embedding_dim * len(config.feature_names) for config in rows.embedding_bag_configs())
        self.layers = nn.Sequential(nn.Linear(num_dense + dim, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1))

    def forward(self, dense: torch.Tensor, sparse) -> torch.Tensor:
        out: torch.Tensor = self.layers(torch.cat((dense, self.rows(sparse).values()), dim=1))
        return out


def with_dropout(rows, num_dense: int, width: int = 8) -> nn.Module:
    return WithDropout(rows, num_dense, width)


def job_of(uri: Path | None, **sections: Any) -> Job:
    """200 steps in two data passes; rows freeze and thaw all along."""
    raw: dict[str, Any] = {
        "name": "again",
        "seed": 3,
        "data": {
            "reader": "synthetic",
            "num_samples": 32 * STEPS // 2 - 5,  # the last batch of a pass is short
            "num_test_samples": 0,
            "num_features": 3,
            "num_dense": 2,
            "cardinalities": [3000, 500, 20],
            "zipf_exponent": 0.8,
        },
        "model": {"kind": f"{__name__}:with_dropout", "options": {"width": 8}},
        "embedding": {
            "dim": 8,
            "learning_rate": {"base": 0.2},
            "policy": "idle",
            "idle_samples": 32 * 15,
            "frozen_bits": 8,
            "advanced": {"reselect_every_samples": 32 * 7},
        },
        "trainer": {
            "batch_size": 32,
            "precision": "float32",
            "mode": "sync",
            "data_passes": 2,
            "threads": 1,
            "dense_optimizer": {"kind": "adam", "learning_rate": {"base": 0.01}},
        },
        "servers": {"store": "inproc"},
    }
    if uri is not None:
        raw["snapshots"] = {"uri": str(uri), "every_samples": 32 * 50, "keep": 9, "on_finish": False}
    for name, values in sections.items():
        raw[name] = {**raw[name], **values}
    return make_job(raw)


class Dies(InprocStore):
    """Gives up at a step, as a process that is killed; what a cut has begun before is finished first."""

    def __init__(self, last_step: int | None = None) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self.epochs_begun = 0
        self._last_step = last_step

    def begin_epoch(self, *args, **kwargs):
        self.epochs_begun += 1
        return super().begin_epoch(*args, **kwargs)

    def push(self, who: Identity, step: int, gradients):
        for thread in threading.enumerate():
            if thread.name == "frostline-cut":
                thread.join()
        if self._last_step is not None and step > self._last_step:
            raise StoreUnavailable("killed")
        return super().push(who, step, gradients)


@dataclass
class End:
    """All that a run leaves."""

    dense: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    rng: torch.Tensor
    rows: dict[str, np.ndarray]
    flags: dict[str, np.ndarray]
    stats: dict[str, TableStats]
    heat: dict[str, np.ndarray]
    row_rate: float
    events: list[str]
    steps: list[int]


def run(job: Job, store: EmbeddingStore, resume_from: Path | None = None) -> End:
    try:
        parts = build_run(job, store, Group(), resume_from=resume_from)
        steps: list[int] = []
        with RunLog("main", parts.total_steps, None, lambda progress: None, parts.steps_before) as log:
            observe = log.observe
            log.observe = lambda step, *rest: (steps.append(step), observe(step, *rest))
            train(parts, log)
        state = parts.optimizer.state_dict()["state"]
        ids = every_id(job)
        rows = store.lookup(ids)
        masks = store.mask_info()
        return End(
            dense={name: tensor.clone() for name, tensor in parts.model.state_dict().items()},
            optimizer={f"{i}.{key}": value for i, values in state.items() for key, value in values.items()},
            rng=torch.get_rng_state(),
            rows={name: found.values.copy() for name, found in rows.items()},
            flags={name: found.flags.copy() for name, found in rows.items()},
            stats=store.stats().tables,
            heat={n: np.stack((m.heat_counts_hot, m.heat_counts_frozen)) for n, m in masks.items()},
            row_rate=parts.row_rate.at(max(1, log.step)),
            events=parts.notes,
            steps=steps,
        )
    finally:
        store.close()


def every_id(job: Job) -> dict[str, RoutedIds]:
    found: dict[str, list[np.ndarray]] = {}
    for batch in open_reader(job, "train"):
        for name in batch.sparse.keys():  # noqa: SIM118  a KeyedJaggedTensor is no dict
            found.setdefault(name, []).append(batch.sparse[name].values().numpy())
    ids = {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}
    return {name: RoutedIds(of, np.array([0, len(of)], np.int64)) for name, of in ids.items()}


def killed(job: Job, step: int) -> Path:
    """The last cut of a run that was killed after a step."""
    with pytest.raises(StoreUnavailable, match="killed"):
        run(job, Dies(step))
    return find_snapshot(job, "main")


def expect_equal(found: End, expected: End) -> None:
    assert found.dense.keys() == expected.dense.keys()
    for name, tensor in expected.dense.items():
        assert torch.equal(found.dense[name], tensor), name
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, tensor in expected.optimizer.items():
        assert torch.equal(found.optimizer[name], tensor), name
    assert torch.equal(found.rng, expected.rng)
    for name, rows in expected.rows.items():
        np.testing.assert_array_equal(found.rows[name].view(np.uint32), rows.view(np.uint32), name)
        np.testing.assert_array_equal(found.flags[name], expected.flags[name], name)
        np.testing.assert_array_equal(found.heat[name], expected.heat[name], name)
        for figure in ("rows_hot", "rows_frozen", "moves_frozen", "moves_thawed"):
            assert getattr(found.stats[name], figure) == getattr(expected.stats[name], figure), (name, figure)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_200_steps_are_100_and_100_resumed_bit_for_bit(tmp_path: Path, kind: str) -> None:
    over = {"trainer": {"dense_optimizer": {"kind": kind, "learning_rate": {"base": 0.01, "decay": "linear"}}}}
    expected = run(job_of(None, **over), InprocStore(memory_limit_bytes=256 << 20))
    assert expected.stats["cat_0"].moves_thawed > 100
    assert expected.stats["cat_0"].rows_frozen > 300
    job = job_of(tmp_path, **over)
    cut = killed(job, 137)
    assert cut.name == CutName(1, 100).folder
    found = run(job, Dies(), cut)
    assert found.steps == list(range(101, STEPS + 1))
    expect_equal(found, expected)


def test_a_cut_at_any_place_of_a_data_pass_is_resumed(tmp_path: Path) -> None:
    """Also at its very end (step 100) and within the second."""
    over = {"snapshots": {"uri": str(tmp_path), "every_samples": 32 * 20, "keep": 99, "on_finish": True}}
    expected = run(job_of(None), InprocStore(memory_limit_bytes=256 << 20))
    job = job_of(tmp_path, **over)
    run(job, Dies())
    folder = job_folder(tmp_path, "again")
    cuts = cuts_in(folder)
    assert [cut.step for cut in cuts] == list(range(20, STEPS + 1, 20))
    for step in (60, 100, 120, 200):
        found = run(job_of(None), Dies(), folder / CutName(1, step).folder)
        assert found.steps == list(range(step + 1, STEPS + 1))
        expect_equal(found, expected)


def test_a_run_resumed_from_a_delta_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    """The delta's hot rows lie in three cuts; rows froze, thawed and were compacted in between."""
    expected = run(job_of(None), InprocStore(memory_limit_bytes=256 << 20))
    job = job_of(tmp_path, snapshots={"every_samples": 32 * 4, "keep": 1})
    cut = killed(job, 139)
    chain = [manifest for _, manifest in chain_of(cut)]
    assert cut.name == CutName(1, 136).folder
    assert len(chain) > 1 and chain[0].sequence == len(chain) - 1
    assert [cut.step for cut in cuts_in(job_folder(tmp_path, "again"))] == [m.step for m in chain[::-1]]
    found = run(job, Dies(), cut)
    assert found.steps == list(range(137, STEPS + 1))
    expect_equal(found, expected)


def test_a_run_that_was_killed_between_a_delta_and_its_manifest_goes_on_from_the_one_before(tmp_path: Path) -> None:
    expected = run(job_of(None), InprocStore(memory_limit_bytes=256 << 20))
    job = job_of(tmp_path, snapshots={"every_samples": 32 * 4, "keep": 1})
    folder = job_folder(tmp_path, "again")
    torn = killed(job, 139)
    assert read_manifest(torn).sequence > 0
    (torn / "manifest.json").unlink()  # what a process that was killed there leaves
    before = find_snapshot(job, "main")
    assert before.name == CutName(1, 132).folder
    found = run(job, Dies(), before)
    assert found.steps[0] == 133
    expect_equal(found, expected)
    assert not torn.exists()
    newest = find_snapshot(job, "main")
    assert {manifest.epoch for _, manifest in chain_of(newest)} == {2}, "a new epoch begins with a full cut"
    assert {cut.epoch for cut in cuts_in(folder)} == {2}


def test_a_run_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    expected = run(job_of(None), InprocStore(memory_limit_bytes=256 << 20))
    job = job_of(tmp_path)
    run_ids = set()
    cut = None
    for epoch, step in ((1, 60), (2, 110), (3, 199)):
        with pytest.raises(StoreUnavailable, match="killed"):
            run(job, Dies(step), cut)
        cut = find_snapshot(job, "main")
        assert cut.name == CutName(epoch, step // 50 * 50).folder
        run_ids.add(read_manifest(cut).run)
    assert len(run_ids) == 1
    expect_equal(run(job, Dies(), cut), expected)


def test_the_mask_info_of_a_resumed_run_says_which_steps_its_traffic_is_of(tmp_path: Path) -> None:
    def summary_of(steps: int, resume_from: Path | None = None) -> ArmSummary:
        job = job_of(tmp_path / "cuts", trainer={"max_steps": steps}, snapshots={"on_finish": True})
        with closing(InprocStore(memory_limit_bytes=256 << 20)) as store:
            return run_worker(job, "main", store, Group(), tmp_path / "run", lambda progress: None, resume_from)

    assert summary_of(30).mask_info["since_step"] == 0
    summary = summary_of(40, find_snapshot(job_of(tmp_path / "cuts"), "main"))
    mask = summary.mask_info
    assert (mask["step"], mask["since_step"], mask["samples"]) == (40, 30, 10 * 32)
    for table in mask["tables"].values():
        rows = table["rows"]["hot"] + table["rows"]["frozen"]
        assert table["update_frequency"] == table["traffic"]["gradient_rows"] / (10 * rows)


def test_pipelined_a_resumed_run_equals_one_with_the_same_cuts(tmp_path: Path) -> None:
    """At a cut the pipeline drains, so the pull behind it sees every push, here and there."""
    over = {"trainer": {"mode": "pipelined"}}
    expected = run(job_of(tmp_path / "whole", **over), Dies())
    job = job_of(tmp_path / "parts", **over)
    found = run(job, Dies(), killed(job, 137))
    assert found.steps[0] == 101
    expect_equal(found, expected)


def test_the_end_of_a_data_pass_is_found_again(tmp_path: Path) -> None:
    """Policy compact forgets rare rows there: the reader must not forget where it is, nor end the pass twice."""
    over = {"embedding": {"policy": "compact", "advanced": {"reselect_every_samples": 224, "epoch_end": "forget_rare"}}}
    expected = run(job_of(None, **over), InprocStore(memory_limit_bytes=256 << 20))
    for name, step in (("before", 60), ("at", 137)):
        job = job_of(tmp_path / name, **over)
        expect_equal(run(job, Dies(), killed(job, step)), expected)
    assert expected.stats["cat_0"].moves_forgotten > 0


def test_a_frostline_and_default_rows_come_back(tmp_path: Path) -> None:
    over = {
        "embedding": {
            "policy": "topk",
            "hot_fraction": 0.3,
            "min_count": 2,
            "optimizer": {"kind": "adam", "weight_decay": 0.01},
            "advanced": {"reselect_every_samples": 224, "hot_bits": 16, "hysteresis": 0.2},
        }
    }
    expected = run(job_of(None, **over), InprocStore(memory_limit_bytes=256 << 20))
    job = job_of(tmp_path, **over)
    expect_equal(run(job, Dies(), killed(job, 137)), expected)


def test_what_may_differ_is_a_note_and_the_run_goes_on(tmp_path: Path) -> None:
    cut = killed(job_of(tmp_path), 137)
    over = {
        "embedding": {"policy": "topk", "hot_fraction": 0.2, "optimizer": {"kind": "adagrad"}},
        "trainer": {"mode": "pipelined", "dense_optimizer": {"kind": "sgd", "learning_rate": {"base": 0.01}}},
    }
    found = run(job_of(tmp_path, **over), Dies(), cut)
    assert found.steps == list(range(101, STEPS + 1))
    for text in ("embedding.policy: 'idle'", "optimizer: rowwise_adagrad", "trainer.mode: 'sync'", "kind: adam"):
        assert [note for note in found.events if text in note], text


def test_a_job_that_ends_before_its_snapshot_says_so(tmp_path: Path) -> None:
    cut = killed(job_of(tmp_path), 137)
    found = run(job_of(tmp_path, trainer={"max_steps": 100}), Dies(), cut)
    assert found.steps == []
    assert [note for note in found.events if "behind step 100 and the job has 100 steps" in note]
    assert run(job_of(tmp_path, trainer={"max_steps": 101}), Dies(), cut).steps == [101]


def test_differences_are_listed_before_anything_is_touched(tmp_path: Path) -> None:
    cut = killed(job_of(tmp_path), 137)
    over = {
        "embedding": {"dim": 12},
        "model": {"kind": f"{__name__}:with_dropout", "options": {"width": 16}},
        "trainer": {"batch_size": 64},
    }
    store = Dies()
    with pytest.raises(InvalidInput) as raised:
        run(job_of(tmp_path, **over), store, cut)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{cut}: 7 differences from the job forbid to resume from it:"
    assert [line for line in lines if "table 'cat_1', dim: 8 in the snapshot, 12 in the job" in line]
    assert (
        "  dense parameter layers.0.weight: float32[8, 26] in the snapshot, float32[16, 38] in the job; "
        in "\n".join(lines)
    )
    assert store.epochs_begun == 0
    assert store.table_specs() == {}


def test_a_damaged_file_is_named_and_nothing_is_trained(tmp_path: Path) -> None:
    cut = killed(job_of(tmp_path), 137)
    for path in sorted(path for path in cut.rglob("*") if path.is_file()):
        data = path.read_bytes()
        at = len(data) // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises((SegmentCorrupt, InvalidInput), match=path.name):
            run(job_of(tmp_path), Dies(), cut)
        path.write_bytes(data)
    run(job_of(tmp_path, trainer={"max_steps": 101}), Dies(), cut)
