"""Housekeeping when nothing is left to do (SGLang's on_idle)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxoverlap.scheduler.audit import check_leaks

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def on_idle(s: Scheduler) -> None:
    s.note("idle")  # also in a bubble: nothing was composed, but requests wait
    if len(s.running_batch) or s.chunked is not None or s.result_queue or s.waiting or s.grammars.pending:
        return
    check_leaks(s)
    s.new_token_ratio.reset()
