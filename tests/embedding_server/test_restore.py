"""What a cut holds is there after a restore, bit for bit, whatever the optimizer, policy and number of shards, and the
job goes on as if nothing had happened. What is damaged, missing or does not fit is refused, and leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import heat, segment_growth, table_cut
from embedding_server.errors import FrostlineError, InvalidInput, NotReady, Overloaded, SegmentCorrupt
from embedding_server.snapshot_format import read_shard_record, write_sealed_json
from embedding_server.snapshot_parts import check_none_is_partly_dropped, read_parts, tables_in
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
    small = data.draw(st.sampled_from([0, segment_growth.SMALL_BYTES]))
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
            table.segments._growth.small_bytes = small
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


# What may differ, and what must not -----------------------------------------------------------------------------------


def _trained(root: Path, specs: list[TableSpec] | None = None, num_shards: int = 1) -> Path:
    """The folder of a cut with rows hot, frozen in a segment, frozen at their initial value and waiting."""
    policy = PolicySpec(kind="topk", idle_steps=1, min_count=2, hot_fraction=0.3, probation_visits=0, frozen_bits=8)
    specs = specs or [spec_of(policy.model_copy(update={"control_fraction": 0.0}))]
    with CutShards(specs, num_shards) as shards:
        for k in range(4):
            shards.train(POOL[k::2])
            shards.reselect()
        shards.train(np.arange(1000, 1010, dtype=np.int64))
        return shards.cut(root)


def _restored(folder: Path, specs: list[TableSpec], num_shards: int = 1, **options) -> CutShards:
    shards = CutShards(specs, num_shards, will_restore=True, **options)
    try:
        shards.restore(folder)
    except BaseException:
        shards.__exit__()
        raise
    return shards


def _specs(folder: Path) -> list[TableSpec]:
    return [table.spec for table in read_shard_record(folder / "shard-0-of-1").tables]


def test_the_plain_cut_has_rows_of_every_kind(tmp_path: Path) -> None:
    record = read_shard_record(_trained(tmp_path / "job") / "shard-0-of-1").tables[0]
    assert record.rows_hot > 5
    assert record.rows_initial > 5
    assert record.rows_waiting >= 10
    assert record.segments


def test_policy_and_hyper_parameters_may_differ(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "job")
    policy = PolicySpec(kind="idle", idle_steps=1, frozen_bits=16, half_life_steps=7.0, control_fraction=0.0)
    optimizer = OptimizerSpec(kind="rowwise_adagrad", eps=1e-3, initial_accumulator=0.5, weight_decay=0.01)
    with _restored(folder, _specs(folder)) as same, _restored(folder, [spec_of(policy, optimizer)]) as other:
        before, after = same.state()["t"]["rows"], other.state()["t"]["rows"]
        assert before.keys() == after.keys()
        for row_id, row in before.items():
            assert after[row_id][1:5] == row[1:5], "all but the heat's code and the decay that is owed"
        heats = [
            heat.heat_of_codes(np.array([row[0] for row in rows.values()], np.uint16), same.step, half_life)
            for rows, half_life in ((before, 1000.0), (after, 7.0))
        ]
        np.testing.assert_allclose(heats[0], heats[1], rtol=2e-3)
        for k in range(4):  # rows of both formats thaw, freeze, and their segments merge
            other.train(POOL[k::3])
            other.reselect()
            while other.shards[0].maintain():
                pass


def test_another_optimizer_starts_its_state_anew_and_says_so(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "job")
    spec = _specs(folder)[0].model_copy(update={"optimizer": OptimizerSpec(kind="adam")})
    with _restored(folder, _specs(folder)) as same, _restored(folder, [spec]) as other:
        before, after = same.state()["t"]["rows"], other.state()["t"]["rows"]
        for row_id, row in before.items():
            assert after[row_id][:3] == row[:3]
            if row[1] == "hot":
                assert after[row_id][3] == np.zeros(2 * DIM, np.float32).tobytes()
            elif row[1] == "frozen":
                assert after[row_id][3] == 0
        assert any(row[1] == "frozen" and row[3] for row in before.values())
        assert any("state starts anew" in event for event in other.shards[0].stats().events)
        again = other.cut(tmp_path / "job2")
        assert not any(s.has_state for s in read_shard_record(again / "shard-0-of-1").tables[0].segments)
        at_cut = other.state()
    with _restored(again, [spec]) as third:
        assert third.state() == at_cut


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    a, b, c = (spec_of(name=name) for name in "abc")
    with CutShards([a, b, c]) as shards:
        shards.train(POOL)
        folder = shards.cut(tmp_path / "job")
    other = CutShards([a.model_copy(update={"dim": 16}), b], will_restore=True)
    with other, pytest.raises(InvalidInput) as error:
        other.restore(folder)
    assert "table 'a': dim=16, in the snapshot 8" in str(error.value)
    assert "table 'c' of the snapshot does not exist here" in str(error.value)
    folder = _trained(tmp_path / "job2")
    moved = _specs(folder)[0].model_copy(update={"seed": 7})
    with pytest.raises(InvalidInput, match="seed, init_min, init_max"):
        _restored(folder, [moved])


def test_tables_that_some_shards_have_alone(tmp_path: Path) -> None:
    """A table is created, or dropped, on one shard, and then a failure keeps whoever does it from the others."""
    old, new = spec_of(name="old"), spec_of(name="new")
    with CutShards([old], 2) as shards:
        shards.shards[0].create_tables([new])
        shards.train(np.arange(40))
        created, at_created = shards.cut(tmp_path / "job"), shards.state()
        shards.shards[1].create_tables([new])
        shards.specs["new"] = new
        shards.train(np.arange(20, 60))
        while not shards.shards[1].drop_tables(shards.who, shards.step, ["new"]):
            pass
        dropped = shards.cut(tmp_path / "job")
    for cut, is_torn in ((created, False), (dropped, True)):
        records = [part.record for part in read_parts(cut)]
        if is_torn:
            with pytest.raises(InvalidInput, match=r"table 'new' has rows, and is missing on shards \[1\]"):
                check_none_is_partly_dropped(cut, records)
        else:
            check_none_is_partly_dropped(cut, records)
        assert tables_in(records) == ["old", "new"][: 1 + is_torn]
    with CutShards([old], 3, will_restore=True) as shards:
        shards.restore(created)
        assert shards.state() == at_created


def test_tables_that_were_added_or_dropped_after_a_cut(tmp_path: Path) -> None:
    old, new = spec_of(name="old"), spec_of(name="new")
    with CutShards([old], 2) as shards:
        shards.train(np.arange(40))
        before, at_before = shards.cut(tmp_path / "job"), shards.state()
        for shard in shards.shards:
            shard.create_tables([new])
        shards.specs["new"] = new
        shards.train(np.arange(20, 60))
        after, at_after = shards.cut(tmp_path / "job"), shards.state()

        shards.begin(2, will_restore=True)
        with pytest.raises(InvalidInput, match="'new' is not in the snapshot: name it among those that begin anew"):
            shards.restore(before)
        with pytest.raises(InvalidInput, match="'none', which is to begin anew, does not exist here"):
            shards.shards[0].restore(shards.who, before, ["new", "none"])
        assert shards.tables("new")[0].slots.num_taken > 0
        for shard in shards.shards:
            while not shard.restore(shards.who, before, ["new"]):
                pass
        assert shards.state()["old"] == at_before["old"]
        assert all(table.stats().rows_hot == 0 for table in shards.tables("new"))

        shards.begin(3, will_restore=True)
        shards.restore(after)
        assert shards.state() == at_after
    with CutShards([old], 1, will_restore=True) as shards:  # as after `new` was dropped
        with pytest.raises(InvalidInput, match="table 'new' of the snapshot does not exist here"):
            shards.restore(after)
        for shard in shards.shards:
            shard.create_tables([new])
        shards.specs["new"] = new
        shards.restore(after)
        assert shards.state() == at_after


def test_rows_without_room_are_refused(tmp_path: Path) -> None:
    with CutShards([spec_of(PolicySpec(kind="off"))]) as shards:
        shards.train(np.arange(40_000, dtype=np.int64))
        folder = shards.cut(tmp_path / "job")
    with pytest.raises(Overloaded, match="do not fit"):
        _restored(folder, list(shards.specs.values()), memory_limit_bytes=1 << 20)


def test_only_an_epoch_that_began_for_it_is_restored_and_a_new_one_starts_over(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "job")
    with CutShards(_specs(folder)) as shards:
        shards.train(POOL)
        with pytest.raises(NotReady, match="takes no restore"):
            shards.shards[0].restore(shards.who, folder)
        shards.begin(2, will_restore=True)
        assert not shards.shards[0].restore(shards.who, folder)
        shards.begin(3, will_restore=True)
        assert shards.state()["t"]["rows"] == {}
        shards.restore(folder)
        with _restored(folder, _specs(folder)) as other:
            assert shards.state() == other.state()


def test_counters_add_up_over_shards(tmp_path: Path) -> None:
    specs = [spec_of(PolicySpec(kind="idle", idle_steps=1, control_fraction=0.0))]
    with CutShards(specs, 2) as shards:
        for k in range(4):
            shards.train(POOL[k::2])
            shards.reselect()
        folder = shards.cut(tmp_path / "job")
        frozen = sum(table.moves_frozen for table in shards.tables())
    assert frozen > 0
    for reads in (1, 2, 3):
        with _restored(folder, specs, reads) as again:
            assert sum(table.moves_frozen for table in again.tables()) == frozen


# Damage ---------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    found = [p for p in (*folder.rglob("*"), *(folder.parent / "objects").iterdir()) if p.is_file()]
    assert len(found) >= 4
    return sorted(found)


def _refused(folder: Path, path: Path, specs: list[TableSpec]) -> None:
    shards = CutShards(specs, will_restore=True)
    with shards:
        with pytest.raises(FrostlineError) as error:
            shards.restore(folder)
        assert path.name in str(error.value)
        assert isinstance(error.value, SegmentCorrupt | InvalidInput)
        assert shards.state()["t"]["rows"] == {}
        assert shards.shards[0].current_epoch("job").last_step == 0
        with pytest.raises(NotReady):
            shards.train(POOL)


def test_a_file_that_was_damaged_cut_off_or_lost_is_refused_by_name(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "job")
    specs, rng = _specs(folder), np.random.default_rng(3)
    for path in _files(folder):
        good = path.read_bytes()
        path.unlink()
        _refused(folder, path, specs)
        for at in {0, 9, len(good) // 2, len(good) - 1, *rng.integers(0, len(good), 12).tolist()}:
            damaged = bytearray(good)
            damaged[at] ^= 1 << at % 8
            for data in (bytes(damaged), good[:at], good + b"x"):
                path.write_bytes(data)
                _refused(folder, path, specs)
        path.write_bytes(good)
    with _restored(folder, specs):
        pass


def test_links_in_a_snapshot_are_refused(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "job")
    specs = _specs(folder)
    for path in [*_files(folder), folder / "shard-0-of-1"]:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
        _refused(folder, path, specs)
        path.unlink()
        (tmp_path / "aside").rename(path)


def _change_table(**change) -> Callable[[dict], None]:
    return lambda content: content["tables"][0].update(change)


@pytest.mark.parametrize(
    "change",
    [
        _change_table(rows_hot=2**31 - 1),
        _change_table(rows_hot=1),
        _change_table(rows_initial=2**39),
        _change_table(decay_steps=2**30),
        _change_table(segments=[]),
        lambda content: content["tables"][0]["segments"].append(content["tables"][0]["segments"][0]),
        lambda content: content["tables"][0]["segments"][0].update(digest="../" * 21 + "x"),
        lambda content: content["tables"][0]["segments"][0].update(digest="0" * 64),
        lambda content: content["tables"][0]["segments"][0].update(num_rows=1),
        lambda content: content["tables"].append(content["tables"][0]),
        lambda content: content["tables"][0]["hot"].update(size_bytes=2**62),
        lambda content: content["tables"][0]["spec"].update(dim=4096),
        lambda content: content.update(buckets="00" * 128),
        lambda content: content.update(part=1, num_parts=2),
        lambda content: content.update(step=1),
        lambda content: content.update(tables=[]),
    ],
)
def test_a_hostile_record_is_refused(tmp_path: Path, change: Callable[[dict], None]) -> None:
    """Well sealed, so that only what it says is wrong."""
    folder = _trained(tmp_path / "job")
    specs, path = _specs(folder), folder / "shard-0-of-1" / "shard.json"
    content = json.loads(path.read_text())["content"]
    change(content)
    write_sealed_json(path, content)
    shards = CutShards(specs, will_restore=True)
    with shards:
        if content["tables"]:
            with pytest.raises((SegmentCorrupt, InvalidInput)):
                shards.restore(folder)
        else:
            shards.restore(folder)  # a cut of no table leaves none changed
        assert shards.state()["t"]["rows"] == {}


def test_parts_of_other_cuts_and_missing_parts_are_refused(tmp_path: Path) -> None:
    specs = [spec_of()]
    first = _trained(tmp_path / "job", specs, 2)
    with CutShards(specs, 2) as shards:
        shards.train(POOL)
        second = shards.cut(tmp_path / "other")
    shutil.rmtree(first / "shard-1-of-2")
    with pytest.raises(InvalidInput, match="shard-1-of-2"):
        _restored(first, specs)
    shutil.copytree(second / "shard-1-of-2", first / "shard-1-of-2")
    with pytest.raises(SegmentCorrupt, match="shard-1-of-2: it is of another cut"):
        _restored(first, specs)
    (first / "shard-0-of-3").mkdir()
    with pytest.raises(InvalidInput, match="parts of"):
        _restored(first, specs)
    with pytest.raises(InvalidInput, match="nowhere"):
        _restored(tmp_path / "nowhere", specs)
