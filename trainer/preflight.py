"""What differs between a snapshot and the job that is to go on from it, all at once, before anything is touched.

    notes = preflight(snapshot, job, specs, shapes)     InvalidInput lists every difference that may not be

Must be as it was: what gives the reader's position and the rows their meaning (data, seed, batch size, tables, dims),
and the layers of the model. Anything else may differ; what may change figures is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from embedding_server.errors import InvalidInput
from embedding_server.spec import TableSpec
from trainer.job import Job

#: of the data section: what other splits and bad rows concern, and no position of the training samples
_FREE_DATA = frozenset(
    {"validation", "test", "num_validation_samples", "num_test_samples", "max_bad_rows", "on_bad_row"}
)
#: parts of the job whose differences are worth a note; all others (output, servers, lengths of the run) are not
_NOTED = ("model", "embedding", "trainer.workers", "trainer.mode", "trainer.precision", "trainer.dense_optimizer")
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    saved: str
    now: str
    rule: str
    is_allowed: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.saved} in the snapshot, {self.now} in the job; {self.rule}"


@dataclass(frozen=True, slots=True)
class SavedTable:
    spec: TableSpec
    has_initial_rows: bool = False  # some rows are not stored, for they are as they began


@dataclass(frozen=True, slots=True)
class Shapes:
    """Of the dense part: parameters and buffers by name, as `dtype[shape]`; the kind of its optimizer."""

    tensors: Mapping[str, str]
    optimizer_kind: str

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], optimizer_kind: str) -> Shapes:
        texts = {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in tensors.items()}
        return Shapes(texts, optimizer_kind)


def preflight(
    where: str,
    saved_job: Mapping[str, Any] | None,
    saved_tables: Mapping[str, SavedTable],
    saved_dense: Shapes | None,
    job: Job,
    tables: Mapping[str, TableSpec],
    dense: Shapes,
) -> list[str]:
    """Differences that are allowed, a line each. InvalidInput with all of them if there are others.

    saved_job, saved_dense None: the snapshot holds rows alone, and what they would be compared with begins anew.
    """
    found = list(_tables(saved_tables, tables))
    if saved_job is not None:
        found += _jobs(saved_job, job.model_dump(mode="json"))
    if saved_dense is not None:
        found += _dense(saved_dense, dense)
    wrong = [difference for difference in found if not difference.is_allowed]
    allowed = [str(difference) for difference in found if difference.is_allowed]
    if wrong:
        lines = [f"{where}: {len(wrong)} differences from the job forbid to resume from it:", *map(str, wrong)]
        if allowed:
            lines += ["these may be:", *allowed]
        raise InvalidInput("\n  ".join(lines))
    return allowed


def _tables(saved: Mapping[str, SavedTable], now: Mapping[str, TableSpec]) -> Iterator[Difference]:
    for name in sorted(saved.keys() | now.keys()):
        if name not in now:
            yield Difference(f"table {name!r}", f"dim {saved[name].spec.dim}", "missing", "the job's data must name it")
        elif name not in saved:
            yield Difference(f"table {name!r}", "missing", f"dim {now[name].dim}", "remove its features from the data")
        else:
            yield from _table(saved[name].spec, now[name], saved[name].has_initial_rows)


def _table(saved: TableSpec, now: TableSpec, has_initial_rows: bool) -> Iterator[Difference]:
    what = f"table {saved.name!r}"
    if saved.dim != now.dim:
        yield Difference(
            f"{what}, dim", str(saved.dim), str(now.dim), f"rows keep their dim: set embedding.dim={saved.dim}"
        )
    begun, begins = ((spec.seed, spec.init_min, spec.init_max) for spec in (saved, now))
    if has_initial_rows and begun != begins:
        rule = "rows that froze untrained are made from them: set them as they were"
        yield Difference(f"{what}, seed, init_min, init_max", str(begun), str(begins), rule)
    if saved.optimizer.kind != now.optimizer.kind:
        yield Difference(
            f"{what}, optimizer", saved.optimizer.kind, now.optimizer.kind, "the state of its rows starts anew", True
        )


def _jobs(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for path, before, after in _leaves(saved, now):
        section, _, key = path.partition(".")
        if path == "seed":
            yield _must(path, before, after, "it draws the order of samples and new rows")
        elif path == "trainer.batch_size":
            yield _must(path, before, after, "the reader's position counts batches of that size")
        elif section == "data" and key.partition(".")[0] not in _FREE_DATA:
            if _have_same_file_names(before, after):
                yield Difference(path, _text(before), _text(after), "the files must hold the same samples", True)
            else:
                yield _must(path, before, after, "the reader's position would mean other samples")
        elif path.startswith(_NOTED) and path != "embedding.dim" and not _is_told_elsewhere(path):
            yield Difference(path, _text(before), _text(after), "the job's counts", True)


def _is_told_elsewhere(path: str) -> bool:
    """Kinds of optimizers: by table, and with the dense state."""
    return path == "trainer.dense_optimizer.kind" or (path.startswith("embedding.") and path.endswith("optimizer.kind"))


def _must(path: str, before: Any, after: Any, why: str) -> Difference:
    return Difference(path, _text(before), _text(after), f"{why}: set it as it was")


def _dense(saved: Shapes, now: Shapes) -> Iterator[Difference]:
    rule = "set `model` as it was, or give it what the snapshot has"
    for name in sorted(saved.tensors.keys() | now.tensors.keys()):
        before, after = saved.tensors.get(name, "missing"), now.tensors.get(name, "missing")
        if before != after:
            yield Difference(f"dense parameter {name}", before, after, rule)
    if saved.optimizer_kind != now.optimizer_kind:
        rule = "the optimizer's state starts anew"
        yield Difference("trainer.dense_optimizer.kind", saved.optimizer_kind, now.optimizer_kind, rule, True)


def _leaves(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, before, after) of all that differs; lists are leaves."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _leaves(
                before.get(key, _NOTHING), after.get(key, _NOTHING), f"{path}.{key}" if path else str(key)
            )
    elif before != after:
        yield path, before, after


def _have_same_file_names(before: Any, after: Any) -> bool:
    """Whether both are absolute paths, or lists of them, that differ in folders alone."""
    old, new = ([value] if isinstance(value, str) else value for value in (before, after))
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return False
    return all(
        isinstance(a, str) and isinstance(b, str) and a.startswith("/") and b.startswith("/")
        and PurePath(a).name == PurePath(b).name
        for a, b in zip(old, new, strict=True)
    )  # fmt: skip


def _text(value: Any) -> str:
    text = "absent" if value is _NOTHING else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
