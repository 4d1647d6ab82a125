"""Telling callers (SGLang's stream_output): every `stream_interval` tokens of a streaming request, and at the end."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Launch, Output, Request
from jaxoverlap.scheduler.finish import may_begin_stop

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


_output = partial(tuple.__new__, Output)  # from a tuple of its fields, without a Python call


def stream_output(s: Scheduler, launch: Launch, told: np.ndarray | None = None) -> None:
    """`told`: indices of the launch's rows that have something to tell, by default all. A retracted row is told its
    unchanged count, a row that had finished before is not told again."""
    table = s.slots
    rows = table.rows(launch.slots, launch.epochs)
    if rows.all_live and rows.streams_none:
        return
    counts = table.output_len[rows.slots]
    tokens = table.last_tokens(rows, counts)
    requests, live = launch.requests, rows.live
    if told is not None or not (rows.all_live and rows.streams_each):
        due = ~live | table.stream[rows.slots] & on_beat(counts, table.stream_interval[rows.slots])
        some = np.flatnonzero(due) if told is None else told[due[told]]
        requests, live, counts, tokens = [requests[i] for i in some], live[some], counts[some], tokens[some]
    outputs = map(_output, zip(requests, counts.tolist(), repeat(False), tokens.tolist()))
    if rows.all_live and rows.by_hand is None:
        s.outputs.extend(outputs)
        return
    for is_live, output in zip(live.tolist(), outputs):
        if not is_live:
            tell_left(s, output.request)
        elif not (output.request.params.stop and may_begin_stop(s, output.request)):
            s.outputs.append(output)


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
