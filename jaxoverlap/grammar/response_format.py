"""OpenAI's `response_format` objects as SamplingParams.json_schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS = ("text", "json_object", "json_schema")
ANY_OBJECT = '{"type": "object"}'


def schema_of(response_format: Any) -> str | None:
    """The schema that `response_format` asks for, as text, or None. Raises ValueError naming what is wrong in it.

    {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}, whose
    "name", "description" and "strict" change nothing: a schema is always enforced.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ValueError(f"must be an object with a type, not {type(response_format).__name__}")
    kind = response_format.get("type")
    if kind not in KINDS:
        raise ValueError(f"type must be one of {', '.join(KINDS)}, not {kind!r}")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    for name in response_format:
        if name not in known:
            raise ValueError(f"unknown field {name!r} of type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    given = response_format.get("json_schema")
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), (Mapping, bool)):
        raise ValueError("json_schema must be an object with a schema")
    for name in given:
        if name not in ("schema", "name", "description", "strict"):
            raise ValueError(f"unknown field json_schema.{name}")
    try:
        return json.dumps(given["schema"], allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"json_schema.schema is not JSON: {e}") from None
