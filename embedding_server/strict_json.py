"""JSON that comes from a file which somebody else may have made: read as RFC 8259 has it, and bounded."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any


def parse_strict(data: bytes, max_values: int, max_keys: int | None = None) -> Any:
    """The value of a whole JSON text in UTF-8.

    ValueError says what is wrong: no JSON, a key twice in an object, a number that is not finite (NaN, 1e999), deeper
    than Python goes, or more than `max_values` values, counted before any of them is made. An
    object of more than `max_keys` keys likewise; None: as many as there are values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > max_values:
        raise ValueError(f"it has more than {max_values} values")
    try:
        unique_keys = partial(_unique_keys, max_values if max_keys is None else max_keys)
        return json.loads(data.decode(), object_pairs_hook=unique_keys, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique_keys(max_keys: int, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > max_keys:
        raise ValueError(f"an object has {len(pairs)} keys, and {max_keys} at most are allowed")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value
