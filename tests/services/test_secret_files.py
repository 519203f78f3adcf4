"""What is made of files follows them, and what cannot be used changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from services.secret_files import Reloaded
from tests.services.authority import write_secret


def of(path: Path, check_every_s: float = 0.0) -> Reloaded[int]:
    def load() -> int:
        try:
            return int(path.read_text())
        except ValueError:
            raise InvalidInput(f"{path} holds no number") from None

    return Reloaded([path], "the number", load, check_every_s)


def test_a_change_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_secret(tmp_path / "file", "1")
    number = of(path)
    assert number.current() == 1
    with caplog.at_level(logging.INFO):
        write_secret(path, "2")
        assert number.current() == 2
        assert number.current() == 2
    assert [record.getMessage() for record in caplog.records] == ["the number changed and was read again"]


def test_what_cannot_be_used_changes_nothing_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_secret(tmp_path / "file", "1")
    number = of(path)
    with caplog.at_level(logging.INFO):
        write_secret(path, "half a num")
        for _ in range(3):
            assert number.current() == 1
        path.unlink()
        for _ in range(3):
            assert number.current() == 1
        write_secret(path, "3")
        assert number.current() == 3
    assert [(record.levelname, "stays in use" in record.getMessage()) for record in caplog.records] == [
        ("ERROR", True),
        ("ERROR", True),
        ("INFO", False),
    ]


def test_a_file_that_is_wrong_at_first_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no number"):
        of(write_secret(tmp_path / "file", "x"))


def test_files_are_looked_at_now_and_then(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "file", "1")
    number = of(path, check_every_s=3600.0)
    write_secret(path, "2")
    assert number.current() == 1
    number.check()
    assert number.current() == 2
