"""Requests to EmbeddingLookup that nobody should send: each is answered, or refused as the caller's fault.

Half of them are valid messages of odd contents, half are such messages with bytes changed, cut or repeated. Not one may
be INTERNAL or UNKNOWN, and the server answers a sane request afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from embedding_server.spec import PolicySpec, TableSpec
from frostline.v1 import embedding_pb2 as pb
from frostline.v1 import embedding_pb2_grpc as pb_grpc

Serve = Callable[..., list[str]]
NAMES = ["a", "b", "", "nope", "a\x00", "tüb/é", "日本語" * 300, "x" * 5_000]
AT_ONCE = 32
THE_CALLERS_FAULT = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def odd_request(rng: np.random.Generator) -> bytes:
    """Sizes that add up or nearly do, numbers at the ends of their ranges, any table, any enum."""
    tables, num_rows, num_bags = [], 0, 0
    for _ in range(rng.integers(0, 5)):
        rows = int(rng.choice([0, 1, 2, 7, 50]))
        pooling = int(rng.choice([0, 0, 1, 2, 3]))
        bags = int(rng.choice([0, 1, 3])) if pooling or rng.random() < 0.05 else 0
        num_rows, num_bags = num_rows + rows, num_bags + bags
        name = NAMES[int(rng.choice(len(NAMES), p=[0.4, 0.4, *[0.2 / 6] * 6]))]
        tables.append(pb.TableLookup(table=name, num_rows=rows, pooling=pooling, num_bags=bags))
    if tables and rng.random() < 0.1:
        tables[0].num_rows = 2**32 - 1
    ids = rng.integers(-(2**63), 2**63 - 1, num_rows, dtype=np.int64, endpoint=True) >> rng.integers(0, 60)
    lengths = rng.choice([0, 1, 2, 7, 50, -1, 2**31 - 1], num_bags).astype(rng.choice(["<i4", "<i8"]))
    return pb.LookupRequest(
        wire_dtype=int(rng.choice([1, 2, 3, 4, 0, 5, 2**31 - 1], p=[0.23, 0.23, 0.23, 0.25, 0.02, 0.02, 0.02])),
        tables=tables,
        row_ids=ids.tobytes()[: 8 * num_rows - int(rng.random() < 0.05)],
        lengths=lengths.tobytes(),
        padding=bytes(int(rng.integers(0, 9))),
    ).SerializeToString()


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        if not out:
            break
        at = int(rng.integers(len(out)))
        kind = rng.integers(4)
        if kind == 0:
            out[at] = int(rng.integers(256))
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = out[: int(rng.integers(0, 20))]
        else:
            out[at : at + int(rng.integers(1, 9))] = b"\xff" * int(rng.integers(0, 9))
    return bytes(out)


def fuzz(serve: Serve, num_requests: int) -> Counter[grpc.StatusCode]:
    rng = np.random.default_rng(num_requests)
    codes: Counter[grpc.StatusCode] = Counter()
    with grpc.insecure_channel(serve()[0]) as channel:
        specs = [TableSpec(name="a", dim=4), TableSpec(name="b", dim=12, policy=PolicySpec(min_count=2))]
        create = pb.CreateTablesRequest(spec_json=[spec.model_dump_json() for spec in specs])
        pb_grpc.EmbeddingShardStub(channel).CreateTables(create)
        raw = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        for _ in range(0, num_requests, AT_ONCE):
            requests = [odd_request(rng) for _ in range(AT_ONCE)]
            requests[::2] = [damaged(request, rng) for request in requests[::2]]
            calls = [raw.future(request, timeout=60) for request in requests]
            for request, call in zip(requests, calls, strict=True):
                codes[call.code()] += 1
                assert call.code() in THE_CALLERS_FAULT, (call.code(), call.details(), request[:200])
                if call.code() == grpc.StatusCode.OK:
                    pb.LookupResponse.FromString(call.result())
        sane = pb.LookupRequest(wire_dtype=1, tables=[pb.TableLookup(table="a", num_rows=1)], row_ids=bytes(8))
        assert pb_grpc.EmbeddingLookupStub(channel).Lookup(sane).values == bytes(16)
    return codes


def test_odd_requests_are_answered_or_refused(serve: Serve) -> None:
    codes = fuzz(serve, 1_600)
    assert min(codes[code] for code in THE_CALLERS_FAULT) > 20


@pytest.mark.slow
def test_odd_requests_in_great_number(serve: Serve) -> None:
    fuzz(serve, 10_000)
