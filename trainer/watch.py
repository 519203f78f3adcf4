"""What a worker notes of its steps, and the report that worker 0 makes of it: mask info, traffic, the control group.

    watch.observe(lookups, batch, logits)      every step, before its push
    watch.start_control_group()                at the first re-selection: before it nothing has frozen
    watch.report(step, log)                    by all workers together, at barriers; at most 1% of the time goes there
    watch.report(step, log, is_last=True)      at the end, whenever the last one was; gives the document

Thread safety: one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embedding_server.heat import CODES_PER_BIN, heat_of_codes
from embedding_server.policy import control_buckets
from embedding_server.spec import TableSpec
from embedding_server.store import DEFAULT, TRAINABLE, WIRE_NUMPY, EmbeddingStore, Frostline, MaskInfo, push_dtype
from trainer.control_group import ControlGroup, Difference, merged_band
from trainer.data.batch import Batch
from trainer.group import Group
from trainer.job import Job
from trainer.lookups import Lookups
from trainer.mask_report import ControlReport, Snapshot, Traffic, finite, mask_document
from trainer.run_log import RunLog

#: a report waits for so many times as long as the one before it took
QUIET_TIMES = 100.0
_ROW_ID_BYTES = 8
_PULLED, _DEFAULT, _TRAINABLE = range(3)


class Watch:
    def __init__(self, job: Job, store: EmbeddingStore, group: Group, tables: Sequence[str], last_step: int) -> None:
        """`tables`: those of the collection, in its order; last_step: of the job on these shards before this run."""
        self._job = job
        self._store = store
        self._group = group
        self._tables = list(tables)
        self._last_step = last_step
        self._specs: dict[str, TableSpec] = {name: store.table_specs()[name] for name in self._tables}
        self._counts = np.zeros((len(self._tables), 3), np.int64)
        self._control: ControlGroup | None = None
        self._alarmed: set[str] = set()
        self._ready_s = 0.0

    def start_control_group(self) -> None:
        """From here on losses count. A second call changes nothing."""
        if self._control is None:
            buckets = {name: control_buckets(spec) for name, spec in self._specs.items()}
            merged = {name: merged_band(spec.policy) for name, spec in self._specs.items()}
            self._control = ControlGroup(self._tables, buckets, merged)

    def observe(self, lookups: Lookups | None, batch: Batch, logits: torch.Tensor) -> None:
        """logits float32[B], of the forward that made these look-ups; None: it made none."""
        if lookups is None:
            return
        for t, name in enumerate(self._tables):
            if lookups.num_unique[t]:
                flags = lookups.rows[name].flags
                of_table = self._counts[t]
                of_table[_PULLED] += flags.size
                of_table[_DEFAULT] += np.count_nonzero(flags & DEFAULT)
                of_table[_TRAINABLE] += np.count_nonzero(flags & TRAINABLE)
        if self._control is not None and batch.num_samples:
            losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
            self._control.observe(lookups, losses.numpy(), batch.labels.numpy())

    def report(self, step: int, log: RunLog, is_last: bool = False) -> dict[str, Any] | None:
        """Writes the mask info of all workers and shards to `log`; on worker 0 the document, None elsewhere or if it is
        too early. Every worker calls it at the same step."""
        start_s = time.perf_counter()
        if not self._group.from_first(int(is_last or start_s >= self._ready_s)):
            return None
        counts = self._group.add(self._counts.astype(np.float64)).astype(np.int64)
        differences = self._differences()
        (samples,) = self._group.sums([log.num_samples])
        if not self._group.is_first:
            return None
        control = {name: self._control_report(name, difference) for name, difference in differences.items()}
        self._raise_alarms(control, log)
        infos = {name: info for name, info in self._store.mask_info().items() if name in self._specs}
        document = mask_document(
            Snapshot(
                job=self._job.name,
                arm=log.arm,
                step=step,
                samples=samples,
                since_step=log.since_step,
                specs=self._specs,
                infos=infos,
                traffic={name: self._traffic(name, counts[t]) for t, name in enumerate(self._tables)},
                control=control,
                frostline_heat=self._frostline_heats(infos, self._last_step + step),
                events=[*self._store.stats().events, *log.events],
            )
        )
        log.mask(document, step)
        end_s = time.perf_counter()
        self._ready_s = end_s + QUIET_TIMES * (end_s - start_s)
        return document

    def _differences(self) -> dict[str, Difference]:
        if self._control is None:
            return {}
        return self._control.differences(self._group.add(self._control.all_sums))

    def _control_report(self, table: str, difference: Difference) -> ControlReport:
        return ControlReport(
            difference=finite(difference.mean),
            low=finite(difference.low),
            high=finite(difference.high),
            lookups_control=difference.lookups_control,
            lookups_treated=difference.lookups_treated,
            max_loss=self._job.embedding.knobs_of(table).advanced.max_loss,
        )

    def _raise_alarms(self, control: dict[str, ControlReport], log: RunLog) -> None:
        """An event per table when its lower bound passes max_loss, and again only after it has been below."""
        for table, report in control.items():
            if report.is_alarm and table not in self._alarmed:
                log.event(
                    f"table {table!r}: rows that may freeze have {report.difference:.4f} more logloss than control "
                    f"rows of the same heat (95% interval {report.low:.4f} to {report.high:.4f}), and max_loss is "
                    f"{report.max_loss:g}; raise idle_samples, hot_fraction or frozen_bits of this table"
                )
        self._alarmed = {table for table, report in control.items() if report.is_alarm}

    def _traffic(self, table: str, counts: np.ndarray) -> Traffic:
        value_bytes = WIRE_NUMPY[push_dtype(self._store.wire_dtype)].itemsize
        return Traffic(
            rows_pulled=int(counts[_PULLED]),
            rows_default=int(counts[_DEFAULT]),
            gradient_rows=int(counts[_TRAINABLE]),
            gradient_bytes=_ROW_ID_BYTES + self._specs[table].dim * value_bytes,
        )

    def _frostline_heats(self, infos: dict[str, MaskInfo], step: int) -> dict[str, float]:
        heats = {}
        for name, info in infos.items():
            policy = self._specs[name].policy
            is_by_heat = policy.select == "topk" or (policy.select == "score" and policy.score == "heat")
            if is_by_heat and info.frostline is not None:
                heats[name] = frostline_heat(info.frostline, step, policy.half_life_steps)
        return heats


def frostline_heat(frostline: Frostline, step: int, half_life_steps: float) -> float:
    """Heat at `step` at which the frostline's bin begins; 0 when all rows are above it."""
    if frostline.bin < 0:
        return 0.0
    code = np.array([frostline.bin * CODES_PER_BIN], np.int64)
    return float(heat_of_codes(code, step, half_life_steps)[0])
