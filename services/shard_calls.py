"""What each call of a shard server does, as plain functions on a Shard. They run on the executor thread.

Messages in, messages out; errors are those of embedding_server.errors. Pull and Push are not here: their servicer
methods call the Shard directly, because their messages are framed by tensor_codec.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

from google.protobuf.message import Message
from pydantic import ValidationError

from embedding_server.errors import InvalidInput
from embedding_server.shard import Shard
from embedding_server.spec import TableSpec
from embedding_server.store import NUM_BUCKETS, Identity, Moves, UpdateMode
from frostline.v1 import embedding_pb2 as pb
from services.advance_messages import (
    erased_message,
    frostline_of,
    histogram_message,
    identity_of,
    ids_to_delete,
    mask_info_message,
    moves_message,
    progress_message,
    stats_message,
)
from services.lookup_calls import bucket_ranges, table_message
from services.snapshot_paths import SnapshotPaths

#: (call, job) pairs whose last answer is remembered; calls: BeginEpoch, Advance, Restore
MAX_JOBS_ANSWERED = 64

M = TypeVar("M", bound=Message)

UPDATE_MODES: dict[int, UpdateMode] = {pb.UPDATE_MODE_SYNC: "sync", pb.UPDATE_MODE_PIPELINED: "pipelined"}


class LastAnswers:
    """The last answer per (call, job), so that a repeat after a lost acknowledgement gets it again.

    Thread safety: none; the executor thread alone uses it.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], tuple[tuple, Message]] = OrderedDict()

    def find(self, call: str, job: str, request: tuple) -> Message | None:
        answered, answer = self._answers.get((call, job), ((), None))
        return answer if answered == request else None

    def keep(self, call: str, job: str, request: tuple, answer: Message) -> None:
        self._answers[call, job] = (request, answer)
        self._answers.move_to_end((call, job))
        if len(self._answers) > MAX_JOBS_ANSWERED:
            self._answers.popitem(last=False)

    def forget(self, call: str, job: str) -> None:
        self._answers.pop((call, job), None)


def describe_tables(shard: Shard) -> pb.DescribeTablesResponse:
    tables = [table_message(spec) for spec in shard.table_specs().values()]
    return pb.DescribeTablesResponse(tables=tables, buckets=bucket_ranges(shard.buckets), num_buckets=NUM_BUCKETS)


def parse_specs(texts: Sequence[str]) -> list[TableSpec]:
    """Raises InvalidInput with the first broken rule."""
    specs = []
    for text in texts:
        try:
            specs.append(TableSpec.model_validate_json(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            name = f"table spec {text[:200]}"
            raise InvalidInput(f"CreateTables: {name}: {where + ': ' if where else ''}{first['msg']}") from error
    return specs


def create_tables(shard: Shard, request: pb.CreateTablesRequest) -> pb.CreateTablesResponse:
    shard.create_tables(parse_specs(request.spec_json))
    return pb.CreateTablesResponse()


def get_epoch(shard: Shard, request: pb.GetEpochRequest) -> pb.GetEpochResponse:
    info = shard.current_epoch(request.job)
    return pb.GetEpochResponse(epoch=info.epoch, last_step=info.last_step)


def begin_epoch(
    shard: Shard, answers: LastAnswers, request: pb.BeginEpochRequest, max_workers: int
) -> pb.BeginEpochResponse:
    """A repeat with the same token gets the first answer: its acknowledgement was lost."""
    if request.mode not in UPDATE_MODES:
        raise InvalidInput(f"BeginEpoch: job {request.job!r}: mode={request.mode} must be sync (1) or pipelined (2)")
    if request.num_workers > max_workers:
        raise InvalidInput(
            f"BeginEpoch: job {request.job!r}: num_workers={request.num_workers} is above {max_workers}, a quarter of "
            "the calls that this shard takes at once; start the shards with a higher max_calls"
        )
    key = (request.token, request.epoch)
    answer = answers.find("BeginEpoch", request.job, key) if request.token else None
    if answer is None:
        mode = UPDATE_MODES[request.mode]
        info = shard.begin_epoch(request.job, request.num_workers, mode, request.epoch, request.will_restore)
        answer = pb.BeginEpochResponse(epoch=info.epoch, last_step=info.last_step)
        answers.keep("BeginEpoch", request.job, key, answer)
        for call in ("AdvanceRequest", "RestoreRequest"):
            answers.forget(call, request.job)  # they are fenced
    return answer


def advance(shard: Shard, answers: LastAnswers, paths: SnapshotPaths, request: pb.AdvanceRequest) -> pb.AdvanceResponse:
    action = request.WhichOneof("action")
    who = identity_of(request.caller)
    step = request.step
    if action == "collect_heat":
        return _collect_heat(shard, who, step, request.collect_heat.first_bucket)
    if action == "reselect":
        lines = {line.table: frostline_of(line) for line in request.reselect.frostlines}
        return _next_slice(answers, request, lambda: _moves_answer(*shard.reselect(who, step, lines)))
    if action == "end_data_pass":
        return _next_slice(answers, request, lambda: _moves_answer(*shard.end_data_pass(who, step)))
    if action == "begin_cut":  # a shard knows a repeat itself, and begins a cut anew that failed or is gone
        return _begin_cut(shard, paths, who, step, request.begin_cut)
    if action == "delete_rows":
        return _next_slice(answers, request, lambda: _delete_rows(shard, who, step, request.delete_rows))
    if action == "drop_tables":
        names = list(request.drop_tables.tables)
        return _next_slice(answers, request, lambda: pb.AdvanceResponse(done=shard.drop_tables(who, step, names)))
    raise InvalidInput(
        "Advance: the request has no action; set collect_heat, reselect, end_data_pass, begin_cut, delete_rows or"
        " drop_tables"
    )


def _collect_heat(shard: Shard, who: Identity, step: int, first_bucket: int) -> pb.AdvanceResponse:
    parts, bucket = shard.heat_slice(who, step, first_bucket)
    done = bucket == NUM_BUCKETS
    return pb.AdvanceResponse(
        histograms=[histogram_message(name, heat) for name, heat in parts.items()],
        done=done,
        next_bucket=0 if done else bucket,
    )


def _moves_answer(moves: dict[str, Moves], done: bool) -> pb.AdvanceResponse:
    return pb.AdvanceResponse(moves=[moves_message(name, move) for name, move in moves.items()], done=done)


def _delete_rows(shard: Shard, who: Identity, step: int, action: pb.DeleteRows) -> pb.AdvanceResponse:
    erased, done = shard.delete_rows(who, step, ids_to_delete(action), is_last=action.is_last)
    return pb.AdvanceResponse(erased=[erased_message(name, rows) for name, rows in erased.items()], done=done)


def _begin_cut(shard: Shard, paths: SnapshotPaths, who: Identity, step: int, action: pb.BeginCut) -> pb.AdvanceResponse:
    index, count = action.shard_index, action.num_shards
    if not 0 <= index < count <= NUM_BUCKETS:
        raise InvalidInput(
            f"Advance: shard_index={index} of num_shards={count}: at most {NUM_BUCKETS} shards, which count from 0"
        )
    folder = paths.checked("Advance", action.folder)
    parent = paths.checked("Advance", action.parent) if action.parent else None
    return pb.AdvanceResponse(done=shard.begin_cut(who, step, folder, index, count, parent))


def _next_slice(answers: LastAnswers, request: pb.AdvanceRequest | pb.RestoreRequest, work: Callable[[], M]) -> M:
    """Does a slice, unless the request repeats the last one. Requests differ by the number of their slice."""
    call, job = request.DESCRIPTOR.name, request.caller.job
    key = (request.SerializeToString(deterministic=True),)
    known = answers.find(call, job, key)
    if known is not None:
        return cast(M, known)
    answer = work()
    answers.keep(call, job, key, answer)
    return answer


def meet(shard: Shard, request: pb.MeetRequest) -> Future[list[str]]:
    who = identity_of(request.caller)
    return shard.meet(who, request.step, request.number, request.topic, request.words)


def cut_progress(shard: Shard, request: pb.GetCutProgressRequest) -> pb.GetCutProgressResponse:
    return progress_message(shard.cut_progress(identity_of(request.caller)))


def abandon_cut(shard: Shard, request: pb.AbandonCutRequest) -> pb.AbandonCutResponse:
    shard.abandon_cut(identity_of(request.caller))
    return pb.AbandonCutResponse()


def restore(shard: Shard, answers: LastAnswers, paths: SnapshotPaths, request: pb.RestoreRequest) -> pb.RestoreResponse:
    def work() -> pb.RestoreResponse:
        return pb.RestoreResponse(
            done=shard.restore(identity_of(request.caller), paths.checked("Restore", request.folder), request.anew)
        )

    return _next_slice(answers, request, work)


def mask_info(shard: Shard, request: pb.GetMaskInfoRequest) -> pb.GetMaskInfoResponse:
    if not request.with_heat:
        stats = shard.stats()
        tables = [stats_message(name, table) for name, table in stats.tables.items()]
        return pb.GetMaskInfoResponse(tables=tables, events=stats.events)
    parts, bucket = shard.mask_slice(request.first_bucket)
    return pb.GetMaskInfoResponse(
        tables=[mask_info_message(name, info) for name, info in parts.items()],
        events=[] if request.first_bucket else shard.stats().events,
        next_bucket=0 if bucket == NUM_BUCKETS else bucket,
    )
