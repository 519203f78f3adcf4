from __future__ import annotations

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer import board
from trainer.board import Board
from trainer.data.batch import Feature, Schema, make_batch
from trainer.report import Progress
from trainer.run_log import RunLog


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_what_was_written(tmp_path):
    complaints: list[str] = []
    made = Board(tmp_path / "arm", complaints.append)
    for step in (1, 2):
        made.scalar("train/loss", 0.5 / step, step)
    made.text("events", "a row is hot", 2)
    raw = {"min": 0.0, "max": 2.0, "num": 3, "sum": 2.5, "sum_squares": 3.0, "bucket_limits": [1.0, 2.0]}
    made.histogram("heat", {**raw, "bucket_counts": [1, 2]}, 2)
    made.flush()
    assert [(e.step, e.value) for e in read(tmp_path / "arm").Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    made.close()
    events = read(tmp_path / "arm")
    (heat,) = events.Histograms("heat")
    assert (heat.step, heat.histogram_value.num, list(heat.histogram_value.bucket)) == (2, 3.0, [1.0, 2.0])
    assert events.Tensors("events/text_summary")[0].tensor_proto.string_val == [b"a row is hot"]
    assert complaints == []


def test_steps_that_are_trained_again_are_in_no_curve_twice(tmp_path, monkeypatch):
    names = iter(["events.out.tfevents.1", "events.out.tfevents.2", "events.out.tfevents.3"])
    monkeypatch.setattr(board, "file_name", lambda: next(names))
    for first_step, steps, value in ((1, (10, 20, 30), 1.0), (16, (18, 25), 2.0), (1, (5,), 3.0)):
        made = Board(tmp_path, lambda text: None, first_step)
        for step in steps:
            made.scalar("train/loss", value, step)
        made.close()
        if first_step == 16:  # went back to step 15
            curve = [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")]
            assert curve == [(10, 1.0), (18, 2.0), (25, 2.0)]
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")] == [(5, 3.0)]  # began anew


def test_a_board_without_entries_makes_no_file(tmp_path):
    Board(tmp_path, lambda text: None).close()
    assert not list(tmp_path.iterdir())


def test_two_boards_at_once_have_files_of_their_own(tmp_path):
    for _ in range(2):
        made = Board(tmp_path, lambda text: None)
        made.scalar("a", 1.0, 1)
        made.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """Every write to a board's file finds no space."""
    monkeypatch.setattr(board, "file_name", lambda: "events.out.tfevents.full")
    (tmp_path / "events.out.tfevents.full").symlink_to("/dev/full")


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_complained_of_once(tmp_path):
    complaints: list[str] = []
    made = Board(tmp_path, complaints.append)
    for step in range(1, 2000):
        made.scalar("train/loss", 0.5, step)
        made.flush()
    made.close()
    (complaint,) = complaints
    assert complaint.startswith(str(tmp_path / "events.out.tfevents.full"))
    assert "cannot be written (No space left on device)" in complaint and "training goes on" in complaint


def test_a_folder_that_cannot_be_made_is_complained_of_once(tmp_path):
    (tmp_path / "file").touch()
    complaints: list[str] = []
    made = Board(tmp_path / "file" / "arm", complaints.append)
    made.scalar("a", 1.0, 1)
    made.scalar("a", 1.0, 2)
    made.close()
    assert len(complaints) == 1


@pytest.mark.usefixtures("full_disk")
def test_a_worker_whose_board_fails_goes_on_and_says_so_in_its_events(tmp_path):
    schema = Schema((), (Feature("f", "t"),))
    batch = make_batch(
        schema, np.zeros((4, 0), np.float32), np.zeros(4, np.int64), np.ones(4, np.int32),
        np.array([0, 1, 0, 1], np.float32), 4,
    )  # fmt: skip
    import torch

    shown: list[Progress] = []
    with RunLog("main", 3, tmp_path, shown.append) as log:
        for step in (1, 2, 3):
            log.observe(step, batch, torch.zeros(4))
        log.event("something else")
    assert [event.partition(":")[0] for event in log.events] == [
        str(tmp_path / "events.out.tfevents.full"), "something else"
    ]  # fmt: skip
    assert [progress.note for progress in shown if progress.note] == log.events
    assert shown[0].step == 3
