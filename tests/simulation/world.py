"""What all parts of a simulation share, and how big it is: everything drawn from the seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from embedding_server import erasure, job_cuts, preimages, restore, segment_merge, table, table_cut, table_pass
from embedding_server.segments import SegmentSet
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import UpdateMode
from tests.simulation.checked_shard import CutBook
from tests.simulation.clock import Clock
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.network import Network, Weather

DIM = 4
PLAIN = "plain"  # a table whose rows are sums of gradients: what the ledger is compared with
_IDS = [-(2**63), 2**63 - 1, -1, 0, 1]


@dataclass(frozen=True)
class Sizes:
    """What a seed draws."""

    num_shards: int
    mode: UpdateMode
    specs: tuple[TableSpec, ...]
    extra: TableSpec | None  # a table that comes and goes
    row_ids: tuple[int, ...]
    batch_ids: int  # row_ids of a table in a batch, at most
    advance_every: int  # steps
    cut_every: int  # Advances
    max_deltas: int
    weather: Weather
    fault_rate: float
    can_link: bool
    has_writer: bool
    small_segments: bool  # so small that every one gets a file
    slice_rows: int  # of cuts, passes, merges and restores

    @property
    def all_specs(self) -> tuple[TableSpec, ...]:
        return self.specs if self.extra is None else (*self.specs, self.extra)

    @staticmethod
    def drawn(rng: random.Random) -> Sizes:
        row_ids = (*_IDS, *range(100, 100 + rng.choice([15, 35])))
        return Sizes(
            num_shards=rng.randint(1, 3),
            mode=rng.choice(["sync", "pipelined"]),
            specs=_specs(rng),
            extra=_extra(rng) if rng.random() < 0.5 else None,
            row_ids=row_ids,
            batch_ids=rng.choice([4, 10]),
            advance_every=rng.randint(1, 4),
            cut_every=rng.randint(1, 3),
            max_deltas=rng.choice([0, 1, 3, 64]),
            weather=Weather.drawn(rng),
            fault_rate=rng.choice([0.0, 0.002, 0.005, 0.012]),
            can_link=rng.random() < 0.8,
            has_writer=rng.random() < 0.7,
            small_segments=rng.random() < 0.7,
            slice_rows=rng.choice([2, 5, 1000]),
        )


def _policy(rng: random.Random, kinds: list[str], **fields: Any) -> PolicySpec:
    drawn: dict[str, Any] = {
        "kind": rng.choice(kinds),
        "idle_steps": rng.randint(1, 4),
        "hot_fraction": rng.choice([0.1, 0.4]),
        "probation_visits": rng.randint(0, 3),
        "forget_below": rng.randint(0, 4),
        "half_life_steps": rng.choice([2.0, 50.0]),
        "control_fraction": rng.choice([0.0, 0.3]),
    }
    return PolicySpec.model_validate({**drawn, **fields})


def _table(name: str, optimizer: str, policy: PolicySpec) -> TableSpec:
    kind = OptimizerSpec.model_validate({"kind": optimizer})
    return TableSpec(name=name, dim=DIM, optimizer=kind, policy=policy, init_min=0.0, init_max=0.0)


def _specs(rng: random.Random) -> tuple[TableSpec, ...]:
    return (
        _table(PLAIN, "sgd", _policy(rng, ["off", "idle", "topk"], frozen_bits=32)),
        _table(
            "quantised",
            "sgd",
            _policy(
                rng,
                ["idle", "compact", "topk"],
                frozen_bits=8,
                min_count=rng.randint(1, 2),
                epoch_end=rng.choice(["keep", "forget_rare"]),
                freeze_rounding=rng.choice(["nearest", "stochastic"]),
            ),
        ),
        _table("adaptive", "adagrad", _policy(rng, ["idle", "topk"], frozen_bits=32, min_count=rng.randint(2, 3))),
    )


def _extra(rng: random.Random) -> TableSpec:
    return _table("extra", "sgd", _policy(rng, ["idle", "topk"], frozen_bits=32, min_count=rng.randint(1, 2)))


@dataclass
class World:
    """One simulation's parts. `operate` runs work as one operation of a process: counted, traced, checked."""

    sizes: Sizes
    root: Path
    clock: Clock
    rng: random.Random
    disk: Disk
    faults: Faults
    network: Network
    operate: Callable[[str, Any, Callable[[], str]], None]
    verify: Callable[[Path], object]  # a whole cut: it restores to what the shards held when it began
    cuts: CutBook = field(default_factory=CutBook)


@contextmanager
def made_small(sizes: Sizes, clock: Clock) -> Iterator[None]:
    """Slices of a few rows, so that every pass, cut, merge and restore is in the middle of something when it is
    interrupted; and the virtual clock where the product looks at one."""
    rows = sizes.slice_rows
    with ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        put(table_cut, "_SLICE_ROWS", rows)
        put(table_pass, "ENTRIES_PER_SLICE", 4 * rows)
        put(segment_merge, "SLICE_ROWS", 2 * rows)
        put(restore, "_ROWS_AT_ONCE", 4 * rows)
        put(job_cuts, "_SLICES", 3)
        put(preimages, "_LEAST_BYTES", 1 << 13)
        put(erasure, "MAX_IDS_PER_CALL", 5)
        if sizes.small_segments:
            put(table, "_SMALL_SHARE", 0.0)

        def segments(*arguments: Any, **named: Any) -> SegmentSet:
            return SegmentSet(*arguments, **named, clock=clock)

        put(table, "SegmentSet", segments)
        yield
