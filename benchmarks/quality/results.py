"""Results of cases on disk: one JSON line per case, and its test scores beside it, so that a study can be resumed.

    FOLDER/cases.jsonl            {"key", "digest", "case", "oracle_auc", "passes": [{"auc", "bytes_end", ...}], ...}
    FOLDER/KEY-pass1.scores       float32[n], little-endian: logits of the test samples
    FOLDER/STREAM-seedN.labels    uint8[n]

A line counts only while its digest is the one of the case as it would run now, stream, contestant and rates included.
Later lines of a case replace earlier ones; a last line that was cut short is dropped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality import contestants
from benchmarks.quality.samples import MOVIELENS, stream_spec
from benchmarks.quality.training import Case, Outcome


def digest_of(case: Case) -> str:
    """Of everything that decides a case's figures but the code."""
    settings = {
        "case": asdict(case),
        "stream": None if case.stream == MOVIELENS else asdict(stream_spec(case.stream, case.share)),
        "contestant": asdict(contestants.CONTESTANTS[case.contestant]),
        "optimizer": contestants.OPTIMIZERS[case.optimizer].as_json(),
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class Results:
    """The folder of a study. One process writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "cases.jsonl"
        self._lines: dict[str, dict[str, Any]] = {}
        for text in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            self._lines[line["key"]] = line

    def of(self, case: Case) -> dict[str, Any] | None:
        """The case's line, or None if it has to run."""
        line = self._lines.get(case.key)
        return line if line is not None and line["digest"] == digest_of(case) else None

    def add(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines[line["key"]] = line

    def labels(self, case: Case) -> np.ndarray:
        return np.fromfile(self.folder / _labels_name(case), np.uint8)

    def scores(self, case: Case, data_pass: int) -> np.ndarray:
        return np.fromfile(self.folder / _scores_name(case, data_pass), "<f4")


def save_outcome(folder: Path, case: Case, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Writes scores and labels and returns the case's line. Any process may; names differ by case."""
    outcome.labels.tofile(folder / _labels_name(case))
    for data_pass, scores in enumerate(outcome.scores):
        scores.astype("<f4").tofile(folder / _scores_name(case, data_pass))
    return {
        "key": case.key,
        "digest": digest_of(case),
        "case": asdict(case),
        "oracle_auc": outcome.oracle_auc,
        "seconds": round(seconds, 1),
        "passes": outcome.passes,
    }


def _scores_name(case: Case, data_pass: int) -> str:
    return f"{case.key}-pass{data_pass + 1}.scores"


def _labels_name(case: Case) -> str:
    return f"{case.stream}-seed{case.seed}.labels"
