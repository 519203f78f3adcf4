"""`frostline lookup`: what people and scripts see, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from services.cli import app
from tests.services.lookup_rows import expected_user, train

Serve = Callable[..., list[str]]
runner = CliRunner()


@pytest.fixture
def addresses(serve: Serve) -> list[str]:
    found = serve(2)
    train(found)
    return [part for address in found for part in ("--address", address)]


def test_json_has_every_value(addresses: list[str]) -> None:
    ids = [5, -1, -(2**63), 2**63 - 1, 12345, 5]
    done = runner.invoke(app, ["lookup", "user", *map(str, ids), *addresses, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["table"] == "user"
    assert [row["row_id"] for row in document["rows"]] == ids
    assert [row["found"] for row in document["rows"]] == [True, True, True, True, False, True]
    assert [row["state"] for row in document["rows"]] == ["hot"] * 4 + ["absent", "hot"]
    assert np.array_equal([row["values"] for row in document["rows"]], expected_user(np.array(ids)))
    assert {(v["job"], v["step"]) for v in document["versions"]} == {("job", 6)}


def test_people_see_a_table(addresses: list[str]) -> None:
    done = runner.invoke(app, ["lookup", "item", "50", "-7", *addresses, "--encoding", "stored"])
    assert done.exit_code == 0, done.output
    assert "frozen" in done.stdout
    assert "absent" in done.stdout
    assert "... (16)" in done.stdout
    assert "read at job 'job', epoch 1, step 6" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["nope", "1"], 2, "table 'nope' does not exist (tables: item, rare, user)"),
        (["user", "x"], 2, "row_id 'x' is not an integer"),
        (["user", str(2**63)], 2, "outside int64"),
        (["user", "1", "--encoding", "int8"], 2, "encoding='int8' is not one of"),
    ],
)
def test_what_is_wrong_is_said(addresses: list[str], arguments: list[str], status: int, text: str) -> None:
    done = runner.invoke(app, ["lookup", *arguments, *addresses])
    assert done.exit_code == status
    assert text in done.output.replace("\n", " ")
