"""What every reader owes: shares that add up, as many steps on every worker, order by seed, resumption."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedding_server.errors import InvalidInput
from trainer.data.batch import Batch, Reader
from trainer.data.registry import open_reader
from trainer.job import Job, make_job

NUM_ROWS = 103
MAKERS = ["movielens", "criteo_tsv", "criteo_gz", "parquet", "synthetic"]


def criteo_lines(first: int, count: int) -> bytes:
    """Rows whose values tell their number; some fields are empty."""
    rows = []
    for n in range(first, first + count):
        numbers = [str(n)] + [str(n % (i + 2) - 1) if (n + i) % 3 else "" for i in range(12)]
        words = [f"{n * 26 + i:08x}" if (n + i) % 5 else "" for i in range(26)]
        rows.append("\t".join([str(n % 2), *numbers, *words]))
    return ("\n".join(rows) + "\n").encode()


def movielens_files(folder: Path, ratings: int = NUM_ROWS) -> None:
    users = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    items = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    users += [f"{u}\t{20 + u}\tF\twriter\t{10000 + u}" for u in range(1, 5)]
    items += [f"{i}\tFilm {i}\t19{70 + i}\tDrama Comedy" for i in range(1, 10)]
    inter += [f"{n % 4 + 1}\t{n % 9 + 1}\t{n % 5 + 1}\t{880000000 + 5000 * n}" for n in range(ratings)]
    for kind, lines in (("user", users), ("item", items), ("inter", inter)):
        (folder / f"ml-100k.{kind}").write_text("\n".join(lines) + "\n")


def parquet_table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "label": pa.array([n % 2 for n in numbers], pa.int8()),
            "x": pa.array([float(n) if n % 7 else None for n in numbers], pa.float64()),
            "user": pa.array([n if n % 4 else None for n in numbers], pa.int64()),
            "words": pa.array([[f"w{n}", "all"][: n % 3] for n in numbers], pa.list_(pa.string())),
        }
    )


def job_of(kind: str, folder: Path, batch_size: int = 8, data_passes: int = 1) -> Job:
    folder.mkdir(exist_ok=True)
    data: dict[str, object] = {"reader": kind}
    if kind == "movielens":
        movielens_files(folder)
        data["path"] = folder
    elif kind in ("criteo_tsv", "criteo_gz"):
        suffix = ".gz" if kind == "criteo_gz" else ""
        data = {"reader": "criteo_tsv", "train": [folder / f"{i}.tsv{suffix}" for i in range(3)]}
        for i, (first, count) in enumerate([(0, 50), (50, 3), (53, 50)]):
            content = criteo_lines(first, count)
            (folder / f"{i}.tsv{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    elif kind == "parquet":
        data |= {"train": [folder / f"{i}.parquet" for i in range(2)], "dense": ["x"], "features": ["user", "words"]}
        pq.write_table(parquet_table(0, 60), folder / "0.parquet", row_group_size=7)
        pq.write_table(parquet_table(60, 43), folder / "1.parquet", row_group_size=100)
    else:
        data |= {"num_samples": NUM_ROWS, "num_features": 4, "num_dense": 3, "hots": [1, 3], "cardinalities": [50]}
    trainer = {"batch_size": batch_size, "data_passes": data_passes}
    return make_job({"name": "a", "seed": 3, "data": data, "model": {"kind": "deepfm"}, "trainer": trainer})


def rows_of(batch: Batch) -> list[tuple[object, ...]]:
    """Each sample as plain data: label, dense values, bags."""
    f, b = len(batch.sparse.keys()), batch.num_samples
    lengths = batch.sparse.lengths().view(f, b).numpy()
    flat = np.split(batch.sparse.values().numpy(), np.cumsum(lengths.reshape(-1))[:-1]) if b else []
    return [
        (float(batch.labels[i]), batch.dense[i].tolist(), tuple(tuple(flat[k * b + i].tolist()) for k in range(f)))
        for i in range(b)
    ]


def read(reader: Reader) -> list[list[tuple[object, ...]]]:
    return [rows_of(batch) for batch in reader]


@pytest.mark.parametrize("kind", MAKERS)
def test_batches_have_the_shapes_and_types_of_the_protocol(kind: str, tmp_path: Path) -> None:
    reader = open_reader(job_of(kind, tmp_path))
    for batch in reader:
        b = batch.num_samples
        assert str(batch.dense.dtype) == "torch.float32"
        assert batch.dense.shape == (b, reader.schema.num_dense)
        assert str(batch.labels.dtype) == "torch.float32"
        assert set(batch.labels.tolist()) <= {0.0, 1.0}
        assert batch.sparse.keys() == reader.schema.feature_names
        assert str(batch.sparse.values().dtype) == "torch.int64"
        assert str(batch.sparse.lengths().dtype) == "torch.int32"
        assert batch.sparse.stride() == b
        assert int(batch.sparse.lengths().sum()) == batch.sparse.values().numel()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_workers_together_see_what_one_worker_sees(kind: str, num_workers: int, tmp_path: Path) -> None:
    job = job_of(kind, tmp_path, data_passes=2)
    alone = read(open_reader(job))
    readers = [open_reader(job, "train", worker, num_workers) for worker in range(num_workers)]
    together = [read(reader) for reader in readers]
    assert {len(steps) for steps in together} == {len(alone)}
    for step, rows in enumerate(alone):
        assert [row for worker in together for row in worker[step]] == rows
    globals_alone = [batch.num_global_samples for batch in open_reader(job)]
    assert globals_alone == [len(rows) for rows in alone]
    for worker in range(num_workers):
        reader = open_reader(job, "train", worker, num_workers)
        assert [batch.num_global_samples for batch in reader] == globals_alone


@pytest.mark.parametrize("kind", MAKERS)
def test_a_short_last_batch_may_be_empty_on_some_workers(kind: str, tmp_path: Path) -> None:
    job = job_of(kind, tmp_path, batch_size=51)
    last = [[batch.num_samples for batch in open_reader(job, "train", worker, 51)][-1] for worker in range(51)]
    assert sum(last) == sum(len(rows) for rows in read(open_reader(job))[-1:])
    assert min(last) == 0


@pytest.mark.parametrize("kind", MAKERS)
def test_num_steps_is_right_or_unknown(kind: str, tmp_path: Path) -> None:
    reader = open_reader(job_of(kind, tmp_path, data_passes=3))
    steps = len(read(reader))
    assert reader.num_steps == (None if kind.startswith("criteo") else steps)


@pytest.mark.parametrize("kind", MAKERS)
def test_equal_seeds_give_equal_batches(kind: str, tmp_path: Path) -> None:
    job = job_of(kind, tmp_path)
    assert read(open_reader(job)) == read(open_reader(job))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("at", [0, 1, 9, 13, 14, 20])
def test_a_reader_goes_on_where_its_state_says(kind: str, at: int, tmp_path: Path) -> None:
    job = job_of(kind, tmp_path, data_passes=2)
    whole = read(open_reader(job))
    reader = open_reader(job)
    iterator = iter(reader)
    for _ in range(at):
        next(iterator)
    state = json.loads(json.dumps(reader.state_dict()))
    resumed = open_reader(job)
    resumed.load_state_dict(state)
    assert read(resumed) == whole[at:]
    assert read_rest(iterator) == whole[at:]


def read_rest(iterator: object) -> list[list[tuple[object, ...]]]:
    return [rows_of(batch) for batch in iterator]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_may_go_to_another_number_of_workers(kind: str, tmp_path: Path) -> None:
    job = job_of(kind, tmp_path)
    whole = read(open_reader(job))
    reader = open_reader(job, "train", 1, 2)
    iterator = iter(reader)
    for _ in range(5):
        next(iterator)
    readers = [open_reader(job, "train", worker, 3) for worker in range(3)]
    for one in readers:
        one.load_state_dict(reader.state_dict())
    parts = [read(one) for one in readers]
    assert [[row for part in parts for row in part[step]] for step in range(len(parts[0]))] == whole[5:]


def test_a_state_at_the_end_gives_nothing_more(tmp_path: Path) -> None:
    job = job_of("synthetic", tmp_path)
    reader = open_reader(job)
    read(reader)
    resumed = open_reader(job)
    resumed.load_state_dict(reader.state_dict())
    assert read(resumed) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 9}, "batch_size=9 when it was saved and 8 now"),
        ({"seed": 4}, "seed=4 when it was saved and 3 now"),
        ({"step_in_pass": -1}, "step_in_pass=-1 must be a count"),
        ({"data_pass": "x"}, "data_pass='x' must be a count"),
    ],
)
def test_a_state_that_means_other_samples_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    reader = open_reader(job_of("synthetic", tmp_path))
    with pytest.raises(InvalidInput, match=message):
        reader.load_state_dict(reader.state_dict() | change)
    assert reader.data_pass == 0


@pytest.mark.parametrize(
    ("open_it", "message"),
    [
        (lambda job: open_reader(job, "train", 2, 2), r"worker=2 must be in 0\.\.1"),
        (lambda job: open_reader(job, "tets"), "split 'tets' is not one; did you mean 'test'"),
        (lambda job: open_reader(job, "validation"), "the job names no validation samples"),
    ],
)
def test_what_cannot_be_opened_is_refused(open_it: Callable[[Job], Reader], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_it(job_of("synthetic", tmp_path))
