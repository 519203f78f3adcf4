"""Tables with rows of every state on shards in this process, and what a look-up of them must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embedding_server.kernels.routing import dedup_route
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity, RoutedIds, TableGradients
from services.shard_client import RemoteStore

SGD = OptimizerSpec(kind="sgd")
#: `user` trains all rows; of `item` those that were seen once only are frozen, in 4 bits; `rare` has a default row
SPECS = [
    TableSpec(name="user", dim=8, optimizer=SGD, policy=PolicySpec(kind="off"), init_min=0.0, init_max=0.0),
    TableSpec(name="item", dim=16, optimizer=SGD, policy=PolicySpec(kind="idle", idle_steps=2)),
    TableSpec(
        name="rare", dim=4, optimizer=SGD, policy=PolicySpec(kind="off", min_count=2), init_min=0.0, init_max=0.0
    ),
]
DIMS = {spec.name: spec.dim for spec in SPECS}
ODD_IDS = np.array([-(2**63), -(2**63) + 1, -1, 0, 1, 2**62 + 7, 2**63 - 1])
IDS = np.concatenate([np.arange(100), ODD_IDS])
STEPS = 6


def value_of(row_ids: np.ndarray) -> np.ndarray:
    """What each value of a row of `user` is after training: a small integer that its row_id gives, float32[n]."""
    return (row_ids % 1009 + 1).astype(np.float32)


def train(addresses: Sequence[str], job: str = "job") -> None:
    """STEPS steps: `user` gets value_of in the first; the first 20 of `item` are visited in each, the others in the
    first alone, so that they freeze; of `rare` each row_id is visited once, and 1 to 9 twice."""
    store = RemoteStore(addresses)
    try:
        store.create_tables(SPECS)
        epoch = store.begin_epoch(job, 1, "sync", 1)
        who = Identity(job, epoch.epoch, 0)
        for step in range(1, STEPS + 1):
            seen = {"user": IDS if step == 1 else IDS[:1], "item": IDS if step == 1 else IDS[:20]}
            seen["rare"] = IDS[1:10] if step == 2 else IDS if step == 1 else IDS[:0]
            ids = {name: _routed(store, row_ids) for name, row_ids in seen.items()}
            store.pull(who, step, ids)
            store.push(who, step, {name: _gradients(name, step, routed) for name, routed in ids.items()})
            if step == STEPS - 1:
                store.reselect(who, step, {})
    finally:
        store.close()


def _routed(store: RemoteStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def _gradients(name: str, step: int, routed: RoutedIds) -> TableGradients:
    values = np.zeros((len(routed.row_ids), DIMS[name]), np.float32)
    if name == "user" and step == 1:
        values[:] = -value_of(routed.row_ids)[:, None]
    if name == "item" and step == 1:
        values[:] = np.sin(routed.row_ids[:, None] % 1000 + np.arange(DIMS[name]))
    default = np.full(DIMS[name], -0.5, np.float32) if name == "rare" and step == 1 else None
    return TableGradients(routed, values, 1.0, default)


def expected_user(row_ids: np.ndarray) -> np.ndarray:
    """float32[n, 8]: trained rows, and zeros for others."""
    rows = np.where(np.isin(row_ids, IDS), value_of(row_ids), 0.0).astype(np.float32)
    return np.repeat(rows[:, None], DIMS["user"], axis=1)


def random_ids(seed: int, count: int) -> Mapping[str, np.ndarray]:
    """Known and unknown row_ids, repeated, in any order."""
    random = np.random.default_rng(seed)
    pool = np.concatenate([IDS, random.integers(-(2**63), 2**63 - 1, 20)])
    return {name: random.choice(pool, count) for name in DIMS}
