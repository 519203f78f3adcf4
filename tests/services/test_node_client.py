"""examples/lookup-node, a client in another language made from the .proto alone: the bytes of the Python client."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.lookup_client import LookupClient
from tests.services.lookup_rows import DIMS, IDS, random_ids, train

Serve = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/lookup-node"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with what its lock file names, beside the proto folder. Skips without node, npm or packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm (Debian: apt-get install nodejs npm)")
    folder = tmp_path_factory.mktemp("node")
    example = folder / "examples/lookup-node"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "proto", folder / "proto", ignore=shutil.ignore_patterns("*.py", "*.pyi", "__pycache__"))
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install what the example needs: {done.stderr.strip()[-300:]}")
    return example


def look_up(node: Path, addresses: list[str], ids: dict[str, np.ndarray]) -> subprocess.CompletedProcess[str]:
    command = ["node", "lookup.js"]
    for address in addresses:
        command += ["--address", address]
    command += [f"{name}={','.join(map(str, row_ids.tolist()))}" for name, row_ids in ids.items()]
    return subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_node_client_gives_the_same_bytes(node: Path, serve: Serve, num_shards: int) -> None:
    addresses = serve(num_shards)
    train(addresses)
    ids = {**random_ids(1, 120), "item": IDS, "rare": IDS[:0]}
    done = look_up(node, addresses, ids)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    with LookupClient(addresses) as client:
        ours = client.lookup(ids)
    assert theirs.keys() == ours.keys()
    for name, rows in ours.items():
        assert theirs[name]["dim"] == DIMS[name]
        assert base64.b64decode(theirs[name]["values"]) == rows.values.tobytes()
        assert base64.b64decode(theirs[name]["flags"]) == rows.flags.tobytes()


def test_its_errors_say_what_is_wrong(node: Path, serve: Serve) -> None:
    addresses = serve(2)
    train(addresses)
    done = look_up(node, addresses, {"nope": IDS[:1]})
    assert done.returncode == 1
    assert "table 'nope' does not exist (tables: " in done.stderr
    done = look_up(node, addresses[:1], {"user": IDS[:1]})
    assert done.returncode == 1
    assert "no address has bucket 512; name all shards" in done.stderr


def test_the_lock_file_names_no_host_of_packages() -> None:
    lock = json.loads((EXAMPLE / "package-lock.json").read_text())
    assert len(lock["packages"]) > 10
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
    assert all("integrity" in package for name, package in lock["packages"].items() if name)
