"""Segment files of a snapshot, by content: ROOT/JOB/objects/<digest>.segment (snapshot_format.py).

A file is linked where the file system can do that, else copied, once: a segment never changes, so one that is there
already is the same, unless it was damaged. So an object that this process has not put there, or that was written to
since, is read and compared with its checksums before a cut builds on it, and replaced if it does not hold. What has the
inode, size and time of a file that was sound costs no read. A file appears under its name only when it is whole and on
disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from pathlib import Path

import numpy as np

from embedding_server.errors import SegmentCorrupt
from embedding_server.failpoints import failpoint
from embedding_server.segment_builder import SegmentBuilder
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_fd, sync_folder, write_segment
from embedding_server.segment_reader import MappedSegment, open_segment, stamp_of
from embedding_server.snapshot_file import corrupt, open_regular
from embedding_server.snapshot_format import SegmentRecord, segment_digest, segment_object

_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def put_object(objects: Path, stage: MappedSegment | SegmentBuilder, has_state: bool) -> tuple[SegmentRecord, int]:
    """Puts a segment there; (what a snapshot says of it, bytes written). OSError. has_state: as in SegmentRecord."""
    if isinstance(stage, MappedSegment):
        return _put_file(objects, stage, has_state)
    new = _own_name(objects, f"new-{stage.slot}.segment")
    try:
        write_segment(new, stage.format, stage.frozen_step, stage.arrays())
        mapped = open_segment(new, verify=False)
        try:
            return _put_file(objects, mapped, has_state)[0], mapped.size_bytes
        finally:
            mapped.close()
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _put_file(objects: Path, segment: MappedSegment, has_state: bool) -> tuple[SegmentRecord, int]:
    digest = digest_of(segment)
    written = _put_sound(segment, objects / segment_object(digest), digest)
    said = {
        "digest": digest,
        "size_bytes": segment.size_bytes,
        "num_rows": segment.num_rows,
        "bits": segment.format.bits,
        "has_state": has_state,
    }
    return SegmentRecord.model_validate(said), written


def _put_sound(segment: MappedSegment, target: Path, digest: str) -> int:
    """Has `target` be a sound file of the segment; bytes copied. SegmentCorrupt if its own file is damaged; OSError."""
    if _is_sound(segment, target, digest):
        return 0
    if not _is_sound(segment, segment.path, digest):
        raise corrupt(segment.path, "it does not match its checksums any more, so no cut can have it")
    if not os.path.lexists(target):
        written = link_or_copy(segment.path, target, segment.size_bytes)
    else:  # damaged: whatever names it gets the sound one
        beside = _own_name(target.parent, target.name)
        written = link_or_copy(segment.path, beside, segment.size_bytes)
        os.rename(beside, target)
        sync_folder(target.parent)
    if written:
        segment.sound.add(stamp_of(os.lstat(target)))
    return written


def _is_sound(segment: MappedSegment, path: Path, digest: str) -> bool:
    """Whether a file holds the segment, as far as its stamp tells, else by every byte. False if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != segment.size_bytes:
        return False
    if stamp_of(found) not in segment.sound:
        try:
            with contextlib.closing(open_segment(path, verify=False)) as mapped:
                if digest_of(mapped) != digest:
                    return False
                for _ in mapped.check_all():
                    pass
        except SegmentCorrupt:
            return False
        segment.sound.add(stamp_of(found))
    return True


def take_object(objects: Path, record: SegmentRecord, path: Path) -> MappedSegment:
    """Links or copies a segment to `path` and maps it. SegmentCorrupt unless it is what `record` says; OSError.

    Its blocks are not checked yet (MappedSegment.check_all), its table and dim are the caller's to check.
    """
    source = objects / segment_object(record.digest)
    _check_size(source, record.size_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(source, path, record.size_bytes)
    try:
        segment = open_segment(path, verify=False)
        try:
            found = (digest_of(segment), segment.size_bytes, segment.num_rows, segment.format.bits)
            if found != (record.digest, record.size_bytes, record.num_rows, record.bits):
                raise corrupt(source, f"digest, bytes, rows and bits are {found}, not those of shard.json")
        except BaseException:
            segment.close()
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return segment


def _check_size(source: Path, size_bytes: int) -> None:
    """Before a copy of it is made, however big it is."""
    fd = open_regular(source)
    try:
        found = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if found != size_bytes:
        raise corrupt(source, f"has {found} bytes, not {size_bytes}")


def digest_of(segment: MappedSegment) -> str:
    return segment_digest(segment.header, np.ascontiguousarray(segment.block_crcs))


def link_or_copy(source: Path, target: Path, size_bytes: int) -> int:
    """Makes `target` the same file, which never changes: a link, else a copy. Bytes copied; OSError. Nothing happens if
    another shard has made it meanwhile."""
    try:
        failpoint("object.before_link")
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return 0
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _copy(source, target)
        return size_bytes
    return 0


def _copy(source: Path, target: Path) -> None:
    partial = _own_name(target.parent, target.name)
    try:
        failpoint("object.before_copy")
        with open(source, "rb") as reader, open(partial, "wb") as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            sync_fd(writer.fileno())
        failpoint("object.before_rename")
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _own_name(folder: Path, name: str) -> Path:
    """No other thread, shard or process writes under it."""
    return folder / f"{name}.{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}"
