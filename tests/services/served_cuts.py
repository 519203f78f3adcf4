"""A job whose rows say which step they are of, cut by cut, and calls to a server of its snapshots: for the tests of
`frostline serve`."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import numpy as np

from embedding_server.inproc import InprocStore
from embedding_server.lookup import TableQuery
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity, TableGradients
from services import lookup_codec
from services.shard_channel import CHANNEL_OPTIONS
from tests.trainer.trained_snapshots import cut_of, route

JOB, DIM = "job", 16
TABLES = ("a", "b")
ROW_IDS = np.arange(-200, 200, dtype=np.int64)


class ConstantJob:
    """After step s every value of every row is s: SGD of rate 1 from 0, with a gradient of -1 for all rows."""

    def __init__(self, uri: Path, policy: PolicySpec | None = None) -> None:
        self.uri, self.step, self.cuts = uri, 0, []
        self._store = InprocStore(memory_limit_bytes=128 << 20)
        policy = policy or PolicySpec(kind="off")
        common = {
            "dim": DIM,
            "optimizer": OptimizerSpec(kind="sgd"),
            "policy": policy,
            "init_min": 0.0,
            "init_max": 0.0,
        }
        self._store.create_tables([TableSpec(name=name, **common) for name in TABLES])
        self._begin()

    def _begin(self) -> None:
        self._who = Identity(JOB, self._store.begin_epoch(JOB, 1, "sync").epoch, 0)

    def train(self, steps: int = 1) -> None:
        ids = route(self._store, ROW_IDS)
        for _ in range(steps):
            self.step += 1
            self._store.pull(self._who, self.step, dict.fromkeys(TABLES, ids))
            gradient = TableGradients(ids, np.full((ROW_IDS.shape[0], DIM), -1.0, np.float32), 1.0, None)
            self._store.push(self._who, self.step, dict.fromkeys(TABLES, gradient))

    def cut(self, *, is_delta: bool = False) -> Path:
        """A complete snapshot of the step; a delta of the last one."""
        self.cuts.append(cut_of(self._store, self._who, self.uri, self.step, self.cuts[-1] if is_delta else None))
        return self.cuts[-1]

    def close(self) -> None:
        self._store.close()


class LookupCaller:
    """One channel; raises grpc.RpcError."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._lookup = self._channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")

    def __call__(self, ids: dict[str, np.ndarray], encoding: str = "float32") -> list[lookup_codec.TableAnswer]:
        request = lookup_codec.encode_lookup(encoding, [TableQuery(name, row_ids) for name, row_ids in ids.items()])
        return lookup_codec.decode_answers(self._lookup(request, timeout=20))

    def close(self) -> None:
        self._channel.close()


def wait_until(condition, timeout_s: float = 60.0) -> float:
    """Seconds that it took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, "it never came about"
        time.sleep(0.01)
    return time.monotonic() - begun_s
