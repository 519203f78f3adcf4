"""Rows freeze and thaw: in as many bits as hold them, within the bound of their format, and nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from embedding_server.errors import SegmentCorrupt
from embedding_server.hints import Hint
from embedding_server.kernels.frozen_reference import choose_bits, error_bound, quantise, read_frozen, rounding_keys
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, TRAINABLE, Identity
from embedding_server.table import Table

WHO = Identity("job", 1, 0)
DIM = 8
NOBODY = np.empty(0, np.int64)


class Rig:
    """A shard with one table of policy idle; rows of it can be set to any weights."""

    def __init__(self, data_dir: Path | None = None, *, kind: str = "rowwise_adagrad", **policy) -> None:
        self.shard = Shard(data_dir=data_dir)
        policy = {"idle_steps": 1, "control_fraction": 0.0, **policy}
        optimizer = OptimizerSpec(kind=kind)
        self.shard.create_tables([TableSpec(name="t", dim=DIM, optimizer=optimizer, policy=PolicySpec(**policy))])
        self.shard.begin_epoch("job", 1, "sync", 1)
        self.table: Table = self.shard._tables["t"]
        self.step = 0

    def train(self, row_ids: np.ndarray, gradient: float = 0.0) -> np.ndarray:
        """One step that visits the rows. Returns what the Pull read, float32[n, DIM]."""
        self.step += 1
        rows = self.shard.pull(WHO, self.step, {"t": row_ids}, "float32").result(0)["t"]
        assert (rows.flags & TRAINABLE).all()
        values = np.full((len(row_ids), DIM), gradient, np.float32)
        pushed = {"t": ShardGradients(row_ids, values, 0.1)} if len(row_ids) else {}
        self.shard.push(WHO, self.step, pushed, "float32").result(0)
        return rows.values.copy()

    def set_weights(self, weights: np.ndarray) -> np.ndarray:
        """Admits rows 0..n-1 and writes their weights. Returns their row_ids."""
        row_ids = np.arange(len(weights), dtype=np.int64)
        self.train(row_ids)
        slots = self.table.index.locate(row_ids)[1].astype(np.int32)
        self.table.hot.write(slots, weights, self.table.hot.read(slots)[1])
        return row_ids

    def freeze(self) -> tuple[int, int]:
        """Lets every row idle, re-selects and writes. (frozen, unfreezable)."""
        self.train(NOBODY)
        frozen = unfreezable = 0
        done = False
        while not done:
            moves, done = self.shard.reselect(WHO, self.step, {})
            frozen += sum(m.frozen for m in moves.values())
            unfreezable += sum(m.unfreezable for m in moves.values())
        while self.shard.maintain():
            pass
        return frozen, unfreezable

    def look_up(self, row_ids: np.ndarray) -> np.ndarray:
        rows = self.shard.lookup({"t": row_ids}, "float32")["t"]
        assert (rows.flags & FOUND).all()
        return rows.values.copy()


@pytest.fixture
def rig(request):
    made = Rig(**getattr(request, "param", {}))
    yield made
    made.shard.close()


def rows_of_all_kinds() -> np.ndarray:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((300, DIM)).astype(np.float32)
    rows[30:60] = 0.0
    rows[60:90] = rows[60:90, :1]
    rows[90:120] *= 1e-6  # too fine for 4 bits
    rows[120:150] *= 1e-41
    rows[150:180] *= 1e5  # too large for 4 and 16 bits
    rows[180:210] *= 1e37
    rows[210:240] += 100.0
    rows[240:245, 3] = np.inf
    rows[245:250, 0] = np.nan
    return rows


@pytest.mark.parametrize(
    "rig",
    [{"frozen_bits": bits, "freeze_rounding": how} for bits in (4, 8, 16, 32) for how in ("nearest", "stochastic")],
    indirect=True,
)
def test_a_row_freezes_in_the_bits_that_hold_it_and_reads_within_its_bound(rig) -> None:
    at_random = rig.table.spec.policy.freeze_rounding == "stochastic"
    wanted = rig.table.spec.policy.frozen_bits
    weights = rows_of_all_kinds()
    bits = choose_bits(weights, wanted)
    row_ids = rig.set_weights(weights)
    assert rig.freeze() == (int((bits > 0).sum()), int((bits == 0).sum()))
    stats = rig.shard.stats().tables["t"]
    assert (stats.rows_frozen, stats.rows_unfreezable) == (int((bits > 0).sum()), int((bits == 0).sum()))
    assert stats.rows_hot == int((bits == 0).sum())
    read = rig.look_up(row_ids)
    np.testing.assert_array_equal(read[bits == 0], weights[bits == 0])
    for taken in np.unique(bits[bits > 0]).tolist():
        of_kind = bits == taken
        error = np.abs(read[of_kind].astype(np.float64) - weights[of_kind])
        assert (error <= error_bound(weights[of_kind], taken, at_random=at_random)).all()
    if wanted == 4:
        assert set(bits.tolist()) == {0, 4, 8}


@pytest.mark.parametrize("rig", [{"frozen_bits": bits} for bits in (4, 8, 16, 32)], indirect=True)
def test_a_thawed_row_is_what_a_look_up_read(rig) -> None:
    weights = rows_of_all_kinds()
    row_ids = rig.set_weights(weights)[choose_bits(weights, rig.table.spec.policy.frozen_bits) > 0]
    rig.freeze()
    before = rig.look_up(row_ids)
    np.testing.assert_array_equal(rig.train(row_ids), before)
    np.testing.assert_array_equal(rig.look_up(row_ids), before)
    assert np.isfinite(before).all()


@pytest.mark.parametrize("rig", [{"frozen_bits": 4}, {"frozen_bits": 8}], indirect=True)
def test_frozen_rows_keep_their_bytes_through_pushes_and_merges(rig) -> None:
    rng = np.random.default_rng(1)
    row_ids = rig.set_weights(rng.standard_normal((6000, DIM)).astype(np.float32))
    rig.freeze()
    before = rig.look_up(row_ids)
    stays = np.ones(6000, np.bool_)
    for _ in range(8):
        visited = rng.choice(row_ids, 900, replace=False)
        rig.train(visited, gradient=1.0)
        stays[visited] = False
        rig.freeze()
        np.testing.assert_array_equal(rig.look_up(row_ids[stays]), before[stays])
    assert stays.sum() > 1000
    assert rig.table.segments.dead_fraction <= 0.2
    assert rig.table.segments.num_segments <= 2 * 32
    assert (rig.look_up(row_ids[~stays]) != before[~stays]).any(axis=1).all()


@pytest.mark.parametrize(("thaw", "gained"), [("warm", True), ("cold", False)])
def test_a_cold_thaw_starts_from_the_accumulator_of_a_new_row(thaw: str, gained: bool) -> None:
    rig = Rig(thaw=thaw, frozen_bits=8)
    row_ids = np.arange(20, dtype=np.int64)
    for _ in range(3):
        rig.train(row_ids, gradient=2.0)
    assert rig.freeze() == (20, 0)
    rig.train(row_ids)
    state = rig.table.hot.read(rig.table.index.locate(row_ids)[1].astype(np.int32))[1]
    expected = 0.1 + 12.0 if gained else 0.1
    np.testing.assert_allclose(state, expected, rtol=0.1)
    rig.shard.close()


def test_a_damaged_segment_fails_the_pull_that_needs_it_and_leaves_the_table_whole(tmp_path) -> None:
    rig = Rig(tmp_path, frozen_bits=8, freeze_rounding="nearest")
    weights = np.random.default_rng(2).standard_normal((500, DIM)).astype(np.float32)
    row_ids = rig.set_weights(weights)
    assert rig.freeze() == (500, 0)
    rig.table.segments.flush()
    (path,) = tmp_path.rglob("*.safetensors")
    original = path.read_bytes()
    with path.open("r+b") as file:  # in place: the map shows it
        file.seek(8 * 500 + 4 * 1025 + 600)
        file.write(b"\x5a\xa5")
    with pytest.raises(SegmentCorrupt, match=r"block 0 .* does not match its CRC-32"):
        rig.look_up(row_ids)
    with pytest.raises(SegmentCorrupt, match=str(path)):
        rig.train(row_ids[:10])
    assert rig.table.slots.num_free == rig.table.slots.high_water
    assert rig.table.rows_frozen == 500
    with path.open("r+b") as file:
        file.write(original)
    rig.step -= 1  # the Pull that failed is sent again
    thawed = rig.train(row_ids[:10])
    assert (np.abs(thawed - weights[:10]) <= error_bound(weights[:10], 8)).all()
    rig.shard.close()


def test_a_segment_cut_short_under_its_map_is_an_error_and_not_the_end_of_the_process(tmp_path) -> None:
    rig = Rig(tmp_path, frozen_bits=8, freeze_rounding="nearest")
    weights = np.random.default_rng(2).standard_normal((5000, DIM)).astype(np.float32)
    row_ids = rig.set_weights(weights)
    assert rig.freeze() == (5000, 0)
    rig.table.segments.flush()
    (path,) = tmp_path.rglob("*.safetensors")
    original = path.read_bytes()
    os.truncate(path, 4096)
    with pytest.raises(SegmentCorrupt, match=rf"has 4096 bytes, {len(original) - 4096} fewer than when it was opened"):
        rig.train(row_ids)
    rig.step -= 1  # the Pull that failed is sent again
    path.write_bytes(original)
    path.unlink()  # what is mapped outlives its name
    assert (np.abs(rig.train(row_ids) - weights) <= error_bound(weights, 8)).all()
    rig.shard.close()


def test_prefetch_changes_nothing(rig) -> None:
    row_ids = rig.set_weights(rows_of_all_kinds()[:200])
    rig.freeze()
    before, stats = rig.look_up(row_ids), rig.shard.stats().tables["t"]
    for ids in (np.concatenate([row_ids, [10**9]]), NOBODY):
        Hint({"t": ids}).run(lambda advance: advance(rig.shard))
    np.testing.assert_array_equal(rig.look_up(row_ids), before)
    assert rig.shard.stats().tables["t"] == stats


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rounding_at_random_depends_on_the_row_id_and_the_step_alone(bits: int) -> None:
    """So it is the same on every shard and in every run, and another at the next freeze."""
    weights = np.random.default_rng(3).standard_normal((40, DIM)).astype(np.float32)
    reads = []
    for others in (0, 25):  # other rows in the table
        rig = Rig(freeze_rounding="stochastic", frozen_bits=bits)
        rig.train(np.arange(1000, 1000 + others, dtype=np.int64))
        row_ids = rig.set_weights(weights)
        rig.freeze()
        reads.append(rig.look_up(row_ids))
        expected = quantise(weights, bits, rounding_keys(row_ids, rig.step))
        np.testing.assert_array_equal(reads[-1], read_frozen(expected, bits, DIM))
        rig.set_weights(weights)
        rig.freeze()
        assert (rig.look_up(row_ids) != reads[-1]).any()
        rig.shard.close()
    np.testing.assert_array_equal(*reads)


@pytest.mark.parametrize("hot_bits", [16, 32])
def test_adam_does_what_the_first_moment_would_still_do_when_a_row_freezes(hot_bits: int) -> None:
    rig = Rig(kind="adam", frozen_bits=32, hot_bits=hot_bits)
    row_ids = np.arange(20, dtype=np.int64)
    for gradient in (1.0, -3.0, 0.5):
        rig.train(row_ids, gradient)
    weights, state = rig.table.hot.read(rig.table.index.locate(row_ids)[1].astype(np.int32))
    assert rig.freeze() == (20, 0)
    m = -0.1 * 3.0 * 0.9 + 0.1 * 0.5 + 0.1 * 0.81
    v = 0.001 * (1.0 * 0.999**2 + 9.0 * 0.999 + 0.25)
    np.testing.assert_allclose(state[:, :DIM], m, rtol=1e-4)
    rate = 0.1 * (1 - 0.999**3) ** 0.5 / (1 - 0.9**3)  # the last Push is of step 3
    to_come = sum(0.9**k * ((1 - 0.999**3) / (1 - 0.999 ** (3 + k))) ** 0.5 for k in range(1, 300))
    np.testing.assert_allclose(rig.look_up(row_ids), weights - to_come * rate * m / v**0.5, rtol=1e-4)
    rig.train(row_ids)
    rig.freeze()
    read = rig.look_up(row_ids)
    rig.train(NOBODY)
    np.testing.assert_array_equal(rig.look_up(row_ids), read)  # a row that rests does not move
    rig.shard.close()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "ftrl"])
def test_no_other_optimizer_moves_a_row_that_freezes(kind: str) -> None:
    rig = Rig(kind=kind, frozen_bits=32)
    row_ids = np.arange(20, dtype=np.int64)
    rig.train(row_ids, 1.0)
    before = rig.look_up(row_ids)
    assert rig.freeze() == (20, 0)
    np.testing.assert_array_equal(rig.look_up(row_ids), before)
    rig.shard.close()
