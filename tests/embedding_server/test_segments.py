"""The set of segments against a dictionary: whatever is written, merged or failing, live rows stay byte for byte."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_server import segment_file, segment_merge, segment_reader
from embedding_server.errors import Overloaded, SegmentCorrupt
from embedding_server.kernels import frozen
from embedding_server.kernels.hashing import buckets_of
from embedding_server.kernels.locations import FROZEN, MAX_SLOTS, NO_SEGMENT, SLOT_SHIFT, next_locations
from embedding_server.page_reads import BLOCK_BYTES, PAGE_BYTES, PIECE_BYTES
from embedding_server.segment_builder import MAX_SEGMENT_BYTES, capacity_rows, fixed_bytes
from embedding_server.segment_file import SegmentFormat
from embedding_server.segment_merge import MAX_SEGMENTS, plan_merge
from embedding_server.segment_reader import open_segment
from embedding_server.segments import SegmentSet

NUM_BUCKETS = 16
FORMATS = {bits: SegmentFormat(table="user", bits=bits, dim=4, num_buckets=NUM_BUCKETS) for bits in (4, 8)}
FORMAT = FORMATS[8]
ROW_BYTES = FORMAT.row_bytes


class Harness:
    """A SegmentSet with its dictionary model: row_id -> (location, row bytes, accumulator, visits).

    small_bytes: with 0, a few rows get a file.
    """

    def __init__(self, directory: Path, capacity: int = 50, bits: int = 8, small_bytes: int = 0, **options) -> None:
        self.directory = directory
        self.now = 0.0
        self.events: list[str] = []
        payload = fixed_bytes(FORMAT) + capacity * FORMAT.unit_bytes
        segment_bytes = payload + 4 * (payload // segment_file.CRC_BLOCK_BYTES + 2)  # 4 bytes for the CRC of a block
        self.segments = SegmentSet(
            directory,
            "user",
            NUM_BUCKETS,
            bits=bits,
            dim=4,
            on_event=self.events.append,
            segment_bytes=segment_bytes,
            small_bytes=small_bytes,
            clock=lambda: self.now,
            **options,
        )
        assert self.segments._slots.capacity[8] == capacity
        self.model: dict[int, tuple[int, bytes, int, int]] = {}
        self.total = 0

    def freeze(self, row_ids: np.ndarray, seed: int = 0, bits: int = 8) -> None:
        """Appends rows with random content, in bucket order."""
        rng = np.random.default_rng(seed)
        row_ids = in_bucket_order(row_ids)
        n = row_ids.shape[0]
        rows = rng.integers(0, 256, (n, FORMATS[bits].row_bytes), dtype=np.uint8)
        accumulators = rng.integers(0, 256, n, dtype=np.uint8)
        visits = rng.integers(0, 256, n, dtype=np.uint8)
        locations = self.segments.append(row_ids, rows, accumulators, visits, bits=bits)
        assert locations.dtype == np.uint32
        assert np.unique(locations).shape[0] == n
        self.total += n
        for i, row_id in enumerate(row_ids.tolist()):
            assert row_id not in self.model
            self.model[row_id] = (int(locations[i]), rows[i].tobytes(), int(accumulators[i]), int(visits[i]))

    def thaw(self, row_ids) -> None:
        locations = [self.model.pop(row_id)[0] for row_id in row_ids]
        self.segments.mark_dead(np.array(locations, np.uint32))

    def is_live(self, row_ids: np.ndarray, locations: np.ndarray) -> np.ndarray:
        pairs = zip(row_ids.tolist(), locations.tolist(), strict=True)
        return np.array([i in self.model and self.model[i][0] == location for i, location in pairs], np.bool_)

    def moved(self, row_ids: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        for row_id, before, after in zip(row_ids.tolist(), old.tolist(), new.tolist(), strict=True):
            assert self.model[row_id][0] == before
            self.model[row_id] = (after, *self.model[row_id][1:])

    def merge_slice(self) -> bool:
        return self.segments.merge_slice(self.is_live, self.moved)

    def merge(self) -> None:
        while not self.merge_slice():
            pass

    def write(self) -> None:
        self.segments.flush()

    def settle(self) -> None:
        """Until there is nothing to write or to merge."""
        self.segments.seal()
        self.write()
        while self.segments.needs_merge():
            self.merge()
            self.write()

    def check(self) -> None:
        locations = np.array([entry[0] for entry in self.model.values()], np.uint32)
        addresses = self.segments.addresses(locations)
        for address, (_, row, _, _) in zip(addresses.tolist(), self.model.values(), strict=True):
            assert ctypes.string_at(address, len(row)) == row
        row_bytes = [FORMATS[bits].row_bytes for bits in self.segments.bits_of(locations).tolist()]
        assert row_bytes == [len(row) for _, row, _, _ in self.model.values()]
        accumulators = [entry[2] for entry in self.model.values()]
        assert self.segments.accumulators_of(locations).tolist() == accumulators
        assert self.segments.visits_of(locations).tolist() == [entry[3] for entry in self.model.values()]
        assert self.segments.rows_total - self.segments.rows_dead == len(self.model)
        on_disk = sum(path.stat().st_size for path in self.files())
        assert self.segments.bytes_used == on_disk + self.segments.bytes_in_memory

    def files(self) -> list[Path]:
        return sorted(self.directory.iterdir()) if self.directory.exists() else []


def in_bucket_order(row_ids: np.ndarray) -> np.ndarray:
    row_ids = np.asarray(row_ids, np.int64)
    return row_ids[np.argsort(buckets_of(row_ids, NUM_BUCKETS), kind="stable")]


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path / "segments")
    yield made
    made.check()
    made.segments.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def disk_error(monkeypatch, code: int | None) -> None:
    def fail(fd, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segment_file, "write_bytes", os.write if code is None else fail)


# The life of a segment ----------------------------------------------------------------------------------------------


def test_rows_read_the_same_in_every_stage(harness):
    harness.freeze(np.array([-(2**63), -1, 0, 1, 2**63 - 1]))
    harness.check()  # growing
    harness.segments.seal()
    harness.check()  # sealed
    assert harness.segments.bytes_used == harness.segments.bytes_in_memory > 0
    assert harness.segments.write_pending() is True
    assert harness.segments.write_pending() is False
    harness.check()  # written
    assert harness.segments.bytes_in_memory == 0
    assert len(harness.files()) == 1
    open_segment(harness.files()[0]).close()


def test_locations_are_slot_and_position(harness):
    row_ids = in_bucket_order(np.arange(60))
    harness.freeze(row_ids)
    expected = [FROZEN | i // 50 << SLOT_SHIFT | i % 50 for i in range(60)]
    assert [harness.model[row_id][0] for row_id in row_ids.tolist()] == expected


def test_files_carry_the_step_of_their_pass(harness):
    harness.segments.open_builder(41)
    harness.freeze(np.arange(10))
    harness.segments.open_builder(42)
    harness.freeze(np.arange(10, 20))
    harness.segments.seal()
    harness.write()
    steps = []
    for path in harness.files():
        segment = open_segment(path)
        steps.append(segment.frozen_step)
        segment.close()
    assert steps == [41, 42]


def test_full_segment_rolls_to_the_next(harness):
    harness.freeze(np.arange(120))
    assert harness.segments.num_segments == 3
    harness.write()
    assert len(harness.files()) == 2  # the third still grows
    for path in harness.files():
        segment = open_segment(path)
        assert segment.num_rows == 50
        segment.close()


def test_lower_bucket_starts_a_new_segment(harness):
    row_ids = in_bucket_order(np.arange(30))
    harness.freeze(row_ids[15:])
    harness.freeze(row_ids[:15])
    assert harness.segments.num_segments == 2
    harness.segments.seal()
    harness.write()
    for path in harness.files():
        open_segment(path).close()  # verifies that each row is in its bucket


def test_rising_appends_share_a_segment(harness):
    row_ids = in_bucket_order(np.arange(30))
    for start in range(0, 30, 7):
        harness.freeze(row_ids[start : start + 7])
    harness.freeze(row_ids[:0])
    assert harness.segments.num_segments == 1


def test_unsorted_rows_are_our_own_bug(harness):
    row_ids = in_bucket_order(np.arange(30))[::-1].copy()
    with pytest.raises(AssertionError, match="sorted by bucket"):
        harness.segments.append(row_ids, np.zeros((30, ROW_BYTES), np.uint8), *np.zeros((2, 30), np.uint8))
    assert harness.segments.rows_total == 0


def test_seal_and_write_of_nothing(harness):
    harness.segments.seal()
    harness.segments.open_builder(3)
    assert harness.segments.write_pending() is False
    assert harness.merge_slice() is True
    assert not harness.segments.needs_merge()
    assert harness.segments.bytes_used == 0
    assert harness.segments.dead_fraction == 0
    assert harness.files() == []


def test_wholly_dead_segment_goes_without_a_merge(harness):
    harness.freeze(np.arange(20))
    harness.segments.seal()
    harness.freeze(np.arange(20, 40))
    harness.segments.seal()
    assert harness.segments.write_pending() is True
    assert len(harness.files()) == 1
    harness.thaw(range(40))
    assert harness.segments.write_pending() is True  # one is a file, the other still waits
    assert harness.segments.num_segments == 1
    assert harness.segments.write_pending() is True
    assert harness.segments.write_pending() is False
    assert harness.segments.num_segments == 0
    assert harness.segments.bytes_used == 0
    assert harness.files() == []


def test_growing_segment_stays_though_dead(harness):
    row_ids = in_bucket_order(np.arange(20))
    harness.freeze(row_ids[:10])
    harness.thaw(row_ids[:10].tolist())
    harness.segments.write_pending()
    harness.freeze(row_ids[10:])
    assert harness.segments.num_segments == 1


def test_no_segment_is_not_counted_dead(harness):
    harness.segments.mark_dead(np.full(5, NO_SEGMENT))
    assert harness.segments.rows_dead == 0


def test_slots_run_out_with_one_left_for_merges(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_file, "sync_fd", lambda fd: None)
    harness = Harness(tmp_path, capacity=2)
    for i in range(MAX_SLOTS - 1):
        assert harness.segments.can_append(1)
        harness.freeze(np.array([i]))
        harness.segments.seal()
    assert not harness.segments.can_append(1)
    before = harness.segments.rows_total
    with pytest.raises(Overloaded, match="255 of 256 segments are in use"):
        harness.freeze(np.array([1000]))
    assert harness.segments.rows_total == before
    assert harness.segments.can_append(0)
    harness.check()
    harness.settle()
    harness.check()
    # two rows fit one segment, so at most half the segments are left
    assert harness.segments.num_segments <= MAX_SLOTS // 2
    harness.freeze(np.array([1000]))
    harness.check()
    harness.segments.close()


def test_append_into_the_open_segment_needs_no_slot(tmp_path):
    harness = Harness(tmp_path, capacity=2)
    for i in range(MAX_SLOTS - 2):
        harness.freeze(np.array([i]))
        harness.segments.seal()
    first, second, third = in_bucket_order(np.array([500, 501, 502])).tolist()
    harness.freeze(np.array([second]))
    with pytest.raises(Overloaded):
        harness.freeze(np.array([first]))  # a lower bucket would need one
    harness.freeze(np.array([third]))
    harness.check()
    harness.segments.close()


def test_leftovers_of_an_earlier_process_are_deleted(tmp_path):
    first = Harness(tmp_path)
    first.freeze(np.arange(10))
    first.settle()
    first.segments.close()
    (old,) = first.files()
    old.with_name(old.name + ".partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    other = SegmentSet(tmp_path, "item", NUM_BUCKETS, bits=8, dim=4)
    assert old.exists()
    second = Harness(tmp_path)
    assert [path.name for path in second.files()] == ["notes.txt"]
    other.close()
    second.segments.close()


def test_tables_may_share_a_folder(tmp_path):
    sets = [SegmentSet(tmp_path, name, NUM_BUCKETS, bits=8, dim=4) for name in ("a", "../a", "é/\n")]
    for segments in sets:
        segments.append(np.arange(1), np.zeros((1, ROW_BYTES), np.uint8), *np.zeros((2, 1), np.uint8))
        segments.seal()
        segments.flush()
        segments.close()
    assert len(list(tmp_path.iterdir())) == 3


# Two formats in one table ---------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    made = Harness(tmp_path / "segments", bits=4)
    yield made
    made.check()
    made.segments.close()


def test_formats_grow_beside_each_other_in_one_pass(mixed):
    row_ids = in_bucket_order(np.arange(30))
    mixed.freeze(row_ids[:10], bits=4)
    mixed.freeze(row_ids[:0], bits=8)
    mixed.freeze(in_bucket_order(np.arange(100, 105)), bits=8)
    mixed.freeze(row_ids[10:], seed=1, bits=4)
    assert mixed.segments.num_segments == 2
    mixed.check()
    mixed.segments.seal()
    mixed.write()
    found = {}
    for path in mixed.files():
        segment = open_segment(path)
        found[segment.format.bits] = segment.num_rows
        segment.close()
    assert found == {4: 30, 8: 5}


def test_one_call_reads_both_formats(mixed):
    weights = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    row_ids = in_bucket_order(np.arange(40))
    zeros = np.zeros(40, np.uint8)
    stored = {bits: frozen.quantise(weights, bits) for bits in (4, 8)}
    fours = mixed.segments.append(row_ids, stored[4], zeros, zeros)
    eights = mixed.segments.append(row_ids, stored[8], zeros, zeros, bits=8)
    picked = np.concatenate([fours[::2], eights[::3], fours[1::5]])
    expected = np.concatenate([read(stored[4])[::2], read(stored[8])[::3], read(stored[4])[1::5]])
    np.testing.assert_array_equal(mixed.segments.read(picked), expected)
    mixed.segments.seal()
    mixed.write()
    np.testing.assert_array_equal(mixed.segments.read(picked), expected)
    mixed.segments.mark_dead(np.concatenate([fours, eights]))


def read(rows: np.ndarray) -> np.ndarray:
    bits = np.full(len(rows), next(b for b, fmt in FORMATS.items() if fmt.row_bytes == rows.shape[1]), np.uint8)
    return frozen.read_frozen(rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.shape[1], bits, 4)


def test_merges_keep_formats_apart(mixed):
    for start, bits in ((0, 4), (100, 8), (200, 4), (300, 8)):
        mixed.freeze(np.arange(start, start + 40), seed=start, bits=bits)
        mixed.segments.seal()
    mixed.settle()
    mixed.thaw([row_id for row_id in list(mixed.model) if row_id % 2])
    mixed.settle()
    assert mixed.segments.rows_dead == 0
    assert sorted(open_segment(path).format.bits for path in mixed.files()) == [4, 8]


def test_room_for_rows_of_unknown_format_counts_both(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_file, "sync_fd", lambda fd: None)
    harness = Harness(tmp_path, capacity=2, bits=4)
    for i in range(MAX_SLOTS - 2):
        harness.freeze(np.array([i]), bits=8)
        harness.segments.seal()
    assert not harness.segments.can_append(1)  # one slot is free, and a freeze may need two
    harness.freeze(np.array([1000]), bits=4)
    harness.check()
    harness.segments.close()


# Damaged files --------------------------------------------------------------------------------------------------------


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def large(tmp_path):
    """A file of several blocks: 20,000 rows of 22 bytes, in the order of `model`."""
    made = Harness(tmp_path / "segments", capacity=20_000)
    made.freeze(np.arange(20_000))
    made.segments.seal()
    made.write()
    yield made
    made.segments.close()


def test_a_block_is_checked_when_it_is_first_read(large):
    (path,) = large.files()
    segment = open_segment(path, verify=False)
    start = segment.arrays.rows.ctypes.data - segment.address
    segment.close()
    row = 12_345
    offset = start + row * ROW_BYTES
    damage(path, offset)
    locations = np.array([entry[0] for entry in large.model.values()], np.uint32)
    block = offset >> 16
    others = (start + np.arange(20_000) * ROW_BYTES + ROW_BYTES - 1) >> 16 < block
    large.segments.addresses(locations[others])  # blocks before it are whole
    large.segments.visits_of(locations)
    for _ in range(2):  # and it does not become right by asking again
        with pytest.raises(SegmentCorrupt, match=rf"block {block} .* does not match its CRC-32") as caught:
            large.segments.read(locations[[row]])
        assert caught.value.path == str(path)
    damage(path, offset)
    large.check()


def test_each_part_of_a_row_is_checked(large):
    (path,) = large.files()
    segment = open_segment(path, verify=False)
    parts = segment.arrays
    starts = [part.ctypes.data - segment.address for part in (parts.accumulators, parts.visits)]
    segment.close()
    locations = np.array([entry[0] for entry in large.model.values()], np.uint32)
    readers = (large.segments.accumulators_of, large.segments.visits_of)
    for offset in starts:
        damage(path, offset)
    for read_part in readers:
        with pytest.raises(SegmentCorrupt):
            read_part(locations[:1])
    for offset in starts:
        damage(path, offset)
    assert [read_part(locations).shape for read_part in readers] == [(20_000,), (20_000,)]


def test_a_checked_block_is_not_checked_again(large, monkeypatch):
    large.check()

    def fail(data, value=0):
        raise AssertionError("a block was read a second time")

    monkeypatch.setattr(segment_reader, "crc32", fail)
    large.check()


def test_a_merge_leaves_a_damaged_file_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_merge, "SLICE_ROWS", 1000)
    large = Harness(tmp_path / "segments", capacity=20_000)
    large.freeze(np.arange(20_000))
    large.settle()
    (path,) = large.files()
    segment = open_segment(path, verify=False)
    start = segment.arrays.rows.ctypes.data - segment.address
    segment.close()
    damage(path, start + 15_000 * ROW_BYTES)
    large.thaw(range(0, 20_000, 3))
    assert large.segments.needs_merge()
    large.merge()
    assert not large.segments.needs_merge()
    (event,) = large.events
    assert str(path) in event
    assert "does not match its CRC-32" in event
    large.write()
    assert len(large.files()) == 2  # what was copied before, and the damaged one
    damage(path, start + 15_000 * ROW_BYTES)
    large.check()  # rows on both sides of the damage are where they belong
    large.segments.close()


def test_a_merge_checks_the_offsets_it_goes_by(large):
    (path,) = large.files()
    segment = open_segment(path, verify=False)
    offset = segment.arrays.bucket_offsets.ctypes.data - segment.address + 4
    segment.close()
    damage(path, offset)
    large.thaw(range(10_000))
    assert large.segments.needs_merge()
    large.merge()
    assert "does not match its CRC-32" in large.events[0]
    assert not large.segments.needs_merge()
    damage(path, offset)
    large.check()


# Cold pages -----------------------------------------------------------------------------------------------------------


def evict(path: Path) -> None:
    """Drops the file's pages from the page cache, as memory pressure would; they must be on disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def absent_pages(path: Path) -> int:
    """Pages of the file that are not in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    segment = open_segment(path, verify=False)
    pages = -(-segment.size_bytes // 4096)
    answer = ctypes.create_string_buffer(pages)
    assert libc.mincore(segment.address, segment.size_bytes, answer) == 0
    segment.close()
    return sum(1 for byte in answer.raw[:pages] if not byte & 1)


def drop_from_memory(large: Harness) -> None:
    """The kernel keeps pages that some process maps, so the set maps the file anew after they went."""
    (path,) = large.files()
    slot, segment = next(iter(large.segments._slots.mapped.items()))
    segment.close()
    evict(path)
    large.segments._slots.mapped[slot] = open_segment(path, verify=False)
    large.segments._reader.set_file(slot, large.segments._slots.mapped[slot])


def wait_until(condition) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within 2 s")


def read_ahead(segments: SegmentSet, locations: np.ndarray, around: int = PIECE_BYTES) -> None:
    reads = segments.find_pages(locations, around)
    reads.start()
    reads.finish()


def test_reading_ahead_brings_the_blocks_of_rows_in_and_changes_nothing(large):
    (path,) = large.files()
    drop_from_memory(large)
    absent = absent_pages(path)
    if absent < 50:
        pytest.skip("this file system keeps its pages")
    locations = np.array([entry[0] for entry in large.model.values()], np.uint32)
    read_ahead(large.segments, locations[5000:5001])  # one block, 16 pages
    wait_until(lambda: absent_pages(path) <= absent - 16)
    read_ahead(large.segments, locations)
    wait_until(lambda: absent_pages(path) <= absent - 50)
    large.check()
    drop_from_memory(large)
    read_ahead(large.segments, locations)
    read_ahead(large.segments, locations)
    read_ahead(large.segments, locations[:0])
    large.check()


@pytest.mark.parametrize(("around", "most_pages"), [(PAGE_BYTES, 2), (PIECE_BYTES, 8), (BLOCK_BYTES, 32)])
def test_reading_checked_rows_ahead_brings_what_lies_around_them(large, around, most_pages):
    large.check()  # every block is checked
    (path,) = large.files()
    states = next(iter(large.segments._slots.mapped.values())).block_states.copy()
    drop_from_memory(large)
    next(iter(large.segments._slots.mapped.values())).block_states[:] = states
    absent = absent_pages(path)
    if absent < 50:
        pytest.skip("this file system keeps its pages")
    locations = np.array([entry[0] for entry in large.model.values()], np.uint32)
    read_ahead(large.segments, locations[5000:5001], around)
    assert absent - most_pages <= absent_pages(path) <= absent - around // PAGE_BYTES
    weights, accumulators, visits = large.segments.read_all(locations)  # a batch with absent pages comes in as a whole
    np.testing.assert_array_equal(weights, large.segments.read(locations))
    np.testing.assert_array_equal(accumulators, large.segments.accumulators_of(locations))
    np.testing.assert_array_equal(visits, large.segments.visits_of(locations))
    large.check()


def test_rows_in_a_buffer_are_not_read_ahead(harness):
    harness.freeze(np.arange(40))
    reads = harness.segments.find_pages(np.array([entry[0] for entry in harness.model.values()], np.uint32), PAGE_BYTES)
    assert not any(ranges.size for ranges in (*reads.reads, *reads.pages))
    harness.check()


# Failing disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failed_write_keeps_serving_and_is_tried_again(harness, monkeypatch, code):
    harness.freeze(np.arange(20))
    harness.segments.seal()
    disk_error(monkeypatch, code)
    assert harness.segments.write_pending() is False
    assert harness.segments.is_write_failing
    assert harness.files() == []
    harness.check()
    (event,) = harness.events
    assert "table 'user': cannot write a segment of 20 rows" in event
    assert os.strerror(code) in event

    harness.freeze(np.arange(20, 40))  # more rows may freeze meanwhile
    harness.segments.seal()
    disk_error(monkeypatch, None)
    harness.segments.write_pending()
    assert harness.segments.is_write_failing  # too early
    harness.now += 1.0
    assert harness.segments.write_pending() is True
    harness.write()
    assert not harness.segments.is_write_failing
    assert len(harness.files()) == 2
    assert harness.segments.bytes_in_memory == 0
    assert len(harness.events) == 2
    assert "written again" in harness.events[1]


def test_retries_back_off_to_a_minute(harness, monkeypatch):
    attempts = []

    def fail(fd, data):
        attempts.append(harness.now)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment_file, "write_bytes", fail)
    harness.freeze(np.arange(20))
    harness.segments.seal()
    for second in range(300):
        harness.now = float(second)
        harness.segments.write_pending()
    assert attempts == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert len(harness.events) == 1


def test_read_only_folder(tmp_path, monkeypatch):
    """The folder cannot even be made."""

    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    harness = Harness(tmp_path / "segments")
    harness.freeze(np.arange(20))
    harness.segments.seal()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        harness.segments.write_pending()
    assert "Read-only file system" in harness.events[0]
    harness.check()
    harness.now += 1.0
    harness.write()
    assert len(harness.files()) == 1
    harness.segments.close()


def test_no_merge_starts_while_segments_wait(harness, monkeypatch):
    harness.freeze(np.arange(50))
    harness.settle()
    harness.thaw(range(30))
    assert harness.segments.needs_merge()
    disk_error(monkeypatch, errno.ENOSPC)
    harness.freeze(np.arange(100, 110))
    harness.segments.seal()
    harness.segments.write_pending()
    assert not harness.segments.needs_merge()
    assert harness.merge_slice() is True
    disk_error(monkeypatch, None)
    harness.now += 1.0
    harness.settle()
    assert harness.segments.rows_dead == 0


def test_merge_onto_a_full_disk_loses_nothing(harness, monkeypatch):
    """The merged files go first, which is what gives a full disk room for the new one."""
    harness.freeze(np.arange(50))
    harness.settle()
    harness.thaw(range(30))
    harness.merge()
    assert harness.files() == []
    disk_error(monkeypatch, errno.ENOSPC)
    harness.segments.write_pending()
    harness.check()
    disk_error(monkeypatch, None)
    harness.now += 1.0
    harness.write()
    assert len(harness.files()) == 1


def test_file_that_cannot_be_deleted_is_told(harness, monkeypatch):
    harness.freeze(np.arange(20))
    harness.settle()
    harness.thaw(range(20))
    (path,) = harness.files()

    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        harness.segments.write_pending()
    assert f"cannot delete {path}" in harness.events[0]
    assert harness.segments.num_segments == 0
    path.unlink()


# Writing beside the caller --------------------------------------------------------------------------------------------


@pytest.fixture
def gated_disk(monkeypatch):
    """Writes stop before fsync until the event is set."""
    gate = threading.Event()

    def wait_and_sync(fd):
        assert gate.wait(20)
        os.fsync(fd)

    monkeypatch.setattr(segment_file, "sync_fd", wait_and_sync)
    yield gate
    gate.set()


def test_executor_writes_while_the_set_goes_on(tmp_path, gated_disk):
    with ThreadPoolExecutor(1) as executor:
        harness = Harness(tmp_path, executor=executor)
        harness.freeze(np.arange(20))
        harness.segments.seal()
        assert harness.segments.write_pending() is True
        harness.thaw(range(5))
        harness.freeze(np.arange(20, 40))
        harness.segments.seal()
        assert harness.segments.write_pending() is False  # the executor is at it
        locations = np.array([entry[0] for entry in harness.model.values()], np.uint32)
        assert harness.segments.addresses(locations).all()
        assert harness.segments.bytes_in_memory > 0
        gated_disk.set()
        harness.write()
        harness.check()
        assert len(harness.files()) == 2
        assert harness.segments.bytes_in_memory == 0
        harness.segments.close()


def unite(harness: Harness) -> bool:
    return harness.segments.unite_small(harness.is_live, harness.moved)


def freeze_pass(harness: Harness, row_ids: np.ndarray, bits: int = 8) -> None:
    harness.segments.open_builder()
    harness.freeze(row_ids, bits=bits)
    harness.segments.seal()


def test_small_segments_become_one_and_stay_in_memory(tmp_path):
    harness = Harness(tmp_path, capacity=500, small_bytes=241 * FORMAT.unit_bytes)
    for number in range(6):
        harness.freeze(np.arange(40 * number, 40 * number + 40), seed=number)
        harness.segments.seal()
    harness.thaw(range(30))
    harness.check()
    assert harness.segments.num_segments == 6
    assert harness.segments.is_scattered
    assert unite(harness) is True
    assert unite(harness) is False
    assert not harness.segments.is_scattered
    harness.check()
    assert (harness.segments.num_segments, harness.segments.rows_dead) == (1, 0)
    assert harness.segments.bytes_in_memory == 210 * FORMAT.unit_bytes + 4 * NUM_BUCKETS  # the rows and no pages
    assert harness.segments.write_pending() is False
    assert harness.files() == []
    harness.segments.flush()  # memory is needed now
    harness.check()
    assert len(harness.files()) == 1
    assert harness.segments.bytes_in_memory == 0
    harness.segments.close()


def test_small_segments_that_become_large_get_a_file(tmp_path):
    harness = Harness(tmp_path, capacity=500, small_bytes=100 * FORMAT.unit_bytes)
    most = 0
    for number in range(20):
        freeze_pass(harness, np.arange(30 * number, 30 * number + 30))
        while harness.segments.settle_slice(harness.is_live, harness.moved, 1 << 20):
            pass
        harness.check()
        assert len(harness.files()) == (number + 1) // 4
        most = max(most, harness.segments.bytes_in_memory)
    assert most == 90 * FORMAT.unit_bytes + 4 * NUM_BUCKETS
    harness.segments.close()


def test_what_is_large_at_once_is_not_copied(tmp_path):
    harness = Harness(tmp_path, capacity=500, small_bytes=100 * FORMAT.unit_bytes)
    freeze_pass(harness, np.arange(100))
    locations = [entry[0] for entry in harness.model.values()]
    assert unite(harness) is False
    assert harness.segments.write_pending() is True
    assert [entry[0] for entry in harness.model.values()] == locations
    assert len(harness.files()) == 1
    harness.segments.close()


def test_a_small_segment_loses_its_dead_rows(tmp_path):
    harness = Harness(tmp_path, capacity=500, small_bytes=200 * FORMAT.unit_bytes)
    freeze_pass(harness, np.arange(50))
    assert unite(harness) is False  # there is just one
    harness.thaw([10])
    assert unite(harness) is True
    assert unite(harness) is False
    harness.check()
    assert (harness.segments.rows_total, harness.segments.rows_dead) == (49, 0)
    assert harness.segments.bytes_in_memory == 49 * FORMAT.unit_bytes + 4 * NUM_BUCKETS
    harness.segments.close()


def test_small_segments_of_two_formats_unite_apart(tmp_path):
    harness = Harness(tmp_path, capacity=500, bits=4, small_bytes=1 << 20)
    for number in range(3):
        freeze_pass(harness, np.arange(20 * number, 20 * number + 20), bits=4)
        freeze_pass(harness, np.arange(100 + 5 * number, 105 + 5 * number), bits=8)
    assert unite(harness) is True
    harness.check()
    assert harness.segments.num_segments == 2
    sizes = 60 * FORMATS[4].unit_bytes + 15 * FORMATS[8].unit_bytes
    assert harness.segments.bytes_in_memory == sizes + 2 * 4 * NUM_BUCKETS
    harness.segments.close()


def test_files_merge_while_small_segments_stay_in_memory(tmp_path):
    harness = Harness(tmp_path, capacity=500, small_bytes=100 * FORMAT.unit_bytes)
    freeze_pass(harness, np.arange(150))
    harness.segments.write_pending()
    freeze_pass(harness, np.arange(200, 220))
    harness.thaw(range(100))
    while harness.segments.settle_slice(harness.is_live, harness.moved, 1 << 20):
        pass
    harness.check()
    assert harness.files() == []  # what was left of the file is small, too
    assert (harness.segments.num_segments, harness.segments.rows_total) == (1, 70)
    harness.segments.close()


def test_small_segments_whose_rows_all_died_unite_to_nothing(tmp_path):
    harness = Harness(tmp_path, small_bytes=1 << 20)
    for number in range(3):
        harness.freeze(np.arange(10 * number, 10 * number + 10))
        harness.segments.seal()
    harness.thaw(range(30))
    assert unite(harness) is True
    assert harness.segments.num_segments == 0
    assert harness.segments.bytes_used == 0
    assert harness.segments.write_pending() is False
    assert harness.files() == []
    harness.segments.close()


def test_united_segments_fit_their_capacity(tmp_path):
    """Half a segment is large, whatever its bytes: two small ones always fit."""
    harness = Harness(tmp_path, capacity=50, small_bytes=1 << 20)
    for number in range(3):
        freeze_pass(harness, np.arange(20 * number, 20 * number + 20))
    assert unite(harness) is True
    harness.check()
    assert harness.segments.num_segments == 2  # 40 rows, and 20
    while harness.segments.settle_slice(harness.is_live, harness.moved, 1 << 20):
        pass
    harness.check()
    assert len(harness.files()) == 1
    harness.segments.close()


def test_settling_writes_here_while_the_executor_is_busy_elsewhere(tmp_path):
    """Its thread is shared by the tables of a shard: a large segment of another may take a second."""
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(gate.wait, 60)
        harness = Harness(tmp_path, capacity=500, executor=executor)
        for number in range(3):
            harness.freeze(np.arange(20 * number, 20 * number + 20), seed=number)
            harness.segments.seal()
            assert harness.segments.write_pending() is (number == 0)
        while harness.segments.settle_slice(harness.is_live, harness.moved, 59 * FORMATS[8].unit_bytes):
            pass
        assert harness.files() == []  # more than it may write
        while harness.segments.settle_slice(harness.is_live, harness.moved, 1 << 20):
            pass
        harness.check()
        assert harness.segments.bytes_in_memory == 0
        assert not harness.segments.needs_merge()
        assert len(harness.files()) == 1  # three files whose headers take more than their rows merge
        assert not other.done()
        gate.set()
        harness.segments.close()


def test_segment_that_dies_while_it_is_written(tmp_path, gated_disk):
    with ThreadPoolExecutor(1) as executor:
        harness = Harness(tmp_path, executor=executor)
        harness.freeze(np.arange(20))
        harness.segments.seal()
        assert harness.segments.write_pending() is True
        harness.thaw(range(20))
        assert harness.segments.write_pending() is False
        assert harness.segments.num_segments == 1
        gated_disk.set()
        harness.write()
        assert harness.segments.num_segments == 0
        assert harness.files() == []
        harness.segments.close()


def test_close_waits_for_the_write(tmp_path, gated_disk):
    with ThreadPoolExecutor(1) as executor:
        harness = Harness(tmp_path, executor=executor)
        harness.freeze(np.arange(20))
        harness.segments.seal()
        harness.segments.write_pending()
        threading.Timer(0.05, gated_disk.set).start()
        harness.segments.close()
        assert [path.suffix for path in harness.files()] == [".safetensors"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_close_after_a_failed_write(tmp_path, monkeypatch):
    disk_error(monkeypatch, errno.EIO)
    with ThreadPoolExecutor(1) as executor:
        harness = Harness(tmp_path, executor=executor)
        harness.freeze(np.arange(20))
        harness.segments.seal()
        harness.segments.write_pending()
        harness.segments.close()
        assert harness.files() == []


# Merging ------------------------------------------------------------------------------------------------------------


def test_merge_keeps_live_rows_and_frees_the_rest(harness):
    harness.freeze(np.arange(50))
    harness.freeze(np.arange(50, 100), seed=1)
    harness.settle()
    old_files = harness.files()
    harness.thaw(range(0, 100, 2))
    assert harness.segments.dead_fraction == 0.5
    assert harness.segments.needs_merge()
    harness.merge()
    assert harness.files() == []  # unlinked and unmapped at once
    assert str(harness.directory) not in Path("/proc/self/maps").read_text()
    harness.check()
    harness.write()
    (path,) = harness.files()
    assert path not in old_files
    assert harness.segments.dead_fraction == 0
    segment = open_segment(path)
    assert segment.num_rows == 50
    segment.close()


def test_merge_in_slices_with_thaws_and_freezes_between(harness, monkeypatch):
    monkeypatch.setattr(segment_merge, "SLICE_ROWS", 7)
    harness.freeze(np.arange(50))
    harness.freeze(np.arange(50, 100), seed=1)
    harness.settle()
    harness.thaw(range(0, 100, 2))
    slices = 1
    while not harness.merge_slice():
        harness.check()
        harness.thaw([max(harness.model), min(harness.model)])  # of rows already copied or still to copy
        harness.freeze(np.arange(1000 + 3 * slices, 1003 + 3 * slices), seed=slices)
        slices += 1
    assert slices == 100 // 7 + 1 + 2  # two segments to drop
    harness.settle()
    assert {path.name for path in harness.files()} != set()
    for path in harness.files():
        open_segment(path).close()


def test_merge_whose_rows_all_die_leaves_nothing(harness, monkeypatch):
    monkeypatch.setattr(segment_merge, "SLICE_ROWS", 10)
    harness.freeze(np.arange(50))
    harness.settle()
    harness.thaw(range(20))
    assert harness.merge_slice() is False
    harness.thaw(list(harness.model))
    harness.segments.write_pending()  # the segments of the merge must stay until it ends
    harness.merge()
    harness.write()
    harness.segments.write_pending()
    assert harness.segments.num_segments == 0
    assert harness.files() == []


def test_merge_of_only_dead_rows(harness):
    """All rows die after the plan was due but before a merge began."""
    harness.freeze(np.arange(50))
    harness.settle()
    harness.thaw(range(50))
    harness.merge()
    assert harness.segments.num_segments == 0
    assert harness.segments.bytes_used == 0


def test_merge_holds_one_segment_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_merge, "SLICE_ROWS", 64)
    harness = Harness(tmp_path, capacity=2000)
    for i in range(8):
        harness.freeze(np.arange(2000 * i, 2000 * (i + 1)), seed=i)
    harness.settle()
    harness.thaw(range(0, 16_000, 3))
    page = 4096
    one_segment = 2000 * FORMAT.unit_bytes + 5 * page
    used = harness.segments.bytes_used
    while harness.segments.needs_merge():
        harness.merge_slice()
        assert harness.segments.bytes_in_memory <= one_segment
        harness.write()
    assert harness.segments.bytes_used < 0.9 * used
    harness.check()
    harness.segments.close()


def test_many_small_segments_become_one(harness):
    for i in range(MAX_SEGMENTS + 1):
        harness.freeze(np.array([i]), seed=i)
        harness.segments.seal()
    harness.settle()
    assert harness.segments.num_segments == 1


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=80))
def test_plans_fit_and_end(segments):
    """Every plan fits one segment and gains something, and carrying plans out comes to an end without waste."""
    unit, fixed, capacity = 30, 200, 100
    rows = np.array([r for r, _ in segments])
    dead = np.minimum(rows, np.array([d for _, d in segments]))
    for _ in range(2 * len(segments) + 2):
        plan = plan_merge(rows, dead, unit, fixed, capacity)
        if not plan.shape[0]:
            break
        live = int((rows - dead)[plan].sum())
        assert live <= capacity
        assert np.unique(plan).shape[0] == plan.shape[0]
        assert plan.shape[0] > 1 or dead[plan[0]] > 0
        rows, dead = np.delete(rows, plan), np.delete(dead, plan)
        if live:
            rows, dead = np.append(rows, live), np.append(dead, 0)
    else:
        pytest.fail("merging never ends")
    total = rows.sum() * unit + rows.shape[0] * fixed
    assert rows.shape[0] <= 1 or dead.sum() * unit <= 0.2 * total


def test_full_segments_without_waste_are_left_alone():
    rows = np.full(40, 1000)
    assert plan_merge(rows, np.zeros(40, np.int64), 30, 200, 1000).shape[0] == 0
    dead = np.ones(40, np.int64)  # a few dead rows are no reason to copy a segment, however many there are
    assert plan_merge(rows, dead, 30, 200, 1000).shape[0] == 0
    rows[[3, 17]] = 10  # nor are a few small ones
    assert plan_merge(rows, dead, 30, 200, 1000).shape[0] == 0
    rows = np.append(rows, np.full(MAX_SEGMENTS - 1, 400))
    plan = plan_merge(rows, np.zeros(rows.shape[0], np.int64), 30, 200, 1000)
    assert {3, 17} < set(plan.tolist())
    assert rows[plan].max() == 400


@pytest.mark.parametrize("dead", [200, 201])
def test_a_fifth_of_dead_rows_is_the_limit(dead):
    plan = plan_merge(np.array([1000]), np.array([dead]), 30, 0, 1000)
    assert plan.tolist() == ([0] if dead > 200 else [])


def test_capacity_keeps_files_within_256_mib():
    for dim in (4, 64, 4096):
        fmt = SegmentFormat(table="x" * 255, bits=8, dim=dim, num_buckets=1024)
        rows = capacity_rows(fmt)
        header = len(segment_file.header_bytes(fmt, rows, 2**40))
        payload = header + 4 * 1025 + rows * fmt.unit_bytes
        size = payload + 4 * -(-payload // segment_file.CRC_BLOCK_BYTES)
        assert MAX_SEGMENT_BYTES - 40_000 - fmt.unit_bytes < size <= MAX_SEGMENT_BYTES or rows == 2**23 - 1
        assert size <= MAX_SEGMENT_BYTES


@given(
    counts=st.integers(1, 4).flatmap(
        lambda v: st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=v, max_size=v)
    ),
    step=st.integers(1, 9),
)
def test_next_locations_gives_every_row_once_in_bucket_order(counts, step):
    slots = np.arange(len(counts)) * 3 + 1
    offsets = np.zeros((len(counts), 5), np.int64)
    offsets[:, 1:] = np.cumsum(counts, axis=1)
    expected = [
        FROZEN | int(slots[v]) << SLOT_SHIFT | position
        for bucket in range(4)
        for v in range(len(counts))
        for position in range(offsets[v, bucket], offsets[v, bucket + 1])
    ]
    cursor, out, given_out = np.zeros(3, np.int64), np.empty(step, np.uint32), []
    while True:
        n = next_locations(slots, offsets, cursor, out)
        given_out += out[:n].tolist()
        if n < step:
            break
    assert given_out == expected


# Random histories against the dictionary ------------------------------------------------------------------------------

OPERATIONS = (
    "freeze",
    "freeze",
    "thaw",
    "thaw_most",
    "seal",
    "write",
    "break_disk",
    "mend_disk",
    "merge_slice",
    "wait",
)


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=200)
@given(history=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**32 - 1)), max_size=60))
def test_random_histories_equal_the_dictionary(tmp_path_factory, bits, history):
    harness = Harness(tmp_path_factory.mktemp("history") / "segments", bits=bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_merge, "SLICE_ROWS", 11)
        patch.setattr(segment_file, "sync_fd", lambda fd: None)  # nothing here reads after a power cut
        for operation, seed in history:
            run_operation(harness, patch, operation, np.random.default_rng(seed))
            harness.check()
        disk_error(patch, None)
        harness.now += 60.0
        harness.merge()
        harness.settle()
        harness.check()
    assert harness.segments.bytes_in_memory == 0
    assert harness.segments.num_segments == len(harness.files())
    slots = harness.segments._slots
    for bits, most in slots.capacity.items():
        of_format = [slot for slot, mapped in slots.mapped.items() if mapped.format.bits == bits]
        assert np.count_nonzero(2 * (slots.rows - slots.dead)[of_format] <= most) <= MAX_SEGMENTS
    for path in harness.files():
        open_segment(path, verify=True).close()
    harness.segments.close()


def run_operation(harness: Harness, patch: pytest.MonkeyPatch, operation: str, rng: np.random.Generator) -> None:
    if operation == "freeze":
        row_ids = np.setdiff1d(rng.integers(0, 400, rng.integers(0, 120)), np.array(list(harness.model), np.int64))
        bits = int(rng.choice(list(harness.segments.formats)))
        harness.freeze(row_ids, seed=int(rng.integers(2**32)), bits=bits)
    elif operation in ("thaw", "thaw_most"):
        share = 0.9 if operation == "thaw_most" else 0.1
        harness.thaw([row_id for row_id in list(harness.model) if rng.random() < share])
    elif operation == "seal":
        harness.segments.open_builder(int(rng.integers(1000)))
    elif operation == "write":
        harness.segments.write_pending()
    elif operation == "break_disk":
        disk_error(patch, int(rng.choice([errno.ENOSPC, errno.EIO])))
    elif operation == "mend_disk":
        disk_error(patch, None)
    elif operation == "merge_slice":
        harness.merge_slice()
    else:
        harness.now += 2.0
