"""Tables go: their memory, their files, in slices. Who drops them has taken them out of the shard before.

Giving gigabytes back to the kernel takes tenths of a second, deleting a file of 256 MiB tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from embedding_server.errors import InvalidInput
from embedding_server.failpoints import failpoint

if TYPE_CHECKING:
    from embedding_server.table import Table

_BYTES_AT_ONCE = 256 << 20


def check_names(names: object) -> None:
    """InvalidInput unless it is a list of texts; a text would be taken for the tables that its letters name."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"tables to drop are {names!r:.200}; give a list of names")


class TableDrops:
    """Of a shard: tables that are gone, whose memory and files are not, or that nobody has asked about since.

    Thread safety: none; the thread that owns the shard calls.
    """

    def __init__(self) -> None:
        self._drops: dict[tuple[str, frozenset[str]], TableDrop] = {}  # by job and names

    @property
    def are_under_way(self) -> bool:
        return any(not drop.is_over for drop in self._drops.values())

    def has(self, job: str, names: Collection[str]) -> bool:
        """A drop of just these tables by the job has begun, and go_on has not told yet that it is over."""
        return (job, frozenset(names)) in self._drops

    def begin(self, job: str, tables: Sequence[Table]) -> None:
        """The tables are the drop's from here on: nobody else finds them any more."""
        self._drops[job, frozenset(table.spec.name for table in tables)] = TableDrop(tables)
        failpoint("drop.begin")

    def go_on(self, job: str, names: Collection[str]) -> bool:
        """A slice of a drop that has begun. True: it is over, and forgotten."""
        key = job, frozenset(names)
        self._drops[key].slice()
        if not self._drops[key].is_over:
            return False
        del self._drops[key]
        return True

    def slice(self) -> bool:
        """A bounded part of some drop. False: nothing can be done now."""
        return any(drop.slice() for drop in self._drops.values())

    def finish(self, name: str) -> None:
        """Ends every drop of a table of this name, at once."""
        for key in [key for key in self._drops if name in key[1]]:
            self._drops.pop(key).finish()

    def close(self) -> None:
        """Ends all of them."""
        for drop in self._drops.values():
            drop.finish()


class TableDrop:
    """slice() until is_over. Thread safety: none; the thread that owns the shard calls."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.is_over = False
        self._tables = list(tables)
        self._work = self._run()

    def slice(self) -> bool:
        """A bounded part. False: it is over, or waits for the executor."""
        does_something = next(self._work, None)
        self.is_over = does_something is None
        return bool(does_something)

    def finish(self) -> None:
        """Whatever is left, at once."""
        while not self.is_over:
            if not self.slice() and self._tables:
                self._tables[-1].segments.wait_for_write()

    def _run(self) -> Iterator[bool]:
        """Each step is a slice, False if it only waits."""
        while self._tables:
            yield from self._drop(self._tables[-1])
            self._tables.pop()

    @staticmethod
    def _drop(table: Table) -> Iterator[bool]:
        slot, rows = table.slots.high_water, max(1, _BYTES_AT_ONCE // table.hot_row_bytes)
        while slot:
            slot = max(0, slot - rows)
            for part in (table.hot, table.last_step, table.visits):
                part.release(slot)
            yield True
        while table.segments.is_executor_at_work:
            yield False
        table.segments.end_writes()
        failpoint("drop.before_files")
        while table.segments.drop_one():
            yield True
        table.close()
        failpoint("drop.before_leftovers")
        table.segments.remove_leftovers()
        table.budget.forget(table.spec.name)
