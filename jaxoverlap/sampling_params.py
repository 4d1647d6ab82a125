"""SamplingParams: SGLang's fields and defaults, checked by name. Imports no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

TOP_K_ALL = 1 << 30  # SGLang's "whole vocabulary"
GREEDY_TEMPERATURE = 1e-6  # SGLang: below this, greedy
NOT_ENFORCED: dict[str, Any] = {
    "stop_regex": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "structural_tag": None,
    "custom_params": None,
    "logit_bias": None,
    "spaces_between_special_tokens": True,
}
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop; field names and defaults are SGLang 0.5.14's.

    `max_new_tokens` None means up to the context length. `temperature` below 1e-6 is greedy (argmax, lowest id on
    ties). `top_k` -1 is off. `sampling_seed` fixes the request's noise: token i depends on (seed, position) alone.
    Raises ValueError naming the field, on construction for types and ranges.
    """

    max_new_tokens: int | None = 128
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _strings("stop", self.stop)
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, (list, tuple)):
                raise ValueError(f"stop_token_ids must be a list of ints, not {type(self.stop_token_ids).__name__}")
            for t in self.stop_token_ids:
                _integer("stop_token_ids", t, 0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 0)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1)
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1, not 0")
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1)
        if self.sampling_seed is not None:
            _integer("sampling_seed", self.sampling_seed, 0)
            if self.sampling_seed >= 1 << 32:
                raise ValueError(f"sampling_seed must be below 2**32, not {self.sampling_seed}")
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, not {type(getattr(self, name)).__name__}")
        for name, off in NOT_ENFORCED.items():
            if getattr(self, name) != off:
                raise ValueError(f"{name} is not supported yet: leave it at {off!r}")
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
        if len(given) > 1:
            raise ValueError(f"only one grammar at a time: {' and '.join(given)} were given")

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> SamplingParams:
        """Raises ValueError naming a field that SGLang's SamplingParams does not have."""
        known = {f.name for f in fields(cls)}
        for name in params:
            if name not in known:
                raise ValueError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
        return cls(**params)

    @property
    def grammar_key(self) -> tuple[str, str] | None:
        """(kind, text) of the grammar asked for."""
        return next(((n, getattr(self, n)) for n in GRAMMAR_FIELDS if getattr(self, n) is not None), None)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def _strings(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a string or a list of strings, not {type(value).__name__}")
    for s in value:
        if not isinstance(s, str):
            raise ValueError(f"{name} must hold strings, not {type(s).__name__}")
        if not s:
            raise ValueError(f"{name} must not hold an empty string")


def _integer(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int, not {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")


def _number(name: str, value: Any, low: float, high: float | None, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or (open_low and value == low) or (high is not None and value > high):
        bounds = f"{'above' if open_low else 'at least'} {low}" + (f" and at most {high}" if high is not None else "")
        raise ValueError(f"{name} must be {bounds}, not {value}")
