"""A delta restores, with what it builds on, to what a full cut of its step does, whatever happened since its parent and
while it was written; it writes weights and state of rows that changed, and no others. A chain that is not whole, or not
one, is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedding_server import restore, snapshot_file, table_cut
from embedding_server.errors import InvalidInput, SegmentCorrupt
from embedding_server.shard import ShardGradients
from embedding_server.snapshot_check import Findings, check_part
from embedding_server.snapshot_format import read_sealed_json, read_shard_record, write_sealed_json
from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rewrite import rewrite_part
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import MAX_SEQUENCE, Frostline
from tests.embedding_server.cut_shards import CutShards, gradients_of
from tests.embedding_server.test_cut import check_equal, make_harness, restored, run_step
from tests.embedding_server.test_restore import POOL, optimizers, policies, spec_of

DIM = 8


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_cut, "_SLICE_ROWS", 2)
        yield


# Any history ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3), st.booleans())
def test_a_chain_of_a_history_equals_the_model_at_each_step(tmp_path_factory, data, num_shards: int, capped) -> None:
    """One shard writes, with the dictionary model of test_shard_model.py beside it."""
    root, harness = tmp_path_factory.mktemp("chain") / "job", make_harness(data, capped=capped)
    harness.draw = data.draw
    cuts, shards = [], []
    try:
        for _ in range(data.draw(st.integers(2, 4))):
            for _ in range(data.draw(st.integers(1, 2))):
                run_step(data, harness)
            harness.begin_cut(root, cuts[-1][0] if cuts else None)
            for _ in range(data.draw(st.integers(0, 2))):
                run_step(data, harness)
            harness.finish_cut()
            assert harness.shard.cut_progress(harness.who(0)).error is None
            cuts.append((harness.folder, harness.at_cut))
        for folder, at_cut in (cuts[-1], data.draw(st.sampled_from(cuts))):
            harness.folder, harness.at_cut = folder, at_cut
            num = 1 if capped else num_shards  # a share of hot_bytes holds fewer rows
            shards = restored(harness, num)
            check_equal(shards, harness)
            for shard in shards:
                shard.close()
            shards = []
    finally:
        for shard in (harness.shard, *shards):
            shard.close()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_a_chain_equals_a_full_cut_of_the_same_step(tmp_path_factory, data, writes: int, reads: int) -> None:
    """All optimizers, weight decay, several shards that write; compacted, too."""
    root = tmp_path_factory.mktemp("chain") / "job"
    spec = spec_of(data.draw(policies), data.draw(optimizers))
    mode = data.draw(st.sampled_from(["sync", "pipelined"]))
    some_ids = st.sets(st.sampled_from(POOL.tolist()), max_size=30)
    with CutShards([spec], writes, mode=mode) as shards:
        for table in shards.tables():
            table.segments._growth.small_bytes = data.draw(st.sampled_from([0, 1 << 20]))
        parent = None
        for number in range(data.draw(st.integers(2, 4))):
            for k in range(data.draw(st.integers(1, 2))):
                shards.train(np.array(sorted(data.draw(some_ids)), np.int64), seed=k + number)
            if data.draw(st.booleans()):
                shards.reselect()
            parent = shards.begin_cut(root, parent)
            at_cut = shards.state()
            shards.between = lambda shard: [shard.maintain() for _ in range(data.draw(st.integers(0, 5)))]
            if data.draw(st.booleans()):
                shards.train(np.array(sorted(data.draw(some_ids)), np.int64), seed=9)
            if data.draw(st.booleans()):
                shards.reselect()  # at the cut's step, or one later
            shards.between = lambda shard: None
            shards.finish_cut()
        last = shards.state()
        shards.train(np.empty(0, np.int64))
        delta = shards.cut(root, parent)
        full = shards.cut(root.with_name("full"))
        assert shards.state()["t"]["rows"].keys() == last["t"]["rows"].keys()
        in_the_end = shards.state()
    compacted = root / "cut-000000000099-9"
    parts = read_parts(parent)
    for part in parts:
        rewrite_part(part, compacted, 9)
    assert not any(read_shard_record(path).sequence for path in compacted.iterdir())
    for folder, expected in ((parent, at_cut), (compacted, at_cut), (delta, in_the_end), (full, in_the_end)):
        with CutShards([spec], reads, mode=mode, will_restore=True) as resumed:
            resumed.restore(folder)
            assert resumed.state() == expected
    findings = Findings()
    for part in parts:
        check_part(part, findings)
    assert findings.messages == []


# What counts as changed -----------------------------------------------------------------------------------------------

FIRST, SOME = np.arange(200, dtype=np.int64), np.arange(40, 60, dtype=np.int64)
NONE = np.empty(0, np.int64)


def _push_alone(shards: CutShards, row_ids: np.ndarray) -> None:
    """A Push of rows that the step's Pull did not name."""
    shard = shards.shards[0]
    shards.step += 1
    shard.pull(shards.who, shards.step, {"t": NONE}, "float32").result(0)
    push = ShardGradients(row_ids, gradients_of(row_ids, DIM, shards.step, 3), 0.5)
    assert shard.push(shards.who, shards.step, {"t": push}, "float32").result(0).rows_applied == row_ids.shape[0]


def _pull_alone(shards: CutShards, row_ids: np.ndarray) -> None:
    """Visits without gradients; with weight decay the rows are settled."""
    shard = shards.shards[0]
    shards.step += 1
    shard.pull(shards.who, shards.step, {"t": row_ids}, "float32").result(0)
    shard.push(shards.who, shards.step, {"t": ShardGradients(NONE, np.empty((0, DIM), np.float32), 0.5)}, "float32")


def _freeze_and_thaw(shards: CutShards, row_ids: np.ndarray) -> None:
    shards.train(np.setdiff1d(FIRST, row_ids))
    shards.reselect()  # idle_steps=1: the others freeze
    shards.train(row_ids)


def _compact(shards: CutShards, row_ids: np.ndarray) -> None:
    """Rows move to other slots: half of all freeze, and the tail of the slots goes."""
    shards.train(row_ids)
    shards.train(FIRST[100:])
    shards.reselect()
    table = shards.tables()[0]
    while table.maintain():
        pass
    assert table.slots.high_water == 100


def _return_as_new(shards: CutShards, row_ids: np.ndarray) -> None:
    """Policy compact: rows are forgotten, and are new ones when they come back."""
    shards.train(np.setdiff1d(FIRST, row_ids))
    shards.train(np.setdiff1d(FIRST, row_ids))
    shards.reselect()
    assert shards.tables()[0].moves_forgotten == row_ids.shape[0]
    shards.train(row_ids)


OFF = PolicySpec(kind="off")
IDLE = PolicySpec(kind="idle", idle_steps=1, frozen_bits=32, control_fraction=0.0)
COMPACT = PolicySpec(kind="compact", idle_steps=2, forget_below=2, frozen_bits=32, control_fraction=0.0)
DECAY = OptimizerSpec(kind="adam", weight_decay=0.1)


@pytest.mark.parametrize(
    ("change", "policy", "optimizer", "written"),
    [
        (lambda shards, ids: shards.train(ids), OFF, OptimizerSpec(), 20),
        (_push_alone, OFF, OptimizerSpec(), 20),
        (_push_alone, IDLE, OptimizerSpec(), 20),
        (_pull_alone, OFF, DECAY, 20),
        (_pull_alone, IDLE, DECAY, 20),
        (_pull_alone, IDLE, OptimizerSpec(), 0),
        (_freeze_and_thaw, IDLE, DECAY, 200),
        (_compact, IDLE, OptimizerSpec(), 100),
        (_return_as_new, COMPACT, OptimizerSpec(), 200),
        (lambda shards, ids: shards.train(ids + 1000), OFF, OptimizerSpec(), 20),
        (lambda shards, ids: shards.train(NONE), OFF, DECAY, 0),
        (lambda shards, ids: _pull_alone(shards, ids + 1000), OFF, OptimizerSpec(), 20),  # new rows without a gradient
    ],
)
def test_rows_that_changed_are_written_and_no_others(
    tmp_path: Path, change: Callable, policy: PolicySpec, optimizer: OptimizerSpec, written: int
) -> None:
    spec = spec_of(policy, optimizer)
    with CutShards([spec]) as shards:
        shards.train(FIRST)
        full = shards.cut(tmp_path / "job")
        change(shards, SOME)
        delta, at_delta = shards.cut(tmp_path / "job", full), shards.state()
        shards.train(np.arange(30, 50, dtype=np.int64))
        second, at_second = shards.cut(tmp_path / "job", delta), shards.state()
    record = read_shard_record(delta / "shard-0-of-1")
    assert record.tables[0].rows_written == written
    assert (record.sequence, record.parent.step) == (1, 1)
    for folder, expected in ((delta, at_delta), (second, at_second)):
        with CutShards([spec], 2, will_restore=True) as again:
            again.restore(folder)
            assert again.state() == expected


def test_a_row_that_thaws_at_the_parents_step_behind_the_parent_is_written(tmp_path: Path) -> None:
    spec = spec_of(PolicySpec(kind="topk", probation_visits=0, frozen_bits=4, control_fraction=0.0))
    with CutShards([spec]) as shards:
        shard = shards.shards[0]

        def reselect(bin_: int) -> None:
            while not shard.reselect(shards.who, shards.step, {"t": Frostline(bin_)})[1]:
                pass

        shards.train(FIRST)
        full = shards.cut(tmp_path / "job")
        shards.train(NONE)
        reselect(4095)  # all freeze
        frozen = shards.cut(tmp_path / "job", full)
        reselect(-1)  # at the step of that cut, and all thaw, in 4 bits other rows than in the full cut
        shards.train(NONE)
        delta, expected = shards.cut(tmp_path / "job", frozen), shards.state()
    assert [read_shard_record(cut / "shard-0-of-1").tables[0].rows_written for cut in (frozen, delta)] == [0, 200]
    with CutShards([spec], will_restore=True) as again:
        again.restore(delta)
        assert again.state() == expected


def test_a_delta_costs_what_changed(tmp_path: Path) -> None:
    spec = TableSpec(name="t", dim=64, policy=PolicySpec(kind="off"))
    with CutShards([spec]) as shards:
        ids = np.arange(20_000, dtype=np.int64)
        shards.train(ids)
        full = shards.cut(tmp_path / "job")
        size = shards.shards[0].cut_progress(shards.who).bytes_written
        shards.train(ids[:200])
        shards.cut(tmp_path / "job", full)
        of_delta = shards.shards[0].cut_progress(shards.who).bytes_written
    assert of_delta < 0.08 * size, "15 bytes a row, and 260 for each of one percent"


# What may be a parent -------------------------------------------------------------------------------------------------


def _refuses(shards: CutShards, root: Path, parent: Path, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        shards.begin_cut(root, parent)
    assert not shards.shards[0].is_cutting


def test_only_a_cut_that_was_completed_in_the_epoch_is_a_parent(tmp_path: Path) -> None:
    root, why = tmp_path / "job", r"parent=.* is no earlier cut .* take a full cut"
    with CutShards([spec_of(OFF)]) as shards:
        shards.train(FIRST)
        _refuses(shards, root, root / "cut-000000000000-1", why)
        full = shards.cut(root)
        shards.train(FIRST)
        _refuses(shards, tmp_path / "other", full, why)
        given_up = shards.begin_cut(root, full)
        shards.shards[0].abandon_cut(shards.who)
        shards.train(FIRST)
        _refuses(shards, root, given_up, why)
        shards.cut(root, full)  # an earlier one that is whole
        shards.train(FIRST)
        shards.begin_cut(root)
        shards.shards[0].abandon_cut(shards.who)
        shards.train(FIRST)
        _refuses(shards, root, full, why)  # the full one has begun to count anew
        last = shards.cut(root)
        shards.begin(2)
        shards.train(FIRST)
        _refuses(shards, root, last, why)


def test_a_parent_that_is_gone_or_begun_anew_is_none(tmp_path: Path) -> None:
    root = tmp_path / "job"
    with CutShards([spec_of(OFF)]) as shards:
        cuts: list[Path] = []
        for _ in range(3):
            shards.train(FIRST)
            cuts.append(shards.cut(root, cuts[-1] if cuts else None))
        shards.train(FIRST)
        for gone in (cuts[2], cuts[0]):
            gone.rename(tmp_path / "aside")
            _refuses(
                shards, root, cuts[2], rf"is of no use: .*{gone.name}/shard-0-of-1/shard.json is gone; take a full"
            )
            (tmp_path / "aside").rename(gone)
        cuts.append(shards.cut(root, cuts[2]))
        shutil.rmtree(cuts[3])
        shards.begin_cut(root, cuts[2])
        shards.shards[0].abandon_cut(shards.who)
        shards.train(FIRST)
        _refuses(shards, root, cuts[3], "is no earlier cut")


def test_a_delta_that_fails_at_any_write_leaves_a_chain_that_goes_on(tmp_path: Path, monkeypatch) -> None:
    root, failures, nth = tmp_path / "job", 0, 0
    with CutShards([spec_of(IDLE)]) as shards:
        shards.train(FIRST)
        parent, written = shards.cut(root), 0
        for nth in range(40):
            shards.train(SOME + nth)
            written += SOME.shape[0] if not failures else 1
            with monkeypatch.context() as patch:
                calls = iter(range(1000))
                patch.setattr(snapshot_file, "write_all", _failing(snapshot_file.write_all, calls, nth))
                shards.begin_cut(root, parent)
                while shards.shards[0].is_cutting:
                    shards.shards[0].maintain()
            progress = shards.shards[0].cut_progress(shards.who)
            if progress.error is None:
                break
            failures += 1
        assert failures > 3
        folder, expected = root / f"cut-{shards.step:012d}-1", shards.state()
    assert read_shard_record(folder / "shard-0-of-1").tables[0].rows_written == written
    with CutShards([spec_of(IDLE)], will_restore=True) as again:
        again.restore(folder)
        assert again.state() == expected


def _failing(real: Callable, calls, nth: int) -> Callable:
    def call(*arguments):
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    return call


def test_a_chain_has_an_end(tmp_path: Path) -> None:
    with CutShards([spec_of(OFF)]) as shards:
        shards.train(FIRST)
        parent = shards.cut(tmp_path / "job")
        for _ in range(MAX_SEQUENCE):
            shards.train(SOME)
            parent = shards.cut(tmp_path / "job", parent)
        shards.train(SOME)
        _refuses(shards, tmp_path / "job", parent, f"delta {MAX_SEQUENCE} of its chain")
        expected = shards.state()
        full = shards.cut(tmp_path / "job")
    with CutShards([spec_of(OFF)], will_restore=True) as again:
        again.restore(full)
        assert again.state() == expected


def test_a_table_that_is_new_since_the_parent_is_written_whole(tmp_path: Path) -> None:
    with CutShards([spec_of(OFF)]) as shards:
        shards.train(FIRST)
        full = shards.cut(tmp_path / "job")
        shards.shards[0].create_tables([spec_of(OFF, name="u")])
        shards.specs["u"] = spec_of(OFF, name="u")
        shards.train(SOME)
        delta, expected = shards.cut(tmp_path / "job", full), shards.state()
    tables = read_shard_record(delta / "shard-0-of-1").tables
    assert [(table.rows_hot, table.rows_written) for table in tables] == [(200, 20), (20, 20)]
    with CutShards(list(shards.specs.values()), will_restore=True) as again:
        again.restore(delta)
        assert again.state() == expected


# Chains that are not whole --------------------------------------------------------------------------------------------


def _chain(root: Path) -> list[Path]:
    """A full cut and two deltas of one shard."""
    with CutShards([spec_of(OFF)]) as shards:
        cuts: list[Path] = []
        for ids in (FIRST, SOME, SOME + 5):
            shards.train(ids)
            cuts.append(shards.cut(root, cuts[-1] if cuts else None))
    return cuts


def _refused(cut: Path, where: Path, what: str | None = None, policy: PolicySpec = OFF) -> None:
    with CutShards([spec_of(policy)], will_restore=True) as again:
        with pytest.raises(SegmentCorrupt, match=what) as caught:
            again.restore(cut)
        assert len(again.tables()[0].index) == 0
    assert str(where) in str(caught.value)


def _rewritten(cut: Path, change: Callable[[dict], object]) -> None:
    record = read_sealed_json(cut / "shard-0-of-1" / "shard.json")
    change(record)
    write_sealed_json(cut / "shard-0-of-1" / "shard.json", record)


def _as_parent(cut: Path) -> dict:
    data = (cut / "shard-0-of-1" / "shard.json").read_bytes()
    record = json.loads(data)["content"]
    crc = snapshot_file.crc32(data)
    return {"step": record["step"], "epoch": record["epoch"], "size_bytes": len(data), "crc32": crc}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["shard.json", "table-0-hot.safetensors"])
def test_a_chain_that_lacks_a_file_is_refused(tmp_path: Path, which: int, name: str) -> None:
    cuts = _chain(tmp_path / "job")
    lost = cuts[which] / "shard-0-of-1" / name
    lost.unlink()
    _refused(cuts[2], lost, "cannot be read")
    shutil.rmtree(cuts[which])
    _refused(cuts[2], cuts[which] / "shard-0-of-1" / "shard.json", "delta of it")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["shard.json", "table-0-hot.safetensors"])
def test_a_flipped_bit_in_a_parent_is_found(tmp_path: Path, which: int, name: str) -> None:
    cuts = _chain(tmp_path / "job")
    path = cuts[which] / "shard-0-of-1" / name
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        findings = Findings()
        if findings.gather(lambda: read_parts(cuts[2])):
            check_part(read_parts(cuts[2])[0], findings)
        assert any(str(path) in message for message in findings.messages), at
    path.write_bytes(whole[:-1])
    _refused(cuts[2], path)
    if name != "shard.json":
        header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        start = 8 + int.from_bytes(whole[:8], "little") + header["weights"]["data_offsets"][0]
        path.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 1]) + whole[start + 10 :])
        _refused(cuts[2], path, "block 0 of column weights does not match its CRC-32")


def test_another_trainings_cut_of_the_same_name_is_no_parent(tmp_path: Path) -> None:
    cuts = _chain(tmp_path / "job")
    with CutShards([spec_of(OFF)]) as shards:
        shards.train(FIRST, seed=77)
        other = shards.cut(tmp_path / "other")
    shutil.rmtree(cuts[0])
    shutil.copytree(other, cuts[0])
    _refused(cuts[2], cuts[0] / "shard-0-of-1" / "shard.json", "not the one that it was")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(parent={**r["parent"], "step": 2}), "earlier step than 2"),
        (lambda r: r.update(parent={**r["parent"], "step": 3}), "earlier step than 2"),
        (lambda r: r.update(parent={**r["parent"], "epoch": 2}), "of epoch 1"),
        (lambda r: r.update(parent=None), "without a parent"),
        (lambda r: r.update(sequence=0), "with a parent"),
        (lambda r: r.update(parent=None, sequence=0), "lacks rows"),
        (lambda r: r.update(sequence=2), "sequence"),
        (lambda r: r.update(sequence=65), "sequence"),
        (lambda r: r.update(parent="../cut-000000000001-1"), "parent"),
        (lambda r: r["tables"][0].update(rows_written=201), "rows_written=201 is more"),
        (lambda r: r["tables"][0]["spec"].update(seed=5), "of the spec in"),
    ],
)
def test_lineages_that_cannot_be_are_refused(tmp_path: Path, change: Callable, what: str) -> None:
    """A circle, a parent that is the cut itself, of a later step, or of another epoch, and so on."""
    cuts = _chain(tmp_path / "job")
    _rewritten(cuts[1], change)
    _refused(cuts[1], tmp_path / "job", what)
    with pytest.raises(SegmentCorrupt):
        read_parts(cuts[2])


def test_a_parent_that_lacks_a_row_is_refused_though_one_before_it_has_it(tmp_path: Path) -> None:
    """As if a row had come back after it was gone, and a stale delta had been laid under it."""
    root = tmp_path / "job"
    with CutShards([spec_of(COMPACT)]) as shards:
        shards.train(FIRST)
        full = shards.cut(root)
        shards.train(NONE)
        shards.train(NONE)
        shards.reselect()
        gone = shards.cut(root, full)
        assert not len(shards.tables()[0].index)
    with CutShards([spec_of(COMPACT)]) as shards:
        shards.train(FIRST)
        base = shards.cut(tmp_path / "other")
        for _ in range(3):
            shards.train(NONE)
        delta = shards.cut(tmp_path / "other", base)
    stale = root / delta.name
    shutil.copytree(delta, stale)
    _rewritten(stale, lambda record: record.update(parent=_as_parent(gone), sequence=2))
    _refused(stale, gone, "has no row_id", COMPACT)


def test_rewriting_may_leave_rows_out(tmp_path: Path) -> None:
    """Of every kind: hot, frozen in a segment, at its initial value, waiting."""
    policy = PolicySpec(
        kind="topk", idle_steps=1, min_count=2, hot_fraction=0.3, probation_visits=0, control_fraction=0.0
    )
    root = tmp_path / "job"
    with CutShards([spec_of(policy)], 2) as shards:
        parent = None
        for k in range(4):
            shards.train(POOL[k::2])
            shards.reselect()
            parent = shards.cut(root, parent)
        shards.train(np.arange(1000, 1010, dtype=np.int64))
        delta, before = shards.cut(root, parent), shards.state()["t"]
    target = root / "cut-000000000099-2"
    for part in read_parts(delta):
        rewrite_part(part, target, 2, keeps=lambda table, row_ids: row_ids % 3 != 0)
    with CutShards([spec_of(policy)], will_restore=True) as again:
        again.restore(target)
        after = again.state()["t"]
    assert after["rows"] == {row_id: row for row_id, row in before["rows"].items() if row_id % 3}
    assert after["waiting"] == {row_id: count for row_id, count in before["waiting"].items() if row_id % 3}
    assert {row[1] for row in after["rows"].values()} == {"hot", "frozen", "initial"}
    assert len(after["waiting"]) >= 6


def test_a_small_chain_reads_buckets_of_many_rows(tmp_path: Path, monkeypatch) -> None:
    """Chunks of a chain are whole buckets, whatever their number of rows."""
    monkeypatch.setattr(restore, "_ROWS_AT_ONCE", 3)
    ids = np.arange(9000, dtype=np.int64)
    with CutShards([spec_of(OFF)], 1) as shards:
        shards.train(ids)
        full = shards.cut(tmp_path / "job")
        shards.train(ids[::7])
        delta, expected = shards.cut(tmp_path / "job", full), shards.state()
    with CutShards([spec_of(OFF)], 3, will_restore=True) as again:
        again.restore(delta)
        assert again.state() == expected
