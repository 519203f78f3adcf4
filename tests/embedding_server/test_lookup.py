"""Look-ups of a shard while it trains: every encoding and pooling of rows in every state, against plain references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedding_server.errors import InvalidInput, SegmentCorrupt, UnknownTable, WrongShard
from embedding_server.kernels.hashing import buckets_of
from embedding_server.lookup import INITIAL, TableQuery, Version
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, NUM_BUCKETS, NUM_RANK_BINS, TRAINABLE, Frostline, Identity
from tests.embedding_server.looked_up import check_rows, decode_stored, look_up, pooled

WHO = Identity("job", 1, 0)
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
#: visited in 5 steps, or in 2 of them: a frostline freezes those
HOT = np.array([*range(20), MOST], np.int64)
FROZEN = np.array([LEAST, LEAST + 1, *range(-20, 0)], np.int64)
NEW = np.arange(30, 36, dtype=np.int64)  # that come when they are below the frostline, and have their initial values
UNKNOWN = np.array([LEAST + 7, 1000, MOST - 1], np.int64)
EVERY = np.concatenate([HOT, FROZEN, NEW, UNKNOWN])


def spec_of(
    name: str, hot_bits: int, frozen_bits: int, min_count: int = 1, decay: float = 0.0, dim: int = 12
) -> TableSpec:
    return TableSpec(
        name=name,
        dim=dim,
        optimizer=OptimizerSpec(kind="adagrad", weight_decay=decay),
        policy=PolicySpec(
            kind="topk",
            probation_visits=0,
            hot_bits=hot_bits,
            frozen_bits=frozen_bits,
            min_count=min_count,
            control_fraction=0.0,
        ),
    )


SPECS = [
    *(spec_of(f"{hot}/{frozen}", hot, frozen) for hot in (32, 16) for frozen in (32, 16, 8, 4)),
    spec_of("counted", 32, 8, min_count=2),
    spec_of("decaying", 16, 4, decay=0.01),
    spec_of("wide", 32, 4, dim=260),
]
NAMES = [spec.name for spec in SPECS]


def train(shard: Shard) -> None:
    """Rows of HOT, FROZEN and NEW in every table, as these say."""
    shard.create_tables(SPECS)
    shard.begin_epoch("job", 1, "sync", 1)
    rng = np.random.default_rng(5)
    for step in range(1, 6):
        ids = HOT if step > 2 else np.concatenate([HOT, FROZEN])
        _step(shard, step, ids, rng)
    reselect(shard, 5)
    for step in (6, 7):
        _step(shard, step, NEW, rng)


def _step(shard: Shard, step: int, ids: np.ndarray, rng: np.random.Generator) -> None:
    rows = shard.pull(WHO, step, dict.fromkeys(NAMES, ids), "float32").result(0)
    gradients = {}
    for spec in SPECS:
        trainable = ids[(rows[spec.name].flags & TRAINABLE) != 0]
        values = rng.normal(0, 1, (len(trainable), spec.dim)).astype(np.float32)
        default = rng.normal(0, 1, spec.dim).astype(np.float32) if spec.policy.min_count > 1 else None
        gradients[spec.name] = ShardGradients(trainable, values, 0.1, default)
    shard.push(WHO, step, gradients, "float32").result(0)


def reselect(shard: Shard, step: int) -> None:
    """Freezes the colder of two groups of rows."""
    lines = {}
    for name, heat in shard.heat_histograms(WHO, step).items():
        occupied = np.flatnonzero(heat.counts)
        gap = int(np.argmax(np.diff(occupied)))
        lines[name] = Frostline(int(occupied[gap] + occupied[gap + 1]) // 2)
    done = False
    while not done:
        _, done = shard.reselect(WHO, step, lines)


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    shard = Shard(memory_limit_bytes=64 << 20, backend="cpu")
    train(shard)
    yield shard
    shard.close()


def expected(shard: Shard, name: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32[n, D] as training reads them, which test_shard_model.py holds to a dictionary, and their flags."""
    flags = np.full(ids.shape[0], DEFAULT if name == "counted" else 0)
    for state, these in ((FOUND | TRAINABLE, HOT), (FOUND, FROZEN), (FOUND | INITIAL, NEW)):
        flags[np.isin(ids, these)] = state
    return shard.lookup({name: ids}, "float32")[name].values, flags


@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_and_pooling_of_every_state(shard: Shard, name: str) -> None:
    ids = np.concatenate([EVERY, EVERY[::3]])
    check_rows(shard.lookups, name, ids, *expected(shard, name, ids))


@pytest.mark.parametrize("name", NAMES)
def test_rows_as_stored_have_the_bits_that_they_are_stored_in(shard: Shard, name: str) -> None:
    answer = look_up(shard.lookups, [TableQuery(name, np.array([3, -20, 31, 1000], np.int64))], "stored")[0]
    policy = shard.table_specs()[name].policy
    hot = 32 if name == "decaying" else policy.hot_bits  # with the decay that it owes it is no float16 value
    assert answer.formats.tolist() == [hot, policy.frozen_bits, 32, 32 if name == "counted" else 0]


IDS = st.lists(st.sampled_from(EVERY.tolist()), max_size=12)
QUERIES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.lists(IDS, max_size=4), st.sampled_from([None, "sum", "mean"])), max_size=6
)


@given(QUERIES, st.sampled_from(["float32", "float16", "bfloat16", "stored"]))
def test_many_tables_in_one_call(shard: Shard, drawn: list, encoding: str) -> None:
    """As each alone: tables in any order, also twice, some pooled, some of no rows."""
    queries = []
    for name, bags, pooling in drawn:
        ids = np.array([i for bag in bags for i in bag], np.int64)
        if pooling is None or encoding == "stored":
            queries.append(TableQuery(name, ids))
        else:
            queries.append(TableQuery(name, ids, pooling, np.array([len(bag) for bag in bags], np.int64)))
    answers = look_up(shard.lookups, queries, encoding)
    for query, answer in zip(queries, answers, strict=True):
        alone = look_up(shard.lookups, [query], encoding)[0]
        assert answer.values.tobytes() == alone.values.tobytes()
        assert answer.flags.tobytes() == alone.flags.tobytes()
        rows, flags = expected(shard, query.table, query.row_ids)
        assert answer.flags.tolist() == flags.tolist()
        if encoding == "float32":
            if query.pooling is not None:
                rows = pooled(rows, query.lengths, query.pooling)
            assert answer.values.tobytes() == rows.tobytes()


def test_a_call_without_tables_and_a_table_without_rows(shard: Shard) -> None:
    assert look_up(shard.lookups, []) == []
    none = np.empty(0, np.int64)
    for encoding in ("float32", "float16", "bfloat16", "stored"):
        answer = look_up(shard.lookups, [TableQuery("32/4", none)], encoding)[0]
        assert (answer.values.shape, answer.flags.shape) == ((0, 12), (0,))
    empty = look_up(shard.lookups, [TableQuery("32/4", none, "mean", np.zeros(3, np.int64))])[0]
    assert empty.values.tolist() == [[0.0] * 12] * 3


def test_a_look_up_is_no_visit(shard: Shard) -> None:
    before = {name: shard.stats().tables[name] for name in NAMES}
    codes = {name: shard._tables[name].index.scan(0, NUM_BUCKETS).heat.tolist() for name in NAMES}
    for encoding in ("float32", "stored"):
        look_up(shard.lookups, [TableQuery(name, EVERY) for name in NAMES], encoding)
    assert {name: shard.stats().tables[name] for name in NAMES} == before
    assert {name: shard._tables[name].index.scan(0, NUM_BUCKETS).heat.tolist() for name in NAMES} == codes


def test_the_version_is_that_of_the_job_that_trains_the_table() -> None:
    shard = Shard(memory_limit_bytes=64 << 20, backend="cpu")
    shard.create_tables([spec_of("a", 32, 4), spec_of("b", 32, 4), spec_of("c", 32, 4)])
    one = [TableQuery(name, np.array([1], np.int64)) for name in "abc"]
    assert [answer.version for answer in look_up(shard.lookups, one)] == [Version()] * 3
    for job, table, epoch, steps in (("x", "a", 3, 2), ("y", "b", 5, 1)):
        shard.begin_epoch(job, 1, "sync", epoch)
        for step in range(1, steps + 1):
            who = Identity(job, epoch, 0)
            shard.pull(who, step, {table: np.array([1], np.int64)}, "float32").result(0)
            assert look_up(shard.lookups, one)["abc".index(table)].version == Version(job, epoch, step - 1)
            shard.push(who, step, {}, "float32").result(0)
    versions = [answer.version for answer in look_up(shard.lookups, one)]
    assert versions == [Version("x", 3, 2), Version("y", 5, 1), Version()]
    shard.begin_epoch("x", 1, "sync", 4)
    assert look_up(shard.lookups, one)[0].version == Version("x", 4, 2)
    shard.close()


def test_what_cannot_be_answered_asks_nothing_of_the_reply() -> None:
    half = np.arange(NUM_BUCKETS) < NUM_BUCKETS // 2
    shard = Shard(buckets=half, memory_limit_bytes=64 << 20, backend="cpu")
    shard.create_tables([spec_of("a", 32, 4)])
    foreign = next(i for i in range(99) if not half[buckets_of(np.array([i]), NUM_BUCKETS)[0]])
    own = np.array([next(i for i in range(99) if half[buckets_of(np.array([i]), NUM_BUCKETS)[0]])], np.int64)

    def refuse(*_: object) -> None:
        raise AssertionError("the reply was asked for")

    for error, query, encoding in (
        (UnknownTable, TableQuery("nope", own), "float32"),
        (WrongShard, TableQuery("a", np.array([foreign], np.int64)), "float32"),
        (InvalidInput, TableQuery("a", own), "float64"),
        (InvalidInput, TableQuery("a", own, "sum", np.array([1], np.int64)), "stored"),
        (InvalidInput, TableQuery("a", own, "sum", np.array([2], np.int64)), "float32"),
        (InvalidInput, TableQuery("a", own, "sum", np.array([2, -1], np.int64)), "float32"),
    ):
        with pytest.raises(error):
            shard.lookups.look_up([TableQuery("a", own), query], encoding, refuse)  # type: ignore[arg-type]
    shard.close()


def test_damaged_frozen_rows_are_told_and_never_read(tmp_path: Path) -> None:
    shard = Shard(data_dir=tmp_path, memory_limit_bytes=1 << 30, backend="cpu")
    spec = spec_of("t", 32, 32, dim=64)
    shard.create_tables([spec])
    shard.begin_epoch("job", 1, "sync", 1)
    ids = np.arange(4_000, dtype=np.int64)
    shard.pull(WHO, 1, {"t": ids}, "float32").result(0)
    gradients = ShardGradients(ids, np.ones((len(ids), 64), np.float32), 1.0)
    shard.push(WHO, 1, {"t": gradients}, "float32").result(0)
    while not shard.reselect(WHO, 1, {"t": Frostline(NUM_RANK_BINS - 1)})[1]:
        pass
    while shard.maintain():
        pass
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage")
    for encoding in ("float32", "stored"):
        with pytest.raises(SegmentCorrupt, match="CRC-32"):
            look_up(shard.lookups, [TableQuery("t", ids)], encoding)
    shard.close()


def test_the_decoder_of_the_tests_reads_what_fbgemm_writes() -> None:
    import fbgemm_gpu  # noqa: F401  registers the torch operators
    import torch

    rows = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (50, 20)).astype(np.float32))
    four = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    eight = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    for bits, fused, read in (
        (4, four, torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(four, 4)),
        (8, eight, torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(eight)),
    ):
        values, size = decode_stored(fused.numpy().reshape(-1), np.full(50, bits, np.uint8), 20)
        assert size == fused.numel()
        assert values.tobytes() == read.numpy().tobytes()
