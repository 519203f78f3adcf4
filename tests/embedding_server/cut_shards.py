"""Some shards that train tables together, are cut, and restored: for the tests of cuts and restores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import frostline_at
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import TableSpec
from embedding_server.store import DEFAULT, NUM_BUCKETS, TRAINABLE, Identity
from embedding_server.table import Table
from tests.embedding_server.table_state import rows_of, waiting_of

State = dict[str, object]


class CutShards:
    """One worker. `between` is called between all calls of the shards."""

    def __init__(
        self,
        specs: list[TableSpec],
        num_shards: int = 1,
        *,
        mode: str = "sync",
        will_restore: bool = False,
        folder: Path | None = None,
        **options,
    ) -> None:
        """folder: where each shard has a data_dir; None: temporary ones."""
        self.specs, self.mode, self.epoch = {spec.name: spec for spec in specs}, mode, 1
        self.owner = np.arange(NUM_BUCKETS) % num_shards
        self.shards = [
            Shard(buckets=self.owner == s, data_dir=folder / str(s) if folder else None, **options)
            for s in range(num_shards)
        ]
        self.between: Callable[[Shard], None] = lambda shard: None
        self.step = 0
        for shard in self.shards:
            shard.create_tables(specs)
        self.begin(1, will_restore=will_restore)

    def __enter__(self) -> CutShards:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.close()

    @property
    def who(self) -> Identity:
        return Identity("job", self.epoch, 0)

    def begin(self, epoch: int, *, will_restore: bool = False) -> None:
        self.epoch = epoch
        for shard in self.shards:
            shard.begin_epoch("job", 1, self.mode, epoch, will_restore)

    def tables(self, name: str = "t") -> list[Table]:
        return [shard._tables[name] for shard in self.shards]

    def train(self, row_ids: np.ndarray, seed: int = 0, lr: float = 0.25) -> dict[int, tuple[int, bytes]]:
        """One step of all tables on these unique row_ids; flags and values of the first table's Pull by row_id."""
        self.step += 1
        seen: dict[int, tuple[int, bytes]] = {}
        of_shard = self.owner[buckets_of(row_ids, NUM_BUCKETS)]
        rows = []
        for s, shard in enumerate(self.shards):
            self.between(shard)
            ids = dict.fromkeys(self.specs, row_ids[of_shard == s])
            rows.append((ids, shard.pull(self.who, self.step, ids, "float32").result(0)))
        defaults = {n: _default_gradient(spec, rows, n, seed) for n, spec in self.specs.items()}
        for shard, (ids, pulled) in zip(self.shards, rows, strict=True):
            self.between(shard)
            pushes = {}
            for name, spec in self.specs.items():
                hot = ids[name][(pulled[name].flags & TRAINABLE) > 0]
                gradients = gradients_of(hot, spec.dim, self.step, seed)
                pushes[name] = ShardGradients(hot, gradients, lr, defaults[name])
            assert shard.push(self.who, self.step, pushes, "float32").result(0).rows_ignored == 0
            first = next(iter(self.specs))
            for row_id, flags, values in zip(
                ids[first].tolist(), pulled[first].flags.tolist(), pulled[first].values, strict=True
            ):
                seen[row_id] = flags, values.tobytes()
        return seen

    def reselect(self) -> None:
        frostlines = {}
        for name, spec in self.specs.items():
            if spec.policy.kind == "topk":
                parts = [shard.heat_histograms(self.who, self.step)[name] for shard in self.shards]
                frostlines[name] = frostline_at(spec.policy, sum(parts[1:], parts[0]), self.step)
        for shard in self.shards:
            while not shard.reselect(self.who, self.step, frostlines)[1]:
                pass

    def begin_cut(self, root: Path, parent: Path | None = None) -> Path:
        folder = root / f"cut-{self.step:012d}-{self.epoch}"
        for s, shard in enumerate(self.shards):
            assert shard.begin_cut(self.who, self.step, folder, s, len(self.shards), parent)
        return folder

    def finish_cut(self) -> None:
        for shard in self.shards:
            while shard.is_cutting:
                shard.maintain()
            assert shard.cut_progress(self.who).error is None

    def cut(self, root: Path, parent: Path | None = None) -> Path:
        folder = self.begin_cut(root, parent)
        self.finish_cut()
        return folder

    def restore(self, folder: Path) -> None:
        """After begin(will_restore=True)."""
        for shard in self.shards:
            while not shard.restore(self.who, folder):
                shard.maintain()
        self.step = self.shards[0].current_epoch("job").last_step

    def state(self) -> State:
        """Everything of all tables that a cut must hold, by what it is and row_id."""
        return {name: _state_of(self.tables(name)) for name in self.specs}


def gradients_of(row_ids: np.ndarray, dim: int, step: int, seed: int) -> np.ndarray:
    """float32[n, D], whichever shard asks."""
    base = np.cos(row_ids.astype(np.float64) % 1009 + step * 0.7 + seed)
    return (base[:, None] * np.linspace(-1.0, 1.5, dim)).astype(np.float32)


def _default_gradient(spec: TableSpec, rows: list, name: str, seed: int) -> np.ndarray | None:
    has_default = any((pulled[name].flags & DEFAULT).any() for _, pulled in rows)
    return np.full(spec.dim, 0.5 + seed % 3, np.float32) if has_default else None


def _state_of(tables: list[Table]) -> State:
    state: State = {"default": set(), "frostline": set(), "seen": set()}
    rows: dict[int, tuple] = {}
    waiting: dict[int, int] = {}
    for table in tables:
        state["default"].add((table.default_row.read().tobytes(), table.default_row.read_state().tobytes()))
        state["frostline"].add(table.frostline)
        state["seen"].add(table.last_step_seen)
        of_table = rows_of(table)
        assert not rows.keys() & of_table.keys()
        assert table.rows_frozen == sum(row[1] != "hot" for row in of_table.values())
        rows |= of_table
        waiting |= waiting_of(table)
    return {**state, "rows": rows, "waiting": waiting}
