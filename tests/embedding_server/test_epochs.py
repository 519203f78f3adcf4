"""The file of epochs: an epoch that was fenced stays so, or the shard says that it cannot tell."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from embedding_server.epochs import EPOCHS, load_epochs, save_epochs
from embedding_server.errors import InvalidInput, StoreUnavailable
from embedding_server.snapshot_format import write_sealed_json


def test_epochs_are_read_back(tmp_path: Path) -> None:
    assert load_epochs(tmp_path) == {}
    for epochs in ({}, {"job": 1, "ü\n": 2**62}):
        save_epochs(tmp_path, epochs)
        assert load_epochs(tmp_path) == epochs
    assert [path.name for path in tmp_path.iterdir()] == [EPOCHS]


def test_every_changed_byte_and_every_truncation_is_refused(tmp_path: Path) -> None:
    """A digit that changed would let a worker in that was fenced."""
    save_epochs(tmp_path, {"job": 15, "other": 7})
    path = tmp_path / EPOCHS
    good = path.read_bytes()
    for at in range(len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        for data in (damaged, good[:at]):
            path.write_bytes(data)
            with pytest.raises(InvalidInput, match=rf"{EPOCHS} is not a file of epochs"):
                load_epochs(tmp_path)


@pytest.mark.parametrize("epoch", [-1, 2**63, "1", True, 1.0, None])
def test_what_is_no_epoch_is_refused(tmp_path: Path, epoch: object) -> None:
    write_sealed_json(tmp_path / EPOCHS, {"job": epoch})
    with pytest.raises(InvalidInput, match="an epoch is no number"):
        load_epochs(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_epochs_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    save_epochs(tmp_path, {"job": 1})

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr(os, call, fail)
        with pytest.raises(StoreUnavailable, match=f"{os.strerror(code)}.*no epoch has begun"):
            save_epochs(tmp_path, {"job": 2})
    assert load_epochs(tmp_path) == {"job": 1}
    save_epochs(tmp_path, {"job": 2})
    assert load_epochs(tmp_path) == {"job": 2}
