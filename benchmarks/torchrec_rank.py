"""One rank of the two-rank TorchRec rival: a process that trains on demand.

    python -m benchmarks.torchrec_rank CONFIG_JSON RANK SIZE STORE_FILE THREADS

prints "@ready" and then, for each line {"dense": "same" | "as_shipped", "steps": n} on standard input, "@" and the
seconds that n steps took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 180


class RankGroup:
    """The ranks as processes of this one."""

    def __init__(self, config: dict[str, Any], size: int, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="frostline-ranks-")
        store_file = str(Path(self._folder.name) / "store")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torchrec_rank", json.dumps(config)]
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), store_file, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
            for rank in range(size)
        ]
        for rank in range(size):
            self._read(rank)

    def run_ms(self, dense: str, steps: int) -> float:
        """Milliseconds a step, of the slower rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"dense": dense, "steps": steps}) + "\n")
            rank.stdin.flush()
        return max(float(self._read(rank)) for rank in range(len(self._ranks))) * 1e3 / steps

    def close(self) -> None:
        for rank in self._ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
        self._folder.cleanup()

    def _read(self, rank: int) -> str:
        """The next line of ours; libraries print to standard output too."""
        stdout = self._ranks[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("@"):
                return line[1:].strip()
        raise RuntimeError(f"TorchRec rank {rank} ended with status {self._ranks[rank].wait()}")


def main(arguments: list[str]) -> None:
    import torch

    from benchmarks import dlrm

    config = json.loads(arguments[0])
    rank, size, store_file, threads = int(arguments[1]), int(arguments[2]), arguments[3], int(arguments[4])
    torch.set_num_threads(threads)
    rivals = {dense: dlrm.TorchRecRival(config, dense, rank, size, store_file) for dense in dlrm.DENSE_KINDS}
    samples = dlrm.make_samples(config, share=(rank, size))
    print("@ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        rival = rivals[request["dense"]]
        start_s = time.perf_counter()
        rival.train(samples, request["steps"])
        print(f"@{time.perf_counter() - start_s}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
