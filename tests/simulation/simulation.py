"""One simulation: M shards, N workers and a driver, from one seed, checked after every operation.

    outcome = Simulation(seed, 1000).run()      Violation, with the seed and the last operations, if a rule is broken

An operation is a request that a shard takes, a turn of its background work that finds some, or a manifest. After
`operations` of them nothing fails any more, the job comes to its end, and what it trained is compared with what was
acknowledged and with what its last cut restores to, on other shards.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedding_server import failpoints
from embedding_server.failpoints import SimulatedCrash
from embedding_server.store import Identity
from tests.embedding_server.table_state import rows_of
from tests.simulation.checked_shard import CheckedShard, Violation
from tests.simulation.clock import Clock, Promise
from tests.simulation.disk import Disk
from tests.simulation.driver import Job
from tests.simulation.faults import Faults
from tests.simulation.network import FINE, Network
from tests.simulation.shard_model import JOB
from tests.simulation.shard_node import IDLE, ShardNode
from tests.simulation.snapshot_files import check_content, tables_of
from tests.simulation.world import DIM, PLAIN, Sizes, World, made_small
from trainer.snapshots import check_files, newest_complete

TableRows = dict[str, dict[int, tuple]]  # by table and row_id

_SHOWN = 40  # operations in the message of a Violation
_MOST_TO_END = 6000  # operations without faults in which a job must come to its end


@dataclass(frozen=True)
class Outcome:
    seed: int
    operations: int
    digest: str  # of every operation and what came of it
    steps: int  # trained in the line that leads to the end
    attempts: int
    faults: dict[str, int]
    failpoints: dict[str, int]  # hits by name


class Simulation:
    def __init__(self, seed: int, operations: int) -> None:
        self.seed, self._most = seed, operations
        self._digest = hashlib.blake2b(digest_size=16)
        self._recent: deque[str] = deque(maxlen=_SHOWN)
        self._count = 0
        self._faults_done: dict[str, int] = {}
        self._violation: Violation | None = None

    def run(self) -> Outcome:
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        root = Path(tempfile.mkdtemp(prefix=f"frostline-simulation-{self.seed}-", dir=where))
        try:
            return self._run(root)
        except Violation as violation:
            raise Violation(self._report(str(violation))) from violation.__cause__
        except Exception as error:  # the code under test raises what nobody expects
            raise Violation(self._report(f"{type(error).__name__}: {error}")) from error
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _run(self, root: Path) -> Outcome:
        rng = random.Random(self.seed)
        sizes = Sizes.drawn(rng)
        self._clock = Clock()
        streams = [random.Random(rng.random()) for _ in range(5)]
        disk = Disk(root, streams[0], can_link=sizes.can_link)
        self._faults = Faults(streams[1], disk.die, sizes.fault_rate)
        network = Network(self._clock, streams[2], sizes.weather)
        self._world = World(
            sizes, root, self._clock, streams[3], disk, self._faults, network, self.operate, self._verify
        )
        (root / "snapshots").mkdir()
        with made_small(sizes, self._clock), failpoints.set_to(self._faults.actions()), disk.in_place():
            self._job = Job(self._world, streams[4])
            try:
                self._go()
                self._check_end()
            finally:
                for node in self._job.nodes:
                    node.crash()
        assert self._job.group is not None
        return Outcome(
            self.seed,
            self._count,
            self._digest.hexdigest(),
            self._job.group.step,
            self._job.attempts,
            self._faults_done,
            self._faults.hits,
        )

    def _go(self) -> None:
        self._end: Promise[None] = self._job.start()
        while not self._end.is_done:
            if self._count >= self._most and not self._faults.is_over:
                self._faults.is_over = True
                self._world.network.weather = FINE
                self._job.is_over = True
            if self._count > self._most + _MOST_TO_END:
                raise Violation("the job does not come to its end though nothing fails any more")
            if not self._clock.run_next():
                raise Violation("nothing will ever happen any more")
            if self._violation is not None:
                raise self._violation
        self._end.result()

    # Operations -----------------------------------------------------------------------------------------------------

    def operate(self, label: str, node: ShardNode | None, work: Callable[[], str]) -> None:
        """Runs work of a shard, or of worker 0 (node None, which sees its errors)."""
        if self._violation is not None:
            return
        ended = self._faults.before_operation()
        if ended is not None:
            self._strike(ended)
            if node is not None and not node.is_alive:
                return
        try:
            outcome = work()
            self._count += outcome != IDLE
        except SimulatedCrash:
            self._trace(label, node, self._faults.note)
            self._faults_done["crash"] = self._faults_done.get("crash", 0) + 1
            if node is None:
                raise
            node.crash()
            return
        except Violation as violation:
            self._fail(label, node, violation)
            return
        except Exception as error:  # of worker 0, who knows what to do about it
            self._trace(label, node, f"{type(error).__name__}: {error}, {self._faults.note}")
            raise
        self._trace(label, node, outcome + (f", {self._faults.note}" if self._faults.note else ""))
        self._check(label, node)

    def _strike(self, what: str) -> None:
        """Ends processes between two operations."""
        job, rng = self._job, self._faults.rng
        self._faults_done[what] = self._faults_done.get(what, 0) + 1
        if what == "power":
            self._trace(what, None, f"{job.cut_power()} changes lost")
            self._end = job.kill_driver()
        elif what == "driver":
            self._trace(what, None, "killed")
            self._end = job.kill_driver()
        elif what == "shard" and job.nodes:
            node = rng.choice(job.nodes)
            self._trace("kill", node, "killed")
            node.crash()
        elif what == "worker" and job.workers:
            process = rng.choice(job.workers)
            self._trace("kill", None, process.name)
            process.kill()

    def _check(self, label: str, node: ShardNode | None) -> None:
        try:
            if node is not None and node.checked is not None:
                node.checked.check()
            self._check_default_rows()
        except Violation as violation:
            self._fail(label, node, violation)

    def _check_default_rows(self) -> None:
        """Shards that have applied the same pushes have the same default rows."""
        found: dict[Any, dict[str, tuple[bytes, bytes]]] = {}
        for node in self._job.nodes:
            checked = node.checked
            if checked is None or checked.is_restoring or checked.model.awaits_restore or not checked.model.applied:
                continue
            model = checked.model
            other = found.setdefault((model.epoch, tuple(model.applied)), checked.default_rows)
            if any(other.get(name, row) != row for name, row in checked.default_rows.items()):
                raise Violation(f"shard {node.index}: default rows differ from another's at {model.applied}")

    def _fail(self, label: str, node: ShardNode | None, violation: Violation) -> None:
        self._trace(label, node, "VIOLATION")
        self._violation = violation

    def _trace(self, label: str, node: ShardNode | None, outcome: str) -> None:
        where = "-" if node is None else f"shard {node.index}"
        line = f"{self._count:5d} {self._clock.now_s:9.3f} s  {where:8s} {label}: {outcome}"
        self._digest.update(line.encode())
        self._recent.append(line)

    def _report(self, what: str) -> str:
        lines = "\n".join(self._recent)
        return f"seed {self.seed}: {what}\n{lines}\nagain: make simulate SEED={self.seed}"

    # The end ------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """The plain table is the sum of what was acknowledged; the last cut restores to all that the shards hold."""
        job, group = self._job, self._job.group
        assert group is not None
        rows: TableRows = {}
        for node in job.nodes:
            assert node.checked is not None
            for name, table in node.checked.shard._tables.items():
                rows.setdefault(name, {}).update(rows_of(table))
            self._check_sums(node, job.ledger.values(group.epoch, group.step, DIM))
        cut = newest_complete(job.folder)
        if cut is None or cut != group.last_cut:
            raise Violation(f"the newest whole cut is {cut}, not {group.last_cut}")
        check_files(cut)
        if _not_empty(self._verify(cut)) != _not_empty(rows):
            raise Violation(f"{cut.name} restores to other rows than the shards hold")

    def _check_sums(self, node: ShardNode, sums: dict[int, Any]) -> None:
        assert node.checked is not None
        for row_id, row in node.checked.model.tables[PLAIN].rows.items():
            expected = sums.get(row_id)
            if (row.values if expected is None else row.values - expected).any():
                raise Violation(f"row {row_id} is {row.values}; what was acknowledged sums to {expected}")

    def _verify(self, cut: Path) -> TableRows:
        """Restores a whole cut on shards of its own, and compares them with what it must hold. Its rows, by table."""
        found: TableRows = {}
        check_content(cut, self._world.cuts.parts_of(cut)[1])
        num_shards = self._count % 3 + 1
        with self._faults.paused():
            for k in range(num_shards):
                # beside the disk of the simulation: a power cut could bring back what is removed here
                folder = self._world.root.with_name(f"{self._world.root.name}-verified-{k}")
                node = ShardNode(self._world, k, num_shards, has_writer=False, folder=folder)
                node.start()
                try:
                    assert node.checked is not None
                    for name, rows in self._restored(node.checked, cut).items():
                        found.setdefault(name, {}).update(rows)
                finally:
                    node.crash()
                    shutil.rmtree(folder)
        return found

    def _restored(self, checked: CheckedShard, cut: Path) -> TableRows:
        names = tables_of(cut)
        checked.create_tables([spec for spec in self._world.sizes.all_specs if spec.name in names])
        checked.begin_epoch(JOB, 1, self._world.sizes.mode, 1, True)
        while not checked.restore(Identity(JOB, 1, 0), cut):
            pass
        checked.check()
        return {name: rows_of(table) for name, table in checked.shard._tables.items()}


def _not_empty(rows: TableRows) -> TableRows:
    """Without tables that have no row: a shard may have one that the others lack, from a call that came late."""
    return {name: of_table for name, of_table in rows.items() if of_table}
