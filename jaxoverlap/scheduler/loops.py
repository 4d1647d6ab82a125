"""The two event loops, side by side. Each function is one turn: a generator that yields what it needs and is answered
by a driver (core.Turn), so that tests can turn it by hand and several ranks can be turned together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxoverlap.core import Drafts, Launch, Sample, Turn, Wait
from jaxoverlap.scheduler.compose import get_next_batch_to_run, snapshot
from jaxoverlap.scheduler.idle import on_idle
from jaxoverlap.scheduler.intake import process_input_requests
from jaxoverlap.scheduler.masks import draft_masks, fill_masks
from jaxoverlap.scheduler.overlap import is_disable_overlap_for_batch
from jaxoverlap.scheduler.results import pop_and_process, process_batch_result

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def event_loop_normal(s: Scheduler) -> Turn:
    yield from process_input_requests(s)
    if s.watch is not None:
        s.watch.mark("receive")
    if s.is_paused:
        return
    batch = yield from get_next_batch_to_run(s)
    s.cur_batch = batch
    if batch is None and s.watch is not None:
        s.watch.cause("grammar" if s.grammars.pending else "no work")
    if batch is not None:
        launch = snapshot(s, batch)
        handle = yield launch
        if launch.delay_sample:
            yield from sample_late(s, launch, handle)
        result = yield Wait(launch, handle)
        process_batch_result(s, launch, result)
    else:
        on_idle(s)
    s.last_batch = batch


def event_loop_overlap(s: Scheduler) -> Turn:
    yield from process_input_requests(s)
    if s.watch is not None:
        s.watch.mark("receive")
    if s.is_paused:
        return
    batch = yield from get_next_batch_to_run(s)
    s.cur_batch = batch
    if batch is None and s.watch is not None:
        s.watch.cause("grammar" if s.grammars.pending else "no work")
    disable_overlap = is_disable_overlap_for_batch(s, batch)
    if disable_overlap:
        s.counters.overlap_disabled += 1
        yield from pop_and_process(s)
    if batch is not None:
        launch = snapshot(s, batch)
        handle = yield launch
        s.result_queue.append((launch, handle))
        s.note("push", launch.number)
    if s.last_batch is not None:
        if not disable_overlap:
            yield from pop_and_process(s)
    elif batch is None:
        on_idle(s)
    if batch is not None and launch.delay_sample:
        yield from sample_late(s, launch, handle)
    s.last_batch = batch


def sample_late(s: Scheduler, launch: Launch, handle: Any) -> Turn:
    """The rest of a step with grammar rows, under masks that were not known at its launch. Those of a verify step
    follow from its drafts, for which the host waits, as SGLang's does."""
    mask = draft_masks(s, launch, (yield Drafts(launch, handle))) if s.is_speculative else fill_masks(s, launch)
    if s.watch is not None:
        s.watch.mark("mask")
    yield Sample(launch, handle, mask)
