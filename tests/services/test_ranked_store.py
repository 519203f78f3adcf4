"""Re-selection by rank over gRPC: the same rows as in process, in bounded slices; scores of the shard's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedding_server import ranking
from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.policy import frostline_at
from embedding_server.spec import OptimizerSpec, PolicySpec, ScheduleSpec, TableSpec
from embedding_server.store import TRAINABLE, EmbeddingStore, Frostline, Identity, RoutedIds, TableGradients
from services import local_shards
from services.shard_client import RemoteStore

Serve = Callable[..., list[str]]


def _spec(name: str, **policy) -> TableSpec:
    knobs = {"kind": "topk", "probation_visits": 1, "hot_fraction": 0.3, "half_life_steps": 10.0, **policy}
    return TableSpec(name=name, dim=8, optimizer=OptimizerSpec(kind="adagrad"), policy=PolicySpec(**knobs))


SPECS = [
    _spec("near", hysteresis=0.3, max_moves_fraction=0.1),
    _spec("stays", resume=False, schedule=ScheduleSpec(kind="linear", steps=12, every_steps=3)),
    _spec("scored", select="score", score="heat_x_grad"),
    _spec("weighed", select="score", score="abs_weight_x_grad", control_fraction=0.2),
]


def _route(store: EmbeddingStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def _train(store: EmbeddingStore, specs: list[TableSpec], num_steps: int) -> tuple[dict, list[dict[str, Frostline]]]:
    """Trains with re-selections; what look-ups then read by table, in row_id order, and the frostlines."""
    store.create_tables(specs)
    rng = np.random.default_rng(5)
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    frostlines = []
    for step in range(1, num_steps + 1):
        ids = {spec.name: _route(store, rng.zipf(1.3, 300) % 700 - 350) for spec in specs}
        rows = store.pull(who, step, ids)
        gradients = {}
        for spec in specs:
            routed, hot = ids[spec.name], (rows[spec.name].flags & TRAINABLE) > 0
            kept = _route(store, routed.row_ids[hot])
            values = 1e-2 * np.sin(kept.row_ids[:, None] + np.arange(spec.dim)[None, :] + step)
            gradients[spec.name] = TableGradients(kept, values.astype(np.float32), 0.1)
        store.push(who, step, gradients)
        if step % 3 == 0:
            policies = {name: spec.policy for name, spec in store.table_specs().items()}
            lines = {n: frostline_at(policies[n], h, step) for n, h in store.heat_histograms(who, step).items()}
            store.reselect(who, step, lines)
            frostlines.append(lines)
    every = {spec.name: _route(store, np.arange(-360, 360)) for spec in specs}
    rows = store.lookup(every)
    order = {name: np.argsort(ids.row_ids) for name, ids in every.items()}
    return {name: (rows[name].values[at], rows[name].flags[at]) for name, at in order.items()}, frostlines


@pytest.mark.parametrize("num_shards", [1, 3])
def test_ranked_tables_are_those_of_the_in_process_store(
    serve: Serve, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    expected, lines = _train(local, SPECS, 12)
    local.close()
    monkeypatch.setattr(ranking, "HISTOGRAM_ENTRIES", 100)  # so that heat is collected in many calls
    remote = RemoteStore(serve(num_shards))
    got, remote_lines = _train(remote, SPECS, 12)
    assert remote_lines == lines
    assert any(line["near"].margin_bins > 24 for line in lines)
    for name, (values, flags) in expected.items():
        assert np.array_equal(got[name][0], values), name
        assert np.array_equal(got[name][1], flags), name
    remote.close()


def test_a_frostline_out_of_range_is_refused(serve: Serve) -> None:
    remote = RemoteStore(serve())
    remote.create_tables([SPECS[0]])
    who = Identity("job", remote.begin_epoch("job", 1, "sync").epoch, 0)
    for bad in (Frostline(0, 0.5, margin_bins=4097), Frostline(0, 0.5, held_fraction=1.5), Frostline(4096)):
        with pytest.raises(InvalidInput, match="table 'near': .*send what compute_frostline gives"):
            remote.reselect(who, 0, {"near": bad})
    remote.close()


def test_an_unknown_score_of_a_job_comes_back_with_the_nearest_name(serve: Serve) -> None:
    remote = RemoteStore(serve(2))
    with pytest.raises(InvalidInput, match="'abs_wieght' is not registered.*did you mean 'abs_weight'"):
        remote.create_tables([_spec("t", select="score", score="abs_wieght")])
    assert remote.table_specs() == {}
    remote.close()


_MODULE = """
import numpy as np
from embedding_server.scores import register_score
register_score("largest", lambda rows: np.abs(rows.weights).max(axis=1))
"""


def _start(folder: Path, module: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.shard_process", "--memory-limit-bytes", str(1 << 26), "--scores", module]
    env = local_shards._environment()
    env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_a_shard_is_started_with_scores_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_scores.py").write_text(_MODULE)
    process = _start(tmp_path, "my_scores")
    try:
        assert process.stdout is not None
        store = RemoteStore([json.loads(process.stdout.readline())["address"]])
        rows, lines = _train(store, [_spec("t", select="score", score="largest", control_fraction=0.0)], 9)
        values, flags = rows["t"]
        hot, frozen = (flags & TRAINABLE) > 0, (flags > 0) & ((flags & TRAINABLE) == 0)
        assert len(lines) == 3
        assert frozen.sum() > hot.sum() > 10
        size = np.abs(values).max(axis=1)
        assert size[hot].min() > 0.95 * size[frozen].max()  # bins are 1.1% wide, and freezing rounds
        store.close()
    finally:
        process.kill()
        process.communicate()


def test_a_module_that_cannot_be_imported_ends_the_shard_with_the_reason(tmp_path: Path) -> None:
    process = _start(tmp_path, "no_such_scores")
    try:
        out, log = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (1, "")
    assert "--scores no_such_scores: cannot be imported (No module named 'no_such_scores')" in log
