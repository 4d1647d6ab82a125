"""When not to overlap (SGLang's is_disable_overlap_for_batch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxoverlap.core import Batch, Launch

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
    assert s.last_launch is not None
    live = counts_as_prefill(s, batch) and counts_as_prefill(s, s.last_batch)
    launched = counts_as_prefill(s, batch) and counts_as_prefill(s, s.last_launch)
    if live != launched:
        s.reason(
            "the batch launched last was %sa prefill, its live object %s: strict_aliasing is %s",
            "" if launched else "not ",
            "is" if live else "is not",
            s.config.strict_aliasing,
        )
    decision = live if s.config.strict_aliasing else launched
    if decision and s.watch is not None:
        s.watch.cause("consecutive prefill")
    if decision:
        s.reason("no overlap: a prefill behind a prefill%s", " (on any rank)" if s.config.dp_size > 1 else "")
    return decision


def counts_as_prefill(s: Scheduler, batch: Batch | Launch) -> bool:
    """With DP a rank's batch counts as what any rank runs, by the synced flag."""
    return batch.is_extend_in_batch if s.config.dp_size > 1 else batch.mode.is_extend


def needs_grammar_sync(s: Scheduler, batch: Batch) -> bool:
    """A verify step with a grammar row: its masks need the tokens of the result in flight. Its drafts do not, which
    `speculative_grammar_overlap` makes use of."""
    needed = s.is_speculative and batch.has_grammar and batch.mode.is_decode and len(s.result_queue) > 0
    needed = needed and not s.config.speculative_grammar_overlap
    if needed and s.watch is not None:
        s.watch.cause("grammar")
    if needed:
        s.reason("no overlap: a verify step with a grammar row")
    return needed
