"""From what a caller gives to a core.Request, or a RequestError that names the field and its limit. Imports no jax."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxoverlap.core import Request, RequestError
from jaxoverlap.grammar.response_format import schema_of
from jaxoverlap.logprobs import LogprobDetails
from jaxoverlap.request_input import RequestInput
from jaxoverlap.sampling_params import SamplingParams

SEED_STEP = 0x9E3779B9  # 2**32 over the golden ratio, odd: no two copies of a request have the same seed


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


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
    no_grammars: str | None = None  # why a request may not have a grammar
    check_params: Callable[[SamplingParams], None] | None = None  # raises ValueError for what the runner does not do
    ranks: range = range(1)  # those that this process serves


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
        params = self._params(given)
        rid = _rid(given.rid, live, params.n)
        for name in ("stream", "return_logprob"):
            if not isinstance(getattr(given, name), (bool, np.bool_)):
                raise RequestError(f"{name} must be a bool, not {type(getattr(given, name)).__name__}")
        self._check_priority(given.priority)
        self._check_rank(given.data_parallel_rank)
        ids = self._prompt(given)
        details = self._details(given, ids)
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
            details=details,
            priority=given.priority,
            data_parallel_rank=given.data_parallel_rank,
            seed=seed,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
        )

    def copies(self, request: Request) -> list[Request]:
        """A new request `params.n` times, with the ids `rid_0`, `rid_1`, ... if n is above 1.

        Copy 0 has the seed that the request would have alone. Copy i has sampling_seed + i * SEED_STEP mod 2**32, or,
        unseeded, the next draw: SGLang gives all of them one seed, which makes them equal.
        """
        n, given = request.params.n, request.params.sampling_seed
        if n == 1:
            return [request]
        if given is None:
            seeds = [request.seed, *self._seeds.integers(1 << 32, size=n - 1, dtype=np.uint32).tolist()]
        else:
            seeds = [(given + i * SEED_STEP) % (1 << 32) for i in range(n)]
        shared = {id(same): same for same in (request.params, request.prompt_ids)}
        copies = [deepcopy(request, shared.copy()) for _ in seeds]
        for i, copy in enumerate(copies):
            copy.rid, copy.seed = f"{request.rid}_{i}", seeds[i]
        return copies

    def _params(self, request: RequestInput) -> SamplingParams:
        given = {} if request.sampling_params is None else request.sampling_params
        if not isinstance(given, (dict, SamplingParams)):
            raise RequestError(f"sampling_params must be a dict or SamplingParams, not {type(given).__name__}")
        try:
            params = SamplingParams.from_dict(given) if isinstance(given, dict) else given
            if self._limits.check_params is not None:
                self._limits.check_params(params)
        except (TypeError, ValueError, OverflowError) as e:
            raise RequestError(f"sampling_params: {e}") from None
        try:
            schema = schema_of(request.response_format)
            if schema is not None and params.json_schema is not None:
                raise ValueError("json_schema is given too: only one grammar at a time")
            params = params if schema is None else replace(params, json_schema=schema)
        except ValueError as e:
            raise RequestError(f"response_format: {e}") from None
        if params.grammar_key is not None and self._limits.no_grammars is not None:
            where = "response_format" if schema is not None else f"sampling_params: {params.grammar_key[0]}"
            raise RequestError(f"{where} {self._limits.no_grammars}")
        for name in ("stop_token_ids", "logit_bias"):
            for t in getattr(params, name) or ():
                if t >= self._limits.vocab_size:
                    raise RequestError(
                        f"sampling_params: {name} holds {t}, but the vocabulary has {self._limits.vocab_size} ids"
                    )
        for name in ("stop", "stop_regex"):
            if getattr(params, name) and self._tokenizer is None:
                raise RequestError(
                    f"sampling_params: {name} needs a tokenizer and this model has none; use stop_token_ids"
                )
        return params

    def _check_priority(self, priority: Any) -> None:
        if priority is None:
            return
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)):
            raise RequestError(f"priority must be an int, not {type(priority).__name__}")
        if not self._limits.priorities:
            raise RequestError("priority needs an engine with enable_priority_scheduling")

    def _check_rank(self, rank: Any) -> None:
        ranks = self._limits.ranks
        if rank is None:
            return
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise RequestError(f"data_parallel_rank must be an int, not {type(rank).__name__}")
        if rank not in ranks:
            raise RequestError(f"data_parallel_rank must be {ranks[0]} to {ranks[-1]}, the ranks here, not {rank}")

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


def prompt_alone(request: Request) -> Request:
    """A request that only brings the prompt into the prefix cache, as SGLang's before n copies."""
    params = SamplingParams(max_new_tokens=0, temperature=0.0)
    rank = request.data_parallel_rank
    return Request(uuid.uuid4().hex, request.prompt_ids, params, priority=request.priority, data_parallel_rank=rank)


def _rid(rid: Any, live: Container[str], n: int) -> str:
    if rid is None:
        return uuid.uuid4().hex
    if not isinstance(rid, str) or not rid:
        raise RequestError(f"rid must be a non-empty string, not {rid!r}")
    for one in (rid, *(f"{rid}_{i}" for i in range(n if n > 1 else 0))):
        if one in live:
            raise RequestError(f"rid {one!r} is in use by a request that has not ended")
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
