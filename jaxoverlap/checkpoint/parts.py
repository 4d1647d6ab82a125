"""How a checkpoint's tensors make up a model's parameters. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The checkpoint tensor `name` is rows [start, stop) of a parameter, or of the part of it that lies at the leading
    indices `at`; stop None: all rows."""

    name: str
    start: int = 0
    stop: int | None = None
    at: tuple[int, ...] = ()


Parts = dict[str, tuple[Part, ...]]
"""Parameter (dotted path in the module) -> the tensors it is made of, which cover the rows at each `at` once."""


def fused(names: Sequence[str], rows: Sequence[int]) -> tuple[Part, ...]:
    """Tensors stacked along the rows of one parameter, in order."""
    parts: list[Part] = []
    start = 0
    for name, n in zip(names, rows, strict=True):
        parts.append(Part(name, start, start + n))
        start += n
    return tuple(parts)


def stacked(arrays: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
    """The tensors of equal arrays that lie along a new first axis of one parameter, in order."""
    return tuple(dataclasses.replace(part, at=(i, *part.at)) for i, of in enumerate(arrays) for part in of)


def nested(prefix: str, parts: Parts) -> Parts:
    """The parts of a submodule, seen from the module that holds it as `prefix`."""
    return {f"{prefix}.{path}": of for path, of in parts.items()}
