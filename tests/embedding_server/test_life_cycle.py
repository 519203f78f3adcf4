"""A random life of some tables against dictionaries, bit for bit: rows trained, frozen, thawed and deleted, tables
added and dropped, cuts, and restores on other numbers of shards, with background work at any moment between.

SGD with lr 1, zero initial values, small-integer gradients and 32-bit freezing make float32 sums exact. At the end no
segment, in memory or on disk, has the row_id of a row that was deleted and did not come again.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server.kernels.hashing import buckets_of
from embedding_server.segment_reader import open_segment
from embedding_server.shard import ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, NUM_BUCKETS, TRAINABLE, Erased
from tests.embedding_server.cut_shards import CutShards

DIM = 4
POOL = np.concatenate([[-(2**63), 2**63 - 1, -1], np.arange(300)]).astype(np.int64)
NAMES = ["plain", "rare", "kept"]


def spec_of(name: str) -> TableSpec:
    policy = PolicySpec(
        kind="off" if name == "kept" else "idle",
        idle_steps=2,
        frozen_bits=32,
        min_count=2 if name == "rare" else 1,
        control_fraction=0.0,
    )
    return TableSpec(name=name, dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0, init_max=0)


@dataclass
class ModelTable:
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # visits of IDs without a row
    gone: set[int] = field(default_factory=set)  # deleted, and not seen since

    def visit(self, row_id: int, min_count: int) -> None:
        self.gone.discard(row_id)
        if row_id in self.rows:
            return
        self.counts[row_id] = self.counts.get(row_id, 0) + 1
        if self.counts[row_id] >= min_count:
            del self.counts[row_id]
            self.rows[row_id] = np.zeros(DIM, np.float32)

    def delete(self, row_ids: list[int]) -> tuple[int, int, int]:
        """Rows, waiting and unknown ones."""
        distinct = set(row_ids)
        rows, waiting = distinct & self.rows.keys(), distinct & self.counts.keys()
        for row_id in rows:
            del self.rows[row_id]
        for row_id in waiting:
            del self.counts[row_id]
        self.gone |= distinct
        return len(rows), len(waiting), len(distinct) - len(rows) - len(waiting)


class Life:
    """The shards, and the model beside them."""

    def __init__(self, root: Path) -> None:
        self._root, self._number = root, 0
        self.tables = {"plain": ModelTable()}
        self.shards = self._new_shards(2, will_restore=False)
        self._cut: tuple[Path, dict[str, ModelTable]] | None = None

    def _new_shards(self, num_shards: int, *, will_restore: bool) -> CutShards:
        self._number += 1
        self.folder = self._root / f"data-{self._number}"
        specs = [spec_of(name) for name in self.tables]
        options = {"memory_limit_bytes": 4 << 20, "will_restore": will_restore}
        shards = CutShards(specs, num_shards, folder=self.folder, **options)
        if self._number > 1:  # a cut's name has the epoch
            shards.begin(self._number, will_restore=will_restore)
        return shards

    def train(self, seed: int) -> None:
        shards, rng = self.shards, np.random.default_rng(seed)
        shards.step += 1
        ids = {name: rng.choice(POOL, int(rng.integers(0, 120)), replace=False) for name in self.tables}
        for s, shard in enumerate(shards.shards):
            mine = {n: i[shards.owner[buckets_of(i, NUM_BUCKETS)] == s] for n, i in ids.items()}
            pulled = shard.pull(shards.who, shards.step, mine, "float32").result(0)
            pushes = {}
            for name, row_ids in mine.items():
                table, min_count = self.tables[name], spec_of(name).policy.min_count
                for row_id in row_ids.tolist():
                    table.visit(row_id, min_count)
                is_found = [row_id in table.rows for row_id in row_ids.tolist()]
                assert ((pulled[name].flags & FOUND) > 0).tolist() == is_found
                trained = row_ids[(pulled[name].flags & TRAINABLE) > 0]
                assert trained.tolist() == row_ids[np.array(is_found, bool)].tolist()
                gradients = rng.integers(-3, 4, (trained.shape[0], DIM)).astype(np.float32)
                expected = [table.rows[row_id] for row_id in trained.tolist()]
                assert np.array_equal(pulled[name].values[is_found], np.array(expected).reshape(-1, DIM))
                for row_id, gradient in zip(trained.tolist(), gradients, strict=True):
                    table.rows[row_id] = table.rows[row_id] - gradient
                pushes[name] = ShardGradients(trained, gradients, 1.0)
            assert shard.push(shards.who, shards.step, pushes, "float32").result(0).rows_ignored == 0

    def reselect(self, seed: int) -> None:
        self.shards.reselect()

    def delete(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        name = rng.choice(list(self.tables))
        row_ids = rng.choice(POOL, int(rng.integers(1, 60)))
        found = Erased()
        for shard in self.shards.shards:
            done = False
            while not done:
                erased, done = shard.delete_rows(self.shards.who, self.shards.step, {name: row_ids}, is_last=True)
            found += erased[name]
        expected = self.tables[name].delete(row_ids.tolist())
        assert (found.hot + found.frozen, found.waiting, found.unknown) == expected

    def change_tables(self, seed: int) -> None:
        name = NAMES[seed % len(NAMES)]
        if name not in self.tables:
            self.tables[name] = ModelTable()
            for shard in self.shards.shards:
                shard.create_tables([spec_of(name)])
        elif len(self.tables) > 1:
            del self.tables[name]
            for shard in self.shards.shards:
                while not shard.drop_tables(self.shards.who, self.shards.step, [name]):
                    pass
            files = [path.name for path in self.folder.rglob("*.safetensors") if path.parent.name.startswith(name)]
            assert not files
        self.shards.specs = {name: spec_of(name) for name in self.tables}

    def begin_cut(self, seed: int) -> None:
        """Which goes on while other things happen, or is finished by them; of an odd seed a delta of the last one."""
        folder = self._root / "job" / f"cut-{self.shards.step:012d}-{self.shards.epoch}"
        if self._cut is not None and self._cut[0] == folder:
            return
        self.finish_cut()
        is_delta = seed % 2 and self._cut is not None and self._cut[0].name.endswith(f"-{self.shards.epoch}")
        self.shards.begin_cut(self._root / "job", self._cut[0] if is_delta else None)
        self._cut = folder, copy.deepcopy(self.tables)

    def finish_cut(self) -> None:
        if self._cut is not None and any(shard._cuts._newest is not None for shard in self.shards.shards):
            self.shards.finish_cut()

    def restore(self, seed: int) -> None:
        if self._cut is None:
            return
        self.finish_cut()
        folder, tables = self._cut
        added = {} if seed % 2 else {name: ModelTable() for name in self.tables.keys() - tables.keys()}
        self.tables = copy.deepcopy(tables) | added  # those that were added since begin anew, if they are there at all
        self.shards.__exit__()
        self.shards = self._new_shards(1 + seed % 3, will_restore=True)
        self.shards.restore(folder)

    def work(self, seed: int) -> None:
        for shard in self.shards.shards:
            for _ in range(seed % 20):
                shard.maintain()

    # At the end -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.finish_cut()
        for shard in self.shards.shards:
            while shard.maintain():
                pass
        for name, table in self.tables.items():
            self._check_traces(name, table)  # before stats(), which unites small segments without any dead row
            self._check_rows(name, table)

    def _check_rows(self, name: str, table: ModelTable) -> None:
        hot_and_frozen = 0
        for s, shard in enumerate(self.shards.shards):
            mine = POOL[self.shards.owner[buckets_of(POOL, NUM_BUCKETS)] == s]
            rows = shard.lookup({name: mine}, "float32")[name]
            assert ((rows.flags & FOUND) > 0).tolist() == [row_id in table.rows for row_id in mine.tolist()]
            expected = [table.rows.get(row_id, np.zeros(DIM, np.float32)) for row_id in mine.tolist()]
            assert np.array_equal(rows.values, np.array(expected, np.float32).reshape(-1, DIM))
            stats = shard.stats().tables[name]
            assert stats.bytes_erasure_pending == 0
            hot_and_frozen += stats.rows_hot + stats.rows_frozen
        assert hot_and_frozen == len(table.rows)
        waiting: dict[int, int] = {}
        for of_shard in self.shards.tables(name):
            if of_shard.waiting is not None:
                for bucket in range(64):
                    waiting |= dict(zip(*(part.tolist() for part in of_shard.waiting.scan(bucket)), strict=True))
        assert waiting == (table.counts if spec_of(name).policy.min_count > 1 else {})

    def _check_traces(self, name: str, table: ModelTable) -> None:
        gone = np.array(sorted(table.gone), np.int64)
        for of_shard in self.shards.tables(name):
            for builder in of_shard.segments._slots.builders.values():
                assert not np.isin(builder.arrays().row_ids, gone).any()
        for path in self.folder.rglob("*.safetensors"):
            if path.parent.name.startswith(name):
                segment = open_segment(path)
                assert not np.isin(segment.arrays.row_ids, gone).any()
                segment.close()


OPERATIONS = ["train"] * 6 + ["reselect"] * 3 + ["delete"] * 3 + ["work"] * 2
OPERATIONS += ["change_tables", "begin_cut", "restore"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**32 - 1)), min_size=10, max_size=60))
def test_tables_equal_dictionaries(operations: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        life = Life(Path(root))
        try:
            for name, seed in operations:
                getattr(life, name)(seed)
            life.check()
        finally:
            life.shards.__exit__()
