"""What callers wait for: a Ticket for each request, a Call for each use of `Engine.generate`. Imports no jax."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.core import Request
from jaxoverlap.detokenizer import Detokenizer
from jaxoverlap.logprobs import LogprobReport


@dataclass(frozen=True, slots=True)
class Snapshot:
    output_ids: list[int]
    logprobs: list[float]
    finished: bool


@dataclass(eq=False, slots=True)
class Ticket:
    """One request as its caller sees it. Times are `time.perf_counter`."""

    request: Request
    detokenizer: Detokenizer | None  # None: the model has no tokenizer
    call: Call
    index: int | None = None  # place in a list of results
    group: str = ""  # the id that the caller knows: the request's own, or that of all n copies
    waits_for: str | None = None  # id of the request that caches its prompt; not submitted before that has ended
    abort_asked: bool = False
    rendered: int = 0  # output tokens that the detokenizer has had
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    is_news: bool = False
    created: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    report: LogprobReport | None = None

    def __post_init__(self) -> None:
        if self.request.details is not None:
            self.report = LogprobReport(self.request.details)

    def deliver(self, completion_tokens: int, finished: bool) -> None:
        """Takes over what the scheduler says the caller may see; later turns may overwrite the slot's columns."""
        request, begin = self.request, len(self.output_ids)
        self.output_ids += request.output_ids[begin:completion_tokens].tolist()
        if request.return_logprob:
            self.logprobs += request.output_logprobs[begin:completion_tokens].tolist()
        if finished:
            self.finished = True
            self.ended = time.perf_counter()

    def snapshot(self) -> Snapshot:
        """Under the engine's lock: what `render` needs, cut off from what later turns add."""
        return Snapshot(self.output_ids.copy(), self.logprobs.copy(), self.finished)

    def render(self, now: Snapshot) -> dict[str, Any]:
        """SGLang's result: everything up to `now`, not the difference to the result before."""
        request = self.request
        out: dict[str, Any] = {}
        if self.detokenizer is not None:
            new = now.output_ids[self.rendered :]
            if now.finished:
                self.detokenizer.finish(new, request.finish_reason)
            else:
                self.detokenizer.add(new)
            out["text"] = self.detokenizer.text
        self.rendered = len(now.output_ids)
        reason = request.finish_reason if now.finished else None
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None if reason is None else reason.to_dict(),
            "prompt_tokens": request.prompt_len,
            "completion_tokens": len(now.output_ids),
            "cached_tokens": request.cached_tokens,
        }
        if request.return_logprob:
            pairs = zip(now.logprobs, now.output_ids, strict=True)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        if self.report is not None:
            meta |= self.report.meta(len(now.output_ids))
        if now.finished:
            meta["e2e_latency"] = self.ended - self.created
            meta |= acceptance(request, len(now.output_ids))
        out |= {"output_ids": now.output_ids, "meta_info": meta}
        if self.index is not None:
            out["index"] = self.index
        return out


def acceptance(request: Request, completion_tokens: int) -> dict[str, Any]:
    """SGLang's figures of a request's verify steps; empty without any. `spec_accept_histogram[n]` steps had n drafts
    that counted; `spec_accept_rates[n]` of the steps had more than n: the acceptance at each place of a chain."""
    histogram = request.accepted_drafts
    if histogram is None:
        return {}
    steps, drafts = int(histogram.sum()), len(histogram) - 1
    reached = histogram[::-1].cumsum()[::-1][1:]
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": completion_tokens / steps,
        "spec_accept_rate": int(reached.sum()) / (steps * drafts),
        "spec_accept_histogram": histogram.tolist(),
        "spec_accept_rates": (reached / steps).tolist(),
    }


def refusal(rid: Any, message: str, index: int, with_text: bool) -> dict[str, Any]:
    """The result of a malformed request in a list call, in the shape of every other result."""
    reason = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
    meta = {"id": rid, "finish_reason": reason, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    text = {"text": ""} if with_text else {}
    return {**text, "output_ids": [], "meta_info": meta, "index": index}


@dataclass(eq=False, slots=True)
class Call:
    """The requests of one call. Changed under the engine's lock."""

    is_list: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    ahead: list[Ticket] = field(default_factory=list)  # of requests that copies wait for; they have no results
    refused: list[dict[str, Any]] = field(default_factory=list)
    pending: int = 0  # tickets that have not finished
    news: deque[Ticket] = field(default_factory=deque)  # those with tokens or an end that a stream has not given out

    def note(self, ticket: Ticket) -> None:
        if ticket.finished:
            self.pending -= 1
        if not ticket.is_news:
            ticket.is_news = True
            self.news.append(ticket)

    def take(self) -> Ticket:
        ticket = self.news.popleft()
        ticket.is_news = False
        return ticket
