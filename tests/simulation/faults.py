"""What goes wrong in a simulation, and when: crashes at failpoints and between operations, errors of the disk."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from embedding_server.failpoints import DISK, NAMES, Action, SimulatedCrash

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
_MAX_ERRORS = 4  # of one planted trouble, one after the other
_PATIENCE = 120  # operations that a planted failpoint waits to be hit before another is chosen


@dataclass
class Faults:
    """One decision an operation. `die` is called in the process that crashes, before it unwinds."""

    rng: random.Random
    die: Callable[[], None]
    rate: float  # of operations before which something is planted or done
    kinds: tuple[str, ...] = ("shard", "worker", "power", "driver", "crash", "crash", "crash", "error", "error")
    hits: dict[str, int] = field(default_factory=dict)  # of all failpoints, by name
    is_over: bool = False
    has_failed: bool = False  # an error came up in this operation
    note: str = ""  # what came up in this operation
    _planted: str | None = None
    _error: int | None = None  # of errno; None: it crashes
    _left: int = 0
    _waits: int = 0
    _is_paused: bool = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing fails meanwhile, and no hit counts."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def actions(self) -> dict[str, Action]:
        return {name: lambda name=name: self._hit(name) for name in NAMES}

    def before_operation(self) -> str | None:
        """Plants something, or returns which process to end: shard, worker, power, driver."""
        self.has_failed, self.note = False, ""
        if self.is_over:
            return None
        self._waits -= 1
        if self._planted is not None and self._waits < 0:
            self._planted = None
        if self.rng.random() >= self.rate:
            return None
        kind = self.rng.choice(self.kinds)
        if kind not in ("crash", "error"):
            return kind
        self._waits = _PATIENCE
        if kind == "crash":
            self._planted, self._error, self._left = self.rng.choice(sorted(NAMES)), None, 1
        else:
            self._planted, self._error = self.rng.choice(sorted(DISK)), self.rng.choice(_ERRORS)
            self._left = self.rng.randint(1, _MAX_ERRORS)
        return None

    def _hit(self, name: str) -> None:
        if self._is_paused:
            return
        self.hits[name] = self.hits.get(name, 0) + 1
        if name != self._planted or self.is_over:
            return
        self._left -= 1
        if not self._left:
            self._planted = None
        if self._error is None:
            self.note = f"crash at {name}"
            self.die()
            raise SimulatedCrash(name)
        self.note, self.has_failed = f"{errno.errorcode[self._error]} at {name}", True
        raise OSError(self._error, f"planted at {name}")
