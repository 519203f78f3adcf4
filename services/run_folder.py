"""The folder of a run, <output_dir>/<name>, and what becomes of the results of an earlier run of the name.

    job.json, summary.json                                                    of the run
    <arm>/shard-<i>.log, <arm>/events.out.tfevents.*, <arm>/mask_info.json    of each arm
    <arm>/failures.json                                                       of an arm that lost a process
    _former/                                                                  the same of the last run that has results

A run has results from its first summary.json on. Until then those of the run before lie in _former/, whole: a run that
fails early costs nobody anything, and nothing of theirs passes for its own. A run that resumes the one before leaves
all as it is, and each file is replaced when its arm has a new one. Other files in the folder are the user's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from embedding_server.errors import InvalidInput
from trainer.failures import FAILURES_FILE
from trainer.mask_report import MASK_FILE
from trainer.report import ArmSummary, write_summary

SUMMARY_FILE, JOB_FILE = "summary.json", "job.json"
#: no arm has such a name: they begin with a letter or a digit
FORMER = "_former"
_PART = "_former.part"  # of a move that is under way
_OWN = (SUMMARY_FILE, JOB_FILE, "*/events.out.tfevents.*", "*/shard-*.log", f"*/{MASK_FILE}", f"*/{FAILURES_FILE}")


class RunFolder:
    def __init__(self, output_dir: Path, name: str) -> None:
        self.path = output_dir / name
        self.summary_path = self.path / SUMMARY_FILE
        self.former = self.path / FORMER
        self._output_dir = output_dir

    def begin(self, job_json: str, say: Callable[[str], None], resumes: bool = False) -> None:
        """Makes the folder, sets results of a run before aside and writes job.json. InvalidInput if that fails.

        resumes: this run is that one going on, so its curves and logs stay where they are.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resumes:
                self._clear()
            (self.path / JOB_FILE).write_text(job_json + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(
                f"trainer.output_dir={self._output_dir}: {error}; name a folder for results, with room for them"
            ) from None
        if self.former.exists():
            say(f"the results of the run before are in {self.former} until this run has some")

    def _clear(self) -> None:
        """Results go to _former/ and replace what is there; what a run without results has left is removed."""
        part = self.path / _PART
        if not self.summary_path.exists() and not part.exists():
            for path in self._own_files():
                path.unlink(missing_ok=True)
            return
        for path in self._own_files():
            target = part / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
        shutil.rmtree(self.former, ignore_errors=True)
        part.replace(self.former)

    def _own_files(self) -> Iterator[Path]:
        for pattern in _OWN:
            yield from list(self.path.glob(pattern))

    def write_summary(self, arms: Mapping[str, ArmSummary]) -> None:
        """summary.json, in place of which _former/ goes. OSError if it cannot be written; _former/ stays then."""
        write_summary(self.summary_path, arms)
        shutil.rmtree(self.former, ignore_errors=True)
