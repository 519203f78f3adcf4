from __future__ import annotations

import numpy as np
import pytest

from embedding_server.errors import InvalidInput
from embedding_server.store import NUM_RANK_BINS, Erased, Frostline, HeatHistogram, MaskInfo, Moves, TableStats
from frostline.v1 import embedding_pb2 as pb
from services import advance_messages as messages

STATS = TableStats(**{name: 2**40 + i for i, name in enumerate(TableStats.__dataclass_fields__)})


def test_moves_frostlines_and_stats_survive_the_wire() -> None:
    moves, line = Moves(1, 2, 3, 4), Frostline(-1, 0.25, 7, 0.5)
    assert messages.moves_of(pb.Moves.FromString(messages.moves_message("t", moves).SerializeToString())) == moves
    sent = messages.frostline_message("t", line)
    assert (messages.frostline_of(pb.Frostline.FromString(sent.SerializeToString())), sent.table) == (line, "t")
    stats = messages.stats_message("t", STATS)
    assert messages.stats_of(pb.TableMaskInfo.FromString(stats.SerializeToString())) == STATS


def test_row_ids_to_delete_and_what_was_there_survive_the_wire() -> None:
    ids = {"t": np.array([-(2**63), 7, 2**63 - 1]), "none": np.empty(0, np.int64)}
    sent = pb.DeleteRows.FromString(messages.delete_rows_message(ids, True, 3).SerializeToString())
    assert (sent.is_last, sent.slice) == (True, 3)
    got = messages.ids_to_delete(sent)
    assert list(got) == ["t", "none"]
    assert all(np.array_equal(got[name], ids[name]) for name in ids)
    erased = Erased(1, 2, 3, 2**40)
    assert messages.erased_of(pb.ErasedRows.FromString(messages.erased_message("t", erased).SerializeToString())) == (
        erased
    )
    for wrong in (
        pb.DeleteRows(tables=[pb.TableIds(table="t", num_rows=2)], row_ids=b"12345678"),
        pb.DeleteRows(tables=[pb.TableIds(table="t", num_rows=1)], row_ids=b"1234567"),
        pb.DeleteRows(tables=[pb.TableIds(table="t", num_rows=1)] * 2, row_ids=b"1234567812345678"),
    ):
        with pytest.raises(InvalidInput, match="send 8 bytes a row, and each table once"):
            messages.ids_to_delete(wrong)
    assert messages.ids_to_delete(pb.DeleteRows()) == {}


def test_histograms_survive_the_wire() -> None:
    counts = np.arange(NUM_RANK_BINS)
    sent = messages.histogram_message("t", HeatHistogram(counts, 5, 6, counts // 2))
    got = messages.histogram_of(pb.HeatHistogram.FromString(sent.SerializeToString()))
    assert (got.rows_total, got.rows_probation) == (5, 6)
    assert np.array_equal(got.counts, counts)
    assert np.array_equal(got.counts_hot, counts // 2)


@pytest.mark.parametrize("line", [None, Frostline(0), Frostline(9, 0.5)])
def test_mask_info_survives_the_wire(line: Frostline | None) -> None:
    info = MaskInfo(STATS, line, np.arange(64), np.arange(64)[::-1], 8, 6)
    sent = messages.mask_info_message("t", info).SerializeToString()
    got = messages.mask_info_of(pb.TableMaskInfo.FromString(sent))
    assert (got.stats, got.frostline, got.topk_overlap) == (STATS, line, 0.75)
    assert np.array_equal(got.heat_counts_hot, np.arange(64))
    assert np.array_equal(got.heat_counts_frozen, np.arange(64)[::-1])


def test_mask_info_of_a_server_that_counted_no_heat_reads_as_zeros() -> None:
    got = messages.mask_info_of(messages.stats_message("t", STATS))
    assert got.frostline is None
    assert np.isnan(got.topk_overlap)
    assert not got.heat_counts_hot.any()
    assert not got.heat_counts_frozen.any()
