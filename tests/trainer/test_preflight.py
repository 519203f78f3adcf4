"""What may differ between a snapshot and the job that goes on from it, and what may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embedding_server.errors import InvalidInput
from embedding_server.spec import TableSpec
from trainer.job import make_job
from trainer.preflight import SavedTable, Shapes, preflight

JOB: dict[str, Any] = {
    "name": "j",
    "seed": 1,
    "data": {"reader": "criteo_tsv", "train": ["/a/day_0.tsv", "/a/day_1.tsv"], "test": ["/a/day_2.tsv"]},
    "embedding": {"dim": 8, "idle_samples": 1000},
    "model": {"kind": "dlrm", "dense_layers": [8], "over_layers": [4, 1]},
    "trainer": {"batch_size": 100},
}
SPECS = {name: TableSpec(name=name, dim=8) for name in ("user", "film")}
DENSE = {"over.weight": torch.zeros(4, 8), "over.bias": torch.zeros(4)}


def checked(over: dict[str, Any] | None = None, tables=None, model=None, optimizer: str = "adam", **saved: Any):
    """Notes, of a snapshot of JOB and a job that has `over` laid over it."""
    raw = {**JOB}
    for section, values in (over or {}).items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    return preflight(
        "cut-1",
        saved.get("job", make_job(JOB).model_dump(mode="json")),
        {name: SavedTable(spec, has_initial_rows=name == "user") for name, spec in SPECS.items()},
        saved.get("dense", Shapes.of(DENSE, "adam")),
        make_job(raw),
        SPECS if tables is None else tables,
        Shapes.of(DENSE if model is None else model, optimizer),
    )


def test_the_same_job_has_no_differences() -> None:
    assert checked() == []


@pytest.mark.parametrize(
    "over",
    [
        {"trainer": {"max_steps": 7, "data_passes": 3, "output_dir": "/elsewhere", "log_every_s": 9.0}},
        {"servers": {"store": "inproc", "num_shards": 5}},
        {"data": {"test": [], "validation": ["/b/x.tsv"], "max_bad_rows": 5, "on_bad_row": "skip"}},
    ],
)
def test_what_changes_no_figure_is_not_mentioned(over: dict[str, Any]) -> None:
    assert checked(over) == []


def test_what_may_differ_is_a_note() -> None:
    over = {
        "trainer": {"workers": 2, "mode": "sync", "dense_optimizer": {"kind": "sgd", "weight_decay": 0.1}},
        "embedding": {"policy": "topk", "optimizer": {"kind": "adam", "eps": 1e-6}},
        "data": {"train": ["/b/day_0.tsv", "/b/day_1.tsv"]},
    }
    tables = {name: TableSpec(name=name, dim=8, optimizer={"kind": "adam"}) for name in SPECS}
    assert checked(over, tables=tables, optimizer="sgd") == [
        "table 'film', optimizer: rowwise_adagrad in the snapshot, adam in the job; the state of its rows starts anew",
        "table 'user', optimizer: rowwise_adagrad in the snapshot, adam in the job; the state of its rows starts anew",
        (
            "data.train: ['/a/day_0.tsv', '/a/day_1.tsv'] in the snapshot, ['/b/day_0.tsv', '/b/day_1.tsv'] in the job;"
            " the files must hold the same samples"
        ),
        "embedding.policy: 'idle' in the snapshot, 'topk' in the job; the job's counts",
        "embedding.optimizer.eps: 1e-08 in the snapshot, 1e-06 in the job; the job's counts",
        "trainer.workers: 1 in the snapshot, 2 in the job; the job's counts",
        "trainer.mode: 'pipelined' in the snapshot, 'sync' in the job; the job's counts",
        "trainer.dense_optimizer.weight_decay: 0.0 in the snapshot, 0.1 in the job; the job's counts",
        "trainer.dense_optimizer.kind: adam in the snapshot, sgd in the job; the optimizer's state starts anew",
    ]


def test_all_that_may_not_differ_is_said_at_once() -> None:
    over = {
        "seed": 2,
        "trainer": {"batch_size": 50, "mode": "sync"},
        "data": {"train": ["/a/day_0.tsv"]},
    }
    tables = {"user": TableSpec(name="user", dim=16), "shop": TableSpec(name="shop", dim=8)}
    dense = {"over.weight": torch.zeros(4, 16), "top.weight": torch.zeros(1, 4)}
    with pytest.raises(InvalidInput) as raised:
        checked(over, tables=tables, model=dense)
    assert str(raised.value).splitlines() == [
        "cut-1: 9 differences from the job forbid to resume from it:",
        "  table 'film': dim 8 in the snapshot, missing in the job; the job's data must name it",
        "  table 'shop': missing in the snapshot, dim 8 in the job; remove its features from the data",
        "  table 'user', dim: 8 in the snapshot, 16 in the job; rows keep their dim: set embedding.dim=8",
        "  seed: 1 in the snapshot, 2 in the job; it draws the order of samples and new rows: set it as it was",
        (
            "  data.train: ['/a/day_0.tsv', '/a/day_1.tsv'] in the snapshot, ['/a/day_0.tsv'] in the job; "
            "the reader's position would mean other samples: set it as it was"
        ),
        (
            "  trainer.batch_size: 100 in the snapshot, 50 in the job; "
            "the reader's position counts batches of that size: set it as it was"
        ),
        (
            "  dense parameter over.bias: float32[4] in the snapshot, missing in the job; "
            "set `model` as it was, or give it what the snapshot has"
        ),
        (
            "  dense parameter over.weight: float32[4, 8] in the snapshot, float32[4, 16] in the job; "
            "set `model` as it was, or give it what the snapshot has"
        ),
        (
            "  dense parameter top.weight: missing in the snapshot, float32[1, 4] in the job; "
            "set `model` as it was, or give it what the snapshot has"
        ),
        "  these may be:",
        "  trainer.mode: 'pipelined' in the snapshot, 'sync' in the job; the job's counts",
    ]


def test_another_kind_of_reader_is_refused() -> None:
    other = {**JOB, "data": {"reader": "synthetic"}}
    with pytest.raises(InvalidInput, match=r"data\.reader: 'criteo_tsv' in the snapshot, 'synthetic' in the job"):
        preflight(
            "cut-1",
            make_job(JOB).model_dump(mode="json"),
            {name: SavedTable(spec) for name, spec in SPECS.items()},
            None,
            make_job(other),
            SPECS,
            Shapes.of(DENSE, "adam"),
        )


def test_rows_that_are_not_stored_need_what_they_are_made_from() -> None:
    tables = {name: TableSpec(name=name, dim=8, init_max=0.5) for name in SPECS}
    with pytest.raises(InvalidInput) as raised:
        checked(tables=tables)
    assert str(raised.value).splitlines()[1:] == [
        (
            "  table 'user', seed, init_min, init_max: (0, -0.01, 0.01) in the snapshot, (0, -0.01, 0.5) in the job; "
            "rows that froze untrained are made from them: set them as they were"
        )
    ]


def test_a_snapshot_of_rows_alone_is_compared_by_its_tables() -> None:
    dense = {"anything": torch.zeros(1)}
    assert checked({"seed": 5}, model=dense, job=None, dense=None) == []
