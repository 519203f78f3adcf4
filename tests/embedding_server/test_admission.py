from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding_server.admission import VisitCounts

batches = st.lists(st.tuples(st.sets(st.integers(-3, 40), max_size=20), st.integers(1, 4)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(batches)
def test_counts_equal_a_dictionary_and_admitted_ids_are_purged(history: list[tuple[set[int], int]]) -> None:
    counts, model = VisitCounts(), {}
    for batch, admit_at in history:
        ids = np.array(sorted(batch), np.int64)
        counted = ids % 5 != 0
        for row_id, now in zip(ids.tolist(), counted.tolist(), strict=True):
            model[row_id] = model.get(row_id, 0) + now
        assert counts.visit(ids, counted).tolist() == [model[i] for i in ids.tolist()]
        admitted = [i for i in ids.tolist() if model[i] >= admit_at]
        counts.forget(np.array(admitted, np.int64))
        for row_id in admitted:
            del model[row_id]
        assert len(counts) == sum(count > 0 for count in model.values())


def test_purging_gives_memory_back() -> None:
    counts = VisitCounts()
    ids = np.arange(20_000, dtype=np.int64)
    counts.visit(ids, np.ones(20_000, np.bool_))
    before = counts.size_bytes
    assert before / 20_000 < 22
    counts.forget(ids[:15_000])
    assert counts.size_bytes < before / 2
