"""SnapshotStore: an EmbeddingStore over a snapshot that is served, for models that score with it. Look-ups alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import numpy as np

from embedding_server.errors import InvalidInput, TableConflict
from embedding_server.lookup import ReplyShape, TableQuery
from embedding_server.served_snapshot import ServedSnapshot
from embedding_server.spec import TableSpec
from embedding_server.store import (
    NUM_BUCKETS,
    CutProgress,
    EmbeddingStore,
    EpochInfo,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    PushAck,
    RoutedIds,
    Rows,
    StoreStats,
    TableGradients,
    UpdateMode,
    WireStats,
)


class SnapshotStore(EmbeddingStore):
    """Does not own the snapshot. Thread safety: any thread. InvalidInput for whatever would change a row."""

    wire_dtype = "float32"
    num_shards = 1

    def __init__(self, snapshot: ServedSnapshot) -> None:
        self._snapshot = snapshot
        self.shard_of_bucket = np.zeros(NUM_BUCKETS, np.int32)

    def lookup(self, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        reply = _Reply()
        queries = [TableQuery(name, np.ascontiguousarray(of.row_ids)) for name, of in ids.items()]
        self._snapshot.look_up(queries, "float32", reply)
        rows, at, value = {}, 0, 0
        for query in queries:
            n, dim = query.row_ids.shape[0], self._snapshot.spec(query.table).dim
            values = reply.values[value : value + n * dim].reshape(n, dim)
            rows[query.table] = Rows(values, reply.flags[at : at + n])
            at, value = at + n, value + n * dim
        return rows

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """What is there already is fine. InvalidInput for a table that is not, TableConflict for another spec."""
        known = self.table_specs()
        for spec in specs:
            if spec.name not in known:
                self._refuse(f"create table {spec.name!r}")
            if known[spec.name] != spec:
                raise TableConflict(f"table {spec.name!r} has another spec in snapshot {self._snapshot.cut.name}")

    def table_specs(self) -> dict[str, TableSpec]:
        return self._snapshot.table_specs()

    def stats(self) -> StoreStats:
        return StoreStats({name: self._snapshot.stats(name) for name in self.table_specs()})

    def mask_info(self) -> dict[str, MaskInfo]:
        """Without heat."""
        return {name: MaskInfo(self._snapshot.stats(name)) for name in self.table_specs()}

    @property
    def wire_stats(self) -> WireStats:
        return WireStats()

    def close(self) -> None:
        """The snapshot is its owner's."""

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInput(
            f"{what}: snapshot {self._snapshot.cut.name} is served read-only; train with `frostline train --resume`"
        )

    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int | None = None, *, will_restore: bool = False
    ) -> EpochInfo:
        self._refuse("begin_epoch")

    def pull(self, who: Identity, step: int, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        self._refuse("pull")

    def push(self, who: Identity, step: int, gradients: Mapping[str, TableGradients]) -> PushAck:
        self._refuse("push")

    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> None:
        self._refuse("drop_tables")

    def meet(self, who: Identity, step: int, number: int, topic: str, words: str = "") -> list[str]:
        self._refuse("meet")

    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        self._refuse("heat_histograms")

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> dict[str, Moves]:
        self._refuse("reselect")

    def end_data_pass(self, who: Identity, step: int) -> dict[str, Moves]:
        self._refuse("end_data_pass")

    def delete_rows(self, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
        self._refuse("delete_rows")

    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        self._refuse("begin_cut")

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        self._refuse("cut_progress")

    def abandon_cut(self, who: Identity) -> None:
        self._refuse("abandon_cut")

    def restore(self, who: Identity, folder: str, anew: Collection[str] = ()) -> None:
        self._refuse("restore")


class _Reply:
    """A LookupReply in arrays of its own."""

    def __init__(self) -> None:
        self.flags, self.values = np.empty(0, np.uint8), np.empty(0, np.float32)

    def __call__(self, shape: ReplyShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.flags, self.values = np.empty(shape.num_rows, np.uint8), np.empty(shape.values_bytes // 4, np.float32)
        return self.flags, np.empty(0, np.uint8), self.values.view(np.uint8)
