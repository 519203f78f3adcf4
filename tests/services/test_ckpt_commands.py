"""`frostline ckpt` as it is typed: two shards, every command of the README, exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from services.cli import app
from services.shard_client import RemoteStore
from tests.trainer.trained_snapshots import make_snapshot
from trainer import snapshot_gc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def cut(serve, tmp_path) -> Path:
    """Of two shards, all row_ids in 0 to 900; a delta."""
    store = RemoteStore(serve(2, snapshot_root=tmp_path))
    try:
        return make_snapshot(tmp_path / "snapshots", store, low=0, deltas=True)[0]
    finally:
        store.close()


def test_every_command_of_the_readme_works(runner, cut, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^frostline (ckpt [^#\n]*)", text, flags=re.M)
    assert [shlex.split(command)[1] for command in commands] == [
        "ls", "verify", "gc", "compact", *["export"] * 3, "import", "gc"
    ]  # fmt: skip

    def run(command: str) -> None:
        words = [
            {"SNAPSHOT": str(cut), "/mnt/snapshots": str(cut.parent.parent)}.get(word, word)
            for word in shlex.split(command)
        ]
        result = runner.invoke(app, words)
        assert result.exit_code == 0, (command, result.output)

    for command in commands[:-1]:
        run(command)
    assert load_file("ebc.safetensors")["embedding_bags.item.weight"].shape == (100000, 16)
    ids = load_file("item.safetensors")["row_ids"]
    assert len(ids) == len(np.unique(ids)) > 200
    result = runner.invoke(app, ["ckpt", "ls", str(cut.parent.parent), "--json"])
    jobs = {job["job"]: job["snapshots"] for job in json.loads(result.stdout)}
    assert [snapshot["rows_hot"] for snapshot in jobs["clicks"]] == [100000]
    assert [snapshot["sequence"] for snapshot in jobs["job"]] == [0, 1, 2, 0]
    assert [snapshot["parent"] for snapshot in jobs["job"]][1:] == [
        "cut-000000000006-1", "cut-000000000011-1", None
    ]  # fmt: skip
    tables = jobs["job"][-1]["tables"]
    assert tables["item"]["rows_hot"] + tables["item"]["rows_frozen"] == len(ids)
    (tmp_path / "deleted.txt").write_text("\n".join(map(str, range(20))))
    run(commands[-1])
    result = runner.invoke(app, ["ckpt", "ls", str(cut.parent), "--json"])
    (job,) = json.loads(result.stdout)
    assert [snapshot["sequence"] for snapshot in job["snapshots"]] == [0, 0]
    assert 0 < tables["user"]["rows_hot"] - job["snapshots"][-1]["tables"]["user"]["rows_hot"] <= 20


def test_verify_names_what_is_damaged_and_says_so_in_its_status(runner, cut, tmp_path):
    whole = runner.invoke(app, ["ckpt", "verify", str(cut), "--json"])
    assert whole.exit_code == 0 and json.loads(whole.stdout)["is_sound"] is True
    damaged = cut / "shard-1-of-2" / "table-0-hot.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = runner.invoke(app, ["ckpt", "verify", str(cut), "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["is_sound"] is False
    assert len(document["messages"]) == 1 and str(damaged) in document["messages"][0]
    assert str(damaged) in result.stderr
    assert runner.invoke(app, ["ckpt", "verify", str(tmp_path / "nothing")]).exit_code == 2
    assert "damaged" in runner.invoke(app, ["ckpt", "ls", str(cut.parent)]).stdout


def test_compact_says_what_it_made_and_refuses_a_full_snapshot(runner, cut):
    result = runner.invoke(app, ["ckpt", "compact", str(cut.parent), "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["path"] == str(cut.parent / "cut-000000000012-2")
    assert made["chain"] == [f"cut-0000000000{step}-1" for step in ("12", "11", "06")]
    assert runner.invoke(app, ["ckpt", "verify", made["path"]]).exit_code == 0
    result = runner.invoke(app, ["ckpt", "compact", made["path"]])
    assert result.exit_code == 2 and "nothing to compact" in result.stderr
    result = runner.invoke(app, ["ckpt", "gc", str(cut.parent), "--keep", "1", "--json"])
    assert len(json.loads(result.stdout)["jobs"][0]["removed"]) == 3
    assert runner.invoke(app, ["ckpt", "verify", str(cut.parent)]).exit_code == 0


def test_gc_says_what_it_did_and_what_it_left_alone(runner, cut):
    from trainer.snapshot_lock import in_use

    with in_use(cut.parent):
        result = runner.invoke(app, ["ckpt", "gc", str(cut.parent.parent), "--keep", "1", "--json"])
    assert result.exit_code == 1
    assert "is in use" in json.loads(result.stdout)["left_alone"][0]
    result = runner.invoke(app, ["ckpt", "gc", str(cut.parent.parent), "--keep", "1", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["jobs"][0]["removed"] == []
    assert runner.invoke(app, ["ckpt", "gc", str(cut.parent.parent), "--keep", "0"]).exit_code == 2


def test_an_erasure_of_a_table_or_at_a_place_without_snapshots_is_an_error(runner, cut, tmp_path):
    """Somebody asked for rows to be gone: a slip of the pen must not pass for that."""
    (tmp_path / "ids").write_text("5\n")
    (tmp_path / "empty").mkdir()
    before = sorted(cut.parent.rglob("*"))
    for place, table, what in (
        (cut.parent.parent, "itme", "no snapshot in .* has a table 'itme' .*'?half, item"),
        (cut.parent, "itme", "has a table 'itme'"),
        (cut, "item", "no snapshot in .* has a table 'item' .tables: none"),
        (tmp_path / "empty", "item", "has a table 'item' .tables: none"),
    ):
        words = ["ckpt", "gc", str(place), "--keep", "1", "--erase"]
        result = runner.invoke(app, [*words, f"{table}:{tmp_path / 'ids'}"])
        assert result.exit_code == 2 and re.search(what, result.stderr), result.output
        assert "nothing was changed" in result.stderr
    result = runner.invoke(app, ["ckpt", "gc", str(tmp_path / "empty"), "--keep", "1"])
    assert result.exit_code == 0 and "no snapshots" in result.stdout
    assert set(cut.parent.rglob("*")) <= {*before, cut.parent / "in-use.lock"}


def test_gc_goes_on_with_the_other_jobs_where_one_fails(runner, cut, monkeypatch):
    uri = cut.parent.parent
    for name in ("a", "z"):
        shutil.copytree(cut.parent, uri / name)
    real = snapshot_gc.remove_cut

    def remove(path: Path) -> None:
        if path.parent == cut.parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(snapshot_gc, "remove_cut", remove)
    for folder in (uri / "a", cut.parent, uri / "z"):
        assert runner.invoke(app, ["ckpt", "compact", str(folder)]).exit_code == 0
    (uri / "a" / "objects" / "foreign.segment").mkdir()
    result = runner.invoke(app, ["ckpt", "gc", str(uri), "--keep", "1", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["left_alone"] == []
    assert document["failed"] == [f"{cut.parent}: [Errno {errno.EIO}] Input/output error"]
    assert [len(job["removed"]) for job in document["jobs"]] == [3, 3]
    assert f"failed: {cut.parent}: " in result.stderr
    assert (uri / "a" / "objects" / "foreign.segment").is_dir()


def test_an_error_of_the_disk_names_the_file(runner, cut, tmp_path, monkeypatch):
    def fail(fd: int, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    for name in ("posix_fallocate", "ftruncate", "write", "pwrite"):
        monkeypatch.setattr(os, name, fail)
    result = runner.invoke(app, ["ckpt", "export", str(cut), str(out), "--table", "item", "--format", "safetensors"])
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {out}: [Errno 28] No space left"), result.output
    assert not list(tmp_path.glob("out*"))


def test_import_says_how_a_job_begins_with_it(runner, tmp_path):
    save_file({"row_ids": np.arange(2), "weights": np.zeros((2, 4), np.float32)}, tmp_path / "t")
    words = ["ckpt", "import", str(tmp_path / "t"), "--format", "safetensors", "--table", "t", "--job", "j"]
    result = runner.invoke(app, [*words, "--snapshot-uri", str(tmp_path / "uri"), "--arm", "idle"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == (
        "`frostline train JOB.yaml --resume` begins with it, in a job with name: j and"
        f" snapshots: {{uri: {tmp_path / 'uri'}}}, in arm idle"
    )


def test_options_that_do_not_belong_together_are_refused(runner, cut, tmp_path):
    def refusal(*words: str) -> str:
        result = runner.invoke(app, ["ckpt", "export", str(cut), str(tmp_path / "out"), *words])
        assert result.exit_code == 2, result.output
        return result.stderr

    plain = ["--table", "item", "--format", "safetensors"]
    assert "has one --table" in refusal(*plain, "--table", "tail")
    assert "are of torchrec alone" in refusal(*plain, "--num-embeddings", "5")
    dense = ["--table", "item", "--format", "torchrec"]
    assert "needs --num-embeddings" in refusal(*dense)
    assert "1 --table and 2 --num-embeddings" in refusal(*dense, "--num-embeddings", "5", "--num-embeddings", "6")
    assert "row_ids are not in 0 to 4" in refusal(*dense, "--num-embeddings", "5")
    assert "named twice" in refusal(*dense, "--table", "item", "--num-embeddings", "5")
    assert not (tmp_path / "out").exists()
    words = [
        "ckpt",
        "export",
        str(cut),
        str(tmp_path / "out"),
        *dense,
        "--num-embeddings",
        "5",
        "--drop-outside",
        "--json",
    ]
    result = runner.invoke(app, words)
    assert result.exit_code == 0 and json.loads(result.stdout)["dropped"]["item"] > 0


def test_a_file_to_import_that_is_wrong_is_status_2(runner, tmp_path):
    (tmp_path / "t").write_bytes(b"PK\x03\x04" + bytes(100))
    words = ["--format", "safetensors", "--table", "t", "--snapshot-uri", str(tmp_path / "uri"), "--job", "j"]
    result = runner.invoke(app, ["ckpt", "import", str(tmp_path / "t"), *words])
    assert result.exit_code == 2 and "pickle or torch.save" in result.stderr


@pytest.mark.parametrize("name", ["", "a/b", "job@arm", "\udcff", "x" * 101])
def test_a_job_that_can_have_no_such_name_is_refused(runner, tmp_path, name: str):
    save_file({"row_ids": np.arange(2), "weights": np.zeros((2, 4), np.float32)}, tmp_path / "t")
    words = ["ckpt", "import", str(tmp_path / "t"), "--format", "safetensors", "--table", "t"]
    words += ["--snapshot-uri", str(tmp_path / "uri")]
    for option, other in (("--job", "--arm"), ("--arm", "--job")):
        result = runner.invoke(app, [*words, option, name, other, "j"])
        assert result.exit_code == 2 and f"{option} " in result.stderr, result.output
    assert not (tmp_path / "uri").exists()
    result = runner.invoke(app, [*words, "--job", "j", "--initial-accumulator", "inf"])
    assert result.exit_code == 2 and not (tmp_path / "uri").exists()


def test_what_the_file_system_refuses_is_a_line_and_no_trace(runner, cut, tmp_path):
    words = ["ckpt", "export", str(cut), str(tmp_path / ("x" * 255)), "--table", "item", "--format"]
    for more in (["safetensors"], ["parquet"], ["torchrec", "--drop-outside", "--num-embeddings", str(2**48)]):
        result = runner.invoke(app, [*words, *more])
        assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output
    words[3] = str(tmp_path / "out")
    for too_many in (2**48, 2**100):
        result = runner.invoke(app, [*words, "torchrec", "--drop-outside", "--num-embeddings", str(too_many)])
        assert result.exit_code in (1, 2) and not isinstance(result.exception, OverflowError), result.output
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
