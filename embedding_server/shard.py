"""A shard: the tables of some buckets, as a single-threaded state machine.

Every method must be called by one thread at a time (the server's executor thread, or under InprocStore's lock); each
returns within milliseconds. Calls that must wait for other workers return a future that a later call completes.

The core knows no clock, no network and no threads; files are written only for segments, cuts and the epochs.

State: the tables (table.py), the book of jobs (jobs.py), and how far an Advance, a cut, a restore or a drop is
(advance.py, job_cuts.py, restore.py, table_drop.py). What else a Shard is made of keeps no rows and no steps:
request_checks.py refuses, pulls.py, pushes.py and hot_path.py act.

Invariants:
1. A call that raises, or whose future holds an error, has changed nothing.
2. Effects of Pull and Push follow steps.py: exactly once per (job, worker, step).
3. Default rows see the same gradients in the same order (by step, then worker) on every shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

import numpy as np

from embedding_server import cold_path
from embedding_server.advance import Advances
from embedding_server.cut import CutRequest
from embedding_server.data_folder import DataFolder
from embedding_server.erasure import Erasures, check_num_ids
from embedding_server.errors import InvalidInput
from embedding_server.gradients import ShardGradients
from embedding_server.heap import release_free_heap
from embedding_server.hot_limit import give_back_others
from embedding_server.hot_path import HotPath
from embedding_server.job_cuts import JobCuts
from embedding_server.jobs import JobBook
from embedding_server.kernels import choose_backend
from embedding_server.live_lookup import LiveLookups
from embedding_server.page_reads import PageReads, bytes_around
from embedding_server.pulls import Pulls
from embedding_server.pushes import Pushes
from embedding_server.request_checks import RequestChecks, check_parts, check_wire_dtype
from embedding_server.restore import Restore
from embedding_server.segments import SETTLED_IN_A_REPORT_BYTES
from embedding_server.slots import MemoryBudget
from embedding_server.spec import TableSpec
from embedding_server.store import (
    NUM_BUCKETS,
    CutProgress,
    EpochInfo,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    PlacedRows,
    PushAck,
    ReplyBuffers,
    Rows,
    StoreStats,
    UpdateMode,
    WireDtype,
)
from embedding_server.table import Table
from embedding_server.table_drop import TableDrops, check_names
from embedding_server.table_threads import TableThreads

__all__ = ["Shard", "ShardGradients"]

MAX_EVENTS = 100
_MOVES_BETWEEN_RELEASES = 1 << 18  # fewer leave little behind, and what is released must be faulted in again


class Shard:
    def __init__(
        self,
        *,
        buckets: np.ndarray | None = None,
        data_dir: Path | None = None,
        memory_limit_bytes: int = 8 << 30,
        backend: str = "auto",
        writer: Executor | None = None,
        threads: int = 1,
    ) -> None:
        """buckets bool[NUM_BUCKETS] (None: all). data_dir None: a temporary folder, removed by `close`.

        threads: that share the tables of a Pull or Push.
        writer: a one-thread executor that writes segment files beside the caller; None: `maintain` writes them itself.
        """
        if memory_limit_bytes < 1 << 20:
            raise InvalidInput(f"memory_limit_bytes={memory_limit_bytes} must be at least {1 << 20} (1 MiB)")
        self.buckets = np.ones(NUM_BUCKETS, np.bool_) if buckets is None else np.asarray(buckets, np.bool_)
        if self.buckets.shape != (NUM_BUCKETS,):
            raise InvalidInput(f"buckets has shape {list(self.buckets.shape)}; it must have {NUM_BUCKETS} entries")
        self._backend = choose_backend(backend)
        self._writer = writer
        self._folder = DataFolder(data_dir)
        self.data_dir = self._folder.path
        self._budget = MemoryBudget(memory_limit_bytes)
        self._tables: dict[str, Table] = {}
        try:
            self._jobs = JobBook(None if self._folder.is_temporary else self.data_dir)
        except BaseException:
            self._folder.close()
            raise
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._threads = TableThreads(threads)
        self._rows = HotPath(self._threads)
        self._checks = RequestChecks(self._tables, self.buckets)
        self._restores: dict[str, Restore] = {}  # under way, by job
        self.lookups = LiveLookups(
            self._tables, self._rows, self._threads, self._checks, self._jobs, self._restores, self.buckets
        )
        self._pulls = Pulls(self._tables, self._rows, self._checks)
        self._pushes = Pushes(self._tables, self._rows, self._checks, self._events.append)
        self._advances = Advances(self._tables)
        self._erasures = Erasures(self.buckets)
        self._drops = TableDrops()
        self._cuts = JobCuts(self.buckets, writer, self._events.append)
        self._moves_at_release = 0  # rows frozen, thawed, forgotten before the last release_free_heap

    @property
    def is_in_place(self) -> bool:
        """Hot rows lie in this process, so that pull_in_place and sums work."""
        return self._backend.name == "cpu"

    # Tables -----------------------------------------------------------------------------------------------------------

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """All or none: what is wrong with a spec is found before anything is created."""
        for spec in self._checks.new_specs(specs):
            self._drops.finish(spec.name)  # before another one takes its place
            table = self._tables[spec.name] = self._new_table(spec)
            self._rows.add(table)

    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> bool:
        """One slice of deleting tables with their rows and files. True: they are gone. Else call again."""
        check_names(names)
        self._check_barrier(who, step)
        if not self._drops.has(who.job, names):
            for name in names:
                self._checks.table(name)
                self._checks.owner(who.job, name)
            if not self._cuts.free_tables():
                return False
            self._advances.abandon(who.job)
            self._erasures.end(who.job)
            tables = [self._tables.pop(name) for name in set(names)]
            for table in tables:
                self._rows.remove(table.spec.name)
            self._drops.begin(who.job, tables)
        if not self._drops.go_on(who.job, names):
            return False
        release_free_heap()
        return True

    def _new_table(self, spec: TableSpec) -> Table:
        return Table(
            spec,
            backend=self._backend,
            data_dir=self.data_dir,
            budget=self._budget,
            buckets=self.buckets,
            on_event=self._events.append,
            writer=self._writer,
            ask_others=partial(give_back_others, self._tables),
        )

    def _renew(self, name: str) -> Table:
        """An empty table in the place of one, whose rows and files go."""
        spec = self._tables[name].spec
        self._tables[name].close()
        table = self._tables[name] = self._new_table(spec)
        self._rows.replace(table)
        return table

    def table_specs(self) -> dict[str, TableSpec]:
        return {name: table.spec for name, table in self._tables.items()}

    # Epochs -----------------------------------------------------------------------------------------------------------

    def current_epoch(self, job: str) -> EpochInfo:
        """The job's epoch here and the last step applied in full; epoch 0 if the job is unknown."""
        return self._jobs.current_epoch(job)

    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int, will_restore: bool = False
    ) -> EpochInfo:
        """Fences every earlier epoch of the job: what was staged is dropped, who waits gets FencedEpoch.

        will_restore: nothing is taken before a restore is done.
        """
        info = self._jobs.begin_epoch(job, num_workers, mode, epoch, will_restore)
        self._advances.abandon(job)
        self._erasures.end(job)
        self._cuts.end_epoch(job)
        if job in self._restores:
            self._restores.pop(job).abandon()
        return info

    # Pull -------------------------------------------------------------------------------------------------------------

    def pull(
        self,
        who: Identity,
        step: int,
        ids: Mapping[str, np.ndarray],
        wire_dtype: WireDtype,
        part: int = 0,
        num_parts: int = 1,
        buffers: ReplyBuffers | None = None,
    ) -> Future[dict[str, Rows]]:
        """`buffers` is asked where the rows are to lie when the pull runs; None: in arrays of their own."""
        check_wire_dtype(wire_dtype)
        job = self._jobs.job_of(who)
        check_parts(part, num_parts)
        return self._pulls.pull(job, who.worker, step, ids, wire_dtype, part, num_parts, buffers)

    def pull_in_place(
        self, who: Identity, step: int, ids: Mapping[str, np.ndarray], use: Callable[[Mapping[str, PlacedRows]], None]
    ) -> Future[None]:
        """As pull; use(rows) runs when it is this Pull's turn, inside whatever call that happens in."""
        return self._pulls.pull_in_place(self._jobs.job_of(who), who.worker, step, ids, use)

    # Push -------------------------------------------------------------------------------------------------------------

    def push(
        self,
        who: Identity,
        step: int,
        gradients: Mapping[str, ShardGradients],
        wire_dtype: WireDtype,
        part: int = 0,
        num_parts: int = 1,
    ) -> Future[PushAck]:
        """A part that is not the last is acknowledged at once, with rows_applied 0; the last applies all of them."""
        job = self._jobs.job_of(who)
        check_parts(part, num_parts)
        check_wire_dtype(wire_dtype)
        return self._pushes.push(job, who.worker, step, gradients, wire_dtype, part, num_parts)

    # Meetings -------------------------------------------------------------------------------------------------------

    def meet(self, who: Identity, step: int, number: int, topic: str, words: str) -> Future[list[str]]:
        """Waits for the other workers (meetings.py)."""
        return self._jobs.job_of(who).meetings.come(who.worker, step, number, topic, words)

    # Advance ----------------------------------------------------------------------------------------------------------

    def heat_slice(self, who: Identity, step: int, first_bucket: int) -> tuple[dict[str, HeatHistogram], int]:
        """Ranks of the tables of policy `topk` in the buckets from first_bucket on, as many as fit a bounded call.

        Returns the next first_bucket, NUM_BUCKETS when all are counted.
        """
        self._check_barrier(who, step)
        return self._advances.heat_slice(who.job, step, first_bucket)

    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        """All slices at once."""
        self._check_barrier(who, step)
        return self._advances.heat_histograms(who.job, step)

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> tuple[dict[str, Moves], bool]:
        """One slice of the pass; (moves of this slice, done). Call again with the same arguments until done."""
        self._check_barrier(who, step)
        for name, frostline in frostlines.items():
            self._checks.frostline(who.job, name, frostline)
        if not self._cuts.free_tables():
            return {}, False
        return self._advances.reselect(who.job, step, frostlines)

    def end_data_pass(self, who: Identity, step: int) -> tuple[dict[str, Moves], bool]:
        """One slice of forgetting what is rare (epoch_end: forget_rare), as reselect."""
        self._check_barrier(who, step)
        if not self._cuts.free_tables():
            return {}, False
        return self._advances.end_data_pass(who.job, step)

    def delete_rows(
        self, who: Identity, step: int, ids: Mapping[str, np.ndarray], *, is_last: bool
    ) -> tuple[dict[str, Erased], bool]:
        """Deletes a chunk of row_ids for good (erasure.py), of whichever buckets, at most erasure.MAX_IDS_PER_CALL.

        (what was there of them in the shard's buckets, done); not done: a cut is finished first, call again. Their
        bytes leave the segments after the chunk that is_last. A repeat finds them unknown.
        """
        self._check_barrier(who, step)
        check_num_ids(ids)
        for name, row_ids in ids.items():
            self._checks.row_ids(name, row_ids)
            self._checks.owner(who.job, name)
        if not self._cuts.free_tables():
            return {}, False
        self._advances.abandon(who.job)
        tables = {name: (self._tables[name], row_ids) for name, row_ids in ids.items()}
        return self._erasures.erase(who.job, tables, is_last=is_last), True

    def _check_barrier(self, who: Identity, step: int) -> None:
        self._jobs.job_of(who).steps.check_barrier(step)

    # Cut and restore ------------------------------------------------------------------------------------------------

    def begin_cut(
        self, who: Identity, step: int, folder: Path, part: int, num_parts: int, parent: Path | None = None
    ) -> bool:
        """Begins to write the job's tables as they are after `step`, as part `part` of `folder` (cut.py); `maintain`
        does the work. False: another cut is still being written; call again.

        parent: the folder of a cut that this one is a delta of. InvalidInput if it cannot be (cut.check_parent).

        What goes wrong with the files is told by cut_progress, not here. A repeat of the last call does nothing, unless
        that cut failed, was abandoned or is gone from the folder: then it begins anew.
        """
        self._check_barrier(who, step)
        request = CutRequest(who, step, folder, part, num_parts, parent)
        request.check()
        if self._cuts.has(request):
            return True
        if not self._cuts.make_way():
            return False
        self._cuts.check_parent(request)
        self._advances.abandon(who.job)
        tables = {name: table for name, table in self._tables.items() if table.job in (None, who.job)}
        self._cuts.begin(request, tables)
        return True

    def cut_progress(self, who: Identity) -> CutProgress:
        """Of the last cut that this epoch of the job began. NotReady if there is none."""
        self._jobs.job_of(who)
        return self._cuts.progress(who)

    def abandon_cut(self, who: Identity) -> None:
        """Ends the job's cut that is being written, if there is one, and removes its files."""
        self._jobs.job_of(who)
        self._cuts.abandon(who.job)

    @property
    def is_cutting(self) -> bool:
        """A cut is being written: maintain has work of it, unless it waits for the writer."""
        return self._cuts.is_under_way

    def restore(self, who: Identity, folder: Path, anew: Collection[str] = ()) -> bool:
        """One slice of filling the job's tables from the cut in `folder` (restore.py). True: the job is at the cut's
        step. Call again with the same arguments until then. anew: tables that begin empty if the cut has none of their
        name."""
        job = self._jobs.job_to_restore(who)
        restore = self._restores.get(who.job)
        if restore is not None and (restore.folder, restore.anew) != (folder, frozenset(anew)):
            restore.abandon()
            restore = None
        if restore is None:
            self._advances.abandon(who.job)
            restore = Restore(folder, job, self._tables, self.buckets, self._renew, self._events.append, anew)
            self._restores[who.job] = restore
        done = True
        try:
            done = restore.advance()
        finally:
            if done:
                del self._restores[who.job]
        return done

    # Look-up, statistics, background ----------------------------------------------------------------------------------

    def lookup(self, ids: Mapping[str, np.ndarray], wire_dtype: WireDtype) -> dict[str, Rows]:
        """EmbeddingStore.lookup, with the heat bands of a pull; `lookups` is what serves."""
        check_wire_dtype(wire_dtype)
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
        return self._rows.read(ids, wire_dtype, always_default=False)

    def find_pages(self, ids: Mapping[str, np.ndarray]) -> PageReads:
        """What a hint that these will be read has to bring into memory. No effect on any row."""
        found, around = [PageReads()], bytes_around()
        for name, row_ids in ids.items():
            self._checks.ids(name, row_ids)
            found.append(cold_path.find_pages(self._tables[name], row_ids, around))
        return PageReads.union(found)

    def settle(self, max_bytes: int = SETTLED_IN_A_REPORT_BYTES) -> None:
        """Finishes the background work on the segments of every table that has no more than max_bytes of it."""
        if not self.is_cutting:  # a cut holds the segments; how far their files are is nothing to wait for then
            for table in self._tables.values():
                table.settle_segments(max_bytes)

    @property
    def is_being_written(self) -> bool:
        """The writer has work of this shard: maintain has more to do once it is done."""
        if self._cuts.is_waiting or self._drops.are_under_way:
            return True
        return any(table.segments.is_being_written for table in self._tables.values())

    def stats(self) -> StoreStats:
        """Of settled tables, so that figures do not depend on how far the background work is."""
        self.settle()
        return StoreStats({name: table.stats() for name, table in self._tables.items()}, list(self._events))

    def fixed_bytes(self) -> dict[str, tuple[int, int]]:
        """By table, what Table.fixed_bytes gives."""
        return {name: table.fixed_bytes() for name, table in self._tables.items()}

    def mask_slice(self, first_bucket: int) -> tuple[dict[str, MaskInfo], int]:
        """What is hot and what is frozen: parts that add up, each of as many buckets as fit a bounded call.

        Returns the next first_bucket, NUM_BUCKETS when all are counted. The first part settles the tables, as stats.
        """
        if first_bucket == 0:
            self.settle()
        return self._advances.mask_slice(first_bucket)

    def maintain(self) -> bool:
        """One slice of background work: of a cut, or of some table (compaction, segment files, merges). True if more is
        waiting."""
        if self._cuts.slice() or self._drops.slice() or any(table.maintain() for table in self._tables.values()):
            return True
        moves = sum(table.moves_frozen + table.moves_thawed + table.moves_forgotten for table in self._tables.values())
        if moves - self._moves_at_release > _MOVES_BETWEEN_RELEASES:
            release_free_heap()
            self._moves_at_release = moves
        return False

    def close(self) -> None:
        self._cuts.close()
        for restore in self._restores.values():
            restore.abandon()
        for table in self._tables.values():
            table.close()
        self._drops.close()
        self._tables.clear()
        self._threads.close()
        self._folder.close()
