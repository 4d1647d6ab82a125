"""The start of a turn: what has come in since the last one (SGLang's process_input_requests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import FinishReason, Request, Turn
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.results import finish_without_result, pop_and_process
from jaxoverlap.scheduler.retract import requeue, take_back

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    rid: str
    abort_all: bool
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    mode: str
    flush: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Flush:
    pass


Operation = Submit | Abort | Pause | Resume | Flush
ABORTED = FinishReason("abort", message="Aborted by the caller")


def process_input_requests(s: Scheduler) -> Turn:
    flush: Flush | None = None
    for _ in range(len(s.inbox)):
        operation = s.inbox.popleft()
        match operation:
            case Submit(request):
                accept(s, request)
            case Abort(rid, abort_all, exact):
                abort(s, rid, abort_all, exact)
            case Pause(mode, flush_prefixes):
                yield from pause(s, mode)
                if flush_prefixes:
                    s.kv.flush()
            case Resume():
                resume(s)
            case Flush():
                flush = operation
    if flush is not None:
        if s.has_work:
            s.inbox.append(flush)
        else:
            s.kv.flush()


def accept(s: Scheduler, request: Request) -> None:
    """Clamps the output cap so that the request alone always fits, and queues it."""
    prompt, total, page = request.prompt_len, s.max_total_tokens - s.verify_room, s.config.page_size
    asked = request.params.max_new_tokens
    limits = [min(s.context_length - 1, total - 1) - prompt - 1, total - s.kv.ceil_page(prompt) - page - 1]
    request.max_new_tokens = max(0, min(limits if asked is None else [asked, *limits]))
    if request.params.grammar_key is None or s.grammars.take_compiled(request):
        s.enqueue(request)
    else:
        s.grammars.compile(request)


def abort(s: Scheduler, rid: str, abort_all: bool, exact: bool = False) -> None:
    """Waiting: ends at once. Compiling: ends with a one-token prefill. Chunked: ends when this turn composes.
    Running: ends at its next commit, with the token in flight."""

    def matches(r: Request) -> bool:
        return abort_all or r.rid == rid or (not exact and r.rid.startswith(rid))

    gone = s.waiting.remove(rid) if exact and not abort_all else s.waiting.remove_where(matches)
    for r in reversed(gone):
        finish_without_result(s, r, ABORTED)
    for r in s.grammars.pending:
        if matches(r):
            s.grammars.fail(r, ABORTED)
    if s.chunked is not None and matches(s.chunked):
        s.chunked_to_abort = True
    running = s.running_batch.requests
    if s.cur_batch is not None and s.cur_batch is not s.running_batch:
        running = running + s.cur_batch.requests
    for r in running:
        if not r.finished and matches(r):
            r.to_finish = ABORTED
            if r.table is not None:
                r.table.look_at(r)


def pause(s: Scheduler, mode: str) -> Turn:
    """in_place leaves the result in flight where it is; the others handle it and merge its batch."""
    s.is_paused = True
    if mode == "in_place":
        return
    if s.result_queue:
        yield from pop_and_process(s)
    if s.last_batch is not None and s.last_batch.mode.is_extend:
        batches.drop_finished(s.slots, s.last_batch)
        merge_last(s)
    if not len(s.running_batch):
        s.running_batch.is_full = False  # nobody is left whose end would clear it
    s.last_batch = s.cur_batch = None
    if mode == "retract":
        batches.drop_finished(s.slots, s.running_batch)
        rows = list(s.running_batch.requests)
        if s.chunked is not None and s.chunked not in rows:
            rows.append(s.chunked)
        for i, r in enumerate(rows):
            take_back(s, r, len(rows) - i)
            requeue(s, r)
        s.running_batch = batches.empty_batch()
        s.chunked = None


def resume(s: Scheduler) -> None:
    """A pause merges a request in the middle of its prompt with the running ones, as SGLang does; it may not decode."""
    s.is_paused = False
    if s.chunked is not None and s.chunked in s.running_batch.requests:
        at = s.running_batch.requests.index(s.chunked)
        batches.keep_rows(s.running_batch, np.delete(np.arange(len(s.running_batch)), at))


def merge_last(s: Scheduler) -> None:
    """The last prefill batch joins the running batch, or becomes it."""
    assert s.last_batch is not None
    if not len(s.last_batch):
        return
    if not len(s.running_batch):
        s.running_batch = s.last_batch
    else:
        batches.merge(s.running_batch, s.last_batch)
