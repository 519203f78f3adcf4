"""Failpoints: their table is that of the code, they are off unless a test sets them, and they do what they are told."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embedding_server import failpoints
from embedding_server.errors import InvalidInput
from embedding_server.failpoints import CRASH_STATUS, DISK, MEMORY, NAMES, failpoint, set_to

ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"\bfailpoint\(\"([^\"]+)\"\)")


def test_the_table_names_every_failpoint_of_the_code_and_no_other():
    found = []
    for package in ("embedding_server", "trainer", "services"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "failpoints.py":
                found += _CALL.findall(path.read_text())
    assert sorted(found) == sorted(NAMES), "each name once in the code, and once in failpoints.py"
    assert not set(DISK) & set(MEMORY)


def test_off_a_failpoint_does_nothing():
    assert not failpoints._actions
    failpoint("cut.begin")


def test_an_action_is_called_at_its_own_failpoint_alone_and_only_within_the_context():
    hits: list[str] = []
    with set_to({"cut.begin": lambda: hits.append("outer")}):
        with set_to({"cut.begin": lambda: hits.append("inner"), "merge.begin": lambda: hits.append("merge")}):
            failpoint("cut.begin")
            failpoint("merge.begin")
        failpoint("cut.begin")
        failpoint("merge.begin")
    failpoint("cut.begin")
    assert hits == ["inner", "merge", "outer"]


def test_the_nth_hit_alone():
    with set_to(failpoints.parse("object.before_link=error-ENOSPC:3")):
        failpoint("object.before_link")
        failpoint("object.before_link")
        with pytest.raises(OSError) as caught:
            failpoint("object.before_link")
        assert caught.value.errno == errno.ENOSPC
        failpoint("object.before_link")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cut.nowhere=crash", "does not exist"),
        ("cut.begin=explode", "must be crash"),
        ("cut.begin=error-ENOTHING", "must be crash"),
        ("cut.begin=crash:0", "from 1 on"),
        ("cut.begin=crash:second", "from 1 on"),
        ("freeze.before_flip=error-EIO", "touches no file"),
        ("cut.begin=sleep-long", "must be crash"),
    ],
)
def test_what_cannot_be_understood_is_refused(text: str, match: str):
    with pytest.raises(InvalidInput, match=match):
        failpoints.parse(text)


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"FROSTLINE_TESTING": "1"}, CRASH_STATUS),
        ({}, 0),
        ({"FROSTLINE_TESTING": "0"}, 0),
    ],
)
def test_the_environment_counts_in_tests_only(environ: dict[str, str], status: int):
    code = (
        "import os; from embedding_server.failpoints import *; set_from_environment(os.environ);"
        "failpoint('cut.begin'); failpoint('cut.begin')"
    )
    environ = {**os.environ, **environ, "FROSTLINE_FAILPOINTS": "cut.begin=crash:2,merge.begin=sleep-0.5"}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ).returncode == status
