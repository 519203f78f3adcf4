"""Where a client may have a shard write and read snapshots.

A folder that came over the wire is taken only if it is absolute and normalised, is named as a cut is, and lies within
the root that the shard was started with (`--snapshot-root`), symbolic links resolved. Without a root any such folder is
taken while the shard listens on loopback alone, and none otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

from embedding_server.errors import InvalidInput

MAX_FOLDER_CHARS = 1024
_CUT_NAME = re.compile(r"cut-[0-9]{12}-[0-9]{1,20}", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether what binds `host` can be reached from this machine only. A name other than localhost counts as no."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class SnapshotPaths:
    """The rule of one shard. Thread safety: any thread; it keeps nothing but the rule."""

    def __init__(self, root: Path | None, host: str) -> None:
        """root None: any folder if `host`, the address that the shard binds, is loopback.

        InvalidInput unless root is a folder.
        """
        self._is_open = root is None and is_loopback(host)
        self._root: Path | None = None
        if root is not None:
            self._root = Path(root).resolve()
            if not self._root.is_dir():
                raise InvalidInput(f"--snapshot-root {root} is not a folder; make it, or name another")

    def checked(self, call: str, folder: str) -> Path:
        """The folder of a cut without symbolic links in it. InvalidInput if it is not for a client to name."""
        shown = repr(folder if len(folder) <= 200 else folder[:200] + "...")
        if self._root is None and not self._is_open:
            raise InvalidInput(
                f"{call}: folder {shown}: this shard takes no snapshots, because it listens beyond this machine and was"
                " started without --snapshot-root; start it with the folder that snapshots may lie in"
            )
        _check_spelling(call, folder, shown)
        # The parents count too: objects/ is made beside the cut.
        real = _resolved(call, folder, shown)
        if self._root is not None and self._root not in real.parent.parents:
            raise InvalidInput(
                f"{call}: folder {shown} does not lie within a folder of this shard's --snapshot-root, symbolic links"
                f" resolved; a cut lies at {self._root}/JOB/{real.name}"
            )
        return real


def _check_spelling(call: str, folder: str, shown: str) -> None:
    """Lexical, so that a path that is refused is never looked at."""
    if len(folder) > MAX_FOLDER_CHARS:
        raise InvalidInput(f"{call}: folder {shown} has {len(folder)} characters, more than {MAX_FOLDER_CHARS}")
    if "\0" in folder or not folder.startswith("/") or folder.startswith("//") or os.path.normpath(folder) != folder:
        raise InvalidInput(
            f"{call}: folder {shown} must be an absolute path on the shard's machine, without '.', '..', '//' or a '/'"
            " at the end"
        )
    if not _CUT_NAME.fullmatch(os.path.basename(folder)):
        raise InvalidInput(
            f"{call}: folder {shown} must end in cut-STEP-EPOCH, the step with 12 digits: 'cut-000000000100-3'"
        )


def _resolved(call: str, folder: str, shown: str) -> Path:
    """Without symbolic links. The cut itself must not be one: it is made by a shard."""
    try:
        real = Path(folder).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise InvalidInput(f"{call}: folder {shown} cannot be looked at: {error}") from None
    if real.name != os.path.basename(folder) or os.path.islink(folder):
        raise InvalidInput(f"{call}: folder {shown} is a symbolic link; name the folder itself")
    return real
