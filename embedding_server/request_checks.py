"""What a shard checks of a request before it changes anything; messages name the table, the position and the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embedding_server.errors import InvalidInput, TableConflict, UnknownTable, WrongShard
from embedding_server.gradients import Push, ShardGradients
from embedding_server.hot_limit import rows_under_cap
from embedding_server.kernels.cpu import all_finite
from embedding_server.kernels.visits import first_foreign
from embedding_server.kernels.wire import MODES, wire_view
from embedding_server.scores import check_score
from embedding_server.spec import TableSpec, differing_fields
from embedding_server.store import NUM_RANK_BINS, WIRE_NUMPY, Frostline, WireDtype
from embedding_server.table import Table

MAX_ROWS_PER_CALL = 1 << 24
MAX_PARTS = 4096
MAX_LEARNING_RATE = 1e6  # keeps rows finite: optimizers.py


class RequestChecks:
    """Raises InvalidInput, UnknownTable, WrongShard or TableConflict.

    tables: the shard's own dictionary; buckets bool[NUM_BUCKETS]: those it owns.
    """

    def __init__(self, tables: Mapping[str, Table], buckets: np.ndarray) -> None:
        self._tables = tables
        self._buckets = buckets
        self._owns_all = bool(buckets.all())

    def new_specs(self, specs: Sequence[TableSpec]) -> list[TableSpec]:
        """Those of tables that do not exist yet, each once; every one of them can be made."""
        fresh: dict[str, TableSpec] = {}
        for spec in specs:
            known = self._tables[spec.name].spec if spec.name in self._tables else fresh.get(spec.name)
            if known is None:
                check_score(spec)
                rows_under_cap(spec, self._buckets)
                fresh[spec.name] = spec
            elif known != spec:
                raise TableConflict(
                    f"table {spec.name!r} exists with another spec ({differing_fields(known, spec)});"
                    " use the same spec or another name"
                )
        return list(fresh.values())

    def table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            known = ", ".join(sorted(self._tables)[:10]) or "none"
            raise UnknownTable(f"table {name!r} does not exist (tables: {known}); create it with CreateTables")
        return table

    def owner(self, job: str, name: str) -> None:
        """A table's steps are those of one job: heat, idleness and frostlines of two would mix."""
        owner = self._tables[name].job
        if owner not in (None, job):
            raise InvalidInput(
                f"table {name!r} is trained by job {owner!r}, so job {job!r} cannot; go on under the name {owner!r}, or"
                " give this job tables of its own"
            )

    def frostline(self, job: str, name: str, frostline: Frostline) -> None:
        policy = self.table(name).spec.policy
        self.owner(job, name)
        if policy.kind != "topk":
            raise InvalidInput(
                f"table {name!r}: a frostline was sent but its policy is {policy.kind!r}; only tables of policy 'topk'"
                " take one"
            )
        in_range = -1 <= frostline.bin < NUM_RANK_BINS and 0 <= frostline.margin_bins <= NUM_RANK_BINS
        if not (in_range and 0.0 <= frostline.tie_fraction <= 1.0 and 0.0 <= frostline.held_fraction <= 1.0):
            raise InvalidInput(
                f"table {name!r}: {frostline} must have bin in [-1, {NUM_RANK_BINS}), margin_bins in"
                f" [0, {NUM_RANK_BINS}], tie_fraction and held_fraction in [0, 1]; send what compute_frostline gives"
            )

    def ids(self, name: str, row_ids: np.ndarray) -> None:
        self.row_ids(name, row_ids)
        if not self._owns_all:
            foreign = first_foreign(row_ids, self._buckets)
            if foreign >= 0:
                raise WrongShard(
                    f"table {name!r}: row_id {int(row_ids[foreign])} (position {foreign}) is in a bucket of another"
                    " shard; route by shard_of_bucket, and fetch it again if the shards changed"
                )

    def row_ids(self, name: str, row_ids: np.ndarray) -> None:
        """As ids, of whichever buckets."""
        if name not in self._tables:
            self.table(name)  # raises
        if row_ids.ndim != 1 or row_ids.dtype != np.int64:
            raise InvalidInput(
                f"table {name!r}: row_ids has dtype {row_ids.dtype} and shape {list(row_ids.shape)};"
                " it must be int64[n]"
            )
        if row_ids.shape[0] > MAX_ROWS_PER_CALL:
            raise InvalidInput(
                f"table {name!r}: {row_ids.shape[0]} row_ids in one call, more than {MAX_ROWS_PER_CALL};"
                " use a smaller batch"
            )

    def gradients(
        self,
        job: str,
        staged: Mapping[int, Push],
        worker: int,
        step: int,
        name: str,
        gradients: ShardGradients,
        wire_dtype: WireDtype,
    ) -> None:
        self.ids(name, gradients.row_ids)
        self.owner(job, name)
        rate = gradients.learning_rate
        if not 0.0 <= rate <= MAX_LEARNING_RATE:
            raise InvalidInput(f"table {name!r}: learning_rate={rate} must be in [0, {MAX_LEARNING_RATE:g}]")
        decay = self._tables[name].decay
        if decay is not None:
            decay.check(name, rate)
        if gradients.values.dtype != WIRE_NUMPY[wire_dtype]:
            raise InvalidInput(
                f"table {name!r}: gradients have dtype {gradients.values.dtype}; {wire_dtype} travels as"
                f" {WIRE_NUMPY[wire_dtype]}"
            )
        values = gradients.values if gradients.sums is None else None  # who gives sums has checked them
        if values is not None:
            _check_values(self._tables[name].spec, gradients.row_ids, values, wire_dtype)
        if gradients.default_gradient is not None:
            _check_default_gradient(self._tables[name].spec, gradients.default_gradient)
        for other, push in staged.items():
            if push.step != step:
                continue
            for chunk in push.chunks(name):
                if chunk.learning_rate != rate and (other != worker or push.num_parts > 1):
                    raise InvalidInput(
                        f"table {name!r}: worker {worker} sent learning_rate={rate}, worker {other}"
                        f" {chunk.learning_rate} for the same step; all workers must use one schedule"
                    )


def check_parts(part: int, num_parts: int) -> None:
    if not 1 <= num_parts <= MAX_PARTS or not 0 <= part < num_parts:
        raise InvalidInput(f"part={part} of num_parts={num_parts}: parts count from 0 and are at most {MAX_PARTS}")


def check_wire_dtype(wire_dtype: str) -> None:
    if wire_dtype not in WIRE_NUMPY:
        raise InvalidInput(f"wire_dtype={wire_dtype!r} must be one of {', '.join(WIRE_NUMPY)}")


def _check_values(spec: TableSpec, row_ids: np.ndarray, values: np.ndarray, wire_dtype: WireDtype) -> None:
    name, dim = spec.name, spec.dim
    if values.ndim != 2 or values.shape != (row_ids.shape[0], dim):
        raise InvalidInput(
            f"table {name!r}: gradients of shape {list(values.shape)} do not fit {row_ids.shape[0]} row_ids of"
            f" dim {dim}; send one row of {dim} values per row_id"
        )
    if not values.flags.c_contiguous:
        raise InvalidInput(f"table {name!r}: gradients must lie row by row (C-contiguous); send a copy")
    bad = all_finite(wire_view(values), MODES[wire_dtype])
    if bad >= 0:
        raise InvalidInput(
            f"table {name!r}: the gradient of row_id {int(row_ids[bad // dim])} (position {bad // dim}, column"
            f" {bad % dim}) is not finite; nothing of this push was applied. Check the loss,"
            " lower the learning rate or clip"
        )


def _check_default_gradient(spec: TableSpec, gradient: np.ndarray) -> None:
    if not isinstance(gradient, np.ndarray) or gradient.shape != (spec.dim,):
        raise InvalidInput(
            f"table {spec.name!r}: default_gradient has shape {list(gradient.shape)}; it must have {spec.dim} values"
        )
    if gradient.dtype != np.float32 or not np.isfinite(gradient).all():
        raise InvalidInput(
            f"table {spec.name!r}: the default row's gradient is not finite float32 values ({gradient.dtype});"
            " nothing of this push was applied"
        )
