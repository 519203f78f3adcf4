"""Plain data of a job: read from YAML, and laid over one another (arms, tables, `--set`).

YAML is read with a safe loader, at most MAX_JOB_BYTES of it. Errors: InvalidInput, naming file and line, or the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from embedding_server.errors import InvalidInput

MAX_JOB_BYTES = 1 << 20


def read_yaml(path: Path) -> Any:
    """Plain data from a file."""
    try:
        if path.stat().st_size > MAX_JOB_BYTES:
            raise InvalidInput(f"{path}: {path.stat().st_size} bytes, and a job file has at most {MAX_JOB_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); give the path of a job file") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    return parse_yaml(text, str(path))


def apply_settings(raw: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Lays each `a.b.c=value` over the job; the value is YAML (`[64, 1]`, `true`). The input is not changed."""
    result = dict(raw)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InvalidInput(f"--set {setting!r}: must be path.to.key=value; e.g. --set trainer.data_passes=1")
        laid: Any = parse_yaml(text, f"--set {path}")
        for key in reversed(keys):
            laid = {key: laid}
        result = overlay(result, laid, f"--set {setting!r}")
    return result


def overlay(base: dict[str, Any], over: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`over` on `base`: mappings merge, anything else replaces. Neither argument is changed."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = overlay(dict(old), value, f"{where}.{key}")
        elif isinstance(value, Mapping) and old is not None and not isinstance(old, Mapping):
            raise InvalidInput(f"{where}: {key!r} is {old!r} in the job and has no keys of its own; set {key!r} itself")
        else:
            result[key] = value
    return result


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error and not the last one's victory."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} stands twice; remove one", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML. InvalidInput names `where` and the line."""
    try:
        return yaml.load(text, _StrictLoader)  # _StrictLoader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise InvalidInput(f"{where}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise InvalidInput(f"{where}: not YAML: {str(error) or 'nested too deep'}") from None
