"""A job on shards of others, with TLS, client certificates and a token; and nothing that stays tells a secret."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from services import train_job
from services.train_job import JobFailed, run_inproc, run_job
from tests.services.authority import Files, lines_of_key
from tests.services.secure_shards import secure_shards
from tests.services.thread_group import ThreadGroup
from trainer.job import Job, make_job
from trainer.report import Progress
from trainer.snapshot_search import find_snapshot


def job_of(folder: Path, **sections: Any) -> Job:
    raw: dict[str, Any] = {
        "name": "tiny",
        "seed": 5,
        "data": {
            "reader": "synthetic",
            "num_samples": 2000,
            "num_test_samples": 500,
            "num_features": 2,
            "num_dense": 2,
            "cardinalities": [200],
        },
        "model": {"dense_layers": [8, 4], "over_layers": [8, 1]},
        "embedding": {"dim": 4, "idle_samples": 400, "advanced": {"reselect_every_samples": 400}},
        "trainer": {
            "threads": 1,
            "mode": "sync",
            "batch_size": 100,
            "precision": "float32",
            "output_dir": str(folder / "runs"),
        },
        **sections,
    }
    return make_job(raw)


def quiet(*_: object) -> None:
    return None


def test_a_job_trains_with_certificates_and_a_token(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = files.authority.issue("trainer").write(files.folder, "client")
    access = {"tls_ca": files.ca, "tls_cert": cert, "tls_key": key, "token_file": files.client_token("train")}
    monkeypatch.setattr(train_job, "ray_group", lambda workers, storage: nullcontext(ThreadGroup()))
    shown: list[Progress] = []
    said: list[str] = []
    with secure_shards(files, 2, tmp_path / "shards") as shards:
        servers = {"launch": "external", "addresses": shards.addresses, **{n: str(p) for n, p in access.items()}}
        job = job_of(tmp_path, servers=servers, snapshots={"uri": str(tmp_path / "snapshots")})
        summary = run_job(job, shown.append, said.append)["main"]
        reader = job_of(tmp_path, servers={**servers, "token_file": str(files.client_token("serve"))})
        with pytest.raises(JobFailed, match=r"PermissionDenied: .*role 'serve' may not call"):
            run_job(reader, quiet, said.append)
        stranger = job_of(tmp_path, servers={**servers, "token_file": None})
        with pytest.raises(JobFailed, match=r"Unauthenticated: no token"):
            run_job(stranger, quiet, said.append)
    alone = run_inproc(job_of(tmp_path, servers={"store": "inproc"}), "main", tmp_path / "alone", quiet)
    assert summary.rows_frozen > 0
    assert (summary.rows_hot, summary.rows_frozen) == (alone.rows_hot, alone.rows_frozen)
    assert summary.test_logloss == pytest.approx(alone.test_logloss, rel=1e-5)
    assert find_snapshot(job, "main").is_dir()
    assert str(access["token_file"]) in (tmp_path / "runs" / "tiny" / "_former" / "job.json").read_text()
    written = [path for name in ("runs", "snapshots", "shards") for path in (tmp_path / name).rglob("*")]
    texts = {path: path.read_bytes() for path in written if path.is_file()}
    assert {"job.json", "summary.json", "manifest.json", "shard-0.log"} <= {path.name for path in texts}
    for secret in (*files.secrets(), *lines_of_key(key.read_bytes())):
        assert not [path for path, data in texts.items() if secret.encode() in data]
        assert not any(secret in text for text in (*said, *map(repr, shown)))
