"""RemoteStore: an EmbeddingStore whose shards are servers, reached over gRPC.

One message goes to every shard at once; beyond tensor_codec.MAX_PAYLOAD_BYTES a call goes in rounds, one part to each
shard a round. What can be checked here is checked before anything is sent, so that a faulty batch reaches no shard.

Shapes: n row_ids of one table, D its dim, S shards.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from embedding_server.erasure import check_ids_to_delete
from embedding_server.errors import FencedEpoch, FrostlineError, InvalidInput, NotReady, TableConflict, UnknownTable
from embedding_server.lookup import TableQuery
from embedding_server.shard import ShardGradients
from embedding_server.spec import TableSpec, differing_fields
from embedding_server.store import (
    NUM_BUCKETS,
    WIRE_NUMPY,
    CutProgress,
    EmbeddingStore,
    EpochInfo,
    Erased,
    Frostline,
    HeatHistogram,
    Identity,
    MaskInfo,
    Moves,
    PushAck,
    RoutedIds,
    Rows,
    StoreStats,
    TableGradients,
    TableStats,
    UpdateMode,
    WireDtype,
    WireStats,
    push_dtype,
)
from frostline.v1 import embedding_pb2 as pb
from services import lookup_codec, shard_cuts, shard_tables, tensor_codec
from services.advance_messages import (
    caller_message,
    frostline_message,
    histogram_of,
    mask_info_of,
    moves_of,
    stats_of,
)
from services.allocator import set_allocator
from services.batch_checks import check_gradients, check_ids
from services.parts import Piece, split
from services.security_options import Credentials
from services.shard_channel import CallTimes, ShardChannel, call_all, call_each

#: attempts to find an epoch above that of a competing worker group
MAX_EPOCH_ATTEMPTS = 5
UPDATE_MODES: dict[UpdateMode, pb.UpdateMode] = {
    "sync": pb.UPDATE_MODE_SYNC,
    "pipelined": pb.UPDATE_MODE_PIPELINED,
}

M = TypeVar("M", bound=Message)


class RemoteStore(EmbeddingStore):
    """Shards at `addresses` ("host:port"), in any order; together they must own every bucket once.

    Thread safety: every method may be called from any thread; `_lock` guards `_wire` and `_specs`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        wire_dtype: WireDtype = "float32",
        times: CallTimes | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Connects. StoreUnavailable if a shard cannot be reached, InvalidInput if they do not fit together.

        Sets glibc's allocator for this process (allocator.py): large messages cost three times as much without.
        """
        set_allocator()
        if wire_dtype not in WIRE_NUMPY:
            raise InvalidInput(f"wire_dtype={wire_dtype!r} is not one of {', '.join(WIRE_NUMPY)}")
        if not addresses:
            raise InvalidInput("no addresses of shards; name at least one host:port")
        self.wire_dtype = wire_dtype
        self.num_shards = len(addresses)
        self._lock = threading.Lock()
        self._wire = WireStats()
        self._specs: dict[str, TableSpec] = {}
        times = times or CallTimes()
        self._channels = [ShardChannel(i, address, times, credentials) for i, address in enumerate(addresses)]
        try:
            described = self._describe()
            self.shard_of_bucket = _shard_of_bucket(self._channels, described)
            self._specs = _parse_tables(described[0])
        except BaseException:
            self.close()
            raise

    # --- tables and epochs ---

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        for channel, reply in zip(self._channels, self._describe(), strict=True):
            _check_conflicts(channel, _parse_tables(reply), specs)
        request = pb.CreateTablesRequest(spec_json=[spec.model_dump_json() for spec in specs])
        self._call("EmbeddingShard/CreateTables", request, pb.CreateTablesResponse)
        self.table_specs()

    def table_specs(self) -> dict[str, TableSpec]:
        specs = _parse_tables(self._describe()[0])
        with self._lock:
            self._specs = specs
        return dict(specs)

    def begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int | None = None, *, will_restore: bool = False
    ) -> EpochInfo:
        if mode not in UPDATE_MODES:
            raise InvalidInput(f"job {job!r}: mode={mode!r} must be 'sync' or 'pipelined'")
        for _ in range(MAX_EPOCH_ATTEMPTS - 1):
            try:
                return self._begin_epoch(job, num_workers, mode, epoch, will_restore)
            except FencedEpoch:
                if epoch is not None:
                    raise
        return self._begin_epoch(job, num_workers, mode, epoch, will_restore)

    def _begin_epoch(
        self, job: str, num_workers: int, mode: UpdateMode, epoch: int | None, will_restore: bool
    ) -> EpochInfo:
        known = self._call("EmbeddingShard/GetEpoch", pb.GetEpochRequest(job=job), pb.GetEpochResponse)
        if not will_restore:
            self._check_same_history(job, [reply.last_step for reply in known])
        if epoch is None:
            epoch = max(reply.epoch for reply in known) + 1
        request = pb.BeginEpochRequest(
            job=job,
            num_workers=num_workers,
            mode=UPDATE_MODES[mode],
            epoch=epoch,
            token=uuid.uuid4().hex,
            will_restore=will_restore,
        )
        replies = self._call("EmbeddingShard/BeginEpoch", request, pb.BeginEpochResponse)
        return EpochInfo(epoch, min(reply.last_step for reply in replies))

    def _check_same_history(self, job: str, last_steps: list[int]) -> None:
        """NotReady if a shard is steps behind: a worker has one push in flight, so it has lost rows, not missed one."""
        behind, ahead = min(last_steps), max(last_steps)
        if ahead - behind > 1:
            lost = self._channels[last_steps.index(behind)].name
            raise NotReady(
                f"job {job!r}: {lost} is at step {behind} while another shard is at step {ahead}: it restarted without "
                "its rows, and going on would train a torn table; restore a snapshot, or start the job anew on fresh"
                " shards"
            )

    def drop_tables(self, who: Identity, step: int, names: Sequence[str]) -> None:
        existing = [[table.name for table in reply.tables] for reply in self._describe()]
        try:
            shard_tables.drop_tables(self._channels, who, step, names, existing)
        finally:
            self.table_specs()

    def meet(self, who: Identity, step: int, number: int, topic: str, words: str = "") -> list[str]:
        return shard_tables.meet(self._channels, who, step, number, topic, words)

    # --- rows ---

    def pull(self, who: Identity, step: int, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        plans = self._plan_read("Pull", ids, tensor_codec.MAX_PARTS)

        def encode(pieces: list[Piece], part: int, num_parts: int) -> bytes:
            return tensor_codec.encode_pull(who, step, self.wire_dtype, _slices(ids, pieces), part, num_parts)

        rows = self._read("EmbeddingShard/Pull", tensor_codec.decode_rows, ids, plans, encode)
        self._count(
            WireStats(
                bytes_pulled=sum(8 * len(r.flags) + r.values.nbytes + r.flags.nbytes for r in rows.values()),
                rows_pulled=sum(len(r.flags) for r in rows.values()),
            )
        )
        return rows

    def lookup(self, ids: Mapping[str, RoutedIds]) -> dict[str, Rows]:
        # A look-up has no parts: each message is a call of its own, so their number has no bound.
        plans = self._plan_read("Lookup", ids, max_parts=1 << 62)

        def encode(pieces: list[Piece], part: int, num_parts: int) -> bytes:
            queries = [TableQuery(name, row_ids) for name, row_ids in _slices(ids, pieces).items()]
            return lookup_codec.encode_lookup(self.wire_dtype, queries)

        plans = [[] if plan == [[]] else plan for plan in plans]
        return self._read("EmbeddingLookup/Lookup", lookup_codec.decode_rows, ids, plans, encode)

    def prefetch(self, ids: Mapping[str, RoutedIds]) -> None:
        plans = self._plan_read("Prefetch", ids, max_parts=1 << 62, reply_bytes=False)
        for channel, plan in zip(self._channels, plans, strict=True):
            for pieces in plan:
                if pieces:
                    channel.hint("EmbeddingShard/Prefetch", tensor_codec.encode_prefetch(_slices(ids, pieces)))

    def _plan_read(
        self, call: str, ids: Mapping[str, RoutedIds], max_parts: int, *, reply_bytes: bool = True
    ) -> list[list[list[Piece]]]:
        """Messages of pieces for each shard, none without rows on it. reply_bytes: the replies hold the rows."""
        itemsize = WIRE_NUMPY[self.wire_dtype].itemsize
        dims = self._dims(ids)
        for name, routed in ids.items():
            check_ids(name, routed, self.num_shards)
        plans = []
        for shard in range(self.num_shards):
            pieces = [
                (Piece(name, int(routed.shard_offsets[shard]), int(routed.shard_offsets[shard + 1])), dims[name])
                for name, routed in ids.items()
            ]
            present = [
                (piece, 8 + reply_bytes * (1 + dim * itemsize)) for piece, dim in pieces if piece.stop > piece.start
            ]
            plans.append(split(call, present, max_parts=max_parts))
        return plans

    def _read(
        self,
        method: str,
        decode: Callable[[bytes], dict[str, Rows]],
        ids: Mapping[str, RoutedIds],
        plans: list[list[list[Piece]]],
        encode: Callable[[list[Piece], int, int], bytes],
    ) -> dict[str, Rows]:
        """Sends the plans round by round and puts the replies together in the order of `ids`."""
        if plans == [[[Piece(name, 0, len(routed.row_ids)) for name, routed in ids.items()]]]:
            # One message holds everything in order: its rows are handed on where they lie.
            reply = call_all(method, [(self._channels[0], encode(plans[0][0], 0, 1))])[0]
            return _checked_rows(method, decode(reply), plans[0][0])
        dtype = WIRE_NUMPY[self.wire_dtype]
        dims = self._dims(ids)
        rows = {
            name: Rows(np.empty((len(i.row_ids), dims[name]), dtype), np.empty(len(i.row_ids), np.uint8))
            for name, i in ids.items()
        }
        for part in range(max(map(len, plans))):
            sent = [(shard, plan[part], len(plan)) for shard, plan in enumerate(plans) if part < len(plan)]
            requests = [(self._channels[shard], encode(pieces, part, num)) for shard, pieces, num in sent]
            for number, reply in call_each(method, requests):
                pieces = sent[number][1]
                got = _checked_rows(method, decode(reply), pieces)
                for piece in pieces:
                    rows[piece.table].values[piece.start : piece.stop] = got[piece.table].values
                    rows[piece.table].flags[piece.start : piece.stop] = got[piece.table].flags
        return rows

    def push(self, who: Identity, step: int, gradients: Mapping[str, TableGradients]) -> PushAck:
        wire = push_dtype(self.wire_dtype)
        dims = self._dims(gradients)
        for name, table in gradients.items():
            check_gradients(name, dims[name], table, wire, self.num_shards)
        plans = [self._plan_push(shard, gradients, dims, wire) for shard in range(self.num_shards)]
        acks: list[pb.PushResponse] = [pb.PushResponse()] * self.num_shards
        for part in range(max(map(len, plans))):
            sent = [shard for shard, plan in enumerate(plans) if part < len(plan)]
            requests = []
            for shard in sent:
                pieces = _push_pieces(gradients, plans[shard], part)
                message = tensor_codec.encode_push(who, step, wire, pieces, part, len(plans[shard]))
                requests.append((self._channels[shard], message))
            for shard, reply in zip(sent, call_all("EmbeddingShard/Push", requests), strict=True):
                acks[shard] = pb.PushResponse.FromString(reply)
        self._count(
            WireStats(
                bytes_pushed=sum(8 * len(g.values) + g.values.nbytes for g in gradients.values()),
                rows_pushed=sum(len(g.values) for g in gradients.values()),
            )
        )
        return PushAck(
            step,
            sum(ack.rows_applied for ack in acks),
            sum(ack.rows_ignored for ack in acks),
            all(ack.duplicate for ack in acks),
        )

    def _plan_push(
        self, shard: int, gradients: Mapping[str, TableGradients], dims: Mapping[str, int], wire: WireDtype
    ) -> list[list[Piece]]:
        """Messages of pieces for one shard. A table with a default gradient is there even without rows, and so is one
        with weight decay: its learning rate counts on every shard."""
        itemsize = WIRE_NUMPY[wire].itemsize
        pieces = []
        for name, table in gradients.items():
            offsets = table.ids.shard_offsets
            piece = Piece(name, int(offsets[shard]), int(offsets[shard + 1]))
            decays = self._specs[name].optimizer.weight_decay > 0
            if piece.stop > piece.start or table.default_gradient is not None or decays:
                pieces.append((piece, 8 + dims[name] * itemsize))
        return split("Push", pieces)

    # --- re-selection ---

    def heat_histograms(self, who: Identity, step: int) -> dict[str, HeatHistogram]:
        total: dict[str, HeatHistogram] = {}
        waiting = [(channel, 0) for channel in self._channels]
        while waiting:
            replies = call_all("EmbeddingShard/Advance", [(c, _collect_heat(who, step, first)) for c, first in waiting])
            answers = [pb.AdvanceResponse.FromString(reply) for reply in replies]
            for heat in (heat for answer in answers for heat in answer.histograms):
                part = histogram_of(heat)
                total[heat.table] = total[heat.table] + part if heat.table in total else part
            waiting = [(c, a.next_bucket) for (c, _), a in zip(waiting, answers, strict=True) if not a.done]
        return total

    def reselect(self, who: Identity, step: int, frostlines: Mapping[str, Frostline]) -> dict[str, Moves]:
        lines = [frostline_message(name, line) for name, line in frostlines.items()]

        def request(number: int) -> pb.AdvanceRequest:
            action = pb.Reselect(frostlines=lines, slice=number)
            return pb.AdvanceRequest(caller=caller_message(who), step=step, reselect=action)

        return self._advance(request)

    def end_data_pass(self, who: Identity, step: int) -> dict[str, Moves]:
        def request(number: int) -> pb.AdvanceRequest:
            return pb.AdvanceRequest(caller=caller_message(who), step=step, end_data_pass=pb.EndDataPass(slice=number))

        return self._advance(request)

    def _advance(self, request: Callable[[int], pb.AdvanceRequest]) -> dict[str, Moves]:
        """Sends slice after slice to every shard until it is done."""
        total: dict[str, Moves] = {}
        waiting, number = self._channels, 0
        while waiting:
            message = request(number).SerializeToString()
            replies = call_all("EmbeddingShard/Advance", [(channel, message) for channel in waiting])
            answers = [pb.AdvanceResponse.FromString(reply) for reply in replies]
            for move in (move for answer in answers for move in answer.moves):
                total[move.table] = total.get(move.table, Moves()) + moves_of(move)
            waiting = [channel for channel, answer in zip(waiting, answers, strict=True) if not answer.done]
            number += 1
        return total

    def delete_rows(self, who: Identity, step: int, ids: Mapping[str, np.ndarray]) -> dict[str, Erased]:
        check_ids_to_delete(ids)
        self._dims(ids)
        return shard_tables.delete_rows(self._channels, who, step, ids)

    # --- cuts ---

    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        shard_cuts.begin_cut(self._channels, who, step, folder, parent)

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        return shard_cuts.cut_progress(self._channels, who)

    def abandon_cut(self, who: Identity) -> None:
        shard_cuts.abandon_cut(self._channels, who)

    def restore(self, who: Identity, folder: str, anew: Collection[str] = ()) -> None:
        shard_cuts.restore(self._channels, who, folder, anew)

    # --- statistics ---

    def stats(self) -> StoreStats:
        tables: dict[str, TableStats] = {}
        events: list[str] = []
        for reply in self._call("EmbeddingShard/GetMaskInfo", pb.GetMaskInfoRequest(), pb.GetMaskInfoResponse):
            for info in reply.tables:
                tables[info.table] = tables.get(info.table, TableStats()) + stats_of(info)
            events.extend(reply.events)
        return StoreStats(tables, events[-100:])

    def mask_info(self) -> dict[str, MaskInfo]:
        total: dict[str, MaskInfo] = {}
        waiting = [(channel, 0) for channel in self._channels]
        while waiting:
            requests = [(c, pb.GetMaskInfoRequest(with_heat=True, first_bucket=first)) for c, first in waiting]
            replies = call_all("EmbeddingShard/GetMaskInfo", [(c, r.SerializeToString()) for c, r in requests])
            answers = [pb.GetMaskInfoResponse.FromString(reply) for reply in replies]
            for info in (info for answer in answers for info in answer.tables):
                part = mask_info_of(info)
                total[info.table] = total[info.table] + part if info.table in total else part
            waiting = [(c, a.next_bucket) for (c, _), a in zip(waiting, answers, strict=True) if a.next_bucket]
        return total

    @property
    def wire_stats(self) -> WireStats:
        with self._lock:
            return self._wire

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    # --- shared ---

    def _count(self, more: WireStats) -> None:
        with self._lock:
            self._wire = self._wire + more

    def _call(self, method: str, request: Message, cls: type[M]) -> list[M]:
        """The same request to every shard."""
        data = request.SerializeToString()
        return [cls.FromString(reply) for reply in call_all(method, [(channel, data) for channel in self._channels])]

    def _describe(self) -> list[pb.DescribeTablesResponse]:
        return self._call("EmbeddingShard/DescribeTables", pb.DescribeTablesRequest(), pb.DescribeTablesResponse)

    def _dims(self, tables: Mapping[str, object]) -> dict[str, int]:
        """Dim of each table; asks the shards once about names not seen so far. Raises UnknownTable."""
        specs = self._specs
        if any(name not in specs for name in tables):
            specs = self.table_specs()
        for name in tables:
            if name not in specs:
                known = ", ".join(sorted(specs)[:10]) or "none"
                raise UnknownTable(f"table {name!r} does not exist (tables: {known}); create it with create_tables")
        return {name: specs[name].dim for name in tables}


def _collect_heat(who: Identity, step: int, first_bucket: int) -> bytes:
    action = pb.CollectHeat(first_bucket=first_bucket)
    return pb.AdvanceRequest(caller=caller_message(who), step=step, collect_heat=action).SerializeToString()


def _slices(ids: Mapping[str, RoutedIds], pieces: list[Piece]) -> dict[str, np.ndarray]:
    return {piece.table: ids[piece.table].row_ids[piece.start : piece.stop] for piece in pieces}


def _push_pieces(
    gradients: Mapping[str, TableGradients], plan: list[list[Piece]], part: int
) -> dict[str, ShardGradients]:
    """The gradients of one message. A default gradient goes with the table's first rows on the shard."""
    # A table that began in an earlier part was its last one.
    begun = plan[part - 1][-1].table if part and plan[part - 1] else None
    tables = {}
    for piece in plan[part]:
        table = gradients[piece.table]
        default = table.default_gradient if piece.table != begun else None
        rows = slice(piece.start, piece.stop)
        tables[piece.table] = ShardGradients(table.ids.row_ids[rows], table.values[rows], table.learning_rate, default)
    return tables


def _checked_rows(method: str, rows: dict[str, Rows], pieces: list[Piece]) -> dict[str, Rows]:
    """The rows of a reply. Raises FrostlineError unless they answer exactly `pieces`."""
    wanted = {piece.table: piece.stop - piece.start for piece in pieces}
    got = {name: len(table.flags) for name, table in rows.items()}
    if got != wanted:
        raise FrostlineError(f"{method}: rows by table {got} answer a request for {wanted}; a shard is at fault")
    return rows


def _parse_tables(reply: pb.DescribeTablesResponse) -> dict[str, TableSpec]:
    return {table.name: TableSpec.model_validate_json(table.spec_json) for table in reply.tables}


def _check_conflicts(channel: ShardChannel, known: Mapping[str, TableSpec], specs: Sequence[TableSpec]) -> None:
    """Raises TableConflict before any shard has created anything."""
    for spec in specs:
        if spec.name in known and known[spec.name] != spec:
            raise TableConflict(
                f"{channel.name}: table {spec.name!r} exists with another spec"
                f" ({differing_fields(known[spec.name], spec)}); "
                "use the same spec or another name"
            )


def _shard_of_bucket(channels: Sequence[ShardChannel], described: Sequence[pb.DescribeTablesResponse]) -> np.ndarray:
    """int32[NUM_BUCKETS]. Raises InvalidInput unless the shards own every bucket exactly once."""
    owner = np.full(NUM_BUCKETS, -1, np.int32)
    for channel, reply in zip(channels, described, strict=True):
        if reply.num_buckets != NUM_BUCKETS:
            raise InvalidInput(
                f"{channel.name} counts {reply.num_buckets} buckets, this client {NUM_BUCKETS}; update one"
            )
        for owned in reply.buckets:
            taken = owner[owned.first : owned.last + 1]
            if (taken >= 0).any():
                bucket = owned.first + int(np.flatnonzero(taken >= 0)[0])
                other = channels[owner[bucket]].name
                raise InvalidInput(
                    f"{channel.name} and {other} both own bucket {bucket}; start each with its own --shard-index, and "
                    "list each address once"
                )
            taken[:] = channel.index
    if (owner < 0).any():
        bucket = int(np.flatnonzero(owner < 0)[0])
        raise InvalidInput(f"no shard of {len(channels)} owns bucket {bucket}; list the addresses of all shards")
    return owner
