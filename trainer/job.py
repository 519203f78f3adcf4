"""The job spec: what `frostline train JOB.yaml` reads, and its conversion to the specs of the embedding servers.

    job = load_job(path, ["trainer.data_passes=1"])     one YAML file and --set overlays -> Job
    for name, arm in job.arm_jobs().items(): ...        one job per arm, each a Job of its own
    specs = table_specs(arm, reader.schema.tables)      samples become steps here, once

A user thinks in samples; shards count steps (table_knobs.py converts). Importing this module imports neither torch nor
numba.
Errors: InvalidInput with every fault on a line of its own, as `path.to.key=value: rule; next step`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator

from embedding_server.errors import InvalidInput
from embedding_server.spec import TableSpec
from embedding_server.store import MAX_SEQUENCE
from trainer.access_spec import AccessSection
from trainer.data.spec import AbsolutePath, DataSection
from trainer.lr_schedule import LearningRate
from trainer.model_spec import ModelSection
from trainer.overlay import apply_settings, overlay, read_yaml
from trainer.section import Section, did_you_mean, explain
from trainer.table_knobs import EmbeddingSection, steps_of

__all__ = ["Job", "json_schema", "load_job", "make_job", "resolved_json", "steps_of", "table_specs"]

MAX_BATCH_SIZE = 1 << 22
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class DenseOptimizer(Section):
    kind: Literal["adam", "adamw", "adagrad", "sgd"] = Field(
        "adam", description="torch.optim optimizer of dense layers"
    )
    learning_rate: LearningRate = Field(LearningRate(base=0.001), description="rate of the dense layers")
    weight_decay: float = Field(0.0, ge=0.0, description="torch.optim's weight_decay")


class TrainerSection(Section):
    workers: int = Field(1, ge=1, le=1024, description="trainer processes")
    threads: int | None = Field(
        None, ge=1, le=1024, description="threads of torch and numba in a worker; default: cores / workers"
    )
    mode: Literal["sync", "pipelined"] = Field(
        "pipelined", description="pipelined: the next batch's rows are pulled during a step, one step stale"
    )
    prefetch_frozen: bool = Field(
        False,
        description="announces each batch to the shards a step before its pull, so that its frozen rows are read from "
        "disk meanwhile: for frozen rows that do not fit the memory of the shards' machines; costs an index look-up an "
        "ID elsewhere",
    )
    batch_size: int = Field(512, ge=1, le=MAX_BATCH_SIZE, description="samples of a step, over all workers")
    data_passes: int = Field(1, ge=1, le=10_000, description="times that the training samples are read")
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps; default: all data passes")
    precision: Literal["auto", "float32", "medium", "bfloat16"] = Field(
        "auto",
        description="dense matrix products: float32; medium (torch.set_float32_matmul_precision); bfloat16 (autocast); "
        "auto: bfloat16 on CPUs with bfloat16 units, else float32",
    )
    dense_optimizer: DenseOptimizer = DenseOptimizer()
    validate_every_samples: int | None = Field(
        None, ge=1, description="samples between evaluations on the validation split; default: after each data pass"
    )
    log_every_s: float = Field(2.0, gt=0.0, description="seconds between log lines when there is no terminal")
    max_failures: int = Field(
        3,
        ge=0,
        le=10_000,
        description="workers and shards that may die in an arm, which then goes back to its newest snapshot by itself; "
        "needs section `snapshots`",
    )
    output_dir: AbsolutePath = Field(Path("runs"), description="folder of runs; results go to its subfolder <name>")


class ServersSection(AccessSection):
    store: Literal["inproc", "remote"] = Field(
        "remote", description="remote: shards are servers behind gRPC; inproc: shards live in the trainer process"
    )
    launch: Literal["local", "external"] = Field(
        "local", description="remote: start the shards on this machine, or use running ones at `addresses`"
    )
    num_shards: int = Field(2, ge=1, le=1024, description="shards to start (launch local, or store inproc)")
    addresses: list[str] = Field([], max_length=1024, description="launch external: host:port of every shard")
    memory_limit_bytes: ByteSize = Field(
        ByteSize(2 << 30), ge=1 << 20, description="memory of one shard; bytes, or text like 2GiB"
    )
    data_dir: AbsolutePath | None = Field(None, description="folder of segments; default: a temporary folder")
    backend: Literal["auto", "cpu", "reference", "fbgemm"] = Field("auto", description="kernels of the shards")
    threads: int = Field(1, ge=1, le=64, description="threads of a shard process for kernels outside its executor")
    deadline_s: float = Field(60.0, gt=0.0, le=3600.0, description="longest that a call to the shards may take in all")

    @field_validator("addresses")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        for position, address in enumerate(addresses):
            host, colon, port = address.rpartition(":")
            if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(f"addresses[{position}]={address!r} must be host:port; write e.g. '10.0.0.5:7100'")
            if addresses.index(address) != position:
                raise ValueError(f"addresses[{position}]={address!r} is named twice; name each shard once")
        return addresses

    @model_validator(mode="after")
    def _launch(self) -> ServersSection:
        is_external = self.store == "remote" and self.launch == "external"
        if is_external and not self.addresses:
            raise ValueError(
                "launch='external' needs `addresses`; list host:port of every shard, or set launch='local'"
            )
        if self.addresses and not is_external:
            raise ValueError(
                f"`addresses` is given with store={self.store!r}, launch={self.launch!r}, which start shards; "
                "set store='remote' and launch='external', or remove the addresses"
            )
        if self.access_keys() and not is_external:
            raise ValueError(
                f"{', '.join(self.access_keys())} given with store={self.store!r}, launch={self.launch!r}, whose "
                "shards take calls of this machine alone; set store='remote' and launch='external', or remove them"
            )
        return self


class SnapshotsSection(Section):
    uri: AbsolutePath = Field(
        description="folder of snapshots, a path that trainers and shards all see; each job has a subfolder of its own"
    )
    every_samples: int | None = Field(
        None, ge=1, description="samples between cuts; default: only the one at the end (on_finish)"
    )
    keep: int = Field(2, ge=1, le=1000, description="snapshots of this run that stay, with the ones that they build on")
    max_deltas: int = Field(
        7,
        ge=0,
        le=MAX_SEQUENCE,
        description="deltas between two full cuts: they have the weights of rows that changed since the cut before",
    )
    on_finish: bool = Field(True, description="takes a last cut when training is done, and waits for it")

    @model_validator(mode="after")
    def _check(self) -> SnapshotsSection:
        if self.every_samples is None and not self.on_finish:
            raise ValueError(
                "every_samples is not given and on_finish is false, so no cut would ever be taken; set every_samples, "
                "or remove the section"
            )
        return self


class Job(Section):
    """One training job, resolved. `arms` are overlays: the same job trained several ways, compared at the end."""

    name: str = Field(pattern=NAME, description="names the run and its folder under trainer.output_dir")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data order, initial rows and dense layers")
    data: DataSection
    model: ModelSection = ModelSection()
    embedding: EmbeddingSection = EmbeddingSection()
    # made anew for each job, because its default folder depends on the directory of the command
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    servers: ServersSection = ServersSection()
    snapshots: SnapshotsSection | None = Field(None, description="what a run saves of itself; default: nothing")
    arms: dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]] = Field(
        {}, max_length=64, description="overlays by arm name, in the shape of the job; empty: one arm, `main`"
    )

    @model_validator(mode="after")
    def _check(self) -> Job:
        if self.trainer.batch_size < self.trainer.workers:
            raise ValueError(
                f"trainer.batch_size={self.trainer.batch_size} is less than trainer.workers={self.trainer.workers}, "
                "so some workers would never have a sample; raise batch_size"
            )
        if self.servers.store == "inproc" and self.trainer.workers > 1:
            raise ValueError(
                f"servers.store='inproc' keeps rows inside one process, and trainer.workers={self.trainer.workers}; "
                "set servers.store='remote' or trainer.workers=1"
            )
        if self.model.is_dlrm and self.model.dense_layers[-1] != self.embedding.dim:
            raise ValueError(
                f"model.dense_layers ends with {self.model.dense_layers[-1]} and embedding.dim={self.embedding.dim}: "
                f"{self.model.kind} needs them equal; set the last of model.dense_layers to {self.embedding.dim}"
            )
        if self.model.options and self.model.kind in ("dlrm_dcn", "dlrm", "deepfm"):
            raise ValueError(f"model.options is for module:factory, and model.kind={self.model.kind!r}; remove options")
        for table in self.embedding.tables:
            self.embedding.knobs_of(table)
        return self

    def arm_jobs(self) -> dict[str, Job]:
        """One Job per arm, with that arm's overlay applied and no arms of its own; `main` alone if there are none."""
        base = self.model_dump(mode="json", exclude_unset=True)
        base.pop("arms", None)
        if not self.arms:
            return {"main": make_job(base)}
        return {arm: _arm_job(base, arm, changes) for arm, changes in self.arms.items()}


def with_arms(job: Job, names: Sequence[str]) -> Job:
    """The job with these of its arms only, in its order; with all of them if none is named."""
    for name in names:
        if name not in job.arms:
            known = ", ".join(job.arms) or "none, it is trained as it stands"
            raise InvalidInput(
                f"arm {name!r} is not one of the job{did_you_mean(name, list(job.arms))} (arms: {known})"
            )
    return job.model_copy(update={"arms": {arm: job.arms[arm] for arm in job.arms if arm in names}}) if names else job


def load_job(path: str | Path, settings: Sequence[str] = ()) -> Job:
    """Reads a YAML job file and lays `a.b=value` settings over it. Every arm is checked too."""
    path = Path(path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}"
        raise InvalidInput(f"{path}: is {kind}, and a job is a mapping with the keys name and data; see examples/")
    try:
        return make_job(apply_settings(raw, settings))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: " + str(error).replace("\n", f"\n{path}: ")) from None


def make_job(raw: Mapping[str, Any]) -> Job:
    """A Job from plain data, arms checked too."""
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise InvalidInput(explain(error, Job)) from None
    if job.arms:
        job.arm_jobs()
    return job


def table_specs(job: Job, tables: Iterable[str]) -> list[TableSpec]:
    """Specs of the named tables, for EmbeddingStore.create_tables. Samples are divided by the global batch size."""
    names = list(dict.fromkeys(tables))
    for table in job.embedding.tables:
        if table not in names:
            raise InvalidInput(
                f"embedding.tables.{table}: the data has no table of this name{did_you_mean(table, names)}"
            )
    return [job.embedding.table_spec(name, job.trainer.batch_size, job.seed) for name in names]


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file."""
    return Job.model_json_schema()


def _arm_job(base: Mapping[str, Any], arm: str, changes: Mapping[str, Any]) -> Job:
    for key in ("name", "seed", "data", "arms"):
        if key in changes:
            raise InvalidInput(
                f"arms.{arm}.{key}: an arm may not change {key!r}, or the arms could not be compared; set it in the job"
            )
    try:
        return Job.model_validate(overlay(dict(base), changes, f"arms.{arm}"))
    except ValidationError as error:
        raise InvalidInput(f"arms.{arm}: " + explain(error, Job).replace("\n", f"\narms.{arm}: ")) from None


def resolved_json(job: Job) -> str:
    """The whole job with defaults filled in, as it is logged and saved beside the results."""
    return json.dumps(job.model_dump(mode="json"), indent=2)
