"""What a report is made of, with a value in every field."""

from __future__ import annotations

import numpy as np

from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import NUM_HEAT_BANDS, Frostline, MaskInfo, TableStats
from trainer.mask_report import ControlReport, Snapshot, Traffic

USER = TableStats(
    rows_hot=30, rows_frozen=70, rows_unfreezable=2, bytes_hot=300, bytes_index=50, bytes_peak=900, moves_frozen=80,
    moves_frozen_idle=60, moves_frozen_rank=20, moves_thawed=9, moves_thawed_visit=9, moves_forgotten=4, rows_erased=5,
    bytes_erasure_pending=4096,
)  # fmt: skip
FILM = TableStats(rows_hot=10, bytes_hot=100, bytes_peak=100)


def counts(**bands: int) -> np.ndarray:
    result = np.zeros(NUM_HEAT_BANDS, np.int64)
    for band, count in bands.items():
        result[int(band.removeprefix("b"))] = count
    return result


def snapshot() -> Snapshot:
    policy = PolicySpec(kind="topk")
    return Snapshot(
        job="job",
        arm="topk",
        step=50,
        samples=5000,
        specs={
            "user": TableSpec(name="user", dim=8, policy=policy, optimizer=OptimizerSpec(kind="adam")),
            "film": TableSpec(name="film", dim=4),
        },
        infos={
            "user": MaskInfo(USER, Frostline(77, 0.25), counts(b16=20, b18=10), counts(b0=70), 40, 30),
            "film": MaskInfo(FILM),
        },
        traffic={"user": Traffic(1000, 100, 600, 40), "film": Traffic(50, 0, 50, 24)},
        control={"user": ControlReport(0.004, 0.003, 0.005, 100, 5000, max_loss=0.002)},
        frostline_heat={"user": 1.5},
        events=["something"],
    )
