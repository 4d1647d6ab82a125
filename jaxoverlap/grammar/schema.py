"""A JSON schema on its way to llguidance: read, checked, and made exact where llguidance alone would not be."""

from __future__ import annotations

import json
import math
from typing import Any

from jaxoverlap.grammar.formats import PATTERNS

ANY = "$$ANY$$"  # SGLang's name for any JSON value
VALUES = ("const", "enum", "default", "examples")  # keywords whose value is data, not a schema
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OPTIONS = "x-guidance"  # llguidance's own options; they could switch strictness off
SPACES = "\\s\\ufeff"  # ECMA 262 counts the byte order mark among the spaces, Unicode does not


def read_schema(text: str) -> dict[str, Any]:
    """The schema for llguidance. Raises ValueError for what is no JSON, no schema, or would not be enforced."""
    if text == ANY:
        return {}
    try:
        schema = _parse(text)
        if schema is False:
            raise ValueError("json_schema is false: it allows nothing")
        if schema is not True and not isinstance(schema, dict):
            raise ValueError(f"json_schema must be an object or a boolean, not {type(schema).__name__}")
        return {} if schema is True else _exact(schema)
    except RecursionError:
        raise ValueError("json_schema is nested too deeply") from None


def _parse(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        json.dumps(schema, ensure_ascii=False).encode()  # escapes may spell what is no Unicode
    except ValueError as e:
        raise ValueError(f"json_schema is not JSON: {e}") from None
    return schema


def _refuse(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is out of range")
    return number


def _exact(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return [_exact(s) for s in schema] if isinstance(schema, list) else schema
    if OPTIONS in schema:
        raise ValueError(f"json_schema holds {OPTIONS}, which is not supported")
    for name in BOUNDS:  # draft 4 has booleans here
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"json_schema: {name} must be a number, not {value!r}")
    out = {}
    for key, value in schema.items():
        if key in VALUES:
            out[key] = value
        elif key in OF_SCHEMAS and isinstance(value, dict):
            names = {n: ecma_spaces(n) if key == "patternProperties" else n for n in value}
            out[key] = {names[n]: _exact(s) for n, s in value.items()}
        elif key == "pattern" and isinstance(value, str):
            out[key] = ecma_spaces(value)
        else:
            out[key] = _exact(value)
    pattern = PATTERNS.get(out["format"]) if isinstance(out.get("format"), str) else None
    if pattern is not None:
        del out["format"]
        others = out.get("allOf", [])
        if not isinstance(others, list):
            raise ValueError(f"json_schema: allOf must be an array, not {type(others).__name__}")
        if "pattern" in out:
            out["allOf"] = [*others, {"pattern": pattern}]
        else:
            out["pattern"] = pattern
    return out


def ecma_spaces(pattern: str) -> str:
    r"""The pattern with `\s` and `\S` as ECMA 262 has them."""
    out, in_class, at = [], False, 0
    while at < len(pattern):
        c = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(c)
        if c == "\\s":
            c = SPACES if in_class else f"[{SPACES}]"
        elif c == "\\S":
            c = f"[^{SPACES}]"
        elif c in "[]":
            in_class = c == "["
        out.append(c)
    return "".join(out)
