"""Fuzzed look-ups: bytes that are no messages, and messages that make no sense, get an answer and do no harm.

A request is a valid one, changed a few times by seeded mutations: bits, lengths, pieces, numbers, names. Whatever it
is, the status says that the caller is wrong or that it worked after all; never INTERNAL or UNKNOWN. The server stays,
answers as before, and holds no more memory than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from benchmarks.memory import read_memory
from embedding_server.lookup import TableQuery
from frostline.v1 import embedding_pb2 as pb
from services import lookup_codec
from services.local_shards import start_shards
from services.lookup_gateway import LookupGateway
from tests.services.lookup_rows import DIMS, IDS, random_ids, train

Serve = Callable[..., list[str]]
TIMEOUT_S = 60.0
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
#: a process may keep free memory of the largest request it has served
MAX_GROWTH_BYTES = 32 << 20
EXTREMES = (0, 1, 2, 3, 4, 5, 127, 128, 2**31 - 1, 2**31, 2**32 - 1)


def valid_requests() -> list[pb.LookupRequest]:
    ids, lengths = random_ids(1, 40), np.array([0, 25, 15])
    plain = [TableQuery(name, row_ids) for name, row_ids in ids.items()]
    pooled = [TableQuery(name, row_ids, "mean", lengths) for name, row_ids in ids.items()]
    queries = [plain, plain[:1], pooled, [*plain, *pooled], [TableQuery("user", IDS[:0])], []]
    messages = [lookup_codec.encode_lookup(encoding, each) for each in queries for encoding in ("float32", "bfloat16")]
    messages += [lookup_codec.encode_lookup("stored", each) for each in (plain, [])]
    return [pb.LookupRequest.FromString(message) for message in messages]


class Mutations:
    """Seeded changes of valid requests."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._valid = valid_requests()

    def request(self) -> bytes:
        message = pb.LookupRequest()
        message.CopyFrom(self._one_of(self._valid))
        for _ in range(self._below(3)):
            self._one_of((self._change_field, self._change_table, self._change_bytes))(message)
        data = message.SerializeToString()
        for _ in range(self._below(3)):
            data = self._one_of((self._flip, self._cut, self._repeat, self._insert, self._join))(data)
        return data

    def _below(self, n: int) -> int:
        return int(self._random.integers(n))

    def _one_of(self, choices):  # type: ignore[no-untyped-def]
        return choices[self._below(len(choices))]

    def _noise(self) -> bytes:
        return self._random.bytes(self._below(40))

    def _change_field(self, message: pb.LookupRequest) -> None:
        message.wire_dtype = self._below(8)
        if self._below(2):
            del message.tables[: self._below(3)]

    def _change_table(self, message: pb.LookupRequest) -> None:
        if not message.tables:
            message.tables.add()
        table = self._one_of(message.tables)
        change = self._below(5)
        if change == 0:
            table.num_rows = self._one_of(EXTREMES)
        elif change == 1:
            table.num_bags = self._one_of(EXTREMES)
        elif change == 2:
            table.pooling = self._below(5)
        elif change == 3:
            table.table = self._one_of(("", "nope", "user", "item", "\0", "t" * 100_000, "\u202e\U0001f9ca"))
        else:
            message.tables.add().CopyFrom(table)

    def _change_bytes(self, message: pb.LookupRequest) -> None:
        name = self._one_of(("row_ids", "lengths", "padding"))
        value = getattr(message, name)
        numbers = self._random.integers(-(2**63), 2**63 - 1, max(len(value) // 8, 1)).tobytes()
        setattr(message, name, self._one_of((value + self._noise(), value[self._below(9) :], numbers, b"")))

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(min(len(changed), 1 + self._below(4))):
            changed[self._below(len(changed))] ^= 1 << self._below(8)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        at = self._below(len(data) + 1)
        return data[:at] if self._below(2) else data[at:]

    def _repeat(self, data: bytes) -> bytes:
        start, stop = sorted((self._below(len(data) + 1), self._below(len(data) + 1)))
        return data[:stop] + data[start:stop] * self._below(20) + data[stop:]

    def _insert(self, data: bytes) -> bytes:
        at = self._below(len(data) + 1)
        return data[:at] + self._noise() + data[at:]

    def _join(self, data: bytes) -> bytes:
        return data + self._one_of(self._valid).SerializeToString()


def fuzz(address: str, seed: int, count: int) -> Counter[grpc.StatusCode]:
    """How often each status came. Fails at the first that may not come, and tells the request."""
    mutations, statuses = Mutations(seed), Counter()
    with grpc.insecure_channel(address) as channel:
        service = "/frostline.v1.EmbeddingLookup"
        calls = [channel.unary_unary(f"{service}/{method}") for method in ("Lookup", "GetTable", "ListTables")]
        for number in range(count):
            call = calls[0] if number % 10 else calls[1 + number // 10 % 2]
            request = mutations.request()
            done = call.future(request, timeout=TIMEOUT_S)
            status = done.code()  # waits
            assert status in ALLOWED, f"request {number} of seed {seed}: {done.details()}: {request[:400]!r}"
            assert status == grpc.StatusCode.OK or done.details()
            statuses[status] += 1
    return statuses


def rows_of(address: str) -> bytes:
    with grpc.insecure_channel(address) as channel:
        queries = [TableQuery(name, IDS) for name in DIMS]
        call = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        return call(lookup_codec.encode_lookup("float32", queries), timeout=TIMEOUT_S)


def test_a_shard_takes_fuzzed_requests(serve: Serve) -> None:
    address = serve(1)[0]
    train([address])
    before = rows_of(address)
    statuses = fuzz(address, 1, 600)
    assert min(statuses[grpc.StatusCode.OK], statuses[grpc.StatusCode.INVALID_ARGUMENT]) > 50
    assert rows_of(address) == before


def test_a_gateway_takes_fuzzed_requests(serve: Serve) -> None:
    addresses = serve(2)
    train(addresses)
    gateway = LookupGateway(addresses)
    try:
        address = gateway.start()
        before = rows_of(address)
        fuzz(address, 2, 300)
        assert rows_of(address) == before
    finally:
        gateway.stop(grace_s=0.5)


@pytest.mark.slow
def test_ten_thousand_fuzzed_requests_leave_no_trace() -> None:
    with start_shards(1, memory_limit_bytes=256 << 20) as shards:
        train(shards.addresses)
        before = rows_of(shards.addresses[0])
        fuzz(shards.addresses[0], 3, 2_000)  # whatever a first use of each path takes
        held_bytes = read_memory(shards.processes[0].pid).held_bytes
        for seed in range(4, 8):
            fuzz(shards.addresses[0], seed, 2_500)
        shards.check()
        assert read_memory(shards.processes[0].pid).held_bytes - held_bytes < MAX_GROWTH_BYTES
        assert rows_of(shards.addresses[0]) == before
