"""Reads hostile files and says, a line of JSON each, what was said of them and what that took.

A process of its own, so that memory that an earlier test has let go hides nothing: python -m tests.damage.hostile_child
FOLDER. Figures: CPU seconds, and KiB by which the peak of resident memory rose.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from embedding_server.errors import FrostlineError
from services.served_model import ServedModel, ServeWhat
from tests.damage.hostile import CASES
from tests.damage.hostile_imports import import_one
from tests.damage.tiny import NAME, SPECS, job_of, make_tiny
from tests.embedding_server.cut_shards import CutShards
from trainer.resume import read_snapshot
from trainer.snapshot_list import list_jobs, verify
from trainer.snapshot_search import find_snapshot
from trainer.snapshots import job_folder


def resume(cut: Path) -> None:
    """As `train --resume`: the trainer's part, then the shards'."""
    read_snapshot(find_snapshot(job_of(cut.parent.parent), "main"))
    with CutShards(SPECS, will_restore=True) as shards:
        shards.restore(cut)


def serve(cut: Path) -> None:
    """As `serve --follow`, which checks all rows before it serves them."""
    served = ServedModel(cut, ServeWhat(rows_only=True))
    try:
        served.snapshot.check_rows()
    finally:
        served.close()


def measured(read: Callable[[], object]) -> dict[str, object]:
    before = _reset_peak_kib()
    start_s = time.process_time()
    try:
        told = read()
        refusal = "\n".join(told) if isinstance(told, list) else ""
    except FrostlineError as error:
        refusal = str(error)
    except Exception as error:  # what an entry point would not take for a refusal
        refusal = ""
        print(f"{error!r}", file=sys.stderr)
    return {"refusal": refusal, "cpu_s": time.process_time() - start_s, "kib": _status_kib("VmHWM") - before}


def _reset_peak_kib() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status_kib("VmRSS")


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def main(folder: Path) -> None:
    whole = make_tiny(folder / "whole", num_parts=2)
    for read in _ways_in(whole).values():  # compiles kernels; what stays resident is no case's
        read()
    for name, change in CASES.items():
        uri = folder / "case"
        shutil.copytree(whole.parent, job_folder(uri, NAME))
        cut = job_folder(uri, NAME) / whole.name
        must_name = change(cut)
        found = {way: measured(read) for way, read in _ways_in(cut).items()}
        print(json.dumps({"name": name, "must_name": str(must_name), "ways_in": found}), flush=True)
        shutil.rmtree(uri)
    files = sorted((folder / "imports").iterdir())
    measured(lambda: import_one(files[0], folder / "uri"))  # imports and compiles, at no file's cost
    for file in files:
        found = {"import": measured(lambda file=file: import_one(file, folder / "uri"))}
        print(json.dumps({"name": file.name, "must_name": str(file), "ways_in": found}), flush=True)


def _ways_in(cut: Path) -> dict[str, Callable[[], object]]:
    return {
        "verify": lambda: verify(cut).messages,
        "resume": lambda: resume(cut),
        "serve": lambda: serve(cut),
        "ls": lambda: list_jobs(cut.parent.parent) and None,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
