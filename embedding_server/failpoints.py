"""Failpoints: named places in cut, commit, merge, re-selection, restore and deletion code where a test makes something
go wrong.

    failpoint("cut.before_record")               one line in the code; off, it is a look at an empty dictionary
    with failpoints.set_to({name: action}): ...  in process; an action is called at each hit
    FROSTLINE_FAILPOINTS="cut.before_record=crash:2,object.before_link=error-ENOSPC"      in processes of their own

Of the second form: NAME=ACTION, or NAME=ACTION:N for the N-th hit alone. Actions: crash (the process ends at once, with
CRASH_STATUS and no clean-up), error-ENOSPC (any name of errno), sleep-0.5 (seconds). Entry points read it, and only if
FROSTLINE_TESTING=1.

DISK names touch files next, so that any error of the disk may be planted there; MEMORY names lie between two changes in
memory, where nothing can fail, so that only a crash or a sleep is true to life.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from embedding_server.errors import InvalidInput

Action = Callable[[], None]

SETTING, TESTING = "FROSTLINE_FAILPOINTS", "FROSTLINE_TESTING"
CRASH_STATUS = 99

#: Every failpoint. A test fails if one of these was never hit, or if code names one that is not here.
DISK = {
    "epochs.before_write": "nothing of the new epoch is on disk",
    "epochs.before_rename": "the new file of epochs is synced under its temporary name",
    "epochs.before_folder_sync": "it has its name, which a power cut may still undo",
    "segment.before_write": "a frozen segment gets a file",
    "segment.before_sync": "all of it is written, nothing is synced",
    "segment.before_rename": "it is synced under its temporary name",
    "segment.before_folder_sync": "it has its name, which a power cut may still undo",
    "segment.before_unlink": "a segment file that nothing reads any more goes",
    "columns.before_sync": "a column file of a cut is written, not synced",
    "columns.before_rename": "it is synced under its temporary name",
    "object.before_link": "a segment file goes into the objects of a job, or out of them into a shard's folder",
    "object.before_copy": "it cannot be linked",
    "object.before_rename": "its copy is synced under its temporary name",
    "cut.begin": "a shard begins a cut, nothing of it is on disk",
    "cut.rows": "the next rows of a table go into its column files",
    "cut.before_publish": "all rows are written and all segments linked, nothing is synced",
    "cut.before_folders": "column files have their names, which a power cut may still undo",
    "cut.before_record": "everything but shard.json is on disk",
    "sealed.before_sync": "a shard.json or manifest.json is written, not synced",
    "sealed.before_rename": "it is synced under its temporary name",
    "sealed.before_folder_sync": "it has its name, which a power cut may still undo",
    "manifest.before_dense": "the shards have begun a cut, its dense part is not written",
    "manifest.before_shards": "the dense part is written, the shards may not be done",
    "manifest.before_write": "all but the manifest is there",
    "manifest.before_gc": "the cut is whole, older ones are still there",
    "restore.parts": "a shard is about to read the parts of a cut",
    "restore.hot_rows": "the next hot rows of a cut go into the tables",
    "restore.segment": "the next segment of a cut is linked and checked",
}
MEMORY = {
    "cut.after_record": "a shard's part is whole",
    "freeze.before_flip": "rows lie in a segment's buffer, the index still points at hot slots",
    "freeze.after_flip": "the index points at the segment, the slots are not free yet",
    "thaw.before_flip": "rows lie in hot slots, the index still points at the segment",
    "merge.begin": "a merge of segments starts",
    "merge.copied": "rows lie in the merged segment, the index points at the old ones",
    "merge.before_drop": "a merged segment goes",
    "reselection.table": "a pass comes to the next table",
    "reselection.slice": "a slice of a pass is done",
    "restore.end": "all rows are there, the job's steps are not",
    "erasure.rows": "row_ids of a chunk are out of a table's index, their bytes are still in its segments",
    "erasure.segments": "all chunks are here, the segments of a table do not know of them",
    "erasure.before_replace": "a segment file is written again without erased rows, the old one has its place",
    "drop.begin": "tables are out of the shard, their memory and files are still there",
    "drop.before_files": "the memory of a dropped table is gone, its files are not",
    "drop.before_leftovers": "its segments are gone, files that nobody knows of are not",
}
NAMES = frozenset(DISK) | frozenset(MEMORY)

_actions: dict[str, Action] = {}  # empty unless a test is running


class SimulatedCrash(BaseException):
    """What an action raises to end a process that is simulated within another. No code but the simulation's catches it
    for good."""


def failpoint(name: str) -> None:
    """Does what a test wants done here; nothing otherwise."""
    if _actions and name in _actions:
        _actions[name]()


@contextmanager
def set_to(actions: Mapping[str, Action]) -> Iterator[None]:
    """These actions for the while, beside those that are set. Not for several threads that set at once."""
    for name in actions:
        check_name(name)
    before = dict(_actions)
    _actions.update(actions)
    try:
        yield
    finally:
        _actions.clear()
        _actions.update(before)


def set_from_environment(environ: Mapping[str, str]) -> None:
    """For entry points: does what FROSTLINE_FAILPOINTS says if FROSTLINE_TESTING=1. InvalidInput."""
    if environ.get(TESTING) == "1":
        _actions.update(parse(environ.get(SETTING, "")))


def parse(text: str) -> dict[str, Action]:
    """Actions by name. InvalidInput."""
    found: dict[str, Action] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, rest = item.partition("=")
        kind, _, hit = rest.partition(":")
        check_name(name)
        action = _action_of(name, kind)
        if hit and not (hit.isdecimal() and int(hit)):
            raise InvalidInput(f"{SETTING}: {item!r} must end in the number of a hit, from 1 on; as in {name}=crash:2")
        found[name] = on_hit(int(hit), action) if hit else action
    return found


def check_name(name: str) -> None:
    if name not in NAMES:
        raise InvalidInput(f"failpoint {name!r} does not exist; embedding_server/failpoints.py lists all of them")


def on_hit(number: int, action: Action) -> Action:
    """Does the action at hit `number` alone, counted from 1."""
    hits = itertools.count(1)

    def act() -> None:
        if next(hits) == number:
            action()

    return act


def crash() -> None:
    """As kill -9 would: nothing is flushed, no clean-up runs."""
    os._exit(CRASH_STATUS)


def fail_with(code: int) -> Action:
    """As a disk would; code: of errno."""

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _action_of(name: str, kind: str) -> Action:
    what, _, value = kind.partition("-")
    if kind == "crash":
        return crash
    if what == "error" and value in errno.errorcode.values():
        if name not in DISK:
            raise InvalidInput(f"{SETTING}: {name} touches no file, so no error comes there; use crash or sleep-0.5")
        return fail_with(getattr(errno, value))
    if what == "sleep" and value.replace(".", "", 1).isdecimal():
        return lambda: time.sleep(float(value))
    raise InvalidInput(f"{SETTING}: {name}={kind} must be crash, error-ENOSPC (or another name of errno) or sleep-0.5")
