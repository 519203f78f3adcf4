"""Weight decay that is settled late equals one that touches every hot row at every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embedding_server.errors import InvalidInput
from embedding_server.freezing import thaw
from embedding_server.hot_path import HotPath, Update
from embedding_server.kernels import choose_backend, reference
from embedding_server.optimizers import initial_state
from embedding_server.shard import Shard, ShardGradients
from embedding_server.slots import MemoryBudget
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, Identity, Moves
from embedding_server.table import Table
from embedding_server.table_threads import TableThreads
from embedding_server.weight_decay import WeightDecay

DIM, ROWS, DECAY = 20, 40, 0.3
KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
ALL_IDS = np.arange(ROWS, dtype=np.int64) * 11 - 70
WHO = Identity("job", 1, 0)


def spec_of(kind: OptimizerKind = "sgd", policy: PolicySpec | None = None, **optimizer: float) -> TableSpec:
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=OptimizerSpec(kind=kind, eps=1e-6, weight_decay=DECAY, ftrl_l1=0.01, **optimizer),
        policy=policy or PolicySpec(kind="off"),
        init_min=-1.0,
        init_max=1.0,
    )


def table_of(tmp_path: Path, spec: TableSpec, backend: str = "cpu") -> Table:
    return Table(
        spec, backend=choose_backend(backend), data_dir=tmp_path, budget=MemoryBudget(1 << 26),
        buckets=np.ones(NUM_BUCKETS, np.bool_), on_event=lambda text: None,
    )  # fmt: skip


class Model:
    """Every row decays at every step, before the step's update. Formulas: kernels/reference.py."""

    def __init__(self, spec: TableSpec, weights: np.ndarray) -> None:
        self.spec = spec
        self.weights = weights.copy()
        self.state = np.tile(initial_state(spec.optimizer, DIM), (len(weights), 1))

    def decay(self, learning_rate: float) -> None:
        self.weights *= np.float32(1.0 - learning_rate * DECAY)

    def update(self, rows: np.ndarray, gradients: np.ndarray, learning_rate: float, step: int) -> None:
        new = reference.apply(
            self.spec.optimizer, self.weights[rows], self.state[rows], torch.from_numpy(gradients), learning_rate, step
        )
        self.weights[rows], self.state[rows] = new


def read(path: HotPath, ids: np.ndarray = ALL_IDS) -> np.ndarray:
    return path.read({"t": ids}, "float32", always_default=False)["t"].values.copy()


@pytest.mark.parametrize("policy", ["off", "idle"])
@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for backend in ("cpu", "reference") for kind in KINDS]
    + [("fbgemm", kind) for kind in ("sgd", "adagrad", "rowwise_adagrad")],  # what its CPU path has
)
def test_a_history_equals_the_eager_model(
    tmp_path, backend: str, kind: OptimizerKind, is_pipelined: bool, policy: str
) -> None:
    table = table_of(tmp_path, spec_of(kind, PolicySpec(kind=policy)), backend)
    path, rng = HotPath(TableThreads(1)), np.random.default_rng(0)
    path.add(table)
    model = Model(table.spec, path.pull({"t": ALL_IDS}, 1, "float32")["t"].values)
    batches = {1: np.arange(ROWS)}

    def pull(step: int) -> None:
        batches[step] = np.sort(rng.permutation(ROWS)[: rng.integers(0, 12)])
        pulled = path.pull({"t": ALL_IDS[batches[step]]}, step, "float32")["t"].values
        if not is_pipelined:
            np.testing.assert_allclose(pulled, model.weights[batches[step]], rtol=1e-4, atol=1e-5)

    for step in range(1, 31):
        if step > 1 and not is_pipelined:
            pull(step)
        if is_pipelined:
            pull(step + 1)
        rows, learning_rate = batches[step], 0.02 * (1 + step % 3)
        gradients = rng.standard_normal((len(rows), DIM)).astype(np.float32)
        update = Update(table, ALL_IDS[rows], gradients, "float32", learning_rate)
        assert path.apply([update], scale=1.0, step=step) == (len(rows), 0)
        model.decay(learning_rate)
        model.update(rows, gradients, learning_rate, step)
        np.testing.assert_allclose(read(path), model.weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table.read_hot(table.find_slots(ALL_IDS)[0])[0], model.weights, rtol=1e-4, atol=1e-5)
    table.close()


def test_adam_with_it_is_adamw(tmp_path) -> None:
    table = table_of(tmp_path, spec_of("adam").model_copy(update={"optimizer": OptimizerSpec(
        kind="adam", eps=1e-12, weight_decay=DECAY)}))  # fmt: skip
    path, rng = HotPath(TableThreads(1)), np.random.default_rng(0)
    path.add(table)
    weights = torch.nn.Parameter(torch.from_numpy(path.pull({"t": ALL_IDS}, 1, "float32")["t"].values.copy()))
    theirs = torch.optim.AdamW([weights], lr=0.05, eps=1e-12, weight_decay=DECAY)
    for step in range(1, 40):
        path.pull({"t": ALL_IDS}, step, "float32")
        gradients = rng.standard_normal((ROWS, DIM)).astype(np.float32)
        path.apply([Update(table, ALL_IDS, gradients, "float32", 0.05)], scale=1.0, step=step)
        weights.grad = torch.from_numpy(gradients)
        theirs.step()
    np.testing.assert_allclose(read(path), weights.detach().numpy(), rtol=1e-4, atol=1e-5)
    table.close()


def test_a_pull_decays_once_however_often_it_names_a_row(tmp_path) -> None:
    table = table_of(tmp_path, spec_of())
    path = HotPath(TableThreads(1))
    path.add(table)
    start = path.pull({"t": ALL_IDS}, 1, "float32")["t"].values.copy()
    nothing = Update(table, ALL_IDS[:0], np.empty((0, DIM), np.float32), "float32", 0.5)
    path.apply([nothing], scale=1.0, step=1)
    for _ in range(2):  # of two workers
        twice = path.pull({"t": ALL_IDS.repeat(2)}, 2, "float32")["t"].values
        np.testing.assert_allclose(twice[::2], start * (1 - 0.5 * DECAY), rtol=1e-6)
        np.testing.assert_array_equal(twice[::2], twice[1::2])
    for _ in range(2):
        path.apply([nothing], scale=1.0, step=2)
    np.testing.assert_allclose(read(path), start * (1 - 0.5 * DECAY) ** 2, rtol=1e-6)
    placed = path.pull_in_place({"t": ALL_IDS}, 3)["t"]
    assert placed.copies.size == 0
    np.testing.assert_allclose(
        table.hot.read(table.find_slots(ALL_IDS)[0])[0], start * (1 - 0.5 * DECAY) ** 2, rtol=1e-6
    )
    table.close()


def shard_of(policy: PolicySpec, num_workers: int = 1, mode: str = "sync") -> Shard:
    shard = Shard(backend="cpu", memory_limit_bytes=1 << 26)
    shard.create_tables([spec_of(policy=policy)])
    shard.begin_epoch("job", num_workers, mode, 1)
    return shard


def step_of(shard: Shard, step: int, ids: np.ndarray, learning_rate: float, who: Identity = WHO) -> np.ndarray:
    values = shard.pull(who, step, {"t": ids}, "float32").result(0)["t"].values.copy()
    nothing = ShardGradients(ids[:0], np.empty((0, DIM), np.float32), learning_rate)
    shard.push(who, step, {"t": nothing}, "float32").result(0)
    return values


def test_frozen_rows_do_not_decay() -> None:
    shard = shard_of(PolicySpec(kind="idle", idle_steps=2, frozen_bits=32, control_fraction=0.0))
    start = step_of(shard, 1, ALL_IDS, 0.5)
    left = 1 - 0.5 * DECAY
    for step in range(2, 5):
        step_of(shard, step, ALL_IDS[:5], 0.5)
    moves, done = shard.reselect(WHO, 4, {})
    assert done
    assert moves["t"] == Moves(frozen=ROWS - 5)
    before = shard.lookup({"t": ALL_IDS}, "float32")["t"].values.copy()
    np.testing.assert_allclose(before, start * left**4, rtol=1e-5)  # frozen with all that was owed
    for step in range(5, 9):
        step_of(shard, step, ALL_IDS[:5], 0.5)
    frozen = shard.lookup({"t": ALL_IDS[5:]}, "float32")["t"].values
    np.testing.assert_array_equal(frozen, before[5:])
    thawed = step_of(shard, 9, ALL_IDS, 0.5)
    np.testing.assert_array_equal(thawed[5:], before[5:])
    np.testing.assert_allclose(thawed[:5], start[:5] * left**8, rtol=1e-5)
    after = shard.lookup({"t": ALL_IDS}, "float32")["t"].values
    np.testing.assert_allclose(after[5:], before[5:] * left, rtol=1e-5)
    shard.close()


def test_rows_thawed_by_rank_owe_nothing_of_the_step_that_they_were_frozen_at() -> None:
    policy = PolicySpec(kind="idle", idle_steps=1, frozen_bits=32, control_fraction=0.0)
    shard = shard_of(policy)
    step_of(shard, 1, ALL_IDS, 0.5)
    step_of(shard, 2, ALL_IDS[:5], 0.5)
    shard.reselect(WHO, 2, {})
    table = shard._tables["t"]
    before = shard.lookup({"t": ALL_IDS}, "float32")["t"].values.copy()
    entries, locations, _, frozen = table.index.locate(ALL_IDS)
    assert frozen == ROWS - 5
    assert thaw(table, entries[5:], locations[5:], ALL_IDS[5:], 2).shape[0] == ROWS - 5
    np.testing.assert_allclose(shard.lookup({"t": ALL_IDS}, "float32")["t"].values, before, rtol=1e-6)
    step_of(shard, 3, ALL_IDS, 0.5)
    after = shard.lookup({"t": ALL_IDS}, "float32")["t"].values
    np.testing.assert_allclose(after, before * (1 - 0.5 * DECAY), rtol=1e-5)
    shard.close()


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_a_step_of_two_workers_decays_once(mode: str) -> None:
    shard = shard_of(PolicySpec(kind="off"), num_workers=2, mode=mode)
    workers = [WHO, Identity("job", 1, 1)]
    start = None
    for step in range(1, 5):
        pulls = [shard.pull(who, step, {"t": ALL_IDS}, "float32") for who in workers]
        start = pulls[0].result(0)["t"].values.copy() if start is None else start
        nothing = ShardGradients(ALL_IDS[:0], np.empty((0, DIM), np.float32), 0.5)
        for push in [shard.push(who, step, {"t": nothing}, "float32") for who in workers]:
            push.result(0)
    values = shard.lookup({"t": ALL_IDS}, "float32")["t"].values
    np.testing.assert_allclose(values, start * (1 - 0.5 * DECAY) ** 4, rtol=1e-5)
    shard.close()


def test_the_default_row_decays_at_the_steps_that_train_it() -> None:
    shard = shard_of(PolicySpec(kind="off", min_count=3))
    gradient = np.full(DIM, -2.0, np.float32)
    for step in (1, 2):
        shard.pull(WHO, step, {"t": ALL_IDS[step : step + 1]}, "float32").result(0)
        push = ShardGradients(ALL_IDS[:0], np.empty((0, DIM), np.float32), 0.5, gradient)
        shard.push(WHO, step, {"t": push}, "float32").result(0)
    default = shard.lookup({"t": ALL_IDS[-1:]}, "float32")["t"].values
    np.testing.assert_allclose(default, [[1.0 * (1 - 0.5 * DECAY) + 1.0] * DIM], rtol=1e-6)
    shard.close()


def test_a_rate_that_would_leave_nothing_of_a_row_is_refused() -> None:
    shard = shard_of(PolicySpec(kind="off"))
    shard.pull(WHO, 1, {"t": ALL_IDS}, "float32").result(0)
    push = ShardGradients(ALL_IDS[:0], np.empty((0, DIM), np.float32), 1 / DECAY)
    with pytest.raises(InvalidInput, match=r"times weight_decay=0\.3 must be at most 0\.999"):
        shard.push(WHO, 1, {"t": push}, "float32").result(0)
    shard.close()


def test_half_rows_decay_right_on_average(tmp_path) -> None:
    """A step takes 1/5000 of a row, less than half of what float16 resolves: rounded to the nearest, none would."""
    policy = PolicySpec(kind="off", hot_bits=16)
    table = table_of(tmp_path, spec_of(policy=policy).model_copy(update={"init_min": 0.7, "init_max": 0.7}))
    path, ids = HotPath(TableThreads(1)), np.arange(2000, dtype=np.int64)
    path.add(table)
    rate = 1 / 5000 / DECAY
    for step in range(1, 101):
        path.pull({"t": ids}, step, "float32")
        nothing = Update(table, ids[:0], np.empty((0, DIM), np.float32), "float32", rate)
        path.apply([nothing], scale=1.0, step=step)
    values = read(path, ids).astype(np.float64)
    assert values.mean() == pytest.approx(float(np.float16(0.7)) * (1 - 1 / 5000) ** 100, rel=2e-5)
    table.close()


def test_log_sums_are_kept_by_step() -> None:
    decay = WeightDecay(0.5)
    decay.begin_step(3)
    for step, rate in ((3, 0.1), (3, 0.1), (4, 0.2), (3, 0.1)):
        decay.note(step, rate)
    decay.begin_step(5)
    decay.begin_step(4)  # of a slower worker: what was fixed stays
    left = 0.95 * 0.9
    np.testing.assert_allclose(decay.pending(np.array([1, 3, 4, 5], np.int32)), [left, left, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(decay.to_settle(np.array([2, 5], np.int32), 5), [left, 1], rtol=1e-6)
    assert decay.factor(0.2) == pytest.approx(0.9)
    assert 0 < decay.size_bytes <= 4096
    decay.close()
