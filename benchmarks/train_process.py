"""One contestant of the train workloads, as processes of its own: what it needs is set before torch loads.

    python -m benchmarks.train_process SPEC_JSON

prints "@ready" and then, for each line {"what": "train" | "dense_alone", "steps": n} on standard input, "@" and the
seconds that n steps took. SPEC_JSON: the fields of ProcessSpec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 20


@dataclass(frozen=True)
class ProcessSpec:
    """side: frostline or torchrec. dense: same (our default precision and layers) or as_shipped (torch's own)."""

    side: str
    dense: str
    config: dict[str, Any]
    threads: int
    rank: int = 0
    size: int = 1
    store_file: str = ""
    addresses: list[str] = field(default_factory=list)


class Contestant:
    """The processes of one side: one, or one for each rank."""

    def __init__(
        self, side: str, dense: str, config: dict[str, Any], size: int = 1, addresses: list[str] | None = None
    ) -> None:
        from services.worker import ENVIRONMENT

        self._folder = tempfile.TemporaryDirectory(prefix="frostline-bench-")
        self._name = f"{side}, {size} rank(s), dense {dense}"
        threads = max(1, config["threads"] // size)
        # TorchRec as shipped runs in a plain environment, as its users run it
        is_plain = side == "torchrec" and dense == "as_shipped"
        environment = dict(os.environ) if is_plain else {**os.environ, **ENVIRONMENT}
        self._ranks = []
        for rank in range(size):
            store_file = str(Path(self._folder.name) / "store")
            spec = ProcessSpec(side, dense, config, threads, rank, size, store_file, addresses or [])
            with open(self._log(rank), "w") as log:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", "-m", "benchmarks.train_process", json.dumps(asdict(spec))],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        cwd=ROOT,
                        env=environment,
                    )
                )

    def wait_ready(self) -> None:
        for rank in range(len(self._ranks)):
            self._read(rank)

    def run_ms(self, what: str, steps: int) -> float:
        """Milliseconds a step, of the slowest rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"what": what, "steps": steps}) + "\n")
            rank.stdin.flush()
        return max(float(self._read(rank)) for rank in range(len(self._ranks))) * 1e3 / steps

    def close(self) -> None:
        for process in self._ranks:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _read(self, rank: int) -> str:
        """The next line of ours; libraries print to standard output too."""
        stdout = self._ranks[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("@"):
                return line[1:].strip()
        status = self._ranks[rank].wait()
        raise RuntimeError(f"{self._name}: rank {rank} ended with {status}:\n{self._log(rank).read_text()[-2000:]}")


def main(arguments: list[str]) -> None:
    from services.allocator import set_allocator

    spec = ProcessSpec(**json.loads(arguments[0]))
    if spec.side == "frostline" or spec.dense == "same":
        set_allocator()
    import torch

    from benchmarks import train

    torch.set_num_threads(spec.threads)
    runners = train.runners(spec)
    print("@ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        run = runners[request["what"]]
        start_s = time.perf_counter()
        run(request["steps"])
        print(f"@{time.perf_counter() - start_s}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
