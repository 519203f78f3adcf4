"""Holds `frostline estimate` and `frostline tune` to what they promise, on the quality benchmark's stream S1.

    python -m benchmarks.tune_check [--share 0.1] [--max-auc-drop 0.05] [--part estimate | tune]

tune        the pick's bytes against those of an exhaustive search over the same grid: within TUNE_LIMIT of the best
estimate    bytes of the whole job, at its end and peak, against its run under one setting of each policy, from all IDs
            and from a hash-sample of them: within ESTIMATE_LIMIT

The stream is written as Parquet first, so that both go the way of a user's data. Writes benchmarks/results/tune.json;
tune-share-1.json of the whole stream, where the estimate alone takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import RESULTS, provenance
from benchmarks.quality.samples import stream_spec
from benchmarks.quality.stream import PlantedStream
from embedding_server.inproc import InprocStore
from services.tune_commands import frontier_lines, pick_lines, tuning_document
from trainer.estimate import estimate_jobs
from trainer.group import Group
from trainer.job import Job, make_job
from trainer.loop import run_worker
from trainer.tune import TuneResult, prefix_steps, tune
from trainer.tune_grid import Candidate, baseline, grid

TUNE_LIMIT = 0.05
ESTIMATE_LIMIT = 0.15
BATCH_SIZE = 1024
_ROWS_PER_GROUP = 65_536
#: a loss that is a mean over the batch makes gradients smaller by its size, and so the accumulators of the same model
_INITIAL_ACCUMULATOR = 0.001 / BATCH_SIZE**2
_SAMPLE_BYTES = 8 << 20  # small enough that the sample of the estimate is thinned


class Tower(nn.Module):
    """The rows of all fields side by side, one hidden layer, one logit: the quality benchmark's model."""

    def __init__(self, rows: EmbeddingBagCollectionInterface, num_dense: int, hidden: int = 64) -> None:
        super().__init__()
        self.rows = rows
        width = num_dense + sum(config.embedding_dim for config in rows.embedding_bag_configs())
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(torch.cat([dense, self.rows(features).values()], dim=1))
        return logits


def write_stream(path: Path, share: float, seed: int) -> int:
    """The training samples of S1 at that share; returns the number of fields."""
    stream = PlantedStream(stream_spec("S1", share), seed)
    writer: pq.ParquetWriter | None = None
    for samples in stream.train_batches(_ROWS_PER_GROUP):
        columns = {f"field_{f}": row_ids for f, row_ids in enumerate(samples.row_ids)}
        table = pa.table({"label": samples.labels, **columns})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return stream.spec.num_fields


def job_of(path: Path, num_fields: int, dim: int, seed: int) -> Job:
    return make_job(
        {
            "name": "tune-check",
            "seed": seed,
            "data": {"reader": "parquet", "train": [str(path)], "features": [f"field_{f}" for f in range(num_fields)]},
            "model": {"kind": "benchmarks.tune_check:Tower"},
            "embedding": {
                "dim": dim,
                "learning_rate": {"base": 0.05},
                "optimizer": {"kind": "rowwise_adagrad", "initial_accumulator": _INITIAL_ACCUMULATOR},
                "advanced": {"init_min": -0.05, "init_max": 0.05},
                "policy": "off",
            },
            "trainer": {"batch_size": BATCH_SIZE, "dense_optimizer": {"kind": "adam"}},
            "servers": {"store": "inproc"},
        }
    )


def check_tune(job: Job, max_auc_drop: float, samples: int | None) -> dict[str, Any]:
    searches: dict[str, TuneResult] = {}
    seconds = {}
    for name in ("search", "exhaustive"):
        start_s = time.perf_counter()
        is_exhaustive = name == "exhaustive"
        searches[name] = tune(job, max_auc_drop=max_auc_drop, samples=samples, exhaustive=is_exhaustive, say=_say)
        seconds[name] = round(time.perf_counter() - start_s, 1)
        for line in [*frontier_lines(searches[name]), *pick_lines(searches[name])]:
            _say(line)
    over = searches["search"].pick.bytes_peak / searches["exhaustive"].pick.bytes_peak - 1.0
    return {
        "bytes_over_best": over,
        "seconds": seconds,
        "runs": {name: len(result.points) for name, result in searches.items()},
        **{name: tuning_document(result) for name, result in searches.items()},
    }


def check_estimate(job: Job, prefix_samples: int) -> dict[str, Any]:
    """The second setting of each policy in the grid: none that keeps or frees all there is."""
    by_policy: dict[str, list[Candidate]] = {}
    for candidate in grid(job, prefix_samples):
        by_policy.setdefault(candidate.policy, []).append(candidate)
    chosen = [baseline(), *(candidates[1] for candidates in by_policy.values())]
    jobs = {candidate.name: candidate.job(job) for candidate in chosen}
    whole, sampled = estimate_jobs(jobs, _say), estimate_jobs(jobs, _say, _SAMPLE_BYTES)
    result: dict[str, Any] = {}
    for name, own in jobs.items():
        run = _run(own)
        share = min(sampled[name].sampled.values())
        result[name] = {"run": run, "sampled_share": share}
        for kind, estimate in (("whole", whole[name]), ("sampled", sampled[name])):
            found = {"bytes_total": estimate.total().bytes_total, "bytes_peak": estimate.bytes_peak}
            errors = {f"{figure}_error": value / run[figure] - 1.0 for figure, value in found.items()}
            result[name][kind] = {**found, **errors}
        _say(f"{name}: {json.dumps(result[name])}")
    return result


def _run(job: Job) -> dict[str, int]:
    store = InprocStore(memory_limit_bytes=job.servers.memory_limit_bytes * job.servers.num_shards)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_worker(job, "main", store, Group(), Path(folder), lambda progress: None)
        total = store.stats().total()
    finally:
        store.close()
    return {"bytes_total": total.bytes_total, "bytes_peak": total.bytes_peak}


def missed(document: dict[str, Any]) -> list[str]:
    """Promises that the figures break."""
    broken = []
    if "tune" in document and document["tune"]["bytes_over_best"] > TUNE_LIMIT:
        broken.append(f"tune: {document['tune']['bytes_over_best']:+.1%} over the best")
    for name, of_job in document.get("estimate", {}).items():
        for kind in ("whole", "sampled"):
            for figure in ("bytes_total", "bytes_peak"):
                error = of_job[kind][f"{figure}_error"]
                if abs(error) > ESTIMATE_LIMIT:
                    broken.append(f"estimate ({kind}) of {name}: {figure} {error:+.1%}")
    return broken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1, help="of the stream's samples and ranks")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-auc-drop", type=float, default=0.05, help="points of AUC (x100)")
    parser.add_argument("--samples", type=int, help="of a run; default: tune's own")
    parser.add_argument("--part", choices=("estimate", "tune"), help="default: both")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s1.parquet"
        job = job_of(path, write_stream(path, arguments.share, arguments.seed), arguments.dim, arguments.seed)
        config = {name: value for name, value in vars(arguments).items() if name != "out"}
        document: dict[str, Any] = {"workload": "tune", **provenance(), "config": config}
        if arguments.part in (None, "estimate"):
            document["estimate"] = check_estimate(job, prefix_steps(job, arguments.samples) * BATCH_SIZE)
        if arguments.part in (None, "tune"):
            document["tune"] = check_tune(job, arguments.max_auc_drop, arguments.samples)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "tune.json" if arguments.share == 0.1 else f"tune-share-{arguments.share:g}.json"
    (arguments.out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    broken = missed(document)
    for line in broken:
        _say(f"MISSED: {line}")
    return 1 if broken else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
