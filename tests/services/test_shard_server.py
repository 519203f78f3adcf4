"""The server as a process sees it: health, reflection, limits, deadlines, waiting calls, repeats, draining."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embedding_server.errors import StoreUnavailable
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import Identity
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services import tensor_codec
from services.admission import Limits
from services.shard_executor import IDLE_MAINTAIN_S, ShardExecutor
from services.shard_server import LOOKUP_SERVICE, SHARD_SERVICE

Serve = Callable[..., list[str]]
SPEC = TableSpec(
    name="t",
    dim=4,
    optimizer=OptimizerSpec(kind="sgd"),
    policy=PolicySpec(kind="topk", frozen_bits=32, probation_visits=0),
    init_min=0.0,
    init_max=0.0,
)
IDS = np.arange(6)
TIMEOUT_S = 20.0


class Worker:
    """Raw calls of worker `number` of job "job"."""

    def __init__(self, channel: grpc.Channel, number: int, epoch: int) -> None:
        self.who = Identity("job", epoch, number)
        self._pull = channel.unary_unary("/frostline.v1.EmbeddingShard/Pull")
        self._push = channel.unary_unary("/frostline.v1.EmbeddingShard/Push")

    def pull(self, step: int, timeout_s: float = TIMEOUT_S, row_ids: np.ndarray = IDS) -> grpc.Future:
        return self._pull.future(tensor_codec.encode_pull(self.who, step, "float32", {"t": row_ids}), timeout=timeout_s)

    def push(self, step: int, timeout_s: float = TIMEOUT_S, value: float = 1.0) -> grpc.Future:
        gradients = ShardGradients(IDS, np.full((len(IDS), 4), value, np.float32), 1.0)
        return self._push.future(
            tensor_codec.encode_push(self.who, step, "float32", {"t": gradients}), timeout=timeout_s
        )


@pytest.fixture
def connect(serve: Serve) -> Iterator[Callable[..., tuple[grpc.Channel, pb_grpc.EmbeddingShardStub]]]:
    channels = []

    def start(**options: object) -> tuple[grpc.Channel, pb_grpc.EmbeddingShardStub]:
        channels.append(grpc.insecure_channel(serve(**options)[0]))
        stub = pb_grpc.EmbeddingShardStub(channels[-1])
        stub.CreateTables(pb.CreateTablesRequest(spec_json=[SPEC.model_dump_json()]))
        return channels[-1], stub

    yield start
    for channel in channels:
        channel.close()


def begin(stub: pb_grpc.EmbeddingShardStub, num_workers: int, epoch: int, token: str = "") -> pb.BeginEpochResponse:
    request = pb.BeginEpochRequest(
        job="job", num_workers=num_workers, mode=pb.UPDATE_MODE_SYNC, epoch=epoch, token=token
    )
    return stub.BeginEpoch(request)


def test_health_and_reflection(serve: Serve) -> None:
    with grpc.insecure_channel(serve()[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SHARD_SERVICE, LOOKUP_SERVICE):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        reply = next(iter(stub.ServerReflectionInfo(iter([request]))))
        names = {service.name for service in reply.list_services_response.service}
        assert {"frostline.v1.EmbeddingShard", "frostline.v1.EmbeddingLookup", "grpc.health.v1.Health"} <= names


def test_every_method_of_the_api_is_served(connect: Callable) -> None:
    channel, _ = connect()
    for name in ("EmbeddingShard", "EmbeddingLookup"):
        service = pb.DESCRIPTOR.services_by_name[name]
        for method in service.methods:
            call = channel.unary_unary(f"/{service.full_name}/{method.name}")
            try:
                call(b"", timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                code = error.code()
            else:
                code = grpc.StatusCode.OK
            assert code not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def test_sync_push_is_acknowledged_when_all_workers_pushed(connect: Callable) -> None:
    channel, stub = connect()
    begin(stub, 2, 1)
    workers = [Worker(channel, number, 1) for number in range(2)]
    for worker in workers:
        worker.pull(1).result()
    first = workers[0].push(1, value=1.0)
    early = workers[0].pull(2)
    time.sleep(0.2)
    assert not first.done()
    assert not early.done()
    ack = pb.PushResponse.FromString(workers[1].push(1, value=3.0).result())
    assert pb.PushResponse.FromString(first.result()) == ack
    rows = tensor_codec.decode_rows(early.result())
    assert (rows["t"].values == -2.0).all()  # the mean of the two


def test_the_deadline_of_a_waiting_call_is_honoured(connect: Callable) -> None:
    channel, stub = connect()
    begin(stub, 2, 1)
    workers = [Worker(channel, number, 1) for number in range(2)]
    for worker in workers:
        worker.pull(1).result()
    late = workers[0].push(1, timeout_s=0.3)
    with pytest.raises(grpc.RpcError) as error:
        late.result()
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # The push counts all the same, and the worker that repeats it gets its acknowledgement.
    again = workers[0].push(1)
    workers[1].push(1).result()
    again.result()
    assert stub.GetEpoch(pb.GetEpochRequest(job="job")).last_step == 1
    rows = tensor_codec.decode_rows(workers[0].pull(2).result())
    assert (rows["t"].values == -1.0).all()


def test_a_new_epoch_frees_waiting_calls(connect: Callable) -> None:
    channel, stub = connect()
    begin(stub, 2, 1)
    worker = Worker(channel, 0, 1)
    worker.pull(1).result()
    waiting = worker.push(1)
    time.sleep(0.1)
    begin(stub, 2, 2)
    with pytest.raises(grpc.RpcError) as error:
        waiting.result()
    assert error.value.code() == grpc.StatusCode.ABORTED


def test_calls_beyond_the_limit_are_pushed_back(serve: Serve, connect: Callable) -> None:
    channel, stub = connect(limits=Limits(max_calls=8, retry_after_ms=40))
    begin(stub, 2, 1)
    worker = Worker(channel, 0, 1)
    worker.pull(1).result()
    waiting = [worker.push(1) for _ in range(8)]
    admission = serve.servers[0]._state.admission  # type: ignore[attr-defined]
    deadline_s = time.monotonic() + TIMEOUT_S
    while admission._calls < 8:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    refused = worker.push(1)
    with pytest.raises(grpc.RpcError) as error:
        refused.result()
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_calls=8" in error.value.details()
    assert dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"] == "40"
    # The small calls still pass: they have threads of their own.
    assert stub.GetEpoch(pb.GetEpochRequest(job="job")).epoch == 1
    other = Worker(channel, 1, 1)
    begin(stub, 2, 2)
    for call in waiting:
        with pytest.raises(grpc.RpcError):
            call.result()
    other.who = Identity("job", 2, 1)
    other.pull(1).result()


def test_bytes_beyond_the_limit_are_pushed_back(serve: Serve, connect: Callable) -> None:
    channel, stub = connect(limits=Limits(max_bytes=10_000))
    begin(stub, 1, 1)
    worker = Worker(channel, 0, 1)
    with serve.servers[0]._state.admission.bytes(9_000):  # type: ignore[attr-defined]
        worker.pull(1).result()
        with pytest.raises(grpc.RpcError) as error:
            worker.pull(1, row_ids=np.arange(100)).result()
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "9000 bytes are in the server" in error.value.details()
        assert "max_bytes=10000" in error.value.details()
    worker.pull(1, row_ids=np.arange(100)).result()


def test_a_waiting_push_keeps_no_bytes(serve: Serve, connect: Callable) -> None:
    channel, stub = connect(limits=Limits(max_bytes=1))
    begin(stub, 2, 1)
    workers = [Worker(channel, number, 1) for number in range(2)]
    for worker in workers:
        worker.pull(1).result()
    waiting = workers[0].push(1)
    time.sleep(0.2)
    assert not waiting.done()
    workers[1].push(1).result()
    waiting.result()


def test_more_workers_than_a_shard_can_serve_are_refused(connect: Callable) -> None:
    _, stub = connect(limits=Limits(max_calls=8))
    with pytest.raises(grpc.RpcError, match="num_workers=3 is above 2"):
        begin(stub, 3, 1)
    assert stub.GetEpoch(pb.GetEpochRequest(job="job")).epoch == 0


def test_a_repeated_begin_epoch_gets_the_same_answer(connect: Callable) -> None:
    _, stub = connect()
    first = begin(stub, 1, 4, token="mine")
    assert begin(stub, 1, 4, token="mine") == first
    for token in ("other", ""):
        with pytest.raises(grpc.RpcError) as error:
            begin(stub, 1, 4, token=token)
        assert error.value.code() == grpc.StatusCode.ABORTED


def test_a_repeated_slice_of_a_reselection_gets_the_same_answer(connect: Callable) -> None:
    channel, stub = connect()
    begin(stub, 1, 1)
    worker = Worker(channel, 0, 1)
    worker.pull(1).result()
    worker.push(1).result()
    who = pb.Caller(job="job", epoch=1, worker=0)
    heat = stub.Advance(pb.AdvanceRequest(caller=who, step=1, collect_heat=pb.CollectHeat())).histograms[0]
    assert (heat.table, heat.rows_total) == ("t", len(IDS))
    counts = np.frombuffer(heat.counts, np.int64)
    assert counts.sum() == len(IDS)
    line = pb.Frostline(table="t", bin=int(np.flatnonzero(counts)[-1]) + 1)
    request = pb.AdvanceRequest(caller=who, step=1, reselect=pb.Reselect(frostlines=[line]))
    frozen = 0
    while True:
        first = stub.Advance(request)
        assert stub.Advance(request) == first
        frozen += sum(move.frozen for move in first.moves)
        if first.done:
            break
        request.reselect.slice += 1
    assert frozen == len(IDS)
    assert stub.GetMaskInfo(pb.GetMaskInfoRequest()).tables[0].rows_frozen == len(IDS)


def test_a_repeated_slice_of_the_end_of_a_data_pass_gets_the_same_answer(connect: Callable) -> None:
    channel, stub = connect()
    policy = PolicySpec(kind="idle", epoch_end="forget_rare", control_fraction=0)
    spec = SPEC.model_copy(update={"name": "rare", "policy": policy})
    stub.CreateTables(pb.CreateTablesRequest(spec_json=[spec.model_dump_json()]))
    begin(stub, 1, 1)
    pull = tensor_codec.encode_pull(Identity("job", 1, 0), 1, "float32", {"rare": IDS})
    channel.unary_unary("/frostline.v1.EmbeddingShard/Pull")(pull, timeout=TIMEOUT_S)
    Worker(channel, 0, 1).push(1).result()
    who = pb.Caller(job="job", epoch=1, worker=0)
    request = pb.AdvanceRequest(caller=who, step=1, end_data_pass=pb.EndDataPass())
    first = stub.Advance(request)
    assert stub.Advance(request) == first
    assert first.done
    assert [(move.table, move.forgotten) for move in first.moves] == [("rare", len(IDS))]
    info = stub.GetMaskInfo(pb.GetMaskInfoRequest())
    assert [(t.rows_hot, t.moves_forgotten) for t in info.tables if t.table == "rare"] == [(0, len(IDS))]


def test_rows_by_heat_come_in_parts_that_add_up(connect: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, stub = connect()
    begin(stub, 1, 1)
    worker = Worker(channel, 0, 1)
    worker.pull(1, row_ids=np.arange(3000)).result()
    worker.push(1).result()
    monkeypatch.setattr("embedding_server.ranking.HISTOGRAM_ENTRIES", 1000)
    counts, bucket, parts = np.zeros(64, np.int64), 0, []
    while bucket or not parts:
        reply = stub.GetMaskInfo(pb.GetMaskInfoRequest(with_heat=True, first_bucket=bucket))
        counts += np.frombuffer(reply.tables[0].heat_counts_hot, np.int64)
        parts.append(reply.tables[0].rows_hot)
        bucket = reply.next_bucket
    assert len(parts) > 2
    assert (parts[0], sum(parts)) == (3000, 3000)
    assert (counts[16], counts.sum()) == (3000, 3000)  # one visit now: heat 1


def test_draining_ends_waiting_calls_and_refuses_new_ones(serve: Serve, connect: Callable) -> None:
    channel, stub = connect()
    begin(stub, 2, 1)
    worker = Worker(channel, 0, 1)
    worker.pull(1).result()
    waiting = worker.push(1)
    time.sleep(0.1)
    started_s = time.monotonic()
    serve.servers[0].stop(grace_s=10.0)  # type: ignore[attr-defined]
    assert time.monotonic() - started_s < 5.0
    with pytest.raises(grpc.RpcError) as error:
        waiting.result()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError):
        worker.pull(1, timeout_s=1.0).result()


def test_two_servers_do_not_share_a_port(serve: Serve) -> None:
    port = int(serve()[0].rpartition(":")[2])
    with pytest.raises(StoreUnavailable, match=rf"cannot listen on 127.0.0.1:{port}"):
        serve(ports=[port])


class CountingShard:
    """What ShardExecutor needs of a Shard: it counts its background slices."""

    is_being_written = False

    def __init__(self) -> None:
        self.slices = 0
        self.is_closed = False

    def maintain(self) -> bool:
        self.slices += 1
        return self.slices % 5 != 0

    def close(self) -> None:
        self.is_closed = True


def test_background_work_runs_while_requests_keep_coming() -> None:
    shard = CountingShard()
    executor = ShardExecutor(shard)  # type: ignore[arg-type]
    results = [executor.run(lambda s: s.slices) for _ in range(1000)]
    assert results[-1].result(TIMEOUT_S) >= 3
    executor.close()
    assert shard.is_closed


def test_what_waits_for_a_write_is_tried_again_soon() -> None:
    class Writing(CountingShard):
        is_being_written = True
        several: Future = Future()

        def maintain(self) -> bool:
            self.slices += 1
            if self.slices == 10:
                self.several.set_result(time.monotonic())
            return False

    start_s = time.monotonic()
    executor = ShardExecutor(Writing())  # type: ignore[arg-type]
    assert Writing.several.result(TIMEOUT_S) - start_s < 9 * IDLE_MAINTAIN_S / 2
    executor.close()


def test_work_whose_caller_has_gone_is_skipped() -> None:
    executor = ShardExecutor(CountingShard())  # type: ignore[arg-type]
    gate: Future = Future()
    ran = []
    executor.run(lambda s: gate.result(TIMEOUT_S))
    gone = executor.run(lambda s: ran.append("gone"))
    kept = executor.run(lambda s: ran.append("kept"))
    assert gone.cancel()
    gate.set_result(None)
    kept.result(TIMEOUT_S)
    assert ran == ["kept"]
    executor.close()


def test_a_failure_of_background_work_is_logged_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CountingShard):
        def maintain(self) -> bool:
            raise OSError("disk full")

    executor = ShardExecutor(Failing())  # type: ignore[arg-type]
    assert executor.run(lambda s: 7).result(TIMEOUT_S) == 7
    executor.close()
    assert "disk full" in caplog.text


def test_the_shards_own_timeout_is_not_the_callers() -> None:
    """A TimeoutError that the shard raises is its own failure, not DEADLINE_EXCEEDED."""
    shard = Shard(memory_limit_bytes=64 << 20, backend="cpu")
    executor = ShardExecutor(shard)

    def work(_: Shard) -> None:
        raise TimeoutError("inside")

    with pytest.raises(TimeoutError, match="inside"):
        executor.run(work).result(TIMEOUT_S)
    executor.close()
