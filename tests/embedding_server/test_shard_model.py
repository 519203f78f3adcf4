"""A random history of pulls, pushes, repeats, fences and re-selections against a dictionary model, bit for bit.

SGD with lr 1, zero initial values, small-integer gradients and 32-bit freezing make float32 sums exact and free of
order, so the table must equal the dictionary exactly. A second test freezes to 8 bits and lets the model apply
FBGEMM's own quantise and dequantise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import fbgemm_gpu  # noqa: F401  registers the torch operators
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import heat
from embedding_server.policy import compute_frostline, is_above, rank_bins
from embedding_server.shard import Shard, ShardGradients
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import DEFAULT, FOUND, TRAINABLE, Identity

DIM = 4
POOL = [-(2**63), 2**63 - 1, -1, 0, 1, *range(100, 130)]


@dataclass
class Row:
    values: np.ndarray
    hot: bool = True
    last_step: int = 0
    visits: int = 0
    heat: int = 0


@dataclass
class Model:
    """The table as a dictionary. Every rule is written once more here, row by row."""

    policy: PolicySpec
    quantise: bool = False
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    counted: set[tuple[int, int]] = field(default_factory=set)
    default: np.ndarray = field(default_factory=lambda: np.zeros(DIM, np.float32))
    frostline: object = None

    def visit(self, row_id: int, step: int) -> None:
        first = (row_id, step) not in self.counted
        self.counted.add((row_id, step))
        row = self.rows.get(row_id)
        if row is None:
            self.counts[row_id] = self.counts.get(row_id, 0) + first
            if self.counts[row_id] >= self.policy.min_count:
                self.rows[row_id] = self._new(row_id, step)
            return
        if not first:
            return
        row.visits = min(255, row.visits + 1)
        row.heat = self._bump(row.heat, row_id, step)
        row.last_step = step
        if self.policy.kind == "idle":
            row.hot = True

    def _new(self, row_id: int, step: int) -> Row:
        row = Row(np.zeros(DIM, np.float32), last_step=step, visits=self.policy.min_count)
        row.heat = self._bump(0, row_id, step)
        if self.frostline is not None and not self.policy.probation_visits:
            code = int(heat.now_code(step, self.policy.half_life_steps))
            row.hot = self._above(row_id, code)
        return row

    def _bump(self, code: int, row_id: int, step: int) -> int:
        if self.policy.kind == "off":
            return 0
        now = heat.now_code(step, self.policy.half_life_steps)
        return int(heat.bump(np.uint16(code), now, np.int64(row_id), step, heat.LOG_TABLE))

    def _above(self, row_id: int, code: int) -> bool:
        ids = np.array([row_id], np.int64)
        return bool(is_above(self.frostline, rank_bins(self.policy, ids, np.array([code], np.uint16)), ids)[0])

    def reselect(self, step: int, frostline: object) -> None:
        if self.policy.kind == "topk":
            self.frostline = frostline
        for row_id, row in self.rows.items():
            if self.policy.kind == "idle" and row.hot and row.last_step + self.policy.idle_steps <= step:
                self._freeze(row)
            if self.policy.kind == "topk":
                above = self._above(row_id, row.heat)
                if row.hot and not above and row.visits >= self.policy.probation_visits:
                    self._freeze(row)
                elif not row.hot and above:
                    row.hot = True

    def _freeze(self, row: Row) -> None:
        row.hot = False
        if self.quantise:
            fused = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(row.values[None].copy()))
            row.values = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(fused).numpy()[0]


@dataclass
class Harness:
    spec: TableSpec
    num_workers: int
    mode: str
    model: Model

    def __post_init__(self) -> None:
        self.shard = Shard(memory_limit_bytes=1 << 20)
        self.shard.create_tables([self.spec])
        self.step = 0
        self.fence()

    def fence(self) -> None:
        info = self.shard.begin_epoch("job", self.num_workers, self.mode, self.shard.current_epoch("job").epoch + 1)
        self.epoch = info.epoch

    def who(self, worker: int) -> Identity:
        return Identity("job", self.epoch, worker)

    def pull(self, worker: int, ids: np.ndarray):
        future = self.shard.pull(self.who(worker), self.step, {"t": ids}, "float32")
        return future.result(0)["t"]

    def check_rows(self, ids: np.ndarray, rows, *, pulled: bool) -> None:
        for i, row_id in enumerate(ids.tolist()):
            row = self.model.rows.get(row_id)
            if row is None:
                reads_default = pulled or self.spec.policy.min_count > 1
                expected = self.model.default if reads_default else np.zeros(DIM, np.float32)
                assert rows.flags[i] == (DEFAULT if reads_default else 0)
            else:
                expected = row.values
                assert rows.flags[i] == (TRAINABLE | FOUND if row.hot else FOUND), row_id
            assert rows.values[i].tobytes() == expected.tobytes(), row_id

    def run_step(self, draw) -> None:
        self.step += 1
        batches = [
            np.array(sorted(draw(st.sets(st.sampled_from(POOL), max_size=8))), np.int64) for _ in self._workers()
        ]
        repeats = draw(st.integers(0, 7))
        for worker, ids in enumerate(batches):
            for row_id in ids.tolist():
                self.model.visit(row_id, self.step)
            self.pull(worker, ids)
        if repeats & 1:
            self.fence()
            for worker, ids in enumerate(batches):
                self.pull(worker, ids)
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
                self.model.rows[row_id].values = self.model.rows[row_id].values - gradient / self.num_workers
        for push in pushes:
            if push.default_gradient is not None:
                self.model.default = self.model.default - push.default_gradient / self.num_workers

    def _push_one(self, worker: int, push: ShardGradients):
        return self.shard.push(self.who(worker), self.step, {"t": push}, "float32")

    def reselect(self) -> None:
        frostlines = {}
        if self.spec.policy.kind == "topk":
            histogram = self.shard.heat_histograms(self.who(0), self.step)["t"]
            frostlines = {"t": compute_frostline(histogram, self.spec.policy.hot_fraction)}
        before = self.frozen_bytes()
        while not self.shard.reselect(self.who(0), self.step, frostlines)[1]:
            pass
        while self.shard.maintain():
            pass
        already = {r: b for r, b in before.items() if not self.model.rows[r].hot}
        self.model.reselect(self.step, frostlines.get("t"))
        after = self.frozen_bytes()
        for row_id, stored in already.items():
            if not self.model.rows[row_id].hot:
                assert after[row_id] == stored

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
        stats = self.shard.stats().tables["t"]
        assert stats.rows_hot == sum(row.hot for row in self.model.rows.values())
        assert stats.rows_frozen == sum(not row.hot for row in self.model.rows.values())
        entries = self.shard._tables["t"].index.scan(0, 1024)
        codes = dict(zip(entries.row_ids.tolist(), entries.heat.tolist(), strict=True))
        assert codes == {row_id: row.heat for row_id, row in self.model.rows.items()}


def _memory(address: int, size: int):
    import ctypes

    return (ctypes.c_ubyte * size).from_address(address)


policies = st.one_of(
    st.builds(PolicySpec, kind=st.just("off"), min_count=st.integers(1, 3)),
    st.builds(PolicySpec, kind=st.just("idle"), idle_steps=st.integers(1, 4), min_count=st.integers(1, 3)),
    st.builds(
        PolicySpec,
        kind=st.just("topk"),
        hot_fraction=st.sampled_from([0.1, 0.4, 1.0]),
        probation_visits=st.integers(0, 3),
        min_count=st.integers(1, 2),
        select=st.sampled_from(["topk", "random"]),
        half_life_steps=st.sampled_from([2.0, 50.0]),
    ),
)


def _run(data, *, frozen_bits: int) -> None:
    policy = data.draw(policies).model_copy(update={"frozen_bits": frozen_bits})
    spec = TableSpec(name="t", dim=DIM, optimizer=OptimizerSpec(kind="sgd"), policy=policy, init_min=0.0, init_max=0.0)
    model = Model(policy, quantise=frozen_bits == 8)
    harness = Harness(spec, data.draw(st.integers(1, 2)), data.draw(st.sampled_from(["sync", "pipelined"])), model)
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            harness.run_step(data.draw)
            if data.draw(st.booleans()):
                harness.reselect()
            harness.check_all()
    finally:
        harness.shard.close()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_history_equals_dictionary_bit_for_bit(data) -> None:
    _run(data, frozen_bits=32)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_history_with_8_bit_freezing_equals_fbgemm_model(data) -> None:
    _run(data, frozen_bits=8)
