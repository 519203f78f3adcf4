"""InprocStore: a shard inside this process, behind the EmbeddingStore interface. For notebooks, tests and GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TypeVar

import numpy as np

from embedding_server.erasure import check_ids_to_delete, chunks_of
from embedding_server.errors import StoreUnavailable
from embedding_server.hints import Hint
from embedding_server.segments import SETTLED_IN_A_STEP_BYTES
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import TableSpec
from embedding_server.store import (
    NUM_BUCKETS,
    STATE,
    CutProgress,
    EmbeddingStore,
    EpochInfo,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    PlacedRows,
    PushAck,
    RoutedIds,
    Rows,
    StoreStats,
    TableGradients,
    UpdateMode,
    WireDtype,
    WireStats,
    push_dtype,
)

T = TypeVar("T")
_MAINTAIN_EVERY = 32  # steps
_MAX_SLICES = 10_000
_PAUSE_S = 0.0002  # between slices of a hint
#: of a hint, in the caller's thread: a thread that waits for the lock while the caller computes without letting Python
#: go gets it too late, and the hint with it (200 million rows: 1 step in 3 had its pages when it pulled)
_FOUND_HERE_S = 0.01
#: between two slices of a cut: as long as a slice, so that calls that wait for the lock get half of the time
_CUT_PAUSE_S = 0.002


class InprocStore(EmbeddingStore):
    """One shard that owns all buckets. One lock lets one thread in at a time; waiting for workers is outside it."""

    def __init__(
        self,
        *,
        wire_dtype: WireDtype = "float32",
        memory_limit_bytes: int = 8 << 30,
        data_dir: Path | None = None,
        backend: str = "auto",
        timeout_s: float = 60.0,
        threads: int = 1,
        writes_in_background: bool = True,
    ) -> None:
        """timeout_s bounds the wait for other workers, after which StoreUnavailable says who is missing.

        threads: that share the tables of a call. writes_in_background: False writes segments within the call that finds
        them full, and a cut within begin_cut, so that the bytes at a step do not depend on timing.
        """
        self.wire_dtype = wire_dtype
        self.num_shards = 1
        self.shard_of_bucket = np.zeros(NUM_BUCKETS, np.int32)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="segment-writer") if writes_in_background else None
        self._shard = Shard(
            data_dir=data_dir,
            memory_limit_bytes=memory_limit_bytes,
            backend=backend,
            writer=self._writer,
            threads=threads,
        )
        self.is_in_place = wire_dtype == "float32" and self._shard.is_in_place
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._hints = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._last_hint: Hint | None = None
        self._hint: Future[None] | None = None  # its end
        self._is_closed = False
        self._wire = WireStats()
        self._cut_thread = ThreadPoolExecutor(1, thread_name_prefix="cut")
        self._cut: Future[None] | None = None  # what that thread does; None: no cut is being written

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        with self._lock:
            self._shard.create_tables(specs)

    def table_specs(self) -> dict[str, TableSpec]:
        with self._lock:
            return self._shard.table_specs()

    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int | None = None, *, will_restore: bool = False
    ) -> EpochInfo:
        with self._lock:
            wanted = self._shard.current_epoch(job).epoch + 1 if epoch is None else epoch
            return self._shard.begin_epoch(job, num_workers, mode, wanted, will_restore)

    def pull(self, who: Identity, step: int, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        with self._lock:
            # copies: the shard compares a Push with what was pulled, and the caller may reuse its arrays
            future = self._shard.pull(who, step, {n: i.row_ids.copy() for n, i in ids.items()}, self.wire_dtype)
        rows = self._wait(future, f"Pull of step {step}")
        with self._lock:
            self._count_pull(ids, sum(r.values.nbytes + r.flags.nbytes for r in rows.values()))
        return rows

    def pull_in_place(
        self, who: Identity, step: int, ids: Mapping[str, RoutedIds], use: Callable[[Mapping[str, PlacedRows]], None]
    ) -> None:
        def counted(rows: Mapping[str, PlacedRows]) -> None:
            use(rows)
            self._count_pull(ids, sum(r.flags.shape[0] * (4 * r.dim + 1) for r in rows.values()))

        with self._lock:
            future = self._shard.pull_in_place(who, step, {n: i.row_ids for n, i in ids.items()}, counted)
        self._wait(future, f"Pull of step {step}")

    def push(self, who: Identity, step: int, gradients: Mapping[str, TableGradients]) -> PushAck:
        parts = {
            name: ShardGradients(g.ids.row_ids, g.values, g.learning_rate, g.default_gradient, g.sums)
            for name, g in gradients.items()
        }
        with self._lock:
            future = self._shard.push(who, step, parts, push_dtype(self.wire_dtype))
            self._count_push(gradients)
            # thawed rows leave dead ones behind also without re-selections; a cut has a thread of its own
            if step % _MAINTAIN_EVERY == 0 and self._cut is None:
                self._maintain()
        return self._wait(future, f"Push of step {step}")

    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> None:
        with self._lock:
            while not self._shard.drop_tables(who, step, names):
                pass

    def meet(self, who: Identity, step: int, number: int, topic: str, words: str = "") -> list[str]:
        with self._lock:
            future = self._shard.meet(who, step, number, topic, words)
        return self._wait(future, f"meeting of step {step}")

    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        with self._lock:
            return self._shard.heat_histograms(who, step)

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> dict[str, Moves]:
        return self._advance(lambda: self._shard.reselect(who, step, frostlines))

    def end_data_pass(self, who: Identity, step: int) -> dict[str, Moves]:
        return self._advance(lambda: self._shard.end_data_pass(who, step))

    def _advance(self, next_slice: Callable[[], tuple[dict[str, Moves], bool]]) -> dict[str, Moves]:
        total: dict[str, Moves] = {}
        done = False
        with self._lock:
            # before new segments wait to be written: while some do, no merge starts, and with frequent re-selections
            # dead rows would pile up (34% more bytes at the peak, with one every 4 steps)
            self._maintain()
            while not done:
                moves, done = next_slice()
                for name, m in moves.items():
                    total[name] = total.get(name, Moves()) + m
            self._maintain()
        return total

    def delete_rows(self, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
        check_ids_to_delete(ids)
        total: dict[str, Erased] = {}
        with self._lock:
            for chunk, is_last in chunks_of(ids):
                done = False
                while not done:
                    erased, done = self._shard.delete_rows(who, step, chunk, is_last=is_last)
                    for name, of_table in erased.items():
                        total[name] = total.get(name, Erased()) + of_table
            self._maintain()
        return total

    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        base = None if parent is None else Path(parent).absolute()
        with self._lock:
            while not self._shard.begin_cut(who, step, Path(folder).absolute(), 0, 1, base):
                pass  # an earlier cut is finished first
            error = self._shard.cut_progress(who).error
            if error is not None:
                raise StoreUnavailable(
                    f"the cut of step {step} cannot begin in {folder}: {error}; free or repair the disk, or"
                    " name another folder"
                )
            if self._writer is None:
                while self._shard.is_cutting:
                    self._shard.maintain()
            elif self._cut is None or self._cut.done():
                self._cut = self._cut_thread.submit(self._write_cut)

    def _write_cut(self) -> None:
        """Until no cut is under way, slice by slice between the calls of others."""
        while True:
            with self._lock:
                if self._is_closed or not self._shard.is_cutting:
                    self._cut = None  # within the lock: the next begin_cut needs a thread again
                    return
                self._shard.maintain()
            time.sleep(_CUT_PAUSE_S)

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        with self._lock:
            if self._cut is not None and self._cut.done():
                self._cut.result()  # raises what ended the thread, or the cut would never be done
            return [self._shard.cut_progress(who)]

    def abandon_cut(self, who: Identity) -> None:
        with self._lock:
            self._shard.abandon_cut(who)

    def restore(self, who: Identity, folder: str, anew: Collection[str] = ()) -> None:
        with self._lock:
            while not self._shard.restore(who, Path(folder).absolute(), anew):
                pass

    def _maintain(self) -> None:
        self._shard.settle(SETTLED_IN_A_STEP_BYTES)
        for _ in range(_MAX_SLICES):
            if not self._shard.maintain():
                return

    def prefetch(self, ids: Mapping[str, RoutedIds]) -> None:
        if self._is_closed:
            return
        if self._last_hint is not None and self._hint is not None and not self._hint.done():
            # one at a time: more would only queue behind a disk that is busy with the first
            if not self._last_hint.is_checking:
                return
            self._last_hint.hurry()
        hint = self._last_hint = Hint({n: i.row_ids.copy() for n, i in ids.items()})
        is_found = False
        if self._lock.acquire(blocking=False):  # never waits for a call
            try:
                is_found = hint.advance(self._shard, _FOUND_HERE_S)
            finally:
                self._lock.release()
        self._hint = self._hints.submit(hint.read) if is_found else self._hints.submit(hint.run, self._in_turn)

    def _in_turn(self, advance: Callable[[Shard], bool]) -> bool:
        with self._lock:
            is_over = self._is_closed or advance(self._shard)
        time.sleep(_PAUSE_S)  # a lock that is taken again at once keeps everybody else out
        return is_over

    def lookup(self, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        with self._lock:
            rows = self._shard.lookup({n: i.row_ids for n, i in ids.items()}, self.wire_dtype)
        return {name: Rows(r.values, r.flags & STATE) for name, r in rows.items()}

    def stats(self) -> StoreStats:
        with self._lock:
            return self._shard.stats()

    def mask_info(self) -> dict[str, MaskInfo]:
        with self._lock:
            total, bucket = self._shard.mask_slice(0)
            while bucket < NUM_BUCKETS:
                part, bucket = self._shard.mask_slice(bucket)
                total = {name: info + part[name] for name, info in total.items()}
        return total

    def fixed_bytes(self) -> dict[str, tuple[int, int]]:
        """By table, what Table.fixed_bytes gives."""
        with self._lock:
            return self._shard.fixed_bytes()

    @property
    def wire_stats(self) -> WireStats:
        return self._wire

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._shard.close()
        self._hints.shutdown(cancel_futures=True)
        self._cut_thread.shutdown()
        if self._writer is not None:
            self._writer.shutdown()

    def _wait(self, future: Future[T], what: str) -> T:
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            future.cancel()
            raise StoreUnavailable(
                f"{what}: the other workers did not reach this step within {self._timeout_s} s; every worker must pull"
                " and push every step"
            ) from None

    def _count_pull(self, ids: Mapping[str, RoutedIds], row_bytes: int) -> None:
        n = sum(i.row_ids.shape[0] for i in ids.values())
        self._wire = self._wire + WireStats(bytes_pulled=8 * n + row_bytes, rows_pulled=n)

    def _count_push(self, gradients: Mapping[str, TableGradients]) -> None:
        rows = size = 0
        for g in gradients.values():  # one pass: with 26 tables, what Python does for a table is felt
            n = g.ids.row_ids.shape[0]
            rows += n
            size += n * (8 + g.values.shape[1] * g.values.itemsize)
        self._wire = self._wire + WireStats(bytes_pushed=size, rows_pushed=rows)
