"""Pooling and its gradients against the plain torch reference and its autograd, for every wire dtype and layout."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.kernels.wire import from_float32, to_float32
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, TRAINABLE, Rows
from trainer.kernels import pool_rows_reference
from trainer.lookup_plan import LookupPlan
from trainer.lookups import Lookups, Table

DTYPES = ["float32", "float16", "bfloat16"]
POOLED = [
    Table("user", 64, ["u1", "u2"]),
    Table("item", 20, ["i"], is_mean=True),
    Table("tiny", 4, ["u1", "t"]),
    Table("wide", 144, ["w"], is_mean=True),
]
SEQUENCE = [Table("user", 36, ["u1", "u2"]), Table("item", 36, ["i", "t"]), Table("wide", 36, ["w"])]
KEYS = ["w", "unused", "i", "u2", "t", "u1"]


def plan_of(tables: list[Table], dtype: str, pooled: bool, weighted: bool, threads: int = 1) -> LookupPlan:
    owners = (np.arange(NUM_BUCKETS) * 3 // NUM_BUCKETS).astype(np.int32)
    store = SimpleNamespace(wire_dtype=dtype, num_shards=3, shard_of_bucket=owners, is_in_place=False)
    return LookupPlan(tables, store, pooled, weighted, threads)  # type: ignore[arg-type]


def batch(num_samples: int, weighted: bool, seed: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(KEYS) * num_samples,), generator=generator)
    lengths[::7] = 0
    total = int(lengths.sum())
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(
        keys=KEYS, values=torch.randint(-30, 30, (total,), generator=generator), lengths=lengths, weights=weights
    )


def attach_random_rows(lookups: Lookups, dtype: str, flags: list[int], seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    rows = {}
    for table in lookups.plan.tables:
        if table.name in lookups.ids:
            n = lookups.ids[table.name].row_ids.size
            values = from_float32(rng.standard_normal((n, table.dim)).astype(np.float32), dtype)
            rows[table.name] = Rows(values, rng.choice(np.array(flags, np.uint8), n))
    lookups.attach(rows)


def reference(lookups: Lookups, dtype: str) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    rows = []
    for table in lookups.plan.tables:
        values = lookups.rows[table.name].values if table.name in lookups.rows else np.empty((0, table.dim), np.float32)
        rows.append(torch.from_numpy(np.array(to_float32(values, dtype))).requires_grad_())
    weights = torch.from_numpy(lookups.weights.copy()).requires_grad_() if lookups.weights.size else None
    out = pool_rows_reference(
        rows, lookups.slots, lookups.bag_offsets, lookups.inverse, weights, lookups.size, lookups.pitch
    )
    return out, rows, weights


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tables", [POOLED, SEQUENCE], ids=["pooled", "sequence"])
def test_forward_and_gradients(tables: list[Table], dtype: str, weighted: bool, threads: int) -> None:
    pooled = tables is POOLED
    lookups = plan_of(tables, dtype, pooled, weighted, threads).route(batch(9, weighted), for_training=True)
    attach_random_rows(lookups, dtype, [TRAINABLE | FOUND])
    expected, rows, weights = reference(lookups, dtype)
    out = lookups.pool()
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-6, atol=1e-6)

    output_gradient = np.random.default_rng(2).standard_normal(lookups.size).astype(np.float32)
    expected.backward(torch.from_numpy(output_gradient))
    gradients = lookups.row_gradients(output_gradient)
    pushed = "float32" if dtype == "float32" else "bfloat16"
    for table, of_table in zip(lookups.plan.tables, rows, strict=True):
        got = gradients[table.name]
        assert np.array_equal(got.ids.row_ids, lookups.ids[table.name].row_ids)
        assert np.array_equal(got.ids.shard_offsets, lookups.ids[table.name].shard_offsets)
        assert got.default_gradient is None
        tolerance = 1e-5 if pushed == "float32" else 1e-2
        np.testing.assert_allclose(to_float32(got.values, pushed), of_table.grad, rtol=tolerance, atol=tolerance)
    if weights is not None:
        np.testing.assert_allclose(lookups.weight_gradients(output_gradient), weights.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_trainable_rows_get_gradients_and_default_rows_are_summed(dtype: str) -> None:
    lookups = plan_of(POOLED, dtype, True, False).route(batch(40, False), for_training=True)
    attach_random_rows(lookups, dtype, [TRAINABLE | FOUND, FOUND, DEFAULT])
    expected, rows, _ = reference(lookups, dtype)
    output_gradient = np.random.default_rng(3).standard_normal(lookups.size).astype(np.float32)
    expected.backward(torch.from_numpy(output_gradient))
    gradients = lookups.row_gradients(output_gradient)
    pushed = "float32" if dtype == "float32" else "bfloat16"
    for table, of_table in zip(lookups.plan.tables, rows, strict=True):
        flags, got = lookups.rows[table.name].flags, gradients[table.name]
        trains = (flags & TRAINABLE) != 0
        assert np.array_equal(got.ids.row_ids, lookups.ids[table.name].row_ids[trains])
        offsets = lookups.ids[table.name].shard_offsets
        expected_offsets = [int(trains[: offsets[s]].sum()) for s in range(4)]
        assert got.ids.shard_offsets.tolist() == expected_offsets
        tolerance = 1e-5 if pushed == "float32" else 1e-2
        of_rows = of_table.grad.numpy()
        np.testing.assert_allclose(to_float32(got.values, pushed), of_rows[trains], rtol=tolerance, atol=tolerance)
        of_default = of_rows[(flags & DEFAULT) != 0].sum(axis=0)
        np.testing.assert_allclose(got.default_gradient, of_default, rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_bit() -> None:
    results = []
    for threads in (1, 2, 4):
        lookups = plan_of(POOLED, "float32", True, True, threads).route(batch(200, True), for_training=True)
        attach_random_rows(lookups, "float32", [TRAINABLE])
        gradient = np.random.default_rng(4).standard_normal(lookups.size).astype(np.float32)
        gradients = lookups.row_gradients(gradient)
        results.append([lookups.pool(), *(gradients[t.name].values for t in POOLED)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("pooled", [True, False])
def test_batches_without_samples_or_without_values(pooled: bool) -> None:
    tables = POOLED if pooled else SEQUENCE
    plan = plan_of(tables, "float32", pooled, False)
    for num_samples in (0, 3):
        empty = KeyedJaggedTensor(
            keys=KEYS,
            values=torch.empty(0, dtype=torch.int64),
            lengths=torch.zeros(len(KEYS) * num_samples, dtype=torch.int64),
        )
        lookups = plan.route(empty, for_training=True)
        assert lookups.ids == {}
        lookups.attach({})
        out = lookups.pool()
        assert out.size == (num_samples * plan.width if pooled else 0)
        assert (out == 0).all()
        assert lookups.row_gradients(np.zeros(lookups.size, np.float32)) == {}


def test_a_row_of_many_lookups_sums_in_float32() -> None:
    """One ID a hundred thousand times with a 16-bit wire: the sum must not be made in 16 bits."""
    n = 100_000
    plan = plan_of([Table("t", 16, ["f"])], "bfloat16", True, False)
    lookups = plan.route(
        KeyedJaggedTensor(
            keys=["f"], values=torch.zeros(n, dtype=torch.int64), lengths=torch.ones(n, dtype=torch.int64)
        ),
        for_training=True,
    )
    attach_random_rows(lookups, "bfloat16", [TRAINABLE])
    gradients = lookups.row_gradients(np.ones(lookups.size, np.float32))
    assert to_float32(gradients["t"].values, "bfloat16")[0] == pytest.approx([n] * 16, rel=1e-2)


def test_store_answers_of_the_wrong_shape_are_caught_before_a_kernel_reads_them() -> None:
    lookups = plan_of([Table("t", 16, ["i"])], "float32", True, False).route(batch(4, False), for_training=True)
    n = lookups.ids["t"].row_ids.size
    for values, flags in (
        (np.zeros((n - 1, 16), np.float32), np.zeros(n, np.uint8)),
        (np.zeros((n, 16), np.float16), np.zeros(n, np.uint8)),
        (np.zeros((16, n), np.float32).T, np.zeros(n, np.uint8)),
        (np.zeros((n, 16), np.float32), np.zeros(n + 1, np.uint8)),
    ):
        with pytest.raises(AssertionError, match="of table 't'|of 't'"):
            lookups.attach({"t": Rows(values, flags)})
