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

#: row_ids of a table: int64, or int32, in any container that numpy or torch makes
RowIds = np.ndarray | torch.Tensor | Sequence[int]


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
                self._meet(step, f"{topic}: done", json.dumps({"error": str(error)[:10_000]}))
            raise
        return self._outcome(topic, self._meet(step, f"{topic}: done", words))

    def _meet(self, step: int, topic: str, words: str = "") -> list[str]:
        number = self._met[1] if self._met[0] == step else 0
        self._met = step, number + 1
        return self._store.meet(self._steps.who, step, number, topic, words)

    @staticmethod
    def _outcome(topic: str, words: list[str]) -> Any:
        said = json.loads(words[0])
        if "error" in said:
            raise FrostlineError(f"{topic}: worker 0 could not do it: {said['error']}")
        return said["result"]

    # What is done ---------------------------------------------------------------------------------------------------

    def delete_rows(self, ids: Mapping[str, RowIds]) -> dict[str, Erased]:
        arrays = {name: _row_ids(name, row_ids) for name, row_ids in ids.items()}
        what = ", ".join(f"{row_ids.size} of {name!r} ({_digest(row_ids)})" for name, row_ids in sorted(arrays.items()))

        def work(step: int) -> dict[str, dict[str, int]]:
            erased = self._store.delete_rows(self._steps.who, step, arrays)
            return {name: asdict(of_table) for name, of_table in erased.items()}

        result = self.together(f"delete rows: {what}", work)
        return {name: Erased(**counts) for name, counts in result.items()}

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


def _row_ids(table: str, row_ids: RowIds) -> np.ndarray:
    array = row_ids.detach().cpu().numpy() if isinstance(row_ids, torch.Tensor) else np.asarray(row_ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise InvalidInput(f"table {table!r}: row_ids to delete are {array.dtype}; they must be int64 (or int32)")
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _digest(row_ids: np.ndarray) -> str:
    return hashlib.blake2b(row_ids.tobytes(), digest_size=16).hexdigest()
