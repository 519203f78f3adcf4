"""Every HotRows against the reference: reads, k optimizer steps in all wire dtypes, moves, releases, accounting."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from embedding_server.hot_rows import CpuHotRows, HotRows, ReferenceHotRows
from embedding_server.kernels.wire import from_float32, to_float32
from embedding_server.optimizers import initial_state
from embedding_server.reserved import PAGE_BYTES
from embedding_server.spec import OptimizerKind, OptimizerSpec, TableSpec
from embedding_server.store import WIRE_NUMPY

KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
WIRE_DTYPES = ("float32", "float16", "bfloat16")
NUM_ROWS, DIM, STEPS, LEARNING_RATE = 60, 12, 20, 0.05


def optimizer_spec(kind: OptimizerKind, **more: float) -> OptimizerSpec:
    return OptimizerSpec(
        kind=kind, eps=1e-6, beta1=0.8, beta2=0.95, initial_accumulator=0.1, ftrl_l1=0.3, ftrl_l2=0.2, **more
    )


def filled(rows: HotRows, weights: np.ndarray) -> HotRows:
    state = np.tile(initial_state(rows.optimizer, rows.dim), (len(weights), 1))
    rows.write(np.arange(len(weights), dtype=np.int32), weights, state)
    return rows


def random_weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (NUM_ROWS, DIM)).astype(np.float32)


def random_steps(wire_dtype: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(slots int32 with some -1, gradients in the wire dtype, positions) of STEPS steps."""
    rng = np.random.default_rng(1)
    steps = []
    for _ in range(STEPS):
        slots = rng.permutation(NUM_ROWS)[:30].astype(np.int32)
        slots[::8] = -1
        gradients = from_float32(rng.standard_normal((40, DIM)).astype(np.float32), wire_dtype)
        steps.append((slots, gradients, rng.permutation(40)[:30].astype(np.int32)))
    return steps


@pytest.mark.parametrize("clip_norm", [0.0, 1.5])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_equals_the_reference_after_k_steps(kind: OptimizerKind, wire_dtype: str, clip_norm: float) -> None:
    weights = random_weights()
    ours = filled(CpuHotRows(DIM, optimizer_spec(kind, clip_norm=clip_norm), 1000), weights)
    theirs = filled(ReferenceHotRows(DIM, optimizer_spec(kind, clip_norm=clip_norm), 1000), weights)
    for step, (slots, gradients, positions) in enumerate(random_steps(wire_dtype), start=1):
        for rows in (ours, theirs):
            rows.apply(slots, gradients, positions, wire_dtype, 0.5, LEARNING_RATE, step)
    slots = np.arange(NUM_ROWS, dtype=np.int32)
    for one, other in zip(ours.read(slots), theirs.read(slots), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.abs(ours.read(slots)[0] - weights).max() > 0.05


def row_ids_of(slots: np.ndarray) -> np.ndarray:
    """int64[n]: any, as long as each slot has its own."""
    return slots.astype(np.int64) * 7919 - 5


def half_rows(backend: type[HotRows], kind: OptimizerKind, weights: np.ndarray) -> HotRows:
    return filled(backend(weights.shape[1], optimizer_spec(kind), len(weights), hot_bits=16), weights)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_half_rows_equal_the_reference(kind: OptimizerKind, wire_dtype: str) -> None:
    """Rounded by the same random bits: only where float32 arithmetic differs by an ulp may one go up and one down."""
    weights = random_weights()
    ours, theirs = (half_rows(backend, kind, weights) for backend in (CpuHotRows, ReferenceHotRows))
    slots = np.arange(NUM_ROWS, dtype=np.int32)
    np.testing.assert_array_equal(ours.read(slots)[0], weights.astype(np.float16))
    for step, (some, gradients, positions) in enumerate(random_steps(wire_dtype)[:5], start=1):
        pending = np.linspace(0.5, 1.0, len(some)).astype(np.float32)
        for rows in (ours, theirs):
            rows.apply(some, gradients, positions, wire_dtype, 0.5, LEARNING_RATE, step, pending, row_ids_of(some))
            rows.scale(some[some >= 0], pending[some >= 0], step, row_ids_of(some[some >= 0]))
    for one, other in zip(ours.read(slots), theirs.read(slots), strict=True):
        np.testing.assert_allclose(one, other, rtol=4e-3, atol=1e-6)
    assert (ours.read(slots)[0] == theirs.read(slots)[0]).mean() > 0.95
    outs = [np.zeros((NUM_ROWS, DIM), WIRE_NUMPY[wire_dtype]) for _ in range(2)]
    theirs.write(slots, *ours.read(slots))
    for rows, out in zip((ours, theirs), outs, strict=True):
        rows.gather(slots, out, slots, wire_dtype)
    assert outs[0].tobytes() == outs[1].tobytes() == from_float32(ours.read(slots)[0], wire_dtype).tobytes()


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("kind", KINDS)
def test_half_rows_train_as_float32_rows_do_on_average(kind: OptimizerKind, backend: type[HotRows]) -> None:
    """Every row gets the same gradients, each a step below what float16 resolves."""
    num_rows = 2000
    weights = np.full((num_rows, DIM), 0.9, np.float32)
    exact = filled(backend(DIM, optimizer_spec(kind), 1), weights[:1])
    rows = half_rows(backend, kind, weights)
    exact.write(np.zeros(1, np.int32), rows.read(np.zeros(1, np.int32))[0], rows.read(np.zeros(1, np.int32))[1])
    start, rng = exact.read(np.zeros(1, np.int32))[0][0, 0], np.random.default_rng(0)
    slots = np.arange(num_rows, dtype=np.int32)
    for step in range(1, 31):
        gradient = rng.uniform(0.02, 0.05, (1, DIM)).astype(np.float32)
        exact.apply(slots[:1], gradient, slots[:1], "float32", 1.0, 1e-4, step)
        rows.apply(slots, gradient, slots * 0, "float32", 1.0, 1e-4, step, row_ids=row_ids_of(slots))
    wanted = exact.read(slots[:1])[0][0]
    assert (wanted < start).all()
    moved = rows.read(slots)[0].astype(np.float64).mean(axis=0) - start
    np.testing.assert_allclose(moved, wanted - start, rtol=0.15, atol=3e-5)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_half_rows_saturate(backend: type[HotRows]) -> None:
    spec = TableSpec(name="t", dim=4, optimizer=OptimizerSpec(kind="sgd"), init_min=-1e6, init_max=1e6)
    rows = backend(4, spec.optimizer, 100, hot_bits=16)
    slots = np.arange(100, dtype=np.int32)
    rows.initialise(slots, np.arange(100, dtype=np.int64), spec)
    weights, _ = rows.read(slots)
    assert np.abs(weights).max() == 65504
    for step in range(1, 4):
        gradient = np.full((1, 4), -1e30, np.float32)
        rows.apply(slots, gradient, slots * 0, "float32", 1.0, 1.0, step, row_ids=row_ids_of(slots))
    assert (rows.read(slots)[0] == 65504).all()
    rows.write(slots[:1], np.array([[-1e9, 1e9, 0, 65520]], np.float32), np.zeros((1, 0), np.float32))
    assert rows.read(slots[:1])[0].tolist() == [[-65504, 65504, 0, 65504]]


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_half_rows_take_half_the_memory_and_start_from_rounded_values(backend: type[HotRows]) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(), seed=3)
    rows, full = backend(DIM, spec.optimizer, 100_000, hot_bits=16), backend(DIM, spec.optimizer, 100_000)
    slots, row_ids = np.array([7, 3, 90_000], np.int32), np.array([5, -1, 2**62], np.int64)
    for each in (rows, full):
        each.initialise(slots, row_ids, spec)
    np.testing.assert_array_equal(rows.read(slots)[0], full.read(slots)[0].astype(np.float16))
    rows.move(slots, slots[::-1].copy())
    np.testing.assert_array_equal(rows.read(slots[::-1])[0], full.read(slots)[0].astype(np.float16))
    assert 0 <= rows.bytes_weights(10_000) - 2 * 10_000 * DIM < PAGE_BYTES
    rows.release(10)
    assert not rows.read(slots[2:])[0].any()


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("kind", KINDS)
def test_pending_counts_before_and_not_for_the_update(kind: OptimizerKind, backend: type[HotRows]) -> None:
    weights, factor = random_weights(), np.float32(0.625)
    owing = filled(backend(DIM, optimizer_spec(kind), 1000), weights)
    settled = filled(backend(DIM, optimizer_spec(kind), 1000), weights * factor)
    slots, gradients, positions = random_steps("float32")[0]
    owing.apply(slots, gradients, positions, "float32", 1.0, LEARNING_RATE, 1, np.full(len(slots), factor))
    settled.apply(slots, gradients, positions, "float32", 1.0, LEARNING_RATE, 1)
    every = np.arange(NUM_ROWS, dtype=np.int32)
    owing.scale(every, np.full(NUM_ROWS, factor), 1)
    for one, other in zip(owing.read(every), settled.read(every), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def torch_optimizer(kind: OptimizerKind, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    spec = optimizer_spec(kind)
    match kind:
        case "sgd":
            return torch.optim.SGD([parameter], lr=LEARNING_RATE)
        case "adagrad":
            return torch.optim.Adagrad(
                [parameter], lr=LEARNING_RATE, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator
            )
        case "adam":
            betas = (spec.beta1, spec.beta2)
            return torch.optim.SparseAdam([parameter], lr=LEARNING_RATE, betas=betas, eps=spec.eps)
    raise AssertionError(kind)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_updates_equal_torch_optim(kind: OptimizerKind, backend: type[HotRows]) -> None:
    weights = random_weights()
    rows = filled(backend(DIM, optimizer_spec(kind), 1000), weights)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch_optimizer(kind, parameter)
    for step, (slots, gradients, positions) in enumerate(random_steps("float32"), start=1):
        rows.apply(slots, gradients, positions, "float32", 1.0, LEARNING_RATE, step)
        is_hot = slots >= 0
        touched, values = torch.from_numpy(slots[is_hot]).long(), torch.from_numpy(gradients[positions[is_hot]])
        sparse = torch.sparse_coo_tensor(touched[None], values, parameter.shape, check_invariants=True)
        parameter.grad = sparse.coalesce() if kind == "adam" else sparse.to_dense()
        optimizer.step()
    ours, _ = rows.read(np.arange(NUM_ROWS, dtype=np.int32))
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad_is_its_formula() -> None:
    rows = filled(CpuHotRows(4, optimizer_spec("rowwise_adagrad"), 10), np.ones((1, 4), np.float32))
    slot = np.zeros(1, np.int32)
    gradient = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    rows.apply(slot, gradient, slot, "float32", 1.0, 0.5, 1)
    weights, state = rows.read(slot)
    h = 0.1 + (1 + 4 + 9 + 16) / 4
    assert state[0, 0] == pytest.approx(h, rel=1e-6)
    np.testing.assert_allclose(weights[0], 1 - 0.5 * gradient[0] / (h**0.5 + 1e-6), rtol=1e-6)


def mcmahan(gradients: np.ndarray, spec: OptimizerSpec, alpha: float) -> np.ndarray:
    """Algorithm 1 of McMahan et al. 2013 as printed, from w = 0: gradients float64[T, D] -> w after each step."""
    z = np.zeros(gradients.shape[1])
    n = np.full(gradients.shape[1], spec.initial_accumulator)
    w, every = np.zeros_like(z), []
    for g in gradients:
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z, n = z + g - sigma * w, n + g * g
        w = np.where(
            np.abs(z) <= spec.ftrl_l1,
            0.0,
            -(z - np.sign(z) * spec.ftrl_l1) / ((spec.ftrl_beta + np.sqrt(n)) / alpha + spec.ftrl_l2),
        )
        every.append(w)
    return np.array(every)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize(("l1", "l2", "beta"), [(0.0, 0.0, 1.0), (0.6, 0.0, 1.0), (0.6, 0.4, 0.0)])
def test_ftrl_is_mcmahans_algorithm(backend: type[HotRows], l1: float, l2: float, beta: float) -> None:
    spec = OptimizerSpec(kind="ftrl", eps=1e-12, initial_accumulator=0.1, ftrl_l1=l1, ftrl_l2=l2, ftrl_beta=beta)
    rows = filled(backend(DIM, spec, 10), np.zeros((1, DIM), np.float32))
    gradients = np.random.default_rng(5).normal(0.1, 0.4, (60, DIM)).astype(np.float32)
    slot, seen = np.zeros(1, np.int32), []
    for step, gradient in enumerate(gradients, start=1):
        rows.apply(slot, gradient[None], slot, "float32", 1.0, 0.3, step)
        seen.append(rows.read(slot)[0][0])
    wanted = mcmahan(gradients.astype(np.float64), spec, 0.3)
    np.testing.assert_allclose(np.array(seen), wanted, rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(np.array(seen) == 0, wanted == 0)
    assert (wanted == 0).any() == (l1 > 0)  # the threshold was met from both sides
    assert np.abs(wanted[-1]).max() > 0.05


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_ftrl_goes_on_from_its_weights(backend: type[HotRows]) -> None:
    """A thawed row has n and w only, and the rate may change from step to step: a zero gradient moves nothing."""
    weights = random_weights()
    rows = filled(backend(DIM, optimizer_spec("ftrl"), 1000), weights)
    slots = np.arange(NUM_ROWS, dtype=np.int32)
    for step, rate in enumerate([0.1, 0.05, 3.0, 0.0], start=1):
        rows.apply(slots, np.zeros((NUM_ROWS, DIM), np.float32), slots, "float32", 1.0, rate, step)
        np.testing.assert_allclose(rows.read(slots)[0], weights, rtol=1e-6)
    ones = np.ones((NUM_ROWS, DIM), np.float32)
    rows.apply(slots, ones, slots, "float32", 1.0, 0.0, 5)  # no step, though n grows
    after, state = rows.read(slots)
    np.testing.assert_allclose(after, weights, rtol=1e-6)
    np.testing.assert_allclose(state[:, :DIM], 1.1, rtol=1e-6)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_gradient_is_clipped_to_its_norm(backend: type[HotRows], size: float) -> None:
    rows = filled(backend(4, OptimizerSpec(kind="sgd", clip_norm=0.5), 10), np.zeros((2, 4), np.float32))
    gradients = np.array([[3.0, 0.0, -4.0, 0.0], [0.06, 0.08, 0.0, 0.0]], np.float32) * np.float32(size)
    slots = np.arange(2, dtype=np.int32)
    rows.apply(slots, gradients, slots, "float32", 2.0, 1.0, 1)
    norms = np.linalg.norm(2.0 * gradients.astype(np.float64), axis=1, keepdims=True)
    wanted = -2.0 * gradients.astype(np.float64) * np.minimum(1.0, 0.5 / norms)
    np.testing.assert_allclose(rows.read(slots)[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_sgd_on_integers_is_exact(backend: type[HotRows]) -> None:
    rows = filled(backend(DIM, optimizer_spec("sgd"), 1000), np.zeros((NUM_ROWS, DIM), np.float32))
    model = np.zeros((NUM_ROWS, DIM), np.int64)
    rng = np.random.default_rng(3)
    for step in range(1, 50):
        slots = rng.permutation(NUM_ROWS)[:20].astype(np.int32)
        gradients = rng.integers(-8, 9, (20, DIM))
        wire_dtype = WIRE_DTYPES[step % 3]
        sent = from_float32(gradients.astype(np.float32), wire_dtype)
        rows.apply(slots, sent, np.arange(20, dtype=np.int32), wire_dtype, 1.0, 1.0, step)
        model[slots] -= gradients
    np.testing.assert_array_equal(rows.read(np.arange(NUM_ROWS, dtype=np.int32))[0], model)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_gather_writes_only_its_positions(backend: type[HotRows], wire_dtype: str) -> None:
    weights = random_weights()
    rows = filled(backend(DIM, optimizer_spec("sgd"), 1000), weights)
    out = np.full((6, DIM), 3, WIRE_NUMPY[wire_dtype])
    rows.gather(np.array([5, -1, 7], np.int32), out, np.array([4, 0, 1], np.int32), wire_dtype)
    np.testing.assert_array_equal(out[[4, 1]], from_float32(weights[[5, 7]], wire_dtype))
    assert (out[[0, 2, 3, 5]] == 3).all()
    assert to_float32(out, wire_dtype).shape == (6, DIM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_a_new_row_has_its_own_initial_values_and_accumulator(backend: type[HotRows], kind: OptimizerKind) -> None:
    spec = TableSpec(name="item", dim=DIM, optimizer=optimizer_spec(kind), init_min=-0.5, init_max=0.25, seed=9)
    rows = backend(DIM, spec.optimizer, 100)
    slots, row_ids = np.array([3, 0, 99], np.int32), np.array([-1, 2**62, 17], np.int64)
    rows.write(slots, np.ones((3, DIM)), np.full((3, rows.num_state_columns), 9.0))  # what an earlier owner left
    rows.initialise(slots, row_ids, spec)
    weights, state = rows.read(slots)
    assert weights.min() >= -0.5
    assert weights.max() < 0.25
    first, rest = (0.1, 0.0) if kind == "ftrl" else (0.1,) * 2 if "adagrad" in kind else (0.0,) * 2
    assert (state[:, :DIM] == np.float32(first)).all()
    assert (state[:, DIM:] == np.float32(rest)).all()
    alone = backend(DIM, spec.optimizer, 100)
    alone.initialise(np.zeros(1, np.int32), row_ids[2:], spec)
    np.testing.assert_array_equal(alone.read(np.zeros(1, np.int32))[0][0], weights[2])
    other = CpuHotRows(DIM, spec.optimizer, 100)
    other.initialise(slots, row_ids, spec)
    np.testing.assert_array_equal(other.read(slots)[0], weights)
    other.initialise(slots, row_ids, spec.model_copy(update={"name": "user"}))
    assert (other.read(slots)[0] != weights).mean() > 0.9


@pytest.mark.parametrize("backend", [CpuHotRows, ReferenceHotRows])
def test_move_release_and_accounting(backend: type[HotRows]) -> None:
    weights = random_weights()
    rows = filled(backend(DIM, optimizer_spec("adagrad"), 100_000), weights)
    rows.move(np.array([50, 1], np.int32), np.array([1, 50], np.int32))
    moved, state = rows.read(np.array([1, 50], np.int32))
    np.testing.assert_array_equal(moved, weights[[50, 1]])
    assert (state == np.float32(0.1)).all()
    rows.release(10)
    kept, _ = rows.read(np.arange(10, dtype=np.int32))
    np.testing.assert_array_equal(kept[2:], weights[2:10])
    assert not rows.read(np.arange(10, NUM_ROWS, dtype=np.int32))[0].any()
    for slots in (0, 1, 10_000):
        assert 0 <= rows.bytes_weights(slots) - slots * DIM * 4 < PAGE_BYTES
        assert rows.bytes_state(slots) == rows.bytes_weights(slots)
    assert backend(DIM, optimizer_spec("sgd"), 10).bytes_state(10) == 0
    rows.close()


def test_empty_calls_do_nothing() -> None:
    rows = filled(CpuHotRows(DIM, optimizer_spec("adam"), 100), random_weights())
    none = np.zeros(0, np.int32)
    rows.apply(none, np.zeros((0, DIM), np.float32), none, "float32", 1.0, 0.1, 1)
    rows.gather(none, np.zeros((0, DIM), np.float32), none, "float32")
    rows.initialise(none, np.zeros(0, np.int64), TableSpec(name="t", dim=DIM))
    weights, state = rows.read(none)
    assert weights.shape == (0, DIM)
    assert state.shape == (0, 2 * DIM)
    np.testing.assert_array_equal(rows.read(np.arange(NUM_ROWS, dtype=np.int32))[0], random_weights())


def test_a_cpu_shard_imports_no_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from embedding_server.kernels import choose_backend\n"
        "from embedding_server.spec import OptimizerSpec\n"
        "rows = choose_backend('cpu').hot_rows(4, OptimizerSpec(), 10)\n"
        "slot = np.zeros(1, np.int32)\n"
        "rows.apply(slot, np.ones((1, 4), np.float32), slot, 'float32', 1.0, 0.1, 1)\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'fbgemm_gpu' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
