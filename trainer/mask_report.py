"""What is hot and what is frozen, as one JSON document: mask_info.json, `frostline inspect`, and part of summary.json.

    document = mask_document(inputs)     plain data; its keys are described at table_document and mask_document
    board_scalars(document)              the same as TensorBoard scalars; histograms: RunLog.mask

Importing this module imports neither torch nor numba.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedding_server.spec import TableSpec
from embedding_server.store import HEAT_BAND_OF_ONE, NUM_HEAT_BANDS, MaskInfo, TableStats

_ROWS = ("hot", "frozen", "probation", "unfreezable", "ignored", "default_reads", "erased")
_BYTES = ("total", "peak", "hot", "state", "frozen", "index", "heat", "erasure_pending")
_MOVES = (
    "frozen", "frozen_idle", "frozen_rank", "frozen_limit", "thawed", "thawed_visit", "thawed_rank", "forgotten",
)  # fmt: skip
MASK_FILE = "mask_info.json"
#: a table that holds more of the hot rows of all tables than this is said to hold most of them
MOST = 0.5


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows of one table that training named, over all workers; a row counts once a step and worker."""

    rows_pulled: int = 0
    rows_default: int = 0  # of these, answered with the default row
    gradient_rows: int = 0  # of these, trainable: a gradient was sent
    gradient_bytes: int = 8  # of one gradient row on the wire, row_id included

    @property
    def gradient_rows_saved(self) -> int:
        """Rows that had a row of their own and got no gradient, because they are frozen."""
        return self.rows_pulled - self.rows_default - self.gradient_rows

    @property
    def bytes_push_saved(self) -> int:
        return self.gradient_rows_saved * self.gradient_bytes


@dataclass(frozen=True, slots=True)
class ControlReport:
    """Logloss of rows that may freeze less that of the control group's (control_group.py); None: too little seen."""

    difference: float | None
    low: float | None
    high: float | None
    lookups_control: int
    lookups_treated: int
    max_loss: float

    @property
    def is_alarm(self) -> bool:
        return self.low is not None and self.low > self.max_loss


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a report is made of; tables by name."""

    job: str
    arm: str
    step: int  # of this run
    samples: int
    specs: Mapping[str, TableSpec]
    infos: Mapping[str, MaskInfo]
    traffic: Mapping[str, Traffic]
    control: Mapping[str, ControlReport] = field(default_factory=dict)
    frostline_heat: Mapping[str, float] = field(default_factory=dict)  # of tables that are ranked by heat
    events: Sequence[str] = ()
    since_step: int = 0  # samples and traffic are those of later steps: the run went on from a snapshot of this one


def mask_document(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON data: job, arm, step, since_step, samples, tables (table_document), total, largest_hot_table, events.

    Samples and traffic are those of the steps after since_step, which is 0 unless the run went on from a snapshot.

    `total` has rows, bytes, moves and traffic of all tables; `largest_hot_table` names the table with the most hot rows
    and its share of them, or is null without hot rows.
    """
    total = sum((info.stats for info in snapshot.infos.values()), TableStats())
    tables = {name: table_document(snapshot, name, total.rows_hot) for name in snapshot.infos}
    largest = max(tables, key=lambda name: tables[name]["rows"]["hot"], default=None)
    return {
        "job": snapshot.job,
        "arm": snapshot.arm,
        "step": snapshot.step,
        "since_step": snapshot.since_step,
        "samples": snapshot.samples,
        "tables": tables,
        "total": {**_stats_document(total), "traffic": _total_traffic(snapshot.traffic.values())},
        "largest_hot_table": (
            {"table": largest, "share": tables[largest]["share_of_hot_rows"]} if largest and total.rows_hot else None
        ),
        "events": list(snapshot.events),
    }


def table_document(snapshot: Snapshot, name: str, rows_hot_of_all: int) -> dict[str, Any]:
    """One table: policy (all knobs, in steps), dim, optimizer; rows and bytes by tier; moves by reason, since start.

    frostline: null without one, else bin, tie_fraction and heat (null unless ranked by heat). topk_overlap: share of
    the rows now hot by rank that were hot before, or null. heat_histogram: rows by heat, band i from lower_edges[i] on.
    update_frequency: gradient rows for each step and row of the table, hot or frozen, or null without rows.
    """
    spec, info = snapshot.specs[name], snapshot.infos[name]
    stats, line, traffic = info.stats, info.frostline, snapshot.traffic.get(name, Traffic())
    control, num_rows = snapshot.control.get(name), stats.rows_hot + stats.rows_frozen
    num_steps = snapshot.step - snapshot.since_step
    return {
        "policy": spec.policy.model_dump(mode="json"),
        "dim": spec.dim,
        "optimizer": spec.optimizer.kind,
        **_stats_document(stats),
        "share_of_hot_rows": stats.rows_hot / rows_hot_of_all if rows_hot_of_all else 0.0,
        "frostline": line
        and {"bin": line.bin, "tie_fraction": line.tie_fraction, "heat": snapshot.frostline_heat.get(name)},
        "topk_overlap": finite(info.topk_overlap),
        "heat_histogram": {
            "lower_edges": lower_edges(),
            "hot": info.heat_counts_hot.tolist(),
            "frozen": info.heat_counts_frozen.tolist(),
        },
        "traffic": _traffic_document(traffic),
        "update_frequency": traffic.gradient_rows / (num_steps * num_rows) if num_steps and num_rows else None,
        "control": control
        and {name: getattr(control, name) for name in (*ControlReport.__dataclass_fields__, "is_alarm")},
    }


def lower_edges() -> list[float]:
    """Heat at which each of the NUM_HEAT_BANDS bands begins; the first holds everything below the second, too."""
    return [0.0, *(2.0 ** ((band - HEAT_BAND_OF_ONE) / 2.0) for band in range(1, NUM_HEAT_BANDS))]


def _stats_document(stats: TableStats) -> dict[str, dict[str, int]]:
    return {
        "rows": {name: int(getattr(stats, f"rows_{name}")) for name in _ROWS},
        "bytes": {name: int(getattr(stats, f"bytes_{name}")) for name in _BYTES},
        "moves": {name: int(getattr(stats, f"moves_{name}")) for name in _MOVES},
    }


def total_stats(document: Mapping[str, Any]) -> TableStats:
    """The figures of all tables that mask_document was made of."""
    groups = {group: document["total"][group] for group in ("rows", "bytes", "moves")}
    figures = {f"{group}_{name}": value for group, values in groups.items() for name, value in values.items()}
    del figures["bytes_total"]  # a sum of others
    return TableStats(**figures)


def _traffic_document(traffic: Traffic) -> dict[str, int]:
    names = ("rows_pulled", "rows_default", "gradient_rows", "gradient_rows_saved", "bytes_push_saved")
    return {name: int(getattr(traffic, name)) for name in names}


def _total_traffic(traffics: Iterable[Traffic]) -> dict[str, int]:
    documents = [_traffic_document(traffic) for traffic in traffics]
    return {name: sum(d[name] for d in documents) for name in _traffic_document(Traffic())}


def board_scalars(document: Mapping[str, Any]) -> dict[str, float]:
    """TensorBoard tags and values: rows/hot, bytes/total, moves/..., traffic/... of all tables; table_t/... of table t.

    A control group's are control/<table>/difference, low, high and alarm (1 while low is above max_loss).
    """
    scalars: dict[str, float] = {}
    for group, values in document["total"].items():
        scalars |= {f"{group}/{name}": value for name, value in values.items()}
    if document["largest_hot_table"]:
        scalars["rows/share_of_largest_hot_table"] = document["largest_hot_table"]["share"]
    for table, state in document["tables"].items():
        for group in ("rows", "bytes", "moves", "traffic"):
            scalars |= {f"table_{table}/{group}_{name}": value for name, value in state[group].items()}
        line, control = state["frostline"] or {}, state["control"] or {}
        single = {
            "frostline_heat": line.get("heat"),
            "topk_overlap": state["topk_overlap"],
            "update_frequency": state["update_frequency"],
            "share_of_hot_rows": state["share_of_hot_rows"],
        }
        scalars |= {f"table_{table}/{name}": value for name, value in single.items() if value is not None}
        if control and control["difference"] is not None:
            scalars |= {f"control/{table}/{name}": control[name] for name in ("difference", "low", "high")}
            scalars[f"control/{table}/alarm"] = float(control["is_alarm"])
    return scalars


def histogram_of(counts: Sequence[int]) -> dict[str, Any] | None:
    """What Board.histogram takes for rows by octave of heat (log2); None without rows."""
    bands = np.asarray(counts, np.int64)
    if not bands.any():
        return None
    lower = (np.arange(NUM_HEAT_BANDS) - HEAT_BAND_OF_ONE) / 2.0
    middle, used = lower + 0.25, np.flatnonzero(bands)
    return {
        "min": float(lower[used[0]]),
        "max": float(lower[used[-1]] + 0.5),
        "num": int(bands.sum()),
        "sum": float((bands * middle).sum()),
        "sum_squares": float((bands * middle**2).sum()),
        "bucket_limits": (lower[used[0] : used[-1] + 1] + 0.5).tolist(),
        "bucket_counts": bands[used[0] : used[-1] + 1].tolist(),
    }


def finite(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return float(value) if math.isfinite(value) else None
