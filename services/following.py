"""Follower: takes up each new snapshot of a job as it becomes complete, and says how far behind what is served is.

    follower = Follower(folder, ServeWhat())
    versions = follower.begin(stopping)     the newest that can be served; waits for a first one
    follower.start(); ...; follower.stop()

A snapshot counts from its manifest on. One that cannot be served is said in the log and in `state`, and what is served
stays; it is tried again when it changes, and now and then. A snapshot that is made anew under its name (`ckpt gc
--erase`) is taken up like a new one; one that is removed stays in memory until another replaces it. While a version is
taken up its index is in memory beside the old one's.

Thread safety: `state` and `choose` may be called from any thread; `_work` is held while a version is taken up.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from embedding_server.errors import FrostlineError, InvalidInput
from embedding_server.served_versions import Versions
from embedding_server.snapshot_format import MANIFEST
from services.served_model import ServedModel, ServeWhat
from trainer.snapshots import CutName, cuts_in

log = logging.getLogger(__name__)

PREVIOUS = "previous"
_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    """A complete snapshot. The stamp changes if it is made anew."""

    name: CutName
    stamp: tuple[int, int, int]  # of its manifest: inode, ns, bytes
    complete_s: float  # when it became so, seconds since 1970

    @property
    def identity(self) -> tuple[CutName, tuple[int, int, int]]:
        return self.name, self.stamp


@dataclass(frozen=True, slots=True)
class FollowState:
    """How what is served stands to the snapshots of the job."""

    served_id: str
    newest_id: str
    steps_behind: int = 0  # 0 too where the newest is of a later epoch and not of a later step
    seconds_behind: float = 0.0  # since a newer one is complete
    is_held: bool = False
    refusal: str = ""  # why the newest is not served
    num_swaps: int = 0
    num_open: int = 1  # versions that are in memory


@dataclass(slots=True)
class _Refused:
    message: str
    again_s: float  # monotonic


class Follower:
    def __init__(self, folder: Path, what: ServeWhat, poll_s: float = 0.5) -> None:
        """folder: of a job."""
        self._folder, self._what, self._poll_s = folder, what, poll_s
        self._work = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="follower", daemon=True)
        self._refused: dict[tuple[CutName, tuple[int, int, int]], _Refused] = {}
        self._versions: Versions[ServedModel] | None = None
        self._served: _Found | None = None
        self._held = False
        self._num_swaps = 0
        self._newest: _Found | None = None
        self._behind_since_s: float | None = None

    # Life -------------------------------------------------------------------------------------------------------------

    def begin(self, stopping: threading.Event) -> Versions[ServedModel] | None:
        """Opens the newest snapshot that can be served; None if `stopping` is set before there is one."""
        said = False
        while not stopping.is_set():
            with self._work:
                self._take_up_newest()
                if self._versions is not None:
                    return self._versions
            if not said:
                log.info("%s: no complete snapshot that can be served yet; waiting for one", self._folder)
                said = True
            stopping.wait(self._poll_s)
        return None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(self._poll_s):
            try:
                with self._work:
                    self._take_up_newest()
            except Exception:
                # what is served does not hang on it; the next round may do better (a folder that is away for a while)
                log.exception("following %s failed; it is tried again in %g s", self._folder, self._poll_s)

    # Following --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> FollowState:
        served, newest, since_s = self._served, self._newest, self._behind_since_s
        assert served is not None and self._versions is not None
        newest = newest or served
        refused = self._refused.get(newest.identity)
        is_behind = newest.identity != served.identity and newest.name >= served.name
        return FollowState(
            served_id=served.name.folder,
            newest_id=newest.name.folder,
            steps_behind=max(0, newest.name.step - served.name.step) if is_behind else 0,
            seconds_behind=max(0.0, time.time() - since_s) if is_behind and since_s is not None else 0.0,
            is_held=self._held,
            refusal=refused.message if refused and is_behind else "",
            num_swaps=self._num_swaps,
            num_open=self._versions.num_open,
        )

    def choose(self, snapshot_id: str) -> None:
        """Serves that snapshot from now on, `previous`: the one before; empty: the newest, and goes on following.

        InvalidInput if there is none of the name; SegmentCorrupt, and what is served stays, if it is damaged."""
        with self._work:
            if not snapshot_id:
                self._held = False
                log.info("following the newest snapshot again")
                self._take_up_newest()
                return
            found = self._find(snapshot_id)
            if self._served is None or found.identity != self._served.identity:
                self._serve(found, self._open(self._folder / found.name.folder))
            self._held = True
            log.warning("snapshot %s is served by command, until it is told to follow again", found.name.folder)

    def _find(self, snapshot_id: str) -> _Found:
        complete = self._complete()
        if snapshot_id == PREVIOUS:
            before = [found for found in complete if self._served is not None and found.name < self._served.name]
        else:
            before = [found for found in complete if found.name.folder == snapshot_id]
        if not before:
            names = ", ".join(found.name.folder for found in complete[-8:])
            raise InvalidInput(f"snapshot {snapshot_id!r} is not in {self._folder}; complete are {names or 'none'}")
        return before[-1]

    def _take_up_newest(self) -> None:
        complete = self._complete()
        self._forget_refusals(complete)
        self._newest = complete[-1] if complete else None
        newer = [found for found in complete if self._is_newer(found)]
        self._behind_since_s = min((found.complete_s for found in newer), default=None)
        if self._held:
            return
        for found in reversed(newer):
            if self._try(found):
                left = [each for each in newer if each.name > found.name]
                self._behind_since_s = min((each.complete_s for each in left), default=None)
                return

    def _is_newer(self, found: _Found) -> bool:
        served = self._served
        return served is None or (found.name >= served.name and found.identity != served.identity)

    def _try(self, found: _Found) -> bool:
        """Whether it is served now."""
        refused = self._refused.get(found.identity)
        if refused is not None and time.monotonic() < refused.again_s:
            return False
        folder = self._folder / found.name.folder
        try:
            version = self._open(folder)
        except (FrostlineError, OSError) as error:
            if not (folder / MANIFEST).exists():  # removed meanwhile: no damage
                return False
            self._refuse(found, str(error), is_new=refused is None or refused.message != str(error))
            return False
        self._serve(found, version)
        return True

    def _open(self, folder: Path) -> ServedModel:
        """Every byte that a look-up may read is checked before it is served, but for what the version before has."""
        version = ServedModel(folder, self._what)
        try:
            if self._versions is None:
                version.snapshot.check_rows()
            else:
                with self._versions.pinned() as before:
                    version.snapshot.check_rows(before.snapshot)
        except BaseException:
            version.close()
            raise
        return version

    def _refuse(self, found: _Found, message: str, *, is_new: bool) -> None:
        self._refused[found.identity] = _Refused(message, time.monotonic() + _RETRY_S)
        if is_new:
            stays = f"it stays at {self._served.name.folder}" if self._served else "nothing is served yet"
            log.error("snapshot %s cannot be served, %s: %s", found.name.folder, stays, message)

    def _serve(self, found: _Found, version: ServedModel) -> None:
        if self._versions is None:
            self._versions = Versions(version)
        else:
            self._versions.replace(version)
            self._num_swaps += 1
        self._served = found
        log.info(
            "serving %s: %d rows, %d bytes of index, %.1f s after it was complete%s",
            found.name.folder, version.snapshot.num_rows, version.snapshot.index_bytes,
            max(0.0, time.time() - found.complete_s), "" if version.has_model else f"; no Predict: {version.no_model}",
        )  # fmt: skip

    def _forget_refusals(self, complete: list[_Found]) -> None:
        left = {found.identity for found in complete}
        self._refused = {identity: refused for identity, refused in self._refused.items() if identity in left}

    def _complete(self) -> list[_Found]:
        """Complete snapshots, oldest first."""
        found = []
        for name in cuts_in(self._folder):
            try:
                stat = (self._folder / name.folder / MANIFEST).stat()
            except FileNotFoundError:
                continue
            found.append(_Found(name, (stat.st_ino, stat.st_mtime_ns, stat.st_size), stat.st_mtime))
        return found


def job_folder_in(uri: Path) -> Path:
    """The folder of the one job in `uri`, or `uri` itself if it is one. InvalidInput names them if there are more."""
    from trainer.snapshot_list import job_folders

    folders = job_folders(uri)
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise InvalidInput(f"{uri}: no job has left a snapshot there yet; name the folder of the job, URI/JOB")
    names = ", ".join(sorted(folder.name for folder in folders))
    raise InvalidInput(f"{uri}: {len(folders)} jobs have snapshots there ({names}); name the folder of one, URI/JOB")
