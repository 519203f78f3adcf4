"""A gateway: clients get what one shard with all rows would give, bit for bit; errors, pushback, deadlines pass."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from embedding_server.errors import StoreUnavailable
from embedding_server.lookup import TableQuery
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc
from services import lookup_codec
from services.admission import Limits
from services.local_shards import _environment
from services.lookup_client import Bags, LookupClient
from services.lookup_gateway import LookupGateway
from services.shard_server import LOOKUP_SERVICE
from services.tries import CallTimes
from tests.services.lookup_rows import DIMS, IDS, random_ids, train
from tests.services.test_lookup_client import equal, shard_server

Serve = Callable[..., list[str]]
TIMEOUT_S = 60.0


@pytest.fixture
def gateway(serve: Serve) -> Iterator[Callable[..., str]]:
    """gateway(num_shards, limits=None) -> the address of a gateway to trained shards."""
    gateways: list[LookupGateway] = []

    def start(num_shards: int, limits: Limits | None = None) -> str:
        addresses = serve(num_shards, limits=limits)
        train(addresses)
        gateways.append(LookupGateway(addresses))
        return gateways[-1].start()

    yield start
    for each in gateways:
        each.stop(grace_s=0.5)


def raw_lookup(address: str, encoding: str, queries: list[TableQuery]) -> bytes:
    """Flags, formats and values of the reply: what must be equal bit for bit."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        reply = pb.LookupResponse.FromString(
            call(lookup_codec.encode_lookup(encoding, queries), timeout=TIMEOUT_S)  # type: ignore[arg-type]
        )
    return reply.flags + reply.formats + reply.values


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_it_answers_bit_for_bit_as_one_shard_would(gateway: Callable, serve: Serve, num_shards: int) -> None:
    through = gateway(num_shards)
    alone = serve(1)[0]
    train([alone])
    ids = random_ids(1, 250)
    lengths = np.array([100, 0, 150])
    for encoding in ("float32", "float16", "bfloat16", "stored"):
        queries = [TableQuery(name, row_ids) for name, row_ids in ids.items()]
        queries.append(TableQuery("user", IDS[::-1].copy()))  # a table may come twice
        if encoding != "stored":
            queries += [TableQuery(name, ids[name], pooling, lengths) for name in ids for pooling in ("sum", "mean")]
        assert raw_lookup(through, encoding, queries) == raw_lookup(alone, encoding, queries)


def test_our_client_takes_it_for_a_shard(gateway: Callable) -> None:
    ids = random_ids(2, 100)
    with LookupClient([gateway(2)]) as client:
        rows = client.lookup(ids)
        assert rows["user"].found.any()
        assert [(v.job, v.epoch, v.step) for v in rows["user"].versions] == [("job", 1, 6)]
        assert equal(client.lookup(ids, encoding="stored"), rows)
        assert client.lookup({"item": Bags(IDS, [len(IDS)])})["item"].values.shape == (1, DIMS["item"])


def test_tables_health_and_reflection(gateway: Callable) -> None:
    with grpc.insecure_channel(gateway(2)) as channel:
        stub = pb_grpc.EmbeddingLookupStub(channel)
        listed = stub.ListTables(pb.ListTablesRequest())
        assert {table.name: table.dim for table in listed.tables} == DIMS
        assert [(part.first, part.last) for part in listed.buckets] == [(0, listed.num_buckets - 1)]
        table = stub.GetTable(pb.GetTableRequest(name="user"))
        assert table.mask_info.rows_hot == len(set(IDS.tolist()))  # of both shards
        with pytest.raises(grpc.RpcError) as error:
            stub.GetTable(pb.GetTableRequest(name="nope"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", LOOKUP_SERVICE):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))))
        names = {service.name for service in answer.list_services_response.service}
        assert LOOKUP_SERVICE in names
        assert "frostline.v1.EmbeddingShard" not in names
        with pytest.raises(grpc.RpcError) as error:
            pb_grpc.EmbeddingShardStub(channel).GetEpoch(pb.GetEpochRequest(job="job"))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_full_shard_is_told_with_its_pushback(gateway: Callable, serve: Serve) -> None:
    address = gateway(1, limits=Limits(max_calls=1, retry_after_ms=70))
    request = lookup_codec.encode_lookup("float32", [TableQuery("user", IDS)])
    admission = serve.servers[0]._state.admission  # type: ignore[attr-defined]
    with admission.call(), grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")(request, timeout=TIMEOUT_S)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"] == "70"


def test_the_deadline_is_the_callers(gateway: Callable, serve: Serve) -> None:
    address = gateway(1)
    release = threading.Event()
    serve.servers[0]._state.executor.run(lambda shard: release.wait(30.0))  # type: ignore[attr-defined]
    request = lookup_codec.encode_lookup("float32", [TableQuery("user", IDS)])
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        with pytest.raises(grpc.RpcError) as error:
            call(request, timeout=0.3)
        assert error.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        release.set()
        assert call(request, timeout=TIMEOUT_S)


def test_a_gateway_survives_a_replica() -> None:
    from services.shard_process import owned_buckets

    servers = [shard_server(owned_buckets(0, 1)) for _ in range(2)]
    addresses = [server.start() for server in servers]
    for address in addresses:
        train([address])
    gateway = LookupGateway(addresses)
    try:
        with LookupClient([gateway.start()]) as client:
            for number in range(60):
                if number == 20:
                    servers[0].stop(grace_s=0.0)
                assert client.lookup({"user": IDS})["user"].found.all()
    finally:
        gateway.stop(grace_s=0.5)
        for server in servers:
            server.stop(grace_s=0.5)


def test_without_all_shards_there_is_no_gateway(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from services import lookup_client

    addresses = serve(2)
    serve.servers[0].stop(grace_s=0.0)  # type: ignore[attr-defined]
    monkeypatch.setattr(lookup_client.LookupClient.__init__, "__kwdefaults__", {"times": CallTimes(0.5, 0.5, 0.1)})
    with pytest.raises(StoreUnavailable, match="nobody answers for bucket 0"):
        LookupGateway(addresses)


def test_the_command_serves_and_ends(serve: Serve) -> None:
    addresses = serve(2)
    train(addresses)
    command = [sys.executable, "-m", "services.cli", "shard"]
    for address in addresses:
        command += ["--fanout", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())
    try:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["fanout"] == addresses
        assert line["pid"] == process.pid
        with LookupClient([line["address"]], times=CallTimes(TIMEOUT_S, TIMEOUT_S, 1.0)) as client:
            assert client.lookup({"user": IDS})["user"].found.all()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "draining" in log
