"""The documents name only what exists: commands, make targets, files, modules and links."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "FORMATS.md")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def code_of(document: str) -> str:
    """All code in a document: fenced blocks and `spans`."""
    text = text_of(document)
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.S)
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", text))


def fenced(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(document), flags=re.S)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, flags=re.M))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code_of(document)))
    assert named <= targets, f"{document} names make targets that do not exist: {named - targets}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_subcommands_exist(document: str) -> None:
    from services.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    named = set(re.findall(r"(?:^|[`\n])\s*frostline ([a-z]+)", code_of(document), flags=re.M))
    assert named <= known, f"{document} names subcommands that do not exist: {named - known}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(document))
    roots = "embedding_server|trainer|services|proto|benchmarks|examples|requirements|tests"
    paths = re.findall(rf"\b((?:{roots})/[A-Za-z0-9_./-]*[A-Za-z0-9_/])", text_of(document))
    missing = sorted({path for path in links + paths if not (ROOT / path).exists()})
    missing = [path for path in missing if not path.startswith("benchmarks/results/")]
    assert not missing, f"{document} names files that do not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_module_files_exist(document: str) -> None:
    """`heat.py` in a document is some module of ours."""
    named = set(re.findall(r"(?<![/\w])([a-z][a-z0-9_]*\.py)\b", text_of(document)))
    known = {path.name for folder in ("embedding_server", "trainer", "services", "benchmarks", "examples", "tests")
             for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    assert named <= known, f"{document} names modules that do not exist: {named - known}"


def test_imports_in_the_readme_work() -> None:
    blocks = fenced("README.md", "python")
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("from ")]
    assert len(lines) >= 3
    for line in lines:
        statement = ast.parse(line).body[0]
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module
        module = importlib.import_module(statement.module)
        for alias in statement.names:
            assert hasattr(module, alias.name), f"README.md: {line!r} does not work"


def test_python_in_the_readme_is_python() -> None:
    for block in fenced("README.md", "python"):
        ast.parse(block.replace(", ...)", ")"))


def test_jobs_in_the_readme_are_jobs() -> None:
    from trainer.job import make_job, table_specs

    blocks = fenced("README.md", "yaml")
    assert blocks
    for block in blocks:
        job = make_job(yaml.safe_load(block))
        for arm in job.arm_jobs().values():
            assert table_specs(arm, ["a table"])


def test_every_job_in_examples_is_a_job() -> None:
    from trainer.job import load_job

    jobs = sorted((ROOT / "examples").glob("*.yaml"))
    assert ROOT / "examples/movielens.yaml" in jobs
    for path in jobs:
        assert load_job(path).arm_jobs()


def test_settings_in_the_documents_are_settings() -> None:
    from trainer.job import load_job

    named = [s for document in DOCUMENTS for s in re.findall(r"--set (\S+=\S+?)[\"`]?(?:\s|$)", text_of(document))]
    assert named
    for setting in named:
        load_job(ROOT / "examples/movielens.yaml", [setting.rstrip('`".,;')])


def test_readme_knows_every_extra() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras:
        assert f"| `{extra}` |" in text_of("README.md"), f"README.md does not explain the extra {extra}"
