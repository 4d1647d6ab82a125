"""Typed reading of JSON settings (config.json and its like), with errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxoverlap.checkpoint.errors import CheckpointError

T = TypeVar("T")


class _Required:
    pass


REQUIRED = _Required()


class Fields:
    """The settings of one JSON object. A field that is absent or null takes the default; without one it is an error."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, path: Path) -> Fields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (ValueError, OSError) as e:
            raise CheckpointError(f"{path}: not readable as JSON: {e}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: must hold an object, not a {type(values).__name__}")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name} {problem}")

    def _get(self, name: str, default: T | _Required, types: type | tuple[type, ...], kind: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if isinstance(default, _Required):
                raise self.error(name, "is missing")
            return default
        if not isinstance(value, types) or (types is not bool and isinstance(value, bool)):
            raise self.error(name, f"must be {kind}, not {value!r}")
        return value

    def integer(self, name: str, default: T | _Required = REQUIRED, low: int = 1) -> int | T:
        value = self._get(name, default, int, "an int")
        if isinstance(value, int) and name in self and value < low:
            raise self.error(name, f"must be at least {low}, not {value}")
        return value

    def number(self, name: str, default: T | _Required = REQUIRED) -> float | T:
        value = self._get(name, default, (int, float), "a number")
        return float(value) if isinstance(value, int) else value

    def boolean(self, name: str, default: T | _Required = REQUIRED) -> bool | T:
        return self._get(name, default, bool, "a bool")

    def text(self, name: str, default: T | _Required = REQUIRED) -> str | T:
        return self._get(name, default, str, "a string")

    def group(self, name: str) -> Fields | None:
        value = self._get(name, None, dict, "an object")
        return None if value is None else Fields(value, f"{self.source}: {name}")

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; absent: none."""
        value = self._get(name, (), (int, list), "a token id or a list of them")
        return self._naturals(name, (value,) if isinstance(value, int) else value, "token ids")

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of ints of at least 0; absent: none."""
        return self._naturals(name, self._get(name, (), list, "a list of ints"), "ints of at least 0")

    def _naturals(self, name: str, values: Sequence[Any], kind: str) -> tuple[int, ...]:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(name, f"must hold {kind}, not {value!r}")
        return tuple(values)

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Raises CheckpointError where the field is set to what this package does not compute."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, f"{value!r} is not supported (only {' or '.join(repr(a) for a in allowed)})")
