"""RemoteStore: equal to the in-process store, split in parts, patient where it should be, clear where it gives up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from embedding_server.errors import (
    FencedEpoch,
    InvalidInput,
    NotReady,
    StepGap,
    StoreUnavailable,
    TableConflict,
    UnknownTable,
)
from embedding_server.inproc import InprocStore
from embedding_server.kernels.routing import dedup_route
from embedding_server.kernels.wire import from_float32
from embedding_server.shard import Shard
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import (
    EmbeddingStore,
    Frostline,
    Identity,
    MaskInfo,
    PushAck,
    RoutedIds,
    TableGradients,
    TableStats,
    UpdateMode,
    WireDtype,
    push_dtype,
)
from services import parts, shard_channel, shard_client
from services.admission import Limits
from services.shard_channel import CallTimes
from services.shard_client import RemoteStore
from services.shard_process import owned_buckets
from services.shard_server import ShardServer

Serve = Callable[..., list[str]]
SPECS = [
    TableSpec(name="user", dim=8, optimizer=OptimizerSpec(kind="adam"), policy=PolicySpec(kind="off")),
    TableSpec(name="item", dim=16, policy=PolicySpec(kind="topk", probation_visits=1)),
    TableSpec(name="rare", dim=4, policy=PolicySpec(kind="idle", idle_steps=2, min_count=2)),
    TableSpec(name="tail", dim=8, policy=PolicySpec(kind="compact", idle_steps=2, epoch_end="forget_rare")),
]
FAST = CallTimes(deadline_s=5.0, try_s=5.0, reconnect_s=0.3)


@pytest.fixture
def connect(serve: Serve) -> Iterator[Callable[..., RemoteStore]]:
    stores: list[RemoteStore] = []

    def make(num_shards: int = 2, **options: object) -> RemoteStore:
        limits = options.pop("limits", None)
        stores.append(RemoteStore(serve(num_shards, limits=limits), **options))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def route(store: EmbeddingStore, row_ids: np.ndarray) -> RoutedIds:
    routing = dedup_route(row_ids, store.shard_of_bucket, store.num_shards)
    return RoutedIds(routing.unique, routing.shard_offsets.reshape(-1))


def gradients_of(store: EmbeddingStore, ids: RoutedIds, dim: int, seed: int, default: bool = False) -> TableGradients:
    """Random gradients that depend on the row_id alone, so that every routing order gets the same ones."""
    base = np.random.default_rng(seed).normal(size=dim)
    values = np.sin(ids.row_ids[:, None] % 1000 + base[None, :]).astype(np.float32)
    wire = push_dtype(store.wire_dtype)
    return TableGradients(ids, from_float32(values, wire), 0.1, np.ones(dim, np.float32) if default else None)


def train(store: EmbeddingStore, steps: int, seed: int, mode: UpdateMode = "sync") -> dict[str, np.ndarray]:
    """A short job; what it leaves, by table and row_id."""
    store.create_tables(SPECS)
    rng = np.random.default_rng(seed)
    epoch = store.begin_epoch("job", 1, mode)
    who = Identity("job", epoch.epoch, 0)
    for step in range(1, steps + 1):
        ids = {spec.name: route(store, rng.zipf(1.3, 200) % 500 - 250) for spec in SPECS}
        store.prefetch(ids)
        rows = store.pull(who, step, ids)
        assert all(len(rows[name].flags) == len(ids[name].row_ids) for name in ids)
        ack = store.push(
            who,
            step,
            {s.name: gradients_of(store, ids[s.name], s.dim, step, s.policy.min_count > 1) for s in SPECS},
        )
        assert not ack.duplicate
        if step % 3 == 0:
            heat = store.heat_histograms(who, step)["item"]
            occupied = np.flatnonzero(heat.counts)
            store.reselect(who, step, {"item": Frostline(int(occupied[len(occupied) // 2]))})
    assert store.end_data_pass(who, steps)["tail"].forgotten > 0
    every = {spec.name: route(store, np.arange(-260, 260)) for spec in SPECS}
    rows = store.lookup(every)
    return {
        name: np.concatenate([rows[name].values.view(np.uint8), rows[name].flags[:, None]], axis=1)[
            np.argsort(every[name].row_ids)
        ]
        for name in every
    }


def assert_same_mask(mine: dict[str, MaskInfo], theirs: dict[str, MaskInfo]) -> None:
    assert mine.keys() == theirs.keys()
    for name, info in theirs.items():
        assert mine[name].frostline == info.frostline
        assert (mine[name].rows_ranked, mine[name].rows_ranked_before) == (info.rows_ranked, info.rows_ranked_before)
        assert np.array_equal(mine[name].heat_counts_hot, info.heat_counts_hot), name
        assert np.array_equal(mine[name].heat_counts_frozen, info.heat_counts_frozen), name
        assert info.heat_counts_hot.sum() == info.stats.rows_hot == mine[name].stats.rows_hot
        assert info.heat_counts_frozen.sum() == info.stats.rows_frozen == mine[name].stats.rows_frozen
    assert 0 < theirs["item"].topk_overlap <= 1


@pytest.mark.parametrize("wire_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_equal_to_the_in_process_store(
    connect: Callable[..., RemoteStore], num_shards: int, wire_dtype: WireDtype
) -> None:
    local = InprocStore(wire_dtype=wire_dtype, memory_limit_bytes=64 << 20, backend="cpu")
    remote = connect(num_shards, wire_dtype=wire_dtype)
    expected, got = train(local, 7, 1), train(remote, 7, 1)
    for name in expected:
        assert (expected[name] == got[name]).all(), name
    assert remote.wire_stats == local.wire_stats
    mine, theirs = remote.stats().tables, local.stats().tables
    for name in theirs:
        for figure in TableStats.__dataclass_fields__:
            if not figure.startswith("bytes_"):
                assert getattr(mine[name], figure) == getattr(theirs[name], figure), (name, figure)
    assert_same_mask(remote.mask_info(), local.mask_info())
    assert remote.table_specs() == {spec.name: spec for spec in SPECS}
    local.close()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_split_calls_leave_the_same_rows(
    connect: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch, num_shards: int
) -> None:
    expected = train(connect(num_shards), 4, 2)
    seen = []

    def split_small(call: str, rows: object, **options: object) -> list:
        messages = parts.split(call, rows, limit_bytes=700, **options)  # type: ignore[arg-type]
        seen.append(len(messages))
        return messages

    monkeypatch.setattr(shard_client, "split", split_small)
    got = train(connect(num_shards), 4, 2)
    assert max(seen) > 5
    assert all((expected[name] == got[name]).all() for name in expected)


def test_addresses_in_any_order_are_put_in_place(serve: Serve) -> None:
    addresses = serve(3)
    store = RemoteStore(addresses[::-1])
    assert store.shard_of_bucket[[0, 500, 1023]].tolist() == [2, 1, 0]
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    assert len(store.pull(who, 1, {"user": route(store, np.arange(100))})["user"].flags) == 100
    store.close()


def test_shards_must_own_every_bucket_once(serve: Serve) -> None:
    addresses = serve(2)
    with pytest.raises(InvalidInput, match="no shard of 1 owns bucket 512"):
        RemoteStore(addresses[:1])
    with pytest.raises(InvalidInput, match=r"shard 1 .* and shard 0 .* both own bucket 0"):
        RemoteStore([addresses[0], addresses[0]])
    with pytest.raises(InvalidInput, match="no addresses"):
        RemoteStore([])
    with pytest.raises(InvalidInput, match="has no port"):
        RemoteStore(["localhost"])
    with pytest.raises(InvalidInput, match="wire_dtype='int8'"):
        RemoteStore(addresses, wire_dtype="int8")  # type: ignore[arg-type]


def test_a_conflict_on_one_shard_creates_nothing_on_the_others(
    connect: Callable[..., RemoteStore], serve: Serve
) -> None:
    store = connect(2)
    other = SPECS[0].model_copy(update={"dim": 4})
    store.create_tables(SPECS[:1])
    with pytest.raises(TableConflict, match=r"'user' exists with another spec \(dim: 8 != 4\)"):
        store.create_tables([SPECS[1], other])
    assert list(store.table_specs()) == ["user"]
    store.create_tables(SPECS)
    store.create_tables(SPECS)


def started(store: RemoteStore) -> tuple[Identity, dict[str, RoutedIds]]:
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    ids = {"user": route(store, np.arange(50))}
    store.pull(who, 1, ids)
    return who, ids


def faulty(kind: str, ids: RoutedIds) -> tuple[str, TableGradients, str]:
    n = len(ids.row_ids)
    values = np.ones((n, 8), np.float32)
    good = TableGradients(ids, values, 0.1)
    spoiled = values.copy()
    spoiled[n - 1, 2] = np.nan
    short = RoutedIds(ids.row_ids, ids.shard_offsets[:-1])
    falling = RoutedIds(ids.row_ids, np.array([0, n + 1, n]))
    nan_default = np.full(8, np.nan, np.float32)
    row_id = int(ids.row_ids[-1])
    return {
        "nan": (
            "user",
            TableGradients(ids, spoiled, 0.1),
            rf"'user': .* row_id {row_id} \(position {n - 1}, column 2\)",
        ),
        "dim": ("user", TableGradients(ids, np.ones((n, 4), np.float32), 0.1), r"'user': .*\[50, 4\].* dim 8"),
        "rows": ("user", TableGradients(ids, values[1:].copy(), 0.1), r"'user': .*\[49, 8\]"),
        "dtype": ("user", TableGradients(ids, np.ones((n, 8)), 0.1), "'user': gradients have dtype float64"),
        "strided": ("user", TableGradients(ids, np.ones((n, 16), np.float32)[:, ::2], 0.1), "'user': .* contiguous"),
        "ids dtype": (
            "user",
            TableGradients(RoutedIds(ids.row_ids.astype(np.int32), ids.shard_offsets), values, 0.1),
            "'user': row_ids has dtype int32",
        ),
        "offsets": ("user", TableGradients(short, values, 0.1), "'user': shard_offsets"),
        "falling": ("user", TableGradients(falling, values, 0.1), "'user': shard_offsets"),
        "rate": ("user", TableGradients(ids, values, float("inf")), "'user': learning_rate=inf"),
        "default": ("user", TableGradients(ids, values, 0.1, nan_default), "'user': the default row's gradient is not"),
        "default dim": ("user", TableGradients(ids, values, 0.1, np.ones(4, np.float32)), r"'user': .*float32\[8\]"),
        "table": ("nope", good, r"'nope' does not exist \(tables: item, rare, tail, user\)"),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "nan",
        "dim",
        "rows",
        "dtype",
        "strided",
        "ids dtype",
        "offsets",
        "falling",
        "rate",
        "default",
        "default dim",
        "table",
    ],
)
def test_a_faulty_batch_reaches_no_shard(connect: Callable[..., RemoteStore], kind: str) -> None:
    store = connect(2)
    who, ids = started(store)
    before = store.lookup(ids)["user"].values.tobytes()
    name, gradients, message = faulty(kind, ids["user"])
    with pytest.raises(InvalidInput, match=message):
        store.push(who, 1, {"item": gradients_of(store, route(store, np.arange(9)), 16, 1), name: gradients})
    assert store.lookup(ids)["user"].values.tobytes() == before
    assert store.push(who, 1, {"user": gradients_of(store, ids["user"], 8, 1)}).rows_applied == 50


def test_errors_of_the_shard_arrive_as_their_class(connect: Callable[..., RemoteStore]) -> None:
    store = connect(2)
    who, ids = started(store)
    with pytest.raises(StepGap) as gap:
        store.pull(who, 5, ids)
    assert gap.value.expected_step == 2
    with pytest.raises(UnknownTable, match="'nope'"):
        store.lookup({"nope": ids["user"]})
    with pytest.raises(InvalidInput, match="mode='async'"):
        store.begin_epoch("job", 1, "async")  # type: ignore[arg-type]
    with pytest.raises(FencedEpoch):
        store.begin_epoch("job", 1, "sync", epoch=1)
    assert store.begin_epoch("job", 1, "sync").epoch == 2
    assert store.begin_epoch("job", 1, "sync", epoch=9).epoch == 9
    with pytest.raises(FencedEpoch) as fenced:
        store.pull(who, 1, ids)
    assert fenced.value.current_epoch == 9


def test_the_epoch_is_above_that_of_every_shard_and_last_step_the_lowest(serve: Serve) -> None:
    store = RemoteStore(serve(2))
    who, ids = started(store)
    gradients = {"user": gradients_of(store, ids["user"], 8, 1)}
    # One shard alone gets the push of step 1 and an epoch of its own.
    shard0 = store._channels[0]
    everything, store._channels = store._channels, [shard0]
    only_0 = RoutedIds(ids["user"].row_ids[: ids["user"].shard_offsets[1]], ids["user"].shard_offsets[:2])
    store.num_shards = 1
    store.push(who, 1, {"user": gradients_of(store, only_0, 8, 1)})
    store.begin_epoch("job", 1, "sync", epoch=7)
    store._channels, store.num_shards = everything, 2
    info = store.begin_epoch("job", 1, "sync")
    assert (info.epoch, info.last_step) == (8, 0)
    who = Identity("job", 8, 0)
    store.pull(who, 1, ids)
    ack = store.push(who, 1, gradients)
    assert ack.rows_applied == len(ids["user"].row_ids) - len(only_0.row_ids)
    assert not ack.duplicate
    assert store.begin_epoch("job", 1, "sync").last_step == 1
    store.close()


def test_a_full_server_is_asked_again(connect: Callable[..., RemoteStore], serve: Serve) -> None:
    store = connect(1, limits=Limits(max_calls=4, retry_after_ms=10))
    who, ids = started(store)
    admission = serve.servers[0]._state.admission  # type: ignore[attr-defined]
    acks: list[PushAck] = []
    with contextlib.ExitStack() as full:
        for _ in range(4):
            full.enter_context(admission.call())
        gradients = {"user": gradients_of(store, ids["user"], 8, 1)}
        thread = threading.Thread(target=lambda: acks.append(store.push(who, 1, gradients)))
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
    thread.join(20)
    assert [ack.rows_applied for ack in acks] == [50]


def test_a_shard_that_cannot_be_reached_is_named(serve: Serve) -> None:
    addresses = serve(2)
    store = RemoteStore(addresses, times=FAST)
    serve.servers[1].stop(0.1)  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match=rf"shard 1 \({addresses[1]}\).*could not be reached for 0.3 s"):
        store.stats()
    store.close()
    with pytest.raises(StoreUnavailable, match=r"shard 1 .*could not be reached"):
        RemoteStore(addresses, times=FAST)


def test_a_shard_that_comes_back_in_time_is_not_noticed(serve: Serve) -> None:
    addresses = serve(1)
    port = int(addresses[0].rpartition(":")[2])
    store = RemoteStore(addresses, times=CallTimes(reconnect_s=15.0))
    serve.servers[0].stop(0.1)  # type: ignore[attr-defined]
    timer = threading.Timer(0.5, lambda: serve(1, ports=[port]))
    timer.start()
    assert store.table_specs() == {}
    timer.join()
    store.close()


def test_the_total_deadline_ends_a_wait_for_other_workers(connect: Callable[..., RemoteStore]) -> None:
    store = connect(1, times=CallTimes(deadline_s=1.0, try_s=0.2, reconnect_s=1.0))
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 2, "sync").epoch, 0)
    ids = {"user": route(store, np.arange(50))}
    store.pull(who, 1, ids)
    with pytest.raises(StoreUnavailable, match=r"EmbeddingShard/Push did not finish within 1 s \([3-9] tries\)"):
        store.push(who, 1, {"user": gradients_of(store, ids["user"], 8, 1)})


def test_a_closed_store_says_so(connect: Callable[..., RemoteStore]) -> None:
    store = connect(1)
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.stats()


def test_closing_ends_a_running_call(connect: Callable[..., RemoteStore]) -> None:
    store = connect(1)
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 2, "sync").epoch, 0)
    ids = {"user": route(store, np.arange(5))}
    store.pull(who, 1, ids)
    failures: list[BaseException] = []

    def push() -> None:
        try:
            store.push(who, 1, {"user": gradients_of(store, ids["user"], 8, 1)})
        except StoreUnavailable as error:
            failures.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    time.sleep(0.2)
    store.close()
    thread.join(10)
    assert len(failures) == 1


def test_empty_calls_are_fine(connect: Callable[..., RemoteStore]) -> None:
    store = connect(2)
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    none = route(store, np.empty(0, np.int64))
    assert store.pull(who, 1, {}) == {}
    assert store.push(who, 1, {}).step == 1
    rows = store.pull(who, 2, {"user": none, "item": route(store, np.arange(3))})
    assert rows["user"].values.shape == (0, 8)
    assert rows["item"].values.shape == (3, 16)
    empty = TableGradients(none, np.empty((0, 8), np.float32), 0.1, np.ones(8, np.float32))
    assert store.push(who, 2, {"user": empty}).rows_applied == 0
    assert store.lookup({}) == {}
    assert store.lookup({"user": none})["user"].values.shape == (0, 8)


def test_rows_of_every_shard_decay_whatever_rows_a_push_names(connect: Callable[..., RemoteStore]) -> None:
    spec = TableSpec(
        name="t", dim=4, optimizer=OptimizerSpec(kind="sgd", weight_decay=0.5), policy=PolicySpec(kind="off")
    )
    store = connect(2)
    store.create_tables([spec])
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    ids = route(store, np.arange(40))
    start = store.pull(who, 1, {"t": ids})["t"].values.copy()
    first_of_shard_0 = RoutedIds(ids.row_ids[:1], np.array([0, 1, 1]))
    one = TableGradients(first_of_shard_0, np.zeros((1, 4), np.float32), 0.1)
    none = TableGradients(route(store, np.empty(0, np.int64)), np.empty((0, 4), np.float32), 0.1)
    for step, gradients in ((1, one), (2, none), (3, none)):
        store.pull(who, step, {"t": first_of_shard_0})
        store.push(who, step, {"t": gradients})
    values = store.lookup({"t": ids})["t"].values
    np.testing.assert_allclose(values, start * 0.95**3, rtol=1e-5)


def test_a_pull_above_the_message_limit_goes_in_parts(connect: Callable[..., RemoteStore]) -> None:
    """The real limit: 6,000 rows of 4,096 float32 are 98 MB."""
    wide = TableSpec(name="wide", dim=4096, policy=PolicySpec(kind="off"), init_min=0.0, init_max=0.0)
    shard = Shard(buckets=owned_buckets(0, 1), memory_limit_bytes=1 << 30, backend="cpu")
    server = ShardServer(shard)
    store = RemoteStore([server.start()])
    store.create_tables([wide])
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    ids = route(store, np.arange(6000))
    rows = store.pull(who, 1, {"wide": ids})
    assert rows["wide"].values.shape == (6000, 4096)
    values = np.broadcast_to((ids.row_ids % 7).astype(np.float32)[:, None], (6000, 4096)).copy()
    ack = store.push(who, 1, {"wide": TableGradients(ids, values, 1.0)})
    assert ack.rows_applied == 6000
    store.close()
    server.stop(0.5)


def test_a_shard_that_lost_its_rows_is_noticed_before_an_epoch_begins(serve: Serve) -> None:
    first, second = serve(2)
    store = RemoteStore([first, second], times=FAST)
    store.create_tables(SPECS)
    who = Identity("job", store.begin_epoch("job", 1, "sync").epoch, 0)
    for step in (1, 2, 3):
        store.pull(who, step, {})
        store.push(who, step, {})
    store.close()
    fresh = ShardServer(Shard(buckets=owned_buckets(1, 2), memory_limit_bytes=64 << 20, backend="cpu"))
    try:
        restarted = RemoteStore([first, fresh.start()], times=FAST)
        restarted.create_tables(SPECS)
        with pytest.raises(NotReady, match="at step 0 while another shard is at step 3.*restarted without its rows"):
            restarted.begin_epoch("job", 1, "sync")
        assert restarted.begin_epoch("job", 1, "sync", will_restore=True).epoch == 2  # a restore mends it
        restarted.close()
    finally:
        fresh.stop()


def test_hints_neither_wait_nor_fail_and_are_dropped_beyond_their_maximum(connect: Callable[..., RemoteStore]) -> None:
    store = connect(1)
    _, ids = started(store)
    channel = store._channels[0]
    for _ in range(10 * shard_channel.MAX_HINTS):
        store.prefetch(ids)
        assert channel._num_hints <= shard_channel.MAX_HINTS
    channel.hint("EmbeddingShard/Prefetch", b"nonsense")
    deadline_s = time.monotonic() + 10
    while channel._num_hints and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert channel._num_hints == 0
    store.close()
    channel.hint("EmbeddingShard/Prefetch", b"")
    assert channel._num_hints == 0
