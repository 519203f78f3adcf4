"""Shards killed with kill -9 after a cut, and after one that was still being written: new ones go on from the cut.

Real processes, and trainee.py's model: after a restore and any steps the tables equal the dictionary, bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from embedding_server.inproc import InprocStore
from embedding_server.snapshot_format import RECORD, cut_folder, part_folder
from embedding_server.store import CutProgress, EmbeddingStore, Identity
from services.local_shards import LocalShards, start_shards
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore

TIMEOUT_S = 60.0


def load_trainee() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frostline_chaos_cuts", Path(__file__).with_name("trainee.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trainee = load_trainee()


def begin(store: EmbeddingStore, *, will_restore: bool = False) -> Identity:
    store.create_tables(trainee.SPECS)
    return Identity(trainee.JOB, store.begin_epoch(trainee.JOB, 1, "sync", will_restore=will_restore).epoch, 0)


def run(store: EmbeddingStore, who: Identity, first: int, last: int) -> None:
    for step in range(first, last + 1):
        trainee.run_step(store, who, step)


def wait_for_cut(store: EmbeddingStore, who: Identity) -> list[CutProgress]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        progress = store.cut_progress(who)
        if all(part.is_done for part in progress):
            return progress
        assert time.monotonic() < deadline_s, progress
        time.sleep(0.01)


def kill(shards: LocalShards) -> None:
    for process in shards.processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in shards.processes:
        process.wait(20)
    shards.stop()


def start(num_shards: int, root: Path) -> LocalShards:
    return start_shards(num_shards, memory_limit_bytes=num_shards << 27, snapshot_root=root)


@pytest.mark.slow
def test_killed_shards_go_on_from_the_cut_on_two_three_and_one_new_ones(tmp_path: Path) -> None:
    first = start(2, tmp_path)
    store = RemoteStore(first.addresses)
    who = begin(store)
    run(store, who, 1, 10)
    folder = str(tmp_path / trainee.JOB / cut_folder(10, who.epoch))
    store.begin_cut(who, 10, folder)
    run(store, who, 11, 14)
    assert [part.error for part in wait_for_cut(store, who)] == [None, None]
    run(store, who, 15, 16)
    # another cut, and the kill while it is being written or just after: the whole one still counts
    store.begin_cut(who, 16, str(tmp_path / trainee.JOB / cut_folder(16, who.epoch)))
    kill(first)
    store.close()

    model = InprocStore(memory_limit_bytes=64 << 20)
    of_model = begin(model)
    run(model, of_model, 1, 10)
    expected = model.mask_info()
    for num_shards in (2, 3, 1):
        with start(num_shards, tmp_path) as shards:
            store = RemoteStore(shards.addresses)
            who = begin(store, will_restore=True)
            store.restore(who, folder)
            trainee.assert_equals_model(store, 10)
            for table, info in store.mask_info().items():
                assert info.stats.rows_hot == expected[table].stats.rows_hot
                assert info.stats.rows_frozen == expected[table].stats.rows_frozen
                assert (info.heat_counts_hot == expected[table].heat_counts_hot).all()
                assert (info.heat_counts_frozen == expected[table].heat_counts_frozen).all()
            run(store, who, 11, 19)
            trainee.assert_equals_model(store, 19)
            # and a cut of what was restored, on other shards than before
            store.begin_cut(who, 19, str(tmp_path / f"on-{num_shards}" / cut_folder(19, who.epoch)))
            assert [part.error for part in wait_for_cut(store, who)] == [None] * num_shards
            store.close()
    run(model, of_model, 11, 19)
    trainee.assert_equals_model(model, 19)
    model.close()


@pytest.mark.slow
def test_cuts_at_every_step_of_pulls_and_pushes_that_do_not_stop(tmp_path: Path) -> None:
    """Each whole cut is one of its step, though the next steps ran while it was written."""
    with start(2, tmp_path) as shards:
        store = RemoteStore(shards.addresses)
        who = begin(store)
        whole = []
        for step in range(1, 21):
            trainee.run_step(store, who, step)
            if not whole or all(part.is_done for part in store.cut_progress(who)):
                folder = tmp_path / trainee.JOB / cut_folder(step, who.epoch)
                store.begin_cut(who, step, str(folder))
                whole.append((step, folder))
        wait_for_cut(store, who)
        store.close()
    assert len(whole) > 3
    restored = InprocStore(memory_limit_bytes=64 << 20)
    for step, folder in whole:
        assert all((folder / part_folder(part, 2) / RECORD).is_file() for part in range(2))
        who = begin(restored, will_restore=True)
        restored.restore(who, str(folder))
        trainee.assert_equals_model(restored, step)
    restored.close()


def test_an_idle_shard_process_finishes_its_cut_and_look_ups_go_on_meanwhile(tmp_path: Path) -> None:
    with start(2, tmp_path) as shards:
        store = RemoteStore(shards.addresses)
        who = begin(store)
        run(store, who, 1, 12)
        stop, counted = threading.Event(), []

        def look_up() -> None:
            while not stop.is_set():
                trainee.assert_equals_model(store, 12)
                counted.append(1)

        reader = threading.Thread(target=look_up)
        reader.start()
        folder = tmp_path / trainee.JOB / cut_folder(12, who.epoch)
        store.begin_cut(who, 12, str(folder))
        deadline_s = time.monotonic() + TIMEOUT_S
        while not all((folder / part_folder(part, 2) / RECORD).exists() for part in range(2)):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        stop.set()
        reader.join()
        assert counted
        store.close()


def test_every_answer_about_cuts_and_restores_lost_once(
    serve: Callable[[int], list[str]], proxy: Callable[[str], Any], tmp_path: Path
) -> None:
    """Each call is repeated, and none has its effect twice."""

    def connect(num_shards: int) -> RemoteStore:
        proxies = [proxy(address) for address in serve(num_shards)]
        for each in proxies:
            each.loses_each_reply_once = True
        return RemoteStore([each.address for each in proxies], times=CallTimes(deadline_s=TIMEOUT_S))

    store = connect(2)
    who = begin(store)
    run(store, who, 1, 6)
    folder = tmp_path / trainee.JOB / cut_folder(6, who.epoch)
    store.begin_cut(who, 6, str(folder))
    run(store, who, 7, 8)
    assert [(part.step, part.error) for part in wait_for_cut(store, who)] == [(6, None), (6, None)]
    # begun again in between, it would hold step 8 by now
    store.begin_cut(who, 8, str(tmp_path / trainee.JOB / cut_folder(8, who.epoch)))
    store.abandon_cut(who)
    store.close()
    for num_shards in (1, 3):
        other = connect(num_shards)
        again = begin(other, will_restore=True)
        other.restore(again, str(folder))
        trainee.assert_equals_model(other, 6)
        run(other, again, 7, 9)
        trainee.assert_equals_model(other, 9)
        other.close()
