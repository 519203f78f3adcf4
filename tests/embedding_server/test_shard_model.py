"""A random history of a table against a dictionary model, bit for bit: pulls, pushes, repeats, fences, re-selections,
ends of data passes, a cap of hot bytes, a control group.

SGD with lr 1, zero initial values, small-integer gradients and 32-bit freezing make float32 sums exact and free of
order, so the table must equal the dictionary exactly. A second test freezes to 4 or 8 bits and lets the model apply
FBGEMM's own quantise and dequantise, or the reference's quantise where rows are rounded at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import heat
from embedding_server.hints import Hint
from embedding_server.lookup import INITIAL
from embedding_server.policy import frostline_at
from embedding_server.reserved import PAGE_BYTES
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, ScheduleSpec, TableSpec
from embedding_server.store import BAND_SHIFT, DEFAULT, FOUND, TRAINABLE, Identity
from tests.embedding_server import looked_up
from tests.embedding_server.table_model import NO_CAP, Row, TableModel

DIM = 4
HOT_ROW_BYTES = 4 * DIM + 5  # sgd: weights, last_step, visits
POOL = [-(2**63), 2**63 - 1, -1, 0, 1, *range(100, 130)]


@dataclass
class Harness:
    spec: TableSpec
    num_workers: int
    mode: str
    model: TableModel
    has_hints: bool = False  # a Prefetch of every row_id comes between any two calls

    def __post_init__(self) -> None:
        self.shard = Shard(memory_limit_bytes=1 << 20)
        self.shard.create_tables([self.spec])
        self.step = 0
        self.fence()

    def fence(self) -> None:
        info = self.shard.begin_epoch("job", self.num_workers, self.mode, self.shard.current_epoch("job").epoch + 1)
        self.epoch = info.epoch

    def hint(self) -> None:
        if self.has_hints:
            Hint({"t": np.array(POOL, np.int64)}).run(lambda advance: advance(self.shard))

    def who(self, worker: int) -> Identity:
        return Identity("job", self.epoch, worker)

    def pull(self, worker: int, ids: np.ndarray):
        self.hint()
        future = self.shard.pull(self.who(worker), self.step, {"t": ids}, "float32")
        return future.result(0)["t"]

    def visit(self, worker: int, ids: np.ndarray) -> None:
        """A Pull that is not a repeat, here and in the model."""
        self.pull(worker, ids)
        self.model.pull(ids.tolist(), self.step, self.is_frozen)
        stats = self.shard.stats().tables["t"]
        if self.spec.policy.hot_bytes is not None:
            assert stats.bytes_hot + stats.bytes_state <= self.spec.policy.hot_bytes

    def is_frozen(self, row_id: int) -> bool:
        return bool(self.shard._tables["t"].index.locate(np.array([row_id], np.int64))[1][0] >> 31)

    def check_rows(self, ids: np.ndarray, rows, *, pulled: bool) -> None:
        for i, row_id in enumerate(ids.tolist()):
            row = self.model.rows.get(row_id)
            if row is None:
                reads_default = pulled or self.spec.policy.min_count > 1
                expected = self.model.default.values if reads_default else np.zeros(DIM, np.float32)
                assert rows.flags[i] == (DEFAULT if reads_default else 0)
            else:
                expected = row.values
                flags = (TRAINABLE | FOUND if row.hot else FOUND) | self.band(row) << BAND_SHIFT
                assert rows.flags[i] == flags, row_id
            assert rows.values[i].tobytes() == expected.tobytes(), row_id

    def check_look_ups(self, ids: np.ndarray) -> None:
        """Every row in every encoding and pooling, as a client reads it."""
        rows = [self.model.rows.get(row_id) for row_id in ids.tolist()]
        is_counted = self.spec.policy.min_count > 1
        absent = self.model.default.values if is_counted else np.zeros(DIM, np.float32)
        values = np.array([absent if row is None else row.values for row in rows], np.float32)
        flags = [(DEFAULT if is_counted else 0) if row is None else _state(row) for row in rows]
        looked_up.check_rows(self.shard.lookups, "t", ids, values, np.array(flags, np.uint8))

    def band(self, row: Row) -> int:
        """min(31, floor(4 log2 heat)) at the newest step; 0 for heat below 1."""
        if self.spec.policy.kind == "off":
            return 0
        octaves = (row.heat - heat.now_code(self.step, self.spec.policy.half_life_steps)) / heat.CODES_PER_OCTAVE
        return max(0, min(31, math.floor(4 * octaves)))

    def run_step(self, draw) -> None:
        self.step += 1
        batches = [
            np.array(sorted(draw(st.sets(st.sampled_from(POOL), max_size=8))), np.int64) for _ in self._workers()
        ]
        repeats = draw(st.integers(0, 7))
        for worker, ids in enumerate(batches):
            self.visit(worker, ids)
        if repeats & 1:
            self.fence()
            for worker, ids in enumerate(batches):
                self.visit(worker, ids)  # only what found no room the first time is tried again
        pushes = []
        for worker, ids in enumerate(batches):
            rows = self.pull(worker, ids)  # a repeat, after all workers admitted their rows
            self.check_rows(ids, rows, pulled=True)
            pushes.append(self._gradients(draw, ids, rows))
        self._push(pushes, fence_between=bool(repeats & 2), repeat=bool(repeats & 4))

    def _workers(self) -> range:
        return range(self.num_workers)

    def _gradients(self, draw, ids: np.ndarray, rows) -> ShardGradients:
        seed = draw(st.integers(0, 2**16))
        rng = np.random.default_rng(seed)
        hot = np.flatnonzero(rows.flags & TRAINABLE)
        values = rng.integers(-6, 7, (hot.shape[0], DIM)).astype(np.float32) * self.num_workers
        has_default = bool((rows.flags & DEFAULT).any())
        default = rng.integers(-6, 7, DIM).astype(np.float32) * self.num_workers if has_default else None
        return ShardGradients(ids[hot], values, 1.0, default)

    def _push(self, pushes: list[ShardGradients], *, fence_between: bool, repeat: bool) -> None:
        futures = [self._push_one(0, pushes[0])]
        applied_early = self.mode == "pipelined" or self.num_workers == 1
        if fence_between:
            self.fence()
            futures = [self._push_one(0, pushes[0])]
            assert (futures[0].done() and futures[0].result().duplicate) == applied_early
        futures += [self._push_one(worker, pushes[worker]) for worker in self._workers()[1:]]
        for future in futures:
            assert future.result(0).rows_ignored == 0
        if repeat:
            for worker in self._workers():
                assert self._push_one(worker, pushes[worker]).result(0).duplicate
        self._apply_to_model(pushes)

    def _apply_to_model(self, pushes: list[ShardGradients]) -> None:
        """sync sums a row's gradients before it applies them; after 8 bits a row is no integer, so the order shows."""
        steps = [dict(zip(push.row_ids.tolist(), push.values, strict=True)) for push in pushes]
        if self.mode == "sync":
            total: dict[int, np.ndarray] = {}
            for one in steps:
                for row_id, gradient in one.items():
                    total[row_id] = total.get(row_id, np.zeros(DIM, np.float32)) + gradient
            steps = [total]
        for one in steps:
            for row_id, gradient in one.items():
                self.model.apply(self.model.rows[row_id], gradient, 1 / self.num_workers)
        for push in pushes:
            if push.default_gradient is not None:
                self.model.apply(self.model.default, push.default_gradient, 1 / self.num_workers)

    def _push_one(self, worker: int, push: ShardGradients):
        self.hint()
        return self.shard.push(self.who(worker), self.step, {"t": push}, "float32")

    def reselect(self) -> None:
        frostlines = {}
        if self.spec.policy.kind == "topk":
            histogram = self.shard.heat_histograms(self.who(0), self.step)["t"]
            frostlines = {"t": frostline_at(self.spec.policy, histogram, self.step)}
        before = self.frozen_bytes()
        job = self.shard._jobs.job_of(self.who(0))
        assert not (job.staged or job.defaults or job.waiting_pulls), "at a barrier the steps say all of a job"
        while not self.shard.reselect(self.who(0), self.step, frostlines)[1]:
            self.hint()
        self._maintain()
        self.model.reselect(self.step, frostlines.get("t"), self.is_frozen)
        self._check_frozen_bytes(before)

    def end_data_pass(self) -> None:
        before = self.frozen_bytes()
        while not self.shard.end_data_pass(self.who(0), self.step)[1]:
            self.hint()
        self._maintain()
        self.model.end_data_pass()
        self._check_frozen_bytes(before)

    def _maintain(self) -> None:
        while self.shard.maintain():
            self.hint()

    def _check_frozen_bytes(self, before: dict[int, bytes]) -> None:
        """What was frozen and still is has not changed a bit."""
        after = self.frozen_bytes()
        for row_id in before.keys() & after.keys():
            assert after[row_id] == before[row_id]

    def frozen_bytes(self) -> dict[int, bytes]:
        """The stored bytes of every frozen row."""
        table = self.shard._tables["t"]
        entries = table.index.scan(0, 1024)
        out = {}
        for row_id, location in zip(entries.row_ids.tolist(), entries.locations, strict=True):
            if location >> 31 and location != 0xFFFFFFFF:
                address = table.segments.addresses(np.array([location], np.uint32))[0]
                out[row_id] = bytes(_memory(int(address), table.segments.row_bytes))
        return out

    def check_all(self) -> None:
        ids = np.array(POOL, np.int64)
        self.check_rows(ids, self.shard.lookup({"t": ids}, "float32")["t"], pulled=False)
        self.check_look_ups(ids)
        stats = self.shard.stats().tables["t"]
        assert stats.rows_hot == sum(row.hot for row in self.model.rows.values())
        assert stats.rows_frozen == sum(not row.hot for row in self.model.rows.values())
        for reason in ("frozen_idle", "frozen_rank", "frozen_limit", "thawed_visit", "thawed_rank", "forgotten"):
            assert getattr(stats, f"moves_{reason}") == self.model.moves[reason], reason
        assert stats.moves_frozen == stats.moves_frozen_idle + stats.moves_frozen_rank + stats.moves_frozen_limit
        assert stats.moves_thawed == stats.moves_thawed_visit + stats.moves_thawed_rank
        assert stats.bytes_peak >= stats.bytes_total
        entries = self.shard._tables["t"].index.scan(0, 1024)
        codes = dict(zip(entries.row_ids.tolist(), entries.heat.tolist(), strict=True))
        assert codes == {row_id: row.heat for row_id, row in self.model.rows.items()}


def _state(row: Row) -> int:
    """Flags of a look-up."""
    if row.hot:
        return TRAINABLE | FOUND
    return FOUND if row.stored is not None else FOUND | INITIAL


def _memory(address: int, size: int):
    import ctypes

    return (ctypes.c_ubyte * size).from_address(address)


policies = st.one_of(
    st.builds(PolicySpec, kind=st.just("off"), min_count=st.integers(1, 3)),
    st.builds(PolicySpec, kind=st.just("idle"), idle_steps=st.integers(1, 4), min_count=st.integers(1, 3)),
    st.builds(
        PolicySpec,
        kind=st.just("compact"),
        idle_steps=st.integers(1, 4),
        min_count=st.integers(1, 2),
        half_life_steps=st.sampled_from([2.0, 50.0]),
    ),
    st.builds(
        PolicySpec,
        kind=st.just("topk"),
        hot_fraction=st.sampled_from([0.1, 0.4, 1.0]),
        probation_visits=st.integers(0, 3),
        idle_steps=st.integers(1, 4),
        resume=st.booleans(),
        hysteresis=st.sampled_from([0.0, 0.5]),
        max_moves_fraction=st.sampled_from([1.0, 0.3]),
        schedule=st.sampled_from([ScheduleSpec(), ScheduleSpec(kind="linear", warmup_steps=1, steps=4)]),
        min_count=st.integers(1, 2),
        select=st.sampled_from(["topk", "random"]),
        half_life_steps=st.sampled_from([2.0, 50.0]),
    ),
)


def _run(data, *, frozen_bits: int) -> None:
    max_hot = data.draw(st.sampled_from([NO_CAP, 3, 8, 20]))
    policy = data.draw(policies).model_copy(
        update={
            "frozen_bits": frozen_bits,
            "freeze_rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
            "forget_below": data.draw(st.integers(0, 4)),
            "epoch_end": data.draw(st.sampled_from(["keep", "forget_rare"])),
            "control_fraction": data.draw(st.sampled_from([0.0, 0.3])),
            "hot_bytes": None if max_hot == NO_CAP else 4 * PAGE_BYTES + max_hot * HOT_ROW_BYTES,
        }
    )
    spec = TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0.0, init_max=0.0)
    mode = data.draw(st.sampled_from(["sync", "pipelined"]))
    harness = Harness(
        spec, data.draw(st.integers(1, 2)), mode, TableModel(spec, POOL, max_hot), data.draw(st.booleans())
    )
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            harness.run_step(data.draw)
            what = data.draw(st.integers(0, 3))
            if what & 1:
                harness.reselect()
            if what & 2:
                harness.end_data_pass()
            harness.check_all()
    finally:
        harness.shard.close()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_history_equals_dictionary_bit_for_bit(data) -> None:
    _run(data, frozen_bits=32)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_history_with_quantised_freezing_equals_fbgemm_model(data) -> None:
    _run(data, frozen_bits=data.draw(st.sampled_from([4, 8])))
