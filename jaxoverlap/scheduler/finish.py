"""When a request has ended (SGLang's update_finish_state): abort, length, grammar, bad token, stop string,
stop regex, stop id."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxoverlap.core import FinishReason, Request
from jaxoverlap.scheduler.stop_text import StopText

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


CUT_CHARACTER = 6  # bytes by which a character cut at either end of the tail may look longer than it is


class Finish(NamedTuple):
    """`length`: completion tokens as SGLang counts them; `stop_len`: those up to the first stop, if there is one."""

    reason: FinishReason
    length: int
    stop_len: int | None = None


def find_finish(s: Scheduler, r: Request, new_tokens: int) -> Finish | None:
    """Whether the request ends with its last `new_tokens` outputs.

    Where one step reaches both a stop and the cap, SGLang says "length" and counts to the cap; what is shown ends at
    the stop all the same. `finish_order="stop-first"` says "stop", whatever way the outputs were cut into steps.
    """
    outputs = r.output_ids
    n, cap = len(outputs), r.max_new_tokens
    before_cap = n < cap or (n == cap and s.config.finish_order == "stop-first")
    if r.to_finish is None and before_cap and r.grammar is not None and r.grammar.is_terminated():
        last = int(outputs[-1])  # as matched id it would not be shown
        return Finish(FinishReason("stop", matched=last if last in r.stop_ids else None), n)
    stop = find_stop(s, r, outputs[:cap], n - new_tokens)
    if r.to_finish is not None:
        return Finish(r.to_finish, min(n, cap), r.stop_len if stop is None else stop.length)
    if n >= cap and (stop is None or s.config.finish_order == "sglang"):
        return Finish(FinishReason("length", length=cap), cap, None if stop is None else stop.length)
    return stop


def find_stop(s: Scheduler, r: Request, outputs: np.ndarray, start: int) -> Finish | None:
    """The first stop, or bad token, at or behind index `start`; at the same token a stop string comes before a regular
    expression, and that before a stop id, as in SGLang."""
    new = outputs[start:]
    found: list[Finish] = []
    bad = np.flatnonzero((new < 0) | (new >= s.vocab_size))
    if len(bad):
        message = f"token {int(new[bad[0]])} is outside the vocabulary of {s.vocab_size}: the logits were not finite"
        new = new[: bad[0]]
        found.append(Finish(FinishReason("abort", message=message, status_code=500), start + len(new)))
    ids = np.flatnonzero(np.isin(new, r.stop_ids)) if r.stop_ids else np.empty(0, np.intp)
    if len(ids):
        found.append(Finish(FinishReason("stop", matched=int(new[ids[0]])), start + int(ids[0]) + 1))
    if r.params.stop_regex:
        found += find_stop_regex(s, r, outputs[: start + len(new)])
    if r.params.stop:
        found += find_stop_string(s, r, outputs[: start + len(new)], start)
    return min(reversed(found), key=lambda f: f.length, default=None)


def find_stop_string(s: Scheduler, r: Request, outputs: np.ndarray, start: int) -> list[Finish]:
    """One or none."""
    assert isinstance(r.params.stop, tuple)
    for end in range(start + 1, len(outputs) + 1):
        text = tail_text(s, r, outputs[:end])
        for stop in r.params.stop:
            if stop in text:
                return [Finish(FinishReason("stop", matched=stop), end)]
    return []


def find_stop_regex(s: Scheduler, r: Request, outputs: np.ndarray) -> list[Finish]:
    """One or none."""
    if r.stop_text is None:
        assert s.decode is not None, "a request with stop_regex, but no tokenizer"
        r.stop_text = StopText(r.params.stop_regex or (), s.decode, s.byte_ids)
    found = r.stop_text.find(outputs)
    return [] if found is None else [Finish(FinishReason("stop", matched=found[1]), found[0])]


def tail_text(s: Scheduler, r: Request, outputs: np.ndarray) -> str:
    """Text of the last token, behind enough others to hold all of a stop string that ends in it."""
    assert s.decode is not None, "a request with stop strings, but no tokenizer"
    assert isinstance(r.params.stop, tuple)
    enough = max(len(stop.encode()) for stop in r.params.stop) + CUT_CHARACTER
    last = len(s.decode(outputs[-1:]).encode())
    count = enough + 1
    while True:
        text = s.decode(outputs[-count:])
        if count >= len(outputs) or len(text.encode()) - last >= enough:
            return text
        count *= 2  # some of them show nothing


def may_begin_stop(s: Scheduler, r: Request) -> bool:
    """Whether the text so far ends in the beginning of a stop string, so that it must not be shown yet."""
    text = tail_text(s, r, r.output_ids)
    assert isinstance(r.params.stop, tuple)
    return any(
        stop in text or any(text.endswith(stop[:k]) for k in range(1, min(len(text), len(stop)) + 1))
        for stop in r.params.stop
    )
