"""What a step's result does to the books (SGLang's process_batch_result): one turn late with overlap on, so a row may
have finished or been retracted meanwhile; such a row's token is dropped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import FinishReason, ForwardMode, Launch, Output, Request, StepResult, Turn, Wait
from jaxoverlap.scheduler.finish import Finish, find_finish
from jaxoverlap.scheduler.logprobs import add_input_details, add_output_details
from jaxoverlap.scheduler.stream import stream_output

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def pop_and_process(s: Scheduler) -> Turn:
    """Handles the oldest result in flight; the one place of the overlap loop where the host waits for the device."""
    launch, handle = s.result_queue.popleft()
    s.note("pop", launch.number)
    result = yield Wait(launch, handle)
    process_batch_result(s, launch, result)


def process_batch_result(s: Scheduler, launch: Launch, result: StepResult) -> None:
    s.note("process", launch.number)
    told: np.ndarray | None = None
    if launch.mode.is_extend:
        told = process_extend(s, launch, result)
    elif launch.mode is ForwardMode.IDLE:
        told = np.empty(0, np.intp)
    elif s.is_speculative:
        process_verify(s, launch, result)
    else:
        process_decode(s, launch, result)
    s.counters.last_result = time.monotonic()
    if s.watch is not None:
        s.watch.mark("process")
    stream_output(s, launch, told)
    if s.watch is not None:
        s.watch.mark("stream")


def is_live(s: Scheduler, launch: Launch) -> np.ndarray:
    """bool [B]: the row's request still holds the slot that it was launched with."""
    return s.slots.epoch[launch.slots] == launch.epochs


def process_decode(s: Scheduler, launch: Launch, result: StepResult) -> None:
    """One token for each row that is still there; Python looks only at those that may end with it."""
    table, requests = s.slots, launch.requests
    rows, tokens, logprobs = table.rows(launch.slots, launch.epochs), result.tokens, result.logprobs
    if launch.output_details:
        add_output_details(launch, result, np.flatnonzero(rows.live).tolist())
    if not rows.all_live:
        live = np.flatnonzero(rows.live)
        drop_rows(s, launch, live)
        requests = [requests[i] for i in live]
        rows = table.rows(launch.slots[live], launch.epochs[live])
        tokens, logprobs = tokens[live], None if logprobs is None else logprobs[live]
    lens = table.append_rows(rows, tokens, logprobs if launch.return_logprob else None)
    s.counters.output_tokens += len(requests)
    if s.observer is not None:
        for r, token in zip(requests, tokens):
            s.observer.row("committed", r, [int(token)])
    look = lens >= rows.caps  # nothing in place: see memory/slots.py
    for ids in rows.stops:
        look = look | (ids == tokens)
    if rows.by_hand is not None:
        look = look | rows.by_hand
    look = look | (tokens.view(np.uint32) >= s.vocab_size)  # negative ones too
    if np.count_nonzero(look):  # `any` is Python inside
        for i in np.flatnonzero(look):
            check_finish(s, requests[i])


def process_extend(s: Scheduler, launch: Launch, result: StepResult) -> np.ndarray:
    """Returns the rows that may be told: all but those in the middle of their prompt."""
    live, told = is_live(s, launch), []
    add_input_details(launch, result)
    for i, r in enumerate(launch.requests):
        if not live[i]:
            r.middle_chunks = max(r.middle_chunks - 1, 0)
            drop_row(s, r)
            told.append(i)
        elif r.middle_chunks > 0:
            r.middle_chunks -= 1
            s.row("middle_chunk", r)
        else:
            commit_extend_row(s, launch, i, 0 if launch.is_prefill_only else int(result.tokens[i]), result)
            told.append(i)
    return np.array(told, np.intp)


def commit_extend_row(s: Scheduler, launch: Launch, i: int, token: int, result: StepResult) -> None:
    r, slot = launch.requests[i], launch.slots[i : i + 1]
    logprobs = None if result.logprobs is None else result.logprobs[i : i + 1]
    s.slots.append(slot, np.array([token], np.int32), logprobs)
    add_output_details(launch, result, [i])
    if r.details is not None:
        r.details.prompt_done = True
    s.counters.output_tokens += 1
    s.row("committed", r, [token])
    check_finish(s, r)
    if not r.finished and i < launch.num_prefill:
        s.kv.cache_unfinished(r)


def process_verify(s: Scheduler, launch: Launch, result: StepResult) -> None:
    """Each row's accepted run. The grammar moves before the finish check, so that its end can finish the request."""
    assert result.accept_lens is not None
    live = is_live(s, launch)
    drop_rows(s, launch, np.flatnonzero(live))
    table = s.slots
    for i in np.flatnonzero(live):
        r, slot = launch.requests[i], launch.slots[i : i + 1]
        table.verify_len[slot] = table.prompt_len[slot] + table.output_len[slot] - 1
        run = [int(t) for t in result.tokens[i, : result.accept_lens[i]]]
        count_drafts(s, r, len(run) - 1)
        refused: FinishReason | None = None
        if r.grammar is not None:
            run, refused = accept_run(r, run)
        for j, token in enumerate(run):
            logprobs = None if result.logprobs is None else result.logprobs[i, j : j + 1]
            table.append(slot, np.array([token], np.int32), logprobs)
        table.committed_len[slot] = table.committed_len[slot] + (len(run) - 1)
        s.counters.output_tokens += len(run)
        s.row("committed", r, run)
        finish = find_finish(s, r, len(run))
        if finish is None and refused is not None:
            finish = Finish(refused, r.output_len)
        if finish is not None:
            end_request(s, r, finish)


def count_drafts(s: Scheduler, r: Request, accepted: int) -> None:
    """Of one verify step, whether or not the request goes on to the end of its run."""
    if r.accepted_drafts is None:
        r.accepted_drafts = np.zeros(s.config.speculative_num_draft_tokens, np.int64)
    r.accepted_drafts[accepted] += 1
    s.counters.verified_rows += 1
    s.counters.accepted_drafts += accepted


def accept_run(r: Request, run: list[int]) -> tuple[list[int], FinishReason | None]:
    """Feeds the run to the grammar; cuts it where the grammar ends, and before a token that it refuses."""
    assert r.grammar is not None
    for j, token in enumerate(run):
        if r.grammar.is_terminated():
            return run[:j], None
        try:
            r.grammar.accept_token(token)
        except ValueError as e:
            return run[:j], refusal(r, r.output_len + j, token, e)
    return run, None


def refusal(r: Request, outputs: int, token: int, error: ValueError) -> FinishReason:
    """Of the token behind the first `outputs` ones."""
    message = f"the grammar refused a token, {token}: {error}"
    if outputs < r.params.min_new_tokens:
        message += (
            f" (token {outputs + 1} may be no stop token, for min_new_tokens is {r.params.min_new_tokens}: "
            "where the grammar allows nothing else, no token is left)"
        )
    return FinishReason("abort", message=message, status_code=500)


def check_finish(s: Scheduler, r: Request) -> None:
    """Ends the request where its last token says so. Its grammar takes the token first, so that nothing is sampled
    behind the grammar's end (SGLang asks it one token later)."""
    refused: FinishReason | None = None
    if r.grammar is not None and r.max_new_tokens > 0 and not r.grammar.is_terminated():
        token = int(r.output_ids[-1])
        try:
            r.grammar.accept_token(token)
        except ValueError as e:
            refused = refusal(r, r.output_len - 1, token, e)
    finish = find_finish(s, r, 1)
    if refused is not None and r.to_finish is None:
        finish = Finish(refused, r.output_len, r.output_len - 1)
    if finish is not None:
        end_request(s, r, finish)


def end_request(s: Scheduler, r: Request, finish: Finish) -> None:
    r.finish_reason, r.finished_len, r.stop_len = finish
    s.row("finished", r)
    s.kv.release(r, insert=True)
    s.counters.finished += 1
    s.counters.aborted += r.finish_reason.type == "abort"


def finish_without_result(s: Scheduler, r: Request, reason: FinishReason) -> None:
    """Ends a request that is in no result to come, and tells its caller at once."""
    r.finish_reason, r.finished_output = reason, True
    r.finished_len = r.output_len
    s.counters.finished += 1
    s.counters.aborted += 1
    s.row("ended", r)
    s.outputs.append(Output(r, r.shown_len, True))


def drop_rows(s: Scheduler, launch: Launch, live: np.ndarray) -> None:
    for i in np.setdiff1d(np.arange(len(launch.requests)), live):
        drop_row(s, launch.requests[i])


def drop_row(s: Scheduler, r: Request) -> None:
    s.counters.dropped_rows += 1
    s.row("dropped", r)
