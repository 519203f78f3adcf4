"""Jobs that are right: overlays, arms, units, and what importing costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from trainer.job import json_schema, load_job, make_job, resolved_json, steps_of, table_specs, with_arms
from trainer.overlay import apply_settings

ROOT = Path(__file__).parents[2]


def minimal(**sections: object) -> dict[str, object]:
    return {"name": "job", "data": {"reader": "synthetic"}, "model": {"kind": "deepfm"}, **sections}


def test_importing_the_spec_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys, trainer.job; print([m for m in ('torch', 'numba', 'ray', 'grpc', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["movielens", "criteo_synthetic"])
def test_the_examples_are_valid(name: str) -> None:
    job = load_job(ROOT / "examples" / f"{name}.yaml")
    assert job.name == name
    assert all(not arm.arms for arm in job.arm_jobs().values())


def test_the_main_job_has_three_arms_that_differ_in_policy_alone() -> None:
    job = load_job(ROOT / "examples" / "movielens.yaml")
    arms = job.arm_jobs()
    assert list(arms) == ["full", "idle", "topk"]
    assert [arm.embedding.policy for arm in arms.values()] == ["off", "idle", "topk"]
    for arm in arms.values():
        assert (arm.seed, arm.data, arm.model, arm.trainer) == (job.seed, job.data, job.model, job.trainer)
        assert arm.embedding.learning_rate == job.embedding.learning_rate
    assert arms["topk"].embedding.hot_fraction == 0.4


def test_without_arms_the_job_is_its_only_arm() -> None:
    job = make_job(minimal())
    assert list(job.arm_jobs()) == ["main"]
    assert job.arm_jobs()["main"] == job


def test_a_bare_off_in_yaml_is_the_policy_off(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ndata: {reader: synthetic}\nmodel: {kind: deepfm}\nembedding: {policy: off}\n")
    assert load_job(path).embedding.policy == "off"
    assert load_job(path, ["embedding.policy=off"]).embedding.policy == "off"


def test_settings_reach_nested_keys_and_leave_the_rest_alone() -> None:
    raw = minimal(trainer={"batch_size": 64, "workers": 2})
    laid = apply_settings(
        raw, ["trainer.data_passes=3", "trainer.batch_size=128", "embedding.learning_rate.base=1e-2", "seed = 7"]
    )
    job = make_job(laid)
    assert (job.trainer.data_passes, job.trainer.batch_size, job.trainer.workers) == (3, 128, 2)
    assert job.embedding.learning_rate.base == 0.01
    assert job.seed == 7
    assert raw == minimal(trainer={"batch_size": 64, "workers": 2})


def test_settings_reach_arms() -> None:
    raw = minimal(arms={"a": {"embedding": {"policy": "topk"}}})
    job = make_job(apply_settings(raw, ["arms.a.embedding.hot_fraction=0.25"]))
    assert job.arm_jobs()["a"].embedding.hot_fraction == 0.25
    assert job.arm_jobs()["a"].embedding.policy == "topk"


def test_table_specs_turn_samples_into_steps() -> None:
    job = make_job(
        minimal(
            seed=5,
            trainer={"batch_size": 100},
            embedding={
                "dim": 16,
                "policy": "topk",
                "idle_samples": 1049,
                "advanced": {"half_life_samples": 250, "init_min": -0.5, "init_max": 0.5},
                "tables": {"b": {"policy": "idle", "idle_samples": 10, "optimizer": {"kind": "sgd"}}},
            },
        )
    )
    first, second = table_specs(job, ["a", "b", "a"])
    assert (first.name, first.dim, first.seed, first.policy.kind) == ("a", 16, 5, "topk")
    assert (first.policy.idle_steps, first.policy.half_life_steps) == (10, 2.5)
    assert (first.init_min, first.init_max) == (-0.5, 0.5)
    assert (second.policy.kind, second.policy.idle_steps, second.optimizer.kind) == ("idle", 1, "sgd")
    assert second.policy.half_life_steps == 2.5  # what is not overridden stays


def test_steps_of_rounds_to_the_nearest_and_never_to_zero() -> None:
    assert [steps_of(samples, 100) for samples in (1, 49, 50, 149, 150, 1000)] == [1, 1, 1, 1, 2, 10]


def test_memory_limits_may_be_text() -> None:
    assert make_job(minimal(servers={"memory_limit_bytes": "3GiB"})).servers.memory_limit_bytes == 3 << 30


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    job = make_job(minimal(data={"reader": "criteo_tsv", "train": ["day_0.gz"]}))
    assert job.data.model_dump()["train"] == [tmp_path / "day_0.gz"]
    assert job.trainer.output_dir == tmp_path / "runs"


def test_the_resolved_job_reads_back_as_the_same_job() -> None:
    job = load_job(ROOT / "examples" / "movielens.yaml")
    assert make_job(json.loads(resolved_json(job))) == job


def test_the_schema_describes_every_field_with_its_unit() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    advanced = schema["$defs"]["AllTablesAdvanced"]["properties"]
    assert "samples" in advanced["reselect_every_samples"]["description"]
    sections = ("TrainerSection", "ServersSection", "EmbeddingSection", "ModelSection", "LearningRate")
    for section in (*sections, "AllTablesAdvanced", "ShareSchedule"):
        for field, described in schema["$defs"][section]["properties"].items():
            assert "description" in described or "$ref" in described, f"{section}.{field}"


def test_some_arms_of_a_job() -> None:
    job = load_job(ROOT / "examples" / "movielens.yaml")
    assert list(with_arms(job, ["topk", "full"]).arm_jobs()) == ["full", "topk"]
    assert with_arms(job, []) is job
    with pytest.raises(InvalidInput, match="arm 'ful' is not one of the job.*did you mean 'full'"):
        with_arms(job, ["ful"])
    with pytest.raises(InvalidInput, match="arm 'full' .*none, it is trained as it stands"):
        with_arms(make_job(minimal()), ["full"])
