"""Jobs that are wrong: every message names the key, the value or the rule, and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from trainer.job import load_job, make_job, table_specs

GOOD = """\
name: job
data: {reader: movielens}
model: {dense_layers: [64, 32]}
embedding: {dim: 32}
arms:
  full: {embedding: {policy: "off"}}
"""

BAD_SETTINGS = {
    "unknown key": ("embedding.dmi=32", ["embedding.dmi", "did you mean 'dim'?"]),
    "unknown section": ("embeding.dim=32", ["embeding", "did you mean 'embedding'?"]),
    "unknown key in a union": ("data.pth=x", ["data.pth", "did you mean 'path'?"]),
    "unknown key of a schedule": ("embedding.learning_rate.warmup=3", ["did you mean 'warmup_samples'?"]),
    "unknown reader": ("data.reader=movielense", ["movielense", "did you mean 'movielens'?"]),
    "unknown optimizer": ("embedding.optimizer.kind=adagard", ["embedding.optimizer.kind='adagard'", "'adagrad'"]),
    "no such reader": ("data.reader=csv", ["data.reader='csv': must be one of 'movielens', 'criteo_tsv'"]),
    "unknown mode": ("trainer.mode=synch", ["trainer.mode='synch'", "did you mean 'sync'?"]),
    "unknown model": ("model.kind=dlrm_dnc", ["model.kind", "did you mean 'dlrm_dcn'?"]),
    "malformed factory": ("model.kind=my module:make", ["model.kind", "module:factory"]),
    "dim not a multiple of 4": ("embedding.dim=30", ["embedding.dim=30", "multiple of 4"]),
    "dim of a layer": ("embedding.dim=64", ["model.dense_layers ends with 32", "embedding.dim=64", "set the last"]),
    "negative rate": ("embedding.learning_rate.base=-0.1", ["embedding.learning_rate.base=-0.1", "greater than 0"]),
    "infinite rate": ("embedding.learning_rate.base=.inf", ["embedding.learning_rate.base"]),
    "nan": ("embedding.hot_fraction=.nan", ["embedding.hot_fraction"]),
    "fraction above one": ("embedding.hot_fraction=1.5", ["embedding.hot_fraction=1.5", "less than or equal to 1"]),
    "bits": ("embedding.frozen_bits=7", ["embedding.frozen_bits=7", "4, 8, 16 or 32"]),
    "a truth value for a number": ("trainer.max_failures=true", ["trainer: max_failures=True is a truth value"]),
    "a truth value for a size": (
        "servers.memory_limit_bytes=on",
        ["servers: memory_limit_bytes=True is a truth value"],
    ),
    "a truth value or none": ("trainer.max_steps=yes", ["trainer: max_steps=True is a truth value", "write a number"]),
    "negative failures": ("trainer.max_failures=-1", ["trainer.max_failures=-1", "greater than or equal to 0"]),
    "no failures": ("trainer.max_failures=null", ["trainer.max_failures=None", "valid integer"]),
    "words for failures": ("trainer.max_failures=x", ["trainer.max_failures='x'", "valid integer"]),
    "negative deltas": ("snapshots={uri: /s, max_deltas: -1}", ["snapshots.max_deltas=-1", "or equal to 0"]),
    "many deltas": ("snapshots={uri: /s, max_deltas: 65}", ["snapshots.max_deltas=65", "less than or equal to 64"]),
    "words for deltas": ("snapshots={uri: /s, max_deltas: x}", ["snapshots.max_deltas='x'", "valid integer"]),
    "an empty path": ("snapshots={uri: ''}", ["snapshots.uri: '' is no path; write one"]),
    "a number for a path": ("snapshots={uri: 5}", ["snapshots.uri: 5 is no path", "in quotes"]),
    "a path with a NUL": ('snapshots={uri: "/a\\0b"}', ["snapshots.uri: '/a\\x00b' is no path"]),
    "a home of nobody": ("trainer.output_dir=~nobody-here/x", ["trainer.output_dir: '~nobody-here/x'", "without '~'"]),
    "unknown policy": ("embedding.policy=compcat", ["embedding.policy='compcat'", "did you mean 'compact'?"]),
    "no hot bytes": ("embedding.hot_bytes=0", ["embedding.hot_bytes=0"]),
    "hot bytes as a word": ("embedding.hot_bytes=lots", ["embedding.hot_bytes='lots'"]),
    "hot bits": ("embedding.advanced.hot_bits=8", ["embedding.advanced.hot_bits=8", "16 or 32"]),
    "visits beyond a byte": ("embedding.forget_below=256", ["embedding.forget_below=256", "255"]),
    "unknown selection": ("embedding.advanced.select=scores", ["advanced.select='scores'", "did you mean 'score'?"]),
    "score that ranks nothing": (
        "embedding={policy: topk, advanced: {score: heat_x_grad}}",
        ["score='heat_x_grad'", "select='topk'", "set advanced.select='score'"],
    ),
    "slope without samples": (
        "embedding.advanced.schedule.kind=linear",
        ["embedding.advanced.schedule", "kind='linear' needs `samples`", "set samples"],
    ),
    "samples without slope": (
        "embedding.advanced.schedule.samples=100",
        ["embedding.advanced.schedule", "samples=100", "set kind to linear or cubic"],
    ),
    "accumulator of zero": ("embedding.advanced.initial_accumulator=0", ["initial_accumulator=0", "greater than 0"]),
    "two accumulators": (
        "embedding={optimizer: {initial_accumulator: 0.5}, advanced: {initial_accumulator: 0.2}}",
        ["optimizer.initial_accumulator=0.5", "advanced.initial_accumulator=0.2", "remove one"],
    ),
    "control of more than half": ("embedding.advanced.control_fraction=0.6", ["control_fraction=0.6"]),
    "re-selection of one table": (
        "embedding.tables.user.advanced.reselect_every_samples=5",
        ["embedding.tables.user.advanced.reselect_every_samples", "set embedding.advanced.reselect_every_samples"],
    ),
    "advanced key of a table": ("embedding.tables.user.advanced.hot_bit=16", ["did you mean 'hot_bits'?"]),
    "no passes": ("trainer.data_passes=0", ["trainer.data_passes=0"]),
    "a word for a number": ("trainer.batch_size=many", ["trainer.batch_size='many'", "integer"]),
    "batch below workers": ("trainer={batch_size: 2, workers: 3}", ["batch_size=2", "workers=3", "raise batch_size"]),
    "workers without servers": ("servers.store=inproc", ["store='inproc'", "trainer.workers=2"]),
    "external without addresses": ("servers.launch=external", ["launch='external'", "addresses"]),
    "addresses without external": ("servers.addresses=[a:1]", ["addresses", "launch='external'"]),
    "address without port": ("servers={launch: external, addresses: [shard0]}", ["addresses[0]='shard0'", "host:port"]),
    "address twice": ("servers={launch: external, addresses: ['a:1', 'a:1']}", ["addresses[1]='a:1'", "twice"]),
    "tokens of shards that are started": ("servers.token_file=token", ["token_file given with", "launch='external'"]),
    "a certificate without its key": (
        "servers={launch: external, addresses: ['a:1'], tls_cert: c.pem}",
        ["servers: tls_cert and tls_key go together"],
    ),
    "a token in the job": ("servers.token=abc", ["did you mean 'token_file'?"]),
    "logit": ("model.over_layers=[64, 2]", ["model.over_layers", "must be 1"]),
    "options of a built-in model": ("model.options={a: 1}", ["model.options", "module:factory"]),
    "name with a path": ("name=../x", ["name='../x'"]),
    "name missing": ("name=", ["name"]),
    "arm with unknown key": ("arms.full.embedding.polcy=off", ["arms.full", "did you mean 'policy'?"]),
    "arm changes the seed": ("arms.full.seed=3", ["arms.full.seed", "could not be compared"]),
    "arm name with a path": ("arms={../x: {}}", ["arms"]),
    "arm is no mapping": ("arms={full: 3}", ["arms.full=3", "must be a mapping"]),
    "section is no mapping": ("trainer=3", ["trainer=3", "must be a mapping"]),
    "key below a value": ("seed={x: 3}", ["seed"]),
    "table with unknown knob": ("embedding.tables.user.polcy=off", ["embedding.tables.user", "did you mean 'policy'?"]),
    "table with bad value": ("embedding.tables.user.min_count=0", ["embedding.tables.user.min_count=0"]),
    "table with its own dim": ("embedding.tables.user.dim=8", ["embedding.tables.user", "unknown key 'dim'"]),
    "setting without value": ("trainer.data_passes", ["--set", "path.to.key=value"]),
    "setting without key": ("=3", ["--set", "path.to.key=value"]),
    "setting that is not YAML": ("seed=[1", ["--set seed", "not YAML"]),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused(tmp_path: Path, case: str) -> None:
    setting, parts = BAD_SETTINGS[case]
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    load_job(path)
    settings = [setting, "trainer.workers=2"] if case == "workers without servers" else [setting]
    with pytest.raises(InvalidInput) as caught:
        load_job(path, settings)
    for part in parts:
        assert part in str(caught.value)


BAD_FILES = {
    "empty": (b"", ["is empty", "name and data"]),
    "a list": (b"- 1\n", ["a list", "mapping"]),
    "not YAML": (b"name: job\ndata: [1\n", ["line 3", "not YAML"]),
    "not UTF-8": (b"name: \xff\xfe\n", ["byte 6", "UTF-8"]),
    "a key twice": (b"name: a\nname: b\n", ["line 2", "'name' stands twice"]),
    "a Python object": (b"name: !!python/object/apply:os.system [ls]\n", ["not YAML", "python/object"]),
    "data missing": (b"name: a\n", ["data: is needed", "add 'data'"]),
    "reader missing": (b"name: a\ndata: {}\n", ["data", "'reader' is needed"]),
    "files missing": (b"name: a\ndata: {reader: criteo_tsv}\n", ["data.train: is needed"]),
    "no files": (b"name: a\ndata: {reader: criteo_tsv, train: []}\n", ["data.train", "at least 1"]),
    "feature twice": (b"name: a\ndata: {reader: parquet, train: [x], features: [a, a]}\n", ["'a' is named twice"]),
    "no features": (b"name: a\ndata: {reader: parquet, train: [x], features: {}}\n", ["data.features"]),
    "feature key": (b"name: a\ndata: {reader: parquet, train: [x], features: {a: {colum: b}}}\n", ["'column'"]),
    "hots": (b"name: a\ndata: {reader: synthetic, hots: [1, -1]}\n", ["hots[1]=-1", "0..1000"]),
    "many hots": (b"name: a\ndata: {reader: synthetic, num_features: 1, hots: [1, 1]}\n", ["hots has 2 entries"]),
    "a number for a key": (b"name: a\ndata: {reader: movielens}\n3: 4\n", ["3"]),
    "too deep": (b"name: " + b"[" * 5000 + b"\n", ["not YAML"]),
    "too long": (b"#" * (1 << 20) + b"\n", ["1048577 bytes", "at most"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path: Path, case: str) -> None:
    content, parts = BAD_FILES[case]
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load_job(path)
    assert str(caught.value).startswith(str(path))
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="absent.yaml: cannot be read .*give the path of a job file"):
        load_job(tmp_path / "absent.yaml")


def test_a_key_that_yaml_reads_as_no_text_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidInput, match="^arms: the key False must be text; put it in quotes$"):
        make_job({"name": "a", "data": {"reader": "movielens"}, "arms": {False: {"embedding": {"policy": "off"}}}})


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        make_job({"name": "a", "data": {"reader": "movielens"}, "trainer": {"workers": 0, "mod": "sync"}, "sed": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert {line.partition(":")[0].partition("=")[0] for line in lines} == {"trainer.workers", "trainer.mod", "sed"}


def test_overrides_of_a_table_that_the_data_lack_are_refused() -> None:
    job = make_job(
        {
            "name": "a",
            "data": {"reader": "movielens"},
            "model": {"dense_layers": [32]},
            "embedding": {"tables": {"usr": {"policy": "off"}}},
        }
    )
    with pytest.raises(InvalidInput, match=r"embedding\.tables\.usr: the data has no table .* did you mean 'user'\?"):
        table_specs(job, ["user", "item"])


def test_a_spec_that_the_servers_would_refuse_is_refused_here() -> None:
    job = make_job(
        {
            "name": "a",
            "data": {"reader": "movielens"},
            "model": {"dense_layers": [32]},
            "embedding": {"advanced": {"init_min": 1.0, "init_max": 0.0}},
        }
    )
    with pytest.raises(InvalidInput, match="table 'user': init_min=1.0 is above init_max=0.0"):
        table_specs(job, ["user"])
