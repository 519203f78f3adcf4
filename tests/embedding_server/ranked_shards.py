"""Some shards of one table of policy topk, driven like a store would, for the tests of ranking and scores."""

from __future__ import annotations

import numpy as np

from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import frostline_at
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, TRAINABLE, Frostline, HeatHistogram, Identity
from embedding_server.table import Table

WHO = Identity("job", 1, 0)


class RankedShards:
    def __init__(self, spec: TableSpec, num_shards: int = 1, **options) -> None:
        self.spec = spec
        self.owner = np.arange(NUM_BUCKETS) % num_shards
        self.shards = [Shard(buckets=self.owner == s, **options) for s in range(num_shards)]
        for shard in self.shards:
            shard.create_tables([spec])
            shard.begin_epoch("job", 1, "sync", 1)
        self.step = 0
        self.frostline: Frostline | None = None

    def __enter__(self) -> RankedShards:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.close()

    @property
    def tables(self) -> list[Table]:
        return [shard._tables["t"] for shard in self.shards]

    def train(self, row_ids: np.ndarray, gradients: np.ndarray | None = None, lr: float = 0.1) -> np.ndarray:
        """One step: a visit of each of these unique row_ids, and a gradient float32[n, D] (ones) to the hot ones.

        Returns bool[n]: the rows that were trainable.
        """
        self.step += 1
        if gradients is None:
            gradients = np.ones((row_ids.shape[0], self.spec.dim), np.float32)
        trainable = np.zeros(row_ids.shape[0], np.bool_)
        of_shard = self.owner[buckets_of(row_ids, NUM_BUCKETS)]
        for number, shard in enumerate(self.shards):
            at = np.flatnonzero(of_shard == number)
            rows = shard.pull(WHO, self.step, {"t": row_ids[at]}, "float32").result(0)["t"]
            hot = at[(rows.flags & TRAINABLE) > 0]
            trainable[hot] = True
            push = ShardGradients(row_ids[hot], gradients[hot], lr, None)
            assert shard.push(WHO, self.step, {"t": push}, "float32").result(0).rows_ignored == 0
        return trainable

    def histogram(self) -> HeatHistogram:
        parts = [shard.heat_histograms(WHO, self.step)["t"] for shard in self.shards]
        return sum(parts[1:], parts[0])

    def reselect(self) -> Frostline:
        self.frostline = frostline_at(self.spec.policy, self.histogram(), self.step)
        for shard in self.shards:
            while not shard.reselect(WHO, self.step, {"t": self.frostline})[1]:
                pass
            while shard.maintain():
                pass
        return self.frostline

    def entries(self) -> dict[int, tuple[bool, int]]:
        """row_id -> (is hot, heat code), over all shards."""
        out: dict[int, tuple[bool, int]] = {}
        for table in self.tables:
            entries = table.index.scan(0, NUM_BUCKETS)
            for row_id, location, code in zip(
                entries.row_ids.tolist(), entries.locations.tolist(), entries.heat.tolist(), strict=True
            ):
                out[row_id] = (location >> 31 == 0, code)
        return out

    def hot(self) -> set[int]:
        return {row_id for row_id, (is_hot, _) in self.entries().items() if is_hot}

    def values(self, row_ids: np.ndarray) -> np.ndarray:
        """float32[n, D] as a look-up reads them."""
        out = np.zeros((row_ids.shape[0], self.spec.dim), np.float32)
        of_shard = self.owner[buckets_of(row_ids, NUM_BUCKETS)]
        for number, shard in enumerate(self.shards):
            at = of_shard == number
            out[at] = shard.lookup({"t": row_ids[at]}, "float32")["t"].values
        return out
