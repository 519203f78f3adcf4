"""No look-up reads a torn row, while pushes change rows and re-selections move them between hot and frozen.

Every gradient has one value in all columns and every row begins at zero, so a row that was read whole has one value in
all columns too, in whatever bits it is stored. With SGD, rate 1 and gradients of 1, a row kept in 32 bits counts its
pushes: who reads it again later never reads a higher value.
"""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest

from embedding_server.lookup import ReplyShape, TableQuery, Version
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import FOUND, TRAINABLE, Frostline, Identity, RoutedIds, TableGradients
from services import lookup_codec
from services.local_shards import start_shards
from services.shard_client import RemoteStore

DIM, ROWS, BATCH = 64, 4_000, 1_000
TABLES = {"t32": 32, "t16": 16, "t8": 8, "t4": 4}
ENCODINGS = ("float32", "stored", "float16")


class Trainer(threading.Thread):
    """Pushes to some of the rows at every step, and every third step freezes half of them and thaws others."""

    def __init__(self, address: str) -> None:
        super().__init__(name="trainer")
        self.store = RemoteStore([address])
        policies = {
            name: PolicySpec(kind="topk", frozen_bits=bits, probation_visits=0, control_fraction=0.0, half_life_steps=4)
            for name, bits in TABLES.items()
        }
        sgd = OptimizerSpec(kind="sgd")
        self.store.create_tables(
            [
                TableSpec(name=name, dim=DIM, optimizer=sgd, policy=policy, init_min=0.0, init_max=0.0)
                for name, policy in policies.items()
            ]
        )
        self.who = Identity("job", self.store.begin_epoch("job", 1, "sync").epoch, 0)
        self.stopping, self.step, self.frozen, self.thawed = threading.Event(), 0, 0, 0
        self.error: BaseException | None = None
        self._rng = np.random.default_rng(3)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._train()
        except BaseException as error:  # told by the test, which waits for this thread
            self.error = error

    def _train(self) -> None:
        self.step += 1
        count = ROWS if self.step == 1 else BATCH  # the first names every row
        chosen = np.sort(self._rng.choice(ROWS, count, replace=False)).astype(np.int64)
        ids = dict.fromkeys(TABLES, _on_one_shard(chosen))
        rows = self.store.pull(self.who, self.step, ids)
        gradients = {}
        for name in TABLES:
            trainable = chosen[(rows[name].flags & TRAINABLE) != 0]
            ones = np.ones((len(trainable), DIM), np.float32)
            gradients[name] = TableGradients(_on_one_shard(trainable), ones, 1.0)
        self.store.push(self.who, self.step, gradients)
        if self.step % 3 == 0:
            lines = {}
            for name, heat in self.store.heat_histograms(self.who, self.step).items():
                above = np.cumsum(heat.counts[::-1])[::-1]
                lines[name] = Frostline(int(np.searchsorted(-above, -ROWS // 2)))
            for moves in self.store.reselect(self.who, self.step, lines).values():
                self.frozen, self.thawed = self.frozen + moves.frozen, self.thawed + moves.thawed


def _on_one_shard(ids: np.ndarray) -> RoutedIds:
    return RoutedIds(ids, np.array([0, len(ids)], np.int64))


class Reader:
    """Reads random rows and checks each."""

    def __init__(self, channel: grpc.Channel, seed: int) -> None:
        self._lookup = channel.unary_unary("/frostline.v1.EmbeddingLookup/Lookup")
        self._rng = np.random.default_rng(seed)
        self._lowest = np.zeros(ROWS, np.float32)  # of t32
        self.rows = self.hot = self.cold = 0

    def read(self, rows_per_table: int) -> None:
        encoding = ENCODINGS[self.rows // (4 * rows_per_table) % len(ENCODINGS)]
        ids = self._rng.integers(0, ROWS, rows_per_table)
        queries = [TableQuery(name, ids) for name in TABLES]
        reply = self._lookup(lookup_codec.encode_lookup(encoding, queries), timeout=60)
        for answer in lookup_codec.decode_answers(reply):
            values = (lookup_codec.expand(answer) if encoding == "stored" else answer.values).astype(np.float32)
            torn = np.flatnonzero((values != values[:, :1]).any(axis=1))
            assert not torn.size, f"{answer.table} {encoding}: row {ids[torn[0]]} reads {values[torn[0]]}"
            if answer.table == "t32" and encoding != "float16":
                assert (values[:, 0] == np.round(values[:, 0])).all()
                assert (values[:, 0] <= self._lowest[ids]).all(), "a row went back to an earlier value"
                np.minimum.at(self._lowest, ids, values[:, 0])
            self.rows += len(ids)
            hot = int(((answer.flags & TRAINABLE) != 0).sum())
            self.hot, self.cold = self.hot + hot, self.cold + int(((answer.flags & FOUND) != 0).sum()) - hot


def hammer(num_reads: int, rows_per_table: int = 500) -> None:
    with start_shards(1) as shards, grpc.insecure_channel(shards.addresses[0]) as channel:
        trainer, reader = Trainer(shards.addresses[0]), Reader(channel, 11)
        trainer.start()
        try:
            # Slow machines train slowly beside the reads: what matters is that rows moved while they were read.
            while reader.rows < num_reads or min(trainer.frozen, trainer.thawed) <= ROWS:
                reader.read(rows_per_table)
                assert trainer.is_alive(), trainer.error
        finally:
            trainer.stopping.set()
            trainer.join(60)
        assert trainer.error is None
        trainer.store.close()
    assert min(reader.hot, reader.cold) > num_reads // 10


def test_no_row_is_torn_in_200000_reads() -> None:
    hammer(200_000)


@pytest.mark.slow
def test_no_row_is_torn_in_a_million_reads() -> None:
    hammer(1_000_000)


def test_the_check_would_see_a_torn_row() -> None:
    class Torn(Reader):
        def __init__(self) -> None:
            self._rng, self._lowest = np.random.default_rng(1), np.zeros(ROWS, np.float32)
            self.rows = self.hot = self.cold = 0

        def _lookup(self, request: bytes, timeout: float) -> bytes:
            call = lookup_codec.decode_lookup(request)
            n = sum(query.row_ids.shape[0] for query in call.queries)
            reply = lookup_codec.LookupReplyMessage()
            shape = ReplyShape(call.encoding, call.queries, [DIM] * 4, [Version()] * 4, n, n * DIM * 4)
            _, _, values = reply(shape)
            rows = values.view(np.float32).reshape(n, DIM)
            rows[:] = -1.0
            rows[n // 2, DIM // 2 :] = -2.0
            return reply.message

    with pytest.raises(AssertionError, match="row"):
        Torn().read(10)
