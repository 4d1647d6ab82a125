"""Who runs this turn (SGLang's get_next_batch_to_run): prefill first, else decode; with DP, in step with the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxoverlap.core import Batch, Fact, ForwardMode, Launch, Sync
from jaxoverlap.scheduler import batches
from jaxoverlap.scheduler.decode import update_running_batch
from jaxoverlap.scheduler.intake import ABORTED, merge_last
from jaxoverlap.scheduler.logprobs import input_spans
from jaxoverlap.scheduler.masks import fill_masks, known_masks
from jaxoverlap.scheduler.prefill import get_new_batch_prefill
from jaxoverlap.scheduler.results import finish_without_result

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler

Composing = Generator[Sync, Any, "Batch | None"]
MODES = list(ForwardMode)


def get_next_batch_to_run(s: Scheduler) -> Composing:
    abort_chunked(s)
    if s.chunked is not None and s.chunked.extend_len:
        stash_chunked(s)
    if s.last_batch is not None and s.last_batch.mode.is_extend:
        rows = len(s.last_batch)
        batches.drop_finished(s.slots, s.last_batch, exclude=(s.chunked, s.last_batch.chunked))
        if len(s.last_batch) < rows:
            s.running_batch.is_full = False
            s.reason(
                "rows of the last prefill do not go on to decode (%d): batch_is_full is off", rows - len(s.last_batch)
            )
        merge_last(s)
    if s.running_batch.is_prefill_only:
        batches.drop_finished(s.slots, s.running_batch)
        if not len(s.running_batch):
            s.running_batch.is_full = False

    batch = get_new_batch_prefill(s)
    if batch is not None and len(s.running_batch):
        s.reason("prefill first: the running rows wait (%d)", len(s.running_batch))
    synced = False
    if s.config.dp_size > 1 and s.is_speculative:
        batch = yield from sync_batch(s, batch)
        synced = batch is not None
    if batch is None and len(s.running_batch) and not s.running_batch.is_prefill_only:
        update_running_batch(s)
        batch = s.running_batch if len(s.running_batch) else None
    if s.config.dp_size > 1 and not synced:
        batch = yield from sync_batch(s, batch)
    return batch


def abort_chunked(s: Scheduler) -> None:
    """Carries out an abort that found its request in the middle of its prompt."""
    if s.chunked_to_abort and s.chunked is not None:
        s.kv.release(s.chunked, insert=False)
        finish_without_result(s, s.chunked, ABORTED)
        s.reason("abort of %s, found in the middle of its prompt", s.chunked.rid)
        s.chunked = None
    s.chunked_to_abort = False


def stash_chunked(s: Scheduler) -> None:
    """The chunk launched last goes into the tree now, before its result is known."""
    assert s.chunked is not None
    s.kv.cache_unfinished(s.chunked)
    s.chunked.prefix_len += s.chunked.extend_len
    s.chunked.extend_len = 0


def sync_batch(s: Scheduler, batch: Batch | None) -> Composing:
    """Tells the other ranks what this one composed, and writes their common picture on the batch. A rank without work
    gets an idle batch when another has tokens."""
    table = yield Sync(facts(s, batch))
    tokens = table[:, Fact.NUM_TOKENS]
    if batch is None and tokens.max() > 0:
        batch = batches.idle_batch()
        s.reason("idle batch: nothing to run here, but %d tokens on other ranks", int(tokens.sum()))
    if batch is not None:
        batch.is_extend_in_batch = bool(table[:, Fact.IS_EXTEND].any())
        batch.is_grammar_in_batch = bool(table[:, Fact.HAS_GRAMMAR].any())
        batch.global_num_tokens = tuple(tokens.tolist())
    return batch


def facts(s: Scheduler, batch: Batch | None) -> np.ndarray:
    """int64 [1, len(Fact)]"""
    if batch is None:
        return np.array([[0, 0, 1, 0, 0, MODES.index(ForwardMode.IDLE), 1, 0, s.has_work]], np.int64)
    tokens = int(batch.extend_lens.sum()) if batch.extend_lens is not None else len(batch)
    extends = batch.mode.is_extend
    mode = MODES.index(batch.mode)
    return np.array(
        [[tokens, len(batch), not extends, extends, 0, mode, not extends, batch.has_grammar, True]], np.int64
    )


def snapshot(s: Scheduler, batch: Batch) -> Launch:
    """The batch as it is launched now. Takes the page-table entries that changed since the last launch along."""
    s.counters.launches += 1
    verifies = s.is_speculative and batch.mode.is_decode
    if verifies:  # masks follow from the drafts, but for the toy grammars of the traces, which know them all
        delay_sample = batch.has_grammar and s.config.speculative_algorithm != "EAGLE"
    else:
        delay_sample = batch.has_grammar and not s.config.disable_overlap_schedule and not s.is_speculative
    launch = Launch(
        number=s.counters.launches,
        mode=batch.mode,
        requests=batch.requests,
        slots=batch.slots,
        epochs=batch.epochs,
        seq_lens=batch.seq_lens,
        extend_lens=batch.extend_lens,
        prefix_lens=batch.prefix_lens,
        input_ids=batch.input_ids,
        num_decoding=batch.num_decoding,
        page_writes=s.slots.take_page_writes(),
        delay_sample=delay_sample,
        chunked=batch.chunked,
        return_logprob=batch.return_logprob,
        output_details=batch.output_details,
        input_spans=input_spans(batch),
        is_prefill_only=batch.is_prefill_only,
        is_extend_in_batch=batch.is_extend_in_batch,
        is_grammar_in_batch=batch.is_grammar_in_batch,
        global_num_tokens=batch.global_num_tokens,
    )
    drafts_early = verifies and len(s.result_queue) > 0  # only with speculative_grammar_overlap: no mask is known yet
    if batch.has_grammar and (not delay_sample or (verifies and not drafts_early)):
        launch = dataclasses.replace(launch, mask=fill_masks(s, launch))
    elif batch.has_grammar and not verifies and s.config.delay_sampling == "when-needed":
        mask = known_masks(s, launch)
        if mask is not None:
            launch = dataclasses.replace(launch, delay_sample=False, mask=mask)
            s.counters.sampling_not_delayed += 1
    s.counters.sampling_delayed += launch.delay_sample
    s.last_launch = launch
    return launch
