"""When not to overlap (SGLang's is_disable_overlap_for_batch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxoverlap.core import Batch

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def is_disable_overlap_for_batch(s: Scheduler, batch: Batch | None) -> bool:
    """True: the last result is handled before this batch is launched. Never changes who is in the batch."""
    return batch is not None and (is_consecutive_prefill(s, batch) or needs_grammar_sync(s, batch))


def is_consecutive_prefill(s: Scheduler, batch: Batch) -> bool:
    """A prefill behind a prefill, with the switch on: the first one's tokens go out before the second is launched.

    SGLang reads the last batch's live object, which composing may have turned into a decode batch by now, or whose
    synced flag this turn's exchange has overwritten; `strict_aliasing=False` reads what was launched.
    """
    if not s.config.disable_consecutive_prefill_overlap or s.last_batch is None:
        return False
    last = s.last_batch if s.config.strict_aliasing else s.last_launch
    assert last is not None
    if s.config.dp_size > 1:
        return batch.is_extend_in_batch and last.is_extend_in_batch
    return batch.mode.is_extend and last.mode.is_extend


def needs_grammar_sync(s: Scheduler, batch: Batch) -> bool:
    """A verify step with a grammar row: its masks need the tokens of the result in flight."""
    return s.is_speculative and batch.has_grammar and batch.mode.is_decode and len(s.result_queue) > 0
