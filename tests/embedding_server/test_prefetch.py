"""A Prefetch may come at any time: between pushes, slices of a re-selection and of a merge. Nothing shows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedding_server import hints
from embedding_server.errors import SegmentCorrupt, UnknownTable
from embedding_server.hints import FOUND_ROWS, Hint, pieces_of
from embedding_server.inproc import InprocStore
from embedding_server.page_reads import PageReads
from embedding_server.segment_file import SegmentArrays, SegmentFormat, write_segment
from embedding_server.segment_merge import SegmentMerges
from embedding_server.segment_reader import CHECKED, open_segment
from embedding_server.segments import SegmentSet
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity, RoutedIds, TableGradients, TableStats

DIM, NUM_IDS, STEPS = 16, 20_000, 24
#: some that no table has, at both ends of int64
ABSENT = np.array([-(2**63), 2**63 - 1, NUM_IDS + 7], np.int64)
SPECS = {
    "idle": TableSpec(name="t", dim=DIM, policy=PolicySpec(kind="idle", idle_steps=3)),
    "compact": TableSpec(
        name="t", dim=DIM, policy=PolicySpec(kind="compact", idle_steps=3, epoch_end="forget_rare", forget_below=2)
    ),
    "random rounding, adam, a cap": TableSpec(
        name="t",
        dim=DIM,
        optimizer=OptimizerSpec(kind="adam"),
        policy=PolicySpec(
            kind="idle", idle_steps=3, frozen_bits=8, freeze_rounding="stochastic", hot_bytes=6000 * (3 * 4 * DIM + 9)
        ),
    ),
}
TakesHint = Callable[[Shard], None]


def train(spec: TableSpec, seed: int, hint: TakesHint) -> tuple[np.ndarray, np.ndarray, TableStats]:
    """Two workers, mode sync; `hint` is called wherever another call may come. What is left: rows, flags, figures."""
    shard = Shard(memory_limit_bytes=64 << 20, backend="cpu")
    shard.create_tables([spec])
    epoch = shard.begin_epoch("job", 2, "sync", 1).epoch
    rng = np.random.default_rng(seed)
    for step in range(1, STEPS + 1):
        pushes = []
        for worker in range(2):
            ids = np.unique(rng.integers(0, NUM_IDS, 3000))
            rows = shard.pull(Identity("job", epoch, worker), step, {"t": ids}, "float32").result(0)["t"]
            hot = (rows.flags & 1) != 0
            gradients = rng.standard_normal((int(hot.sum()), DIM)).astype(np.float32)
            pushes.append(ShardGradients(ids[hot], gradients, 0.05))
            hint(shard)
        for worker, push in enumerate(pushes):
            shard.push(Identity("job", epoch, worker), step, {"t": push}, "float32")
            hint(shard)
        if step % 4 == 0:
            who = Identity("job", epoch, 0)
            _until_done(lambda who=who, step=step: shard.reselect(who, step, {})[1], shard, hint)
            if step % 12 == 0:
                _until_done(lambda who=who, step=step: shard.end_data_pass(who, step)[1], shard, hint)
        _until_done(lambda: not shard.maintain(), shard, hint)
    every = np.arange(NUM_IDS)
    rows = shard.lookup({"t": every}, "float32")["t"]
    stats = shard.stats().tables["t"]
    shard.close()
    return rows.values, rows.flags, stats


def _until_done(next_slice: Callable[[], bool], shard: Shard, hint: TakesHint) -> None:
    while not next_slice():
        hint(shard)
    hint(shard)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_shows_of_hints_at_any_time(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []  # frozen rows of a hint, and whether a merge was under way
    merges: list[int] = []
    find_pages, end_merge = SegmentSet.find_pages, SegmentMerges.end

    def noting_find_pages(self: SegmentSet, locations: np.ndarray, around: int) -> PageReads:
        asked.append((locations.size, self._merges.output is not None))
        return find_pages(self, locations, around)

    def noting_end_merge(self: SegmentMerges) -> None:
        if self.output is not None:
            merges.append(1)
        end_merge(self)

    monkeypatch.setattr(SegmentSet, "find_pages", noting_find_pages)
    monkeypatch.setattr(SegmentMerges, "end", noting_end_merge)
    rng = np.random.default_rng(seed)

    def hint(shard: Shard) -> None:
        ids = rng.integers(0, NUM_IDS, int(rng.integers(0, 2000)))  # in any order, and twice is allowed here
        Hint({"t": np.concatenate([np.unique(ids), ABSENT])}).run(lambda advance: advance(shard))

    rows, flags, stats = train(SPECS[name], seed, hint)
    assert merges
    assert sum(size for size, _ in asked) > 10_000  # frozen rows in files
    assert any(size for size, is_merging in asked if is_merging)
    expected_rows, expected_flags, expected_stats = train(SPECS[name], seed, lambda shard: None)
    np.testing.assert_array_equal(rows.view(np.uint32), expected_rows.view(np.uint32))
    np.testing.assert_array_equal(flags, expected_flags)
    assert stats == expected_stats
    assert stats.rows_frozen > 1000


@pytest.mark.parametrize("sizes", [[0], [5], [FOUND_ROWS], [FOUND_ROWS + 1], [0, 3, 0, 2 * FOUND_ROWS, 1], []])
def test_pieces_hold_every_row_id_once_and_are_small(sizes: list[int]) -> None:
    ids = {f"t{i}": np.arange(1000 * i, 1000 * i + n) for i, n in enumerate(sizes)}
    pieces = list(pieces_of(ids, FOUND_ROWS))
    for name, row_ids in ids.items():
        np.testing.assert_array_equal(np.concatenate([piece[name] for piece in pieces if name in piece]), row_ids)
    assert all(sum(part.size for part in piece.values()) <= FOUND_ROWS for piece in pieces)
    assert len(pieces) == max(-(-sum(sizes) // FOUND_ROWS), len(sizes) > 0)


def test_a_slice_ends_with_its_time_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Slow:
        def find_pages(self, ids: dict[str, np.ndarray]) -> PageReads:
            seen.append(ids["t"].size)
            return PageReads()

    clock = iter(np.arange(0.0, 1.0, 0.0015))  # a look at the clock takes 1.5 ms
    monkeypatch.setattr(hints.time, "monotonic", lambda: next(clock))
    hint = Hint({"t": np.arange(5 * FOUND_ROWS)})
    slices = []
    hint.run(lambda advance: slices.append(len(seen)) or advance(Slow()))  # type: ignore[arg-type, func-returns-value]
    assert slices == [0, 2, 4]
    assert seen == [FOUND_ROWS] * 5


def test_a_hint_checks_blocks_and_leaves_damage_to_the_read(tmp_path: Path) -> None:
    shard, ids = Shard(data_dir=tmp_path, memory_limit_bytes=64 << 20, backend="cpu"), np.arange(20_000)
    shard.create_tables([TableSpec(name="t", dim=64, policy=PolicySpec(idle_steps=1, control_fraction=0.0))])
    who = Identity("job", shard.begin_epoch("job", 1, "sync", 1).epoch, 0)
    for step, pulled in ((1, ids), (2, ids[:0]), (3, ids[:0])):
        shard.pull(who, step, {"t": pulled}, "float32").result(0)
        shard.push(who, step, {}, "float32").result(0)
    while not shard.reselect(who, 3, {})[1]:
        pass
    shard.settle()
    (segment,) = shard._tables["t"].segments._slots.mapped.values()
    start = segment.arrays.rows.ctypes.data - segment.address
    with open(segment.path, "r+b") as file:
        file.seek(start + segment.arrays.rows.nbytes // 2)
        file.write(b"damage")
    checked_before = int((segment.block_states == CHECKED).sum())
    Hint({"t": ids}).run(lambda advance: advance(shard))
    states = segment.block_states
    assert checked_before < (states == CHECKED).sum() < states.size - 1
    with pytest.raises(SegmentCorrupt, match=str(segment.path)):
        shard.lookup({"t": ids}, "float32")
    shard.close()


def test_a_hint_may_check_blocks_of_a_segment_that_is_gone_by_then(tmp_path: Path) -> None:
    path, rng = tmp_path / "0.segment", np.random.default_rng(0)
    n = 50_000
    arrays = SegmentArrays(
        np.arange(n),
        np.array([0, n], np.uint32),
        rng.integers(0, 256, (n, 36), np.uint8),
        *rng.integers(0, 256, (2, n), np.uint8),
    )
    write_segment(path, SegmentFormat("t", 4, 64, 1), 7, arrays)
    segment = open_segment(path, verify=False)
    blocks = range(segment.block_states.size)
    reads = PageReads.union([PageReads(), PageReads(checks=[segment.check_later(blocks)])])
    start, states = segment.address, segment.block_states
    assert _is_mapped(start)
    segment.close()
    path.unlink()
    assert _is_mapped(start)
    (check,) = reads.checks
    looks = iter([True, True, False])
    check.run(lambda: next(looks))
    assert (states == CHECKED).sum() == 32
    check.run()
    assert (states == CHECKED).all()
    del reads, check
    assert not _is_mapped(start)


def _is_mapped(address: int) -> bool:
    return any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_store_in_process_takes_hints_in_the_background_and_one_at_a_time() -> None:
    store = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    store.create_tables([SPECS["idle"]])
    ids = np.arange(3 * FOUND_ROWS)
    routed = {"t": RoutedIds(ids, np.array([0, ids.size], np.int64))}
    taken: list[int] = []
    find_pages = store._shard.find_pages
    store._shard.find_pages = lambda of: (taken.extend(of.get("t", ids[:0]).tolist()), find_pages(of))[1]  # type: ignore[method-assign]
    with store._lock:  # as if a Pull was under way
        store.prefetch(routed)  # returns at once
        store.prefetch(routed)  # and this one is dropped
        assert taken == []
        ids[:] = 0  # the caller may use its arrays again
    assert store._hint is not None
    store._hint.result(10)
    assert taken == list(range(3 * FOUND_ROWS))
    taken.clear()
    store.prefetch(routed)  # the lock is free: what is to be read is found in this thread
    assert taken == [0] * 3 * FOUND_ROWS
    store._hint.result(10)
    with pytest.raises(UnknownTable):
        store.prefetch({"nobody": routed["t"]})
    store.close()
    store.prefetch(routed)
    assert len(taken) == 3 * FOUND_ROWS


def test_the_next_hint_ends_the_checks_of_the_one_before() -> None:
    store = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
    store.create_tables([SPECS["idle"]])
    is_checking, ended = threading.Event(), []

    class Endless:
        def run(self, is_wanted: Callable[[], bool]) -> None:
            is_checking.set()
            deadline_s = time.monotonic() + 20
            while is_wanted() and time.monotonic() < deadline_s:
                time.sleep(0.001)
            ended.append(is_wanted())

    taken: list[int] = []
    checks = [[Endless()], []]
    store._shard.find_pages = lambda of: (taken.append(of["t"].size), PageReads(checks=checks.pop(0)))[1]  # type: ignore[method-assign,arg-type]
    for n in (5, 7):
        store.prefetch({"t": RoutedIds(np.arange(n), np.array([0, n], np.int64))})
        assert is_checking.wait(20)
    assert store._hint is not None
    store._hint.result(20)
    assert (taken, ended) == ([5, 7], [False])
    store.close()


def test_hints_from_other_threads_change_no_row() -> None:
    """A store whose segments are written in the background, and two threads that do nothing but hint."""
    found = []
    for num_hinting in (0, 2):
        store = InprocStore(memory_limit_bytes=64 << 20, backend="cpu")
        store.create_tables([SPECS["idle"]])
        is_over, errors = threading.Event(), []

        def hint(seed: int, store=store, is_over=is_over, errors=errors) -> None:
            rng = np.random.default_rng(seed)
            try:
                while not is_over.wait(0.0005):
                    ids = np.unique(rng.integers(-5, NUM_IDS, 1000))
                    store.prefetch({"t": RoutedIds(ids, np.array([0, ids.size], np.int64))})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=hint, args=(seed,)) for seed in range(num_hinting)]
        for thread in threads:
            thread.start()
        found.append(_train_store(store))
        is_over.set()
        for thread in threads:
            thread.join()
        assert errors == []
        store.close()
    np.testing.assert_array_equal(found[0], found[1])


def _train_store(store: InprocStore) -> np.ndarray:
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    rng = np.random.default_rng(3)
    for step in range(1, STEPS + 1):
        ids = np.unique(rng.integers(0, NUM_IDS, 3000))
        routed = RoutedIds(ids, np.array([0, ids.size], np.int64))
        store.pull(who, step, {"t": routed})
        gradients = rng.standard_normal((ids.size, DIM)).astype(np.float32)
        store.push(who, step, {"t": TableGradients(routed, gradients, 0.05)})
        if step % 4 == 0:
            store.reselect(who, step, {})
    every = RoutedIds(np.arange(NUM_IDS), np.array([0, NUM_IDS], np.int64))
    rows = store.lookup({"t": every})["t"]
    assert store.stats().tables["t"].rows_frozen > 1000
    return np.concatenate([rows.values.view(np.uint8), rows.flags[:, None]], axis=1)
