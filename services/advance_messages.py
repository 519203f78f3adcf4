"""Messages of Advance, GetCutProgress and GetMaskInfo from and to the dataclasses of embedding_server.store.

int64 arrays travel as little-endian bytes; an array that is not there is empty bytes and reads as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.store import (
    NUM_HEAT_BANDS,
    CutProgress,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    TableStats,
)
from frostline.v1 import embedding_pb2 as pb

_STATS = tuple(TableStats.__dataclass_fields__)


def _bytes(counts: np.ndarray) -> bytes:
    return np.ascontiguousarray(counts, "<i8").tobytes()


def _counts(data: bytes, length: int | None = None) -> np.ndarray:
    return np.frombuffer(data, "<i8").astype(np.int64) if data or length is None else np.zeros(length, np.int64)


def caller_message(who: Identity) -> pb.Caller:
    return pb.Caller(job=who.job, epoch=who.epoch, worker=who.worker)


def identity_of(message: pb.Caller) -> Identity:
    return Identity(message.job, message.epoch, message.worker)


def frostline_message(table: str, line: Frostline) -> pb.Frostline:
    return pb.Frostline(table=table, **asdict(line))


def frostline_of(message: pb.Frostline) -> Frostline:
    return Frostline(message.bin, message.tie_fraction, message.margin_bins, message.held_fraction)


def histogram_message(table: str, heat: HeatHistogram) -> pb.HeatHistogram:
    return pb.HeatHistogram(
        table=table,
        counts=_bytes(heat.counts),
        rows_total=heat.rows_total,
        rows_probation=heat.rows_probation,
        counts_hot=_bytes(heat.counts_hot),
    )


def histogram_of(message: pb.HeatHistogram) -> HeatHistogram:
    counts, counts_hot = _counts(message.counts), _counts(message.counts_hot)
    return HeatHistogram(counts, message.rows_total, message.rows_probation, counts_hot)


def moves_message(table: str, moves: Moves) -> pb.Moves:
    return pb.Moves(table=table, **asdict(moves))


def moves_of(message: pb.Moves) -> Moves:
    return Moves(message.frozen, message.thawed, message.unfreezable, message.forgotten)


def delete_rows_message(ids: Mapping[str, np.ndarray], is_last: bool, number: int) -> pb.DeleteRows:
    return pb.DeleteRows(
        tables=[pb.TableIds(table=name, num_rows=len(row_ids)) for name, row_ids in ids.items()],
        row_ids=b"".join(_bytes(row_ids) for row_ids in ids.values()),
        is_last=is_last,
        slice=number,
    )


def ids_to_delete(message: pb.DeleteRows) -> dict[str, np.ndarray]:
    """row_ids int64[n] by table. InvalidInput if the message does not fit itself."""
    row_ids = np.frombuffer(message.row_ids, "<i8") if len(message.row_ids) % 8 == 0 else np.empty(0, np.int64)
    ends = np.cumsum([table.num_rows for table in message.tables], dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    names = [table.table for table in message.tables]
    if 8 * total != len(message.row_ids) or len(set(names)) != len(names):
        raise InvalidInput(
            f"DeleteRows: {len(message.row_ids)} bytes of row_ids for {total} rows of tables {names[:10]}; send 8 bytes"
            " a row, and each table once"
        )
    parts = np.split(row_ids.astype(np.int64), ends)[:-1]  # the last is what is behind all tables: nothing
    return dict(zip(names, parts, strict=True))


def erased_message(table: str, erased: Erased) -> pb.ErasedRows:
    return pb.ErasedRows(table=table, **asdict(erased))


def erased_of(message: pb.ErasedRows) -> Erased:
    return Erased(message.hot, message.frozen, message.waiting, message.unknown)


def progress_message(progress: CutProgress) -> pb.GetCutProgressResponse:
    return pb.GetCutProgressResponse(
        step=progress.step,
        done=progress.is_done,
        error=progress.error or "",
        bytes_written=progress.bytes_written,
        rows=progress.rows,
    )


def progress_of(message: pb.GetCutProgressResponse) -> CutProgress:
    return CutProgress(message.step, message.done, message.error or None, message.bytes_written, message.rows)


def stats_message(table: str, stats: TableStats) -> pb.TableMaskInfo:
    return pb.TableMaskInfo(table=table, **asdict(stats))


def stats_of(message: pb.TableMaskInfo) -> TableStats:
    return TableStats(**{name: getattr(message, name) for name in _STATS})


def mask_info_message(table: str, info: MaskInfo) -> pb.TableMaskInfo:
    message = stats_message(table, info.stats)
    if info.frostline is not None:
        message.frostline.CopyFrom(frostline_message(table, info.frostline))
    message.heat_counts_hot = _bytes(info.heat_counts_hot)
    message.heat_counts_frozen = _bytes(info.heat_counts_frozen)
    message.rows_ranked, message.rows_ranked_before = info.rows_ranked, info.rows_ranked_before
    return message


def mask_info_of(message: pb.TableMaskInfo) -> MaskInfo:
    return MaskInfo(
        stats_of(message),
        frostline_of(message.frostline) if message.HasField("frostline") else None,
        _counts(message.heat_counts_hot, NUM_HEAT_BANDS),
        _counts(message.heat_counts_frozen, NUM_HEAT_BANDS),
        message.rows_ranked,
        message.rows_ranked_before,
    )
