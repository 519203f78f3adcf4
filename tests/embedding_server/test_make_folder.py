"""make_folder: the name of each folder that it makes is synced in its parent."""

import os
from pathlib import Path

import pytest

from embedding_server.segment_file import make_folder


def test_every_new_name_is_synced_in_its_parent_and_old_ones_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2
