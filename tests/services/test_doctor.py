from __future__ import annotations

import pytest

from services import doctor
from services.doctor import Check, is_healthy, is_pair, torch_build


@pytest.mark.parametrize(
    ("torch", "other", "expected"),
    [
        ("2.13.0+cpu", "1.8.0", True),
        ("2.13.0", "1.8.1+cu130", True),
        ("2.12.1", "1.8.0", False),
        ("2.13.0", "1.7.0", False),
        ("2.9.0", "1.4.0", True),
        ("3.13.0", "1.8.0", False),
        ("2.13.0", "0.8.0", False),
    ],
)
def test_pairing_is_one_x_with_two_x_plus_five(torch, other, expected):
    assert is_pair(torch, other) is expected


@pytest.mark.parametrize(
    ("version", "build"),
    [("2.13.0+cpu", "CPU"), ("2.13.0+cu130", "CUDA"), ("2.13.0", "CUDA"), ("2.13.0+rocm7", "CUDA")],
)
def test_build_of_torch(version, build, monkeypatch):
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    assert torch_build(version) == build


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "_version", known.get)


def test_a_wrong_pair_fails_and_names_the_right_one(monkeypatch):
    with_versions(monkeypatch, torch="2.12.0+cpu", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0")
    check = doctor.check_pairing()
    assert check.verdict == "fail"
    assert "1.7.x" in check.remedy


def test_both_fbgemm_builds_at_once_fail(monkeypatch):
    with_versions(monkeypatch, torch="2.13.0+cpu", fbgemm_gpu_cpu="1.8.0", fbgemm_gpu="1.8.0")
    check = doctor.check_fbgemm()
    assert check.verdict == "fail"
    assert "--no-deps" in check.remedy


def test_a_cuda_fbgemm_with_a_cpu_torch_fails(monkeypatch):
    with_versions(monkeypatch, torch="2.13.0+cpu", fbgemm_gpu="1.8.0")
    assert doctor.check_fbgemm().verdict == "fail"


def test_a_cuda_build_of_torch_without_a_gpu_is_named(monkeypatch):
    with_versions(monkeypatch, torch="2.13.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    check = doctor.check_torch()
    assert (check.verdict, "CUDA build" in check.found) == ("warn", True)


def test_a_client_without_torch_is_healthy(monkeypatch):
    with_versions(monkeypatch)
    checks = [doctor.check_torch(), doctor.check_pairing(), doctor.check_fbgemm(), doctor.check_imports()]
    assert [check.verdict for check in checks] == ["warn"] * 4
    assert is_healthy(checks)


def test_an_old_protobuf_fails(monkeypatch):
    names = ("ray", "grpcio", "numba", "numpy", "safetensors", "pydantic")
    with_versions(monkeypatch, protobuf="6.33.0", **dict.fromkeys(names, "1.0"))
    check = doctor.check_packages()
    assert (check.verdict, "protobuf" in check.remedy) == ("fail", True)


def test_a_cluster_without_an_auth_mode_is_a_warning(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert doctor.check_ray().verdict == "warn"


def test_a_small_dev_shm_is_a_warning(monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)
    )
    check = doctor.check_shared_memory()
    assert (check.verdict, "64 MiB" in check.found) == ("warn", True)


def test_a_quota_below_the_cores_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(doctor, "_cpu_quota", lambda: 2.0)
    check = doctor.check_cores()
    assert (check.verdict, "trainer.threads=2" in check.remedy) == ("warn", True)


def test_every_remedy_comes_with_a_finding_and_every_fault_with_a_remedy():
    checks = [check() for check in doctor.CHECKS if check is not doctor.check_imports]
    for check in checks:
        assert check.found
        assert (check.verdict == "ok") == (not check.remedy)
    assert is_healthy(checks), checks


def test_one_failure_is_unhealthy():
    assert not is_healthy([Check("a", "ok", "x"), Check("b", "fail", "y", "z")])
