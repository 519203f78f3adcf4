"""Files that somebody brings: what is wrong with them is said quickly, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

from embedding_server import segment_file
from embedding_server.errors import InvalidInput
from embedding_server.inproc import InprocStore
from embedding_server.restore import read_parts
from embedding_server.spec import OptimizerSpec
from tests.trainer.test_resume import every_id, job_of
from tests.trainer.test_resume import run as run_job
from trainer.export import export_table, export_torchrec
from trainer.import_tables import Imported, ImportRequest, import_tables
from trainer.snapshot_list import list_jobs, verify
from trainer.snapshot_lock import in_use
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import job_folder
from trainer.tensor_file import MAX_HEADER_BYTES, Tensor, TensorFile, TensorFileWriter

N, D = 300, 8
IDS = np.arange(N) * 7 - 500
WEIGHTS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def run(files: list[Path], kind: str, uri: Path, names=("t",), optimizer: str = "rowwise_adagrad", **more) -> Imported:
    request = {"dim": None, "optimizer": OptimizerSpec(kind=optimizer), "uri": uri, "job": "j", **more}
    return import_tables(ImportRequest(files, kind, names, **request))


def raw(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list, start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


IDS_OF_2 = entry("I64", [2], 0, 16)
BAD_TENSORS = {
    "pickle": (lambda p: p.write_bytes(pickle.dumps({"weights": 1})), "a file of pickle or torch.save"),
    "torch.save": (lambda p: torch.save({"weights": torch.ones(2)}, p), "a file of pickle or torch.save"),
    "empty": (lambda p: p.touch(), "has 0 bytes"),
    "text": (lambda p: p.write_text("row_id,vector\n" * 10), "its header would have"),
    "header of 2^63": (lambda p: raw(p, b"{}", length=2**63), "its header would have 9223372036854775808 bytes"),
    "header longer than the file": (lambda p: raw(p, b"{}", length=3), "its header would have 3 bytes"),
    "huge header": (lambda p: raw(p, b" " * (MAX_HEADER_BYTES + 1)), "has at most"),
    "many values": (lambda p: raw(p, b"[" + b"1," * (1 << 20) + b"1]"), "more than"),
    "deep header": (lambda p: raw(p, b"[" * 100_000), "is no JSON"),
    "list": (lambda p: raw(p, b"[]"), "no JSON object"),
    "key twice": (lambda p: raw(p, b'{"a":1,"a":2}'), "a key appears twice"),
    "unknown dtype": (lambda p: raw(p, {"row_ids": entry("X99", [2], 0, 16)}, bytes(16)), "dtype 'X99' is not one of"),
    "negative shape": (lambda p: raw(p, {"row_ids": entry("I64", [-2], 0, 16)}, bytes(16)), "numbers of at least 0"),
    "shape of text": (lambda p: raw(p, {"row_ids": entry("I64", ["2"], 0, 16)}, bytes(16)), "numbers of at least 0"),
    "overflowing shape": (
        lambda p: raw(p, {"row_ids": entry("I64", [2**40, 2**40], 0, 16)}, bytes(16)),
        "are not the",
    ),
    "overlap": (
        lambda p: raw(p, {"row_ids": IDS_OF_2, "weights": entry("F32", [2, 2], 8, 24)}, bytes(24)),
        "not behind the one before",
    ),
    "hole": (
        lambda p: raw(p, {"row_ids": IDS_OF_2, "weights": entry("F32", [2, 2], 24, 40)}, bytes(40)),
        "not behind the one before",
    ),
    "bytes behind the end": (lambda p: raw(p, {"row_ids": IDS_OF_2}, bytes(17)), "its tensors end at"),
    "cut off": (lambda p: raw(p, {"row_ids": IDS_OF_2}, bytes(15)), "its tensors end at"),
    "more in an entry": (lambda p: raw(p, {"row_ids": IDS_OF_2 | {"path": "/etc/passwd"}}, bytes(16)), "alone"),
    "other tensors": (lambda p: save_file({"a": WEIGHTS}, p), "has tensors 'a'; a table has row_ids"),
    "one more tensor": (lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS, "x": WEIGHTS}, p), "has tensors"),
    "int32 ids": (lambda p: save_file({"row_ids": IDS.astype("i4"), "weights": WEIGHTS}, p), "must be I64"),
    "half weights": (lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS.astype("f2")}, p), "convert it to"),
    "flat weights": (lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS.reshape(-1)}, p), "must have 2 axes"),
    "fewer weights": (
        lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS[1:].copy()}, p),
        "299 rows, and row_ids 300",
    ),
    "dim of 6": (
        lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS[:, :6].copy()}, p),
        "dim=6 must be a positive multiple of 4",
    ),
    "duplicates": (
        lambda p: save_file({"row_ids": np.where(IDS == -486, -500, IDS), "weights": WEIGHTS}, p),
        r"row_id -500 occurs more than once \(1 repeats",
    ),
    "NaN": (lambda p: save_file({"row_ids": IDS, "weights": spoilt(WEIGHTS, np.nan)}, p), "-486 has a weight that"),
    "infinity": (lambda p: save_file({"row_ids": IDS, "weights": spoilt(WEIGHTS, np.inf)}, p), "-486 has a weight"),
    "state of another optimizer": (
        lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS, "state": WEIGHTS}, p),
        "8 columns of state, and optimizer rowwise_adagrad keeps 1",
    ),
    "negative accumulator": (
        lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS, "state": np.full((N, 1), -1, "f4")}, p),
        "has an accumulator below 0",
    ),
    "accumulator not finite": (
        lambda p: save_file({"row_ids": IDS, "weights": WEIGHTS, "state": np.full((N, 1), np.inf, "f4")}, p),
        "an optimizer state that is not finite",
    ),
    "link": (lambda p: p.symlink_to("/etc/passwd"), "is a symbolic link"),
    "pipe": (lambda p: os.mkfifo(p), "is no regular file"),
    "folder": (lambda p: p.mkdir(), "is no regular file"),
    "nothing": (lambda p: None, "cannot be read"),
}  # fmt: skip


def spoilt(weights: np.ndarray, value: float) -> np.ndarray:
    changed = weights.copy()
    changed[2, 3] = value
    return changed


def refused(file: Path, kind: str, uri: Path, names, message: str) -> None:
    """In under 1 s and 100 MB, and nothing is written."""
    before_kib, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InvalidInput, match=message) as refusal:
        run([file], kind, uri, names)
    assert file.name in str(refusal.value)
    assert time.process_time() - start_s < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 << 10
    assert not uri.exists() or list(uri.iterdir()) == []


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_bad_safetensors_files_are_refused(tmp_path, what: str):
    make, message = BAD_TENSORS[what]
    file = tmp_path / "table.safetensors"
    make(file)
    refused(file, "safetensors", tmp_path / "uri", ["t"], message)


def parquet(path: Path, row_ids, vectors, **more) -> Path:
    pq.write_table(pa.table({"row_id": row_ids, "vector": vectors, **more}), path)
    return path


def lists(weights: np.ndarray, kind=None) -> pa.Array:
    return pa.array(list(weights), kind or pa.list_(pa.float32()))


BAD_PARQUET = {
    "pickle": (lambda p: p.write_bytes(pickle.dumps([1] * 100)), "does not begin and end as a Parquet file"),
    "footer beyond the file": (lambda p: p.write_bytes(b"PAR1" + b"\xff" * 8 + b"PAR1"), "no sound Parquet file"),
    "no vector": (lambda p: pq.write_table(pa.table({"row_id": IDS}), p), "no column 'vector'"),
    "int32 ids": (lambda p: parquet(p, IDS.astype("i4"), lists(WEIGHTS)), "must be int64"),
    "doubles": (lambda p: parquet(p, IDS, lists(WEIGHTS, pa.list_(pa.float64()))), "must be a list of float32"),
    "numbers": (lambda p: parquet(p, IDS, pa.array(WEIGHTS[:, 0])), "must be a list of float32"),
    "no rows to tell the dim": (lambda p: parquet(p, pa.array(IDS[:0]), lists(WEIGHTS[:0])), "its width is unknown"),
    "null id": (lambda p: parquet(p, pa.array([None, *IDS[1:].tolist()], pa.int64()), lists(WEIGHTS)), "is null"),
    "null vector": (
        lambda p: parquet(p, IDS, pa.array([*list(WEIGHTS[1:]), None], pa.list_(pa.float32()))),
        "a vector is null",
    ),
    "ragged": (
        lambda p: parquet(p, IDS, pa.array([*list(WEIGHTS[1:]), WEIGHTS[0, :4]], pa.list_(pa.float32()))),
        "vector has 4 numbers, and 8 before",
    ),
    "duplicates": (lambda p: parquet(p, np.zeros(N, np.int64), lists(WEIGHTS)), r"more than once \(299 repeats"),
    "NaN": (lambda p: parquet(p, IDS, lists(spoilt(WEIGHTS, np.nan))), "row_id -486 has a weight that"),
    "cut off": (lambda p: p.write_bytes(parquet(p, IDS, lists(WEIGHTS)).read_bytes()[:-20] + b"PAR1"), "no sound"),
    "link": (lambda p: p.symlink_to("/etc/passwd"), "is a symbolic link"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_PARQUET)
def test_bad_parquet_files_are_refused(tmp_path, what: str):
    make, message = BAD_PARQUET[what]
    file = tmp_path / "table.parquet"
    make(file)
    refused(file, "parquet", tmp_path / "uri", ["t"], message)


def ebc(path: Path, **more: np.ndarray) -> None:
    save_file(
        {"embedding_bags.t.weight": WEIGHTS, **{name.replace("__", "."): value for name, value in more.items()}}, path
    )


BAD_TORCHREC = {
    "no table": (lambda p: save_file({"over.0.weight": WEIGHTS}, p), "has no tensor `embedding_bags"),
    "another table": (lambda p: save_file({"embedding_bags.u.weight": WEIGHTS}, p), r"no file has .*\.t\.weight"),
    "a table twice": (lambda p: ebc(p, m__embedding_bags__t__weight=WEIGHTS), "'t' is there 2 times"),
    "momentum of another shape": (lambda p: ebc(p, t__momentum1=WEIGHTS), r"'rowwise_adagrad' has \[300\]"),
    "half": (lambda p: save_file({"embedding_bags.t.weight": WEIGHTS.astype("f2")}, p), "must be F32"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_TORCHREC)
def test_bad_torchrec_state_dicts_are_refused(tmp_path, what: str):
    make, message = BAD_TORCHREC[what]
    file = tmp_path / "ebc.safetensors"
    make(file)
    with pytest.raises(InvalidInput, match=message):
        run([file], "torchrec", tmp_path / "uri")
    assert not (tmp_path / "uri").exists()


def test_adam_needs_both_moments(tmp_path):
    file = tmp_path / "ebc.safetensors"
    ebc(file, t__momentum1=WEIGHTS)
    with pytest.raises(InvalidInput, match=r"has t\.momentum1 without t\.exp_avg_sq"):
        run([file], "torchrec", tmp_path / "uri", optimizer="adam")


@pytest.fixture
def table_file(tmp_path) -> Path:
    save_file({"row_ids": IDS, "weights": WEIGHTS}, tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


def test_requests_that_do_not_fit_are_refused(table_file, tmp_path):
    uri = tmp_path / "uri"
    with pytest.raises(InvalidInput, match="1 files and 2 --table"):
        run([table_file], "safetensors", uri, ["a", "b"])
    with pytest.raises(InvalidInput, match="each must be there once"):
        run([table_file, table_file], "safetensors", uri, ["a", "a"])
    with pytest.raises(InvalidInput, match="has dim 8, and must have 16"):
        run([table_file], "safetensors", uri, dim=16)
    with pytest.raises(InvalidInput, match="--job .*no job can be called so"):
        run([table_file], "safetensors", uri, job="")
    assert not uri.exists()


def test_a_job_with_snapshots_or_in_use_is_left_alone(table_file, tmp_path):
    uri = tmp_path / "uri"
    folder = job_folder(uri, "j")
    folder.mkdir(parents=True)
    with in_use(folder), pytest.raises(InvalidInput, match="is in use"):
        run([table_file], "safetensors", uri)
    imported = run([table_file], "safetensors", uri)
    assert Path(imported.path).parent == folder and imported.rows == {"t": N}
    with pytest.raises(InvalidInput, match="has snapshots of this job already"):
        run([table_file], "safetensors", uri)
    assert verify(Path(imported.path)).messages == []
    assert len(list_jobs(uri)[0].snapshots) == 1


def test_what_a_killed_import_left_is_in_no_ones_way_but_that_of_others_stays(table_file, tmp_path):
    folder = job_folder(tmp_path / "uri", "j")
    left = folder / "cut-000000000000-1" / "shard-0-of-1"
    left.mkdir(parents=True)
    (left / "table-0-hot.safetensors.partial").write_text("x")
    imported = run([table_file], "safetensors", tmp_path / "uri")
    assert verify(Path(imported.path)).messages == [] and not list(folder.rglob("*.partial"))
    other = job_folder(tmp_path / "other", "j") / "cut-000000000007-1"  # perhaps a shard still writes there
    other.mkdir(parents=True)
    with pytest.raises(InvalidInput, match="or what is left of some"):
        run([table_file], "safetensors", tmp_path / "other")
    assert other.exists()


@pytest.mark.parametrize("kind", ["safetensors", "parquet", "torchrec"])
def test_a_table_without_rows_goes_there_and_back(tmp_path, kind: str):
    """One that no sample has named yet is as good as another."""
    first, second = tmp_path / "first", tmp_path / "second"
    if kind == "parquet":
        parquet(first, pa.array(IDS[:0]), lists(WEIGHTS[:0], pa.list_(pa.float32(), D)))
    elif kind == "torchrec":
        save_file({"embedding_bags.t.weight": WEIGHTS[:0]}, first)
    else:
        save_file({"row_ids": IDS[:0], "weights": WEIGHTS[:0], "state": np.empty((0, 1), np.float32)}, first)
    imported = run([first], kind, tmp_path / "uri")
    assert imported.rows == {"t": 0} and verify(Path(imported.path)).messages == []
    parts = read_parts(Path(imported.path))
    if kind == "torchrec":
        assert export_torchrec(parts, {"t": 5}, second).rows == {"t": 0}
        assert load_file(second)["embedding_bags.t.weight"].shape == (5, D)
        return
    export_table(parts, "t", second, is_parquet=kind == "parquet", with_state=True)
    again = run([second], kind, tmp_path / "again")
    assert again.rows == {"t": 0} and again.has_state == {"t": True}


@pytest.mark.parametrize("fails_at", range(1, 10))
def test_a_disk_that_fails_leaves_nothing_behind(table_file, tmp_path, monkeypatch, fails_at: int):
    calls = []
    sync = segment_file.os.fsync

    def fail(fd: int) -> None:
        calls.append(fd)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        sync(fd)

    monkeypatch.setattr(segment_file.os, "fsync", fail)
    uri = tmp_path / "uri"
    with pytest.raises(OSError, match="No space left"):
        run([table_file], "safetensors", uri)
    assert list_jobs(uri) == [] and list(uri.rglob("*")) == []


def test_a_file_that_changes_while_it_is_read_is_refused(table_file, tmp_path, monkeypatch):
    read = TensorFile.read
    seen = []

    def change(self, name, start, stop):
        rows = read(self, name, start, stop)
        if name == "row_ids":
            seen.append(name)
            if len(seen) == 2:
                rows = rows + 1
        return rows

    monkeypatch.setattr(TensorFile, "read", change)
    with pytest.raises(InvalidInput, match="was changed while it was read"):
        run([table_file], "safetensors", tmp_path / "uri")
    assert list((tmp_path / "uri").rglob("*")) == []


def test_tensor_files_are_those_of_the_safetensors_package(tmp_path):
    writer = TensorFileWriter(
        tmp_path / "a", {"x": Tensor("I64", (N,)), "y": Tensor("F32", (N, D)), "e": Tensor("F32", (0, D))}, {"k": "v"}
    )
    writer.append("x", IDS[:100])
    mapped = writer.map("y")
    mapped[::-1] = WEIGHTS[::-1]
    writer.append("x", IDS[100:])
    assert not (tmp_path / "a").exists()
    writer.finish()
    loaded = load_file(tmp_path / "a")
    assert np.array_equal(loaded["x"], IDS) and np.array_equal(loaded["y"], WEIGHTS) and loaded["e"].shape == (0, D)
    file = TensorFile(tmp_path / "a")
    assert np.array_equal(file.read("y", 10, 20), WEIGHTS[10:20])
    file.close()


def test_a_job_resumes_from_what_was_imported(tmp_path):
    """Rows are those of the files, nearly: a step at this learning rate moves nothing by more."""
    embedding = {"policy": "off", "learning_rate": {"base": 1e-8}}
    job = job_of(tmp_path / "uri", embedding=embedding, trainer={"max_steps": 4})
    weights, files = {}, []
    for name, ids in every_id(job).items():
        weights[name] = np.random.default_rng(len(files)).normal(size=(len(ids.row_ids), D)).astype(np.float32)
        files.append(tmp_path / f"{name}.safetensors")
        save_file({"row_ids": ids.row_ids, "weights": weights[name]}, files[-1])
    imported = run(files, "safetensors", tmp_path / "uri", list(weights), job=job.name)
    assert find_snapshot(job, "main") == Path(imported.path)
    end = run_job(job, InprocStore(memory_limit_bytes=256 << 20), Path(imported.path))
    assert end.steps == [1, 2, 3, 4]
    for name, values in weights.items():
        np.testing.assert_allclose(end.rows[name], values, atol=1e-6)
        assert end.stats[name].rows_hot == len(values)
