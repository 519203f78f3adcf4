"""Runs every kernel that a shard may need once, so that compiling is over before health says SERVING.

numba keeps what it compiled on disk: only the first start on a machine takes long.
"""

from __future__ import annotations

import logging
import time
from typing import cast, get_args

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.lookup import Encoding, TableQuery
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerKind, OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import WIRE_NUMPY, Frostline, Identity, WireDtype, push_dtype
from services.lookup_codec import LookupReplyMessage

log = logging.getLogger(__name__)

_DIM = 8
_ROWS = 64
_MEMORY_BYTES = 64 << 20
_OPTIMIZERS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
_POLICIES = {
    "idle": PolicySpec(kind="idle", idle_steps=1, freeze_rounding="stochastic"),
    "idle32": PolicySpec(kind="idle", idle_steps=1, frozen_bits=32),
    "topk": PolicySpec(kind="topk", probation_visits=0),
    "counted": PolicySpec(kind="off", min_count=2),
}


def warm_up(backend: str) -> None:
    """Takes a scratch shard through the life of a row: new, hot, frozen, thawed. Raises the shard's errors."""
    started_s = time.monotonic()
    choice_log = logging.getLogger("embedding_server.kernels")
    level = choice_log.level
    choice_log.setLevel(logging.WARNING)  # the shard that serves says which kernels it chose; once is enough
    try:
        shard = Shard(memory_limit_bytes=_MEMORY_BYTES, backend=backend)
    finally:
        choice_log.setLevel(level)
    try:
        _live(shard, [name for kind in _OPTIMIZERS for name in _create_tables(shard, kind)])
    finally:
        shard.close()
    log.info("kernels ready in %.1f s", time.monotonic() - started_s)


def _create_tables(shard: Shard, kind: OptimizerKind) -> list[str]:
    """One table of each policy; their names. A backend may lack an optimizer (FBGEMM on the CPU has no adam)."""
    optimizer = OptimizerSpec(kind=kind)
    specs = [
        TableSpec(name=f"{kind}/{policy_name}", dim=_DIM, optimizer=optimizer, policy=policy)
        for policy_name, policy in _POLICIES.items()
    ]
    try:
        shard.create_tables(specs)
    except InvalidInput as error:
        log.info("optimizer %s is left out of the warm-up: %s", kind, error)
        return []
    return [spec.name for spec in specs]


def _live(shard: Shard, names: list[str]) -> None:
    shard.begin_epoch("warm-up", 1, "sync", 1)
    who = Identity("warm-up", 1, 0)
    step = 0
    for wire_dtype in get_args(WireDtype):
        for start in (0, _ROWS, 0):
            step += 1
            ids = {name: np.arange(start, start + _ROWS, dtype=np.int64) for name in names}
            _step(shard, who, step, ids, wire_dtype)
            _freeze(shard, who, step)
        shard.lookup(ids, wire_dtype)
    _look_up(shard, names)
    while shard.maintain():
        pass
    shard.stats()


def _look_up(shard: Shard, names: list[str]) -> None:
    row_ids = np.arange(_ROWS, dtype=np.int64)
    plain = [TableQuery(name, row_ids) for name in names]
    pooled = [TableQuery(name, row_ids, "mean", np.array([_ROWS], np.int64)) for name in names]
    for queries, encoding in ((plain, "float32"), (plain, "stored"), (pooled, "float16")):
        shard.lookups.look_up(queries, cast(Encoding, encoding), LookupReplyMessage())


def _step(shard: Shard, who: Identity, step: int, ids: dict[str, np.ndarray], wire_dtype: WireDtype) -> None:
    shard.pull(who, step, ids, wire_dtype).result(0)
    pushed = push_dtype(wire_dtype)
    values = np.zeros((_ROWS, _DIM), WIRE_NUMPY[pushed])
    gradients = {
        name: ShardGradients(row_ids, values, 0.1, np.zeros(_DIM, np.float32) if name.endswith("/counted") else None)
        for name, row_ids in ids.items()
    }
    shard.push(who, step, gradients, pushed).result(0)


def _freeze(shard: Shard, who: Identity, step: int) -> None:
    frostlines = {
        name: Frostline(bin=int(np.flatnonzero(heat.counts)[-1]), tie_fraction=0.5)
        for name, heat in shard.heat_histograms(who, step).items()
    }
    done = False
    while not done:
        _, done = shard.reselect(who, step, frostlines)
