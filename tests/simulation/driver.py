"""The driver of a simulated job: starts shards and workers, and after any failure goes on from the last whole cut."""

from __future__ import annotations

import random
from pathlib import Path

from embedding_server.errors import FencedEpoch, FrostlineError, InvalidInput, NotReady, StepGap, StoreUnavailable
from embedding_server.store import Identity
from frostline.v1 import embedding_pb2 as pb
from services.advance_messages import caller_message
from services.shard_calls import UPDATE_MODES
from tests.simulation.checked_shard import Violation
from tests.simulation.clock import Process, Promise
from tests.simulation.ledger import Ledger
from tests.simulation.shard_model import JOB
from tests.simulation.shard_node import ShardNode
from tests.simulation.snapshot_files import tables_of
from tests.simulation.worker import Group, Worker
from tests.simulation.world import World
from trainer.snapshots import cuts_in, newest_complete, read_manifest

MAX_WORKERS = 3
_WATCH_S = 0.2
_ZOMBIE_S = 5.0  # as long as workers of an old epoch may go on, because nobody could reach them to end them
_MODES = {name: number for number, name in UPDATE_MODES.items()}


class Job:
    """All that outlives one attempt. `attempts` counts worker groups."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.ledger = Ledger()
        self.nodes: list[ShardNode] = []
        self.workers: list[Process] = []  # alive, of whatever epoch
        self.group: Group | None = None  # the newest
        self.attempts = 0
        self.is_over = False  # the next Advance is the last
        self.driver = Process(world.clock, "driver")

    @property
    def folder(self) -> Path:
        return self.world.root / "snapshots" / JOB

    def start(self) -> Promise[None]:
        return self.driver.start(self._run())

    # Ends of processes --------------------------------------------------------------------------------------------

    def kill_driver(self) -> Promise[None]:
        """A new one takes its place at once; the old one's workers go on."""
        self.driver.kill()
        self.driver = Process(self.world.clock, "driver")
        return self.start()

    def cut_power(self) -> int:
        for process in (self.driver, *self.workers):
            process.kill()
        self.workers = []
        for node in self.nodes:
            node.crash()
        self.world.network.lose_everything()
        return self.world.disk.cut_power()

    # Attempts -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Returns when the job's last Advance is done."""
        while True:
            self.attempts += 1
            cut = newest_complete(self.folder)
            self._start_shards(is_from_nothing=cut is None)
            try:
                group = await self._begin(cut)
            except (FencedEpoch, StoreUnavailable, InvalidInput, NotReady):
                await self.world.clock.sleep(_WATCH_S)  # a shard died meanwhile, or its disk had an error
                continue
            if await self._train(group):
                return

    def _start_shards(self, *, is_from_nothing: bool) -> None:
        """Those that died. All of them anew if there is nothing to restore, or as many as there are not now."""
        wanted = len(self.nodes) or self.world.sizes.num_shards
        if self.nodes and self.rng.random() < 0.15:
            wanted = self.rng.randint(1, 3)
        if is_from_nothing or wanted != len(self.nodes):
            for node in self.nodes:
                node.crash()
        if wanted != len(self.nodes):
            has_writer = self.world.sizes.has_writer
            self.nodes = [ShardNode(self.world, k, wanted, has_writer=has_writer) for k in range(wanted)]
        for node in self.nodes:
            if not node.is_alive:
                node.start()

    async def _begin(self, cut: Path | None) -> Group:
        """As RemoteStore.create_tables, begin_epoch and restore. A table that the cut lacks begins anew: the workers'
        code names it, whatever became of it since."""
        specs = [spec.model_dump_json() for spec in self.world.sizes.all_specs]
        await self._all(pb.CreateTablesRequest(spec_json=specs))
        known = [reply.epoch for reply in await self._all(pb.GetEpochRequest(job=JOB))]
        epoch = max(known + [name.epoch for name in cuts_in(self.folder)]) + 1
        num_workers = self.rng.randint(1, MAX_WORKERS)
        request = pb.BeginEpochRequest(
            job=JOB,
            num_workers=num_workers,
            mode=_MODES[self.world.sizes.mode],
            epoch=epoch,
            token=f"{self.attempts}",
            will_restore=cut is not None,
        )
        await self._all(request)
        from_epoch = from_step = 0
        if cut is not None:
            await self._restore(cut, epoch)
            manifest = read_manifest(cut)
            from_epoch, from_step = manifest.epoch, manifest.step
        self.ledger.begin(epoch, num_workers, from_epoch, from_step)
        return Group(epoch, num_workers, from_step, list(self.nodes), lambda: self.is_over, self.world.sizes.all_specs)

    async def _restore(self, cut: Path, epoch: int) -> None:
        caller = caller_message(Identity(JOB, epoch, 0))
        anew = sorted({spec.name for spec in self.world.sizes.all_specs} - tables_of(cut))

        async def of_shard(node: ShardNode) -> None:
            n, is_done = 0, False
            while not is_done:
                request = pb.RestoreRequest(caller=caller, folder=str(cut), slice=n, anew=anew)
                is_done = (await self.world.network.call(self.driver, node, request)).done
                n += 1

        await self.driver.gather([of_shard(node) for node in self.nodes])

    async def _train(self, group: Group) -> bool:
        """Starts workers and watches them. Whether they are done; False if one failed."""
        self.group = group
        processes = [
            Process(self.world.clock, f"worker {rank}", self.world.disk.revive) for rank in range(group.num_workers)
        ]
        self.workers = [process for process in self.workers if not process.is_dead] + processes
        runs = [
            process.start(Worker(self.world, self.ledger, group, rank, process).run())
            for rank, process in enumerate(processes)
        ]
        while not all(run.is_done for run in runs):
            await self.world.clock.sleep(_WATCH_S)
            if any(process.is_dead for process in processes) or any(_has_failed(run) for run in runs):
                self._end(processes)
                return False
        return not any(_has_failed(run) for run in runs)

    def _end(self, processes: list[Process]) -> None:
        """Workers of an attempt that failed, now or later: some cannot be reached."""
        for process in processes:
            if self.rng.random() < 0.5:
                process.kill()
            else:
                self.world.clock.at(self.rng.uniform(0.0, _ZOMBIE_S), process.kill)

    async def _all(self, request: object) -> list:
        calls = [self.world.network.call(self.driver, node, request) for node in self.nodes]
        return await self.driver.gather(calls)


def _has_failed(run: Promise[None]) -> bool:
    """An error that a failure explains; any other is a Violation."""
    if not run.is_done:
        return False
    try:
        run.result()
    except (FencedEpoch, StoreUnavailable, NotReady):
        return True
    except (FrostlineError, StepGap) as error:
        raise Violation(f"a worker got {type(error).__name__}: {error}") from error
    return False
