"""When cuts are taken, what fails without ending a run, what each manifest says. The shards' part is played here."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput, NotReady, StoreUnavailable
from embedding_server.inproc import InprocStore
from embedding_server.store import CutProgress, Identity
from tests.trainer.snapshot_folders import write_part
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker
from trainer.report import ArmSummary, bytes_text
from trainer.snapshot_lock import only_training
from trainer.snapshots import CutName, chain_of, cuts_in, is_complete, job_folder, read_manifest

WRITTEN = re.compile(r"snapshot of step (\d+): (.*), (full|delta), (\d+\.\d\d kB), \d+\.\d s$")


def job_of(uri: Path, mode: str = "sync", **sections) -> Job:
    """47 steps, the last of them short; two data passes of 23.4."""
    raw = {
        "name": "cutting",
        "seed": 3,
        "data": {
            "reader": "synthetic",
            "num_samples": 1500,
            "num_test_samples": 0,
            "num_features": 2,
            "num_dense": 2,
            "cardinalities": [60],
        },
        "model": {"kind": "dlrm", "dense_layers": [8, 4], "over_layers": [4, 1]},
        "embedding": {"dim": 4, "policy": "off"},
        "trainer": {"batch_size": 64, "precision": "float32", "mode": mode, "data_passes": 2, "threads": 1},
        "servers": {"store": "inproc"},
        "snapshots": {"uri": str(uri), "every_samples": 640, "on_finish": False},
    }
    for name, values in sections.items():
        raw[name] = {**raw[name], **values}
    return make_job(raw)


class PlayedCuts(InprocStore):
    """Its part of a cut is there as soon as it is begun, unless a subclass says otherwise."""

    waits_for_writer = True  # so that which cuts are taken is no matter of time

    def __init__(self) -> None:
        super().__init__(memory_limit_bytes=256 << 20)
        self.begun: list[tuple[int, int]] = []  # step, last step that was pulled
        self.parents: list[int | None] = []  # their steps
        self.abandoned = 0
        self._pulled = 0

    def pull(self, who: Identity, step: int, ids):
        self._pulled = step
        return super().pull(who, step, ids)

    def pull_in_place(self, who: Identity, step: int, ids, use) -> None:
        self._pulled = step
        super().pull_in_place(who, step, ids, use)

    def push(self, who: Identity, step: int, gradients):
        for thread in threading.enumerate():
            if self.waits_for_writer and thread.name == "frostline-cut":
                thread.join()
        return super().push(who, step, gradients)

    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        self.begun.append((step, self._pulled))
        self.parents.append(None if parent is None else int(Path(parent).name.split("-")[1]))
        write_part(Path(folder), 0, 1, who.job, step, who.epoch, [], None if parent is None else Path(parent))

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        return [CutProgress(self.begun[-1][0], is_done=True, bytes_written=100 if self.parents[-1] is None else 30)]

    def abandon_cut(self, who: Identity) -> None:
        self.abandoned += 1


def run(job: Job, store: InprocStore, folder: Path) -> tuple[ArmSummary, list[str]]:
    """With the events that were shown, without the lines of snapshots that were written."""
    summary, lines = run_and_say(job, store, folder)
    return summary, [line for line in lines if not WRITTEN.match(line)]


def run_and_say(job: Job, store: InprocStore, folder: Path) -> tuple[ArmSummary, list[str]]:
    notes: list[str] = []
    try:
        summary = run_worker(job, "main", store, Group(), folder, lambda p: notes.append(p.note) if p.note else None)
    finally:
        store.close()
    return summary, notes


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("announces", [False, True])
def test_a_manifest_says_where_the_run_stood_whatever_was_read_ahead(tmp_path: Path, mode, announces) -> None:
    store = PlayedCuts()
    job = job_of(tmp_path, mode, trainer={"prefetch_frozen": announces}, snapshots={"keep": 9})
    summary, notes = run(job, store, tmp_path / "run")
    assert store.begun == [(10, 10), (20, 20), (30, 30), (40, 40)]  # nothing was pulled ahead
    folder = job_folder(tmp_path, "cutting")
    manifests = [read_manifest(folder / cut.folder) for cut in cuts_in(folder)]
    assert [(m.step, m.run_step, m.epoch) for m in manifests] == [(step, step, 1) for step in (10, 20, 30, 40)]
    positions = [(m.reader["data_pass"], m.reader["step_in_pass"]) for m in manifests]
    assert positions == [(0, 10), (0, 20), (1, 30 - 24), (1, 40 - 24)]
    assert {m.run for m in manifests} == {manifests[0].run}
    assert len(manifests[0].run) == 16
    assert manifests[0].resolved_job == job.model_dump(mode="json")
    assert (manifests[0].num_workers, manifests[0].mode, manifests[0].arm) == (1, mode, "main")
    assert (summary.snapshots, summary.snapshots_failed, summary.snapshots_skipped) == (4, 0, 0)
    assert summary.snapshot_pause_s_max > 0
    assert (summary.steps, summary.resumed_from, notes) == (48, None, [])


def test_the_last_cut_is_that_of_the_end_and_only_as_many_stay_as_asked(tmp_path: Path) -> None:
    job = job_of(tmp_path, snapshots={"on_finish": True, "max_deltas": 0})
    store = PlayedCuts()
    summary, _ = run(job, store, tmp_path / "run")
    assert [step for step, _ in store.begun] == [10, 20, 30, 40, 48]
    assert summary.snapshots == 5
    folder = job_folder(tmp_path, "cutting")
    assert cuts_in(folder) == [CutName(1, 40), CutName(1, 48)]
    assert read_manifest(folder / CutName(1, 48).folder).reader["step_in_pass"] == 24


@pytest.mark.parametrize(
    ("max_deltas", "parents", "stays"),
    [
        (0, [None, None, None, None, None], [48]),
        (1, [None, 10, None, 30, None], [48]),
        (2, [None, 10, 20, None, 40], [40, 48]),
        (9, [None, 10, 20, 30, None], [48]),  # a fourth delta of 30 bytes would make them larger than a full cut of 100
    ],
)
def test_cuts_are_deltas_of_the_one_before_and_what_they_build_on_stays(
    tmp_path: Path, max_deltas, parents, stays
) -> None:
    job = job_of(tmp_path, snapshots={"on_finish": True, "keep": 1, "max_deltas": max_deltas})
    store = PlayedCuts()
    summary, notes = run(job, store, tmp_path / "run")
    assert (store.parents, notes) == (parents, [])
    assert (summary.snapshots, summary.snapshots_delta) == (5, 5 - parents.count(None))
    folder = job_folder(tmp_path, "cutting")
    assert [cut.step for cut in cuts_in(folder)] == stays
    chain = list(chain_of(folder / cuts_in(folder)[-1].folder))
    assert [manifest.step for _, manifest in chain] == stays[::-1]
    assert [manifest.sequence for _, manifest in chain] == [*range(len(stays))][::-1]


def test_each_snapshot_is_a_line_that_says_where_it_is_and_no_event(tmp_path: Path) -> None:
    job = job_of(tmp_path, trainer={"max_steps": 20}, snapshots={"on_finish": True})
    summary, lines = run_and_say(job, PlayedCuts(), tmp_path / "run")
    written = [match.groups() for match in map(WRITTEN.match, lines) if match]
    folder = job_folder(tmp_path, "cutting")
    assert [of_cut[:3] for of_cut in written] == [
        ("10", str(folder / CutName(1, 10).folder), "full"),
        ("20", str(folder / CutName(1, 20).folder), "delta"),
    ]
    assert written[-1][3] == bytes_text(summary.snapshot_bytes)
    assert len(lines) == 2 and summary.mask_info["events"] == []


class FailsSometimes(PlayedCuts):
    def __init__(self, steps: set[int], refused: set[int] = frozenset()) -> None:
        super().__init__()
        self.fail, self.refused = steps, refused

    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        if step in self.refused and parent is not None:
            raise InvalidInput("shard 1: parent is no earlier cut")
        super().begin_cut(who, step, folder, parent)

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        (progress,) = super().cut_progress(who)
        return [dataclasses.replace(progress, error="full disk" if progress.step in self.fail else None)]


@pytest.mark.parametrize(
    ("fails", "refused", "parents"),
    [
        ({20}, set(), [None, 10, 10, 30, 40]),  # a delta: the next builds on the last complete one
        ({10}, set(), [None, None, 20, 30, 40]),  # a full one
        (set(), {30}, [None, 10, None, 30, 40]),  # a shard does not know the parent
        ({30}, {30}, [None, 10, None, None, 40]),  # and has forgotten all others by then
    ],
)
def test_a_cut_that_failed_is_no_parent(tmp_path: Path, fails, refused, parents) -> None:
    store = FailsSometimes(fails, refused)
    job = job_of(tmp_path, snapshots={"on_finish": True, "keep": 9})
    summary, notes = run(job, store, tmp_path / "run")
    assert store.parents == parents
    said = ["snapshot of step 30 is a full one, no delta: shard 1: parent is no earlier cut"] if refused else []
    said += [f"snapshot of step {step} failed, training goes on: shard 0: full disk" for step in sorted(fails)]
    assert notes == said
    assert (summary.snapshots, summary.snapshots_failed) == (5 - len(fails), len(fails))


class LosesAManifest(PlayedCuts):
    def push(self, who: Identity, step: int, gradients):
        if step == 15:
            (job_folder(self.uri, "cutting") / CutName(1, 10).folder / "manifest.json").unlink()
        return super().push(who, step, gradients)


def test_a_cut_that_is_gone_from_disk_is_no_parent(tmp_path: Path) -> None:
    store = LosesAManifest()
    store.uri = tmp_path
    run(job_of(tmp_path), store, tmp_path / "run")
    assert store.parents == [None, None, 20, 30]


def test_no_cut_is_taken_twice_at_the_end(tmp_path: Path) -> None:
    store = PlayedCuts()
    run(job_of(tmp_path, trainer={"max_steps": 20}, snapshots={"on_finish": True}), store, tmp_path / "run")
    assert [step for step, _ in store.begun] == [10, 20]


def test_a_run_that_does_not_resume_leaves_the_snapshots_before_it_alone(tmp_path: Path) -> None:
    job = job_of(tmp_path, trainer={"max_steps": 20})
    run(job, PlayedCuts(), tmp_path / "run")
    _, notes = run(job, PlayedCuts(), tmp_path / "run")  # on fresh shards, whose first epoch is 1 again
    newest = job_folder(tmp_path, "cutting") / CutName(1, 20).folder
    assert notes == [f"snapshots of an earlier run stay, the newest in {newest}; --resume would have gone on from it"]
    assert cuts_in(job_folder(tmp_path, "cutting")) == [CutName(e, s) for e in (1, 2) for s in (10, 20)]


def test_two_trainings_in_one_folder_are_told_of_each_other(tmp_path: Path) -> None:
    job = job_of(tmp_path, trainer={"max_steps": 20})
    folder = job_folder(tmp_path, "cutting")
    folder.mkdir()
    with only_training(folder) as is_only:
        assert is_only
        _, notes = run(job, PlayedCuts(), tmp_path / "run")
    assert len([note for note in notes if f"another training takes snapshots in {folder}" in note]) == 1
    _, notes = run(job, PlayedCuts(), tmp_path / "run")
    assert not [note for note in notes if "another training" in note]


class Refuses(PlayedCuts):
    def begin_cut(self, who: Identity, step: int, folder: str, parent: str | None = None) -> None:
        if step == 20:
            raise NotReady("shard 1: not now")
        super().begin_cut(who, step, folder, parent)


def test_a_cut_that_cannot_begin_is_an_event_and_a_count(tmp_path: Path) -> None:
    summary, notes = run(job_of(tmp_path, snapshots={"keep": 9}), Refuses(), tmp_path / "run")
    assert notes == ["snapshot of step 20 failed, training goes on: shard 1: not now"]
    assert (summary.snapshots, summary.snapshots_failed, summary.steps) == (3, 1, 48)
    assert [cut.step for cut in cuts_in(job_folder(tmp_path, "cutting"))] == [10, 30, 40]
    assert notes[0] in summary.mask_info["events"]


class FailsWhileWriting(PlayedCuts):
    def cut_progress(self, who: Identity) -> list[CutProgress]:
        step = self.begun[-1][0]
        if step == 20:
            raise StoreUnavailable("shard 0 does not answer")
        error = "No space left on device" if step == 30 else None
        return [CutProgress(step, is_done=True, error=error)]


def test_a_cut_that_fails_while_it_is_written_is_an_event_and_leaves_nothing(tmp_path: Path) -> None:
    store = FailsWhileWriting()
    summary, notes = run(job_of(tmp_path, snapshots={"keep": 9}), store, tmp_path / "run")
    assert notes == [
        "snapshot of step 20 failed, training goes on: shard 0 does not answer",
        "snapshot of step 30 failed, training goes on: shard 0: No space left on device",
    ]
    assert (summary.snapshots, summary.snapshots_failed, store.abandoned) == (2, 2, 2)
    assert [cut.step for cut in cuts_in(job_folder(tmp_path, "cutting"))] == [10, 40]


def test_a_place_where_no_cut_can_be_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"snapshots\.uri=.*/file: .*Not a directory.*; name a folder"):
        run(job_of(tmp_path / "file"), PlayedCuts(), tmp_path / "run")


class LosesTheFolder(PlayedCuts):
    def push(self, who: Identity, step: int, gradients):
        if step == 15:
            folder = job_folder(self.uri, "cutting")
            folder.rename(folder.with_name("away"))
            folder.touch()
        return super().push(who, step, gradients)


def test_a_folder_that_goes_away_is_an_event(tmp_path: Path) -> None:
    store = LosesTheFolder()
    store.uri = tmp_path
    summary, notes = run(job_of(tmp_path, snapshots={"on_finish": True}), store, tmp_path / "run")
    assert (summary.snapshots, summary.snapshots_failed, summary.steps) == (1, 4, 48)
    assert len(notes) == 4
    assert all("Not a directory" in note and str(tmp_path) in note for note in notes)


class Slow(PlayedCuts):
    """The cut of step 10 is done when step 35 is pulled."""

    waits_for_writer = False

    def __init__(self) -> None:
        super().__init__()
        self._is_late = threading.Event()

    def pull(self, who: Identity, step: int, ids):
        if step == 35:
            self._is_late.set()
        return super().pull(who, step, ids)

    def pull_in_place(self, who: Identity, step: int, ids, use) -> None:
        if step == 35:
            self._is_late.set()
        super().pull_in_place(who, step, ids, use)

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        return [CutProgress(self.begun[-1][0], is_done=self._is_late.is_set())]


def test_a_cut_that_is_due_while_the_one_before_is_written_is_skipped(tmp_path: Path) -> None:
    summary, notes = run(job_of(tmp_path, snapshots={"keep": 9, "on_finish": True}), Slow(), tmp_path / "run")
    skipped = [note for note in notes if "skipped" in note]
    assert skipped[:2] == [
        f"snapshot of step {step} skipped: that of step 10 is still being written; set snapshots.every_samples higher"
        for step in (20, 30)
    ]
    # whether the writer has seen by step 40 that the shard is done is a matter of time
    assert summary.snapshots_skipped == len(skipped) in (2, 3)
    assert summary.snapshots + summary.snapshots_skipped == 5
    assert [cut.step for cut in cuts_in(job_folder(tmp_path, "cutting"))][-1] == 48


class Dies(PlayedCuts):
    waits_for_writer = False

    def push(self, who: Identity, step: int, gradients):
        if step == 15:
            raise StoreUnavailable("gone")
        return super().push(who, step, gradients)

    def cut_progress(self, who: Identity) -> list[CutProgress]:
        return [CutProgress(self.begun[-1][0], is_done=False)]


def test_a_run_that_ends_within_a_cut_leaves_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="gone"):
        run(job_of(tmp_path), Dies(), tmp_path / "run")
    folder = job_folder(tmp_path, "cutting")
    assert [is_complete(folder / cut.folder) for cut in cuts_in(folder)] == [False]
    assert not [thread for thread in threading.enumerate() if thread.name == "frostline-cut"]
