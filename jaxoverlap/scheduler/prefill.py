"""Admission: which waiting requests prefill this turn (SGLang's get_new_batch_prefill), and their batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Batch, ForwardMode, Request
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.adder import AddResult, PrefillAdder
from jaxoverlap.scheduler.decode import fits, prepare_for_decode, skip_known
from jaxoverlap.scheduler.retract import requeue

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def get_new_batch_prefill(s: Scheduler) -> Batch | None:
    for r in s.grammars.take_ready() if s.grammars.pending else ():
        s.enqueue(r)
    running = s.running_batch
    preempts = s.config.enable_priority_scheduling and not s.config.disable_priority_preemption
    if preempts:
        running.is_full = False
    if s.grammars.pending:
        s.reason("%d requests wait for their grammar", len(s.grammars.pending))
    if (running.is_full or not s.waiting) and s.chunked is None:
        if s.waiting:
            s.reason("nobody is admitted: batch_is_full since an earlier turn, %d wait", len(s.waiting))
        return None
    if allocatable(s) <= 0 and s.chunked is None and not preempts:
        s.reason("nobody is admitted: %d rows run, %d slots are free: batch_is_full", len(running), s.slots.num_free)
        running.is_full = True
        return None
    s.waiting = s.policy.order(s.waiting)

    adder = PrefillAdder(s)
    if s.chunked is not None:
        chunked, s.chunked = s.chunked, adder.add_chunked(s.chunked)
        if chunked not in adder.chosen:
            return None
    taken = 0
    for request in s.waiting:
        if len(adder.chosen) >= allocatable(s):
            running.is_full = True
            s.reason(
                "no place for %s beside %d running, %d chosen: batch_is_full",
                request.rid,
                len(running),
                len(adder.chosen),
            )
        if running.is_full and not (preempts and adder.preempt_for(request)):
            break
        ids = request.context_ids()
        s.kv.match(request, ids[: request.max_prefix_len(len(ids))])
        request.extend_len = len(ids) - request.prefix_len
        before = len(adder.chosen)
        state = adder.add(request)
        taken += len(adder.chosen) - before
        if state is not AddResult.CONTINUE:
            running.is_full = running.is_full or state is AddResult.NO_TOKEN
            break
    for _ in range(taken):
        s.waiting.popleft()
    for r in adder.preempted:
        requeue(s, r)
    if not adder.chosen:
        return None
    if adder.chunked is not None:
        s.chunked = adder.chunked
    if s.chunked is not None:
        s.chunked.middle_chunks += 1
    batch = prefill_batch(s, adder.chosen)
    mix_with_running(s, batch)
    return batch


def allocatable(s: Scheduler) -> int:
    """Requests that may join; rows that have finished but are still in the running batch count as running."""
    return min(s.config.max_running_requests - len(s.running_batch), s.slots.num_free)


def prefill_batch(s: Scheduler, chosen: list[Request]) -> Batch:
    """Slots, pages and host ids for the chosen requests."""
    s.kv.extend(chosen, s.config.stream_interval)
    for r in chosen:
        r.is_retracted = False
        if not r.cached_counted:
            r.cached_tokens, r.cached_counted = r.prefix_len, True
            s.counters.cached_tokens += r.prefix_len
        s.counters.prompt_tokens += r.extend_len
    slots = np.array([r.slot for r in chosen], np.intp)
    prefix = np.array([r.prefix_len for r in chosen], np.intp)
    extend = np.array([r.extend_len for r in chosen], np.intp)
    ids = [s.slots.tokens[r.slot, r.prefix_len : r.prefix_len + r.extend_len] for r in chosen]
    return Batch(
        mode=ForwardMode.EXTEND,
        requests=chosen,
        slots=slots,
        epochs=s.slots.epoch[slots],
        seq_lens=prefix + extend,
        extend_lens=extend,
        prefix_lens=prefix,
        input_ids=np.concatenate(ids),
        chunked=s.chunked,
        has_grammar=any(r.grammar is not None for r in chosen),
        return_logprob=any(r.return_logprob for r in chosen),
        output_details=batches.has_output_details(chosen),
        is_prefill_only=all(r.max_new_tokens == 0 for r in chosen),
    )


def mix_with_running(s: Scheduler, batch: Batch) -> None:
    """With mixed chunks: the running rows decode in the prefill's step, behind its rows, and an empty batch runs on."""
    running = s.running_batch
    if not s.config.enable_mixed_chunk or not len(running) or batch.return_logprob or running.return_logprob:
        return
    batches.drop_finished(s.slots, running)
    if s.config.overrun == "skip-known":
        skip_known(s, running)
    if not len(running) or not fits(s, running.slots):
        return
    s.reason("mixed: the running rows decode in the same step (%d)", len(running))
    prepare_for_decode(s, running)
    assert batch.extend_lens is not None
    assert batch.prefix_lens is not None
    batch.extend_lens = np.concatenate([batch.extend_lens, np.ones(len(running), np.intp)])
    batch.prefix_lens = np.concatenate([batch.prefix_lens, running.seq_lens - 1])
    batch.mode = ForwardMode.MIXED
    batch.num_decoding = len(running)
    batches.merge(batch, running)
    s.running_batch = batches.empty_batch(is_full=running.is_full)
