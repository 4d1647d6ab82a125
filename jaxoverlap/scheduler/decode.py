"""The decode batch: one more token for every running row, retraction where the pages do not suffice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Batch, FinishReason, ForwardMode, Request
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.results import finish_without_result
from jaxoverlap.scheduler.retract import requeue, take_back

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


class NewTokenRatio:
    """The share of its output cap that a running request is expected to use (SGLang's new_token_ratio): falls with
    every decode turn that fits, rises to what was seen when one does not."""

    def __init__(self, config: EngineConfig) -> None:
        self.initial = min(config.init_new_token_ratio * config.schedule_conservativeness, 1.0)
        self.lowest = self.initial * config.min_new_token_ratio_factor
        self.decay = (self.initial - self.lowest) / config.new_token_ratio_decay_steps
        self.value = self.initial

    def step(self) -> None:
        self.value = max(self.value - self.decay, self.lowest)

    def reset(self) -> None:
        self.value = self.initial

    def after_retraction(self, outputs: int, caps: int, rows: int, steps: int) -> None:
        self.value = min(1.0, (outputs + steps * rows) / (caps + 1))


def update_running_batch(s: Scheduler) -> None:
    """Drops what has finished, makes room, and prepares the running batch to decode; it may end up empty."""
    batch = s.running_batch
    rows = len(batch)
    batches.drop_finished(s.slots, batch)
    if not len(batch):
        batch.is_full = False
        s.reason(
            "every running row had ended: nothing to run, and batch_is_full is off only now (waiting: %d)",
            len(s.waiting),
        )
        return
    if fits(s, batch.slots):
        s.new_token_ratio.step()
    else:
        retract_decode(s, batch)
    if s.config.overrun == "skip-known":
        skip_known(s, batch)
    if len(batch) < rows:
        batch.is_full = False
    if len(batch):
        s.reason("no prefill: the running rows decode (%d)", len(batch))
        prepare_for_decode(s, batch)


def fits(s: Scheduler, slots: np.ndarray) -> bool:
    """Whether one more step of these rows has its pages, after evicting what may be evicted."""
    need = s.kv.tokens_for_verify(slots, s.config.verify_reserve) if s.is_speculative else s.kv.tokens_for_decode(slots)
    s.kv.evict_for(need)
    return s.kv.pages.available_tokens >= need


def retract_decode(s: Scheduler, batch: Batch) -> None:
    """Takes rows out until the rest fits: fewest outputs first, among equals the longest prompt; at least one goes
    and one stays. If that one does not fit alone, it is aborted."""
    order = list(range(len(batch)))
    if not s.is_speculative:
        outputs, prompts = s.slots.output_len[batch.slots], s.slots.prompt_len[batch.slots]
        order.sort(key=lambda i: (outputs[i], -prompts[i]), reverse=True)
    victims: list[Request] = []
    while len(order) > 1 and (not victims or not fits(s, batch.slots[order])):
        victim = batch.requests[order.pop()]
        victims.append(victim)
        take_back(s, victim, len(order))
    failed: Request | None = None
    if len(order) == 1 and s.chunked is not None and not fits(s, batch.slots[order]):
        victims.append(batch.requests[order.pop()])  # the prompt under way has the pages, and gives them back in time
        take_back(s, victims[-1], 0)
    if len(order) == 1 and not fits(s, batch.slots[order]):
        failed = batch.requests[order.pop()]
        s.kv.release(failed, insert=False)
    batches.keep_rows(batch, np.array(order, np.intp))
    slots = batch.slots
    s.new_token_ratio.after_retraction(
        int(s.slots.output_len[slots].sum()),
        int(s.slots.max_new[slots].sum()),
        len(slots),
        s.config.retract_decode_steps,
    )
    if failed is not None:
        message = f"out of KV cache: {s.max_total_tokens} tokens do not hold this request beside what is locked"
        finish_without_result(s, failed, FinishReason("abort", message=message, status_code=500))
        s.reason("%s is aborted: the pool does not hold its next token", failed.rid)
    if victims:
        s.reason("the next step's KV did not fit: %s put back", ", ".join(r.rid for r in victims))
    for victim in victims:
        s.row("retracted", victim)
        requeue(s, victim)


def skip_known(s: Scheduler, batch: Batch) -> None:
    """Leaves out rows whose result in flight is known to be their last: they reach their cap with it."""
    in_flight = slots_in_flight(s)
    slots = batch.slots
    more = s.slots.output_len[slots] + in_flight[slots] < s.slots.max_new[slots]
    if not more.all():
        s.reason("no step for %d rows whose last token is in flight", len(slots) - int(more.sum()))
        batches.keep_rows(batch, np.flatnonzero(more))


def prepare_for_decode(s: Scheduler, batch: Batch) -> None:
    """A place for the next token (with speculation: for the next runs) of each row."""
    batch.mode = ForwardMode.DECODE
    batch.extend_lens = batch.prefix_lens = batch.input_ids = batch.chunked = None
    batch.num_decoding = 0
    if s.is_speculative:
        s.kv.verify(batch.slots, s.config.verify_reserve)
        batch.seq_lens = known_lengths(s, batch)
    else:
        s.kv.decode(batch.slots)
        batch.seq_lens = batch.seq_lens + 1


def known_lengths(s: Scheduler, batch: Batch) -> np.ndarray:
    """intp [B], each row's length as the host knows it before a verify step. The normal loop knows the true one; the
    overlap loop, like SGLang's, the length that went into the row's last verify step: the device has the true one."""
    table, slots = s.slots, batch.slots
    committed = table.prompt_len[slots] + table.output_len[slots] - 1
    if s.config.disable_overlap_schedule:
        return committed
    verifying = bool(s.result_queue) and s.result_queue[-1][0].mode.is_decode
    in_flight = slots_in_flight(s)[slots] & verifying
    return np.where(in_flight, committed, table.verify_len[slots])


def slots_in_flight(s: Scheduler) -> np.ndarray:
    """bool [rows of the slot table]: the slot's request is in the launch whose result is still to come."""
    out = np.zeros(len(s.slots.epoch), bool)
    for launch, _ in s.result_queue:
        out[launch.slots[s.slots.epoch[launch.slots] == launch.epochs]] = True
    return out
