"""A trainer worker of a simulation: pulls, pushes and Advances as trainer/ and services/shard_client.py make them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.erasure import chunks_of
from embedding_server.errors import FrostlineError, InvalidInput, StoreUnavailable
from embedding_server.gradients import ShardGradients
from embedding_server.kernels.hashing import buckets_of
from embedding_server.policy import frostline_at
from embedding_server.segment_file import make_folder
from embedding_server.snapshot_format import cut_folder
from embedding_server.spec import TableSpec
from embedding_server.store import DEFAULT, NUM_BUCKETS, TRAINABLE, CutProgress, HeatHistogram, Identity, Rows
from frostline.v1 import embedding_pb2 as pb
from services.advance_messages import (
    caller_message,
    delete_rows_message,
    frostline_message,
    histogram_of,
    progress_of,
)
from tests.simulation.clock import Process, Promise
from tests.simulation.ledger import Ledger
from tests.simulation.shard_model import JOB
from tests.simulation.shard_node import Lookup, Prefetch, Pull, Push, ShardNode
from tests.simulation.snapshot_files import remove_failed, write_rest
from tests.simulation.world import DIM, PLAIN, World
from trainer.delta_chain import DeltaChain, ParentCut

POLL_S = 0.1
Pulled = list[Mapping[str, Rows]]  # by shard


@dataclass
class Group:
    """The workers of one epoch: what DDP's group is to them, barriers; and the job's end."""

    epoch: int
    num_workers: int
    first_step: int  # the step that they go on after
    nodes: Sequence[ShardNode]
    is_over: Callable[[], bool]  # asked at Advances: this one is the last
    specs: tuple[TableSpec, ...]  # the tables that they train now
    step: int = 0  # of the last Advance
    last_cut: Path | None = None
    _arrived: list[Promise[bool]] = field(default_factory=list)
    _says: bool = False

    async def barrier(self, says: bool | None = None) -> bool:
        """What worker 0 says, once all are here."""
        if says is not None:
            self._says = says
        here: Promise[bool] = Promise()
        self._arrived.append(here)
        if len(self._arrived) == self.num_workers:
            arrived, self._arrived = self._arrived, []
            for each in arrived:
                each.set(self._says)
        return await here


class Worker:
    def __init__(self, world: World, ledger: Ledger, group: Group, rank: int, process: Process) -> None:
        self._world, self._ledger, self._group, self._process = world, ledger, group, process
        self._who = Identity(JOB, group.epoch, rank)
        self._writing: Promise[None] | None = None  # worker 0: the cut that is being written
        self._chain = DeltaChain(world.sizes.max_deltas)
        self._has_begun = True  # training may go on beside it
        self._batches: dict[int, dict[str, np.ndarray]] = {}
        row_ids = np.array(world.sizes.row_ids, np.int64)
        self._shard_of = dict(
            zip(row_ids.tolist(), (buckets_of(row_ids, NUM_BUCKETS) % len(group.nodes)).tolist(), strict=True)
        )

    async def run(self) -> None:
        """Trains until the group is over; any error ends it."""
        group = self._group
        step, pulled = group.first_step, None
        if not step:
            await self._advance(step)  # a cut of nothing, so that every later failure has one to go back to
        while True:
            step += 1
            if pulled is None:
                pulled = await self._pull(step)
            gradients = self._gradients(step, pulled)
            is_advance = step % self._world.sizes.advance_every == 0
            if self._world.sizes.mode == "sync" or is_advance:
                await self._push(step, gradients)
                pulled = None
            else:
                pulled, _ = await self._process.gather([self._pull(step + 1), self._push(step, gradients)])
            if is_advance and await self._advance(step):
                return

    # Rows ---------------------------------------------------------------------------------------------------------

    async def _pull(self, step: int) -> Pulled:
        ids = self._batch(step)
        if self._world.rng.random() < 0.1:
            self._aside(lambda of_shard: Prefetch(of_shard), ids)
        replies = await self._all(lambda k: Pull(self._who, step, self._of_shard(ids, k)))
        if self._world.rng.random() < 0.1:
            self._aside(lambda of_shard: Lookup(of_shard), ids)
        return replies

    async def _push(self, step: int, gradients: list[dict[str, ShardGradients]]) -> None:
        await self._all(lambda k: Push(self._who, step, gradients[k]))
        self._ledger.note(self._who.epoch, step, self._who.worker, [of_shard[PLAIN] for of_shard in gradients])
        del self._batches[step]

    def _aside(self, request: Callable[[Mapping[str, np.ndarray]], Any], ids: Mapping[str, np.ndarray]) -> None:
        """A call that nobody waits for."""
        k = self._world.rng.randrange(len(self._group.nodes))
        self._process.start(self._quietly(k, request(self._of_shard(ids, k))))

    async def _quietly(self, k: int, request: Any) -> None:
        with suppress(StoreUnavailable):  # a hint may be lost; what a look-up reads is compared by the shard's model
            await self._world.network.call(self._process, self._group.nodes[k], request)

    def _batch(self, step: int) -> dict[str, np.ndarray]:
        """Row_ids by table, some of them oftener than others. Other ones in each epoch, so that an old epoch's push can
        be told from a new one's."""
        if step not in self._batches:
            rng = np.random.default_rng([self._who.epoch, step, self._who.worker, *self._world.sizes.row_ids[-1:]])
            row_ids, most = np.array(self._world.sizes.row_ids, np.int64), self._world.sizes.batch_ids
            self._batches[step] = {
                spec.name: row_ids[
                    np.unique((rng.random(rng.integers(0, most + 1)) ** 2 * row_ids.shape[0]).astype(int))
                ]
                for spec in self._group.specs
            }
        return self._batches[step]

    def _of_shard(self, ids: Mapping[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
        return {
            name: of_table[[self._shard_of[row_id] == k for row_id in of_table.tolist()]] if of_table.size else of_table
            for name, of_table in ids.items()
        }

    def _gradients(self, step: int, pulled: Pulled) -> list[dict[str, ShardGradients]]:
        """By shard: small integers that the workers' number divides, for rows that the Pull said are trainable."""
        rng = np.random.default_rng([self._who.epoch, step, self._who.worker, 1])
        ids, workers = self._batch(step), self._group.num_workers
        gradients: list[dict[str, ShardGradients]] = [{} for _ in self._group.nodes]
        for spec in self._group.specs:
            has_default = any((rows[spec.name].flags & DEFAULT).any() for rows in pulled)
            default = rng.integers(-6, 7, DIM).astype(np.float32) * workers if has_default else None
            for k, of_shard in enumerate(gradients):
                row_ids = self._of_shard(ids, k)[spec.name]
                row_ids = row_ids[(pulled[k][spec.name].flags & TRAINABLE) > 0]
                values = rng.integers(-6, 7, (row_ids.shape[0], DIM)).astype(np.float32) * workers
                of_shard[spec.name] = ShardGradients(row_ids, values, 1.0, default)
        return gradients

    # Advance ------------------------------------------------------------------------------------------------------

    async def _advance(self, step: int) -> bool:
        """Whether it was the last."""
        group = self._group
        await group.barrier()
        is_last = None
        if self._who.worker == 0:
            is_last = await self._advance_first(step)
        is_last = await group.barrier(is_last)
        group.step = step
        return is_last

    async def _advance_first(self, step: int) -> bool:
        """Worker 0: re-selects, ends data passes, deletes rows, adds and drops tables, cuts."""
        group, sizes, rng = self._group, self._world.sizes, self._world.rng
        if step and rng.random() < 0.8:
            await self._reselect(step)
        if step and rng.random() < 0.2:
            await self._slices(
                lambda k, n: pb.AdvanceRequest(
                    caller=caller_message(self._who), step=step, end_data_pass=pb.EndDataPass(slice=n)
                )
            )
        if step and rng.random() < 0.25:
            await self._delete_rows(step)
        if step and sizes.extra is not None and rng.random() < 0.2:
            await self._add_or_drop(step, sizes.extra)
        if step and group.is_over():
            return await self._cut(step)
        if step // sizes.advance_every % sizes.cut_every == 0 and (self._writing is None or self._writing.is_done):
            self._has_begun = False
            self._writing = self._process.start(self._cut_quietly(step))
            while not self._has_begun:
                await self._world.clock.sleep(0.01)
        return False

    async def _delete_rows(self, step: int) -> None:
        """As services/shard_tables.py: every shard gets every row_id."""
        rng, specs = self._world.rng, self._group.specs
        row_ids = sorted(self._shard_of)
        ids = {
            spec.name: np.array(rng.choices(row_ids, k=rng.randint(0, 6)), np.int64)
            for spec in rng.sample(specs, rng.randint(1, len(specs)))
        }
        for number, (chunk, is_last) in enumerate(chunks_of(ids)):
            first = 1000 * number  # of the slices; one that waits for a cut to be finished is not the last of a chunk
            await self._slices(
                lambda k, n, chunk=chunk, is_last=is_last, first=first: pb.AdvanceRequest(
                    caller=caller_message(self._who),
                    step=step,
                    delete_rows=delete_rows_message(chunk, is_last, first + n),
                )
            )
        self._ledger.note_deleted(self._who.epoch, step, ids.get(PLAIN, np.empty(0, np.int64)).tolist())

    async def _add_or_drop(self, step: int, extra: TableSpec) -> None:
        group = self._group
        if extra not in group.specs:
            await self._all(lambda k: pb.CreateTablesRequest(spec_json=[extra.model_dump_json()]))
            group.specs = (*group.specs, extra)
            return
        await self._slices(
            lambda k, n: pb.AdvanceRequest(
                caller=caller_message(self._who), step=step, drop_tables=pb.DropTables(tables=[extra.name], slice=n)
            )
        )
        group.specs = tuple(spec for spec in group.specs if spec != extra)

    async def _reselect(self, step: int) -> None:
        policies = {spec.name: spec.policy for spec in self._group.specs if spec.policy.kind == "topk"}
        histograms = await self._process.gather([self._heat(k, step) for k in range(len(self._group.nodes))])
        lines = []
        for name, policy in policies.items():
            total = sum((of_shard[name] for of_shard in histograms[1:]), histograms[0][name])
            lines.append(frostline_message(name, frostline_at(policy, total, step)))
        await self._slices(
            lambda k, n: pb.AdvanceRequest(
                caller=caller_message(self._who), step=step, reselect=pb.Reselect(frostlines=lines, slice=n)
            )
        )

    async def _heat(self, k: int, step: int) -> dict[str, HeatHistogram]:
        total: dict[str, HeatHistogram] = {}
        bucket, is_done = 0, False
        while not is_done:
            action = pb.CollectHeat(first_bucket=bucket)
            request = pb.AdvanceRequest(caller=caller_message(self._who), step=step, collect_heat=action)
            answer = await self._world.network.call(self._process, self._group.nodes[k], request)
            for heat in answer.histograms:
                part = histogram_of(heat)
                total[heat.table] = total[heat.table] + part if heat.table in total else part
            bucket, is_done = answer.next_bucket, answer.done
        return total

    # Cuts ---------------------------------------------------------------------------------------------------------

    async def _cut_quietly(self, step: int) -> None:
        await self._cut(step)

    async def _cut(self, step: int) -> bool:
        """As services/shard_cuts.py and trainer/cuts.py do. Whether it is whole."""
        folder = self._world.root / "snapshots" / JOB / cut_folder(step, self._who.epoch)
        try:
            make_folder(folder)
            parent = await self._begin_on_shards(step, folder)
            _check(await self._progress())
            self._has_begun = True
            progress = await self._progress()
            while not all(part.is_done for part in progress):
                await self._world.clock.sleep(POLL_S)
                progress = await self._progress()
                _check(progress)
            self._write_rest(folder, step, progress, parent)
        except (FrostlineError, OSError):
            if self._process.is_dead:
                return False
            self._has_begun = True
            await self._abandon(folder)
            return False
        self._group.last_cut = folder
        return True

    async def _begin_on_shards(self, step: int, folder: Path) -> ParentCut | None:
        """As Cuts._begin_on_shards: a delta if that can be. What it is a delta of."""
        parent = self._chain.parent()
        if parent is not None:
            try:
                await self._slices(lambda k, n: self._begin_cut(step, folder, str(parent.cut), k, n))
                return parent
            except InvalidInput:  # a shard has seen another end of the last cut
                await self._abandon_on_shards()
        self._chain.begin_full()
        await self._slices(lambda k, n: self._begin_cut(step, folder, "", k, n))
        return None

    def _write_rest(self, folder: Path, step: int, progress: list[CutProgress], parent: ParentCut | None) -> None:
        def work() -> str:
            group, mode = self._group, self._world.sizes.mode
            completed = write_rest(folder, self._who, step, group.num_workers, mode, progress, parent)
            self._world.verify(folder)
            self._chain.add(completed, 1 if parent is None else 0)  # by their bytes, tiny deltas would end each chain
            return f"whole, number {completed.sequence} of its chain"

        self._world.operate(f"manifest of {folder.name}", None, work)

    def _begin_cut(self, step: int, folder: Path, parent: str, k: int, n: int) -> pb.AdvanceRequest:
        num_shards = len(self._group.nodes)
        cut = pb.BeginCut(folder=str(folder), parent=parent, shard_index=k, num_shards=num_shards, slice=n)
        return pb.AdvanceRequest(caller=caller_message(self._who), step=step, begin_cut=cut)

    async def _progress(self) -> list[CutProgress]:
        caller = caller_message(self._who)
        return [progress_of(p) for p in await self._all(lambda k: pb.GetCutProgressRequest(caller=caller))]

    async def _abandon(self, folder: Path) -> None:
        await self._abandon_on_shards()
        remove_failed(folder)

    async def _abandon_on_shards(self) -> None:
        caller = caller_message(self._who)
        with suppress(FrostlineError):  # a shard that cannot be reached has its part removed with the folder, or never
            await self._all(lambda k: pb.AbandonCutRequest(caller=caller))

    # Calls of all shards ------------------------------------------------------------------------------------------

    async def _all(self, request: Callable[[int], Any]) -> list[Any]:
        calls = [self._world.network.call(self._process, node, request(k)) for k, node in enumerate(self._group.nodes)]
        return await self._process.gather(calls)

    async def _slices(self, request: Callable[[int, int], Any]) -> None:
        """Slice after slice on each shard until it is done."""

        async def of_shard(k: int) -> None:
            for n in itertools.count():
                answer = await self._world.network.call(self._process, self._group.nodes[k], request(k, n))
                if answer.done:
                    return

        await self._process.gather([of_shard(k) for k in range(len(self._group.nodes))])


def _check(progress: list[CutProgress]) -> None:
    for shard, of_shard in enumerate(progress):
        if of_shard.error is not None:
            raise OSError(f"shard {shard}: {of_shard.error}")
