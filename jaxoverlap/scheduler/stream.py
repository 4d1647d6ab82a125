"""Telling callers (SGLang's stream_output): every `stream_interval` tokens of a streaming request, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Launch, Output, Request
from jaxoverlap.scheduler.finish import may_begin_stop

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def stream_output(s: Scheduler, launch: Launch, rows: np.ndarray) -> None:
    """`rows`: indices of the launch's rows that have something to tell. A retracted row is told its unchanged count,
    a row that had finished before is not told again."""
    slots = launch.slots[rows]
    counts = s.slots.output_len[slots]
    left = s.slots.epoch[slots] != launch.epochs[rows]  # finished or retracted: its columns may be another's
    due = s.slots.stream[slots] & on_beat(counts, s.slots.stream_interval[slots])
    told = left | due
    for i, count, has_left in zip(rows[told].tolist(), counts[told].tolist(), left[told].tolist()):
        r = launch.requests[i]
        if has_left:
            tell_left(s, r)
        elif not (r.params.stop and may_begin_stop(s, r)):
            s.outputs.append(Output(r, count, False))


def tell_left(s: Scheduler, r: Request) -> None:
    """For a request that has left its slot: its end, once; or, retracted, what it has."""
    if r.finished:
        if not r.finished_output:
            r.finished_output = True
            s.outputs.append(Output(r, r.shown_len, True))
        return
    interval = r.params.stream_interval or s.config.stream_interval
    if r.stream and on_beat(r.output_len, interval) and not (r.params.stop and may_begin_stop(s, r)):
        s.outputs.append(Output(r, r.output_len, False))


def on_beat(tokens: np.ndarray | int, interval: np.ndarray | int) -> np.ndarray:
    """SGLang tells the first token, then every `interval`-th after it."""
    return np.logical_or(np.equal(interval, 1), np.equal(np.mod(tokens, interval), 1))
