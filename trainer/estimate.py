"""Bytes that a job's tables will take, by tier, before anything is trained.

    estimate_jobs({"main": job}, say) -> {"main": Estimate}

How. A row's place depends on when its row_id comes, and on no value: so the row_ids of all training samples go, step by
step, through real shards that never get a gradient, with the job's own re-selections and ends of data passes. Jobs that
read the same batches are estimated in one reading.

What does not fit SAMPLE_BYTES is thinned: the reading starts anew with an eighth of the buckets of the tables that took
the room (id_sample.py), and what they take is scaled up. Figures of a job that fits are those of the run, but for two
things: rows ranked by a score (advanced.select: score) are ranked by heat here, and rows that quantising would damage,
which stay hot in the run, freeze.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from embedding_server.hot_limit import BYTES_OF_PAGES, hot_row_bytes
from embedding_server.inproc import InprocStore
from embedding_server.policy import frostline_at
from embedding_server.spec import TableSpec
from embedding_server.store import HeatHistogram, Identity, PlacedRows, RoutedIds, TableStats
from trainer.data.registry import open_reader
from trainer.id_sample import MAX_LEVEL, IdSample, TableSample
from trainer.job import Job, steps_of, table_specs
from trainer.pass_ends import PassEnds

#: bytes that all tables of one reading may take together before the sample is thinned; the files lie in memory too
SAMPLE_BYTES = 1 << 30
MAX_SHARDS = 16  # more are estimated as one: their fixed costs are small beside rows that need so many
_MEMORY_FOLDER = "/dev/shm"
_CHECK_STEPS = 64  # between looks at what the tables take
_SAY_EVERY_S = 5.0
_HAS_ROOM_SHARE = 1 / 4  # a table that takes less than this part of an even share is not thinned

Say = Callable[[str], None]
_Found = tuple[dict[str, TableStats], dict[str, tuple[int, int]]]  # stats and fixed bytes of a store's tables


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job's tables take over all shards. Figures of sampled tables are scaled to all rows."""

    num_steps: int
    num_samples: int
    tables: dict[str, TableStats]  # at the end of the job
    bytes_peak: int  # highest bytes_total, each table's and shard's at its own time, as in summary.json
    memory_peak: int  # highest sum of hot rows, state, index and heat: what must fit memory_limit_bytes
    frozen_peak: int  # highest bytes of segments
    sampled: dict[str, float]  # by table: share of its buckets that was read
    notes: list[str] = field(default_factory=list)

    def total(self) -> TableStats:
        return sum(self.tables.values(), TableStats())


def memory_of(stats: TableStats) -> int:
    """Bytes in memory: all but segments."""
    return stats.bytes_total - stats.bytes_frozen


def estimate_jobs(
    jobs: Mapping[str, Job], say: Say = lambda text: None, sample_bytes: int = SAMPLE_BYTES
) -> dict[str, Estimate]:
    """Jobs of the same data and seed, as the arms of one; in the order given. InvalidInput as the run would say it."""
    readings: dict[tuple[object, ...], dict[str, Job]] = {}
    for name, job in jobs.items():
        readings.setdefault(_reading_of(job), {})[name] = job
    results: dict[str, Estimate] = {}
    for together in readings.values():
        results |= _estimate_together(together, sample_bytes, say)
    return {name: results[name] for name in jobs}


def _reading_of(job: Job) -> tuple[object, ...]:
    """Jobs for which this is equal get the same batches and the same sample."""
    trainer = job.trainer
    specs = table_specs(job, open_reader(job, "train").schema.tables)
    controls = tuple((spec.name, spec.policy.control_fraction) for spec in specs)
    return trainer.batch_size, trainer.data_passes, trainer.max_steps, num_shards_of(job), controls


def num_shards_of(job: Job) -> int:
    """Shards whose parts of a table are estimated apart."""
    servers = job.servers
    if servers.store == "inproc":
        return 1
    shards = len(servers.addresses) if servers.launch == "external" else servers.num_shards
    return shards if shards <= MAX_SHARDS else 1


class _SampleTooLarge(Exception):
    def __init__(self, tables: list[str]) -> None:
        super().__init__(*tables)
        self.tables = tables


def _estimate_together(jobs: Mapping[str, Job], sample_bytes: int, say: Say) -> dict[str, Estimate]:
    levels: dict[str, int] = {}
    while True:
        try:
            return _read_through(jobs, levels, sample_bytes, say)
        except _SampleTooLarge as error:
            for table in error.tables:
                levels[table] = levels.get(table, 0) + 1
            say(f"the sample takes more than {sample_bytes >> 20} MiB; reading again with fewer IDs")


def _read_through(
    jobs: Mapping[str, Job], levels: Mapping[str, int], sample_bytes: int, say: Say
) -> dict[str, Estimate]:
    first = next(iter(jobs.values()))
    reader = open_reader(first, "train")
    tables = reader.schema.tables
    specs = {spec.name: spec for spec in table_specs(first, tables)}
    sample = IdSample(specs, reader.schema, levels, num_shards_of(first))
    with ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="frostline-estimate-", dir=_memory_folder(sample_bytes))
        root = Path(stack.enter_context(folder))
        runs: dict[str, _Rehearsal] = {}
        for name, job in jobs.items():
            runs[name] = _Rehearsal(job, table_specs(job, tables), sample, root / str(len(runs)))
            stack.callback(runs[name].close)
        batches = PassEnds(reader)
        step = num_samples = 0
        said_s = time.monotonic()
        for step, batch in enumerate(itertools.islice(batches, first.trainer.max_steps), 1):
            ids = sample.route(batch)
            for run in runs.values():
                run.train(step, ids, is_pass_end=batches.is_end(step))
            num_samples += batch.num_global_samples
            if step % _CHECK_STEPS == 0:
                _check_size(runs.values(), sample, sample_bytes)
            if time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                of = f" of {reader.num_steps:,}" if reader.num_steps else ""
                say(f"read {num_samples:,} samples, step {step:,}{of}")
        return {name: run.estimate(step, num_samples) for name, run in runs.items()}


def _memory_folder(sample_bytes: int) -> str | None:
    """Where files need no disk: segments of a rehearsal are small and not kept. None: the usual temporary folder.

    Containers often have 64 MiB there. Rows whose file cannot be written stay hot, which the run's would not.
    """
    if not os.access(_MEMORY_FOLDER, os.W_OK) or shutil.disk_usage(_MEMORY_FOLDER).free < sample_bytes:
        return None
    return _MEMORY_FOLDER


def _check_size(runs: Iterable[_Rehearsal], sample: IdSample, sample_bytes: int) -> None:
    """_SampleTooLarge names the tables to thin, unless none can be thinned any more."""
    sizes: dict[str, int] = {}
    for run in runs:
        for name, stats in run.observe().items():
            sizes[name] = sizes.get(name, 0) + stats.bytes_total
    total = sum(sizes.values())
    if total <= sample_bytes:
        return
    least = total / len(sizes) * _HAS_ROOM_SHARE
    large = [name for name, size in sizes.items() if size >= least and sample.tables[name].level < MAX_LEVEL]
    if large:
        raise _SampleTooLarge(large)


class _Rehearsal:
    """One job without gradients: a store for each stratum. Not thread safe."""

    def __init__(self, job: Job, specs: list[TableSpec], sample: IdSample, folder: Path) -> None:
        self.job = job
        self._sample = sample
        self._specs = {spec.name: _ranked_by_heat(spec) for spec in specs}
        num_shards = len(job.servers.addresses) or job.servers.num_shards
        self._limit_bytes = job.servers.memory_limit_bytes * num_shards
        limit_bytes = self._limit_bytes // (sample.num_stores if sample.is_whole else 1)
        self._stores = [
            InprocStore(
                memory_limit_bytes=limit_bytes,
                data_dir=folder / str(number),
                backend="cpu",
                writes_in_background=False,
            )
            for number in range(sample.num_stores)
        ]
        self._who: list[Identity] = []
        for number, store in enumerate(self._stores):
            own = [(spec, sample.tables[name]) for name, spec in self._specs.items()]
            store.create_tables(
                [_share(spec, of, number, num_shards_of(job)) for spec, of in own if number < len(of.strata)]
            )
            self._who.append(Identity("estimate", store.begin_epoch("estimate", 1, "sync").epoch, 0))
        freezes = any(spec.policy.kind != "off" for spec in specs)
        every = steps_of(job.embedding.advanced.reselect_every_samples, job.trainer.batch_size)
        self._reselect_every = every if freezes else None
        self._memory_peak = self._frozen_peak = 0

    def train(self, step: int, ids: list[dict[str, RoutedIds]], *, is_pass_end: bool) -> None:
        """One step, and what the loop does after it. ids: by store."""
        for store, who, of_store in zip(self._stores, self._who, ids, strict=True):
            store.pull_in_place(who, step, of_store, _nothing)
            store.push(who, step, {})
        is_reselection = self._reselect_every is not None and step % self._reselect_every == 0
        if not (is_pass_end or is_reselection):
            return
        self.observe()
        if is_pass_end:
            for store, who in zip(self._stores, self._who, strict=True):
                store.end_data_pass(who, step)
        if is_reselection:
            self._reselect(step)
        self.observe()

    def _reselect(self, step: int) -> None:
        found: dict[str, HeatHistogram] = {}
        for number, (store, who) in enumerate(zip(self._stores, self._who, strict=True)):
            for name, histogram in store.heat_histograms(who, step).items():
                scaled = _scaled_histogram(histogram, self._sample.tables[name].strata[number].scale)
                found[name] = found[name] + scaled if name in found else scaled
        frostlines = {name: frostline_at(self._specs[name].policy, h, step) for name, h in found.items()}
        for store, who in zip(self._stores, self._who, strict=True):
            own = store.table_specs()
            store.reselect(who, step, {name: line for name, line in frostlines.items() if name in own})

    def observe(self) -> dict[str, TableStats]:
        """Notes the peaks. What the sampled tables take, not scaled."""
        found = self._found()
        total = self._scaled(found)
        self._memory_peak = max(self._memory_peak, sum(memory_of(stats) for stats in total.values()))
        self._frozen_peak = max(self._frozen_peak, sum(stats.bytes_frozen for stats in total.values()))
        return {name: sum((raw[name] for raw, _ in found if name in raw), TableStats()) for name in self._specs}

    def _found(self) -> list[_Found]:
        return [(store.stats().tables, store.fixed_bytes()) for store in self._stores]

    def _scaled(self, found: Sequence[_Found]) -> dict[str, TableStats]:
        """What the whole tables take, by the sampled ones."""
        result = {}
        for name in self._specs:
            strata = enumerate(self._sample.tables[name].strata)
            parts = [_scaled_stats(found[n][0][name], stratum.scale, *found[n][1][name]) for n, stratum in strata]
            result[name] = sum(parts, TableStats())
        return result

    def estimate(self, num_steps: int, num_samples: int) -> Estimate:
        self.observe()
        tables = self._scaled(self._found())
        return Estimate(
            num_steps=num_steps,
            num_samples=num_samples,
            tables=tables,
            bytes_peak=sum(max(stats.bytes_peak, stats.bytes_total) for stats in tables.values()),
            memory_peak=self._memory_peak,
            frozen_peak=self._frozen_peak,
            sampled={name: sample.num_buckets / len(sample.owners) for name, sample in self._sample.tables.items()},
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = list(dict.fromkeys(event for store in self._stores for event in store.stats().events))
        if self._memory_peak > self._limit_bytes:
            notes.append(
                f"hot rows and index would take {self._memory_peak} bytes at their peak and the shards' memory limits "
                f"add up to {self._limit_bytes}: rows freeze earlier than the policy says, and with policy off new IDs "
                "read the default row; raise servers.memory_limit_bytes, add shards, or pick a policy that freezes more"
            )
        return notes

    def close(self) -> None:
        for store in self._stores:
            store.close()


def _nothing(rows: Mapping[str, PlacedRows]) -> None:
    """The rows themselves are of no interest."""


def _ranked_by_heat(spec: TableSpec) -> TableSpec:
    """Scores come from weights and gradients, which rows have none of here."""
    if spec.policy.select != "score":
        return spec
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"select": "topk", "score": "heat"})})


def _share(spec: TableSpec, sample: TableSample, number: int, num_shards: int) -> TableSpec:
    """The spec in store `number`, whose buckets are only a part of the table's: so is its part of hot_bytes.

    Of a sampled table it is the bytes of its part of the rows, at least one, and of whole pages, which the run pays
    once a shard and the store once too. (The first reading, of whole tables, has refused what the run would refuse.)
    """
    hot_bytes = spec.policy.hot_bytes
    if hot_bytes is None:
        return spec
    share = sample.strata[number].buckets.shape[0] / len(sample.owners)
    if sample.level == 0:
        own = max(1, round(hot_bytes * share))
    else:
        rows = (hot_bytes - num_shards * BYTES_OF_PAGES) / hot_row_bytes(spec)
        own = BYTES_OF_PAGES + max(1, round(rows * share)) * hot_row_bytes(spec)
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"hot_bytes": own})})


def _scaled_stats(stats: TableStats, scale: float, fixed_hot: int, fixed_frozen: int) -> TableStats:
    """fixed_hot, fixed_frozen: parts of the bytes that stay as they are, since they do not come from rows."""
    scaled = {name: round(getattr(stats, name) * scale) for name in TableStats.__dataclass_fields__}
    of_pages = fixed_hot / max(1, stats.bytes_hot + stats.bytes_state)
    for name, fixed in (
        ("bytes_hot", of_pages * stats.bytes_hot),
        ("bytes_state", of_pages * stats.bytes_state),
        ("bytes_frozen", min(fixed_frozen, stats.bytes_frozen)),
        ("bytes_peak", min(fixed_hot + fixed_frozen, stats.bytes_peak)),
    ):
        scaled[name] -= round((scale - 1.0) * fixed)
    return TableStats(**scaled)


def _scaled_histogram(histogram: HeatHistogram, scale: float) -> HeatHistogram:
    return HeatHistogram(
        (histogram.counts * scale).round().astype(np.int64),
        round(histogram.rows_total * scale),
        round(histogram.rows_probation * scale),
        (histogram.counts_hot * scale).round().astype(np.int64),
    )
