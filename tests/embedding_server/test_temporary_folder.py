"""The folders of shards: a temporary one goes though its process was killed; one of its own belongs to one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from embedding_server.shard import Shard
from embedding_server.temporary_folder import TemporaryFolder


@pytest.fixture(autouse=True)
def tmp(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_when_it_is_removed(tmp: Path) -> None:
    folder = TemporaryFolder()
    assert folder.path.parent == tmp and folder.path.is_dir()
    folder.remove()
    folder.remove()
    assert list(tmp.iterdir()) == []


def test_that_of_a_process_that_was_killed_goes_with_the_next_and_one_in_use_stays(tmp: Path) -> None:
    code = (
        "import tempfile, time; from embedding_server.temporary_folder import TemporaryFolder\n"
        f"tempfile.tempdir = {str(tmp)!r}; folder = TemporaryFolder(); (folder.path / 'segments').mkdir()\n"
        "print(folder.path, flush=True); time.sleep(60)"
    )
    (tmp / "frostline-other").mkdir()  # has no lock: not ours to remove
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        first = TemporaryFolder()
        assert path.is_dir()
        process.kill()
    second = TemporaryFolder()
    assert not path.exists()
    assert sorted(tmp.iterdir()) == sorted([first.path, second.path, tmp / "frostline-other"])
    first.remove()
    second.remove()


def test_a_data_dir_belongs_to_one_process(tmp: Path) -> None:
    folder = tmp / "data"
    code = (
        "import time; from pathlib import Path; from embedding_server.shard import Shard\n"
        f"shard = Shard(data_dir=Path({str(folder)!r})); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with pytest.raises(InvalidInput, match="a shard of another process uses it"):
            Shard(data_dir=folder)
        process.kill()
    Shard(data_dir=folder).close()
    Shard(data_dir=folder).close()
