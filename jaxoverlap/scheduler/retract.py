"""Running requests that go back into the queue: for want of pages, for a higher priority, or at a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxoverlap.core import Request

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def take_back(s: Scheduler, request: Request, remaining: int) -> None:
    """Takes slot and pages from a request, and makes room for some steps of the `remaining` rows (SGLang's
    release_req). Its token in flight is dropped, and comes anew after its next prefill."""
    s.kv.release(request, insert=False)
    s.kv.evict_for(remaining * s.config.retract_decode_steps)


def requeue(s: Scheduler, request: Request) -> None:
    """To the end of the waiting queue."""
    request.is_retracted = True
    s.counters.retracted += 1
    s.enqueue(request)
