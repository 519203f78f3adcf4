"""Advance: what a shard does to its tables between two steps, in bounded slices that the caller repeats until done.

    heat_slice      counts the ranks of tables of policy topk; changes nothing
    reselect        freezes, thaws, and forgets idle rare rows
    end_data_pass   forgets rare rows
    mask_slice      counts rows by heat; changes nothing

The shard has checked who is calling and that the step is applied.
"""

from __future__ import annotations

from collections.abc import Mapping

from embedding_server.errors import InvalidInput
from embedding_server.forgetting import EndOfDataPass
from embedding_server.ranking import heat_histogram, histogram_end
from embedding_server.reselection import Reselection
from embedding_server.store import NUM_BUCKETS, Frostline, HeatHistogram, MaskInfo, Moves
from embedding_server.table import Table
from embedding_server.table_pass import TablePass
from embedding_server.table_stats import mask_info_of


class Advances:
    """`tables` is the shard's own dictionary. Thread safety: none; the thread that owns the shard calls."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables
        self._under_way: dict[str, TablePass] = {}  # by job

    def heat_slice(self, job: str, step: int, first_bucket: int) -> tuple[dict[str, HeatHistogram], int]:
        _check_first_bucket(first_bucket)
        tables = {n: table for n, table in self._tables_of(job).items() if table.spec.policy.kind == "topk"}
        last = histogram_end(tables.values(), first_bucket)
        return {name: heat_histogram(table, step, first_bucket, last) for name, table in tables.items()}, last

    def heat_histograms(self, job: str, step: int) -> dict[str, HeatHistogram]:
        total, bucket = self.heat_slice(job, step, 0)
        while bucket < NUM_BUCKETS:
            part, bucket = self.heat_slice(job, step, bucket)
            total = {name: histogram + part[name] for name, histogram in total.items()}
        return total

    def reselect(self, job: str, step: int, frostlines: Mapping[str, Frostline]) -> tuple[dict[str, Moves], bool]:
        return self._continue(job, Reselection(self._tables_of(job), step, frostlines))

    def end_data_pass(self, job: str, step: int) -> tuple[dict[str, Moves], bool]:
        return self._continue(job, EndOfDataPass(self._tables_of(job), step))

    def mask_slice(self, first_bucket: int) -> tuple[dict[str, MaskInfo], int]:
        """Of all tables, at any time."""
        _check_first_bucket(first_bucket)
        last = histogram_end(self._tables.values(), first_bucket)
        return {name: mask_info_of(table, first_bucket, last) for name, table in self._tables.items()}, last

    def abandon(self, job: str) -> None:
        """Ends what is under way where it stands: a new epoch has begun."""
        current = self._under_way.pop(job, None)
        if current is not None:
            current.abandon()

    def _continue(self, job: str, wanted: TablePass) -> tuple[dict[str, Moves], bool]:
        """The next slice of `wanted`, or of the same pass if it is under way; any other ends where it stands."""
        current = self._under_way.get(job)
        if current is None or current.key != wanted.key:
            self.abandon(job)
            current = self._under_way[job] = wanted
        moves, done = current.advance()
        if done:
            del self._under_way[job]
        return moves, done

    def _tables_of(self, job: str) -> dict[str, Table]:
        """Tables that the job trains, and those that nobody has trained yet."""
        return {name: table for name, table in self._tables.items() if table.job in (None, job)}


def _check_first_bucket(first_bucket: int) -> None:
    if not 0 <= first_bucket < NUM_BUCKETS:
        raise InvalidInput(f"first_bucket={first_bucket} must be in [0, {NUM_BUCKETS}); start at 0")
