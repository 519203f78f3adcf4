"""Input files that are wrong: the message names file and row, and on_bad_row decides.

One table; each case spoils good files and says what the message must hold. `row` is the row that must be named, None
where the fault is of the file as a whole and has no row. Cases of a row are run with `fail` and with `skip`.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedding_server.errors import InvalidInput
from trainer.data.registry import open_reader
from trainer.job import make_job

CRITEO_ROW = "\t".join(["1", *["3"] * 13, *["0a1b2c3d"] * 26])
GOOD_CRITEO = [CRITEO_ROW] * 6
USERS = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", "1\t24\tM\twriter\t85711"]
ITEMS = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", "1\tToy Story\t1995\tAnimation"]
INTER = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *[f"1\t1\t4\t88000000{i}" for i in range(10)]]


@dataclass(frozen=True)
class Case:
    reader: str
    file: str  # the file that must be named
    content: bytes | pa.Table | None  # None: the file is absent
    row: int | None
    parts: tuple[str, ...]
    is_skippable: bool = False


def lines(rows: list[str]) -> bytes:
    return "".join(row + "\n" for row in rows).encode()


def with_row(rows: list[str], position: int, row: str) -> bytes:
    return lines([*rows[:position], row, *rows[position + 1 :]])


def with_field(row: str, field: int, value: str) -> str:
    fields = row.split("\t")
    fields[field] = value
    return "\t".join(fields)


def criteo(name: str, content: bytes | None, row: int | None, *parts: str, skip: bool = False) -> Case:
    return Case("criteo_tsv", name, content, row, parts, skip)


def bad_criteo_row(row: str, *parts: str) -> Case:
    return criteo("a.tsv", with_row(GOOD_CRITEO, 2, row), 3, *parts, skip=True)


def movielens(kind: str, content: bytes | None, row: int | None, *parts: str, skip: bool = False) -> Case:
    return Case("movielens", f"ml-100k.{kind}", content, row, parts, skip)


def bad_rating(row: str, *parts: str) -> Case:
    return movielens("inter", with_row(INTER, 4, row), 5, *parts, skip=True)


def parquet(content: bytes | pa.Table | None, row: int | None, *parts: str, skip: bool = False) -> Case:
    return Case("parquet", "a.parquet", content, row, parts, skip)


def table(**columns: Any) -> pa.Table:
    good: dict[str, Any] = {"label": [0, 1, 1, 0], "x": [0.5, None, 2.0, 1.0], "user": [1, 2, None, -1]}
    return pa.table({name: values for name, values in (good | columns).items() if values is not None})


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pq.write_table(table(), sink, compression="gzip", use_dictionary=False)
    return sink.getvalue()


def damaged_parquet() -> bytes:
    """The magic stays, the first page behind it does not."""
    content = parquet_bytes()
    return content[:4] + bytes(byte ^ 0xFF for byte in content[4:60]) + content[60:]


GZIPPED = gzip.compress(lines(GOOD_CRITEO * 200), mtime=0)

CASES = {
    # Criteo TSV, row by row
    "39 fields": bad_criteo_row(CRITEO_ROW.partition("\t")[2], "39 fields", "needs 40", "without labels"),
    "41 fields": bad_criteo_row(CRITEO_ROW + "\t0a", "41 fields", "needs 40"),
    "spaces for tabs": bad_criteo_row(CRITEO_ROW.replace("\t", " "), "1 fields", "needs 40"),
    "blank line": bad_criteo_row("", "1 fields", "needs 40"),
    "label 2": bad_criteo_row(with_field(CRITEO_ROW, 0, "2"), "field 0", "'2'", "0 or 1"),
    "label empty": bad_criteo_row(with_field(CRITEO_ROW, 0, ""), "field 0", "0 or 1"),
    "number is a word": bad_criteo_row(with_field(CRITEO_ROW, 5, "ten"), "field 5", "'ten'", "whole number"),
    "number is a fraction": bad_criteo_row(with_field(CRITEO_ROW, 13, "1.5"), "field 13", "'1.5'", "whole number"),
    "number is a minus": bad_criteo_row(with_field(CRITEO_ROW, 1, "-"), "field 1", "'-'", "whole number"),
    "number overflows": bad_criteo_row(with_field(CRITEO_ROW, 2, "9" * 19), "field 2", "at most 18 digits"),
    "not hexadecimal": bad_criteo_row(with_field(CRITEO_ROW, 14, "0a1b2c3g"), "field 14", "'0a1b2c3g'", "hexadecimal"),
    "hexadecimal too long": bad_criteo_row(with_field(CRITEO_ROW, 39, "0a1b2c3d4"), "field 39", "1 to 8 hexadecimal"),
    "hexadecimal with 0x": bad_criteo_row(with_field(CRITEO_ROW, 20, "0x1b"), "field 20", "'0x1b'"),
    "not UTF-8 inside": bad_criteo_row(with_field(CRITEO_ROW, 20, "\udcff").encode("utf-8", "replace").decode(), "20"),
    "one CR LF": bad_criteo_row(CRITEO_ROW + "\r", "CR LF", "LF alone", "dos2unix"),
    "last line cut": criteo("a.tsv", lines(GOOD_CRITEO)[:-3], 6, "no line end", "cut short", skip=True),
    "last line cut in the middle": criteo("a.tsv", lines(GOOD_CRITEO)[:-100], 6, "no line end", skip=True),
    # Criteo TSV, whole files
    "all CR LF": criteo("a.tsv", lines(GOOD_CRITEO).replace(b"\n", b"\r\n"), 1, "CR LF"),
    "header line": criteo("a.tsv", lines(["label\ta\tb", *GOOD_CRITEO]), 1, "3 fields", skip=True),
    "empty": criteo("a.tsv", b"", 1, "is empty"),
    "absent": criteo("a.tsv", None, None, "no such file"),
    "gzip without .gz": criteo("a.tsv", GZIPPED, 1, "compressed with gzip", ".gz"),
    "no lines at all": criteo("a.tsv", b"\0" * 200_000, 1, "longer than 65536 bytes"),
    "gzip cut short": criteo("a.tsv.gz", GZIPPED[: len(GZIPPED) // 2], 1, "or later", "cut short"),
    "gzip cut in its header": criteo("a.tsv.gz", GZIPPED[:5], 1, "cut short"),
    "gzip with a flipped bit": criteo("a.tsv.gz", GZIPPED[:-6] + b"\0" + GZIPPED[-5:], None, "row ", "damaged"),
    "no gzip at all": criteo("a.tsv.gz", lines(GOOD_CRITEO), 1, "damaged"),
    "gzip of nothing": criteo("a.tsv.gz", gzip.compress(b""), 1, "no row"),
    # MovieLens
    "rating with 3 fields": bad_rating("1\t1\t4", "3 fields", "needs 4"),
    "unknown user": bad_rating("7\t1\t4\t880000000", "user_id='7'", "ml-100k.user"),
    "unknown item": bad_rating("1\t7\t4\t880000000", "item_id='7'", "ml-100k.item"),
    "rating of 6": bad_rating("1\t1\t6\t880000000", "rating='6'", "1 to 5"),
    "rating nan": bad_rating("1\t1\tnan\t880000000", "rating='nan'"),
    "timestamp is a date": bad_rating("1\t1\t4\t1997-12-04", "timestamp='1997-12-04'"),
    "timestamp infinite": bad_rating("1\t1\t4\tinf", "timestamp='inf'"),
    "rating with CR": bad_rating(INTER[4] + "\r", "CR LF"),
    "ratings cut short": movielens("inter", lines(INTER)[:-4], 11, "no line end", "cut short", skip=True),
    "ratings without rows": movielens("inter", lines(INTER[:1]), 2, "no rating"),
    "ratings empty": movielens("inter", b"", 1, "is empty"),
    "ratings absent": movielens("inter", None, None, "no such file"),
    "wrong columns": movielens("inter", lines(["user\titem\tstars\twhen", *INTER[1:]]), 1, "'user, item, stars, when'"),
    "header with CR LF": movielens("inter", lines(INTER).replace(b"\n", b"\r\n"), 1, "header", "CR LF"),
    "age is a word": movielens("user", lines([*USERS, "2\told\tF\twriter\t1"]), 3, "age='old'", skip=True),
    "user twice": movielens("user", lines([*USERS, USERS[1]]), 3, "user_id='1' stands twice", skip=True),
    "title not UTF-8": movielens(
        "item", lines([*ITEMS, "2\tX\t1995\tDrama"]).replace(b"X", b"\xe9"), 3, "byte 2", "not UTF-8", skip=True
    ),
    # Parquet
    "label null": parquet(table(label=[0, None, 1, 0]), 2, "label 'label' is None", "0 or 1", skip=True),
    "label 2 in Parquet": parquet(table(label=[0, 1, 1, 2]), 4, "label 'label' is 2", skip=True),
    "dense nan": parquet(table(x=[0.0, 1.0, math.nan, 0.0]), 3, "dense 'x' is nan", "finite", skip=True),
    "dense beyond float32": parquet(table(x=[1e39, 1.0, 0.0, 0.0]), 1, "dense 'x' is 1e+39", skip=True),
    "null in a list": parquet(table(user=[[1], [2, None], [], None]), 2, "'user' has a null inside", skip=True),
    "column missing": parquet(table(user=None, users=[1, 2, 3, 4]), None, "no column 'user'", "mean 'users'"),
    "label is a word": parquet(table(label=["a", "b", "c", "d"]), None, "column 'label' is string", "a number"),
    "feature is a fraction": parquet(table(user=[0.5, 1.0, 2.0, 3.0]), None, "column 'user' is double", "integer"),
    "Parquet without rows": parquet(table().slice(0, 0), 1, "no row"),
    "Parquet empty": parquet(b"", 1, "is empty"),
    "Parquet absent": parquet(None, None, "no such file"),
    "Parquet cut short": parquet(parquet_bytes()[:-20], None, "cut short"),
    "Parquet with a damaged page": parquet(damaged_parquet(), 1, "or later", "row group 0"),
    "no Parquet": parquet(b"label,x,user\n0,1,2\n" * 9, None, "no Parquet file"),
}
SKIPPABLE = [name for name, case in CASES.items() if case.is_skippable]


def good_files(case: Case) -> dict[str, bytes | pa.Table]:
    if case.reader == "movielens":
        return {"ml-100k.user": lines(USERS), "ml-100k.item": lines(ITEMS), "ml-100k.inter": lines(INTER)}
    return {}


def read_all(case: Case, folder: Path, content: bytes | pa.Table | None, **options: object) -> tuple[int, int]:
    """Samples read and rows skipped over all splits that have files."""
    folder.mkdir(exist_ok=True)
    for name, good in {**good_files(case), case.file: content}.items():
        write(folder / name, good)
    data: dict[str, object] = {"reader": case.reader, **options}
    if case.reader == "movielens":
        data["path"] = folder
    else:
        data["train"] = [folder / case.file]
    if case.reader == "parquet":
        data |= {"dense": ["x"], "features": ["user"]}
    job = make_job({"name": "a", "data": data, "model": {"kind": "deepfm"}, "trainer": {"batch_size": 3}})
    splits = ("train", "validation", "test") if case.reader == "movielens" else ("train",)
    readers = [open_reader(job, split) for split in splits]  # type: ignore[arg-type]
    return sum(batch.num_samples for reader in readers for batch in reader), readers[0].rows_skipped


def write(path: Path, content: bytes | pa.Table | None) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(content, path)


@pytest.mark.parametrize("name", CASES)
def test_bad_data_names_file_and_row(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises(InvalidInput) as caught:
        read_all(case, tmp_path, case.content)
    message = str(caught.value)
    where = str(tmp_path / case.file)
    assert message.startswith(where if case.row is None else f"{where} row {case.row}")
    for part in case.parts:
        assert part in message
    assert ("set data.on_bad_row=skip" in message) == (case.is_skippable or name == "all CR LF")


@pytest.mark.parametrize("name", SKIPPABLE)
def test_a_bad_row_is_skipped_and_counted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    num_good = {"criteo_tsv": 5, "movielens": 10, "parquet": 3}[case.reader]
    if name == "header line":
        num_good = 6
    if case.file == "ml-100k.inter":
        num_good = 9
    num_samples, skipped = read_all(case, tmp_path, case.content, on_bad_row="skip", max_bad_rows=1)
    assert (num_samples, skipped) == (num_good, 1)


@pytest.mark.parametrize("name", SKIPPABLE)
def test_skipping_has_a_bound(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises(InvalidInput) as caught:
        read_all(case, tmp_path, case.content, on_bad_row="skip", max_bad_rows=0)
    assert f"{case.file} row {case.row}: " in str(caught.value)
    assert "bad row 1 of this data pass, and data.max_bad_rows=0" in str(caught.value)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.is_skippable and n != "all CR LF"])
def test_a_fault_of_a_whole_file_is_never_skipped(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises(InvalidInput) as caught:
        read_all(case, tmp_path, case.content, on_bad_row="skip", max_bad_rows=10**6)
    assert str(tmp_path / case.file) in str(caught.value)


def test_the_bound_is_of_each_data_pass_and_the_count_of_all(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(with_row(GOOD_CRITEO, 1, "bad"))
    reader = open_reader(criteo_job(path, data_passes=3, max_bad_rows=1))
    assert sum(batch.num_samples for batch in reader) == 15
    assert reader.rows_skipped == 3
    assert reader.state_dict()["rows_skipped"] == 3


def test_a_skipped_row_keeps_its_position_so_that_workers_stay_in_step(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(with_row(GOOD_CRITEO, 1, "bad"))
    job = criteo_job(path, max_bad_rows=1)
    readers = [open_reader(job, "train", worker, 2) for worker in range(2)]
    sizes = [[(batch.num_samples, batch.num_global_samples) for batch in reader] for reader in readers]
    assert sizes == [[(1, 3), (1, 3)], [(1, 3), (2, 3)]]
    assert sum(reader.rows_skipped for reader in readers) == 1


def test_a_fault_in_the_second_file_names_its_own_row(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.tsv", tmp_path / "b.tsv"
    good.write_bytes(lines(GOOD_CRITEO))
    bad.write_bytes(with_row(GOOD_CRITEO, 4, CRITEO_ROW + "\r"))
    with pytest.raises(InvalidInput, match=r"b\.tsv row 5: the line ends with CR LF"):
        list(open_reader(criteo_job(good, bad)))


def criteo_job(*files: Path, data_passes: int = 1, max_bad_rows: int | None = None) -> Any:
    data: dict[str, object] = {"reader": "criteo_tsv", "train": list(files)}
    if max_bad_rows is not None:
        data |= {"on_bad_row": "skip", "max_bad_rows": max_bad_rows}
    trainer = {"batch_size": 3, "data_passes": data_passes}
    return make_job({"name": "a", "data": data, "model": {"kind": "deepfm"}, "trainer": trainer})


def test_without_recbole_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", find)
    job = make_job({"name": "a", "data": {"reader": "movielens"}, "model": {"kind": "deepfm"}})
    with pytest.raises(InvalidInput, match=r"pip install --no-deps recbole==1\.2\.1"):
        open_reader(job)


def test_a_recbole_without_the_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        origin = str(tmp_path / "recbole" / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec())
    job = make_job({"name": "a", "data": {"reader": "movielens"}, "model": {"kind": "deepfm"}})
    with pytest.raises(InvalidInput, match=r"ml-100k: this recbole carries no MovieLens-100K; run `pip install"):
        open_reader(job)
