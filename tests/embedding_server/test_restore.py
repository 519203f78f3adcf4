"""What a cut holds is there after a restore, bit for bit, whatever the optimizer, policy and number of shards, and the
job goes on as if nothing had happened. What is damaged, missing or does not fit is refused, and leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import segments, table_cut
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from tests.embedding_server.cut_shards import CutShards

DIM = 8
POOL = np.array([-(2**63), 2**63 - 1, -1, 0, 1, *range(100, 190)], np.int64)

optimizers = st.builds(
    OptimizerSpec,
    kind=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
policies = st.builds(
    PolicySpec,
    kind=st.sampled_from(["off", "idle", "topk", "compact"]),
    idle_steps=st.integers(1, 4),
    hot_fraction=st.sampled_from([0.2, 0.6]),
    probation_visits=st.integers(0, 2),
    min_count=st.integers(1, 3),
    forget_below=st.integers(0, 2),
    frozen_bits=st.sampled_from([4, 8, 16, 32]),
    hot_bits=st.sampled_from([16, 32]),
    half_life_steps=st.sampled_from([0.05, 2.0, 1000.0]),  # 0.05: the origin of heat moves about every step
    control_fraction=st.sampled_from([0.0, 0.3]),
)


def spec_of(policy: PolicySpec | None = None, optimizer: OptimizerSpec | None = None, **more) -> TableSpec:
    more = {"name": "t", "dim": DIM, **more}
    return TableSpec(optimizer=optimizer or OptimizerSpec(), policy=policy or PolicySpec(), **more)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_any_cut_restores_and_goes_on_bit_for_bit(tmp_path_factory, data, writes: int, reads: int) -> None:
    root = tmp_path_factory.mktemp("cut") / "job"
    spec = spec_of(data.draw(policies), data.draw(optimizers))
    mode = data.draw(st.sampled_from(["sync", "pipelined"]))
    small = data.draw(st.sampled_from([0, segments.SMALL_BYTES]))
    batches = data.draw(st.lists(st.sets(st.sampled_from(POOL.tolist()), max_size=40), min_size=2, max_size=7))
    cut_at = data.draw(st.integers(1, len(batches)))
    reselects = data.draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches)))

    def step(shards: CutShards, k: int) -> object:
        seen = shards.train(np.array(sorted(batches[k]), np.int64), seed=k)
        if reselects[k]:
            shards.reselect()
        return seen

    with pytest.MonkeyPatch.context() as patch, CutShards([spec], writes, mode=mode) as shards:
        patch.setattr(table_cut, "_SLICE_ROWS", 3)
        for table in shards.tables():
            table.segments._small_rows = dict.fromkeys(table.segments.formats, small)
        for k in range(cut_at):
            step(shards, k)
        folder = shards.begin_cut(root)
        at_cut = shards.state()
        shards.between = lambda shard: [shard.maintain() for _ in range(data.draw(st.integers(0, 5)))]
        later = [step(shards, k) for k in range(cut_at, len(batches))]
        shards.finish_cut()
        in_the_end = shards.state()
    with CutShards([spec], reads, mode=mode, will_restore=True) as resumed:
        resumed.restore(folder)
        assert resumed.state() == at_cut
        again = [step(resumed, k) for k in range(cut_at, len(batches))]
        # what a row owes of weight decay, and how adam freezes it, hang on when its shard had gradients
        if writes == reads or (spec.optimizer.weight_decay == 0.0 and spec.optimizer.kind != "adam"):
            assert (again, resumed.state()) == (later, in_the_end)
