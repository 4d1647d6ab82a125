"""What a caller gave, one by one and unchecked: a call's arguments split into requests. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxoverlap.core import RequestError


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
    response_format: Any = None
    data_parallel_rank: Any = None


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
    response_format: Any = None,
    data_parallel_rank: Any = None,
) -> tuple[list[RequestInput], bool]:
    """The requests of one call, and whether it was a list call.

    A list of prompts, or of lists of ids, makes a list call; the other arguments are then one value for all or a list
    as long; one list of ids in `token_ids_logprob` is one value. A string `rid` becomes `rid_0`, `rid_1`, ... Raises
    RequestError on a list of another length.
    """
    many = isinstance(prompt, (list, tuple)) or _is_rows(input_ids)
    if not many:
        details = (logprob_start_len, top_logprobs_num, token_ids_logprob)
        more = (priority, *details, response_format, data_parallel_rank)
        return [RequestInput(prompt, input_ids, sampling_params, rid, stream, return_logprob, *more)], False
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
            ("response_format", response_format),
            ("data_parallel_rank", data_parallel_rank),
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
