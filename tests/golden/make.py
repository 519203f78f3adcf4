"""Makes the golden snapshot of the format as it is now: python -m tests.golden.make FOLDER

    FOLDER/uri/...          a job with a full cut and a delta of it
    FOLDER/<cut>.json       what the shards had at each cut, row by row: bytes in hex; and the dense tensors

Once for each format_version, before the first release that writes it; what is committed is never made again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.damage.tiny import NAME, SPECS, finish, train
from tests.embedding_server.cut_shards import CutShards
from trainer.snapshots import DENSE_FILE, job_folder


def as_json(value: Any) -> Any:
    """Of CutShards.state(): bytes in hex, sets and tuples as lists, keys as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in sorted(value.items())}
    if isinstance(value, set | tuple | list):
        return [as_json(item) for item in value]
    return value if value is None or isinstance(value, int | str) else str(value)


def dense_of(cut: Path) -> dict[str, str]:
    return {name: tensor.tobytes().hex() for name, tensor in sorted(load_file(cut / DENSE_FILE).items())}


def main(folder: Path) -> None:
    uri = folder / "uri"
    with CutShards(SPECS) as shards:
        train(shards)
        full = shards.cut(job_folder(uri, NAME))
        _write(folder, full, shards)
        entry = finish(full, shards.step, 1)
        for _ in range(2):
            shards.train(np.array([100, 101, 777], np.int64))
        delta = shards.cut(full.parent, full)
        _write(folder, delta, shards)
        finish(delta, shards.step, 1, parent=entry, sequence=1)
    for cut in (full, delta):
        _add(folder, cut, dense=dense_of(cut))


def _write(folder: Path, cut: Path, shards: CutShards) -> None:
    _add(folder, cut, step=shards.step, tables=as_json(shards.state()))


def _add(folder: Path, cut: Path, **content: Any) -> None:
    path = folder / f"{cut.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
