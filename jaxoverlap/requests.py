"""From what a caller gives to a core.Request, or a RequestError that names the field and its limit. Imports no jax."""

from __future__ import annotations

import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxoverlap.core import Request, RequestError
from jaxoverlap.logprobs import LogprobDetails
from jaxoverlap.sampling_params import SamplingParams


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RequestInput:
    """One request as the caller gave it: nothing in it is checked yet."""

    prompt: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: Any = False
    return_logprob: Any = False
    priority: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into; lengths in tokens."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_prompt_len: int
    eos_token_ids: tuple[int, ...] = ()
    priorities: bool = False  # enable_priority_scheduling
    max_logprobs: int = 0


class RequestFactory:
    """Makes requests in arrival order; that order decides the seeds of unseeded ones (one uint32 drawn for each).

    As SGLang's Engine, it takes SamplingParams' own defaults: the model's generation_config.json is not consulted.
    """

    def __init__(self, limits: Limits, tokenizer: Encoder | None, random_seed: int | None) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._seeds = np.random.default_rng(random_seed)

    def make(self, given: RequestInput, live: Container[str] = ()) -> Request:
        """`live` are the ids in use. Raises RequestError; a refused request draws no seed."""
        params = self._params(given.sampling_params)
        rid = _rid(given.rid, live)
        for name in ("stream", "return_logprob"):
            if not isinstance(getattr(given, name), (bool, np.bool_)):
                raise RequestError(f"{name} must be a bool, not {type(getattr(given, name)).__name__}")
        self._check_priority(given.priority)
        ids = self._prompt(given)
        seed = params.sampling_seed
        if seed is None:
            seed = int(self._seeds.integers(1 << 32, dtype=np.uint32))
        stop_ids = () if params.ignore_eos else (*self._limits.eos_token_ids, *(params.stop_token_ids or ()))
        return Request(
            rid=rid,
            prompt_ids=ids,
            params=params,
            text=given.prompt,
            stream=given.stream,
            return_logprob=given.return_logprob,
            details=self._details(given, ids),
            priority=given.priority,
            seed=seed,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
        )

    def _params(self, given: Any) -> SamplingParams:
        if given is None:
            given = {}
        if not isinstance(given, (dict, SamplingParams)):
            raise RequestError(f"sampling_params must be a dict or SamplingParams, not {type(given).__name__}")
        try:
            params = SamplingParams.from_dict(given) if isinstance(given, dict) else given
        except (TypeError, ValueError, OverflowError) as e:
            raise RequestError(f"sampling_params: {e}") from None
        if params.grammar_key is not None:
            raise RequestError(
                f"sampling_params: {params.grammar_key[0]} is not supported: there is no grammar backend"
            )
        for t in params.stop_token_ids or ():
            if t >= self._limits.vocab_size:
                raise RequestError(
                    f"sampling_params: stop_token_ids holds {t}, but the vocabulary has {self._limits.vocab_size} ids"
                )
        if params.stop and self._tokenizer is None:
            raise RequestError("sampling_params: stop needs a tokenizer and this model has none; use stop_token_ids")
        return params

    def _check_priority(self, priority: Any) -> None:
        if priority is None:
            return
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)):
            raise RequestError(f"priority must be an int, not {type(priority).__name__}")
        if not self._limits.priorities:
            raise RequestError("priority needs an engine with enable_priority_scheduling")

    def _details(self, given: RequestInput, prompt_ids: np.ndarray) -> LogprobDetails | None:
        """None where nothing beyond the sampled tokens' log-probabilities is asked for. logprob_start_len -1 is the
        prompt's length, as in SGLang; with token_ids_logprob it stays -1."""
        limit, count = self._limits.max_logprobs, len(prompt_ids)
        start = _integer("logprob_start_len", given.logprob_start_len, -1)
        if not -1 <= start <= count:
            raise RequestError(f"logprob_start_len must be at least -1 and at most {count}, the prompt's, not {start}")
        top_num = _integer("top_logprobs_num", given.top_logprobs_num, 0)
        if top_num < 0:
            raise RequestError(f"top_logprobs_num must be at least 0, not {top_num}")
        token_ids = _token_ids(given.token_ids_logprob, self._limits.vocab_size)
        for name, asked, ids in (
            ("logprob_start_len", start != -1, int(0 <= start < count)),
            ("top_logprobs_num", top_num > 0, top_num),
            ("token_ids_logprob", len(token_ids) > 0, len(token_ids)),
        ):
            if asked and not given.return_logprob:
                raise RequestError(f"{name} needs return_logprob")
            if ids > limit == 0:
                raise RequestError(f"{name} needs the setting max_logprobs, which is 0 to keep the warm-up short")
            if ids > limit:
                raise RequestError(f"{name} asks for {ids} ids, above the setting max_logprobs {limit}")
        if start == -1 and not token_ids:
            start = count
        details = LogprobDetails(prompt_ids, start, top_num, token_ids)
        return details if details.of_inputs or details.of_outputs else None

    def _prompt(self, given: RequestInput) -> np.ndarray:
        """int32 [prompt_len]"""
        if (given.prompt is None) == (given.input_ids is None):
            raise RequestError("give one of prompt and input_ids")
        name = "input_ids" if given.prompt is None else "prompt"
        ids = given.input_ids if given.prompt is None else self._encode(given.prompt)
        _check_ids(ids, self._limits.vocab_size)
        if len(ids) == 0:
            raise RequestError(f"{name} is empty")
        if len(ids) > self._limits.max_prompt_len:
            raise RequestError(
                f"{name} has {len(ids)} tokens, more than the longest prompt of {self._limits.max_prompt_len} "
                f"(context_length {self._limits.context_length}, max_total_tokens {self._limits.max_total_tokens})"
            )
        return np.array(ids, np.int32)

    def _encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt must be a string, not {type(prompt).__name__}")
        if self._tokenizer is None:
            raise RequestError("prompt needs a tokenizer and this model has none; give input_ids")
        try:
            return self._tokenizer.encode(prompt)
        except (TypeError, UnicodeError):
            raise RequestError("prompt must be valid Unicode") from None


def _rid(rid: Any, live: Container[str]) -> str:
    if rid is None:
        return uuid.uuid4().hex
    if not isinstance(rid, str) or not rid:
        raise RequestError(f"rid must be a non-empty string, not {rid!r}")
    if rid in live:
        raise RequestError(f"rid {rid!r} is in use by a request that has not ended")
    return rid


def _integer(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise RequestError(f"{name} must be an int, not {type(value).__name__}")
    return int(value)


def _token_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    _check_ids(ids, vocab_size, "token_ids_logprob")
    return tuple(int(t) for t in ids)


def _check_ids(ids: Any, vocab_size: int, name: str = "input_ids") -> None:
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"{name} must be one row of ints, not {ids.dtype} of shape {ids.shape}")
    elif not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise RequestError(f"{name} must be a list of ints, not {type(ids).__name__}")
    else:
        for t in ids:
            if isinstance(t, (bool, np.bool_)) or not isinstance(t, (int, np.integer)):
                raise RequestError(f"{name} must hold ints, not {type(t).__name__}")
    for t in (min(ids), max(ids)) if len(ids) else ():
        if not 0 <= t < vocab_size:
            raise RequestError(f"{name} holds {t}, but the vocabulary has ids 0 to {vocab_size - 1}")


def split(
    prompt: Any,
    input_ids: Any,
    sampling_params: Any,
    rid: Any,
    stream: Any,
    return_logprob: Any,
    priority: Any,
    logprob_start_len: Any = None,
    top_logprobs_num: Any = None,
    token_ids_logprob: Any = None,
) -> tuple[list[RequestInput], bool]:
    """The requests of one call, and whether it was a list call.

    A list of prompts, or of lists of ids, makes a list call; the other arguments are then one value for all or a list
    as long; one list of ids in `token_ids_logprob` is one value. A string `rid` becomes `rid_0`, `rid_1`, ... Raises
    RequestError on a list of another length.
    """
    many = isinstance(prompt, (list, tuple)) or _is_rows(input_ids)
    if not many:
        details = (logprob_start_len, top_logprobs_num, token_ids_logprob)
        one = RequestInput(prompt, input_ids, sampling_params, rid, stream, return_logprob, priority, *details)
        return [one], False
    count = len(prompt) if isinstance(prompt, (list, tuple)) else len(input_ids)
    if isinstance(rid, str):
        rid = [f"{rid}_{i}" for i in range(count)]
    ids = token_ids_logprob
    if isinstance(ids, (list, tuple)) and not _is_rows(ids) and not any(x is None for x in ids):
        token_ids_logprob = [token_ids_logprob] * count
    columns = [
        _column(name, value, count)
        for name, value in (
            ("prompt", prompt),
            ("input_ids", input_ids),
            ("sampling_params", sampling_params),
            ("rid", rid),
            ("return_logprob", return_logprob),
            ("priority", priority),
            ("logprob_start_len", logprob_start_len),
            ("top_logprobs_num", top_logprobs_num),
            ("token_ids_logprob", token_ids_logprob),
        )
    ]
    rows = zip(*columns, strict=True)
    return [RequestInput(p, i, s, r, stream, *more) for p, i, s, r, *more in rows], True


def _is_rows(ids: Any) -> bool:
    if isinstance(ids, np.ndarray):
        return ids.ndim == 2
    return isinstance(ids, (list, tuple)) and any(isinstance(row, (list, tuple, np.ndarray)) for row in ids)


def _column(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 2:
        value = list(value)
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} requests")
    return list(value)
