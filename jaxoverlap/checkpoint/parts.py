"""How a checkpoint's tensors make up a model's parameters. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The checkpoint tensor `name` is rows [start, stop) of a parameter; stop None: all of them."""

    name: str
    start: int = 0
    stop: int | None = None


Parts = dict[str, tuple[Part, ...]]
"""Parameter (dotted path in the module) -> the tensors it is made of, which cover its rows once each."""


def fused(names: Sequence[str], rows: Sequence[int]) -> tuple[Part, ...]:
    """Tensors stacked along the rows of one parameter, in order."""
    parts: list[Part] = []
    start = 0
    for name, n in zip(names, rows, strict=True):
        parts.append(Part(name, start, start + n))
        start += n
    return tuple(parts)


def nested(prefix: str, parts: Parts) -> Parts:
    """The parts of a submodule, seen from the module that holds it as `prefix`."""
    return {f"{prefix}.{path}": of for path, of in parts.items()}
