"""The update kernels of all tables against the reference rows: every optimizer, values and sums, 1 or 3 parts."""

from __future__ import annotations

import numpy as np
import pytest

from embedding_server.hot_path import HotPath, Update
from embedding_server.hot_rows import ReferenceHotRows
from embedding_server.kernels import choose_backend
from embedding_server.kernels.row_sums import UNIT
from embedding_server.kernels.updates import make_sums
from embedding_server.kernels.wire import from_float32
from embedding_server.slots import MemoryBudget
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, RowSums
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
DIMS = (4, 36, 64, 144)
ROWS, STEPS, RATE = 90, 4, 0.1


def table_of(tmp_path, index: int, kind: OptimizerKind, clip_norm: float = 0.0, hot_bits: int = 32) -> Table:
    optimizer = OptimizerSpec(
        kind=kind, eps=1e-6, beta1=0.8, beta2=0.95, initial_accumulator=0.1, ftrl_l1=0.3, clip_norm=clip_norm
    )
    policy = PolicySpec(hot_bits=hot_bits)  # type: ignore[arg-type]
    return Table(
        TableSpec(name=f"t{index}", dim=DIMS[index], optimizer=optimizer, policy=policy), backend=choose_backend("cpu"),
        data_dir=tmp_path, budget=MemoryBudget(1 << 26), buckets=np.ones(NUM_BUCKETS, np.bool_),
        on_event=lambda text: None,
    )  # fmt: skip


def random_sums(rng: np.random.Generator, dim: int, num_rows: int, scaled: bool) -> RowSums:
    """Rows of 0 to 8 look-ups, and some rows left out."""
    source = rng.standard_normal(UNIT * 200 + dim).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 9, num_rows + 20))]) + 5
    positions = rng.integers(0, 200, int(starts[-1])).astype(np.int32)
    scales = rng.standard_normal(positions.size).astype(np.float32) if scaled else np.empty(0, np.float32)
    rows = np.sort(rng.permutation(num_rows + 20)[:num_rows]).astype(np.int32)
    return RowSums(source, positions, scales, starts.astype(np.int64), rows)


def plain_sums(sums: RowSums, dim: int) -> np.ndarray:
    out = np.zeros((sums.rows.size, dim))
    for i, u in enumerate(sums.rows):
        for j in range(sums.starts[u], sums.starts[u + 1]):
            scale = sums.scales[j] if sums.scales.size else 1.0
            out[i] += scale * sums.source[UNIT * sums.positions[j] :][:dim].astype(np.float64)
    return out.astype(np.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "sums", "scaled sums"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_many_tables_equal_the_reference(tmp_path, kind: OptimizerKind, form: str, threads: int) -> None:
    rng = np.random.default_rng(0)
    team = TableThreads(threads)
    path = HotPath(team)
    tables = [
        table_of(tmp_path, k, kind, clip_norm=4.0 * (k % 2), hot_bits=16 if k > 1 else 32) for k in range(len(DIMS))
    ]
    theirs = []
    row_ids = np.arange(ROWS, dtype=np.int64) * 7 - 50
    for table in tables:
        path.add(table)
    path.pull({table.spec.name: row_ids for table in tables}, 1, "float32")
    for table in tables:
        rows = ReferenceHotRows(table.spec.dim, table.spec.optimizer, 1000, table.hot.hot_bits)
        every = np.arange(ROWS, dtype=np.int32)
        rows.write(every, *table.hot.read(every))
        theirs.append(rows)
    for step in range(1, STEPS + 1):
        updates = []
        for table, rows in zip(tables, theirs, strict=True):
            dim, some = table.spec.dim, rng.permutation(ROWS)[:50]
            named = np.append(row_ids[some], 10**9)  # the last one is not hot
            if "sums" in form:
                sums = random_sums(rng, dim, 51, form == "scaled sums")
                gradients, wire = make_sums(sums, dim), "float32"
                np.testing.assert_allclose(gradients, plain_sums(sums, dim), rtol=1e-4, atol=1e-4)
                updates.append(Update(table, named, np.empty((0, dim), np.float32), "float32", RATE, sums))
            else:
                wire = form
                gradients = from_float32(rng.standard_normal((51, dim)).astype(np.float32), wire)
                updates.append(Update(table, named, gradients, wire, RATE))  # type: ignore[arg-type]
            slots, _ = table.find_slots(named)
            rows.apply(slots, gradients, np.arange(51, dtype=np.int32), wire, 0.5, RATE, step, row_ids=named)
        assert path.apply(updates, scale=0.5, step=step) == (200, 4)
    for table, rows in zip(tables, theirs, strict=True):
        every = np.arange(ROWS, dtype=np.int32)
        (weights, state), (their_weights, their_state) = table.hot.read(every), rows.read(every)
        if table.hot.hot_bits == 16:  # where float32 arithmetic differs by an ulp, one may be rounded up and one down
            np.testing.assert_allclose(weights, their_weights, rtol=4e-3, atol=1e-3)
            assert (weights == their_weights).mean() > 0.95
            state, their_state = state[:, : table.spec.dim], their_state[:, : table.spec.dim]  # ftrl: z hangs on w
        else:
            np.testing.assert_allclose(weights, their_weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state, their_state, rtol=1e-4, atol=1e-5)
        table.close()
    team.close()


def test_a_repeated_row_is_summed_first(tmp_path) -> None:
    path = HotPath(TableThreads(1))
    table = table_of(tmp_path, 0, "sgd")
    path.add(table)
    row_ids = np.array([5, 6], np.int64)
    before = path.pull({"t0": row_ids}, 1, "float32")["t0"].values.copy()
    update = Update(table, np.array([6, 5, 6], np.int64), np.ones((3, 4), np.float32), "float32", 1.0)
    assert path.apply([update], scale=1.0, step=1) == (2, 0)
    after = path.read({"t0": row_ids}, "float32", always_default=True)["t0"].values
    np.testing.assert_allclose(before - after, [[1] * 4, [2] * 4], rtol=1e-6)
    table.close()
