"""A segment file that is cut off while it is mapped gives no wrong rows: a read is refused where only its last page is
concerned, and else the process ends, as where its disk fails, which is a crash to recover from."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from embedding_server.errors import SegmentCorrupt, StoreUnavailable
from embedding_server.kernels.hashing import buckets_of
from embedding_server.kernels.locations import locations_of
from embedding_server.segment_file import SegmentArrays, SegmentFormat, write_segment
from embedding_server.segment_reader import open_segment
from embedding_server.segment_rows import SegmentRows
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import NUM_BUCKETS, Identity, RoutedIds, TableGradients
from services.local_shards import start_shards
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore

_PAGE = 4096


def _write(path: Path, num_rows: int) -> None:
    row_ids = np.arange(num_rows, dtype=np.int64)
    buckets = buckets_of(row_ids, NUM_BUCKETS)
    order = np.argsort(buckets, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(buckets, minlength=NUM_BUCKETS))]).astype(np.uint32)
    rows = np.arange(num_rows * 16, dtype=np.float32).reshape(num_rows, 16).view(np.uint8)
    ones = np.ones(num_rows, np.uint8)
    fmt = SegmentFormat("t", 32, 16, NUM_BUCKETS)
    write_segment(path, fmt, 1, SegmentArrays(row_ids[order], offsets, rows, ones, ones.copy()))


def _read(rows: SegmentRows, locations: np.ndarray, right: list[bytes]) -> str:
    try:
        return "right" if [part.tobytes() for part in rows.read_all(locations)] == right else "wrong rows"
    except SegmentCorrupt as error:
        return str(error)


def test_a_file_cut_off_within_its_last_page_gives_no_rows(tmp_path: Path) -> None:
    path, n = tmp_path / "s", 150
    _write(path, n)
    good = path.read_bytes()
    mapped = open_segment(path)
    rows = SegmentRows(16)
    rows.set_file(0, mapped)
    locations = locations_of(0, 0, n)
    right = [part.tobytes() for part in rows.read_all(locations)]
    refused = 0
    assert len(good) % _PAGE > 600, "rows, accumulators and visits are in the last page"
    for missing in range(1, len(good) % _PAGE):
        os.truncate(path, len(good) - missing)
        told = _read(rows, locations, right)
        assert told == "right" or str(path) in told
        refused += told != "right"
        path.write_bytes(good)  # the same inode
    assert refused >= len(good) % _PAGE - 4  # the last bytes may be zeros anyway
    assert [part.tobytes() for part in rows.read_all(locations)] == right
    mapped.close()


def _route(row_ids: np.ndarray) -> RoutedIds:
    return RoutedIds(row_ids, np.array([0, row_ids.shape[0]]))


def test_a_shard_whose_segment_was_cut_off_ends(tmp_path: Path) -> None:
    spec = TableSpec(name="t", dim=64, policy=PolicySpec(kind="idle", idle_steps=1, frozen_bits=32))
    row_ids = np.arange(4000, dtype=np.int64)
    with start_shards(1, data_dir=tmp_path / "data", log_dir=tmp_path / "logs", memory_limit_bytes=1 << 28) as shards:
        store = RemoteStore(shards.addresses, times=CallTimes(deadline_s=60.0, reconnect_s=0.5))
        store.create_tables([spec])
        who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
        for step, ids in enumerate([row_ids, row_ids[:1], row_ids[:1]], 1):
            store.pull(who, step, {"t": _route(ids)})
            gradients = np.ones((ids.shape[0], 64), np.float32)
            store.push(who, step, {"t": TableGradients(_route(ids), gradients, 0.1)})
        store.reselect(who, 3, {})
        store.mask_info()  # writes what is frozen
        assert store.lookup({"t": _route(row_ids)})["t"].values.any()  # every block is checked now
        (path,) = (tmp_path / "data").rglob("*.safetensors")
        os.truncate(path, 0)
        with pytest.raises(StoreUnavailable):
            store.lookup({"t": _route(row_ids)})
        assert shards.processes[0].wait(20) == -signal.SIGBUS
        with pytest.raises(StoreUnavailable, match="shard 0"):
            shards.check()
        store.close()
