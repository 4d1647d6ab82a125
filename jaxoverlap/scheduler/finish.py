"""When a request has ended (SGLang's update_finish_state): abort, length, grammar, bad token, stop string, stop id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import FinishReason, Request

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def finish_reason(s: Scheduler, r: Request, new_tokens: int) -> tuple[FinishReason | None, int]:
    """(reason or None, completion tokens to show), from the last `new_tokens` outputs.

    SGLang reports a step that reaches the cap as "length" even when a stop stands at or before the cap;
    `finish_order="stop-first"` reports the stop, whatever way the outputs were cut into steps.
    """
    outputs = r.output_ids
    n, cap = len(outputs), r.max_new_tokens
    if r.to_finish is not None:
        return r.to_finish, n
    if n >= cap:
        reason, length = FinishReason("length", length=cap), cap
        if s.config.finish_order == "stop-first":
            stop = find_stop(s, r, outputs[:cap], n - new_tokens)
            if stop is not None:
                return stop
        return reason, length
    if r.grammar is not None and r.grammar.is_terminated():
        return FinishReason("stop", matched=int(outputs[-1])), n
    stop = find_stop(s, r, outputs, n - new_tokens)
    return (None, n) if stop is None else stop


def find_stop(s: Scheduler, r: Request, outputs: np.ndarray, start: int) -> tuple[FinishReason, int] | None:
    """The first stop at or behind index `start`; stop strings come before stop ids, as in SGLang."""
    new = outputs[start:]
    bad = np.flatnonzero((new < 0) | (new >= s.vocab_size))
    if len(bad):
        message = f"token {int(new[bad[0]])} is outside the vocabulary of {s.vocab_size}: the logits were not finite"
        return FinishReason("abort", message=message, status_code=500), start + int(bad[0])
    string = find_stop_string(s, r, outputs, start) if r.params.stop else None
    ids = np.flatnonzero(np.isin(new, r.stop_ids)) if r.stop_ids else ()
    if string is not None and (not len(ids) or string[1] <= start + int(ids[0]) + 1):
        return string
    if len(ids):
        first = int(ids[0])
        return FinishReason("stop", matched=int(new[first])), start + first + 1
    return None


def find_stop_string(s: Scheduler, r: Request, outputs: np.ndarray, start: int) -> tuple[FinishReason, int] | None:
    assert s.decode is not None, "a request with stop strings, but no tokenizer"
    assert isinstance(r.params.stop, tuple)
    for end in range(start + 1, len(outputs) + 1):
        text = tail_text(s, r, outputs[:end])
        for stop in r.params.stop:
            if stop in text:
                return FinishReason("stop", matched=stop), end
    return None


def tail_text(s: Scheduler, r: Request, outputs: np.ndarray) -> str:
    """Text of enough last tokens to hold the longest stop string: a token that shows at all has at least a byte."""
    assert s.decode is not None
    assert isinstance(r.params.stop, tuple)
    longest = max(len(stop.encode()) for stop in r.params.stop)
    return s.decode(outputs[-(longest + 1) :])


def may_begin_stop(s: Scheduler, r: Request) -> bool:
    """Whether the text so far ends in the beginning of a stop string, so that it must not be shown yet."""
    text = tail_text(s, r, r.output_ids)
    assert isinstance(r.params.stop, tuple)
    return any(
        stop in text or any(text.endswith(stop[:k]) for k in range(1, min(len(text), len(stop)) + 1))
        for stop in r.params.stop
    )
