"""Complete snapshots of a store with every optimizer, every number of bits, hot, frozen and untouched rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.snapshot_format import MANIFEST, OBJECTS
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import EmbeddingStore, Frostline, Identity, RoutedIds, TableGradients
from tests.trainer.snapshot_folders import file_of
from tests.trainer.test_snapshots import manifest_of
from trainer.snapshots import CutName, job_folder, read_manifest, shard_entries, write_manifest

JOB = "job"
STEPS = 12


def _table(name: str, dim: int, optimizer: str, policy: str = "idle", bits: int = 4, **changes) -> TableSpec:
    decay = changes.pop("weight_decay", 0.0)
    return TableSpec(
        name=name,
        dim=dim,
        optimizer=OptimizerSpec(kind=optimizer, weight_decay=decay),
        policy=PolicySpec(kind=policy, idle_steps=2, frozen_bits=bits, **changes),
    )


SPECS = [
    _table("user", 8, "adam", "off", weight_decay=0.01),
    _table("item", 16, "rowwise_adagrad"),
    _table("tail", 8, "adagrad", "compact", 8, weight_decay=0.02),
    _table("half", 4, "ftrl", bits=16, hot_bits=16),
    _table("rare", 12, "sgd", bits=32, min_count=2),
    _table("ranked", 8, "rowwise_adagrad", "topk", 8, probation_visits=0),
    _table("moments", 8, "adam", bits=32, weight_decay=0.01),
]
DIMS = {spec.name: spec.dim for spec in SPECS}
#: every row_id that training names, and some that it does not
EVERY_ID = np.concatenate([np.arange(-60, 960), [2**63 - 1, -(2**63)]])


def route(store: EmbeddingStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def train(store: EmbeddingStore, who: Identity, first: int = 1, last: int = STEPS, low: int = -50) -> None:
    """Steps with a re-selection after every third; row_ids from `low` on, and the extreme ones below 0."""
    for step in range(first, last + 1):
        rng = np.random.default_rng(step)
        some = np.clip(rng.zipf(1.3, 200), 0, 900) + low
        ids = {
            spec.name: route(
                store, np.append(some, [2**63 - 1, -(2**63)] if low < 0 and step < 6 else []).astype(np.int64)
            )
            for spec in SPECS
        }
        store.pull(who, step, ids)
        store.push(who, step, {spec.name: _gradients(store, spec, ids[spec.name], step) for spec in SPECS})
        if step % 3 == 0:
            occupied = np.flatnonzero(store.heat_histograms(who, step)["ranked"].counts)
            store.reselect(who, step, {"ranked": Frostline(int(occupied[len(occupied) // 2]))})


def _gradients(store: EmbeddingStore, spec: TableSpec, ids: RoutedIds, step: int) -> TableGradients:
    """Of the even row_ids: the odd ones stay at their initial value."""
    trained = route(store, ids.row_ids[ids.row_ids % 2 == 0])
    base = np.random.default_rng(step).normal(size=spec.dim)
    values = np.sin(trained.row_ids[:, None] % 1000 + base[None, :]).astype(np.float32)
    default = np.full(spec.dim, 0.5, np.float32) if spec.policy.min_count > 1 else None
    return TableGradients(trained, values, 0.1, default)


def make_snapshot(
    uri: Path, store: EmbeddingStore | None = None, low: int = -50, *, deltas: bool = False
) -> tuple[Path, dict]:
    """(cut, weights float32[n, D] and flags uint8[n] of EVERY_ID by table as a look-up gives them at the cut).

    deltas: it is a delta of one that is a delta of a full one.
    """
    own = InprocStore(memory_limit_bytes=128 << 20) if store is None else store
    try:
        own.create_tables(SPECS)
        who = Identity(JOB, own.begin_epoch(JOB, 1, "sync").epoch, 0)
        parent, first = None, 1
        for step in (STEPS // 2, STEPS - 1) if deltas else ():
            train(own, who, first, step, low=low)
            parent, first = cut_of(own, who, uri, step, parent), step + 1
        train(own, who, first, low=low)
        return cut_of(own, who, uri, STEPS, parent), look_up(own)
    finally:
        if store is None:
            own.close()


def cut_of(store: EmbeddingStore, who: Identity, uri: Path, step: int, parent: Path | None = None) -> Path:
    cut = job_folder(uri, JOB) / CutName(who.epoch, step).folder
    cut.mkdir(parents=True)
    store.begin_cut(who, step, str(cut), None if parent is None else str(parent))
    while not all(part.is_done for part in store.cut_progress(who)):
        time.sleep(0.005)
    assert not any(part.error for part in store.cut_progress(who))
    shards = shard_entries(cut, store.num_shards)
    lineage: dict[str, Any] = {}
    if parent is not None:
        before = read_manifest(parent)
        entry = file_of(parent / MANIFEST) | {"step": before.step, "epoch": before.epoch}
        lineage = {"parent": entry, "sequence": before.sequence + 1}
    write_manifest(cut, manifest_of(step, who.epoch, job=JOB, num_workers=1, shards=shards, reader=None, **lineage))
    return cut


def look_up(store: EmbeddingStore) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    every = {spec.name: route(store, EVERY_ID) for spec in SPECS}
    rows = store.lookup(every)
    for name, ids in every.items():
        order = np.argsort(ids.row_ids)
        found[name] = rows[name].values[order].astype(np.float32), rows[name].flags[order]
    return found


def objects_in(cut: Path) -> list[Path]:
    return sorted((cut.parent / OBJECTS).glob("*.segment"))
