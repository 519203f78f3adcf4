"""Rules of the source tree: who imports whom, what stays out, and that generated code is what `make proto` gives."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embedding_server", "trainer", "services")

#: services -> trainer -> embedding_server; sockets and generated code belong to services alone
FORBIDDEN_IMPORTS = {
    "embedding_server": {
        "trainer",
        "services",
        "frostline",
        "benchmarks",
        "grpc",
        "google",
        "ray",
        "redis",
        "torchrec",
    },
    "trainer": {"services", "frostline", "benchmarks", "grpc", "google", "ray", "redis"},
    "services": {"benchmarks"},
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load"}
VAGUE_MODULES = {"utils", "util", "common", "helpers", "manager", "misc"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import in a file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "." * node.level, node.lineno


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line in imported_modules(parse(path))
        if name.partition(".")[0] in FORBIDDEN_IMPORTS[package] or name.startswith(".")
    ]
    assert sources(package), f"no source files under {package}/"
    assert not wrong, "services -> trainer -> embedding_server is the only direction:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    wrong = []
    for path in sources(package):
        tree = parse(path)
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for name, line in imported_modules(tree)
            if name.partition(".")[0] in FORBIDDEN_MODULES
        ]
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS
        ]
    assert not wrong, "bytes from a socket or a file must not become code:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_have_telling_names_and_docstrings(package: str) -> None:
    vague = [str(path.relative_to(ROOT)) for path in sources(package) if path.stem in VAGUE_MODULES]
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if path.stat().st_size and not ast.get_docstring(parse(path))
    ]
    assert not vague, f"a module is named after what it holds, not {', '.join(vague)}"
    assert not silent, f"a module says in its docstring what it is for: {', '.join(silent)}"


def test_generated_code_is_what_the_proto_files_give(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto/frostline/v1").glob("*.proto"))
    assert protos, "no .proto file under proto/frostline/v1/"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    names = [str(path.relative_to(ROOT / "proto")) for path in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *names]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    generated = {path.name: path.read_text() for path in (tmp_path / "frostline/v1").iterdir()}
    assert generated.keys() >= {f"{path.stem}_pb2{suffix}" for path in protos for suffix in (".py", ".pyi", "_grpc.py")}
    stale = [
        name
        for name, text in generated.items()
        if not (ROOT / "proto/frostline/v1" / name).exists() or (ROOT / "proto/frostline/v1" / name).read_text() != text
    ]
    assert not stale, f"{', '.join(stale)} differ from what the .proto files give; run `make proto` and commit"


def test_no_generated_code_without_its_proto_file() -> None:
    folder = ROOT / "proto/frostline/v1"
    orphans = [p.name for p in folder.glob("*_pb2*") if not (folder / f"{p.name.split('_pb2')[0]}.proto").exists()]
    assert not orphans, f"{', '.join(orphans)} have no .proto file; remove them"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("trainer.job", ("torch", "torchrec", "ray", "grpc")),
        ("embedding_server.spec", ("torch", "numba", "grpc")),
        ("embedding_server.shard", ("torch", "torchrec", "ray", "grpc")),
        ("embedding_server.inproc", ("torch", "torchrec", "ray", "grpc")),
        ("services.shard_client", ("torch", "torchrec", "ray")),
        ("services.lookup_client", ("torch", "torchrec", "ray")),
        ("services.shard_server", ("torch", "torchrec", "ray")),
        ("services.cli", ("torch", "torchrec", "ray")),
    ],
)
def test_importing_a_light_module_loads_no_heavy_library(module: str, unwanted: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not set(unwanted) & set(done.stdout.split()), f"importing {module} loads one of {', '.join(unwanted)}"
