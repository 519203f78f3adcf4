"""Which row_ids stand for all of a table's: those of some buckets. A row_id is in or out for good.

A *stratum* is a set of buckets that one store reads, and how many of the table's buckets each of them stands for. The
control group's buckets freeze later than the others, so they are sampled apart:

    whole      one stratum a shard, its buckets, each standing for itself: the estimate is a rehearsal of the run
    level l    the treated buckets and the control buckets, every (8^l)th of each, each standing for about 8^l

A row costs the same wherever it lies, so with n sampled rows the error is about 1 / sqrt(n) of a table's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embedding_server.kernels.routing import dedup_route
from embedding_server.policy import control_buckets
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, RoutedIds
from trainer.data.batch import Batch, Schema

#: a level more is a sample of an eighth the size
LEVEL_STEP = 8
MAX_LEVEL = 4  # beyond it no stratum would get smaller: one bucket is the least


@dataclass(frozen=True, slots=True)
class Stratum:
    buckets: np.ndarray  # int64[k], in order
    scale: float  # buckets of the table that each of them stands for


@dataclass(frozen=True, slots=True)
class TableSample:
    """The sampled buckets of one table. Stratum s is read by store s."""

    level: int
    strata: tuple[Stratum, ...]
    owners: np.ndarray  # int32[NUM_BUCKETS]: stratum of each bucket, len(strata) for one that is left out

    @property
    def num_buckets(self) -> int:
        return sum(stratum.buckets.shape[0] for stratum in self.strata)


def sample_table(control: np.ndarray, level: int, num_shards: int) -> TableSample:
    """control: bool[NUM_BUCKETS]. level 0 takes every bucket."""
    if level == 0:
        shards = np.arange(NUM_BUCKETS) * num_shards // NUM_BUCKETS
        strata = [Stratum(np.flatnonzero(shards == shard), 1.0) for shard in range(num_shards)]
    else:
        groups = [np.flatnonzero(~control), np.flatnonzero(control)]
        strata = [_thinned(group, LEVEL_STEP**level) for group in groups if group.shape[0]]
    owners = np.full(NUM_BUCKETS, len(strata), np.int32)
    for number, stratum in enumerate(strata):
        owners[stratum.buckets] = number
    return TableSample(level, tuple(strata), owners)


def _thinned(buckets: np.ndarray, one_in: int) -> Stratum:
    """Evenly spread over the group, for sub-tables of the index grow at sizes that depend on the bucket's number."""
    wanted = max(1, round(buckets.shape[0] / one_in))
    at = (np.arange(wanted) + 0.5) * buckets.shape[0] / wanted
    return Stratum(buckets[at.astype(np.int64)], buckets.shape[0] / wanted)


class IdSample:
    """The sample of every table, and the row_ids of a batch that are in it."""

    def __init__(
        self, specs: Mapping[str, TableSpec], schema: Schema, levels: Mapping[str, int], num_shards: int
    ) -> None:
        """num_shards: of the job, so that whole tables lie as they will lie in the run."""
        place = {name: position for position, name in enumerate(schema.feature_names)}
        self._keys = {table: [place[feature] for feature in features] for table, features in schema.tables.items()}
        self.tables = {
            name: sample_table(control_group(specs[name]), levels.get(name, 0), num_shards) for name in schema.tables
        }
        self.num_stores = max(len(sample.strata) for sample in self.tables.values())

    @property
    def is_whole(self) -> bool:
        return all(sample.level == 0 for sample in self.tables.values())

    def route(self, batch: Batch) -> list[dict[str, RoutedIds]]:
        """By store: the distinct sampled row_ids of each table."""
        values = batch.sparse.values().numpy()
        ends = batch.sparse.offset_per_key()
        by_store: list[dict[str, RoutedIds]] = [{} for _ in range(self.num_stores)]
        for name, keys in self._keys.items():
            sample = self.tables[name]
            row_ids = np.concatenate([values[ends[key] : ends[key + 1]] for key in keys])
            routing = dedup_route(row_ids, sample.owners, len(sample.strata) + 1)
            offsets = routing.shard_offsets
            for store in range(len(sample.strata)):
                own = routing.unique[offsets[store] : offsets[store + 1]]
                if own.shape[0]:
                    by_store[store][name] = RoutedIds(own, np.array([0, own.shape[0]]))
        return by_store


def control_group(spec: TableSpec) -> np.ndarray:
    """bool[NUM_BUCKETS]; where the policy has no control group, the buckets that would be it, so that jobs which differ
    in policy alone share a sample."""
    if spec.policy.kind == "off":
        spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"kind": "idle"})})
    return control_buckets(spec)
