"""Section: the base of every part of a job spec, and the text of its errors.

Keys that a section does not have are errors, and the message offers the nearest key that it has. Importing this module
imports neither torch nor numba.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

MAX_ERRORS_SHOWN = 20


class Section(BaseModel):
    """A part of a job: immutable, without unknown keys, without nan or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, raw: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(raw, Mapping) else ():
            if isinstance(raw.get(name), bool) and _is_number(field.annotation):
                raise ValueError(
                    f"{name}={raw[name]} is a truth value, as YAML reads yes, no, on and off; write a number"
                )
        return raw


def _is_number(annotation: Any) -> bool:
    """int, float, a size, or one of them or None; not bool."""
    types = [part for part in get_args(annotation) or (annotation,) if isinstance(part, type)]
    return bool not in types and any(issubclass(part, int | float) for part in types)


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Every fault of a job on a line of its own: path, what is wrong, the value, the next step."""
    faults = error.errors()
    lines = [_explain_one(fault, root) for fault in faults[:MAX_ERRORS_SHOWN]]
    if len(faults) > MAX_ERRORS_SHOWN:
        lines.append(f"... and {len(faults) - MAX_ERRORS_SHOWN} more")
    return "\n".join(lines)


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'dim'?` or, without a near word, `; known: 'a', 'b'`."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; known: " + ", ".join(repr(k) for k in sorted(known)[:40]) if known else ""


def _explain_one(fault: Any, root: type[BaseModel]) -> str:
    path, model = _walk(tuple(fault["loc"]), root)
    where = ".".join(path) or "job"
    kind, value = fault["type"], fault.get("input")
    if kind == "extra_forbidden":
        known = [f.alias or n for n, f in model.model_fields.items()] if model else []
        return f"{where}: unknown key {path[-1]!r}{did_you_mean(path[-1], known)}"
    if kind == "missing":
        return f"{where}: is needed and is not given; add {path[-1]!r}"
    if kind == "union_tag_not_found":
        field = fault["ctx"]["discriminator"].strip("'")
        return f"{where}: {field!r} is needed to know which section this is; add {field!r}"
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {message}" if path else message
    if path and path[-1] == "[key]":  # YAML reads off, no and 1 as a truth value or a number
        return f"{'.'.join(path[:-2])}: the key {_short(value)} must be text; put it in quotes"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"{where}={_short(value)}: must be a mapping; write its keys below it"
    message = message[:1].lower() + message[1:]
    context = fault.get("ctx", {})
    expected, tag = context.get("expected") or context.get("expected_tags"), context.get("tag", value)
    hint = ""
    if isinstance(tag, str) and isinstance(expected, str) and kind in ("literal_error", "union_tag_invalid"):
        hint = did_you_mean(tag, [w.strip(" '") for w in expected.replace(" or ", ",").split(",")])
        hint = hint if hint.startswith("; did") else ""
    if kind == "union_tag_invalid":
        field = context["discriminator"].strip("'")
        return f"{where}.{field}={_short(tag)}: must be one of {expected}{hint}"
    return f"{where}={_short(value)}: {message}{hint}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _walk(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[list[str], type[BaseModel] | None]:
    """The path as the user wrote it (without pydantic's tags for unions), and the model that holds its end."""
    path: list[str] = []
    model: type[BaseModel] | None = root
    candidates: list[type[BaseModel]] = [root]
    for depth, step in enumerate(loc):
        is_last = depth == len(loc) - 1
        tagged = [c for c in candidates if _tag_of(c) == step]
        if len(candidates) > 1 and tagged:
            candidates, model = tagged, tagged[0]
            continue
        model = candidates[0] if candidates else None
        path.append(str(step))
        if is_last:
            break
        field = model.model_fields.get(str(step)) if model else None
        if field is not None:
            candidates = _models_in(field.annotation)
        # a step that is no field is a key of a mapping or an index of a list: its models stay the candidates
    return path, model


def _tag_of(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("reader")
    return field.default if field is not None else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
