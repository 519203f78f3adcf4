"""What a collection does to rows and tables between two steps, by every worker alike: delete rows, add and drop tables.

    changes.together("drop_table 'user'", work)     every worker calls; worker 0 alone does the work

All workers meet before it (so every push is applied, and nobody has pulled ahead) and after it. Workers that want
different things, or one that goes on to its next step instead, are an error for all of them, with nothing done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from embedding_server.errors import FrostlineError, InvalidInput, NotReady
from embedding_server.spec import TableSpec
from embedding_server.store import EmbeddingStore, Erased
from trainer.training_steps import TrainingSteps

#: row_ids of a table: int64, or int32, in one row: an array, a tensor or a list
RowIds = np.ndarray | torch.Tensor | Sequence[int]

MAX_TABLES = 1024  # in a call of delete_rows: what became of them must fit a meeting (embedding_server/meetings.py)
_TOPIC_CHARS = 1000  # of a longer topic the rest is told by a digest
_ERROR_CHARS = 5000  # of an error, each of which JSON may write with 12
MAX_NAME_CHARS = 255  # of a feature; as of a table


class TableChanges:
    """Of one worker. Thread safety: none; the thread of the training loop calls."""

    def __init__(self, store: EmbeddingStore, steps: TrainingSteps) -> None:
        self._store, self._steps = store, steps
        self._met = (-1, 0)  # at which step, how many times

    def together(self, topic: str, work: Callable[[int], Any] = lambda step: None) -> Any:
        """What work(step), which worker 0 calls, returned, on every worker: something that JSON takes.

        NotReady if a step is open or prefetched, or a worker went on; InvalidInput if workers want different things;
        worker 0 gets the error of its work, the others a FrostlineError with its text.
        """
        if not self._steps.is_between_steps:
            raise NotReady(
                f"{topic}: a step is open or prefetched; call it after .step(), before the next batch is pulled, on"
                " every worker"
            )
        step, is_first = self._steps.last_pulled_step, self._steps.who.worker == 0
        self._meet(step, topic)
        if not is_first:
            return self._outcome(topic, self._meet(step, f"{topic}: done"))
        try:
            words = json.dumps({"result": work(step)})
        except Exception as error:
            with suppress(FrostlineError):  # that the others wait no more matters less than what went wrong
                self._meet(step, f"{topic}: done", json.dumps({"error": str(error)[:_ERROR_CHARS]}))
            raise
        return self._outcome(topic, self._meet(step, f"{topic}: done", words))

    def _meet(self, step: int, topic: str, words: str = "") -> list[str]:
        number = self._met[1] if self._met[0] == step else 0
        self._met = step, number + 1
        if len(topic) > _TOPIC_CHARS:
            topic = f"{topic[:_TOPIC_CHARS]}... ({_digest(topic.encode())})"
        return self._store.meet(self._steps.who, step, number, topic, words)

    @staticmethod
    def _outcome(topic: str, words: list[str]) -> Any:
        said = json.loads(words[0])
        if "error" in said:
            raise FrostlineError(f"{topic}: worker 0 could not do it: {said['error']}")
        return said["result"]

    # What is done ---------------------------------------------------------------------------------------------------

    def delete_rows(self, ids: Mapping[str, RowIds]) -> dict[str, Erased]:
        arrays = _arrays(ids)
        names = sorted(arrays)
        what = ", ".join(f"{arrays[name].size} of {name!r} ({_digest(arrays[name].tobytes())})" for name in names)

        def work(step: int) -> list[list[int]]:
            erased = self._store.delete_rows(self._steps.who, step, arrays)
            return [list(asdict(erased[name]).values()) for name in names]

        result = self.together(f"delete rows: {what}", work)
        return {name: Erased(*counts) for name, counts in zip(names, result, strict=True)}

    def add_table(self, spec: TableSpec, config: BaseEmbeddingConfig) -> None:
        features = json.dumps([list(config.feature_names), str(getattr(config, "pooling", ""))])
        self.together(
            f"add table {spec.model_dump_json()} with features {features}",
            lambda step: self._store.create_tables([spec]),
        )
        self._store.table_specs()  # a store knows a table by what it once was: ask anew

    def drop_table(self, name: str) -> None:
        self.together(f"drop table {name!r}", lambda step: self._store.drop_tables(self._steps.who, step, [name]))
        self._store.table_specs()

    def add_feature(self, table: str, feature: str) -> None:
        self.together(f"add feature {feature!r} to table {table!r}")


def check_features(table: str, features: object) -> None:
    """InvalidInput unless they are names, each once: a batch's values are found by them."""
    if isinstance(features, str) or not isinstance(features, Sequence):
        raise InvalidInput(f"table {table!r}: its features are {features!r:.200}; give a list of names")
    for feature in features:
        if not isinstance(feature, str) or not 1 <= len(feature) <= MAX_NAME_CHARS or not _is_utf8(feature):
            raise InvalidInput(
                f"table {table!r}: feature {feature!r:.200} is no name; give 1 to {MAX_NAME_CHARS} characters"
            )
        if features.count(feature) > 1:
            raise InvalidInput(f"table {table!r}: feature {feature!r} is named twice; name each once")


def _is_utf8(text: str) -> bool:
    """No half of a surrogate pair, which no message takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _arrays(ids: Mapping[str, RowIds]) -> dict[str, np.ndarray]:
    """int64[n] by table. InvalidInput."""
    if not isinstance(ids, Mapping):
        raise InvalidInput(f"row_ids to delete come as a {type(ids).__name__}; give {{table: row_ids}}")
    if len(ids) > MAX_TABLES:
        raise InvalidInput(f"row_ids of {len(ids)} tables to delete; give at most {MAX_TABLES} tables in a call")
    for name in ids:
        if not isinstance(name, str):
            raise InvalidInput(f"row_ids to delete are of table {name!r:.200}; a table's name is text")
    return {name: _row_ids(name, row_ids) for name, row_ids in ids.items()}


def _row_ids(table: str, row_ids: RowIds) -> np.ndarray:
    """int64[n]; nothing is rounded, flattened or wrapped, for it would delete other rows."""
    try:
        array = row_ids.detach().cpu().numpy() if isinstance(row_ids, torch.Tensor) else np.asarray(row_ids)
    except (ValueError, TypeError, RuntimeError) as error:  # a ragged list, a sparse tensor
        raise InvalidInput(
            f"table {table!r}: row_ids to delete are no array ({error}); they must be int64[n] (or int32[n])"
        ) from None
    is_masked = isinstance(row_ids, np.ma.MaskedArray)
    is_whole = array.dtype.kind == "i" and array.dtype.itemsize in (4, 8)
    if is_masked or array.ndim != 1 or not (is_whole or array.size == 0):
        what = f"{'masked ' if is_masked else ''}{array.dtype}{list(array.shape)}"
        raise InvalidInput(f"table {table!r}: row_ids to delete are {what}; they must be int64[n] (or int32[n])")
    return np.ascontiguousarray(array, np.int64)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
