"""A cut that is written between the calls of a random history holds one step, the history goes on as if there were no
cut, and what is restored from it, on any number of shards, equals the dictionary model at that step bit for bit.

The model and its histories are those of test_shard_model.py; the other optimizers, weight decay and several shards that
write are in test_restore.py.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import table_cut
from embedding_server.kernels.hashing import buckets_of
from embedding_server.reserved import PAGE_BYTES
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, TableSpec
from embedding_server.store import NUM_BUCKETS, Identity
from tests.embedding_server.test_shard_model import DIM, HOT_ROW_BYTES, NO_CAP, Harness, Model, policies


class CutHarness(Harness):
    """Slices of a cut come between all calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draw = None
        self.at_cut: tuple[int, Model, dict[int, bytes]] | None = None
        self.visited: set[tuple[int, int, int]] = set()

    def begin_cut(self, folder: Path) -> None:
        self.folder = folder / f"cut-{self.step:012d}-{self.epoch}"
        assert self.shard.begin_cut(self.who(0), self.step, self.folder, 0, 1)
        self.at_cut = self.step, copy.deepcopy(self.model), self.frozen_bytes()

    def slices(self) -> None:
        if self.at_cut is not None and self.shard.is_cutting:
            for _ in range(self.draw(st.integers(0, 6))):
                self.shard.maintain()

    def visit(self, worker: int, ids: np.ndarray) -> None:
        self.slices()
        if (self.epoch, worker, self.step) in self.visited:  # there was no fence: a repeat reads again
            self.pull(worker, ids)
            return
        self.visited.add((self.epoch, worker, self.step))
        super().visit(worker, ids)

    def _push_one(self, worker: int, push: ShardGradients):
        self.slices()
        return super()._push_one(worker, push)

    def fence(self) -> None:
        if not hasattr(self, "at_cut") or self.at_cut is None:  # a new epoch ends a cut
            super().fence()

    def finish_cut(self) -> None:
        while self.shard.is_cutting:
            assert self.shard.maintain() or not self.shard.is_cutting


def restored(harness: CutHarness, num_shards: int, spec: TableSpec | None = None) -> list[Shard]:
    shards = []
    for s in range(num_shards):
        shard = Shard(buckets=np.arange(NUM_BUCKETS) % num_shards == s, memory_limit_bytes=1 << 20)
        shards.append(shard)
        shard.create_tables([spec or harness.spec])
        shard.begin_epoch("job", harness.num_workers, harness.mode, 100, True)
        while not shard.restore(Identity("job", 100, 0), harness.folder):
            shard.maintain()
    return shards


def check_equal(shards: list[Shard], harness: CutHarness) -> None:
    step, model, frozen_bytes = harness.at_cut
    rows, waiting, found_bytes = {}, {}, {}
    for shard in shards:
        assert shard.current_epoch("job").last_step == step
        table = shard._tables["t"]
        assert table.default_row.read().tobytes() == model.default.tobytes()
        assert table.frostline == model.frostline
        entries = table.index.scan(0, NUM_BUCKETS)
        assert shard.buckets[buckets_of(entries.row_ids, NUM_BUCKETS)].all()
        for row_id, location, code in zip(
            entries.row_ids.tolist(), entries.locations.tolist(), entries.heat.tolist(), strict=True
        ):
            assert row_id not in rows
            rows[row_id] = _row_of(table, location), code
        if table.waiting is not None:
            for bucket in range(64):
                ids, counts = table.waiting.scan(bucket)
                waiting |= dict(zip(ids.tolist(), counts.tolist(), strict=True))
        other = copy.copy(harness)
        other.shard = shard
        found_bytes |= other.frozen_bytes()
    assert found_bytes == frozen_bytes
    assert rows.keys() == model.rows.keys()
    counts_visits = harness.spec.policy.kind != "off"
    for row_id, ((hot, values, last_step, visits), code) in rows.items():
        row = model.rows[row_id]
        assert (hot, values, code) == (row.hot, row.values.tobytes(), row.heat), row_id
        if counts_visits:
            assert visits == row.visits, row_id
            assert last_step == (row.last_step if row.hot else 0), row_id
    if harness.spec.policy.min_count > 1:
        assert waiting == {i: n for i, n in model.counts.items() if n and i not in model.rows}


def _row_of(table, location: int) -> tuple[bool, bytes, int, int]:
    """(is hot, values, last step, visits)."""
    if location == 0xFFFFFFFF:
        return False, np.zeros(DIM, np.float32).tobytes(), 0, 0
    at = np.array([location], np.uint32)
    if location >> 31:
        return False, table.segments.read(at).tobytes(), 0, int(table.segments.visits_of(at)[0])
    weights = table.read_hot(at.astype(np.int32))[0]
    return True, weights.tobytes(), int(table.last_step.array[location, 0]), int(table.visits.array[location, 0])


def _harness(data, *, capped: bool) -> CutHarness:
    max_hot = data.draw(st.sampled_from([3, 8, 20])) if capped else NO_CAP
    policy = data.draw(policies).model_copy(
        update={
            "frozen_bits": data.draw(st.sampled_from([32, 8, 4])),
            "freeze_rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
            "forget_below": data.draw(st.integers(0, 4)),
            "epoch_end": data.draw(st.sampled_from(["keep", "forget_rare"])),
            "control_fraction": data.draw(st.sampled_from([0.0, 0.3])),
            "hot_bytes": None if max_hot == NO_CAP else 4 * PAGE_BYTES + max_hot * HOT_ROW_BYTES,
        }
    )
    spec = TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0.0, init_max=0.0)
    mode = data.draw(st.sampled_from(["sync", "pipelined"]))
    return CutHarness(spec, data.draw(st.integers(1, 2)), mode, Model(spec, max_hot))


def _run(data, folder: Path, harness: CutHarness, num_shards: int) -> None:
    shards: list[Shard] = []
    harness.draw = data.draw
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            _step(data, harness)
        harness.begin_cut(folder)
        for _ in range(data.draw(st.integers(0, 3))):
            _step(data, harness)
        harness.finish_cut()
        progress = harness.shard.cut_progress(harness.who(0))
        step, model, _ = harness.at_cut
        assert (progress.step, progress.is_done, progress.error) == (step, True, None)
        assert progress.rows == len(model.rows)
        shards = restored(harness, num_shards)
        check_equal(shards, harness)
        if num_shards == 1:
            _go_on(data, harness, shards[0])
    finally:
        harness.shard.close()
        for shard in shards:
            shard.close()


def _step(data, harness: CutHarness) -> None:
    harness.run_step(data.draw)
    what = data.draw(st.integers(0, 3))
    harness.slices()
    if what & 1:
        harness.reselect()
    if what & 2:
        harness.end_data_pass()
    harness.check_all()


def _go_on(data, harness: CutHarness, shard: Shard) -> None:
    """The job resumes from the cut, and is what it would have been without an end."""
    resumed = copy.copy(harness)
    resumed.shard, resumed.epoch = shard, 100
    resumed.step, resumed.model, _ = harness.at_cut
    resumed.at_cut, resumed.visited = None, set()
    for _ in range(data.draw(st.integers(1, 3))):
        _step(data, resumed)


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_cut, "_SLICE_ROWS", 2)
        yield


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3))
def test_cut_of_a_history_equals_the_model_at_its_step(tmp_path_factory, data, num_shards: int) -> None:
    _run(data, tmp_path_factory.mktemp("cut") / "job", _harness(data, capped=False), num_shards)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_cut_while_a_cap_freezes_rows_equals_the_model(tmp_path_factory, data) -> None:
    _run(data, tmp_path_factory.mktemp("cut") / "job", _harness(data, capped=True), 1)
