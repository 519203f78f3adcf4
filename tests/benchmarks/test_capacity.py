from __future__ import annotations

import json

from benchmarks.capacity import LIMITS, Size, measure

#: id 8, accumulator 1, visits 1, and an 8-bit row of 64 values with its scale and bias
FROZEN_ROW_BYTES = 8 + 1 + 1 + 72


def test_phases_account_for_every_row() -> None:
    size = Size(rows=20_000, dim=64, rows_per_step=5_000, churn_rounds=2)
    document = measure(size, say=lambda line: None)
    assert document["figures"].keys() == LIMITS.keys()
    hot, frozen, churned = (document["phases"][name] for name in ("hot", "frozen", "churned"))
    assert (hot["rows_hot"], hot["rows_frozen"]) == (size.rows, 0)
    assert (frozen["rows_hot"], frozen["rows_frozen"]) == (0, size.rows)
    assert (churned["rows_hot"], churned["rows_frozen"]) == (0, size.rows)
    assert churned["moves_frozen"] - frozen["moves_frozen"] == 2 * size.rows * size.churn_fraction
    assert churned["moves_thawed"] == 2 * size.rows * size.churn_fraction
    assert frozen["segment_file_bytes"] == frozen["accounted_segment_bytes"]
    assert FROZEN_ROW_BYTES <= frozen["segment_row_bytes"] < FROZEN_ROW_BYTES + 1
    assert churned["segment_row_bytes"] <= FROZEN_ROW_BYTES / 0.8 + 1  # merged at 20% dead
    json.dumps(document)
