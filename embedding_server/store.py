"""EmbeddingStore: the seam between training and storage. Trainers see nothing else of the embedding servers.

Implementations: InprocStore (embedding_server/inproc.py: a shard in this process, no server) and RemoteStore
(services/shard_client.py: shards over gRPC). tests/services/test_shard_client.py holds them to the same rows.

Shapes: n row_ids of one table in one call, D the table's dim, S shards, W wire bytes of a value (4 or 2).

Routing. A caller hands over row_ids that are unique within a table and grouped by shard: `shard_offsets[s]` to
`shard_offsets[s+1]` belong to shard s. trainer/ and tests get that from kernels/routing.py; replies keep the order, so
nobody permutes rows.

Steps count from 1. What is not an error: an unknown row_id (it is a new row), an empty table entry, a table left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from embedding_server.spec import TableSpec

NUM_BUCKETS = 1024
#: Bins of what rows of policy `topk` are ranked by, higher is kept; of heat and of scores each is 1.1% wide.
NUM_RANK_BINS = 4096

MAX_SEQUENCE = 64  # deltas on a full cut

WireDtype = Literal["float32", "float16", "bfloat16"]
#: numpy dtype that holds one wire value; bfloat16 has no numpy type and travels as its 16 bits
WIRE_NUMPY: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


def push_dtype(wire_dtype: WireDtype) -> WireDtype:
    """Gradients of a float16 store travel as bfloat16, because small gradients underflow in float16."""
    return "bfloat16" if wire_dtype == "float16" else wire_dtype


#: Where the rows of a reply are to lie, for who sends them on. Called once with the tables, their numbers of rows and
#: their dims; returns flags uint8[N] and values [V] in the wire dtype, both flat, all tables in that order.
ReplyBuffers = Callable[[Sequence[str], Sequence[int], Sequence[int]], tuple[np.ndarray, np.ndarray]]

#: bits of Rows.flags
TRAINABLE = 1  # a gradient for this row will be applied
DEFAULT = 2  # the values are the table's default row: sum its gradient into TableGradients.default_gradient
FOUND = 4  # the row_id has a row of its own
STATE = TRAINABLE | DEFAULT | FOUND
#: Bits 3 to 7 of Rows.flags of a pull: the heat band of the row after this visit, min(31, floor(4 log2 heat)) for
#: heat >= 1, else 0; also 0 for default rows, for row_ids that are not found and under policy `off`.
BAND_SHIFT = 3

UpdateMode = Literal["sync", "pipelined"]


@dataclass(frozen=True, slots=True)
class RoutedIds:
    """Unique row_ids of one table, grouped by shard."""

    row_ids: np.ndarray  # int64[n]
    shard_offsets: np.ndarray  # int64[S+1], from 0 to n


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table in the order of the request."""

    values: np.ndarray  # [n, D] of WIRE_NUMPY[wire_dtype]
    flags: np.ndarray  # uint8[n] of TRAINABLE | DEFAULT | FOUND


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of one table where they lie, float32[D] each, for a store in the trainer's process; see pull_in_place."""

    addresses: np.ndarray  # int64[n]
    flags: np.ndarray  # uint8[n], as in Rows
    dim: int
    copies: np.ndarray  # float32[m, D]: rows that had to be made; some of the addresses point here


@dataclass(frozen=True, slots=True)
class RowSums:
    """Gradients of n rows of one table as the sums they are, for a store in the trainer's process to make itself.

    Row i's is the sum over j in [starts[rows[i]], starts[rows[i] + 1]) of scales[j] * source[UNIT * positions[j] :][:D]
    with UNIT of kernels/row_sums.py. Whoever gives it has made sure that every sum is finite, and changes nothing of it
    until the Push returns. All arrays are contiguous.
    """

    source: np.ndarray  # float32
    positions: np.ndarray  # int32
    scales: np.ndarray  # float32 as positions; empty: all are 1
    starts: np.ndarray  # int64
    rows: np.ndarray  # int32[n], rising


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Gradients of one table, summed over the worker's batch; only rows whose Pull said TRAINABLE."""

    ids: RoutedIds
    values: np.ndarray  # [n, D] of WIRE_NUMPY[wire_dtype] ("float16" pushes travel as bfloat16: it does not underflow)
    learning_rate: float
    default_gradient: np.ndarray | None = None  # float32[D]; sum over the batch's ids whose Pull said DEFAULT
    sums: RowSums | None = None  # in place of values, which are then [0, D]; only for a store that is_in_place


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is calling: a worker of one epoch of one job."""

    job: str
    epoch: int
    worker: int


@dataclass(frozen=True, slots=True)
class EpochInfo:
    epoch: int
    last_step: int  # last step that every worker's push was applied of, on every shard; 0 before the first


@dataclass(frozen=True, slots=True)
class PushAck:
    step: int
    rows_applied: int
    rows_ignored: int  # rows that were not trainable; 0 in sync mode
    duplicate: bool  # this step was applied before; nothing was done now


@dataclass(frozen=True, slots=True)
class Frostline:
    """Rows in rank bins above `bin` lie above it; inside it those whose tie hash is below tie_fraction. bin=-1: all.

    A row on the wrong side of it moves only from margin_bins away, and of the rows at just that distance a share of
    held_fraction, drawn by a hash that is new at every step, stays.
    """

    bin: int
    tie_fraction: float = 0.0
    margin_bins: int = 0
    held_fraction: float = 0.0


def _no_rank() -> np.ndarray:
    return np.zeros(NUM_RANK_BINS, np.int64)


@dataclass(frozen=True, slots=True)
class HeatHistogram:
    """Rows by rank bin (policy.py), over hot and frozen rows past probation and outside the control buckets."""

    counts: np.ndarray  # int64[NUM_RANK_BINS]
    rows_total: int  # rows that have an index entry and lie outside the control buckets, probation included
    rows_probation: int
    counts_hot: np.ndarray = field(default_factory=_no_rank)  # of counts, the rows that are hot

    def __add__(self, other: HeatHistogram) -> HeatHistogram:
        return HeatHistogram(
            self.counts + other.counts,
            self.rows_total + other.rows_total,
            self.rows_probation + other.rows_probation,
            self.counts_hot + other.counts_hot,
        )


@dataclass(frozen=True, slots=True)
class Moves:
    """What a re-selection, or the end of a data pass, did to one table."""

    frozen: int = 0
    thawed: int = 0
    unfreezable: int = 0
    forgotten: int = 0

    def __add__(self, other: Moves) -> Moves:
        return Moves(
            self.frozen + other.frozen,
            self.thawed + other.thawed,
            self.unfreezable + other.unfreezable,
            self.forgotten + other.forgotten,
        )


@dataclass(frozen=True, slots=True)
class Erased:
    """What delete_rows found and removed of one table."""

    hot: int = 0
    frozen: int = 0
    waiting: int = 0  # IDs below min_count
    unknown: int = 0  # that were not there: no error

    def __add__(self, other: Erased) -> Erased:
        return Erased(
            self.hot + other.hot,
            self.frozen + other.frozen,
            self.waiting + other.waiting,
            self.unknown + other.unknown,
        )


@dataclass(frozen=True, slots=True)
class TableStats:
    """State of one table, summed over shards. Bytes are committed memory or file bytes, dead rows included."""

    rows_hot: int = 0
    rows_frozen: int = 0
    rows_probation: int = 0  # a subset of rows_hot
    rows_unfreezable: int = 0
    rows_default_reads: int = 0  # row reads answered with the default row since start
    rows_ignored: int = 0
    bytes_hot: int = 0  # weights of committed hot slots
    bytes_state: int = 0  # optimizer state, last_step, visits and what deltas need, of committed hot slots
    bytes_frozen: int = 0  # segment bytes: rows, ids, accumulators, visits; dead rows included
    bytes_index: int = 0  # index entries without their heat
    bytes_heat: int = 0  # 2 bytes per index slot, and the counts of IDs below min_count
    bytes_peak: int = 0  # highest bytes_total that each shard saw at a Pull or an Advance, summed over shards
    moves_frozen: int = 0  # rows that froze since start, for whatever reason; the next three are its parts
    moves_frozen_idle: int = 0  # no visit in idle_steps
    moves_frozen_rank: int = 0  # below the frostline
    moves_frozen_limit: int = 0  # to stay under hot_bytes or the memory limit
    moves_thawed: int = 0  # rows that thawed since start; the next two are its parts
    moves_thawed_visit: int = 0
    moves_thawed_rank: int = 0  # above the frostline
    moves_forgotten: int = 0  # rows that lost their index entry: rare and idle, or rare at the end of a data pass
    rows_erased: int = 0  # rows, and IDs below min_count, that delete_rows removed since start
    bytes_erasure_pending: int = 0  # bytes of segments that may still hold some of them; 0: every byte is gone

    @property
    def bytes_total(self) -> int:
        return self.bytes_hot + self.bytes_state + self.bytes_frozen + self.bytes_index + self.bytes_heat

    def __add__(self, other: TableStats) -> TableStats:
        names = self.__dataclass_fields__
        return TableStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


#: MaskInfo counts rows by heat in bands of half an octave: band i holds heat in [2^((i - 16) / 2), 2^((i - 15) / 2)).
#: The first also holds all that is below it and rows never visited, the last all that is above.
NUM_HEAT_BANDS = 64
HEAT_BAND_OF_ONE = 16


def _no_heat() -> np.ndarray:
    return np.zeros(NUM_HEAT_BANDS, np.int64)


@dataclass(frozen=True, slots=True)
class MaskInfo:
    """What is hot and what is frozen in one table, summed over shards."""

    stats: TableStats
    frostline: Frostline | None = None  # policy topk: the one of the last re-selection; None before the first
    # int64[NUM_HEAT_BANDS] each: rows by their heat at the last step that the table has seen
    heat_counts_hot: np.ndarray = field(default_factory=_no_heat)
    heat_counts_frozen: np.ndarray = field(default_factory=_no_heat)
    rows_ranked: int = 0  # rows hot by rank after the last re-selection: past probation, and above the frostline
    rows_ranked_before: int = 0  # of these, the rows that were hot before it

    @property
    def topk_overlap(self) -> float:
        """Share of the rows now hot by rank that were hot before the last re-selection; nan without a rank."""
        return self.rows_ranked_before / self.rows_ranked if self.rows_ranked else float("nan")

    def __add__(self, other: MaskInfo) -> MaskInfo:
        return MaskInfo(
            self.stats + other.stats,
            self.frostline or other.frostline,
            self.heat_counts_hot + other.heat_counts_hot,
            self.heat_counts_frozen + other.heat_counts_frozen,
            self.rows_ranked + other.rows_ranked,
            self.rows_ranked_before + other.rows_ranked_before,
        )


@dataclass(frozen=True, slots=True)
class StoreStats:
    tables: dict[str, TableStats]
    events: list[str] = field(default_factory=list)  # newest last, at most 100

    def total(self) -> TableStats:
        return sum(self.tables.values(), TableStats())


@dataclass(frozen=True, slots=True)
class CutProgress:
    """How far one shard is with the last cut that a job began on it."""

    step: int
    is_done: bool  # nothing more will be written; whole unless there is an error
    error: str | None = None  # why the shard gave it up: its part of the folder is gone, its rows are as they were
    bytes_written: int = 0  # of files made by this cut; linked segments cost none
    rows: int = 0  # hot and frozen, that are in the cut so far


@dataclass(frozen=True, slots=True)
class WireStats:
    """Bytes of row_ids, values and flags that crossed (or would cross) the wire, and rows of gradients sent."""

    bytes_pulled: int = 0
    bytes_pushed: int = 0
    rows_pulled: int = 0
    rows_pushed: int = 0

    def __add__(self, other: WireStats) -> WireStats:
        return WireStats(
            self.bytes_pulled + other.bytes_pulled,
            self.bytes_pushed + other.bytes_pushed,
            self.rows_pulled + other.rows_pulled,
            self.rows_pushed + other.rows_pushed,
        )


class EmbeddingStore(ABC):
    """A set of tables over one or more shards.

    Thread safety: every method may be called from any thread; calls of one worker must be in step order.
    Errors: embedding_server.errors; a call that raises has changed nothing.
    """

    wire_dtype: WireDtype
    num_shards: int
    shard_of_bucket: np.ndarray  # int32[NUM_BUCKETS]
    is_in_place: bool = False  # hot rows lie in this process: pull_in_place and TableGradients.sums work

    @abstractmethod
    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Creates tables on every shard. Repeating an equal spec is fine; a different one is TableConflict."""

    @abstractmethod
    def table_specs(self) -> dict[str, TableSpec]: ...

    @abstractmethod
    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int | None = None, *, will_restore: bool = False
    ) -> EpochInfo:
        """Starts the worker group anew and fences every earlier epoch on every shard before it returns.

        epoch None: the largest epoch that any shard acknowledged, plus one. Called once, by rank 0; the other workers
        learn the epoch from it. Pushes staged but not applied are dropped, and so is a cut that is being written.
        will_restore: `restore` follows, so shards may stand at different steps, or within one. NotReady without it.
        """

    @abstractmethod
    def pull(self, who: Identity, step: int, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        """Training read of `step`: visits, admits, thaws. A repeat of the same step reads again and has no effect.

        Every worker pulls every step once from every shard, with no ids if need be. sync: waits until step-1 is
        applied. pipelined: waits until every worker has pulled step-1.
        """

    def pull_in_place(
        self, who: Identity, step: int, ids: Mapping[str, RoutedIds], use: Callable[[Mapping[str, PlacedRows]], None]
    ) -> None:
        """pull without copying the rows, if is_in_place: calls use(rows) while nobody can move or change them.

        After it returned the addresses mean nothing. It may run in another worker's thread and must not call the store.
        """
        raise AssertionError(f"{type(self).__name__} has no rows in this process")

    @abstractmethod
    def push(self, who: Identity, step: int, gradients: Mapping[str, TableGradients]) -> PushAck:
        """Applies gradients of `step`, exactly once however often it is sent. Divided by num_workers.

        sync: returns when all workers' pushes of the step were summed and applied. A table's learning_rate must be the
        same on every worker.
        """

    @abstractmethod
    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> None:
        """Advance: deletes tables with their rows and files, on every shard.

        UnknownTable if there is none of a name, InvalidInput if it is trained by another job; nothing is dropped then.
        Needs step applied and no Pull of step+1 (NotReady otherwise); one worker calls while the others wait. Snapshots
        keep what they have.
        """

    @abstractmethod
    def meet(self, who: Identity, step: int, number: int, topic: str, words: str = "") -> list[str]:
        """Waits until every worker of the job has come with the same topic; what each said, in order of workers.

        Between the caller's Push of step and its Pull of step+1; number counts its meetings of that step, from 0.
        InvalidInput for all if topics differ, NotReady if another worker has gone on to the next step, StoreUnavailable
        if one does not come in time.
        """

    @abstractmethod
    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        """Advance, first half: the heat of every table of policy `topk`, summed over shards. Changes nothing."""

    @abstractmethod
    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> dict[str, Moves]:
        """Advance, second half: freezes and thaws. Needs step applied and no Pull of step+1 (NotReady otherwise).

        Tables of policy `topk` without an entry in `frostlines` stay as they are; tables of policy `idle` and `compact`
        need none.
        """

    @abstractmethod
    def end_data_pass(self, who: Identity, step: int) -> dict[str, Moves]:
        """Advance at the end of a pass over the data: tables of `epoch_end: forget_rare` forget their rare rows.

        Those are rows, hot or frozen, with fewer than forget_below visits, outside the control buckets; never under
        policy `off`. Needs step applied and no Pull of step+1 (NotReady otherwise). Other tables have no entry in the
        answer.
        """

    @abstractmethod
    def delete_rows(self, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
        """Advance: deletes row_ids of tables for good, int64[n] each, in any order; what was there of them, by table.

        From hot rows, IDs below min_count and frozen rows at once. Bytes in segment files go in the background:
        TableStats.bytes_erasure_pending says how many may still hold some. Cuts that begin afterwards hold none; one
        that is being written is finished first, and has them, as earlier snapshots do (`frostline ckpt gc --erase`):
        who restores one of these must delete again. Unknown row_ids are counted, and may be given twice. One that is
        visited again is a new row. Needs step applied and no Pull of step+1 (NotReady otherwise); one worker calls
        while the others wait.
        """

    @abstractmethod
    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        """Advance: begins to write all tables of the job as they are after `step` into `folder`, and returns.

        Every shard writes its part in the background, while training goes on; ask cut_progress. `folder` is a path on
        the shards' machines, ROOT/JOB/cut-<step, 12 digits>-<epoch>; segments go to ROOT/JOB/objects. Needs step
        applied and no Pull of step+1 (NotReady otherwise). If one shard cannot begin, the others abandon the cut, and
        the error names it: StoreUnavailable if it cannot write there, InvalidInput if it must not or the folder has a
        whole snapshot. The same cut may be begun again at its step, after an error or once its folder was removed;
        shards whose part is there have nothing to do then.

        parent: the folder of an earlier cut of this epoch, complete on all shards, with no full one begun since then:
        the cut is a delta, which has weights and state of those hot rows alone that changed after the parent, and is of
        no use without it. InvalidInput if it cannot be a parent; take a full cut then.
        """

    @abstractmethod
    def cut_progress(self, who: Identity) -> list[CutProgress]:
        """Of every shard, in order, with the last cut that this epoch began. NotReady if it has begun none."""

    @abstractmethod
    def abandon_cut(self, who: Identity) -> None:
        """Ends a cut that is being written and removes its files, as when one shard reports an error. At any step.

        Nothing happens to a cut that is done, or without one.
        """

    @abstractmethod
    def restore(self, who: Identity, folder: str, anew: Collection[str] = ()) -> None:
        """Replaces the rows of all tables by those of the cut in `folder`; the job goes on after the cut's step.

        A table that the cut has must exist; one that the job has trained and the cut lacks, because it was added later,
        must be named in `anew`, and begins empty: InvalidInput lists all that differ.

        After create_tables and begin_epoch(will_restore=True), once; on any number of shards. InvalidInput if a table,
        its dim or a file is not what it must be, SegmentCorrupt if a file is damaged; nothing can be pulled then. Begin
        an epoch again before another restore; one without will_restore begins with empty tables.
        """

    def prefetch(self, ids: Mapping[str, RoutedIds]) -> None:  # noqa: B027 doing nothing is allowed
        """A hint that these row_ids will be pulled soon: frozen rows that lie on disk are read ahead.

        It waits for no disk and no other call, changes nothing, counts nothing and may do nothing. UnknownTable or
        InvalidInput if it cannot be understood.
        """

    @abstractmethod
    def lookup(self, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        """Read that is not a visit: no counting, no admission, no thaw. For evaluation and serving.

        Unknown row_ids read the default row when min_count > 1, else zeros, without FOUND. Flags have no heat bands.
        """

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def mask_info(self) -> dict[str, MaskInfo]:
        """What is hot and what is frozen, by table. Scans every index: for reports, not for every step."""

    @property
    @abstractmethod
    def wire_stats(self) -> WireStats: ...

    @abstractmethod
    def close(self) -> None: ...
