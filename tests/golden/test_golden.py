"""Snapshots that earlier versions wrote: whatever this version is, it loads them to the same rows, bit for bit.

If this fails the format has changed: add a reader for the old one (FORMATS.md), never make the snapshot anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rows import TableRows
from tests.embedding_server.cut_shards import CutShards
from tests.golden.make import as_json, dense_of
from trainer.resume import read_snapshot
from trainer.snapshot_list import list_jobs, verify
from trainer.snapshots import check_files

FORMATS = sorted(Path(__file__).parent.glob("format-*"))
CUTS = [path for folder in FORMATS for path in sorted(folder.glob("cut-*.json"))]


@pytest.fixture(params=CUTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict]:
    """(a copy of the cut, what is known of it)"""
    known: Path = request.param
    shutil.copytree(known.parent / "uri", tmp_path / "uri")
    (cut,) = (tmp_path / "uri").glob(f"*/{known.stem}")
    return cut, json.loads(known.read_text())


def test_there_are_a_full_cut_and_a_delta_of_each_format() -> None:
    assert [path.name for path in FORMATS] == ["format-1"]
    chains = [[part.folder.parent.name for part in read_parts(path)[0].chain] for path in _cuts()]
    assert sorted(map(len, chains)) == [1, 2]
    assert sum(path.stat().st_size for path in FORMATS[0].rglob("*") if path.is_file()) < 128 << 10


def _cuts() -> list[Path]:
    return [cut for path in CUTS for cut in (path.parent / "uri").glob(f"*/{path.stem}")]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_row_is_what_it_was(golden: tuple[Path, dict], num_shards: int) -> None:
    cut, known = golden
    specs = [table.spec for table in read_parts(cut)[0].record.tables]
    with CutShards(specs, num_shards, will_restore=True) as shards:
        shards.restore(cut)
        assert shards.step == known["step"]
        found = as_json(shards.state())
    assert found.keys() == known["tables"].keys()
    for name, table in known["tables"].items():
        assert found[name].keys() == table.keys()
        for key, values in table.items():
            assert found[name][key] == values, (name, key)


def test_exports_and_verify_read_it(golden: tuple[Path, dict]) -> None:
    cut, known = golden
    assert verify(cut).messages == []
    for name, table in known["tables"].items():
        with TableRows(read_parts(cut), name) as rows:
            chunks = list(rows.chunks())
        row_ids = np.concatenate([chunk.row_ids for chunk in chunks])
        assert sorted(map(str, row_ids.tolist())) == sorted(table["rows"])
        assert all(np.isfinite(chunk.weights).all() for chunk in chunks)


def test_a_training_goes_on_from_it(golden: tuple[Path, dict]) -> None:
    cut, known = golden
    snapshot = read_snapshot(cut)
    assert snapshot.manifest.step == known["step"] and snapshot.dense is not None
    found = {name: tensor.numpy().tobytes().hex() for name, tensor in sorted(snapshot.dense.tensors.items())}
    assert found == known["dense"] == dense_of(cut)
    check_files(cut)
    (job,) = list_jobs(cut.parent.parent)
    assert [each.status for each in job.snapshots] == ["complete", "complete"]
