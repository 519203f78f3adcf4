"""Many tables in one call: heat bands of every row, and tables of float16 beside tables of float32."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from embedding_server import heat
from embedding_server.hot_path import HotPath, Update
from embedding_server.kernels import choose_backend
from embedding_server.kernels.wire import to_float32
from embedding_server.reselection import Reselection
from embedding_server.slots import MemoryBudget
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import BAND_SHIFT, DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE, PlacedRows
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads

HALF_LIFE = 50.0
IDS = np.arange(60, dtype=np.int64) * 13 - 100


def table_of(tmp_path: Path, name: str, policy: PolicySpec, backend: str = "cpu", dim: int = 8) -> Table:
    spec = TableSpec(name=name, dim=dim, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=-1, init_max=1)
    return Table(
        spec, backend=choose_backend(backend), data_dir=tmp_path, budget=MemoryBudget(1 << 26),
        buckets=np.ones(NUM_BUCKETS, np.bool_), on_event=lambda text: None,
    )  # fmt: skip


def path_of(*tables: Table) -> HotPath:
    path = HotPath(TableThreads(1))
    for table in tables:
        path.add(table)
    return path


def bands_of(visits: dict[int, list[int]], ids: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """min(31, floor(4 log2 heat)) from the definition of heat, and how far 4 log2 heat is from a whole number."""
    values = np.array([sum(2.0 ** ((v - step) / HALF_LIFE) for v in visits[row_id]) for row_id in ids.tolist()])
    quarters = 4 * np.log2(values)
    return np.clip(np.floor(quarters), 0, 31).astype(int), np.abs(quarters - np.rint(quarters))


@pytest.mark.parametrize(("backend", "in_place"), [("cpu", False), ("cpu", True), ("fbgemm", False)])
def test_flags_hold_the_heat_band_of_hot_and_frozen_rows(tmp_path, backend: str, in_place: bool) -> None:
    policy = PolicySpec(kind="idle", idle_steps=15, half_life_steps=HALF_LIFE, control_fraction=0.0)
    table = table_of(tmp_path, "t", policy, backend)
    path, rng = path_of(table), np.random.default_rng(0)
    visits: dict[int, list[int]] = {row_id: [] for row_id in IDS.tolist()}
    seen_bands: set[int] = set()

    def check(ids: np.ndarray, flags: np.ndarray, step: int, basic: np.ndarray | int) -> None:
        wanted, margin = bands_of(visits, ids, step)
        sure = margin > 0.05  # codes are rounded at random, each visit by up to 0.07% of heat
        np.testing.assert_array_equal((flags >> BAND_SHIFT)[sure], wanted[sure])
        np.testing.assert_array_equal(flags & 7, basic)
        seen_bands.update(wanted.tolist())

    for step in range(1, 161):
        hot_ones = IDS[:20] if step <= 120 else IDS[:3]
        ids = hot_ones[rng.random(len(hot_ones)) < np.linspace(0.05, 1.0, len(hot_ones))]
        ids = IDS if step == 1 else ids
        for row_id in ids.tolist():
            visits[row_id].append(step)
        for _ in range(2):  # of two workers: a visit counts once
            pull = path.pull_in_place({"t": ids}, step) if in_place else path.pull({"t": ids}, step, "float32")
            check(ids, pull["t"].flags, step, TRAINABLE | FOUND)
        if step % 20 == 0:
            walk = Reselection({"t": table}, step, {})
            while not walk.advance()[1]:
                pass
            is_hot = (table.index.locate(IDS)[1] >> 31) == 0
            looked = path.read({"t": IDS}, "bfloat16", always_default=False)["t"]
            check(IDS, looked.flags, step, np.where(is_hot, TRAINABLE | FOUND, FOUND))
            assert not is_hot.all()
    assert len(seen_bands) > 15
    thawed = path.pull({"t": IDS}, 161, "float32")["t"].flags
    for row_id in IDS.tolist():
        visits[row_id].append(161)
    check(IDS, thawed, 161, TRAINABLE | FOUND)
    table.close()


def test_bands_end_at_31_and_rows_without_heat_have_none(tmp_path) -> None:
    always = PolicySpec(kind="idle", half_life_steps=1e6)
    tables = [
        table_of(tmp_path, "t", always),
        table_of(tmp_path, "off", PolicySpec(kind="off")),
        table_of(tmp_path, "late", always.model_copy(update={"min_count": 2})),
    ]
    path = path_of(*tables)
    ids = {table.spec.name: IDS[:4] for table in tables}
    for step in range(1, 260):
        flags = {name: rows.flags for name, rows in path.pull(ids, step, "float32").items()}
        if step == 1:
            assert flags["late"].tolist() == [DEFAULT] * 4
        wanted = min(31, int(4 * np.log2(step) + 1e-3))
        if abs(4 * np.log2(step) - np.rint(4 * np.log2(step))) > 0.05:
            assert (flags["t"] == TRAINABLE | FOUND | wanted << BAND_SHIFT).all()
        assert (flags["off"] == TRAINABLE | FOUND).all()
    assert (flags["t"] >> BAND_SHIFT == 31).all()
    unknown = path.read({"t": np.array([10**9])}, "float32", always_default=False)["t"]
    assert unknown.flags.tolist() == [0]


def test_band_is_its_formula_for_every_code() -> None:
    for now in (16384.0, 20000.25, 39999.999):
        codes = np.arange(65536)
        wanted = np.clip(np.floor(4 * (codes - now) / heat.CODES_PER_OCTAVE), 0, 31)
        whole = heat.whole_code(now)
        assert [int(heat.band(np.uint16(code), whole)) for code in codes] == wanted.tolist()


def placed_values(rows: PlacedRows) -> np.ndarray:
    """float32[n, D] of what lies at the addresses."""
    size = 4 * rows.dim
    return np.array([np.frombuffer(ctypes.string_at(address, size), np.float32) for address in rows.addresses.tolist()])


@pytest.mark.parametrize("wire_dtype", ["float32", "float16", "bfloat16"])
def test_float16_tables_beside_float32_ones(tmp_path, wire_dtype: str) -> None:
    """Small integers are exact in every format, so that sums are too."""
    policy = PolicySpec(kind="idle", idle_steps=3, frozen_bits=16, control_fraction=0.0)
    half = policy.model_copy(update={"hot_bits": 16})
    tables = [table_of(tmp_path, name, p) for name, p in (("a", half), ("b", policy), ("c", half))]
    path, rng = path_of(*tables), np.random.default_rng(1)
    models = {"a": np.zeros((60, 8)), "b": np.zeros((60, 8)), "c": np.zeros((60, 8))}
    for table in tables:
        path.pull({table.spec.name: IDS}, 1, "float32")
        table.hot.write(table.find_slots(IDS)[0], np.zeros((60, 8)), np.zeros((60, 0)))
    for step in range(2, 30):
        rows = {name: np.sort(rng.permutation(60)[: rng.integers(1, 20)]) for name in models}
        ids = {name: IDS[at] for name, at in rows.items()}
        pulled = path.pull(ids, step, wire_dtype)  # type: ignore[arg-type]
        placed = path.pull_in_place(ids, step)
        updates = []
        for table in tables:
            name = table.spec.name
            np.testing.assert_array_equal(to_float32(pulled[name].values, wire_dtype), models[name][rows[name]])
            np.testing.assert_array_equal(placed_values(placed[name]), models[name][rows[name]])
            np.testing.assert_array_equal(placed[name].flags, pulled[name].flags)
            gradients = rng.integers(-3, 4, (len(rows[name]), 8)).astype(np.float32)
            updates.append(Update(table, ids[name], gradients, "float32", 1.0))
            models[name][rows[name]] -= gradients
        assert path.apply(updates, scale=1.0, step=step)[1] == 0
        if step % 5 == 0:
            walk = Reselection({table.spec.name: table for table in tables}, step, {})
            while not walk.advance()[1]:
                pass
            assert all(table.rows_frozen for table in tables)
            everything = dict.fromkeys(models, IDS)
            seen = path.read(everything, "float32", always_default=False)
            in_place = path.read_in_place(everything)
            for name, model in models.items():
                np.testing.assert_array_equal(seen[name].values, model)
                np.testing.assert_array_equal(placed_values(in_place[name]), model)
                np.testing.assert_array_equal(in_place[name].flags, seen[name].flags)
    assert tables[0].hot_row_bytes == tables[1].hot_row_bytes - 16
    assert tables[0].stats().bytes_hot <= tables[1].stats().bytes_hot
    for table in tables:
        table.close()
