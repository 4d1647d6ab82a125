"""How much prefill a step may take (SGLang's PrefillAdder): budgets over the KV pool, the step and its chunk, estimated
from what the host knows; results in flight are not in it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Request
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.policy import priority
from jaxoverlap.scheduler.retract import take_back

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


class AddResult(enum.Enum):
    CONTINUE = enum.auto()
    NO_TOKEN = enum.auto()  # the KV pool is spoken for
    OTHER = enum.auto()  # this batch is long enough


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
        self.total_offset: float = mixed + sum(map(self._offset, running.requests))
        self.cur_offset = mixed
        self.req_states: list[tuple[float, int]] | None = None

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
            take_back(s, r, remaining)
            s.row("retracted", r)
        batches.keep_rows(s.running_batch, np.flatnonzero(keep))
        self.preempted += victims
        return True
