"""SamplingParams: SGLang's fields and defaults, checked by name. Imports no jax."""

from __future__ import annotations

import json
import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxoverlap.stop_regex import compile_stop_regex

INT32_MAX = (1 << 31) - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)
INTEGERS = (  # name, lowest, highest
    ("max_new_tokens", 0, INT32_MAX),
    ("top_k", -1, INT32_MAX),
    ("stream_interval", 1, INT32_MAX),
    ("sampling_seed", 0, (1 << 32) - 1),
    ("min_new_tokens", 0, INT32_MAX),
    ("n", 1, 1 << 14),
)
GREEDY_TEMPERATURE = 1e-6  # SGLang: below this, greedy
NOT_ENFORCED: dict[str, Any] = {
    "structural_tag": None,
    "custom_params": None,
}
ADJUSTMENTS: dict[str, Any] = {  # fields that change logits, by what leaves them alone
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
}
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop; field names and defaults are SGLang 0.5.14's.

    `max_new_tokens` None means up to the context length. `temperature` below 1e-6 is greedy (argmax, lowest id on
    ties). `top_k` -1 is off. `sampling_seed` fixes the request's noise: token i depends on (seed, position) alone; of
    `n` copies the first has the noise of a request alone, copy i that of RequestFactory.copies. `stop_regex` is
    searched in the whole output text after every token, and refused where it is not regular (stop_regex.py). At most
    one of `json_schema` ("$$ANY$$": any JSON), `regex` and `ebnf` (GBNF or llguidance's Lark) constrains the text.
    `spaces_between_special_tokens` changes nothing: the tokenizers of transformers 5, and ours, put no spaces there.
    `logit_bias` maps token ids, or their digits, to what is added to the logits; kept as {int: float}. None is the
    default of every other field. Raises ValueError naming the field, on construction for types and ranges.
    """

    max_new_tokens: int | None = 128
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | set[int] | None = None
    stop_regex: str | tuple[str, ...] | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[int, float] | dict[str, float] | None = None
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name != "max_new_tokens" and getattr(self, f.name) is None:
                self._keep(f.name, f.default)
        self._keep_stops()
        self._keep_numbers()
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} must be a bool, not {type(getattr(self, name)).__name__}")
            self._keep(name, bool(getattr(self, name)))
        for name, off in NOT_ENFORCED.items():
            value = getattr(self, name)
            if value is not off:
                raise ValueError(f"{name} is not supported yet: leave it at {off!r}")
        if isinstance(self.json_schema, dict):
            self._keep("json_schema", _json("json_schema", self.json_schema))
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
            _check_unicode(name, getattr(self, name))
        if len(given) > 1:
            raise ValueError(f"only one grammar at a time: {' and '.join(given)} were given")

    def _keep_stops(self) -> None:
        for name in ("stop", "stop_regex"):
            texts = getattr(self, name)
            self._keep(name, _strings(name, (texts,) if isinstance(texts, str) else texts))
        for pattern in self.stop_regex or ():
            compile_stop_regex(pattern)
        ids = self.stop_token_ids
        if ids is not None and not isinstance(ids, (list, tuple, set, frozenset)):
            raise ValueError(f"stop_token_ids must be a list of ints, not {type(ids).__name__}")
        self._keep("stop_token_ids", tuple(_integer("stop_token_ids", t, 0) for t in ids or ()))

    def _keep_numbers(self) -> None:
        for name, low, high in INTEGERS:
            if getattr(self, name) is not None:
                self._keep(name, _integer(name, getattr(self, name), low, high))
        self._keep("temperature", _number("temperature", self.temperature, 0.0, FLOAT32_MAX))
        self._keep("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        self._keep("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        for name in ("frequency_penalty", "presence_penalty"):
            self._keep(name, _number(name, getattr(self, name), -2.0, 2.0))
        penalty = self.repetition_penalty
        self._keep("repetition_penalty", _number("repetition_penalty", penalty, FLOAT32_TINY, 2.0))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        self._keep("logit_bias", _biases(self.logit_bias))
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1, not 0")

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> SamplingParams:
        """Raises ValueError naming a field that SGLang's SamplingParams does not have."""
        known = {f.name for f in fields(cls)}
        for name in params:
            if name not in known:
                raise ValueError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
        return cls(**params)

    @property
    def adjustments(self) -> list[str]:
        """Names of the ADJUSTMENTS that are asked for."""
        return [name for name, off in ADJUSTMENTS.items() if getattr(self, name) != off]

    @property
    def grammar_key(self) -> tuple[str, str] | None:
        """(kind, text) of the grammar asked for."""
        return next(((n, getattr(self, n)) for n in GRAMMAR_FIELDS if getattr(self, n) is not None), None)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} is not JSON: {e}") from None


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if values is not None and not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a string or a list of strings, not {type(values).__name__}")
    for s in values or ():
        if not isinstance(s, str):
            raise ValueError(f"{name} must hold strings, not {type(s).__name__}")
        if not s:
            raise ValueError(f"{name} must not hold an empty string")
        _check_unicode(name, s)
    return tuple(values or ())


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must hold valid Unicode, not {text[:80]!r}") from None


def _biases(given: Any) -> dict[int, float] | None:
    """{id: bias}, both finite; JSON's keys are strings."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"logit_bias must be a dict of token ids to numbers, not {type(given).__name__}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = _integer("logit_bias's token id", int(key) if digits else key, 0)
        if token in biases:
            raise ValueError(f"logit_bias holds token id {token} twice")
        biases[token] = _number(f"logit_bias of token id {token}", value, -FLOAT32_MAX, FLOAT32_MAX)
    return biases


def _integer(name: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an int, not {type(value).__name__}")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be at least {low} and at most {high}, not {number}")
    return number


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (low < number or (number == low and not open_low)) or not number <= high:
        bounds = f"{'above' if open_low else 'at least'} {low} and at most {high:g}"
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number
