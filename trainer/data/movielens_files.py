"""MovieLens-100K as the recbole package carries it: three tab-separated files with a typed header.

    ml-100k.inter   user_id, item_id, rating, timestamp
    ml-100k.user    user_id, age, gender, occupation, zip_code
    ml-100k.item    item_id, movie_title, release_year, class (genres by spaces)

recbole is looked up, never imported: its import pulls in a whole framework. Rows of one user or item that stands twice,
ratings of unknown users or items, numbers that are none, wrong field counts and line ends are bad rows.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from embedding_server.errors import InvalidInput
from trainer.data.bad_rows import BadRows, check_file

INTER_COLUMNS = ("user_id", "item_id", "rating", "timestamp")
USER_COLUMNS = ("user_id", "age", "gender", "occupation", "zip_code")
ITEM_COLUMNS = ("item_id", "movie_title", "release_year", "class")
INSTALL = "pip install --no-deps recbole==1.2.1"
MAX_TIMESTAMP_S = 2**40
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class User:
    user_id: str
    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass(frozen=True, slots=True)
class Item:
    item_id: str
    title_words: list[str]
    release_year: str
    genres: list[str]


@dataclass(frozen=True, slots=True)
class Ratings:
    """All ratings in file order, n of them; `user` and `item` are positions in the lists."""

    users: list[User]
    items: list[Item]
    user: np.ndarray  # int64[n]
    item: np.ndarray  # int64[n]
    rating: np.ndarray  # float32[n], 1 to 5
    timestamp_s: np.ndarray  # int64[n]


def movielens_folder(path: Path | None) -> Path:
    """The folder given, or the one inside the installed recbole. InvalidInput says how to get it."""
    if path is not None:
        return path
    spec = importlib.util.find_spec("recbole")
    if spec is None or spec.origin is None:
        raise InvalidInput(
            "MovieLens-100K comes with the recbole package, which is not installed; run "
            f"`{INSTALL}`, or set data.path to a folder with ml-100k.inter, ml-100k.user and ml-100k.item"
        )
    folder = Path(spec.origin).parent / "dataset_example" / "ml-100k"
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: this recbole carries no MovieLens-100K; run `{INSTALL}` or set data.path")
    return folder


def read_ratings(folder: Path, bad: BadRows) -> Ratings:
    """Reads and checks the three files. InvalidInput names file and row."""
    users = _read_keyed(folder / "ml-100k.user", USER_COLUMNS, _user, bad)
    items = _read_keyed(folder / "ml-100k.item", ITEM_COLUMNS, _item, bad)
    user_position = {key: position for position, key in enumerate(users)}
    item_position = {key: position for position, key in enumerate(items)}
    path = folder / "ml-100k.inter"
    user, item, rating, timestamp_s = [], [], [], []
    for row, fields in _rows(path, INTER_COLUMNS, bad):
        if (reason := _fault_of_rating(fields, user_position, item_position)) is not None:
            bad.reject(path, row, reason)
            continue
        user.append(user_position[fields[0]])
        item.append(item_position[fields[1]])
        rating.append(float(fields[2]))
        timestamp_s.append(int(float(fields[3])))
    if not user:
        raise InvalidInput(f"{path} row 2: no rating below the header; fetch the file again ({INSTALL})")
    return Ratings(
        list(users.values()),
        list(items.values()),
        np.array(user, np.int64),
        np.array(item, np.int64),
        np.array(rating, np.float32),
        np.array(timestamp_s, np.int64),
    )


def _fault_of_rating(fields: list[str], users: dict[str, int], items: dict[str, int]) -> str | None:
    user, item, rating, timestamp = fields
    if user not in users:
        return f"user_id={user!r} is not in ml-100k.user"
    if item not in items:
        return f"item_id={item!r} is not in ml-100k.item"
    if not 1.0 <= _number(rating) <= 5.0:
        return f"rating={rating!r} must be a number from 1 to 5"
    if not 0.0 <= _number(timestamp) < MAX_TIMESTAMP_S:
        return f"timestamp={timestamp!r} must be a number of seconds since 1970"
    return None


def _user(fields: list[str]) -> User | str:
    user_id, age, gender, occupation, zip_code = fields
    if not (age.isascii() and age.isdigit() and int(age) < 150):
        return f"age={age!r} must be a whole number below 150"
    return User(user_id, int(age), gender, occupation, zip_code)


def _item(fields: list[str]) -> Item | str:
    item_id, title, release_year, genres = fields
    return Item(item_id, re.findall(r"[a-z0-9]+", title.lower()), release_year, genres.split())


def _read_keyed(
    path: Path, columns: tuple[str, ...], parse: Callable[[list[str]], _Row | str], bad: BadRows
) -> dict[str, _Row]:
    """Rows by their first field. `parse` gives a reason instead of a row that is bad."""
    result: dict[str, _Row] = {}
    for row, fields in _rows(path, columns, bad):
        parsed = f"{columns[0]}={fields[0]!r} stands twice" if fields[0] in result else parse(fields)
        if isinstance(parsed, str):
            bad.reject(path, row, parsed)
        else:
            result[fields[0]] = parsed
    return result


def _rows(path: Path, columns: tuple[str, ...], bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    """(row number, fields) of each row below the header; bad line ends and field counts are rejected here."""
    check_file(path)
    lines = path.read_bytes().split(b"\n")
    is_cut = lines[-1] != b""
    _check_header(path, lines[0], columns)
    for row, line in enumerate(lines[1:] if is_cut else lines[1:-1], start=2):
        reason = _fault_of_line(line, is_cut and row == len(lines))
        fields = [] if reason else line.decode("utf-8").split("\t")
        if not reason and len(fields) != len(columns):
            reason = f"has {len(fields)} fields by tabs and needs {len(columns)} ({', '.join(columns)})"
        if reason:
            bad.reject(path, row, reason)
        else:
            yield row, fields


def _fault_of_line(line: bytes, is_cut: bool) -> str | None:
    if is_cut:
        return "the last line has no line end, so the file was cut short"
    if line.endswith(b"\r"):
        return "the line ends with CR LF, and must end with LF alone; convert it, e.g. with dos2unix"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} of the line is not UTF-8"
    return None


def _check_header(path: Path, line: bytes, columns: tuple[str, ...]) -> None:
    names = tuple(part.partition(":")[0] for part in line.decode("utf-8", "replace").split("\t"))
    if line.endswith(b"\r"):
        raise InvalidInput(f"{path} row 1: the header ends with CR LF; convert the file to LF, e.g. with dos2unix")
    if names != columns:
        raise InvalidInput(
            f"{path} row 1: the header's columns are {', '.join(names)[:200]!r} and must be {', '.join(columns)!r}; "
            f"use the files of recbole 1.2.1 ({INSTALL})"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
