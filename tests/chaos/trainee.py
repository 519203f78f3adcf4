"""A small trainer whose every number is a function of the step, and the dictionary model of what it leaves behind.

SGD with lr=1, initial values 0, small-integer gradients and frozen_bits 32: float32 sums are exact and free of order,
so the table must equal the model bit for bit, whatever was repeated, lost or killed on the way.

As a program it is the client that the tests kill, with step by step on standard output:

    trainee.py ADDRESS...               says "ready STEP" before each push and waits for a line on standard input
    trainee.py --until STEP ADDRESS...  goes on behind what the shards have, to STEP, and says "done STEP" after each
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from embedding_server.kernels.routing import dedup_route
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import EmbeddingStore, Identity, Moves, PushAck, RoutedIds, TableGradients

SGD = OptimizerSpec(kind="sgd")
SPECS = [
    TableSpec(
        name=name,
        dim=dim,
        optimizer=SGD,
        policy=PolicySpec(kind="idle", idle_steps=2, frozen_bits=32, control_fraction=0),
        init_min=0.0,
        init_max=0.0,
    )
    for name, dim in (("user", 16), ("item", 8))
]
DIMS = {spec.name: spec.dim for spec in SPECS}
JOB = "chaos"
ROWS = 300
RESELECT_EVERY = 3
FIRST_ID, NUM_IDS = -700, 1400


def row_ids_of(table: str, step: int) -> np.ndarray:
    """The batch's row_ids, repeats included."""
    rng = np.random.default_rng([step, len(table)])
    return rng.integers(FIRST_ID, FIRST_ID + NUM_IDS, ROWS)


def gradient_of(table: str, step: int, row_ids: np.ndarray) -> np.ndarray:
    """float32[n, D] of integers from -4 to 4."""
    columns = np.arange(DIMS[table])
    return ((row_ids[:, None] * 7 + step * 13 + columns[None, :] * 3) % 9 - 4).astype(np.float32)


def routed(store: EmbeddingStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def run_step(
    store: EmbeddingStore, who: Identity, step: int, before_push: Callable[[int], None] = lambda step: None
) -> tuple[PushAck, dict[str, Moves]]:
    """Pull, push, and at every third step a re-selection."""
    ids = {table: routed(store, row_ids_of(table, step)) for table in DIMS}
    store.pull(who, step, ids)
    before_push(step)
    gradients = {table: TableGradients(ids[table], gradient_of(table, step, ids[table].row_ids), 1.0) for table in DIMS}
    ack = store.push(who, step, gradients)
    moves = store.reselect(who, step, {}) if step % RESELECT_EVERY == 0 and who.worker == 0 else {}
    return ack, moves


def model_after(steps: int) -> dict[str, np.ndarray]:
    """float32[NUM_IDS, D] of each table after each of the steps was applied wholly and once; row i is FIRST_ID + i."""
    tables = {table: np.zeros((NUM_IDS, dim), np.float32) for table, dim in DIMS.items()}
    for step in range(1, steps + 1):
        for table, rows in tables.items():
            unique = np.unique(row_ids_of(table, step))
            rows[unique - FIRST_ID] -= gradient_of(table, step, unique)
    return tables


def contents(store: EmbeddingStore) -> dict[str, np.ndarray]:
    """The store's rows in the layout of `model_after`."""
    ids = routed(store, np.arange(FIRST_ID, FIRST_ID + NUM_IDS))
    rows = store.lookup(dict.fromkeys(DIMS, ids))
    return {table: rows[table].values[np.argsort(ids.row_ids)] for table in DIMS}


def assert_equals_model(store: EmbeddingStore, steps: int) -> None:
    expected, got = model_after(steps), contents(store)
    for table in DIMS:
        # Bit for bit up to the sign of zero: 0.0 - 0.0 and a row never touched may differ in it.
        assert (got[table] + 0.0).tobytes() == (expected[table] + 0.0).tobytes(), table


def _wait_for_go(step: int) -> None:
    print(f"ready {step}", flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


def main(arguments: Sequence[str]) -> None:
    from services.shard_client import RemoteStore

    is_free = arguments[0] == "--until"
    last, addresses = (int(arguments[1]), arguments[2:]) if is_free else (10_000, arguments)
    store = RemoteStore(addresses)
    store.create_tables(SPECS)
    epoch = store.begin_epoch(JOB, 1, "sync")
    who = Identity(JOB, epoch.epoch, 0)
    for step in range(epoch.last_step + 1, last + 1):
        if is_free:
            run_step(store, who, step)
            print(f"done {step}", flush=True)
        else:
            run_step(store, who, step, _wait_for_go)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
