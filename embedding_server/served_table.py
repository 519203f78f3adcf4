"""ServedTable: one table of a snapshot, found by row_id where its rows lie in the files.

Memory of a process, beside pages of files that it shares with others: ENTRY_BYTES at a load of at most 0.75, so some 7
bytes a row. While it is built, one byte a frozen row more. With weight decay hot rows are copied, as float32 and with
what decay takes off them by the step of the cut; else they too stay in their files, of a delta in whichever of its
chain wrote them.

What is read to build it: row_ids of all rows and the two bytes that say which frozen rows are alive, every block of
them checked. Rows are checked block by block when they are first read.

Thread safety: it never changes; any thread may read.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.kernels import paging
from embedding_server.kernels import served as kernels
from embedding_server.optimizers import table_seed
from embedding_server.segment_file import CRC_BLOCK_BYTES
from embedding_server.segment_reader import MappedSegment
from embedding_server.served_files import Area, MappedFile, Slots, check_row_ids
from embedding_server.snapshot_file import ColumnReader, corrupt
from embedding_server.snapshot_format import NOT_LIVE, frozen_file, hot_file
from embedding_server.snapshot_hot import HotFile, HotRowsFile
from embedding_server.snapshot_parts import Part
from embedding_server.snapshot_rows import open_frozen, open_object
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, TableStats
from embedding_server.weight_decay import WeightDecay

_LEAST_ROOM = 4 / 3  # entries a row
_ROWS_AT_ONCE = 1 << 16


@dataclass(slots=True)
class _Hot:
    """Hot rows of a part that stay in a file."""

    file: HotFile
    ids_address: int
    first_place: int


@dataclass(slots=True)
class _Segment:
    mapped: MappedSegment
    live: np.ndarray  # uint8[n]
    first_place: int


@dataclass(slots=True)
class _PartFiles:
    """What a part of the table has, until it is in the index. Places count from the part's first slot."""

    part: Part
    number: int
    slots: Slots = field(default_factory=Slots)
    hot: list[_Hot] = field(default_factory=list)  # the cut's own, then its parents'
    copied: tuple[np.ndarray, np.ndarray, int] | None = None  # row_ids, rows, first place: instead of those
    segments: list[_Segment] = field(default_factory=list)
    initial: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    initial_place: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.int64))  # rows of each bucket

    @property
    def hot_path(self) -> Path:
        return self.part.folder / hot_file(self.number)

    @property
    def frozen_path(self) -> Path:
        return self.part.folder / frozen_file(self.number)

    def check_buckets(self, path: Path) -> None:
        """After rows of a file were counted. SegmentCorrupt if one is in a bucket that its shard did not own."""
        is_foreign = (self.counts > 0) & ~self.part.owned
        if is_foreign.any():
            raise corrupt(path, f"it has rows of bucket {int(np.argmax(is_foreign))}, which its shard did not own")


class ServedTable:
    """SegmentCorrupt, naming the file, if one is not what the snapshot says; InvalidInput; OSError."""

    def __init__(self, parts: Sequence[Part], name: str) -> None:
        records = [part.record.tables[_number(part, name)] for part in parts]
        self.spec: TableSpec = records[0].spec
        self.seed = table_seed(self.spec)
        for part, record in zip(parts, records, strict=True):
            if record.spec != self.spec:
                raise corrupt(part.folder, f"table {name!r} has another spec than in {parts[0].folder.name}")
        with ExitStack() as stack:
            readers = stack.enter_context(ExitStack())  # files that are needed while it is built
            files = [_open(part, _number(part, name), self.spec, stack, readers) for part in parts]
            self._enter(files)
            #: float32[1, D], what unknown row_ids read if min_count is above 1
            self.default_row = _default_row(files[0])
            readers.close()
            self._stack = stack.pop_all()
        rows_hot = sum(record.rows_hot for record in records)
        self.stats = TableStats(
            rows_hot=rows_hot,
            rows_frozen=self.num_rows - rows_hot,
            bytes_hot=rows_hot * self.spec.dim * (self.spec.policy.hot_bits // 8),
            bytes_frozen=sum(segment.size_bytes for record in records for segment in record.segments),
            bytes_index=self._entries.nbytes,
        )

    def close(self) -> None:
        """Unmaps its files: nobody may be reading."""
        self._stack.close()

    def directory_row(self) -> list[int]:
        """TABLE_COLUMNS of kernels/served.py."""
        arrays = self._entries, self._starts, self._first_slots, self._slots
        return [*(array.ctypes.data for array in arrays), self._slots.shape[0]]

    @property
    def areas(self) -> list[Area]:
        return [area for slots in self._part_slots for area in slots.areas]

    def check_blocks(self, places: Sequence[tuple[int, int]]) -> None:
        """Blocks under rows that are read next, as (slot, block). SegmentCorrupt if one is damaged."""
        starts = [int(self._slots[slot, kernels.BLOCKS]) + block * CRC_BLOCK_BYTES for slot, block in places]
        # of what lies behind the end of a map the kernel reads nothing
        paging.will_need(np.array([[start & ~4095, CRC_BLOCK_BYTES] for start in starts], np.int64))
        for slot, block in places:
            checker = self._blocks[slot]
            assert checker is not None
            checker.check_block(block)

    def refuse_cut_off(self, slot: int) -> None:
        """A slot whose file has not the end that it had: raises SegmentCorrupt."""
        path = self._paths[slot]
        assert path is not None
        raise corrupt(path, "its last bytes are not what they were when it was opened")

    # Building ---------------------------------------------------------------------------------------------------------

    def _enter(self, files: list[_PartFiles]) -> None:
        """Makes the index of all parts."""
        counts = np.zeros(NUM_BUCKETS, np.int64)
        self._first_slots = np.zeros(NUM_BUCKETS, np.int64)
        rows: list[list[int]] = []
        for of_part in files:
            self._first_slots[of_part.part.owned] = len(rows)
            rows += of_part.slots.rows
            counts += of_part.counts
        self._slots = np.array(rows, np.int64).reshape(len(rows), kernels.SLOT_COLUMNS)
        self._part_slots = [of_part.slots for of_part in files]
        self._blocks = [blocks for slots in self._part_slots for blocks in slots.blocks]
        self._paths: list[Path | None] = [path for slots in self._part_slots for path in slots.paths]
        self.num_rows = int(counts.sum())
        self._starts = np.zeros(NUM_BUCKETS + 1, np.int64)
        np.cumsum(np.where(counts > 0, (counts * _LEAST_ROOM).astype(np.int64) + 1, 0), out=self._starts[1:])
        self._entries = _zeros(kernels.ENTRY_BYTES * int(self._starts[-1]))
        for of_part in files:
            _Entering(of_part, self._entries, self._starts, self._first_slots, self._slots).run()


class _Entering:
    """Enters the rows of one part into an index that has room for them."""

    def __init__(
        self,
        files: _PartFiles,
        entries: np.ndarray,
        starts: np.ndarray,
        first_slots: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        self._files, self._out = files, np.zeros(3, np.int64)
        self._index = entries.ctypes.data, starts, first_slots, slots

    def run(self) -> None:
        files = self._files
        if files.copied is not None:
            row_ids, _, place = files.copied
            self._enter_anywhere(files.hot_path, row_ids, place)
        elif files.hot:
            self._enter_hot()
        for segment in files.segments:
            offsets = segment.mapped.arrays.bucket_offsets.astype(np.int64)
            ids = segment.mapped.arrays.row_ids.ctypes.data
            self._enter_rows(segment.mapped.path, segment.first_place, ids, offsets, segment.live)
        self._enter_anywhere(files.frozen_path, files.initial, files.initial_place)

    def _enter_hot(self) -> None:
        own, *parents = self._files.hot
        all_rows = np.ones(own.file.record.rows_hot, np.uint8)
        self._enter_rows(own.file.file.path, own.first_place, own.ids_address, own.file.rows, all_rows)
        left, child = own.file.record.rows_hot - own.file.record.rows_written, own
        for parent in parents:
            moved, still_left = self._follow(child, parent)
            if moved < left:
                raise corrupt(
                    parent.file.file.path,
                    f"lacks {left - moved} rows that {own.file.file.path} takes from it or from its parents",
                )
            left, child = still_left, parent

    def _follow(self, child: _Hot, parent: _Hot) -> tuple[int, int]:
        """(rows of the child that the parent has, how many of them it has not written)."""
        offsets = np.stack([child.file.rows, child.file.written, parent.file.rows, parent.file.written])
        where = child.file.record.rows_hot, child.first_place, parent.first_place, parent.ids_address
        found = kernels.follow_parent(*self._index, offsets, *where, self._out)
        self._check(parent.file.file.path, found)
        return int(self._out[1]), int(self._out[2])

    def _enter_rows(self, path: Path, place: int, ids: int, offsets: np.ndarray, live: np.ndarray) -> None:
        self._check(path, kernels.insert_rows(*self._index, place, ids, offsets, live, self._out))

    def _enter_anywhere(self, path: Path, row_ids: np.ndarray, place: int) -> None:
        if row_ids.shape[0]:
            counts = np.zeros(NUM_BUCKETS, np.int64)
            found = kernels.insert_anywhere(*self._index, place, row_ids, self._out, counts)
            self._check(path, found)

    def _check(self, path: Path, found: int) -> None:
        if found == kernels.SOUND:
            return
        position = int(self._out[0])
        if found == kernels.MISPLACED:
            raise corrupt(path, f"the row_id at position {position} is not in its bucket")
        if path != self._files.hot_path:
            path = self._files.frozen_path  # which says what of a segment is alive
        raise corrupt(path, f"the row_id at position {position} of it, or of a segment, occurs twice in the snapshot")


def _number(part: Part, name: str) -> int:
    number = part.number_of(name)
    assert number is not None, "check_tables has looked"
    return number


def _open(part: Part, number: int, spec: TableSpec, maps: ExitStack, readers: ExitStack) -> _PartFiles:
    """Maps the files of a part. `maps` keeps what rows are read from, `readers` what the index is made of."""
    files = _PartFiles(part, number)
    _open_hot(files, maps, readers)
    record = part.record.tables[number]
    frozen = readers.enter_context(closing(open_frozen(part, number)))
    for k, segment in enumerate(record.segments):
        mapped = maps.enter_context(closing(open_object(part.objects, segment, spec)))
        check_row_ids(mapped)
        live = (frozen.read(f"heat.{k}") != NOT_LIVE).view(np.uint8)
        kernels.count_live(live, mapped.arrays.bucket_offsets.astype(np.int64), files.counts)
        files.check_buckets(files.frozen_path)
        files.segments.append(_Segment(mapped, live, files.slots.add_segment(mapped)))
    if record.rows_initial:
        _open_initial(files, frozen, maps)
    if len(files.slots.rows) > kernels.MAX_SLOTS:
        raise InvalidInput(
            f"{part.folder}: table {spec.name!r} lies in {len(files.slots.rows)} pieces, and {kernels.MAX_SLOTS} can be"
            " served; `frostline ckpt compact` makes one file of a chain of deltas"
        )
    return files


def _open_hot(files: _PartFiles, maps: ExitStack, readers: ExitStack) -> None:
    own = HotFile(files.part, files.number)
    readers.enter_context(closing(own.file))
    files.counts += np.diff(own.rows)
    files.check_buckets(files.hot_path)
    if own.file.num_rows("weight_decay"):
        _copy_hot(files)
        return
    if not own.record.rows_hot:
        return
    file = own
    for each in files.part.chain:
        if each is not files.part:
            file = HotFile(each, _number(each, own.record.spec.name))
            readers.enter_context(closing(file.file))
        files.hot.append(_map_hot(files.slots, file, maps))
        if file.record.is_whole:
            break


def _map_hot(slots: Slots, file: HotFile, maps: ExitStack) -> _Hot:
    mapped = maps.enter_context(closing(MappedFile(file.file)))
    ids, weights = mapped.column("row_ids"), mapped.column("weights")
    ids.area(mapped.stamp, "row_ids").check()
    width = file.record.spec.policy.hot_bits // 8
    place = slots.add_hot_file(mapped, file.record.rows_hot, ids, weights, width, file.rows - file.written)
    return _Hot(file, ids.address, place)


def _copy_hot(files: _PartFiles) -> None:
    """Hot rows that owe weight decay, as look-ups settle it."""
    with closing(HotRowsFile(files.part, files.number)) as hot:
        spec, sums = hot.record.spec, hot.own.read("weight_decay")
        row_ids = np.empty(hot.record.rows_hot, np.int64)
        rows = np.empty((hot.record.rows_hot, spec.dim), np.float32)
        decay, at = WeightDecay(spec.optimizer.weight_decay), 0
        try:
            decay.restore(sums)
            for chunk in hot.chunks(max(1, _ROWS_AT_ONCE // spec.dim)):
                if (chunk.last_steps >= sums.shape[0]).any():
                    raise corrupt(hot.path, "a last step has no sum of weight decay")
                end = at + chunk.row_ids.shape[0]
                row_ids[at:end] = chunk.row_ids
                rows[at:end] = chunk.weights.astype(np.float32) * decay.pending(chunk.last_steps)[:, None]
                at = end
        finally:
            decay.close()
    if row_ids.shape[0]:
        files.copied = row_ids, rows, files.slots.add_memory(row_ids, rows)


def _open_initial(files: _PartFiles, frozen: ColumnReader, maps: ExitStack) -> None:
    mapped = maps.enter_context(closing(MappedFile(frozen)))
    column = mapped.column("initial_row_ids")
    column.area(mapped.stamp, "initial_row_ids").check()
    files.initial, files.initial_place = column.data.view(np.int64), files.slots.add_initial(mapped, column)
    nothing, out = np.zeros((0, kernels.SLOT_COLUMNS), np.int64), np.zeros(3, np.int64)
    no_index = 0, np.zeros(NUM_BUCKETS + 1, np.int64), np.zeros(NUM_BUCKETS, np.int64), nothing
    kernels.insert_anywhere(*no_index, 0, files.initial, out, files.counts)
    files.check_buckets(files.frozen_path)


def _default_row(files: _PartFiles) -> np.ndarray:
    with closing(HotFile(files.part, files.number).file) as own:
        return own.read("default_weights")[None].astype(np.float32)


def _zeros(size_bytes: int) -> np.ndarray:
    """Of a map of its own, that goes with the array: closing a version gives its memory back at once."""
    if not size_bytes:
        return np.zeros(1, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
