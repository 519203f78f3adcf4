"""JSON as RFC 8259 has it, and what Python would take beyond it."""

from __future__ import annotations

import pytest

from embedding_server.strict_json import parse_strict


def test_what_is_json_is_read() -> None:
    assert parse_strict('{"a":[1,-2.5,1e3,null,true,"ü"]}'.encode(), 10) == {"a": [1, -2.5, 1000.0, None, True, "ü"]}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a":1,"a":1}', "a key appears twice"),
        ('{"b":{"a":1,"a":2}}', "a key appears twice"),
        ("[NaN]", "NaN is no finite number"),
        ("[Infinity]", "Infinity is no finite number"),
        ("[-Infinity]", "-Infinity is no finite number"),
        ("[1e999]", "1e999 is no finite number"),
        ("[" * 100_000 + "]" * 100_000, "more than 1000 values"),
        ("[" * 900 + "]" * 900 + "x", "Extra data"),
        ("[" + "0," * 1000 + "0]", "more than 1000 values"),
        ("[" + "9" * 10_000 + "]", "integer string conversion"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_strict(text.encode(), 1000)


def test_what_is_nested_too_deep_or_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_strict(b"[" * 100_000 + b"]" * 100_000, 1 << 20)
    with pytest.raises(ValueError, match="can't decode"):
        parse_strict(b'"\xff"', 10)
