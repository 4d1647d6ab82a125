"""Admission: which waiting requests prefill this turn, and how much of each (SGLang's get_new_batch_prefill and
PrefillAdder). The budgets are estimates over the KV pool, from what the host knows: results in flight are not in it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Batch, ForwardMode, Request
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.decode import fits, prepare_for_decode
from jaxoverlap.scheduler.policy import priority

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


class AddResult(enum.Enum):
    CONTINUE = enum.auto()
    NO_TOKEN = enum.auto()  # the KV pool is spoken for
    OTHER = enum.auto()  # this batch is long enough


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
        ids = context_ids(request)
        s.kv.match(request, ids[: len(ids) - 1])
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
        r.is_retracted = True
        s.counters.retracted += 1
        s.enqueue(r)
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


def context_ids(request: Request) -> np.ndarray:
    """int32, prompt and the outputs so far: what a request without a slot has to prefill."""
    return np.concatenate([request.prompt_ids, request.kept_ids]) if len(request.kept_ids) else request.prompt_ids


class PrefillAdder:
    def __init__(self, s: Scheduler) -> None:
        config, running = s.config, s.running_batch
        self.s = s
        self.page_size = config.page_size
        self.clip = config.clip_max_new_tokens
        self.chosen: list[Request] = []
        self.preempted: list[Request] = []
        self.chunked: Request | None = None
        mixed = len(running) if config.enable_mixed_chunk else 0
        self.rem_input = config.max_prefill_tokens - mixed
        self.rem_chunk = config.chunked_prefill_size - mixed if config.chunked_prefill_size > 0 else None
        self.total_offset: float = mixed + float(self._running_offsets(running).sum())
        self.cur_offset = mixed
        self.req_states: list[tuple[float, int]] | None = None

    def _running_offsets(self, running: Batch) -> np.ndarray:
        left = np.array([r.max_new_tokens - r.output_len for r in running.requests], np.int64)
        return np.minimum(left, self.clip) * self.s.new_token_ratio.value

    def _offset(self, request: Request) -> float:
        return min(request.max_new_tokens - request.output_len, self.clip) * self.s.new_token_ratio.value

    @property
    def rem_total(self) -> float:
        return self.s.kv.available_and_evictable - self.total_offset

    @property
    def cur_rem(self) -> int:
        return self.s.kv.available_and_evictable - self.cur_offset

    def state(self) -> AddResult:
        if self.rem_total <= 0 or self.cur_rem <= 0:
            self.s.reason("the KV pool is promised away: batch_is_full")
            return AddResult.NO_TOKEN
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            self.s.reason("the step has all the prompt tokens it may have")
            return AddResult.OTHER
        return AddResult.CONTINUE

    def _charge(self, tokens: int, max_new: int) -> None:
        tokens = self.s.kv.ceil_page(tokens)
        self.total_offset += tokens + max_new + self.page_size
        self.cur_offset += tokens
        self.rem_input -= tokens
        if self.rem_chunk is not None:
            self.rem_chunk -= tokens

    def add_chunked(self, request: Request) -> Request | None:
        """The next chunk of a prompt that is under way; it goes on whatever the budget. Returns it while unfinished.

        Where SGLang would run out of memory (a mixed batch's decode rows took what the prompt was admitted with), the
        chunk shrinks to what there is, or waits a turn for the running rows.
        """
        assert self.rem_chunk is not None
        left = request.prompt_len + request.output_len - request.prefix_len
        tokens = min(self.rem_chunk, int(self.rem_total))
        if tokens <= 0:
            tokens = self.rem_chunk
        free = self.s.kv.available_and_evictable // self.page_size * self.page_size
        if free < self.s.kv.ceil_page(min(left, tokens)):
            tokens = free
        if tokens <= 0:
            self.s.reason("%s waits in the middle of its prompt: no page is free", request.rid)
            return request
        truncated = left > tokens
        request.extend_len = min(left, tokens)
        self.s.reason("%s goes on with its prompt: %d of %d tokens left", request.rid, request.extend_len, left)
        self.chosen.append(request)
        self._charge(request.extend_len, 0 if truncated else min(request.max_new_tokens, self.clip))
        return request if truncated else None

    def add(self, request: Request) -> AddResult:
        if request.params.ignore_eos and self.s.config.disable_radix_cache:
            return self._add_ignoring_eos(request)
        kv = self.s.kv
        total = (
            request.extend_len + min(max(request.max_new_tokens - request.output_len, 0), self.clip) + self.page_size
        )
        if total >= self.rem_total:
            self._refuse(request, total)
            return AddResult.NO_TOKEN
        tokens = kv.ceil_page(request.extend_len)
        if self.rem_chunk is None and tokens >= self.rem_input and self.chosen:
            self.s.reason("%s waits: %d tokens, max_prefill_tokens leaves %d", request.rid, tokens, self.rem_input)
            return AddResult.OTHER
        kv.lock(request.last_node)  # what the request needs can no longer be evicted: less is left
        admitted = total < self.rem_total and self._take(request, tokens)
        if not admitted:
            no_token = total >= self.rem_total
            if no_token:
                self._refuse(request, total)
            kv.unlock(request.last_node)
            return AddResult.NO_TOKEN if no_token else AddResult.OTHER
        return self.state()

    def _refuse(self, request: Request, total: int) -> None:
        left = max(int(self.rem_total), 0)
        self.s.reason(
            "%s waits: it may need %d tokens of KV, %d are not promised: batch_is_full", request.rid, total, left
        )

    def _take(self, request: Request, tokens: int) -> bool:
        if self.rem_chunk is None or tokens <= self.rem_chunk:
            self.s.reason("%s joins: %d tokens, %d cached", request.rid, request.extend_len, request.prefix_len)
            self.chosen.append(request)
            self._charge(tokens, min(request.max_new_tokens, self.clip))
            return True
        chunk = self.rem_chunk // self.page_size * self.page_size
        if chunk <= 0:
            self.s.reason("%s waits: the step has all the prompt tokens it may have", request.rid)
            return False
        self.s.reason("%s joins with a chunk of %d of its %d tokens", request.rid, chunk, request.extend_len)
        request.extend_len = chunk
        self.chosen.append(request)
        self.chunked = request
        self._charge(chunk, 0)
        return True

    def _add_ignoring_eos(self, request: Request) -> AddResult:
        """Without a tree and with a known length: simulates that every running request runs to its cap."""
        tokens = self.s.kv.ceil_page(request.extend_len)
        if tokens > min(self.cur_rem, self.rem_total) or not self._lasts(request, tokens):
            self.s.reason("%s waits: the pool would run out before the running ones end: batch_is_full", request.rid)
            return AddResult.NO_TOKEN
        if self.rem_chunk is not None and tokens > self.rem_chunk and self.rem_chunk <= 0:
            return AddResult.OTHER
        self.s.kv.lock(request.last_node)
        self._take(request, tokens)
        return self.state()

    def _lasts(self, request: Request, tokens: int) -> bool:
        """Whether the pool suffices at every moment when a request ends and gives its pages back."""
        if self.req_states is None:
            rows = [request, *self.s.running_batch.requests, *self.chosen]
            self.req_states = sorted(filter(None, map(self._to_cap, rows)), key=lambda x: x[0])
        elif (own := self._to_cap(request)) is not None:
            at = next((i for i, x in enumerate(self.req_states) if own[0] <= x[0]), max(len(self.req_states) - 1, 0))
            self.req_states.insert(at, own)
        free, freed = self.cur_rem - tokens, 0
        for i, (left, held) in enumerate(self.req_states):
            rows_left = len(self.req_states) - i
            if free + freed - left * rows_left <= rows_left:
                return False
            freed += held
        return True

    def _to_cap(self, r: Request) -> tuple[float, int] | None:
        ratio = 1.0 if r.params.ignore_eos else self.s.new_token_ratio.value
        left = r.max_new_tokens * ratio - r.output_len
        return (left, r.prompt_len + r.output_len) if left > 0 else None

    def preempt_for(self, request: Request) -> bool:
        """Puts running requests of clearly lower priority back into the queue, if that makes enough room."""
        s = self.s
        sign = -1 if s.config.schedule_low_priority_values_first else 1
        own = sign * priority(request, s.config)
        live = [r for r in s.running_batch.requests if not r.finished]
        victims: list[Request] = []
        missing = request.extend_len + min(request.max_new_tokens, self.clip) - self.rem_total
        for r in sorted(live, key=lambda r: (sign * priority(r, s.config), -r.arrival)):
            if own - sign * priority(r, s.config) <= s.config.priority_scheduling_preemption_threshold:
                break
            victims.append(r)
            missing -= self._offset(r)
            if missing <= 0:
                break
        if not victims or missing > 0:
            return False
        s.reason("%s has priority over %s", request.rid, ", ".join(r.rid for r in victims))
        remaining = len(s.running_batch)
        keep = np.array([r not in victims for r in s.running_batch.requests])
        for r in (r for r in s.running_batch.requests if r in victims):
            self.total_offset -= self._offset(r)
            remaining -= 1
            s.kv.release(r, insert=False)
            s.kv.evict_for(remaining * s.config.retract_decode_steps)
            if s.observer is not None:
                s.observer.row("retracted", r, [])
        batches.keep_rows(s.running_batch, np.flatnonzero(keep))
        self.preempted += victims
        return True


def prefill_batch(s: Scheduler, chosen: list[Request]) -> Batch:
    """Slots, pages and host ids for the chosen requests."""
    s.kv.extend(chosen, s.config.stream_interval)
    for r in chosen:
        r.is_retracted = False
        if not r.cached_counted:
            r.cached_tokens, r.cached_counted = r.prefix_len, True
            s.counters.cached_tokens += r.prefix_len
        s.counters.prompt_tokens += r.extend_len
    slots = np.array([r.slot for r in chosen], np.int32)
    prefix = np.array([r.prefix_len for r in chosen], np.int32)
    extend = np.array([r.extend_len for r in chosen], np.int32)
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
        is_prefill_only=all(r.max_new_tokens == 0 for r in chosen),
    )


def mix_with_running(s: Scheduler, batch: Batch) -> None:
    """With mixed chunks: the running rows decode in the prefill's step, behind its rows, and an empty batch runs on."""
    running = s.running_batch
    if not s.config.enable_mixed_chunk or not len(running) or batch.return_logprob or running.return_logprob:
        return
    batches.drop_finished(s.slots, running)
    if not len(running) or not fits(s, running.slots):
        return
    s.reason("mixed: the running rows decode in the same step (%d)", len(running))
    prepare_for_decode(s, running)
    assert batch.extend_lens is not None
    assert batch.prefix_lens is not None
    batch.extend_lens = np.concatenate([batch.extend_lens, np.ones(len(running), np.int32)])
    batch.prefix_lens = np.concatenate([batch.prefix_lens, running.seq_lens - 1])
    batch.mode = ForwardMode.MIXED
    batch.num_decoding = len(running)
    batches.merge(batch, running)
    s.running_batch = batches.empty_batch(is_full=running.is_full)
