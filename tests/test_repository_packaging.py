"""Packaging: the packages that are installed, the pins, and what the set-up script says when something is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CPU_ONLY, CUDA_ONLY = {"torch", "fbgemm-gpu-cpu"}, {"torch", "fbgemm-gpu"}
ABI_LOCKED = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
#: torchrec asks for the CUDA fbgemm-gpu; the CPU list has fbgemm-gpu-cpu in its place
REPLACED = {("torchrec", "fbgemm-gpu")}
#: recbole is in the list for the data in its wheel; nothing of it is imported, so what it needs is left out
DATA_ONLY = {"recbole"}


def pins(name: str) -> dict[str, str]:
    """{canonical package name: version} of requirements/NAME.txt; every line must pin one version."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        matched = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)", line)
        assert matched, f"requirements/{name}.txt: {line!r} is not package==version"
        package = canonicalize_name(matched[1])
        assert package not in found, f"requirements/{name}.txt pins {package} twice"
        found[package] = matched[2]
    return found


def project_requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = PROJECT["project"]["dependencies"] + [line for extra in extras for line in extra]
    return [r for r in map(Requirement, lines) if r.name != "frostline"]


def test_packages_are_the_folders_that_hold_source() -> None:
    roots = {"embedding_server": ROOT, "trainer": ROOT, "services": ROOT, "frostline": ROOT / "proto"}
    folders = {
        ".".join(path.parent.relative_to(base).parts)
        for package, base in roots.items()
        for path in (base / package).rglob("*.py")
    }
    # `frostline` is a namespace package (PEP 420): a folder without source of its own
    assert folders | {"frostline"} == set(PROJECT["tool"]["setuptools"]["packages"])
    assert not (ROOT / "proto/__init__.py").exists(), "a package called proto would shadow proto-plus"


def test_console_script_is_the_typer_app() -> None:
    assert PROJECT["project"]["scripts"] == {"frostline": "services.cli:app"}


def test_pins_satisfy_the_ranges_of_pyproject() -> None:
    pinned = pins("cpu") | pins("dev")
    for requirement in project_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is in pyproject.toml but neither in cpu.txt nor in dev.txt"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is pinned to {version}"


def test_every_import_is_of_a_package_that_pyproject_names() -> None:
    distributions = importlib.metadata.packages_distributions()
    named = {canonicalize_name(requirement.name) for requirement in project_requirements()} | ABI_LOCKED
    ours = {"embedding_server", "trainer", "services", "frostline"}
    unnamed = set()
    packages = ("embedding_server", "trainer", "services")
    for path in [path for package in packages for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - ours:
                owners = {canonicalize_name(owner) for owner in distributions.get(top, [])}
                if not owners & named:
                    origin = ", ".join(sorted(owners)) or "not installed"
                    unnamed.add(f"{path.relative_to(ROOT)} imports {top} ({origin})")
    assert not unnamed, "\n".join(sorted(unnamed))


def test_pyproject_leaves_the_abi_locked_packages_to_the_environment() -> None:
    named = {canonicalize_name(requirement.name) for requirement in project_requirements()}
    assert not named & ABI_LOCKED


def test_torch_torchrec_and_fbgemm_go_together() -> None:
    for name, fbgemm in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        pinned = pins(name)
        torch = Version(pinned["torch"])
        for package in ("torchrec", fbgemm):
            version = Version(pinned[package])
            assert (version.major, version.minor + 5) == (1, torch.minor), (
                f"{name}.txt: {package}=={version}, torch=={torch}"
            )
    assert Version(pins("cpu")["torch"]).local == "cpu"
    assert Version(pins("cuda")["torch"]).local is None


def test_cuda_list_is_the_cpu_list_but_for_torch_and_fbgemm() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    assert {name: cpu[name] for name in cpu.keys() - CPU_ONLY} == {name: cuda[name] for name in cuda.keys() - CUDA_ONLY}
    assert cpu.keys() - cuda.keys() == {"fbgemm-gpu-cpu"}


def test_lists_do_not_overlap() -> None:
    assert not pins("cpu").keys() & pins("dev").keys()


def test_lists_are_fully_resolved() -> None:
    """What each pinned package asks for is pinned too, in a version that it accepts: --no-deps leaves nothing out."""
    pinned = pins("cpu") | pins("dev")
    wrong = []
    for package in sorted(pinned.keys() - DATA_ONLY):
        distribution = importlib.metadata.distribution(package)
        for requirement in map(Requirement, distribution.requires or ()):
            needed = canonicalize_name(requirement.name)
            if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or (package, needed) in REPLACED:
                continue
            if needed not in pinned or not requirement.specifier.contains(pinned[needed], prereleases=True):
                wrong.append(f"{package} needs {requirement}, pinned is {pinned.get(needed)}")
    assert not wrong, "\n".join(wrong)


def test_installed_versions_are_the_pinned_ones() -> None:
    pinned = pins("cpu") | pins("dev")
    other = {p: v for p, v in pinned.items() if Version(importlib.metadata.version(p)) != Version(v)}
    assert not other, f"installed in other versions than pinned: {other}; run `make setup`"


def run_setup(venv: Path, python: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "requirements/setup.sh"), str(venv)],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def stand_in(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_setup_names_the_debian_package_of_a_missing_module(tmp_path: Path, module: str) -> None:
    body = f'case "$2" in *"import {module}"*) exit 1;; *print*) echo 3.11;; esac'
    done = run_setup(tmp_path / "venv", stand_in(tmp_path / "python3", body))
    assert done.returncode == 1
    assert f"has no module {module}" in done.stderr
    assert "apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    body = 'case "$2" in *print*) echo 3.9;; *"(3, 11)"*) exit 1;; esac'
    done = run_setup(tmp_path / "venv", stand_in(tmp_path / "python3", body))
    assert done.returncode == 1
    assert "is Python 3.9; Frostline needs 3.11 or later" in done.stderr


def test_setup_refuses_a_missing_python(tmp_path: Path) -> None:
    done = run_setup(tmp_path / "venv", tmp_path / "no-such-python")
    assert done.returncode == 1
    assert "there is no" in done.stderr


@pytest.mark.parametrize("found", [True, False])
def test_setup_adds_the_torch_index_only_where_pip_lacks_the_wheel(tmp_path: Path, found: bool) -> None:
    calls = tmp_path / "calls"
    on_dry_run = "true" if found else "exit 1"
    body = f'echo "$*" >> {calls}\ncase "$*" in *--dry-run*) {on_dry_run};; esac'
    stand_in(tmp_path / "venv/bin/python", body)
    python = stand_in(tmp_path / "python3", "echo 3.11")
    done = run_setup(tmp_path / "venv", python, TORCH_INDEX_URL="https://wheels.example/cpu")
    assert done.returncode == 0, done.stderr
    installs = [line for line in calls.read_text().splitlines() if "-r " in line]
    assert len(installs) == 1
    assert "--no-deps" in installs[0]
    assert ("--extra-index-url https://wheels.example/cpu" in installs[0]) is (not found)
    assert ("https://wheels.example/cpu" in done.stdout) is (not found)
